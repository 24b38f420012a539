"""Weights of the authors' language models, in and out.

Those of attractors are in `attractor/convert.py`. The tensors of DEQ transformers differ from
ours in five ways:

- Tables and projections that input and output share are there twice.
- With one table for all clusters (`shrink=1`), all biases of the softmax are one tensor, and the
  projection of the input is there once more for each cluster. Without clusters, the tensors of the
  clusters are absent; ours are empty.
- The original model has 1x1 convolutions for linear maps: a third dimension of size 1.
- The original model has no index of blocks.
- The redesigned model has queries, keys and values head by head; the original model and all of ours
  have first all queries, then all keys, then all values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from deq_zoo.errors import CheckpointError
from deq_zoo.lm.attractor import convert as attractor
from deq_zoo.lm.config import LMConfig

_NAMES = {  # theirs: ours
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
_QKV = re.compile(r"injection\.|func\.blocks\.\d+\.attention\.qkv_net\.")
_POSITIONS = "pos_emb.inv_freq"  # computed by a formula; theirs is rounded to single precision
_SOFTMAX_BIAS = "crit.out_layers.0.bias"
_PRE_NORM = (
    "the weights do not record whether they were trained with --pre_lnorm: if they were, convert "
    "them with --set net.pre_norm=true, or outputs will differ"
)
_log = logging.getLogger("deq_zoo")


def from_authors(config: LMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of the authors as one of ours, without the words of the vocabulary.

    Args:
        config: the shape of the model.
        state: of their `deq-lm` for the redesigned design, of `deq-seq` for the original, of
            `Attractor` for the attractor.
    """
    if config.design == "attractor":
        return attractor.from_authors(config, state)
    _check_design(config, state)
    weights: dict[str, Tensor] = {}
    for key, value in state.items():
        shared = _shared_with(key, config)
        if shared is not None:
            if shared not in state or not torch.equal(state[shared], value):
                raise CheckpointError(
                    f"{key} should equal {shared}: input and output share them in this model"
                )
        elif key != _POSITIONS:
            weights |= dict(_to_ours(key, value.detach().clone(), config))
    if not config.cutoffs and "crit.cluster_weight" not in state:
        like = next(iter(weights.values()))
        weights["vocabulary.cluster_weight"] = like.new_empty(0, config.embed or config.width)
        weights["vocabulary.cluster_bias"] = like.new_empty(0)
    return weights


def to_authors(config: LMConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of ours as the authors' programs read it.

    Args:
        config: the shape of the model.
        state: ours; the words of the vocabulary have no place in theirs.
    """
    if config.design == "attractor":
        return attractor.to_authors(config, state)
    if config.design == "convergent":
        raise CheckpointError("the convergent design is ours: the authors' programs lack its leak")
    theirs: dict[str, Tensor] = {}
    for key, value in state.items():
        empty = not config.cutoffs and key.startswith("vocabulary.cluster_")
        if key.endswith("_extra_state") or empty:
            continue
        if config.design == "redesigned" and _has_qkv_rows(key, value):
            value = _by_head(value, config.heads)
        for name in _their_names(key, config):
            value = _as_convolution(name, value) if config.design == "original" else value
            theirs[name] = value.detach().clone()
    if config.shrink == 1:
        biases = [state[f"vocabulary.biases.{i}"] for i in range(len(config.cutoffs) + 1)]
        theirs[_SOFTMAX_BIAS] = torch.cat([bias.detach() for bias in biases])
    power = torch.arange(0, config.width, 2, dtype=torch.float32) / config.width
    theirs[_POSITIONS] = (10000**-power).to(theirs[_SOFTMAX_BIAS])
    return theirs


def _check_design(config: LMConfig, state: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` for weights of another design than that of the model."""
    if config.design == "convergent":
        raise CheckpointError(
            "the convergent design is ours, and the authors have no weights of it: choose a preset "
            "of the original or the redesigned one"
        )
    for design, mark in {"original": "inject_conv.", "redesigned": "injection."}.items():
        if design != config.design and any(key.startswith(mark) for key in state):
            raise CheckpointError(
                f"these are weights of the {design} design, the preset is of the {config.design}: "
                "choose lm-wt103-seq for the original, lm-wt103-final for the redesigned"
            )
    if config.design == "original" and not config.pre_norm:
        _log.warning(_PRE_NORM)


def _shared_with(key: str, config: LMConfig) -> str | None:
    """Return the key of the input's tensor that a tensor of the output repeats, if it does."""
    match = re.fullmatch(r"crit\.out_(layer|proj)s\.(\d+)\.weight", key)
    if match is None or (match[1] == "proj" and match[2] == "0"):
        return None
    index = 0 if config.shrink == 1 else match[2]
    return f"word_emb.emb_{match[1]}s.{index}.weight"


def _to_ours(key: str, value: Tensor, config: LMConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor of the authors under our names and in our layout."""
    name = _rename(_BLOCKLESS.sub(r"func.\1.0.", key), _NAMES)
    if name is None:
        raise CheckpointError(f"{key} is no weight of a DEQ transformer of the authors")
    if config.shrink == 1 and key == _SOFTMAX_BIAS:
        ends = (0, *config.cutoffs, config.tokens)
        if len(value) != config.tokens:
            raise CheckpointError(
                f"{key} has {len(value)} rows, a model of {config.tokens} tokens has as many: the "
                "weights are of another size"
            )
        for i, bias in enumerate(value.split([b - a for a, b in pairwise(ends)])):
            yield f"vocabulary.biases.{i}", bias.clone()
        return
    if config.design == "original" and value.dim() == 3:
        value = value.squeeze(2)
    if config.design == "redesigned" and _has_qkv_rows(name, value):
        if len(value) != 3 * config.width:
            raise CheckpointError(
                f"{key} has {len(value)} rows, a model of width {config.width} has "
                f"{3 * config.width}: the weights are of another size"
            )
        value = _by_kind(value, config.heads)
    yield name, value


def _rename(key: str, names: Mapping[str, str]) -> str | None:
    """Return the name for the first pattern that matches the whole key, or None."""
    for pattern, name in names.items():
        match = re.fullmatch(pattern, key)
        if match:
            return match.expand(name)
    return None


def _their_names(key: str, config: LMConfig) -> list[str]:
    """Return the keys under which the authors keep a tensor of ours."""
    part, _, rest = key.partition(".")
    if part == "vocabulary":
        return _their_vocabulary(rest, config)
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


def _their_vocabulary(key: str, config: LMConfig) -> list[str]:
    """Return the keys of a tensor of the vocabulary: two or more if input and output share it."""
    kind, _, i = key.partition(".")
    one_table, clusters = config.shrink == 1, range(1, len(config.cutoffs) + 1)
    output = [f"{k}" for k in clusters] if one_table else [i] if i != "0" else []
    return {
        "tables": [f"word_emb.emb_layers.{i}.weight", f"crit.out_layers.{i}.weight"],
        "projections": [f"word_emb.emb_projs.{i}.weight"]
        + [f"crit.out_projs.{k}.weight" for k in output],
        "head": ["crit.out_projs.0.weight"],
        "biases": [] if one_table else [f"crit.out_layers.{i}.bias"],
    }.get(kind, [f"crit.{key}"])


def _as_convolution(name: str, value: Tensor) -> Tensor:
    """Return a matrix of the original design as the weight of a 1x1 convolution."""
    attention = name.startswith("func.dec_attn.") and "_net.weight" in name
    matrix = value.dim() == 2 and (attention or name == "inject_conv.weight")
    return value[..., None] if matrix else value


def _has_qkv_rows(key: str, value: Tensor) -> bool:
    """Return whether the rows of one of our tensors are queries, keys and values.

    The right singular vector of a spectral norm (`weight_v`, of one dimension) has no such rows.
    """
    right_vector = key.endswith(".weight_v") and value.dim() == 1
    return _QKV.match(key) is not None and not right_vector


def _by_kind(rows: Tensor, heads: int) -> Tensor:
    """Return rows with all queries, all keys, all values from rows with [q k v] of each head."""
    by_kind: Tensor = rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return by_kind


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """Return rows with [q k v] of each head from rows with all queries, all keys, all values."""
    by_head: Tensor = rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    return by_head
