"""Denoisers of the DDPM and DDIM releases under the names of diffusers, and back.

A released file is a state_dict of the averaged weights. A training checkpoint is a list: weights,
state of the optimiser, epoch, step and, if weights were averaged, their average.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from deq_zoo.errors import CheckpointError

_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
#: Names of the first versions of diffusers.
_FORMER = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_RESNET = {"temb_proj": "time_emb_proj", "nin_shortcut": "conv_shortcut"}
_TOP = {
    "temb.dense.0": "time_embedding.linear_1",
    "temb.dense.1": "time_embedding.linear_2",
    "norm_out": "conv_norm_out",
}


def pick_state(content: Any) -> dict[str, Tensor] | None:
    """Return the weights in a training checkpoint of the authors: the average if there is one.

    Args:
        content: of a file. None is returned for a content that is not a list.
    """
    if not isinstance(content, (list, tuple)):
        return None
    states = [entry for entry in content if _is_state(entry)]
    if not states:
        raise CheckpointError(
            "a list should be a training checkpoint of a DDPM denoiser (weights, optimiser, epoch, "
            f"step and the averaged weights), got entries {_kinds(content)}"
        )
    return {key.removeprefix("module."): value for key, value in states[-1].items()}


def _is_state(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and bool(entry)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in entry.items())
    )


def _kinds(content: Sequence[Any]) -> str:
    names = [type(entry).__name__ for entry in content[:5]]
    return ", ".join(names + ["..."] * (len(content) > 5)) or "none"


def averaged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the averaged weights of a `Denoiser`'s state_dict, as one of `UNet2DModel`."""
    prefix = "average.module."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def from_authors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of the authors as one of `UNet2DModel`.

    The 1 x 1 convolutions of attention become matrices. A state_dict of diffusers stays as it is,
    except for the names that attention had in its first versions.
    """
    if "conv_norm_out.weight" in state:
        return {_renamed(key): value for key, value in state.items()}
    levels = 1 + max((int(key.split(".")[1]) for key in state if _levelled(key)), default=-1)
    if not levels or "conv_in.weight" not in state:
        raise CheckpointError(
            "these are no weights of a DDPM denoiser: names such as conv_in.weight and "
            f"down.0.block.0.conv1.weight are expected, got {sorted(state)[:3]}"
        )
    converted = {}
    for key, value in state.items():
        name = _to_diffusers(key, levels)
        flat = re.search(r"\.to_(q|k|v|out\.0)\.weight$", name) and value.dim() == 4
        converted[name] = value.flatten(1) if flat else value
    return converted


def to_authors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict of `UNet2DModel` as the authors' programs read it."""
    levels = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("down_blocks."))
    converted = {}
    for key, value in state.items():
        name = _to_old(key, levels)
        matrix = re.search(r"\.(q|k|v|proj_out)\.weight$", name) and value.dim() == 2
        converted[name] = value[:, :, None, None] if matrix else value
    return converted


def _renamed(key: str) -> str:
    former = rf"(?<=\.)({'|'.join(_FORMER)})(?=\.(weight|bias)$)"
    return re.sub(former, lambda match: _FORMER[match[1]], key) if ".attentions." in key else key


def _levelled(key: str) -> bool:
    return re.match(r"(down|up)\.\d+\.", key) is not None


def _to_diffusers(key: str, levels: int) -> str:
    stem, _, kind = key.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    if match := re.fullmatch(r"(down|up)\.(\d+)\.(block|attn)\.(\d+)\.(\w+)", stem):
        way, level, what, j, part = match.groups()
        return f"{way}_blocks.{_place(way, int(level), levels)}.{_inner(what, j, part)}.{kind}"
    if match := re.fullmatch(r"(down|up)\.(\d+)\.(down|up)sample\.conv", stem):
        way, level, _ = match.groups()
        return f"{way}_blocks.{_place(way, int(level), levels)}.{way}samplers.0.conv.{kind}"
    if match := re.fullmatch(r"mid\.(block|attn)_(\d)\.(\w+)", stem):
        what, j, part = match.groups()
        return f"mid_block.{_inner(what, str(int(j) - 1), part)}.{kind}"
    return key


def _place(way: str, number: int, levels: int) -> int:
    """Return the number of a block from that of its level, or the level from that of its block.

    Diffusers counts the blocks of `up` in the order of execution.
    """
    return number if way == "down" else levels - 1 - number


def _inner(what: str, j: str, part: str) -> str:
    if what == "attn":
        return f"attentions.{j}.{_ATTENTION.get(part, part)}"
    return f"resnets.{j}.{_RESNET.get(part, part)}"


def _to_old(key: str, levels: int) -> str:
    stem, _, kind = key.rpartition(".")
    for old, new in _TOP.items():
        if stem == new:
            return f"{old}.{kind}"
    if match := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.+)", stem):
        way, at, what, j, part = match.groups()
        return f"{way}.{_place(way, int(at), levels)}.{_part(what, part, '.' + j)}.{kind}"
    if match := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(?:down|up)samplers\.0\.conv", stem):
        way, at = match.groups()
        return f"{way}.{_place(way, int(at), levels)}.{way}sample.conv.{kind}"
    if match := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d)\.(.+)", stem):
        what, j, part = match.groups()
        return f"mid.{_part(what, part, f'_{int(j) + 1}')}.{kind}"
    return key


def _part(what: str, part: str, which: str) -> str:
    if what == "attentions":
        return f"attn{which}.{_reversed(_ATTENTION).get(part, part)}"
    return f"block{which}.{_reversed(_RESNET).get(part, part)}"


def _reversed(names: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in names.items()}
