"""DEQ modules: the options of a program connected to a solver and a backward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, cast

from torch import Tensor, nn

from torchdeq.compat.ignored import CALL_KEYWORDS, ignore_keywords
from torchdeq.compiling import compiled
from torchdeq.config import DEQConfig, read_config
from torchdeq.dropout import reset_dropout
from torchdeq.forward_pass import ForwardPass
from torchdeq.grad import IteratingBackward, Writer
from torchdeq.live_options import LiveOptions, whole_budget
from torchdeq.norm import reset_norm
from torchdeq.packed import aux_at, without_aux
from torchdeq.pytree import State, map_tensors
from torchdeq.registry import Registry
from torchdeq.stats import SolverStat, untraced_solve

Output = tuple[list[State], SolverStat]


class DEQBase(LiveOptions):
    """The base class of DEQ modules (cores): options, solvers, evaluation.

    A core defines in `train_states` which states training returns; evaluation is the same for all
    cores. Keywords of the `__init__` of a core become options of `get_deq`.

    Options are attributes, too, and act from the next call on: `deq.f_max_iter = 60`,
    `deq.tau = 0.5`. Setting an option that no call reads, such as `deq.norm_type`, raises
    `AttributeError`. Evaluation has the budget `deq.eval_f_max_iter`, which the module computes
    when it is built.

    Args:
        args: options as a Namespace, dict, `DEQConfig` or object with attributes.
        **options: options that win over `args`.
    """

    no_stat = False  # statistics cost nothing until they are read

    def __init__(self, args: Any = None, **options: Any) -> None:
        super().__init__(read_config(args, options, *own_options(type(self))))

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._own_attributes = cls.forward is not DEQBase.forward
        hooks = {"_compute_f_iter", "_solve_fixed_point"} & set(vars(cls))
        if hooks and not cls._own_attributes:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(sorted(hooks))} of torchdeq 0.1.0, which no "
                "code calls in this version: define train_states, or forward"
            )

    @untraced_solve
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
        """Solve `z = func(z, *args)` from `z_init`.

        Args:
            func: called as `func(z, *args)`, or `func(*z, *args)` for a tuple or list state.
            z_init: the start, e.g. the fixed point of an earlier call.
            solver_kwargs: options of the forward solver for this call, `f_max_iter`, and
                `return_final` for the last state instead of the best.
            sradius_mode: put the spectral radius of each sample's Jacobian into the statistics; in
                evaluation only.
            backward_writer: called once per backward pass with the statistics of its solve.
            args: further arguments of `func`.
            compact: finished samples leave the batch; the first dimension of every tensor in `args`
                must be the batch.
            f_max_iter: the budget of this call, from which sampled steps are computed.
            has_aux: `func` returns `(z, aux)`. One more evaluation, at the last state, computes the
                `aux` that comes back as a third value.
            **published: names of torchdeq 0.1.0: `z_star` for `z_init`; `writer` and `best` have no
                effect, as in 0.1.0.

        Returns:
            A list of states, and the statistics of the forward solve. Training returns the sampled
            states, the fixed point last; evaluation returns the fixed point alone. A tuple state
            comes back as a list.
        """
        z0 = self._start(z_init, published)
        options = dict(solver_kwargs or {})
        budget = self._budget(f_max_iter, options)
        return_final = bool(options.pop("return_final", False))
        f = without_aux(func) if has_aux else func
        call = ForwardPass(
            compiled(f, self) if self.config.compile_f else f,
            z0,
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
            if sradius_mode or self.config.sradius_mode:
                stats["sradius"] = call.spectral_radius(state)
            states = [state]
        states = [list(z) if isinstance(z, tuple) else z for z in states]
        return (states, stats, aux_at(func, states[-1], args)) if has_aux else (states, stats)

    def _start(self, z_init: State, published: dict[str, Any]) -> State:
        """Return the start of a call; raise for keywords and attributes that it cannot use."""
        if z_init is None:
            z_init = published.pop("z_star", None)
        if z_init is None:
            raise TypeError("z_init is missing: call a DEQ with a function and a start, deq(f, z0)")
        if published:
            ignore_keywords(published, "the call of a DEQ", CALL_KEYWORDS, _KEYWORDS)
        if self._refused:
            raise next(iter(self._refused.values()))
        return z_init

    def _budget(self, f_max_iter: int | None, options: dict[str, Any]) -> int:
        """Return the budget of a call; remove it from the options of the solver."""
        default = self.f_max_iter if self.training else self.eval_f_max_iter
        budgets = [b for b in (f_max_iter, options.pop("f_max_iter", None)) if b is not None]
        if len(budgets) > 1:
            raise ValueError(
                f"pass f_max_iter once, as a keyword or in solver_kwargs: got both, {budgets}"
            )
        return whole_budget(budgets[0] if budgets else default)

    def train_states(self, call: ForwardPass, budget: int) -> Output:
        """Return the states that training returns for a budget of evaluations, and statistics."""
        raise NotImplementedError(f"{type(self).__name__} must define train_states, or forward")


#: The keywords of a call, for suggestions.
_KEYWORDS = [name for name in inspect.signature(DEQBase.forward).parameters if name != "published"][
    1:
]

CORES: Registry[type[nn.Module]] = Registry("core")


class _SampledStates(DEQBase):
    """A core that returns `n_states` states, or those at the evaluations in `indexing`."""

    def check_states(self, config: DEQConfig, budget: int) -> None:
        if 0 < budget < config.n_states:  # without a solve (BPTT) there may be more states
            raise ValueError(
                f"more states than evaluations: n_states={config.n_states} with a budget of "
                f"{budget}; raise f_max_iter or ask for fewer states"
            )

    def _indexed(self, budget: int) -> list[int]:
        """Return `indexing` without the end of the solve, which counts once."""
        indexing = self.config.indexing
        return indexing[:-1] if indexing and indexing[-1] == budget else indexing


@CORES.register("indexing")
class DEQIndexing(_SampledStates):
    """A core with one solve, along which training samples states, each with its own gradient.

    `n_states=n` samples every `f_max_iter // n` evaluations, the last state at the end; otherwise
    `indexing` lists the evaluations, and the end of the solve is added unless it is last there.
    """

    def train_states(self, call: ForwardPass, budget: int) -> Output:
        self.check_states(self.config, budget)
        steps = self.sampled_steps(budget)
        *earlier, last = call.backwards(len(steps))
        record = list(zip(steps, earlier, strict=False))
        if record and isinstance(last, IteratingBackward):
            raise ValueError(
                f"{type(last).__name__} returns the last state of its iteration only: use "
                f"core='sliced', or one state, got {len(steps)} states"
            )
        solution = call.solve(call.z0, budget, last, record)
        return solution.states, solution.stats

    def sampled_steps(self, budget: int) -> list[int]:
        """Return the numbers of evaluations after which training samples a state."""
        if self.config.n_states == 1:
            return [*self._indexed(budget), budget]
        n = self.config.n_states if budget else 1  # without a solve there is one state
        return [budget - (n - 1 - k) * (budget // n) for k in range(n)]


@CORES.register("sliced")
class DEQSliced(_SampledStates):
    """A core with several solves in a row, each with its own gradient steps at the end.

    `n_states=n` makes `n` slices of `f_max_iter // n` evaluations; otherwise `indexing` lists the
    evaluations after which a slice ends. Each slice starts from the last state of the slice before
    it, without a gradient to that slice.
    """

    def train_states(self, call: ForwardPass, budget: int) -> Output:
        self.check_states(self.config, budget)
        slices = self.slices(budget)
        z, states, nfe = call.z0, [], 0
        for size, backward in zip(slices, call.backwards(len(slices)), strict=True):
            solution = call.solve(z, size, backward)
            states += solution.states
            nfe += solution.stats.nfe
            z = map_tensors(solution.z, Tensor.detach)
        solution.stats.nfe = nfe
        return states, solution.stats

    def slices(self, budget: int) -> list[int]:
        """Return the number of evaluations of each solve."""
        n = self.config.n_states
        if n > 1:
            return [budget // n] * n
        cuts = [0, *(min(k, budget) for k in self._indexed(budget)), budget]
        return [b - a for a, b in pairwise(cuts)]


CORES.seal()


def get_deq(args: Any = None, **options: Any) -> DEQBase:
    """Return a DEQ module of the core that the options name, `sliced` by default.

    Args:
        args: options as a Namespace, a dict, a `DEQConfig` or any object with attributes.
        **options: options that win over `args`.
    """
    name = args.get("core") if isinstance(args, Mapping) else getattr(args, "core", None)
    core = CORES[options.get("core") or name or DEQConfig().core]
    names, open_ended = own_options(core)
    config = read_config(args, options, names, open_ended)
    added = {key: config.get(key) for key in names if key in config.extra}
    return cast(DEQBase, core(config, **added))


def register_deq(deq_type: str, core: type[nn.Module]) -> None:
    """Register a core under a name; `get_deq` builds it as `core(config)`, with its own options."""
    if not isinstance(core, type):
        raise TypeError(
            "a core must be a class that is called as core(config), e.g. derived from DEQBase with "
            f"train_states or forward: got {core!r}"
        )
    if issubclass(core, DEQBase) and not (
        core.train_states is not DEQBase.train_states or core.forward is not DEQBase.forward
    ):
        raise TypeError(
            f"a core derived from DEQBase must define train_states, or forward: {core.__name__} "
            "has neither"
        )
    CORES.register(deq_type, core)


def reset_deq(model: nn.Module) -> None:
    """Compute normalised weights and discard dropout masks; call it before a forward pass."""
    reset_norm(model)
    reset_dropout(model)


def own_options(kind: type) -> tuple[list[str], bool]:
    """Return the options that a core adds to those of the library: keywords of its `__init__`.

    Returns:
        The names of these options, and whether the core takes any other keyword, too.
    """
    library = {*DEQConfig.names(), "self", "args"}
    names, open_ended = [], False
    for base in kind.__mro__:
        if base in (DEQBase, *DEQBase.__mro__) or "__init__" not in vars(base):
            continue
        for name, p in inspect.signature(base.__init__).parameters.items():  # type: ignore[misc]
            open_ended |= p.kind is p.VAR_KEYWORD
            if name not in library and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                names.append(name)
    return names, open_ended
