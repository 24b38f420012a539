"""Variational dropout: one mask for all evaluations of `f` in a solve.

A fixed point exists only if `f` is the same map at every step. So a module draws its mask at the
first call after `reset_dropout` and keeps it until the next reset:

```python
reset_dropout(model)  # once per training iteration
states, stats = model(x)
```

An input of another shape gets another mask; for another dtype or device the mask is converted.
Masks are not part of `state_dict`. A backward pass that evaluates `f` again (`mem_gc`,
`higher_order=True`) uses the same masks, provided that `reset_dropout` is called after the backward
pass, not before it.

A mask belongs to a whole batch. With `compact=True`, `f` gets only the samples that have not
converged, and a module cannot know which rows of its mask belong to them: do not use both, or pass
masks through `args`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from torchdeq._torch import function_transforms_active, is_batched, is_wrapped, unwrapped


class _VariationalDropoutNd(nn.Module):
    """The base of variational dropouts: stores the masks; subclasses give their shapes.

    In evaluation mode, and for a probability of 0, the module is the identity and draws no random
    numbers. Elements that are not dropped are scaled by `1 / (1 - dropout)`; a probability of 1
    gives zeros.

    Args:
        dropout: the probability that an element is dropped.
    """

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability in [0, 1], got {dropout}")
        self.dropout = dropout
        self._masks: dict[tuple[int, ...], Tensor] = {}  # by shape, the latest mask last
        self._assigned: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        """Return the current mask, the latest one if there are several; None after a reset.

        An assigned tensor is used for every input to which it can expand, until the next reset.
        Assigning None is a reset.
        """
        latest = next(reversed(self._masks.values()), None)
        return latest if self._assigned is None else self._assigned

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        self._masks, self._assigned = {}, mask

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape of the mask for an input: 1 where elements are dropped together."""
        raise NotImplementedError

    def reset_mask(self, x: Tensor) -> None:
        """Draw a new mask for inputs of the shape of `x`, with its device and dtype."""
        keep, shape = 1 - self.dropout, self.mask_shape(x)
        # A real mask: a complex number is dropped as a whole.
        mask = torch.empty(shape, dtype=x.real.dtype, device=x.device).bernoulli(keep)
        if keep:
            mask = mask / keep
        if function_transforms_active():
            mask = _plain_mask(mask)
        others = {key: value for key, value in self._masks.items() if key != shape}
        self._masks = {**others, shape: mask}  # a new dict: shallow copies may refer to the old one

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.dropout:
            return x
        if not (x.is_floating_point() or x.is_complex()):
            raise TypeError(f"dropout needs a floating-point or complex input, got {x.dtype}")
        mask = self._assigned
        if mask is None:
            shape = self.mask_shape(x)
            if shape not in self._masks:
                self.reset_mask(x)
            mask = self._masks[shape]
        return x * mask.to(x.device, x.real.dtype).expand_as(x)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


class VariationalDropout(_VariationalDropoutNd):
    """Variational dropout of single elements of an input of any shape."""

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)


class _Structured(_VariationalDropoutNd):
    """The base of dropouts of whole channels or tokens: `(B, *positions, D)`, `(B, D, *positions)`.

    Args:
        dropout: the probability that a channel or token is dropped.
        token_first: whether the positions come before the channels.
    """

    positions: ClassVar[tuple[str, ...]]  # names of the dimensions between batch and channels
    drops_tokens: ClassVar[bool] = False  # tokens (positions) are dropped, not channels

    def __init__(self, dropout: float = 0.5, token_first: bool = True) -> None:
        super().__init__(dropout)
        self.token_first = token_first

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        if x.dim() != len(self.positions) + 2:
            names = (*self.positions, "D") if self.token_first else ("D", *self.positions)
            raise ValueError(
                f"{type(self).__name__}(token_first={self.token_first}) expects an input of shape "
                f"(B, {', '.join(names)}), got {tuple(x.shape)}"
            )
        channels = x.dim() - 1 if self.token_first else 1
        drawn = set(range(x.dim())) - {channels} if self.drops_tokens else {0, channels}
        return tuple(n if d in drawn else 1 for d, n in enumerate(x.shape))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, token_first={self.token_first}"


class VariationalDropout1d(_Structured):
    """Variational dropout of whole channels of sequences: `(B, L, D)` or `(B, D, L)`."""

    positions = ("L",)


class VariationalDropout2d(_Structured):
    """Variational dropout of whole channels of images: `(B, H, W, D)` or `(B, D, H, W)`."""

    positions = ("H", "W")


class VariationalDropout3d(_Structured):
    """Variational dropout of whole channels of volumes: `(B, T, H, W, D)` or `(B, D, T, H, W)`."""

    positions = ("T", "H", "W")


class VariationalDropToken1d(_Structured):
    """Variational dropout of whole tokens of sequences: `(B, L, D)` or `(B, D, L)`."""

    positions = ("L",)
    drops_tokens = True


class VariationalDropToken2d(_Structured):
    """Variational dropout of whole pixels of images: `(B, H, W, D)` or `(B, D, H, W)`."""

    positions = ("H", "W")
    drops_tokens = True


class VariationalDropToken3d(_Structured):
    """Variational dropout of whole voxels of volumes: `(B, T, H, W, D)` or `(B, D, T, H, W)`."""

    positions = ("T", "H", "W")
    drops_tokens = True


def _plain_mask(mask: Tensor) -> Tensor:
    """Return the plain tensor inside the wrappers of `torch.func`, which end with the transform."""
    while is_wrapped(mask):
        if is_batched(mask):
            raise RuntimeError(
                "a dropout mask is kept after the call, so it cannot differ between the slices of "
                'a vmap: use randomness="same", or call the module once before the vmap'
            )
        mask = unwrapped(mask)
    return mask


def reset_dropout(model: nn.Module) -> None:
    """Discard the masks of every variational dropout in `model`; the next call draws new masks."""
    for module in model.modules():
        if isinstance(module, _VariationalDropoutNd):
            module.mask = None
