"""Tables of DEQ-INR and IGNN."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from statistics import mean

from tools.tables.frame import markdown, read, table

SIGNALS = {
    "psnr-images": "between the pixels of 6 photographs, width 128, 300 steps",
    "psnr-audio": "2 s of Bach, width 128, 500 steps of 16,384 samples",
    "psnr-video": "16 frames of a video, width 256, 150 steps of 8,192 points",
}
FIELDS = ("DEQ-SIREN", "DEQ-MFN (Gabor)", "SIREN")
GRAPHS = {"MUTAG": "MUTAG", "PROTEINS": "PROTEINS", "cora": "Cora", "pubmed": "Pubmed"}
NETS = {
    "GCN": "GCN", "GAT": "GAT", "IGNN, projection": "projection",
    "IGNN, projection and clipped spectral norm": "with clipped spectral norm",
    "IGNN, clipped spectral norm": "that norm alone",
}  # fmt: skip


def psnr(part: str, field: str, after: str = "psnr") -> float:
    """Return the mean PSNR of a field after equal steps, or time (`after="psnr_equal_time"`)."""
    value: float = read(f"inr/{part}")["summary"][field][after]
    return value


def best_psnr(part: str, field: str, signal: str | None = None) -> float:
    """Return the mean over runs of the best PSNR in the course of each, for one signal or all."""
    return mean(value for _, _, value in _best(part, field, signal))


def best_steps(part: str, field: str) -> str:
    """Return the first and the last step at which a run of a field had its best PSNR."""
    steps = [step for step, _, _ in _best(part, field)]
    return f"{min(steps)} to {max(steps)}"


def mean_seconds_to_best(part: str, field: str) -> float:
    """Return the mean over runs of the processor time to the best PSNR."""
    return mean(seconds for _, seconds, _ in _best(part, field))


def _best(part: str, field: str, signal: str | None = None) -> list[tuple[int, float, float]]:
    """Return step, seconds and PSNR of the best point in the course of every run."""
    courses = [
        run["course"]
        for run in read(f"inr/{part}")["rows"].values()
        if run["model"] == field and signal in (None, run["signal"])
    ]
    best = [max(course, key=lambda point: float(point[2])) for course in courses]
    return [(step, seconds, value) for step, seconds, value in best]


def signals(part: str) -> list[str]:
    """Return the names of the signals of a part."""
    return list(dict.fromkeys(run["signal"] for run in read(f"inr/{part}")["rows"].values()))


@table(*(f"inr/{part}" for part in SIGNALS))
def inr_psnr() -> str:
    """Return the PSNR of fields after equal steps, after equal time, and at its best."""

    def cell(part: str, field: str) -> str:
        ends = (psnr(part, field), psnr(part, field, "psnr_equal_time"), best_psnr(part, field))
        return " / ".join(f"{value:.1f}" for value in ends)

    return markdown(
        ["PSNR in dB", *FIELDS],
        [[shown, *(cell(part, field) for field in FIELDS)] for part, shown in SIGNALS.items()],
    )


@table("inr/speed")
def inr_speed() -> str:
    """Return the time of a training step relative to torchdeq 0.1.0."""
    rivals = {"0.1.0, as released": "of the release", "0.1.0, our f": "of the release with our `f`"}
    rows = [
        [name.partition(",")[0], f"{row['points']:,}", str(row["width"]),
         *(f"{row['seconds']['ours'] / row['seconds'][rival]:.2f}" for rival in rivals)]
        for name, row in read("inr/speed")["rows"].items()
    ]  # fmt: skip
    return markdown(["step", "points", "width", *rivals.values()], rows)


@table("recorded/inr_quick")
def inr_quick() -> str:
    """Return the PSNR of the two fields of inr-quick."""
    found = read("recorded/inr_quick")
    names = [f"{name} (step {step})" for name, step in found["steps"].items()]
    return markdown(
        ["PSNR in dB, each field at its own best", *names],
        [
            [f"{row['pixels']} pixels", *(f"{row[name]:.2f}" for name in found["steps"])]
            for row in found["rows"]
        ],
    )


def percent(value: float) -> str:
    """Return a share of some thousand samples, computed in float32: 56.0499996 is 56.05."""
    return str(Decimal(f"{value:.4f}").quantize(Decimal("0.1"), ROUND_HALF_UP))


@table("ignn/chains")
def ignn_chains() -> str:
    """Return the accuracy along chains by their length."""
    rows = {(row["model"], row["length"]): row["median"] for row in read("ignn/chains")["rows"]}
    names, lengths = (list(dict.fromkeys(values)) for values in zip(*rows, strict=True))
    shown = {"IGNN": "IGNN, W = identity at the start"}
    return markdown(
        ["chains of", *map(str, lengths[:-1]), f"{lengths[-1]} nodes"],
        [
            [shown.get(str(n), str(n)), *(percent(rows[str(n), int(k)]) for k in lengths)]
            for n in names
        ],
    )


@table("ignn/stability")
def ignn_accuracy() -> str:
    """Return the accuracy over seeds, median and worst."""
    rows = {(row["set"], row["model"]): row for row in read("ignn/stability")["rows"]}

    def cell(name: str, net: str) -> str:
        row = rows[name, net]
        return f"{percent(row['median'])} ({percent(row['worst'])})"

    return markdown(
        ["set", *NETS.values()],
        [[shown, *(cell(name, net) for net in NETS)] for name, shown in GRAPHS.items()],
    )


@table("ignn/layout")
def ignn_layout() -> str:
    """Return time and memory of a training step by layout."""
    return markdown(
        ["layout", "time, relative to ours", "peak memory beyond that before training"],
        [
            [row["layout"], f"{row['times_ours']:.1f}", f"{row['peak_mb']:.0f} MB"]
            for row in read("ignn/layout")["rows"]
        ],
    )
