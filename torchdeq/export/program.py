"""A model or a map as one graph: a program of `torch.export` whose batch may have any size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from torchdeq._torch import tree_leaves, tree_map
from torchdeq.checks import require_choice
from torchdeq.export.folding import evaluated, folded_norms
from torchdeq.export.in_graph import InGraph
from torchdeq.export.progress import Report
from torchdeq.export.rules import check_solver
from torchdeq.functional import fixed_point
from torchdeq.pytree import State
from torchdeq.reach import reachable_modules
from torchdeq.solver import Solver
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule
from torchdeq.tracing import solving_by

MODES = ("loop", "unroll")
_LOOPS = (2, 9)  # the version of torch from which it exports loops


def export(
    model: Callable[..., Any],
    example: Tensor | tuple[Any, ...],
    solver: Solver[Any] | None = None,
    stop: StopRule | None = None,
    *,
    mode: str = "loop",
    start: State = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Return a model with all its solves as one program of `torch.export`.

    The program computes what the model computes in evaluation mode without gradients, for batches
    of every size. It returns a dict of tensors: the output of the model (`output`, or the names of
    a dict), and for each solve

    - `status` (B,): how each sample ended, codes of `torchdeq.Status`;
    - `steps` (B,): evaluations of `f` up to the returned state of each sample;
    - `residual` (B,): of the returned state, in the terms of the tolerance;
    - `evaluations` (): calls of `f`.

    With several solves these names end with `_0`, `_1`, ... in the order of the calls. A graph does
    not warn or raise: read `status`. Normalised weights become constants. The model itself stays as
    it is, and the program has a copy of its weights: later training does not change the program.

    Args:
        model: a module whose `forward` calls a DEQ, `fixed_point` or `solve`; or with `start` the
            map `f` itself.
        example: the inputs of a call, with a batch of 2 or more.
        solver: the solver of every solve: `FixedPointIter`, `SimpleFixedPointIter` or `Anderson`.
            None keeps that of the model, which must be one of them.
        stop: budget and tolerance of every solve. None keeps those of the model.
        mode: `"loop"` stops once every sample has finished; `"unroll"` writes the whole budget out,
            for programs that know no loops.
        start: for a map: an example of the state. The program is then called with a state to
            start from and the inputs, and returns the fixed point.
        dynamic_shapes: as for `torch.export.export`, for the inputs in a tuple. None makes the
            first dimension of the first tensor the batch, and that of all tensors of this size.
    """
    require_choice("mode", mode, MODES)
    if mode == "loop" and not exports_loops():
        raise RuntimeError(
            f"mode='loop' needs torch {'.'.join(map(str, _LOOPS))} or later, and this is torch "
            f"{torch.__version__}: update torch, or choose mode='unroll'"
        )
    if solver is not None:
        check_solver(solver)
    inputs = example if isinstance(example, tuple) else (example,)
    if start is not None:
        model, inputs = _Equilibrium(model, solver, stop), (start, *inputs)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a model must be a torch.nn.Module, got {type(model).__name__}; with start=z0 the "
            "fixed point of a function is exported"
        )
    inputs = tree_map(_contiguous, inputs)  # compiled packages have the strides of the example
    shapes = _batch_shapes(inputs) if dynamic_shapes is None else dynamic_shapes
    modules = list(reachable_modules(model).values())
    traced = _Traced(model, InGraph(mode, solver, stop), len(inputs))
    with evaluated(modules), torch.no_grad():
        model(*inputs)  # an error of the model comes in its own words
        with folded_norms(modules):
            program = torch.export.export(traced, inputs, dynamic_shapes=shapes, strict=False)
    _copy_weights(program)
    return program


def exports_loops() -> bool:
    """Return whether `torch.export` of this version of torch keeps a loop as a loop."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= _LOOPS


def _copy_weights(program: ExportedProgram) -> None:
    """Give a program its own weights; a tensor with several names stays one tensor.

    `torch.export` keeps the tensors of the model. Normalised weights are constants already, so that
    a change of the others would give a program that is neither the old model nor the new one.
    """
    copies: dict[int, Tensor] = {}
    for weights in (program.state_dict, program.constants):
        for name, t in weights.items():
            if isinstance(t, Tensor):
                if id(t) not in copies:
                    copies[id(t)] = _copied(t)
                weights[name] = copies[id(t)]


def _contiguous(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf


def _copied(t: Tensor) -> Tensor:
    copy = t.detach().clone()
    return nn.Parameter(copy, t.requires_grad) if isinstance(t, nn.Parameter) else copy


class _Equilibrium(nn.Module):
    """A module that returns the fixed point of a map, called with a start and the map's inputs."""

    def __init__(
        self, f: Callable[..., Any], solver: Solver[Any] | None, stop: StopRule | None
    ) -> None:
        super().__init__()
        self.f, self.solver, self.stop = f, solver, stop
        if not isinstance(f, nn.Module):  # so that their parameters are known by name
            self.modules_of_f = nn.ModuleList(reachable_modules(f).values())

    def forward(self, z0: State, *args: Any) -> State:
        return fixed_point(
            self.f, z0, args, solver=self.solver, stop=self.stop, keep_estimate=True,
            on_failure="ignore",
        ).z  # fmt: skip


class _Traced(nn.Module):
    """A model whose solves are part of the graph, with their reports among its outputs."""

    def __init__(self, model: nn.Module, in_graph: InGraph, count: int) -> None:
        super().__init__()
        self.model, self._in_graph = model, in_graph
        names = _input_names(model, count)
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]

        def forward(*inputs: Any) -> dict[str, Tensor]:
            return self._run(inputs)

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def _run(self, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
        self._in_graph.reports.clear()
        with solving_by(self._in_graph):
            out = self.model(*inputs)
        outputs = dict(_named("output", out))
        return outputs | _report_outputs(self._in_graph.reports)


def _input_names(model: nn.Module, count: int) -> list[str]:
    """Return a name for each input: those of `forward`, numbers behind a name with a star."""
    names: list[str] = []
    for name, p in inspect.signature(model.forward).parameters.items():
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{name}_{k}" for k in range(count - len(names))]
        elif p.kind is not p.VAR_KEYWORD:
            names.append(name)
    if len(names) < count:
        raise TypeError(
            f"the example has {count} inputs, but {type(model).__name__}.forward takes {len(names)}"
        )
    return names[:count]


def _named(name: str, out: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a model returns with their names; statistics have their own."""
    if isinstance(out, Tensor):
        yield name, out
    elif isinstance(out, Mapping) and not isinstance(out, SolverStat):
        prefix = "" if name == "output" else f"{name}_"
        for key, child in out.items():
            yield from _named(f"{prefix}{key}", child)
    elif isinstance(out, (tuple, list)):
        kept = [child for child in out if child is not None and not isinstance(child, SolverStat)]
        for k, child in enumerate(kept):
            yield from _named(name if len(kept) == 1 else f"{name}_{k}", child)
    elif out is not None and not isinstance(out, SolverStat):
        raise TypeError(
            f"a program returns tensors, in tuples, lists or dicts, and this model returns "
            f"{type(out).__name__}: wrap it in a module that returns the tensors"
        )


def _report_outputs(reports: list[Report]) -> dict[str, Tensor]:
    """Return the results of all solves, by name."""
    outputs: dict[str, Tensor] = {}
    for k, report in enumerate(reports):
        end = f"_{k}" if len(reports) > 1 else ""
        outputs |= {f"{name}{end}": value for name, value in vars(report).items()}
    return outputs


def _batch_shapes(inputs: tuple[Any, ...]) -> Any:
    """Return dynamic shapes in which the first dimension of all inputs is the batch."""
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.dim()]
    if not tensors:
        raise ValueError("the example holds no tensor with a batch: pass dynamic_shapes=()")
    batch = tensors[0].shape[0]
    if batch < 2:
        raise ValueError(
            f"the example needs a batch of 2 or more, of which the size stays open, got {batch}: "
            "the program then takes batches of every size, also of 1"
        )
    dim = Dim("batch", min=1)

    def shape(t: Any) -> Any:
        return {0: dim} if isinstance(t, Tensor) and t.dim() and t.shape[0] == batch else None

    return tree_map(shape, inputs)
