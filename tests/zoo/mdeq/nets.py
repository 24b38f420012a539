"""A small net, the golden models, and f written again with torch's functions alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.mdeq import MDEQClassifier, MDEQConfig
from tests.golden import load_facts, load_tensors

SMALL = MDEQConfig(
    channels=(8, 8), expansion=2, groups=4, head_channels=(2, 4), final_channels=16, classes=5
)


class Golden:
    """One golden model with its inputs and outputs, in float64."""

    def __init__(self, name: str, **deq: Any) -> None:
        entry = load_facts("mdeq")["files"][name]
        config = entry["config"]
        self.config = MDEQConfig(
            channels=config["num_channels"],
            blocks=tuple(config["num_blocks"]),
            expansion=config["expansion"],
            groups=config["num_groups"],
            downsample_times=config["downsample_times"],
            head_channels=config["head_channels"],
            final_channels=config["final_channels"],
            classes=config["num_classes"],
            norm_scope=("branches", "fuse_layers", "post_fuse_layers")
            if config["weight_norm"].startswith("every")
            else ("branches",),
        )
        self.reference = entry["train_reference"]
        self.parameters = entry["num_params"]
        self.io = load_tensors("mdeq", f"{name}_io", torch.float64)
        self.weights = load_tensors("mdeq", f"{name}_weights")
        self.model: Any = MDEQClassifier(self.config, deq).double().eval()
        self.model.load_state_dict(self.weights)

    def read_pyramid(self, name: str) -> list[Tensor]:
        return [self.io[f"{name}.{i}"] for i in range(len(self.config.channels))]


def compute_f(config: MDEQConfig, state: dict[str, Tensor], z: list[Tensor], u: Tensor) -> Any:
    """Compute f by the formulas of the model's docstrings, from the whole model's state_dict."""

    def weight(name: str) -> Tensor:
        if f"full_stage.{name}.weight" in state:
            return state[f"full_stage.{name}.weight"]
        g, v = (state[f"full_stage.{name}.weight_{part}"] for part in "gv")
        return g * v / v.flatten(1).norm(dim=1)[:, None, None, None]

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        w = weight(name)
        return F.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2)

    def gn(x: Tensor, name: str, groups: int = config.groups) -> Tensor:
        scale, shift = (state[f"full_stage.{name}.{part}"] for part in ("weight", "bias"))
        return F.group_norm(x, groups, scale, shift)

    def resize(x: Tensor, j: int, i: int, size: Any) -> Tensor:
        name = f"fuse_layers.{i}.{j}.net"
        if j > i:
            x = gn(conv(x, f"{name}.conv"), f"{name}.gnorm")
            rows, columns = (torch.arange(side) // 2 ** (j - i) for side in size)
            return x[:, :, rows][..., columns]
        for k in range(i - j):
            x = gn(conv(x.relu() if k else x, f"{name}.{k}.conv", 2), f"{name}.{k}.gnorm")
        return x

    r = []
    for i, z_i in enumerate(z):
        for b in range(config.blocks_by_branch[i]):
            name = f"branches.{i}.blocks.{b}"
            p = gn(conv(z_i, f"{name}.conv1"), f"{name}.gn1").relu()
            q = conv(p, f"{name}.conv2") + (u if i == b == 0 else 0)
            z_i = gn((gn(q, f"{name}.gn2") + z_i).relu(), f"{name}.gn3")
        r.append(z_i)
    if len(r) == 1:
        return r
    out = []
    for i, r_i in enumerate(r):
        y = r_i + sum(resize(r[j], j, i, r_i.shape[2:]) for j in range(len(r)) if j != i)
        name = f"post_fuse_layers.{i}"
        out.append(gn(conv(y.relu(), f"{name}.conv"), f"{name}.gnorm", config.groups // 2))
    return out
