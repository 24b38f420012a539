"""The solves inside a model: hooks find what each DEQ of a model is asked to solve."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchdeq.config import DEQConfig
from torchdeq.deq import DEQBase
from torchdeq.diagnostics.diagnosis import Diagnosis
from torchdeq.diagnostics.doctor import doctor
from torchdeq.packed import without_aux
from torchdeq.pytree import State, map_tensors

_SIGNATURE = inspect.signature(DEQBase.forward)


@dataclass(frozen=True)
class FoundSolve:
    """One call of a DEQ inside a model.

    Args:
        name: the path of the DEQ in the model, `""` if the model is the DEQ.
        f: the map.
        z0: the start, without its graph.
        args: further arguments of `f`.
        config: the options of the DEQ, with the budget of this call.
        training: whether the DEQ was in training mode.
    """

    name: str
    f: Callable[..., Any]
    z0: State
    args: tuple[Any, ...]
    config: DEQConfig
    training: bool

    @property
    def problem(self) -> tuple[Callable[..., Any], State, tuple[Any, ...]]:
        """Return `f, z0, args`, as the functions of `torchdeq.diagnostics` take them."""
        return self.f, self.z0, self.args

    def doctor(self, **options: Any) -> Diagnosis:
        """Examine this solve with the options of its DEQ; keywords are those of `doctor`."""
        return doctor(self.f, self.z0, self.args, config=self.config, **options)


def find_solves(model: nn.Module, *inputs: Any, **keywords: Any) -> list[FoundSolve]:
    """Call a model and return the solves that its DEQs were asked for, in order.

    Args:
        model: a model with modules from `get_deq` inside.
        *inputs: inputs of the model.
        **keywords: further inputs.
    """
    with recorded_solves(model) as solves:
        model(*inputs, **keywords)
    return solves


@contextmanager
def recorded_solves(model: nn.Module) -> Iterator[list[FoundSolve]]:
    """Return a block that fills a list with the solves of a model, for models with other calls.

    ```python
    with recorded_solves(model) as solves:
        loss = task.loss(model, batch)
    ```
    """
    solves: list[FoundSolve] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, DEQBase):
            hook = _Recorder(name, solves)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    if not handles:
        raise ValueError(
            f"{type(model).__name__} has no DEQ inside: it must have a module from get_deq; for a "
            "plain function, pass f and z0"
        )
    try:
        yield solves
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    """A forward pre-hook that appends the call of a DEQ to a list and changes nothing."""

    def __init__(self, name: str, solves: list[FoundSolve]) -> None:
        self._name, self._solves = name, solves

    def __call__(self, deq: DEQBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = dict(_SIGNATURE.bind_partial(deq, *args, **kwargs).arguments)
        published = call.get("published", {})
        z0 = call.get("z_init")
        z0 = published.get("z_star") if z0 is None else z0
        f = call.get("func")
        if f is None or z0 is None:
            return  # the call itself raises
        options = call.get("solver_kwargs") or {}
        budget = call.get("f_max_iter")
        budget = options.get("f_max_iter") if budget is None else budget
        if budget is None:
            budget = deq.f_max_iter if deq.training else deq.eval_f_max_iter
        f = without_aux(f) if call.get("has_aux") else f
        now = deq.config
        config = now.with_options(  # one state, as the functions of diagnostics examine it
            f_max_iter=int(budget), indexing=[], n_states=1, grad=now.grad[-1:], sup_gap=-1,
            sup_loc=[],
        )  # fmt: skip
        z0 = map_tensors(z0, Tensor.detach)
        self._solves.append(
            FoundSolve(self._name, f, z0, tuple(call.get("args", ())), config, deq.training)
        )
