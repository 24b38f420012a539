"""Variational dropout: one mask per reset, whatever else changes."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq import Implicit, StopRule, fixed_point, mem_gc
from torchdeq.dropout import (
    VariationalDropout,
    VariationalDropout1d,
    VariationalDropout2d,
    VariationalDropout3d,
    VariationalDropToken1d,
    VariationalDropToken2d,
    VariationalDropToken3d,
    reset_dropout,
)
from torchdeq.solver import FixedPointIter

#: Class, input, and the shapes of the masks for token_first True and False, as in 0.1.0.
STRUCTURED = [
    (VariationalDropout1d, (3, 4, 5), (3, 1, 5), (3, 4, 1)),
    (VariationalDropout2d, (3, 4, 6, 5), (3, 1, 1, 5), (3, 4, 1, 1)),
    (VariationalDropout3d, (3, 4, 6, 7, 5), (3, 1, 1, 1, 5), (3, 4, 1, 1, 1)),
    (VariationalDropToken1d, (3, 4, 5), (3, 4, 1), (3, 1, 5)),
    (VariationalDropToken2d, (3, 4, 6, 5), (3, 4, 6, 1), (3, 1, 6, 5)),
    (VariationalDropToken3d, (3, 4, 6, 7, 5), (3, 4, 6, 7, 1), (3, 1, 6, 7, 5)),
]
EVERY = [(VariationalDropout, (3, 4, 5)), *((kind, shape) for kind, shape, *_ in STRUCTURED)]


@pytest.mark.parametrize(("kind", "shape", "tokens_first", "channels_first"), STRUCTURED)
def test_masks_have_the_published_shapes_and_numbers(
    kind: Any,
    shape: tuple[int, ...],
    tokens_first: tuple[int, ...],
    channels_first: tuple[int, ...],
) -> None:
    x = torch.randn(shape)
    for options, expected in (
        ((), tokens_first),
        ((True,), tokens_first),
        ((False,), channels_first),
    ):
        torch.manual_seed(2)
        mask = torch.zeros(expected).bernoulli_(1 - 0.3) / (1 - 0.3)
        torch.manual_seed(2)
        drop = kind(0.3, *options)
        assert torch.equal(drop(x), mask.expand_as(x) * x)
        assert torch.equal(drop.mask, mask)


@pytest.mark.parametrize(("kind", "shape"), EVERY)
def test_a_mask_holds_until_the_reset_and_is_drawn_at_the_first_call_after_it(
    kind: Any, shape: tuple[int, ...]
) -> None:
    drop, x = kind(0.5), torch.ones(shape)
    assert drop.mask is None
    y = drop(x)
    state = torch.get_rng_state()
    assert torch.equal(drop(x), y)
    assert torch.equal(drop(2 * x), 2 * y)
    assert torch.equal(torch.get_rng_state(), state), "only a draw uses random numbers"
    model = nn.Sequential(nn.Identity(), nn.Sequential(drop))
    reset_dropout(model)
    assert drop.mask is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(model(x), y)


@pytest.mark.parametrize(("kind", "shape"), EVERY)
def test_evaluation_and_probability_zero_are_the_identity(
    kind: Any, shape: tuple[int, ...]
) -> None:
    x, state = torch.randn(shape), torch.get_rng_state()
    assert kind(0.0)(x) is x
    assert kind(0.5).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("kind", "shape"), EVERY)
def test_probability_one_drops_everything(kind: Any, shape: tuple[int, ...]) -> None:
    assert torch.equal(kind(1.0)(torch.ones(shape)), torch.zeros(shape))


def test_keeps_the_mean() -> None:
    y = VariationalDropout(0.3)(torch.ones(400, 500))
    assert abs(y.mean().item() - 1) < 0.01
    assert abs((y == 0).float().mean().item() - 0.3) < 0.01


def test_another_shape_gets_its_own_mask_and_the_first_is_not_forgotten() -> None:
    drop = VariationalDropout(0.5)
    large, small = torch.ones(8, 16), torch.ones(3, 16)
    first, second = drop(large), drop(small)
    assert drop.mask is not None
    assert drop.mask.shape == (3, 16)
    assert torch.equal(drop(large), first)
    assert torch.equal(drop(small), second)
    assert drop(torch.ones(0, 16)).shape == (0, 16)


def test_a_channel_mask_serves_every_length() -> None:
    drop = VariationalDropout1d(0.5)
    short, long = drop(torch.ones(4, 2, 8)), drop(torch.ones(4, 7, 8))
    assert torch.equal(short[:, :1].expand_as(long), long)


def test_the_mask_follows_the_dtype_of_the_input() -> None:
    drop = VariationalDropout(0.3)
    x = torch.ones(6, 7)
    y = drop(x)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        converted = drop(x.to(dtype))
        assert converted.dtype == dtype
        torch.testing.assert_close(converted, y.to(dtype))
    half = VariationalDropout(0.5)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert half.mask is not None
    assert half.mask.dtype == torch.bfloat16
    assert torch.equal(half(x), half(x.bfloat16()).float())


def test_the_same_mask_inside_and_outside_autocast() -> None:
    linear, drop = nn.Linear(8, 8), VariationalDropout(0.5)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = drop(linear(x))
    assert y.dtype == torch.bfloat16
    assert torch.equal(drop(linear(x)) == 0, y == 0)


def test_complex_numbers_are_dropped_as_a_whole() -> None:
    x = torch.randn(50, 4, dtype=torch.complex64)
    drop = VariationalDropout(0.5)
    y = drop(x)
    assert drop.mask is not None
    assert drop.mask.dtype == torch.float32
    torch.testing.assert_close(y, x * drop.mask)


def test_strided_inputs_and_gradients() -> None:
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).transpose(1, 3).requires_grad_()
    drop = VariationalDropout2d(0.5, token_first=False)
    drop(x)
    assert torch.autograd.gradcheck(drop, (x,))
    (grad,) = torch.autograd.grad(drop(x).sum(), x)
    assert drop.mask is not None
    assert torch.equal(grad, drop.mask.expand_as(x))


def test_a_given_mask_serves_every_input_it_expands_to() -> None:
    drop, mask = VariationalDropout1d(0.5), torch.tensor([0.0, 2.0, 3.0])
    drop.mask = mask
    assert drop.mask is mask
    assert torch.equal(drop(torch.ones(2, 4, 3)), mask.expand(2, 4, 3))
    assert torch.equal(drop(torch.ones(5, 1, 3)), mask.expand(5, 1, 3))
    reset_dropout(drop)
    assert drop(torch.ones(2, 4, 3)).unique().tolist() in ([0.0], [2.0], [0.0, 2.0])


def test_copies_carry_their_masks_and_a_state_dict_does_not() -> None:
    drop, x = VariationalDropout(0.5), torch.ones(5, 6)
    y = drop(x)
    for twin in (copy.deepcopy(drop), pickle.loads(pickle.dumps(drop)), copy.copy(drop)):
        assert torch.equal(twin(x), y)
        twin.mask = None
        twin(torch.ones(2))
        assert torch.equal(drop(x), y)
        assert list(drop._masks) == [(5, 6)]
    assert not drop.state_dict()
    drop.load_state_dict({})
    assert not list(drop.parameters())
    assert not list(drop.buffers())


def layer(drop: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    linear = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)).double()
    return nn.Sequential(linear, nn.Tanh(), drop), torch.randn(3, 6, dtype=torch.float64)


@pytest.mark.parametrize("higher_order", [False, True])
def test_a_solve_and_its_gradient_see_one_map(higher_order: bool) -> None:
    drop = VariationalDropout(0.5)
    net, x = layer(drop)
    x.requires_grad_()
    backward = Implicit(stop=StopRule(60, 1e-12), higher_order=higher_order)
    z = fixed_point(lambda z: 0.3 * net(z) + x, torch.zeros_like(x), solver=FixedPointIter(),
                    stop=StopRule(200, 1e-12), backward=backward).z  # fmt: skip
    mask = drop.mask
    torch.testing.assert_close(0.3 * net(z) + x, z)
    got = torch.autograd.grad(z.square().sum(), x)[0]
    assert drop.mask is mask
    unrolled = torch.zeros_like(x)
    for _ in range(100):
        unrolled = 0.3 * net(unrolled) + x
    torch.testing.assert_close(got, torch.autograd.grad(unrolled.square().sum(), x)[0])


def test_recomputation_meets_the_same_mask() -> None:
    drop = VariationalDropout(0.5)
    net, x = layer(drop)
    x.requires_grad_()
    got = torch.autograd.grad(mem_gc(net, (x,)).sum(), x)[0]
    assert torch.equal(got, torch.autograd.grad(net(x).sum(), x)[0])


def test_function_transforms_leave_a_plain_mask_behind() -> None:
    x = torch.ones(40, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f: torch.func.jvp(f, (x,), (x,))[1],
        lambda f: torch.func.vmap(f, randomness="same")(x.expand(2, -1))[1],
    ):
        drop = VariationalDropout(0.5)
        got = transform(drop)
        assert torch.equal(pickle.loads(pickle.dumps(drop)).mask, got)
        assert torch.equal(drop(x), got)
    reset_dropout(drop)
    with pytest.raises(RuntimeError, match='randomness="same"'):
        torch.func.vmap(drop, randomness="different")(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(drop)(torch.ones(2, 4))
    drop(torch.ones(4))
    assert torch.func.vmap(drop)(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0), reason="Python 3.13.0, which is not supported: stale graphs"
)
def test_compiles_as_one_graph_that_a_reset_does_not_rebuild() -> None:
    drop, x = VariationalDropout(0.5), torch.ones(64)
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(drop, backend=count, fullgraph=True)
    seen = set()
    for _ in range(4):
        reset_dropout(drop)
        y = compiled(x)
        assert torch.equal(compiled(x), y)
        assert torch.equal(drop(x), y)
        seen.add(tuple(y.tolist()))
    assert len(seen) == 4
    assert graphs == 2  # with a draw, and without


def test_refuses_what_it_cannot_mean() -> None:
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"probability in \[0, 1\]"):
            VariationalDropout(p)
    with pytest.raises(ValueError, match=r"shape \(B, L, D\), got \(2, 3\)"):
        VariationalDropout1d(0.5)(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"shape \(B, D, H, W\), got \(2, 3, 4\)"):
        VariationalDropToken2d(0.5, token_first=False)(torch.ones(2, 3, 4))
    with pytest.raises(TypeError, match=r"got torch.int64"):
        VariationalDropout(0.5)(torch.ones(2, dtype=torch.int64))


def test_says_what_it_is() -> None:
    assert repr(VariationalDropout(0.1)) == "VariationalDropout(dropout=0.1)"
    shown = "VariationalDropToken1d(dropout=0.5, token_first=False)"
    assert repr(VariationalDropToken1d(token_first=False)) == shown
