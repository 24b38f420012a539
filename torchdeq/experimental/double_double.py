"""Double-double arithmetic: numbers that are unevaluated sums of two doubles."""

from __future__ import annotations

from math import frexp
from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq.numbers import has_double

_SPLIT = 2.0**27 + 1  # cuts a double into two halves whose products are exact (Dekker, 1971)


class PlainNumber(NamedTuple):
    """Numbers in the precision of `hi`, with the operations of `DoubleDouble`."""

    hi: Tensor

    @classmethod
    def of(cls, t: Tensor) -> PlainNumber:
        """Return the numbers of `t` as they are."""
        return cls(t)

    def plus(self, t: Tensor) -> PlainNumber:
        """Return the sum with `t`."""
        return PlainNumber(self.hi + t)

    def times(self, c: float) -> PlainNumber:
        """Return the product with `c`."""
        return PlainNumber(self.hi * c)

    def over(self, c: float) -> PlainNumber:
        """Return the quotient by `c`."""
        return PlainNumber(self.hi / c)


class DoubleDouble(NamedTuple):
    """Numbers `hi + lo` with `|lo|` below the last digit of `hi`: about 32 decimal digits."""

    hi: Tensor
    lo: Tensor

    @classmethod
    def of(cls, t: Tensor) -> DoubleDouble:
        """Return the numbers of `t`, exactly."""
        hi = t.double()
        return cls(hi, torch.zeros_like(hi))

    def plus(self, t: Tensor) -> DoubleDouble:
        """Return the sum with doubles `t`."""
        total, error = _sum(self.hi, t)
        return _normalised(total, error.add_(self.lo))

    def times(self, c: float) -> DoubleDouble:
        """Return the product with `c`."""
        if frexp(c)[0] == 0.5:  # a power of two: exact
            return DoubleDouble(self.hi * c, self.lo * c)
        p, error = _product(self.hi, c)
        return _normalised(p, error.add_(self.lo, alpha=c))

    def over(self, c: float) -> DoubleDouble:
        """Return the quotient by `c`."""
        if frexp(c)[0] == 0.5:
            return self.times(1 / c)
        q = self.hi / c
        p, error = _product(q, c)
        rest = (self.hi - p).sub_(error).add_(self.lo)
        return _normalised(q, rest.div_(c))


PreciseNumber = PlainNumber | DoubleDouble


def most_precise(t: Tensor) -> PreciseNumber:
    """Return the numbers of `t` as double-doubles if the device has doubles, else as they are."""
    return DoubleDouble.of(t) if has_double(t.device) else PlainNumber.of(t)


def _sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum and its exact rounding error (Knuth, 1969)."""
    s = a + b
    of_b = s - a
    return s, (b - of_b).add_(a - (s - of_b))


def _product(a: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """Return the rounded product and its exact rounding error (Dekker, 1971)."""
    p = a * c
    big = a * _SPLIT
    a_hi = big - (big - a)
    a_lo = a - a_hi
    c_hi = c * _SPLIT - (c * _SPLIT - c)
    c_lo = c - c_hi
    error = torch.sub(a_hi * c_hi, p).add_(a_hi, alpha=c_lo).add_(a_lo, alpha=c_hi)
    return p, error.add_(a_lo, alpha=c_lo)


def _normalised(hi: Tensor, lo: Tensor) -> DoubleDouble:
    """Return `hi + lo` with `lo` below the last digit of `hi`."""
    total = hi + lo
    return DoubleDouble(total, lo.sub_(total - hi))
