"""Tables about many processes: collectives, traffic and memory by the unit of sharding."""

from __future__ import annotations

from tools.tables.frame import markdown, read, table


@table("simulated_scale")
def simulated_scale() -> str:
    """Return what rank 0 of several sends and holds in a training step, by the unit of sharding."""
    header = ["Ranks", "Model", "Gradient", "Unit", "All-gathers", "Reduce-scatters", "GB received",
              "Weights", "Adam", "Gathered", "Rest", "Peak"]  # fmt: skip
    lines = []
    for row in read("simulated_scale")["rows"]:
        calls = row["collectives"]
        peak = dict.fromkeys(("parameters", "optimiser", "gradients", "sharding", "activations"), 0)
        peak |= row["peak_bytes"]
        kept = [peak["parameters"], peak["optimiser"]]
        passing = [
            peak["sharding"] + peak["gradients"],
            peak["activations"],
            sum(peak.values()),
        ]
        lines.append(
            [
                *(str(row[name]) for name in ("world", "model", "gradient", "unit")),
                *(str(calls.get(name, 0)) for name in ("all-gather", "reduce-scatter")),
                f"{sum(row['bytes_received'].values()) / 1e9:.2f}",
                *(f"{size / 1e6:.1f}" for size in kept),
                *(f"{size / 1e6:.0f}" for size in passing),
            ]
        )
    return markdown(header, lines)


@table("recorded/collectives")
def collectives() -> str:
    """Return the collectives of one training step in each of two processes."""
    header = ["Unit", "Gradient", "All-gathers forward, backward", "Reduce-scatters",
              "All-reduces of the library"]  # fmt: skip
    return markdown(
        header,
        [
            [
                row["unit"],
                row["gradient"],
                ", ".join(map(str, row["all_gathers"])),
                str(row["reduce_scatters"]),
                str(row["all_reduces"]),
            ]
            for row in read("recorded/collectives")["rows"]
        ],
    )
