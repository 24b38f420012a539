"""Tables of what the papers report and what this repository found: reproduced, not run, differs."""

from __future__ import annotations

from typing import NamedTuple

from deq_zoo.family import find_family, preset_summaries
from deq_zoo.preset import find_preset
from tools.tables.fields import psnr
from tools.tables.frame import markdown, read, table

_NOT_RUN = {
    "mdeq": "needs CIFAR-10 or ImageNet, and hours to weeks of an accelerator",
    "flow": "needs FlyingChairs, FlyingThings3D and Sintel, and days of an accelerator",
    "diffusion": "needs the authors' weights for CIFAR-10, 35.7M parameters",
    "inr": "needs the authors' files of images, sound and video, and an accelerator",
    "ignn": "needs PPI and hours of an accelerator; 20 epochs here are too short to compare",
    "lm": "needs WikiText-103 or FineWeb, and days of an accelerator",
    "reason": "needs the public puzzles, and hours to days of an accelerator",
}


class Finding(NamedTuple):
    """A claim of a paper beside what was found here."""

    claim: str
    published: str
    here: str
    state: str  # reproduced, not run, differs
    why: str = ""


def _findings(family: str, *measured: Finding) -> str:
    """Return the table of a family: its networks, what was measured, what was not run."""
    rows = [
        Finding(
            "values and gradients of the authors' programs on the same weights",
            "",
            "equal to rounding",
            "reproduced",
            f"tests/zoo/{family}/test_golden.py",
        ),
        *measured,
        *_targets(family),
    ]
    header = ["Claim", "Published", "Here", "State", "How, or why not"]
    return markdown(header, [[r.claim, r.published, r.here, r.state, r.why] for r in rows])


def _targets(family: str) -> list[Finding]:
    """Return the published results of the presets, none of which was run whole."""
    presets = {name: find_preset(name) for name in preset_summaries(find_family(family))}
    return [
        Finding(
            f"`{name}`: {preset.target.metric}; {preset.target.source}",
            f"{preset.target.value:g}",
            "",
            "not run",
            _NOT_RUN[family],
        )
        for name, preset in presets.items()
        if preset.target is not None
    ]


@table()
def reproduced_mdeq() -> str:
    """Return the findings about MDEQ."""
    return _findings("mdeq")


@table()
def reproduced_flow() -> str:
    """Return the findings about DEQ-Flow."""
    return _findings("flow")


@table("diffusion/sampling")
def reproduced_diffusion() -> str:
    """Return the findings about DEQ-DDIM."""
    rows = read("diffusion/sampling")["rows"]
    rounds = [
        row["rounds"]
        for row in rows
        if row["steps"] == 1000 and row["way"] in ("plain", "anderson")
    ]
    return _findings(
        "diffusion",
        Finding(
            "a chain of 1000 steps is solved in few parallel rounds",
            "15, their budget",
            f"{min(rounds)} to {max(rounds)}",
            "reproduced",
            "two small denoisers, relative residual 1e-4",
        ),
    )


@table("inr/psnr-images", "inr/psnr-video")
def reproduced_inr() -> str:
    """Return the findings about DEQ-INR."""

    def pair(part: str) -> str:
        return " against ".join(f"{psnr(part, model):.1f}" for model in ("DEQ-SIREN", "SIREN"))

    return _findings(
        "inr",
        Finding(
            "between pixels a DEQ-SIREN is ahead of a SIREN with as many parameters, dB",
            "ahead",
            pair("psnr-images"),
            "reproduced",
            "other photographs, width 128",
        ),
        Finding(
            "the same on a video, dB",
            "ahead",
            pair("psnr-video"),
            "differs",
            "150 steps in place of 10,000: a DEQ-SIREN learns slowly at first",
        ),
    )


@table("ignn/chains")
def reproduced_ignn() -> str:
    """Return the findings about IGNN."""
    rows = {(r["model"], r["length"]): r["median"] for r in read("ignn/chains")["rows"]}
    return _findings(
        "ignn",
        Finding(
            "information travels along chains of 100 nodes, accuracy in %",
            "as a figure",
            f"{rows['IGNN', 100]:.0f}; from the published start "
            f"{rows['IGNN, published start of W', 100]:.1f}",
            "reproduced",
            "from W = identity",
        ),
    )


@table()
def reproduced_lm() -> str:
    """Return the findings about language models."""
    return _findings("lm")


@table()
def reproduced_reason() -> str:
    """Return the findings about reasoners."""
    return _findings("reason")
