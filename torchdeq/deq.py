"""DEQ modules: the options of a program wired to a solver and a backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchdeq.compat.ignored import CALL_KEYWORDS, ignore_keywords
from torchdeq.config import DEQConfig, read_config
from torchdeq.dropout import reset_dropout
from torchdeq.functional import FixedPoint, fixed_point
from torchdeq.grad import Backward, Phantom, make_adjoint_solver, make_backwards
from torchdeq.loss import spectral_radius
from torchdeq.norm import reset_norm
from torchdeq.packing import Packing, State, aux_at, without_aux
from torchdeq.registry import Registry
from torchdeq.solver import (
    SOLVERS,
    Coupling,
    Solver,
    SolverStat,
    get_solver,
    make_solver,
    published_options,
)
from torchdeq.solver.functions import SolverFunction, function_solver
from torchdeq.tracing import untraced

#: Options that a call of a module does not read: others do, when a model is built or trained.
_ELSEWHERE = {
    "core": "it is the class of the module",
    **{name: "norms are applied to a model by apply_norm" for name in DEQConfig.names()
       if name.startswith(("norm_", "sn_"))},
    **dict.fromkeys(("gamma", "jac_loss_weight", "jac_loss_freq", "jac_incremental"),
                    "it belongs to the loss, which the program computes"),
}  # fmt: skip
_OPTIONS = frozenset(DEQConfig.names())

Writer = Callable[[SolverStat], object]
Output = tuple[list[State], SolverStat]


class DEQBase(nn.Module):
    """What every DEQ module has: options, solvers, evaluation.

    A core of one's own derives from this and says in :meth:`train_states` which states training
    returns; evaluation is the same for all. Options that its ``__init__`` adds as keywords can be
    passed to :func:`get_deq`.

    Options are attributes too, and act from the next call on: ``deq.f_max_iter = 60``,
    ``deq.tau = 0.5``. One that no call reads, such as ``deq.norm_type``, raises ``AttributeError``.
    Evaluation has the budget ``deq.eval_f_max_iter``, computed when the module is built.

    Args:
        args: options as a Namespace, dict, :class:`DEQConfig` or object with attributes.
        **options: options that win over ``args``.
    """

    f_max_iter: int
    b_max_iter: int
    f_tol: float
    b_tol: float
    f_stop_mode: str
    b_stop_mode: str
    eval_f_max_iter: int

    no_stat = False  # statistics cost nothing until they are read

    def __init__(self, args: Any = None, **options: Any) -> None:
        super().__init__()
        self.args = read_config(args, options, *own_options(type(self)))
        self.eval_f_max_iter = self.args.budget_in_evaluation
        self._own_solver: SolverFunction | None = None
        self._refused: dict[str, Exception] = {}  # own attributes of a core that are no options
        self._now = self._checked(self.args)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hooks = {"_compute_f_iter", "_solve_fixed_point"} & set(vars(cls))
        if hooks and cls.forward is DEQBase.forward:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(sorted(hooks))} of torchdeq 0.1.0, which "
                "nothing calls any more: define train_states, or forward"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OPTIONS or "_now" not in self.__dict__ or name in ("f_solver", "b_solver"):
            super().__setattr__(name, value)
        elif type(self).forward is DEQBase.forward:
            self._set_option(name, value)
        else:  # a core of its own reads its own attributes, whatever they are called
            self._refused.pop(name, None)
            try:
                self._set_option(name, value)
            except (AttributeError, TypeError, ValueError) as error:
                if name not in _ELSEWHERE:
                    self._refused[name] = error  # raised if the core calls our forward after all
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONS and "_now" in self.__dict__:
            return getattr(self._now, name)
        return super().__getattr__(name)

    def _set_option(self, name: str, value: Any) -> None:
        """Let an option act from the next call on, or raise."""
        if name in _ELSEWHERE:
            raise AttributeError(
                f"option {name!r} cannot be changed on a module ({_ELSEWHERE[name]}): build a new "
                f"one, get_deq(deq.config, {name}=...)"
            )
        if name == "eval_f_max_iter":  # 0 is a budget here, not the absence of the option
            self.__dict__[name] = budget = _whole(value)
            if budget:
                self._now = self._checked(self._now.with_options(eval_f_max_iter=budget))
            return
        self._now = self._checked(self._now.with_options(**{name: value}))
        if name == "eval_factor" and not self._now.eval_f_max_iter:
            self.__dict__["eval_f_max_iter"] = int(self._now.f_max_iter * self._now.eval_factor)

    def _checked(self, config: DEQConfig) -> DEQConfig:
        """Return ``config``; raise for names and options that no call could use."""
        make_solver(config.f_solver, config.f_solver_kwargs)
        make_adjoint_solver(config.b_solver, config.b_solver_kwargs)
        make_backwards(config, len(config.grad))
        self.check_states(config, config.f_max_iter)
        return config

    def check_states(self, config: DEQConfig, budget: int) -> None:
        """Raise ``ValueError`` if training cannot return the states that are asked for."""
        return

    @property
    def config(self) -> DEQConfig:
        """The options as they are now."""
        return self._now

    @property
    def f_solver(self) -> SolverFunction:
        """The forward solver as a function; a name or another function may be assigned."""
        return self._own_solver or get_solver(self._now.f_solver)

    @f_solver.setter
    def f_solver(self, solver: str | SolverFunction) -> None:
        if isinstance(solver, str):
            self._set_option("f_solver", solver)
            self._own_solver = None
        elif callable(solver) and not isinstance(solver, type):
            self._own_solver = solver
        else:
            raise TypeError(f"f_solver must be a name or a function, got {solver!r}")

    @property
    def b_solver(self) -> SolverFunction | str:
        """The backward solver as a function, or the name of a linear one; a name may be assigned,
        or the function of a registered solver."""
        name = self._now.b_solver
        return get_solver(name) if name in SOLVERS else name

    @b_solver.setter
    def b_solver(self, solver: str | SolverFunction) -> None:
        named = (key for key in SOLVERS if get_solver(key) is solver)
        name = solver if isinstance(solver, str) else next(named, None)
        if name is None:
            raise TypeError(
                f"b_solver must be the name of a solver or a registered function, got {solver!r}: "
                "call register_solver first"
            )
        self._set_option("b_solver", name)

    @untraced
    def forward(
        self,
        func: Callable[..., State],
        z_init: State = None,
        solver_kwargs: Mapping[str, Any] | None = None,
        sradius_mode: bool = False,
        backward_writer: Writer | None = None,
        args: tuple[Any, ...] = (),
        compact: bool = False,
        f_max_iter: int | None = None,
        has_aux: bool = False,
        **published: Any,
    ) -> Any:
        """Solve ``z = func(z, *args)`` from ``z_init``.

        Args:
            func: called with a tensor or dict state as it is, with a tuple or list state unpacked.
            z_init: the start; a former fixed point, for reuse.
            solver_kwargs: options of the forward solver for this call, ``f_max_iter``, and
                ``return_final`` for the last state instead of the best.
            sradius_mode: put the spectral radius of each sample's Jacobian into the statistics; in
                evaluation only.
            backward_writer: called once per backward pass with the statistics of its solve.
            args: further arguments of ``func``.
            compact: finished samples leave the batch; every tensor in ``args`` must lead with it.
            f_max_iter: budget of this call; sampled steps follow it.
            has_aux: ``func`` returns ``(z, aux)``; the ``aux`` of the last state comes back as a
                third value, computed by one evaluation more.
            **published: names of torchdeq 0.1.0: ``z_star`` for ``z_init``; ``writer`` and ``best``
                have no effect, as there.

        Returns:
            The states, each a tensor, dict or, for a tuple start, list of tensors, and the
            statistics of the forward solve. In training these are the sampled states, the last
            one the fixed point; in evaluation the fixed point alone.
        """
        if z_init is None:
            z_init = published.pop("z_star", None)
        if z_init is None:
            raise TypeError("a DEQ is called with a function and a start: z_init is missing")
        if published:
            ignore_keywords(published, "the call of a DEQ", CALL_KEYWORDS, _CALL)
        if self._refused:
            raise next(iter(self._refused.values()))
        options = dict(solver_kwargs or {})
        budget = self._budget(f_max_iter, options)
        return_final = bool(options.pop("return_final", False))
        call = ForwardPass(
            without_aux(func) if has_aux else func,
            z_init,
            args,
            self.make_solver(options),
            self.config,
            backward_writer,
            compact,
            return_final,
        )
        if self.training:
            states, stats = self.train_states(call, budget)
        else:
            state, stats = call.evaluate(budget)
            if sradius_mode or self._now.sradius_mode:
                stats["sradius"] = call.spectral_radius(state)
            states = [state]
        states = [list(z) if isinstance(z, tuple) else z for z in states]
        return (states, stats, aux_at(func, states[-1], args)) if has_aux else (states, stats)

    def _budget(self, f_max_iter: int | None, options: dict[str, Any]) -> int:
        """The budget of this call; takes it out of the solver's options if it is there."""
        asked = [b for b in (f_max_iter, options.pop("f_max_iter", None)) if b is not None]
        budget = asked[0] if asked else self.f_max_iter if self.training else self.eval_f_max_iter
        if len(asked) > 1:
            raise ValueError(f"f_max_iter must be given once, got {asked}")
        return _whole(budget)

    def train_states(self, call: ForwardPass, budget: int) -> Output:
        """The states that training returns, for a budget of evaluations."""
        raise NotImplementedError(f"{type(self).__name__} must define train_states, or forward")

    def extra_repr(self) -> str:
        changed = {k: v for k, v in self.args.defaults().items() if getattr(self.config, k) != v}
        return ", ".join(f"{k}={getattr(self.config, k)!r}" for k in changed)

    def make_solver(self, options: Mapping[str, Any]) -> Solver[Any]:
        """Return the forward solver with options of one call.

        An option that another solver of torchdeq 0.1.0 has is ignored with a note, as there; any
        other unknown one is an error.
        """
        for name in ("tol", "max_iter", "stop_mode"):
            if name in options or name in self._now.f_solver_kwargs:
                raise TypeError(
                    f"{name!r} is not an option of a solver: set f_{name} when the module is made, "
                    f"or on it, as in deq.f_{name} = ..."
                )
        if self._own_solver is not None:
            return function_solver(self._own_solver, {**self._now.f_solver_kwargs, **options})
        key = self._now.f_solver
        return make_solver(key, {**self._now.f_solver_kwargs, **published_options(key, options)})


#: Keywords of a call, for suggestions.
_CALL = [name for name in inspect.signature(DEQBase.forward).parameters if name != "published"][1:]


@dataclass(frozen=True)
class ForwardPass:
    """One call of a DEQ: what is asked, and the ways a core can have it answered."""

    func: Callable[..., State]
    z0: State
    args: tuple[Any, ...]
    solver: Solver[Any]
    config: DEQConfig
    writer: Writer | None
    compact: bool
    return_final: bool = False

    def backwards(self, n: int) -> list[Backward]:
        """One backward for each of ``n`` states."""
        return make_backwards(self.config, n, self.writer)

    def solve(
        self,
        z0: State,
        budget: int,
        backward: Backward,
        record: list[tuple[int, Backward]] | None = None,
        keep_estimate: bool = False,
    ) -> FixedPoint:
        """A differentiable fixed point from ``z0`` after at most ``budget`` evaluations."""
        return fixed_point(
            self.func,
            z0,
            self.args,
            solver=self.solver,
            backward=backward,
            stop=replace(self.config.f_stop, max_iter=budget, return_final=self.return_final),
            record=record or (),
            compact=self.compact,
            on_failure=self.config.on_failure,
            keep_estimate=keep_estimate,
            coupled=cast(Coupling, self.config.coupled),
        )

    def evaluate(self, budget: int) -> tuple[State, SolverStat]:
        """The solver's own estimate; without a budget, the steps that training unrolls."""
        (backward,) = self.backwards(1)
        if isinstance(backward, Phantom):  # the last state, whichever of them training samples
            backward = Phantom(grad=backward.grad, tau=backward.tau)
        found = self.solve(self.z0, budget, backward, keep_estimate=budget > 0)
        return found.z, found.stats

    def spectral_radius(self, z: State) -> Tensor:
        """(B,) that of the Jacobian at ``z``."""
        packing = Packing(z)
        h = packing.pack(z).detach().requires_grad_()
        with torch.enable_grad():
            fz = packing.wrap(self.func, self.args)(h)

        def vjp(v: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(fz, h, v, retain_graph=True, allow_unused=True)
            return torch.zeros_like(v) if product is None else product

        return spectral_radius(vjp, h).radius if fz.requires_grad else h.new_zeros(len(h))


CORES: Registry[type[nn.Module]] = Registry("core")


@CORES.register("indexing")
class DEQIndexing(DEQBase):
    """One solve; training samples states along it, each with a gradient of its own.

    ``n_states=n`` samples every ``f_max_iter // n`` evaluations, the last state at the end;
    otherwise ``indexing`` names the evaluations, and the end is added unless it is the last of
    them.
    """

    def check_states(self, config: DEQConfig, budget: int) -> None:
        _check_states(config, budget)

    def train_states(self, call: ForwardPass, budget: int) -> Output:
        self.check_states(self.config, budget)
        steps = self.sampled_steps(budget)
        *earlier, last = call.backwards(len(steps))
        record = list(zip(steps, earlier, strict=False))
        if record and self.config.backward == "reversible":
            raise ValueError(
                "a reversible iteration gives its last state only: use core='sliced', or one state"
            )
        found = call.solve(call.z0, budget, last, record)
        return found.states, found.stats

    def sampled_steps(self, budget: int) -> list[int]:
        """Evaluations after which a state is taken."""
        if self.config.n_states == 1:
            return [*_before(self.config.indexing, budget), budget]
        n = self.config.n_states if budget else 1  # without a solve there is one state
        return [budget - (n - 1 - k) * (budget // n) for k in range(n)]


@CORES.register("sliced")
class DEQSliced(DEQBase):
    """Several solves in a row; each ends with its gradient steps, and the next goes on from there.

    ``n_states=n`` makes ``n`` slices of ``f_max_iter // n`` evaluations; otherwise ``indexing``
    names where to cut. No gradient passes from one slice to the one before.
    """

    def check_states(self, config: DEQConfig, budget: int) -> None:
        _check_states(config, budget)

    def train_states(self, call: ForwardPass, budget: int) -> Output:
        self.check_states(self.config, budget)
        slices = self.slices(budget)
        z, states, nfe = call.z0, [], 0
        for size, backward in zip(slices, call.backwards(len(slices)), strict=True):
            found = call.solve(z, size, backward)
            states += found.states
            nfe += found.stats.nfe
            z = _detached(found.z)
        found.stats.nfe = nfe
        return states, found.stats

    def slices(self, budget: int) -> list[int]:
        """Evaluations of each solve."""
        n = self.config.n_states
        if n > 1:
            return [budget // n] * n
        inner = _before(self.config.indexing, budget)
        cuts = [0, *(min(k, budget) for k in inner), budget]
        return [b - a for a, b in pairwise(cuts)]


CORES.seal()


def _check_states(config: DEQConfig, budget: int) -> None:
    """Raise if there are more states than evaluations; without a solve (BPTT) there may be."""
    if 0 < budget < config.n_states:
        raise ValueError(
            f"more states than evaluations: n_states={config.n_states} with a budget of {budget}; "
            "raise f_max_iter or ask for fewer states"
        )


def _before(indexing: list[int], budget: int) -> list[int]:
    """Return the sampled evaluations without the last, if the solve ends there: it counts once."""
    return indexing[:-1] if indexing and indexing[-1] == budget else indexing


def _whole(budget: Any) -> int:
    """Return a budget as an integer."""
    number = float(budget) if isinstance(budget, Real) else -1.0
    if not (number.is_integer() and number >= 0):
        raise ValueError(f"a budget of evaluations must be a whole number >= 0, got {budget!r}")
    return int(number)


def get_deq(args: Any = None, **options: Any) -> DEQBase:
    """A DEQ module of the core that the options name, ``sliced`` by default.

    Args:
        args: options as a Namespace, a dict, a :class:`DEQConfig` or any object with attributes.
        **options: options that win over ``args``.
    """
    named = args.get("core") if isinstance(args, Mapping) else getattr(args, "core", None)
    kind = CORES[options.get("core") or named or DEQConfig().core]
    own, open_ended = own_options(kind)
    config = read_config(args, options, own, open_ended)
    added = {key: config.get(key) for key in own if key in config._extra}
    return cast(DEQBase, kind(config, **added))


def register_deq(deq_type: str, core: type[nn.Module]) -> None:
    """Make a core known by name; it is built as ``core(config)``, with options that it adds."""
    if not isinstance(core, type):
        raise TypeError(
            "a core is a class that is built as core(config), derived from DEQBase with "
            f"train_states or forward: got {core!r}"
        )
    if issubclass(core, DEQBase) and not (
        core.train_states is not DEQBase.train_states or core.forward is not DEQBase.forward
    ):
        raise TypeError(
            f"a core derived from DEQBase defines train_states, or forward: {core.__name__} has "
            "neither"
        )
    CORES.register(deq_type, core)


def reset_deq(model: nn.Module) -> None:
    """Before a forward pass: compute normalised weights afresh and draw new dropout masks."""
    reset_norm(model)
    reset_dropout(model)


def own_options(kind: type) -> tuple[list[str], bool]:
    """Options that a core adds to those of the library: the keywords of its ``__init__``.

    Returns:
        Their names, and whether it takes any others as well.
    """
    known = {*DEQConfig.names(), "self", "args"}
    names, open_ended = [], False
    for base in kind.__mro__:
        if base.__module__ == __name__ or base in (nn.Module, object):
            continue
        if "__init__" not in vars(base):
            continue
        for name, p in inspect.signature(base.__init__).parameters.items():  # type: ignore[misc]
            open_ended |= p.kind is p.VAR_KEYWORD
            if name not in known and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                names.append(name)
    return names, open_ended


def _detached(z: State) -> State:
    packing = Packing(z)
    return packing.unpack(packing.pack(z).detach())
