"""Tables of DEQ-Flow."""

from __future__ import annotations

from typing import Any

from tools.tables.frame import markdown, read, table

SETS = {"warps": "warps", "motorcycle": "motorcycle", "middlebury": "Middlebury",
        "chairs": "Chairs"}  # fmt: skip
CLASSICAL = {
    "no motion": "no motion",
    "TV-L1": "TV-L1 (scikit-image)",
    "iterative Lucas-Kanade": "iterative Lucas-Kanade (scikit-image)",
}
REUSED = {"correction": "correction", "correction, near starts": "with near starts"}


def _pixels(error: float) -> str:
    return f"{error:.{1 if error >= 10 else 2}f}"


def _errors(row: dict[str, Any]) -> list[str]:
    return [_pixels(row[name]) for name in SETS]


@table("flow/train", "flow/classical", "flow/budgets")
def flow_errors() -> str:
    """Return errors of trained models and classical methods on four sets."""
    classical = {row["method"]: row for row in read("flow/classical")["rows"]}
    lines = [[shown, "", *_errors(classical[name])] for name, shown in CLASSICAL.items()]
    steps = {row["way"]: row["steps"] for row in read("flow/train")["rows"]}
    first = set[str]()
    for row in read("flow/budgets")["rows"]:
        way, new = row["way"], row["way"] not in first
        first.add(way)
        word = " evaluations" if way == "correction" else ""
        updates = f"{steps[way]:,}" if new else ""
        lines.append([f"{way}, {row['nfe']}{word}", updates, *_errors(row)])
    return markdown(["method", "updates", *SETS.values()], lines)


@table("flow/nfe")
def flow_evaluations() -> str:
    """Return the error on warps by evaluations of f."""
    counts = (1, 2, 4, 8, 12, 24, 48)
    errors = {(row["way"], row["nfe"]): row["aepe"] for row in read("flow/nfe")["rows"]}
    return markdown(
        ["evaluations", *map(str, counts)],
        [
            [way, *(f"{errors[way, count]:.2f}" for count in counts)]
            for way in dict.fromkeys(way for way, _ in errors)
        ],
    )


@table("flow/reuse")
def flow_reuse() -> str:
    """Return errors along videos, from zero and from the state of the last pair."""
    counts = (1, 2, 4, 8, 12, 24)
    errors = {
        (row["way"], row["reuse"], row["most"]): row["aepe"]
        for row in read("flow/reuse")["rows"]
        if not row["tolerance"]
    }
    return markdown(
        ["model", "start", "1 evaluation", *map(str, counts[1:])],
        [
            [shown, "last pair" if reuse else "zero",
             *(f"{errors[way, reuse, count]:.2f}" for count in counts)]
            for way, shown in REUSED.items()
            for reuse in (False, True)
        ],
    )  # fmt: skip


@table("flow/memory")
def flow_memory() -> str:
    """Return the memory of a training step by gradient and evaluations."""
    rows = {(r["gradient"], r["steps"]): r for r in read("flow/memory")["rows"]}
    counts = sorted({steps for _, steps in rows})
    names = {"phantom, 1 step": "phantom gradient, 1 step", "implicit": "implicit",
             "unrolled": "unrolled"}  # fmt: skip
    return markdown(
        ["evaluations", *map(str, counts)],
        [
            [shown, *(f"{rows[name, n]['mb_beyond_the_encoders']:.0f} MB" for n in counts)]
            for name, shown in names.items()
        ],
    )


@table("recorded/flow_quick_evaluations")
def flow_quick_evaluations() -> str:
    """Return the errors of flow-quick by evaluations of f."""
    return _by_evaluations("flow_quick_evaluations")


@table("recorded/flow_nano_evaluations")
def flow_nano_evaluations() -> str:
    """Return the errors of flow-nano by evaluations of f."""
    return _by_evaluations("flow_nano_evaluations")


def _by_evaluations(part: str) -> str:
    found = read(f"recorded/{part}")
    return markdown(
        ["evaluations", *map(str, found["evaluations"])],
        [[row["set"], *(f"{error:.2f}" for error in row["errors"])] for row in found["rows"]],
    )


#: Sets of `benchmarks/pretrained_flow.py` in words.
WHOLE_FRAMES = {
    "identical": "one frame of 256 x 320 twice, mean of 3",
    "shift (1, 0)": "shifted by (1, 0)",
    "shift (3, -2)": "shifted by (3, -2)",
    "shift (6, 3)": "shifted by (6, 3)",
    "shift (-10, 6)": "shifted by (-10, 6)",
    "shift (16, 9)": "shifted by (16, 9)",
    "warps 64 x 96": "30 warps of 64 x 96",
    "warps 256 x 320": "6 warps of 256 x 320",
    "scenes 256 x 320": "12 scenes of 256 x 320",
    "motorcycle": "stereo pair at half size",
    "middlebury": "5 Middlebury pairs",
    "chairs": "6 FlyingChairs pairs",
}
_NANO = tuple(f"pretrained_flow/{name}" for name in ("no motion", "flow-quick", "flow-nano"))


@table(*_NANO)
def flow_nano() -> str:
    """Return errors on whole frames: no motion, the quick model, the pretrained one."""
    errors = [read(source)["errors"] for source in _NANO]
    names = ("no motion", "`flow-quick`", "`flow-nano`")
    rows = [
        [shown, *(_pixels(each[key]) for each in errors)] for key, shown in WHOLE_FRAMES.items()
    ]
    return markdown(["mean error in pixels", *names], rows)


@table("pretrained_flow/flow-nano")
def flow_nano_reuse() -> str:
    """Return errors along videos by evaluations, from zero and from the last pair."""
    rows = read("pretrained_flow/flow-nano")["reuse"]
    fixed = [row for row in rows if not row["tolerance"]]
    budgets = sorted({row["most"] for row in fixed})
    found = {(row["reuse"], row["most"]): row["aepe"] for row in fixed}
    lines = [
        [start, *(f"{found[carried, budget]:.2f}" for budget in budgets)]
        for start, carried in (("zero", False), ("the last pair", True))
    ]
    header = ["start", *map(str, budgets)]
    return markdown([*header[:-1], f"{header[-1]} evaluations"], lines)


@table("pretrained_flow/flow-quick", "pretrained_flow/flow-nano")
def flow_films() -> str:
    """Return what both models make of videos, from zero and from the last pair."""
    lines, at_rest = [], ""
    for name in ("flow-quick", "flow-nano"):
        found = read(f"pretrained_flow/{name}")
        for start, carried in (("zero", False), ("the last pair", True)):
            own = (0.0, found["evaluations"], carried)
            (clip,) = (r for r in found["reuse"] if (r["tolerance"], r["most"], r["reuse"]) == own)
            (film,) = (row for row in found["film"] if row["reuse"] == carried)
            at_rest = f"{film['grey_at_rest']:.2f}"
            synthetic = f"{_pixels(clip['aepe'])} ({clip['nfe']:g})"
            lines.append([f"`{name}`", start, synthetic, f"{film['grey']:.2f} ({film['nfe']:g})"])
    lines.append(["no motion", "", "", at_rest])
    header = ["model", "start", "synthetic videos, pixels", "a real film, grey levels"]
    return markdown(header, lines)
