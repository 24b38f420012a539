"""The attractor: gated blocks find a fixed point that starts from an explicit transformer."""
