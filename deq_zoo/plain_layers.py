"""Layers whose weights a model uses without calling them: they must be what they look like."""

from __future__ import annotations

from torch import nn

_KINDS = (nn.Linear, nn.Conv2d)
#: Torch has no public name for the hooks of a module.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is a product with its weight, and nobody watches its calls.

    Adapters and quantised layers are other classes, and hooks see only calls: such a layer must be
    called.
    """
    return type(layer) in _KINDS and not any(getattr(layer, name) for name in _HOOKS)


def require_weights(**layers: nn.Module) -> None:
    """Raise `TypeError` unless layers compute no more than the product with their weights.

    Hooks are allowed, though they see no calls.

    Args:
        **layers: the layers by their names.
    """
    for name, layer in layers.items():
        if type(layer) not in _KINDS:
            raise TypeError(
                f"{name} must be a plain nn.Linear or nn.Conv2d, got {type(layer).__name__}: this "
                "model uses its weights in parts and never calls it, so leave it out of adapters "
                "and quantisation, or merge them first"
            )
