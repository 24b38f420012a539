"""Losses on a sequence of states that converges to the fixed point."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchdeq.loss.jacobian import jac_reg
from torchdeq.pytree import State
from torchdeq.registry import Registry, suggest

Weight = Callable[..., Any]  # (n, k, **options) -> the weight of state k = 0, ..., n - 1

WEIGHTS: Registry[Weight] = Registry("weight function")


@WEIGHTS.register("exp")
def exp_weight(n: int, k: int, gamma: float = 0.8) -> float:
    """``gamma ** (n - k - 1)``: 1 for the last state, less for every earlier one."""
    return gamma ** (n - k - 1)


@WEIGHTS.register("linear")
def linear_weight(n: int, k: int, gamma: float = 0.9, bias: float = 0.0) -> float:
    """``1 - (n - k - 1) / n * gamma + bias``: a straight line that ends at ``1 + bias``."""
    return 1 - (n - k - 1) / n * gamma + bias


@WEIGHTS.register("const")
def const_weight(n: int, k: int, c: float = 1.0) -> float:
    """``c`` for every state."""
    return c


WEIGHTS.seal()


def register_weight_func(name: str, func: Weight) -> None:
    """Make ``func(n, k, **options)``, the weight of state ``k`` out of ``n``, known by a name."""
    if not callable(func):
        raise TypeError(
            f"a weight function must be callable as func(n, k), got {type(func).__name__}"
        )
    WEIGHTS.register(name, func)


@overload
def fp_correction(
    crit: Callable[..., Tensor],
    args: Iterable[Any],
    weight_func: str = ...,
    return_loss_values: Literal[False] = ...,
    **kwargs: Any,
) -> Tensor: ...
@overload
def fp_correction(
    crit: Callable[..., Tensor],
    args: Iterable[Any],
    weight_func: str = ...,
    *,
    return_loss_values: Literal[True],
    **kwargs: Any,
) -> tuple[Tensor, list[float]]: ...
def fp_correction(
    crit: Callable[..., Tensor],
    args: Iterable[Any],
    weight_func: str = "exp",
    return_loss_values: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, list[float]]:
    r"""Fixed-point correction: the loss of every state, weighted by its place.

    .. math:: \ell = \sum_{k=0}^{n-1} w(n, k) \; \mathrm{crit}(a_k, b_k, \dots)

    with ``args = (a, b, ...)``. A list or tuple among them is a sequence over the states; one item
    of it, or anything else, serves every state::

        loss = fp_correction(crit, (states, target), weight_func="linear", gamma=0.5)

    Args:
        crit: the loss of one state; a loss without reduction stays without.
        args: the arguments of ``crit``.
        weight_func: ``exp``, ``linear``, ``const``, or a name from :func:`register_weight_func`.
        return_loss_values: also return the unweighted losses, as numbers, read back at once.
        **kwargs: options of the weight function. The built-in ones pass over each other's
            (``gamma``, ``bias``, ``c``), so that changing the name is enough to change the weight.
    """
    sequences = _sequences(args)
    weight = _with_options(weight_func, kwargs)
    n = max(len(sequence) for sequence in sequences)
    losses = [crit(*(each[k % len(each)] for each in sequences)) for k in range(n)]
    total: Any = sum(weight(n, k) * loss for k, loss in enumerate(losses))
    return (total, _numbers(losses)) if return_loss_values else total


def jac_correction(
    f: Callable[..., State], states: Sequence[State], gamma: float = 0.8, vecs: int = 1
) -> Tensor:
    r"""Jacobian regularisation of every state, weighted by its place.

    .. math:: \ell = \sum_{k=0}^{n-1} \gamma^{\,n-k-1}
              \frac{1}{|z_k|} \, \mathbb{E}_v \bigl\| v^\top J_f(z_k) \bigr\|^2

    with :math:`|z_k|` the number of elements. The states are taken as they are: the gradient
    reaches what ``f`` depends on, not the solve behind the states. It follows the grad mode.

    Args:
        f: called as ``f(z)``, or ``f(*z)`` for states that are tuples or lists.
        states: the states, the last one the best.
        gamma: base of the weights.
        vecs: random vectors per state.
    """
    if type(states) not in (list, tuple) or not states:
        raise ValueError(
            f"states must be a non-empty list of states, got {type(states).__name__}: wrap one "
            "state as [z]"
        )

    def term(state: State) -> Tensor:
        with torch.enable_grad():
            z = tree_map(lambda t: t.detach().requires_grad_(), state)
            image = f(*z) if isinstance(z, (tuple, list)) else f(z)
        return jac_reg(image, z, vecs, create_graph=torch.is_grad_enabled())

    n = len(states)
    total: Any = sum(exp_weight(n, k, gamma) * term(state) for k, state in enumerate(states))
    return cast(Tensor, total)


def _sequences(args: Iterable[Any]) -> list[Sequence[Any]]:
    """Every argument as a sequence over the states, of their number or of length 1."""
    if isinstance(args, Tensor):
        raise TypeError(
            "args must hold the arguments of crit, as in fp_correction(crit, (states, target)): "
            "got a tensor"
        )
    # A named tuple is one structured argument, hence no isinstance.
    sequences = [each if type(each) in (list, tuple) else [each] for each in args]
    lengths = [len(each) for each in sequences]
    n = max(lengths, default=0)
    if not n or set(lengths) - {1, n}:
        raise ValueError(
            f"the lists in args must have one item, or one for each of {n} states: got lengths "
            f"{lengths}; repeat an item where it should serve several states"
        )
    return sequences


def _with_options(name: str, options: dict[str, Any]) -> Weight:
    """The weight function with its options, without those that only other built-in ones have."""
    weight = WEIGHTS[name]
    own = _option_names(weight)
    if own is None:
        return partial(weight, **options)
    built_in = (exp_weight, linear_weight, const_weight)
    known = {*own, "gamma", "bias", "c"} if weight in built_in else set(own)
    unknown = [key for key in options if key not in known]
    if unknown:
        raise TypeError(
            f"unknown option {unknown[0]!r} of weight function {name!r}{suggest(unknown[0], own)}"
        )
    return partial(weight, **{key: value for key, value in options.items() if key in own})


def _option_names(weight: Weight) -> list[str] | None:
    """The parameters of a weight function after n and k; None if it takes any."""
    try:
        parameters = list(inspect.signature(weight).parameters.values())
    except ValueError:  # some callables written in C do not tell
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [
        p.name
        for i, p in enumerate(parameters)
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and i >= 2)
    ]


def _numbers(losses: list[Tensor]) -> list[float]:
    """Scalar losses as floats, in one transfer."""
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                "return_loss_values needs a crit that returns one number per state, e.g. with "
                f".mean() at its end: got {got}"
            )
    values: list[float] = torch.stack([loss.detach().reshape(()) for loss in losses]).tolist()
    return values
