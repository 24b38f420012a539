"""What a finding is: a claim of a paper, what was found here, and the state of the claim."""

from __future__ import annotations

from typing import Any, NamedTuple

from deq_zoo.family import find_family, preset_summaries
from deq_zoo.preset import find_preset
from tools.tables.frame import markdown, read

#: Why results were not repeated, by family; a preset may have a reason of its own.
_NOT_RUN = {
    "mdeq": "needs CIFAR-10 or ImageNet, and hours to weeks of an accelerator",
    "flow": "needs FlyingChairs, FlyingThings3D and Sintel, and days of an accelerator",
    "diffusion": "needs the authors' weights for CIFAR-10, 35.7M parameters",
    "inr": "needs the authors' images or video, and an accelerator",
    "inr-audio": "only 2 s at width 128, 500 steps, were run: see the sound above",
    "ignn": "needs the paper's labels and hours of an accelerator; the labels at hand are OhmNet's",
    "lm": "needs WikiText-103 or FineWeb, and days of an accelerator",
    "reason": "needs the public puzzles, and hours to days of an accelerator",
}
#: Tests that compare values and gradients, where a family has more than `test_golden.py`.
_GOLDEN = {
    "lm": "tests/zoo/lm/test_golden.py, tests/zoo/lm/attractor/test_golden.py and "
    "test_training_golden.py",
}


class Finding(NamedTuple):
    """A claim of a paper beside what was found here."""

    claim: str
    published: str
    here: str
    state: str  # a verdict, or: not run, not published, not comparable
    why: str = ""


def verdict(*holds: bool) -> str:
    """Return the state of a claim that is a comparison, by whether it holds in each case here."""
    if all(holds):
        return "reproduced"
    return "in part" if 2 * sum(holds) >= len(holds) else "differs"


def findings(family: str, *measured: Finding) -> str:
    """Return the table of a family: its networks, what was measured, what was not run."""
    rows = [
        Finding(
            "values and gradients of the authors' programs on the same weights",
            "",
            "equal to rounding",
            "reproduced",
            _GOLDEN.get(family, f"tests/zoo/{family}/test_golden.py"),
        ),
        *measured,
        *_targets(family),
    ]
    header = ["Claim", "Published", "Here", "State", "How, or why not"]
    return markdown(header, [[r.claim, r.published, r.here, r.state, r.why] for r in rows])


def beside(part: str) -> Any:
    """Return published numbers that are no target of a preset, from a part of published.json."""
    return read(f"published/{part}")["values"]


def published(preset: str) -> float:
    """Return the published result of a preset."""
    value: float = read(f"target:{preset}").value
    return value


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
