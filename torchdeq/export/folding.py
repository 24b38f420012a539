"""A model as an export sees it: in evaluation mode, with normalised weights as constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchdeq.norm.apply import find_norm
from torchdeq.norm.base import Norm


@contextmanager
def evaluated(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run a block with modules in evaluation mode; dropout is off. Their modes come back."""
    modes = [(module, module.training) for module in modules]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def folded_norms(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run a block in which normalised weights are constants, and their parameters are hidden.

    `reset_norm` does nothing during an export, so this block computes the weights once, before it.
    """
    saved: list[tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    try:
        for module in modules:
            norm = find_norm(module)
            if norm is None:
                continue
            parts = dict(module._parameters), dict(module._buffers)
            saved.append((module, dict(module.__dict__), *parts))
            with torch.no_grad():
                norm(module)
            if isinstance(norm, Norm):
                _fold(module, norm)
        yield
    finally:
        for module, attributes, parameters, buffers in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module.__dict__.update(_parameters=parameters, _buffers=buffers)


def _fold(module: nn.Module, norm: Norm) -> None:
    """Turn the computed weights of a module into buffers, and hide what they are computed from."""
    hidden = {f"{name}_{suffix}" for name in norm.names for suffix in norm.suffixes}
    parameters = {k: p for k, p in module._parameters.items() if k not in hidden}
    buffers = {k: b for k, b in module._buffers.items() if k not in hidden}
    for name in norm.names:
        buffers[name] = module.__dict__.pop(name).detach()
    module.__dict__.update(_parameters=parameters, _buffers=buffers)
