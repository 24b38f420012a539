"""Use an installed wheel as a user would, outside the clone: solve, differentiate, train."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import torchdeq


def main() -> None:
    """Raise if something does not work."""
    here = Path(torchdeq.__file__).resolve()
    assert "site-packages" in here.parts, f"torchdeq was imported from {here}, not from the wheel"
    W = (0.1 * torch.randn(16, 16)).requires_grad_()
    x = torch.randn(4, 16)
    z = torchdeq.fixed_point(lambda z: torch.tanh(z @ W + x), torch.zeros(4, 16)).z
    z.square().sum().backward()
    assert W.grad is not None
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "deq_zoo"]
        subprocess.run([*run, "--version"], check=True)
        subprocess.run([*run, "train", "mdeq-smoke", "--cpu", "--out", f"{folder}/run"], check=True)
        subprocess.run([*run, "evaluate", f"{folder}/run"], check=True)
        subprocess.run([*run, "evaluate", "mdeq-digits", "--cpu"], check=True)
    print(f"torchdeq {torchdeq.__version__} works from {here.parent}")


if __name__ == "__main__":
    main()
