"""Tables of DEQ-INR, IGNN and the reasoners."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

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


def psnr(part: str, field: str) -> float:
    """Return the mean PSNR of a field after equal steps."""
    value: float = read(f"inr/{part}")["summary"][field]["psnr"]
    return value


@table(*(f"inr/{part}" for part in SIGNALS))
def inr_psnr() -> str:
    """Return the PSNR of fields after equal steps and after equal time."""
    rows = []
    for part, shown in SIGNALS.items():
        found = read(f"inr/{part}")["summary"]
        values = [(found[name]["psnr"], found[name]["psnr_equal_time"]) for name in FIELDS]
        rows.append([shown, *(f"{steps:.1f} / {time:.1f}" for steps, time in values)])
    return markdown(["PSNR in dB", *FIELDS], rows)


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


def _percent(value: float) -> str:
    """Return a share of some thousand samples, computed in float32: 56.0499996 is 56.05."""
    return str(Decimal(f"{value:.4f}").quantize(Decimal("0.1"), ROUND_HALF_UP))


@table("ignn/stability")
def ignn_accuracy() -> str:
    """Return the accuracy over seeds, median and worst."""
    rows = {(row["set"], row["model"]): row for row in read("ignn/stability")["rows"]}

    def cell(name: str, net: str) -> str:
        row = rows[name, net]
        return f"{_percent(row['median'])} ({_percent(row['worst'])})"

    return markdown(
        ["set", *NETS.values()],
        [[shown, *(cell(name, net) for net in NETS)] for name, shown in GRAPHS.items()],
    )


@table("recorded/reason_halting")
def reason_halting() -> str:
    """Return exact answers and evaluations by the rule of halting."""
    return markdown(
        ["halting by", "exact, %", "evaluations for a puzzle, mean"],
        [
            [row["halt"], f"{row['exact']:.1f}", f"{row['evaluations']:.1f}"]
            for row in read("recorded/reason_halting")["rows"]
        ],
    )
