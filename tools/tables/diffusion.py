"""Tables of DEQ-DDIM: sampling chains and inversion."""

from __future__ import annotations

from typing import Any

from tools.tables.frame import markdown, power, read, table

MODELS = {"digits": "digits, 0.16M", "ddpm_mnist": "MNIST"}
WAYS = {
    "sequential": "sequential", "plain": "plain", "plain, window": "plain, window of T/5",
    "anderson": "Anderson", "anderson per timestep": "Anderson per timestep", "broyden": "Broyden",
}  # fmt: skip
SCHEMES = {
    "release": "release: Anderson per timestep, cold, phantom gradient, rate 0.005",
    "release, rate 0.02": "release with rate 0.02",
    "phantom": "`phantom`: the same gradient, states kept, rate 0.005",
    "implicit": "`implicit`: exact gradient by a reverse sweep, rate 0.02",
    "implicit, parallel adjoint": "`implicit`, adjoint in windows of 10",
    "sequential": "`sequential`: chain and autograd, rate 0.02",
}


@table("diffusion/sampling")
def diffusion_sampling() -> str:
    """Return rounds, evaluations, time and error of sampling, by the length of the chain."""
    rows = {(r["model"], r["way"], r["steps"]): r for r in read("diffusion/sampling")["rows"]}
    lengths = sorted({steps for _, _, steps in rows})

    def cell(row: dict[str, Any]) -> str:
        error = f", {power(row['error'])}" if row["error"] else ""
        return f"{row['rounds']} / {row['evaluations']:,} / {row['seconds']:.1f} s{error}"

    return markdown(
        ["model", "way", *(f"T = {steps}" for steps in lengths)],
        [
            [model, shown, *(cell(rows[name, way, steps]) for steps in lengths)]
            for name, model in MODELS.items()
            for way, shown in WAYS.items()
        ],
    )


@table("diffusion/inversion")
def diffusion_inversion() -> str:
    """Return the error of inversion by scheme, and the time to the error of the release."""
    header = ["scheme", "Adam steps", "seconds", "summed squared error", "PSNR", "rounds",
              "seconds to the release's error"]  # fmt: skip
    rows = {row["scheme"]: row for row in read("diffusion/inversion")["rows"]}
    full = rows["release"]["seconds_to_release"]
    lines = []
    for scheme, shown in SCHEMES.items():
        row = rows[scheme]
        spent = row["seconds_to_release"]
        reached = "not reached" if spent is None else f"{spent:.0f}"
        if spent is not None and scheme != "release":
            reached += f" ({spent / full:.2f}x)"
        numbers = [str(row["adam_steps"]), f"{row['seconds']:.0f}", f"{row['sse']:.4f}"]
        lines.append([shown, *numbers, f"{row['psnr']:.1f}", f"{row['rounds']:,}", reached])
    return markdown(header, lines)
