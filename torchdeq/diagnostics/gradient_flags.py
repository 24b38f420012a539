"""The flags that replace the gradient of a configuration by another one."""

from __future__ import annotations

from torchdeq.config import DEQConfig


def phantom_flags(config: DEQConfig, steps: int) -> tuple[str, ...]:
    """Return the flags of an undamped phantom gradient, in place of the gradient of `config`."""
    off = tuple(f"--no-{name}" for name in ("ift", "hook_ift") if getattr(config, name))
    damping = ("--tau 1",) if config.tau != 1 else ()
    return (*off, *_chosen_by_flags(config, "phantom"), f"--grad {steps}", *damping)


def implicit_flags(config: DEQConfig, adjoint: str) -> tuple[str, ...]:
    """Return the flags of an implicit gradient, in place of the gradient of `config`."""
    return (*_chosen_by_flags(config, "ift"), "--ift", f"--b_solver {adjoint}")


def _chosen_by_flags(config: DEQConfig, backward: str) -> tuple[str, ...]:
    """Return the flag that lets `--ift` and `--grad` choose, if another backward has been named."""
    return () if config.backward in ("auto", backward) else ("--backward auto",)
