"""Tables of what the papers report and what this repository found: reproduced, not run, differs."""

from __future__ import annotations

from typing import NamedTuple

from deq_zoo.family import find_family, preset_summaries
from deq_zoo.preset import find_preset
from tools.tables.fields import best_psnr, best_steps, psnr, signals
from tools.tables.frame import markdown, read, table

#: Why results were not repeated, by family; a preset may have a reason of its own.
_NOT_RUN = {
    "mdeq": "needs CIFAR-10 or ImageNet, and hours to weeks of an accelerator",
    "flow": "needs FlyingChairs, FlyingThings3D and Sintel, and days of an accelerator",
    "diffusion": "needs the authors' weights for CIFAR-10, 35.7M parameters",
    "inr": "needs the authors' images or video, and an accelerator",
    "inr-audio": "only 2 s at width 128, 500 steps, were run: see the sound above",
    "ignn": "needs PPI and hours of an accelerator; 20 epochs here are too short to compare",
    "lm": "needs WikiText-103 or FineWeb, and days of an accelerator",
    "reason": "needs the public puzzles, and hours to days of an accelerator",
}
#: PSNR of a SIREN in the TorchDEQ paper, Tab. deq-inr.
_SIREN = {"inr-nature": 25.17, "inr-video": 26.52, "inr-audio": 48.44}


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


def _published(preset: str) -> float:
    """Return the published result of a preset."""
    target = find_preset(preset).target
    assert target is not None
    return target.value


def _targets(family: str) -> list[Finding]:
    """Return the published results of the presets, none of which was run whole."""
    presets = {name: find_preset(name) for name in preset_summaries(find_family(family))}
    return [
        Finding(
            f"`{name}`: {preset.target.metric}; {preset.target.source}",
            f"{preset.target.value:g}",
            "",
            "not run",
            _NOT_RUN.get(name, _NOT_RUN[family]),
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


@table("inr/psnr-images", "inr/psnr-audio", "inr/psnr-video")
def reproduced_inr() -> str:
    """Return the findings about DEQ-INR."""
    names = ("DEQ-SIREN", "SIREN")

    def published(preset: str) -> str:
        return f"{_published(preset):.2f} against {_SIREN[preset]:.2f}"

    def pair(part: str, after: str = "psnr", ours: str = "DEQ-SIREN") -> str:
        return f"{psnr(part, ours, after):.1f} against {psnr(part, 'SIREN', after):.1f}"

    best = " against ".join(f"{best_psnr('psnr-images', name):.1f}" for name in names)
    pictures = signals("psnr-images")
    ahead = [
        picture
        for picture in pictures
        if best_psnr("psnr-images", names[0], picture) > best_psnr("psnr-images", names[1], picture)
    ]
    return _findings(
        "inr",
        Finding(
            "between pixels a DEQ-SIREN is ahead of a SIREN with as many parameters, dB",
            published("inr-nature"),
            f"{pair('psnr-images')} after 300 steps; {best}, each stopped at its best",
            "differs",
            f"the SIREN is best at step {best_steps('psnr-images', 'SIREN')}, then overfits; both "
            f"stopped by the test pixels, the DEQ-SIREN is ahead on {len(ahead)} of "
            f"{len(pictures)} photographs, which are not the paper's; width 128",
        ),
        Finding(
            "the same on a video, dB",
            published("inr-video"),
            f"{pair('psnr-video')}; with warm starts, equal time, "
            f"{pair('psnr-video', 'psnr_equal_time', 'DEQ-SIREN, warm')}",
            "differs",
            "150 steps in place of 10,000: a DEQ-SIREN learns slowly at first",
        ),
        Finding(
            "the same on a sound, dB",
            published("inr-audio"),
            f"{pair('psnr-audio')}; equal time, {pair('psnr-audio', 'psnr_equal_time')}",
            "reproduced",
            "the direction: 2 s, width 128, 500 steps",
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
