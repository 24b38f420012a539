"""A run that is stopped and resumed, beside one that is not."""

from __future__ import annotations

from pathlib import Path

import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main


def assert_resumes_bit_for_bit(preset: str, settings: list[str], folder: Path) -> None:
    """Compare the weights and the carried states of both runs, all of them."""
    quiet = ["--cpu", "--quiet", "--no-report"]
    whole, parts = (["train", preset, "--out", str(folder / name), *quiet] for name in "ab")
    assert main([*whole, *settings]) == 0
    assert main([*parts, *settings, "--max-seconds", "1e-3"]) == 0
    stopped = Checkpoint.load(folder / "b" / "last.safetensors").step
    assert main([*parts, "--resume"]) == 0
    first, second = (Checkpoint.load(folder / name / "last.safetensors") for name in "ab")
    assert stopped < first.step == second.step
    assert first.model.keys() == second.model.keys()
    assert all(torch.equal(t, second.model[key]) for key, t in first.model.items())
    for name in ("kept", "seen"):
        assert torch.equal(first.carry[0][name], second.carry[0][name])
