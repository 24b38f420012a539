"""Numbers in the sentences of the families' pages; see `sentences.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from statistics import mean
from typing import Any

from deq_zoo.preset import find_preset
from tools.tables.fields import best_steps, mean_seconds_to_best, psnr
from tools.tables.frame import read
from tools.tables.published import parameters
from tools.tables.sentences import claim, fraction, phrases


@phrases("deq_zoo/mdeq/README.md")
def _mdeq() -> Iterator[str]:
    yield f"grey images, with {parameters('mdeq-quick')} parameters"


@phrases("deq_zoo/flow/README.md")
def _flow_models() -> Iterator[str]:
    found = read("recorded/flow_quick_evaluations")
    (warps,) = (row for row in found["rows"] if row["set"].startswith("test warps"))
    error = warps["errors"][found["evaluations"].index(6)]
    yield f"it ends at an error of {error:.1f} pixels on warps of photographs"
    card = read("card:flow-nano")
    yield (f"({card.parameters / 1e6:.2f}M parameters, {card.size / 1e6:.2f} MB in half precision)")
    (run,) = card.runs
    yield f"from one run of {run.minutes:.0f} minutes on one core"
    yield f"With the {read('pretrained_flow/flow-nano')['evaluations']} evaluations of training"


@phrases("deq_zoo/flow/README.md")
def _flow_rivals() -> Iterator[str]:
    (tv_l1,) = (row for row in read("flow/classical")["rows"] if row["method"] == "TV-L1")
    nano = read("pretrained_flow/flow-nano")["errors"]
    ahead = all(tv_l1[name] < nano[name] for name in ("middlebury", "chairs"))
    yield claim(
        ahead and tv_l1["motorcycle"] > nano["motorcycle"],
        f"TV-L1 is ahead on Middlebury ({tv_l1['middlebury']:.2f}) and on FlyingChairs "
        f"({tv_l1['chairs']:.2f}), and behind on the stereo pair ({tv_l1['motorcycle']:.2f})",
    )


@phrases("deq_zoo/flow/README.md")
def _flow_videos() -> Iterator[str]:
    errors = {
        (row["reuse"], row["most"]): row["aepe"]
        for row in read("pretrained_flow/flow-nano")["reuse"]
        if not row["tolerance"]
    }
    apart = round(errors[True, 4], 2) - round(errors[False, 9], 2)
    yield f"Four evaluations from the last state come within {apart:.2f} pixels of nine from zero"


@phrases("deq_zoo/flow/README.md")
def _flow_training() -> Iterator[str]:
    far = [row["middlebury"] for row in read("flow/train")["rows"]]
    no_motion = next(r for r in read("flow/classical")["rows"] if r["method"] == "no motion")
    yield claim(
        min(far) > no_motion["middlebury"],
        f"(24 on Middlebury: {min(far):.1f} to {max(far):.1f}, worse than no motion)",
    )
    solves = {
        (row["tolerance"], row["reuse"]): f"{row['nfe']:.1f}, {row['aepe']:.2f}".split(", ")
        for row in read("flow/reuse")["rows"]
        if row["way"] == "correction, near starts"
    }
    (few, error), (many, worse) = solves[2.0, True], solves[2.0, False]
    yield f"those solves take {few} evaluations (error {error}) instead of {many} ({worse})"
    (few, error), (many, worse) = solves[1.0, True], solves[1.0, False]
    yield f"at 1 pixel {few} evaluations ({error}) against {many} ({worse})"


@phrases("deq_zoo/inr/README.md")
def _inr() -> Iterator[str]:
    part = "psnr-images"
    share = mean_seconds_to_best(part, "SIREN") / mean_seconds_to_best(part, "DEQ-SIREN")
    yield f"a SIREN is at its best after {best_steps(part, 'SIREN')} steps and then overfits"
    yield f"in {fraction(share)} of the time"
    warm = psnr("psnr-video", "DEQ-SIREN, warm", "psnr_equal_time")
    siren = psnr("psnr-video", "SIREN", "psnr_equal_time")
    yield (
        f"takes it from {psnr('psnr-video', 'DEQ-SIREN'):.1f} to {warm:.1f} dB in the same time "
        "(one seed)"
    )
    yield claim(warm < siren, f"which is still behind the {siren:.1f} dB of a SIREN")


@phrases("deq_zoo/ignn/README.md")
def _ignn() -> Iterator[str]:
    task: Any = find_preset(read("card:ignn-chains").preset).task
    yield f"Every solve makes its {task.deq.f_max_iter} evaluations"


@cache
def _chain(model: str, way: str) -> dict[str, Any]:
    """Return the longest chain that was sampled in one way."""
    rows = [r for r in read("diffusion/sampling")["rows"] if (r["model"], r["way"]) == (model, way)]
    found: dict[str, Any] = max(rows, key=lambda row: int(row["steps"]))
    return found


@phrases("deq_zoo/diffusion/README.md")
def _diffusion() -> Iterator[str]:
    rounds = [
        row["rounds"]
        for row in read("diffusion/sampling")["rows"]
        if row["steps"] == 1000 and row["way"] != "sequential"
    ]
    yield f"a chain of 1000 steps shrinks to between {min(rounds)} and {max(rounds)}"
    window, step_by_step = _chain("digits", "plain, window"), _chain("digits", "sequential")
    yield f"({window['seconds']:.1f} s instead of {step_by_step['seconds']:.1f} s)"
    (sequential,) = (
        row for row in read("diffusion/inversion")["rows"] if row["scheme"] == "sequential"
    )
    yield f"the fastest on one thread, in {sequential['rounds']:,} rounds"
    (large,) = read("diffusion/memory")["rows"]
    yield (
        f"took {large['seconds']:.0f} s and {large['peak_gb']:.2f} GB at the peak, of which "
        f"{large['resident_before_gb']:.2f} GB were there before"
    )


@phrases("deq_zoo/diffusion/README.md")
def _diffusion_sizes() -> Iterator[str]:
    size = read("card:diffusion-digits").parameters / 1e6
    yield f"| diffusion-digits | 5,000 digits of MNIST, 28 x 28 | {size:.2f}M, v"


def _beside_the_cheapest(rule: str) -> float:
    """Return the time of an update by a gradient, relative to the cheapest; means over seeds."""
    rows = read("reason/gradients")["rows"].items()
    times: dict[str, float] = {
        name: mean(row["ms_per_step"] for key, row in rows if f", {name}, " in key)
        for name in ("one step", rule)
    }
    return times[rule] / times["one step"]


@phrases("deq_zoo/reason/README.md")
def _reason_sizes() -> Iterator[str]:
    yield f"a model of `reason-maze13` ({read('card:reason-mazes').parameters:,} parameters)"
    quick: Any = find_preset("reason-quick")
    yield (
        f"`reason-quick` has {parameters('reason-quick')} parameters and makes {quick.total_steps} "
        "updates"
    )
    (nine,) = read("reason/nine")["rows"].values()
    minutes = nine["curve"][-1]["seconds"] / 60
    size = f"`reason-sudoku9`, {nine['parameters']:,} parameters"
    yield f"{size}, for {minutes:.0f} processor minutes"


@phrases("deq_zoo/reason/README.md")
def _reason_gradients() -> Iterator[str]:
    theirs = read("published/gradients")["values"]
    yield f"{theirs['last two steps']} to {theirs['last round']} % on Sudoku-Extreme"
    yield (
        f"a reversible update needs {_beside_the_cheapest('reversible'):.1f} times the time of "
        f"the cheapest one, an implicit one {_beside_the_cheapest('implicit'):.1f} times."
    )
    rows = sorted(read("reason/gradients")["rows"].items())
    left = [row["residual"] for key, row in rows if ", implicit, " in key]
    yield f"(relative residual {left[0]:.1f} and {left[1]:.1f})"


@phrases("deq_zoo/reason/README.md")
def _reason_restarts() -> Iterator[str]:
    every = read("reason/halting")["rows"]["all restarts"]
    each = every["evaluations"] / every["starts"]
    yield f"{every['starts']} solves of {each:.0f} evaluations for every puzzle"
    hrm, trm = (read(f"target:reason-{name}-sudoku").value for name in ("hrm", "trm"))
    yield f"HRM then solves {hrm:.1f} % of its test puzzles, TRM {trm:.1f} %."
