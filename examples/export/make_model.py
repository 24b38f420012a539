"""Export a small equilibrium: `python make_model.py FOLDER` writes model.onnx and model.pt2."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from torchdeq import Anderson, StopRule, export, fixed_point


class Layer(nn.Module):
    """The fixed point of tanh(W z + x), for rows x of 64 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        nn.init.orthogonal_(self.linear.weight, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return fixed_point(
            lambda z: torch.tanh(self.linear(z) + x), torch.zeros_like(x), solver=Anderson(m=4),
            stop=StopRule(max_iter=40, tol=1e-4, mode="rel"),
        ).z  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    folder, formats = Path(sys.argv[1]), sys.argv[2:] or ["onnx", "aoti"]
    folder.mkdir(parents=True, exist_ok=True)
    program = export.export(Layer(), torch.randn(4, 64))
    if "onnx" in formats:
        print(export.to_onnx(program, folder / "model.onnx"))
    if "aoti" in formats:
        print(export.to_aoti(program, folder / "model.pt2"))
    expected = program.module()(torch.full((5, 64), 0.1))
    print(f"|z| {expected['output'].norm():.4f}, {expected['evaluations']} evaluations")
