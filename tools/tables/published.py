"""Tables of presets and networks: settings and sizes of ours, beside the numbers of the papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from deq_zoo.inr.duel import Duel
from deq_zoo.mdeq.config import NORM_SCOPES
from deq_zoo.preset import find_preset
from tools.tables.frame import markdown, read, table

#: What presets train on; a row of a table is named by the first of its presets.
_TRAINS_ON = {
    "flow-chairs-b": "FlyingChairs",
    "flow-things-b": "FlyingThings3D, after Chairs",
    "flow-sintel-b": "Sintel, KITTI, HD1K, Things",
    "flow-kitti-b": "KITTI",
    "flow-quick": "warped photographs of scikit-image",
    "flow-nano": "photographs in layers",
    "flow-smoke": "warped photographs of scikit-image",
    "inr-nature": "`data_div2k.npz`, `data_2d_text.npz`, or a folder of images",
    "inr-video": "a folder with a video",
    "inr-audio": "a folder with a wav",
    "inr-camera": "scikit-image",
    "inr-celeba": "`celeba_128_tiny.npy`",
    "inr-file": "`--set file=PATH`",
    "inr-gradient": "scikit-image; formulas or a silhouette",
    "inr-quick": "scikit-image",
    "inr-smoke": "synthetic",
}
_DESIGNS = {
    "lm-wt103-seq": "original, implicit gradient",
    "lm-wt103-seq-jr": "the same, regularised Jacobian",
    "lm-wt103-final": "redesigned, 12 unrolled steps",
    "lm-wt103-ours": "convergent",
    "lm-wt2-seq": "small ones on WikiText-2",
    "lm-wt2-attractor": "attractor on WikiText-2",
    "lm-wt2-attractor-muon": "the same, trained by Muon",
    "lm-fineweb-140m-attractor": "attractor as published, any text",
    "lm-reference": "attractor, Python's reference and docstrings",
    "lm-file": "attractor, any text",
    "lm-quick": "convergent, embedded text",
    "lm-smoke": "original, learns to count",
    "lm-smoke-attractor": "attractor, learns to count",
}
_FILTERS = {"siren_like": "DEQ-SIREN", "fourier": "DEQ-MFN (Fourier)", "gabor": "DEQ-MFN (Gabor)"}
_SOLVERS = {"broyden": "Broyden", "fixed_point_iter": "plain"}


def _presets(names: Sequence[str]) -> str:
    """Return names as code; of a-b-c and a-b-d the second is `-d`."""
    stem, _, _ = names[0].rpartition("-")
    siblings = "-" in stem and all(name.startswith(f"{stem}-") for name in names)
    short = [names[0], *(name.removeprefix(stem) for name in names[1:])]
    return ", ".join(f"`{name}`" for name in (short if siblings else names))


def _numbers(row: dict[str, Any], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in row["published"] or ())


def _shown(show: Callable[[str], str], names: Sequence[str]) -> str:
    """Return what a function says of some presets, once if it says the same of all."""
    return " / ".join(dict.fromkeys(map(show, names)))


@cache
def parameters(name: str) -> str:
    """Return the number of parameters of a preset, which is built without its values."""
    with torch.device("meta"):
        model = find_preset(name).task.build()
    return f"{sum(p.numel() for p in model.parameters()):,}"


def _slices(name: str) -> str:
    """Return evaluations, states and gradient steps of a flow."""
    deq = _task(name).deq
    (steps,) = deq.grad
    sparse = " (sparse correction)" if deq.n_states == 2 and steps > 1 else ""
    return f"{deq.f_max_iter}, {deq.n_states}, {steps}{sparse}"


def _task(name: str) -> Any:
    return find_preset(name).task


@table("published/flow")
def flow_presets() -> str:
    """Return the presets of DEQ-Flow."""
    header = ["preset", "trains on", "evaluations, states, gradient steps",
              "published (Sintel clean AEPE)"]  # fmt: skip
    rows = [
        [_presets(names), _TRAINS_ON[names[0]], _shown(_slices, names), _numbers(row, 2)]
        for row in read("published/flow")["rows"]
        for names in (row["presets"],)
    ]
    return markdown(header, rows)


def _field(name: str) -> str:
    task = _task(name)
    rival = " and SIREN" if isinstance(task, Duel) else ""
    size = f" ({parameters(name)})" if find_preset(name).target else ""
    return f"{_FILTERS[task.net.filter]} {task.net.width}{rival}{size}"


def _points(name: str) -> str:
    batch = _task(name).batch
    return f"{batch:,}" if batch else "all"


def _start(name: str) -> str:
    """Return whether steps start from the last states, or how they solve."""
    task = _task(name)
    if getattr(task, "warm", False):
        return "warm"
    exact = ", exact gradients" if task.deq.ift else ""
    states = f", {task.deq.n_states} states" if task.deq.n_states > 1 else ""
    return f"{task.deq.f_max_iter} evaluations{states}{exact}"


@table("published/inr")
def inr_presets() -> str:
    """Return the presets of DEQ-INR."""

    def steps(name: str) -> str:
        return f"{find_preset(name).steps:,}"

    rows = [
        [
            _presets(names),
            _shown(_field, names),
            _TRAINS_ON[names[0]],
            f"{_shown(steps, names)}; {_shown(_points, names)}",
            _shown(_start, names),
            f"{_numbers(row, 2)} dB" if row["published"] else "",
        ]
        for row in read("published/inr")["rows"]
        for names in (row["presets"],)
    ]
    return markdown(["preset", "field", "data", "steps; points", "solve", "paper"], rows)


@table("published/lm")
def lm_presets() -> str:
    """Return the presets of the language models."""
    rows = [
        [
            _presets(names),
            _DESIGNS[names[0]],
            _shown(parameters, names),
            _numbers(row, 2 if "attractor" in names[0] else 1),
        ]
        for row in read("published/lm")["rows"]
        for names in (row["presets"],)
    ]
    return markdown(["preset", "design", "parameters", "published"], rows)


def _scope(net: Any) -> str:
    return "all of f" if len(net.norm_scope) == len(NORM_SCOPES) else f"{net.norm_scope[0]} only"


@table("published/mdeq")
def mdeq_networks() -> str:
    """Return the networks of the MDEQ paper."""
    rows = read("published/mdeq")["rows"]
    names = [name for row in rows for name in row["presets"]]
    tasks = list(map(_task, names))
    lines = {
        "data": [{"cifar10": "CIFAR-10", "imagenet": "ImageNet"}[task.data] for task in tasks],
        "channels": [", ".join(map(str, task.net.channels)) for task in tasks],
        "parameters": list(map(parameters, names)),
        "of the paper": [row["parameters of the paper"] for row in rows],
        "weight norm": [_scope(task.net) for task in tasks],
        "solver, evaluations": [
            f"{_SOLVERS[task.deq.f_solver]}, {task.deq.f_max_iter}" for task in tasks
        ],
        "phantom gradient: steps, tau": [
            f"{', '.join(map(str, task.deq.grad))}, {task.deq.tau}" for task in tasks
        ],
        "paper's top-1 (median of seeds)": [f"{_numbers(row, 1)} ({row['seeds']})" for row in rows],
    }
    header = ["", *(f"`{row['name']}`" for row in rows)]
    return markdown(header, [[name, *cells] for name, cells in lines.items()])


@table("published/reason")
def reason_networks() -> str:
    """Return the networks of the reasoners."""
    nets = read("published/reason")["rows"]
    lines = {
        "shape": [f"`{net['shape']}`" for net in nets],
        "parameters": [f"{net['parameters']:,}" for net in nets],
        "width, blocks": [net["width"] for net in nets],
        "rounds, inner steps": [net["rounds"] for net in nets],
        "gradient through": [net["gradient"] for net in nets],
        "published exact answers, %": [_numbers(net, 1) for net in nets],
        "on": [net["on"] for net in nets],
    }
    header = ["", *(net["name"] for net in nets)]
    return markdown(header, [[name, *cells] for name, cells in lines.items()])
