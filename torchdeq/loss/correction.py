"""Losses on a sequence of states that converges to the fixed point."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from torchdeq._torch import tree_map
from torchdeq.loss.jacobian import jac_reg
from torchdeq.pytree import State
from torchdeq.registry import Registry, suggest

Weight = Callable[..., Any]  # (n, k, **options) -> weight of state k = 0, ..., n - 1

WEIGHTS: Registry[Weight] = Registry("weight function")


@WEIGHTS.register("exp")
def exp_weight(n: int, k: int, gamma: float = 0.8) -> float:
    """Return `gamma ** (n - k - 1)`: 1 for the last state, smaller for earlier states."""
    return gamma ** (n - k - 1)


@WEIGHTS.register("linear")
def linear_weight(n: int, k: int, gamma: float = 0.9, bias: float = 0.0) -> float:
    """Return `1 - (n - k - 1) / n * gamma + bias`: linear in `k`, `1 + bias` for the last state."""
    return 1 - (n - k - 1) / n * gamma + bias


@WEIGHTS.register("const")
def const_weight(n: int, k: int, c: float = 1.0) -> float:
    """Return `c` for every state."""
    return c


WEIGHTS.seal()


def register_weight_func(name: str, func: Weight) -> None:
    """Register `func(n, k, **options)`, the weight of state `k` out of `n`, by name."""
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
    r"""Return the fixed-point correction loss: the weighted sum of the losses of all states.

    $$\ell = \sum_{k=0}^{n-1} w(n, k) \; \mathrm{crit}(a_k, b_k, \dots)$$

    with `args = (a, b, ...)`. A list or tuple in `args` has one item per state; a list of one item,
    and any other argument, is used for every state:

    ```python
    loss = fp_correction(crit, (states, target), weight_func="linear", gamma=0.5)
    ```

    Args:
        crit: the loss of one state; the sum keeps the shape of a loss without reduction.
        args: the arguments of `crit`.
        weight_func: `"exp"`, `"linear"`, `"const"`, or a name given to `register_weight_func`.
        return_loss_values: whether to return the unweighted losses too, as floats (all are read
            from the device in one transfer).
        **kwargs: options of the weight function. A built-in function ignores the options of the
            other built-in ones (`gamma`, `bias`, `c`), so that `weight_func` can be changed alone.
    """
    sequences = _sequences(args)
    weight = _with_options(weight_func, kwargs)
    n = max(len(sequence) for sequence in sequences)
    losses = [crit(*(each[k % len(each)] for each in sequences)) for k in range(n)]
    total: Any = sum(weight(n, k) * loss for k, loss in enumerate(losses))
    return (total, _read_losses(losses)) if return_loss_values else total


def jac_correction(
    f: Callable[..., State], states: Sequence[State], gamma: float = 0.8, vecs: int = 1
) -> Tensor:
    r"""Return the weighted sum of the Jacobian regularisation of all states.

    $$\ell = \sum_{k=0}^{n-1} \gamma^{\,n-k-1}
    \frac{1}{|z_k|} \, \mathbb{E}_v \bigl\| v^\top J_f(z_k) \bigr\|^2$$

    where $|z_k|$ is the number of elements. The states are constants: gradients reach the tensors
    that `f` depends on, but not the solve that computed the states. Under `no_grad` the result has
    no graph.

    Args:
        f: called as `f(z)`, or `f(*z)` for states that are tuples or lists.
        states: the states, the closest to the fixed point last.
        gamma: the base of the weights.
        vecs: the number of random vectors per state.
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
    """Return each argument as a sequence with one item per state, or with one item for all."""
    if isinstance(args, Tensor):
        raise TypeError(
            "args must be a tuple of the arguments of crit, as in "
            "fp_correction(crit, (states, target)): got a tensor"
        )
    # Not isinstance: a named tuple is one structured argument.
    sequences = [each if type(each) in (list, tuple) else [each] for each in args]
    lengths = [len(each) for each in sequences]
    n = max(lengths, default=0)
    if not n or set(lengths) - {1, n}:
        raise ValueError(
            f"the lists in args must have one item, or one for each of {n} states: got lengths "
            f"{lengths}; repeat an item that several states should use"
        )
    return sequences


def _with_options(name: str, options: dict[str, Any]) -> Weight:
    """Return the weight function with its options bound.

    A built-in function ignores the options of the other built-in ones.
    """
    weight = WEIGHTS[name]
    names = _option_names(weight)
    if names is None:
        return partial(weight, **options)
    built_in = (exp_weight, linear_weight, const_weight)
    accepted = {*names, "gamma", "bias", "c"} if weight in built_in else set(names)
    unknown = [key for key in options if key not in accepted]
    if unknown:
        raise TypeError(
            f"unknown option {unknown[0]!r} of weight function {name!r}{suggest(unknown[0], names)}"
        )
    return partial(weight, **{key: value for key, value in options.items() if key in names})


def _option_names(weight: Weight) -> list[str] | None:
    """Return the parameters of a weight function after `n` and `k`; None if it accepts any name."""
    try:
        parameters = list(inspect.signature(weight).parameters.values())
    except ValueError:  # some callables written in C have no signature
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [
        p.name
        for i, p in enumerate(parameters)
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and i >= 2)
    ]


def _read_losses(losses: list[Tensor]) -> list[float]:
    """Return scalar losses as floats, in one transfer from the device."""
    for loss in losses:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                "return_loss_values needs a crit that returns one number per state, e.g. with "
                f".mean() at its end: got {got}"
            )
    values: list[float] = torch.stack([loss.detach().reshape(()) for loss in losses]).tolist()
    return values
