"""Variational dropout: one mask for all evaluations of ``f`` in a solve.

A fixed point exists only if ``f`` is the same map at every step, so a mask is drawn at the first
call after :func:`reset_dropout` and kept until the next one::

    reset_dropout(model)  # once per training iteration
    states, stats = model(x)

Masks follow the input: another shape gets a mask of its own, another dtype or device a converted
copy. They are not part of ``state_dict``. A backward pass that evaluates ``f`` again (``mem_gc``,
``higher_order=True``) meets the same masks, as long as they are reset after it and not before.

A mask belongs to a whole batch. ``compact=True`` hands ``f`` only the samples that have not
finished, whose masks cannot be found again: do not combine the two, or pass masks through ``args``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from torchdeq._torch import function_transforms_active, is_batched, is_wrapped, unwrapped


class _VariationalDropoutNd(nn.Module):
    """Keeps the masks; subclasses say which elements share one decision.

    In evaluation and for a probability of 0 it is the identity and draws nothing. What is kept is
    scaled by ``1 / (1 - dropout)``; a probability of 1 gives zeros.

    Args:
        dropout: probability of dropping.
    """

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability in [0, 1], got {dropout}")
        self.dropout = dropout
        self._masks: dict[tuple[int, ...], Tensor] = {}  # by shape, the last one drawn at the end
        self._given: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        """The mask in use, the last one if there are several; None after a reset.

        A tensor assigned here serves every input it expands to until the next reset; assigning None
        is a reset.
        """
        return next(reversed(self._masks.values()), None) if self._given is None else self._given

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        self._masks, self._given = {}, mask

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of the mask for an input, 1 where the decision is shared."""
        raise NotImplementedError

    def reset_mask(self, x: Tensor) -> None:
        """Draw a new mask for inputs like ``x``, on its device and in its dtype."""
        kept, shape = 1 - self.dropout, self.mask_shape(x)
        # A complex number is dropped as a whole.
        mask = torch.empty(shape, dtype=x.real.dtype, device=x.device).bernoulli(kept)
        if kept:
            mask = mask / kept
        if function_transforms_active():
            mask = _outliving(mask)
        others = {key: value for key, value in self._masks.items() if key != shape}
        self._masks = {**others, shape: mask}  # a new dict: shallow copies may share the old one

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.dropout:
            return x
        if not (x.is_floating_point() or x.is_complex()):
            raise TypeError(f"dropout needs floating-point numbers, got {x.dtype}")
        mask = self._given
        if mask is None:
            shape = self.mask_shape(x)
            if shape not in self._masks:
                self.reset_mask(x)
            mask = self._masks[shape]
        return x * mask.to(x.device, x.real.dtype).expand_as(x)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"


class VariationalDropout(_VariationalDropoutNd):
    """Drops single elements of an input of any shape."""

    def mask_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)


class _Structured(_VariationalDropoutNd):
    """Drops whole channels or whole tokens of ``(B, *positions, D)`` or ``(B, D, *positions)``.

    Args:
        dropout: probability of dropping.
        token_first: whether the positions come before the channels.
    """

    positions: ClassVar[tuple[str, ...]]
    drops_tokens: ClassVar[bool]

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
        alone = {0, channels} if not self.drops_tokens else set(range(x.dim())) - {channels}
        return tuple(n if d in alone else 1 for d, n in enumerate(x.shape))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, token_first={self.token_first}"


class VariationalDropout1d(_Structured):
    """Drops whole channels of sequences, ``(B, L, D)`` or ``(B, D, L)``: the same at every step."""

    positions = ("L",)
    drops_tokens = False


class VariationalDropout2d(_Structured):
    """Drops whole channels of images, ``(B, H, W, D)`` or ``(B, D, H, W)``: the entire map."""

    positions = ("H", "W")
    drops_tokens = False


class VariationalDropout3d(_Structured):
    """Drops whole channels of volumes or videos, ``(B, T, H, W, D)`` or ``(B, D, T, H, W)``."""

    positions = ("T", "H", "W")
    drops_tokens = False


class VariationalDropToken1d(_Structured):
    """Drops whole tokens of sequences, ``(B, L, D)`` or ``(B, D, L)``: all features of a step."""

    positions = ("L",)
    drops_tokens = True


class VariationalDropToken2d(_Structured):
    """Drops whole pixels of images, ``(B, H, W, D)`` or ``(B, D, H, W)``: all their channels."""

    positions = ("H", "W")
    drops_tokens = True


class VariationalDropToken3d(_Structured):
    """Drops whole voxels of volumes or videos, ``(B, T, H, W, D)`` or ``(B, D, T, H, W)``."""

    positions = ("T", "H", "W")
    drops_tokens = True


def _outliving(mask: Tensor) -> Tensor:
    """The plain tensor inside what ``torch.func`` transforms hand out, which ends with them."""
    while is_wrapped(mask):
        if is_batched(mask):
            raise RuntimeError(
                "a mask outlives the call, so it cannot differ between the slices of a vmap: use "
                'randomness="same", or call the module once before'
            )
        mask = unwrapped(mask)
    return mask


def reset_dropout(model: nn.Module) -> None:
    """Forget the masks of every variational dropout in ``model``; the next call draws new ones."""
    for module in model.modules():
        if isinstance(module, _VariationalDropoutNd):
            module.mask = None
