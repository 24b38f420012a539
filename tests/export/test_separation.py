"""Tensors that share memory become tensors of their own before a program is traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchdeq.coupling import check_coupling
from torchdeq.export.separation import separated


def test_views_of_one_memory_in_nested_closures_are_replaced_by_copies() -> None:
    both = torch.arange(6.0)
    u, v = both[:3], both[3:]
    scales = {"v": v}

    def inner(z: Tensor) -> Tensor:
        return z * scales["v"]

    def f(z: Tensor, w: Tensor, *, offset: float = 1.0) -> Tensor:
        return inner(z) + u + w + offset

    g, (w,) = separated(f, (v,))
    z = torch.randn(3)
    torch.testing.assert_close(g(z, w), f(z, v), rtol=0, atol=0)
    expected = f(z, v)
    both.zero_()  # the copies are not views of it
    torch.testing.assert_close(g(z, w), expected, rtol=0, atol=0)
    assert not torch.equal(f(z, v), expected)


def test_nothing_is_copied_where_memory_is_not_shared() -> None:
    layer, u = nn.Linear(3, 3), torch.randn(3)

    def f(z: Tensor) -> Tensor:
        return layer(z) + u

    assert separated(f, ()) == (f, ())


def test_couplings_that_are_none_are_errors() -> None:
    with pytest.raises(ValueError, match="coupled must be None, True, False or"):
        check_coupling("sometimes", False)
