"""Published import path of the functions on models."""

from torchdeq.norm.apply import (
    apply_norm,
    register_norm,
    register_norm_module,
    remove_norm,
    reset_norm,
)

__all__ = ["apply_norm", "register_norm", "register_norm_module", "remove_norm", "reset_norm"]
