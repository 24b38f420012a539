"""Denoisers of the first DDPM and DDIM releases under diffusers' names, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from deq_zoo.errors import CheckpointError

_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}
#: What diffusers itself called them at first.
_FORMER = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
_RESNET = {"temb_proj": "time_emb_proj", "nin_shortcut": "conv_shortcut"}
_TOP = {
    "temb.dense.0": "time_embedding.linear_1",
    "temb.dense.1": "time_embedding.linear_2",
    "norm_out": "conv_norm_out",
}


def from_ddpm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict of the old format as one of `UNet2DModel`.

    Attention's 1 x 1 convolutions become matrices. Names of diffusers stay, but for those its
    attention had at first.
    """
    if "conv_norm_out.weight" in state:
        return {_renamed(key): value for key, value in state.items()}
    levels = 1 + max((int(key.split(".")[1]) for key in state if _levelled(key)), default=-1)
    if not levels or "conv_in.weight" not in state:
        raise CheckpointError(
            "these are no weights of a DDPM denoiser: names such as conv_in.weight and "
            f"down.0.block.0.conv1.weight are expected, got {sorted(state)[:3]}"
        )
    made = {}
    for key, value in state.items():
        name = _to_diffusers(key, levels)
        flat = re.search(r"\.to_(q|k|v|out\.0)\.weight$", name) and value.dim() == 4
        made[name] = value.flatten(1) if flat else value
    return made


def to_ddpm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back."""
    levels = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("down_blocks."))
    made = {}
    for key, value in state.items():
        name = _to_old(key, levels)
        matrix = re.search(r"\.(q|k|v|proj_out)\.weight$", name) and value.dim() == 2
        made[name] = value[:, :, None, None] if matrix else value
    return made


def _renamed(key: str) -> str:
    former = rf"(?<=\.)({'|'.join(_FORMER)})(?=\.(weight|bias)$)"
    return re.sub(former, lambda found: _FORMER[found[1]], key) if ".attentions." in key else key


def _levelled(key: str) -> bool:
    return re.match(r"(down|up)\.\d+\.", key) is not None


def _to_diffusers(key: str, levels: int) -> str:
    stem, _, kind = key.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    if match := re.fullmatch(r"(down|up)\.(\d+)\.(block|attn)\.(\d+)\.(\w+)", stem):
        way, level, what, j, part = match.groups()
        return f"{_block(way, int(level), levels)}.{_inner(what, j, part)}.{kind}"
    if match := re.fullmatch(r"(down|up)\.(\d+)\.(down|up)sample\.conv", stem):
        way, level, _ = match.groups()
        return f"{_block(way, int(level), levels)}.{way}samplers.0.conv.{kind}"
    if match := re.fullmatch(r"mid\.(block|attn)_(\d)\.(\w+)", stem):
        what, j, part = match.groups()
        return f"mid_block.{_inner(what, str(int(j) - 1), part)}.{kind}"
    return key


def _block(way: str, level: int, levels: int) -> str:
    """Blocks upwards are counted in the order of execution."""
    return f"{way}_blocks.{level if way == 'down' else levels - 1 - level}"


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
        level = int(at) if way == "down" else levels - 1 - int(at)
        return f"{way}.{level}.{_part(what, part, '.' + j)}.{kind}"
    if match := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(?:down|up)samplers\.0\.conv", stem):
        way, at = match.groups()
        level = int(at) if way == "down" else levels - 1 - int(at)
        return f"{way}.{level}.{way}sample.conv.{kind}"
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
