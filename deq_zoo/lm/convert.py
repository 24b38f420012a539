"""Weights of the authors' DEQ transformers, in and out.

They differ from ours in names, in tensors that are there twice (what input and output share), in
1x1 convolutions for linear maps (the original), and in the order of queries, keys and values: the
redesigned model has them head by head, the original and all of ours one kind after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from deq_zoo.errors import CheckpointError
from deq_zoo.lm.model import DEQTransformer, LMConfig

_SAID_TWICE = {
    r"crit\.out_layers\.(\d+)\.weight": r"word_emb.emb_layers.\1.weight",
    r"crit\.out_projs\.([1-9]\d*)\.weight": r"word_emb.emb_projs.\1.weight",
}
_NAMES = {  # theirs: ours; the original has no index of blocks
    r"word_emb\.emb_layers\.(\d+)\.weight": r"vocabulary.tables.\1",
    r"word_emb\.emb_projs\.(\d+)\.weight": r"vocabulary.projections.\1",
    r"crit\.out_projs\.0\.weight": r"vocabulary.head",
    r"crit\.out_layers\.(\d+)\.bias": r"vocabulary.biases.\1",
    r"crit\.(cluster_\w+)": r"vocabulary.\1",
    r"(?:injection|inject_conv)\.(\w+)": r"injection.\1",
    r"func\.dec_attn\.(\d+)\.ln1\.(\w+)": r"func.blocks.\1.norm1.\2",
    r"func\.dec_attn\.(\d+)\.ln2\.(\w+)": r"func.blocks.\1.attention.norm.\2",
    r"func\.dec_attn\.(\d+)\.(\w.*)": r"func.blocks.\1.attention.\2",
    r"func\.pos_ff\.(\d+)\.ln\.(\w+)": r"func.blocks.\1.norm2.\2",
    r"func\.pos_ff\.(\d+)\.(\w.*)": r"func.blocks.\1.feed_forward.\2",
}
_BLOCKLESS = re.compile(r"func\.(dec_attn|pos_ff)\.(?!\d)")
_TRIPLES = re.compile(r"(injection\.|func\.blocks\.\d+\.attention\.qkv_net\.)")


def from_authors(config: LMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of the authors as one of ours, without the vocabulary's words.

    Args:
        config: the shape of the model.
        state: of their `deq-lm` for the redesigned, of `deq-seq` for the original.
    """
    _check_design(config, state)
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if key == "pos_emb.inv_freq":  # a formula, stored with less precision than it has
            continue
        twin = _renamed(key, _SAID_TWICE)
        if twin is not None:
            if twin not in state or not torch.equal(state[twin], value):
                raise CheckpointError(
                    f"{key} should equal {twin}: input and output share them in this model"
                )
            continue
        ours = _renamed(_BLOCKLESS.sub(r"func.\1.0.", key), _NAMES)
        if ours is None:
            raise CheckpointError(f"{key} is no weight of a DEQ transformer of the authors")
        value = value.detach().clone()
        if config.design == "original" and value.dim() == 3:
            value = value.squeeze(2)
        if config.design == "redesigned" and _TRIPLES.match(ours):
            if len(value) != 3 * config.width:
                raise CheckpointError(
                    f"{key} has {len(value)} rows, a model of width {config.width} has "
                    f"{3 * config.width}: the weights are of another size"
                )
            value = _by_kind(value, config.heads)
        found[ours] = value
    return found


def to_authors(model: DEQTransformer) -> dict[str, Tensor]:
    """The weights of a model as the authors' programs read them."""
    config = model.config
    if config.design == "convergent":
        raise CheckpointError("the convergent design is ours: the authors' programs lack its leak")
    state: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        if key.endswith("_extra_state"):
            continue
        value = value.detach().clone()
        if config.design == "redesigned" and _TRIPLES.match(key):
            value = _by_head(value, config.heads)
        for name in _their_names(key, config):
            state[name] = value.clone()
    like = state["crit.cluster_bias"]
    power = torch.arange(0, config.width, 2, dtype=torch.float32) / config.width
    state["pos_emb.inv_freq"] = (10000**-power).to(like)
    if config.design == "original":
        return {name: _as_convolution(name, value) for name, value in state.items()}
    return state


def _check_design(config: LMConfig, state: Mapping[str, Tensor]) -> None:
    if config.design == "convergent":
        raise CheckpointError(
            "the convergent design is ours, and the authors have no weights of it: take a preset "
            "of the original or the redesigned one"
        )
    for design, mark in {"original": "inject_conv.", "redesigned": "injection."}.items():
        if design != config.design and any(key.startswith(mark) for key in state):
            raise CheckpointError(
                f"these are weights of the {design} design, the preset is of the {config.design}: "
                "take lm-wt103-seq for the original, lm-wt103-final for the redesigned"
            )


def _renamed(key: str, names: Mapping[str, str]) -> str | None:
    for pattern, name in names.items():
        found = re.fullmatch(pattern, key)
        if found:
            return found.expand(name)
    return None


def _their_names(key: str, config: LMConfig) -> list[str]:
    """Where the authors keep a tensor of ours: in two places if input and output share it."""
    part, _, rest = key.partition(".")
    if part == "vocabulary":
        kind, _, i = rest.partition(".")
        return {
            "tables": [f"word_emb.emb_layers.{i}.weight", f"crit.out_layers.{i}.weight"],
            "projections": [f"word_emb.emb_projs.{i}.weight"]
            + ([f"crit.out_projs.{i}.weight"] if i != "0" else []),
            "head": ["crit.out_projs.0.weight"],
            "biases": [f"crit.out_layers.{i}.bias"],
        }.get(kind, [f"crit.{rest}"])
    original = config.design == "original"
    if part == "injection":
        return [f"{'inject_conv' if original else 'injection'}.{rest}"]
    _, index, rest = rest.split(".", 2)
    at = "" if original else f"{index}."
    for ours, theirs in (
        ("attention.norm.", f"dec_attn.{at}ln2."),
        ("attention.", f"dec_attn.{at}"),
        ("feed_forward.", f"pos_ff.{at}"),
        ("norm1.", f"dec_attn.{at}ln1."),
        ("norm2.", f"pos_ff.{at}ln."),
    ):
        if rest.startswith(ours):
            return [f"func.{theirs}{rest.removeprefix(ours)}"]
    raise CheckpointError(f"the authors' models have no place for {key}")


def _as_convolution(name: str, value: Tensor) -> Tensor:
    attention = name.startswith("func.dec_attn.") and "_net.weight" in name
    return value[..., None] if attention or name == "inject_conv.weight" else value


def _by_kind(rows: Tensor, heads: int) -> Tensor:
    """From [q k v] of each head to all q, all k, all v."""
    by_kind: Tensor = rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return by_kind


def _by_head(rows: Tensor, heads: int) -> Tensor:
    by_head: Tensor = rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    return by_head
