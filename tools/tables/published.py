"""Tables of presets and networks with the numbers of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.tables.frame import markdown, read, table


def _presets(names: Sequence[str]) -> str:
    """Return names as code; of a-b-c and a-b-d the second is `-d`."""
    stem, _, _ = names[0].rpartition("-")
    siblings = "-" in stem and all(name.startswith(f"{stem}-") for name in names)
    short = [names[0], *(name.removeprefix(stem) for name in names[1:])]
    return ", ".join(f"`{name}`" for name in (short if siblings else names))


def _numbers(row: dict[str, Any], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in row["published"] or ())


@table("published/flow")
def flow_presets() -> str:
    """Return the presets of DEQ-Flow."""
    header = ["preset", "trains on", "evaluations, states, gradient steps",
              "published (Sintel clean AEPE)"]  # fmt: skip
    return markdown(
        header,
        [
            [_presets(row["presets"]), row["trains on"], row["solve"], _numbers(row, 2)]
            for row in read("published/flow")["rows"]
        ],
    )


@table("published/inr")
def inr_presets() -> str:
    """Return the presets of DEQ-INR."""
    words = ("field", "data", "steps", "solve")
    rows = [
        [
            _presets(row["presets"]),
            *(row[name] for name in words),
            f"{_numbers(row, 2)} dB" if row["published"] else "",
        ]
        for row in read("published/inr")["rows"]
    ]
    return markdown(["preset", "field", "data", "steps, points", "solve", "paper"], rows)


@table("published/lm")
def lm_presets() -> str:
    """Return the presets of the language models."""
    return markdown(
        ["preset", "design", "parameters", "published"],
        [
            [
                _presets(row["presets"]),
                row["design"],
                row["parameters"],
                _numbers(row, 2 if "attractor" in row["design"] else 1),
            ]
            for row in read("published/lm")["rows"]
        ],
    )


@table("published/mdeq")
def mdeq_networks() -> str:
    """Return the networks of the MDEQ paper."""
    nets = read("published/mdeq")["rows"]
    lines = {
        "data": [net["data"] for net in nets],
        "channels": [", ".join(map(str, net["channels"])) for net in nets],
        "parameters": [f"{net['parameters']:,}" for net in nets],
        "of the paper": [net["parameters of the paper"] for net in nets],
        "weight norm": [net["weight norm"] for net in nets],
        "solver, evaluations": [net["solve"] for net in nets],
        "phantom gradient: steps, tau": [net["phantom"] for net in nets],
        "paper's top-1 (median of seeds)": [f"{_numbers(net, 1)} ({net['seeds']})" for net in nets],
    }
    header = ["", *(f"`{net['name']}`" for net in nets)]
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
