"""Numbers with digits to spare: doubles, and unevaluated sums of two of them."""

from __future__ import annotations

from math import frexp
from typing import NamedTuple

import torch
from torch import Tensor

_SPLIT = 2.0**27 + 1  # cuts a double into two halves whose products are exact (Dekker, 1971)


class OneFold(NamedTuple):
    """Plain numbers in the operations of :class:`TwoFold`."""

    hi: Tensor

    @classmethod
    def of(cls, t: Tensor) -> OneFold:
        return cls(t)

    def plus(self, t: Tensor) -> OneFold:
        return OneFold(self.hi + t)

    def times(self, c: float) -> OneFold:
        return OneFold(self.hi * c)

    def over(self, c: float) -> OneFold:
        return OneFold(self.hi / c)


class TwoFold(NamedTuple):
    """``hi + lo`` with ``|lo|`` below the last digit of ``hi``: about 32 decimal digits."""

    hi: Tensor
    lo: Tensor

    @classmethod
    def of(cls, t: Tensor) -> TwoFold:
        hi = t.double()
        return cls(hi, torch.zeros_like(hi))

    def plus(self, t: Tensor) -> TwoFold:
        """The sum with plain doubles."""
        total, error = _sum(self.hi, t)
        return _normal(total, error.add_(self.lo))

    def times(self, c: float) -> TwoFold:
        """The product with a double."""
        if frexp(c)[0] == 0.5:  # a power of two: exact
            return TwoFold(self.hi * c, self.lo * c)
        p, error = _product(self.hi, c)
        return _normal(p, error.add_(self.lo, alpha=c))

    def over(self, c: float) -> TwoFold:
        """The quotient by a double."""
        if frexp(c)[0] == 0.5:
            return self.times(1 / c)
        q = self.hi / c
        p, error = _product(q, c)
        rest = (self.hi - p).sub_(error).add_(self.lo)
        return _normal(q, rest.div_(c))


def _sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and its rounding error, exactly (Knuth, 1969)."""
    s = a + b
    of_b = s - a
    return s, (b - of_b).add_(a - (s - of_b))


def _product(a: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """The rounded product and its rounding error, exactly (Dekker, 1971)."""
    p = a * c
    big = a * _SPLIT
    a_hi = big - (big - a)
    a_lo = a - a_hi
    c_hi = c * _SPLIT - (c * _SPLIT - c)
    c_lo = c - c_hi
    error = torch.sub(a_hi * c_hi, p).add_(a_hi, alpha=c_lo).add_(a_lo, alpha=c_hi)
    return p, error.add_(a_lo, alpha=c_lo)


def _normal(hi: Tensor, lo: Tensor) -> TwoFold:
    """The same sum with the digits in order."""
    total = hi + lo
    return TwoFold(total, lo.sub_(total - hi))
