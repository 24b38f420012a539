"""Every option of the library in one list: fields with defaults, checks and help."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torchdeq.compat.names import WITHOUT_EFFECT, current_name
from torchdeq.config_checks import check_config
from torchdeq.coupling import parse_coupling
from torchdeq.distributed.peers import SyncStop, parse_sync_stop
from torchdeq.option import (
    check_names,
    convert,
    option,
    read_options,
    warn_near_misses,
)
from torchdeq.stopping import StopRule, parse_interval


@dataclass(frozen=True)
class DEQConfig:
    """The options of a DEQ.

    `DEQConfig(args)` reads a Namespace, a dict, another config or any object with attributes;
    keywords win over `args`. Every keyword and every key of a dict must be an option. An object
    belongs to the program: the config reads only the attributes that are named like an option, and
    warns about a near miss. The config changes no object of the caller, and nothing changes a
    config: `with_options` returns another one.
    """

    args: InitVar[Any] = None
    _: KW_ONLY

    f_solver: str = option("fixed_point_iter", "forward solver, by its registered name")
    b_solver: str = option(
        "fixed_point_iter",
        "solver of the backward pass of --ift: a forward solver, gmres, bicgstab or neumann",
    )
    f_max_iter: int = option(
        40, "evaluations of f in the forward solve; 0 leaves only the --grad steps (BPTT)"
    )
    b_max_iter: int = option(40, "products with the Jacobian in the backward solve")
    f_tol: float = option(1e-3, "residual at which a sample of the forward solve has converged")
    b_tol: float = option(
        1e-6, "residual at which the backward solve has converged, relative to the gradient"
    )
    f_stop_mode: str = option("abs", "forward residual |f(z) - z|: abs, or rel to |f(z)|")
    b_stop_mode: str = option("abs", "backward residual: abs or rel, as f_stop_mode")
    f_rtol: float | None = option(
        None, "instead of f_tol: converged at |f(z) - z| <= f_atol + f_rtol |f(z)|", parse=float
    )
    f_atol: float | None = option(
        None, "the absolute part of the test of f_rtol; 0 if only f_rtol is set", parse=float
    )
    b_rtol: float | None = option(
        None, "instead of b_tol: as f_rtol, for the backward solve", parse=float
    )
    b_atol: float | None = option(None, "the absolute part of the test of b_rtol", parse=float)
    f_stop_norm: str = option(
        "l2", "norm of residuals: l2, or rms, with which a tolerance means the same at every size"
    )
    f_check_every: int | Literal["auto"] = option(
        1,
        "evaluations between two checks of the forward residuals; auto: few on an accelerator",
        parse=parse_interval,
    )
    b_check_every: int = option(1, "products between two checks of the backward residuals")
    eval_factor: float = option(1.0, "the budget outside training is f_max_iter times this factor")
    eval_f_max_iter: int = option(0, "evaluations of f outside training; wins over eval_factor")
    f_solver_kwargs: dict[str, Any] = option(
        {}, "options of the forward solver, e.g. --f_opt m=10 tau=0.8", name="f_opt"
    )
    b_solver_kwargs: dict[str, Any] = option(
        {}, "options of the backward solver, e.g. --b_opt l_thres=20", name="b_opt"
    )
    on_failure: str = option(
        "auto",
        "what to do if samples do not converge: ignore, warn or raise; auto warns, but not about a "
        "spent forward budget",
    )
    coupled: bool | str | None = option(
        None,
        "whether samples depend on each other: true (one system), false, adjoint (one system in "
        "the backward pass only) or auto (a test in the backward pass)",
        parse=parse_coupling,
        metavar="auto|true|false|adjoint",
    )

    sync_stop: SyncStop = option(
        None,
        "processes that evaluate f until all of them are done: world, a process group (in Python), "
        "false, or auto: if f calls SyncBatchNorm or an announced collective",
        parse=parse_sync_stop,
        metavar="auto|world|false",
    )
    compile_f: bool = option(
        False,
        "run f as graphs of torch.compile; did not pay for dense layers on a CPU: measure yours",
    )

    norm_type: str = option("weight_norm", "normalisation: weight_norm, spectral_norm or none")
    norm_no_scale: bool = option(False, "fix the norm to norm_target_norm instead of learning it")
    norm_clip: bool = option(False, "only shrink weights: scale by at most norm_clip_value")
    norm_clip_value: float = option(1.0, "the largest factor a weight is scaled by")
    norm_target_norm: float = option(
        1.0, "the norm of weights if it is not learnt, else where a spectral norm starts"
    )
    sn_n_power_iters: int = option(1, "power iterations per step of the spectral norm's estimate")

    core: str = option("sliced", "how training states are sampled: sliced or indexing")
    backward: str = option("auto", "auto (by --ift and --grad), ift, phantom or reversible")
    ift: bool = option(False, "differentiate implicitly: exact, memory independent of steps")
    hook_ift: bool = option(False, "the same as ift, which always takes the least memory")
    higher_order: bool = option(False, "make implicit gradients differentiable themselves")
    b_init: str = option("zeros", "start of the backward solve: zeros, or shine after broyden")
    n_states: int = option(1, "states returned in training, evenly spaced, for fp_correction")
    indexing: list[int] = option([], "evaluations after which a state is returned in training")
    gamma: float = option(0.8, "weight of earlier states in the fixed-point correction")
    grad: list[int] = option([1], "steps of the phantom gradient, one number or one per state")
    tau: float = option(1.0, "damping of the phantom gradient, in (0, 1]")
    sup_gap: int = option(-1, "return every sup_gap-th of the phantom gradient's states")
    sup_loc: list[int] = option([], "return the phantom gradient's states after these steps")

    jac_loss_weight: float = option(0.0, "weight of the Jacobian regularisation")
    jac_loss_freq: float = option(0.0, "fraction of training steps that are regularised")
    jac_incremental: int = option(0, "raise jac_loss_weight by 0.1 after so many steps")
    sradius_mode: bool = option(False, "estimate the Jacobian's spectral radius in evaluation")

    if TYPE_CHECKING:  # not options: the names that were set, and further values of the program
        _given: ClassVar[frozenset[str]]
        _keywords: ClassVar[frozenset[str]]
        _extra: ClassVar[dict[str, Any]]

    def __new__(cls, args: Any = None, **options: Any) -> Self:
        # __init__ cannot tell whether a program passed a keyword if its value is the default.
        check_names(options, cls.names())
        self = super().__new__(cls)
        object.__setattr__(self, "_given", frozenset(options))
        object.__setattr__(self, "_keywords", self._given)
        object.__setattr__(self, "_extra", {})
        return self

    def __post_init__(self, args: Any) -> None:
        if isinstance(args, DEQConfig):
            values, extra = {name: getattr(args, name) for name in args.given}, args.extra
        else:
            values, extra = read_options(args, self.names())
        for name, value in values.items():
            if name not in self._given:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "_extra", extra)
        object.__setattr__(self, "_given", self._given | set(values))
        parsers = {f.name: f.metadata.get("parse") for f in fields(self)}
        for name, default in self.defaults().items():
            value = getattr(self, name)
            if value is None and name in ("f_tol", "b_tol"):
                value = 0.0
            object.__setattr__(self, name, convert(name, value, default, parsers[name]))
        check_config(self, self._keywords)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options."""
        return [f.name for f in fields(cls) if f.init]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return every option with its default."""
        return {
            f.name: f.default_factory() if callable(f.default_factory) else f.default
            for f in fields(cls)
            if f.init
        }

    @property
    def extra(self) -> dict[str, Any]:
        """Return the values of the program that are not options of the library."""
        return dict(self._extra)

    @property
    def given(self) -> frozenset[str]:
        """Return the names of the options that the program has set, even to their defaults."""
        return self._given

    def get(self, key: str, default: Any = None) -> Any:
        """Return the option or extra value `key` if the program has set it, else `default`."""
        key = current_name(key)
        if key in self._given:
            return getattr(self, key)
        return self._extra.get(key, default)

    def with_options(self, **options: Any) -> Self:
        """Return the config with some options changed."""
        return type(self)(self, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.with_options()  # a process group cannot be copied

    @property
    def implicit(self) -> bool:
        """Return whether the last state is differentiated implicitly."""
        return self.ift or self.hook_ift or self.backward == "ift"

    @property
    def budget_in_evaluation(self) -> int:
        """Return the evaluations of `f` outside training."""
        return self.eval_f_max_iter or int(self.f_max_iter * self.eval_factor)

    @property
    def f_stop(self) -> StopRule:
        """Return the stop rule of the forward solve."""
        return self._stop("f")

    @property
    def b_stop(self) -> StopRule:
        """Return the stop rule of the backward solve."""
        return self._stop("b")

    def _stop(self, side: str) -> StopRule:
        """Return the stop rule of the solve whose options begin with `side`, `"f"` or `"b"`."""

        def own(name: str) -> Any:
            return getattr(self, f"{side}_{name}")

        rtol, atol = own("rtol"), own("atol")
        joint = rtol is not None or atol is not None
        test = {"tol": None, "rtol": rtol or 0.0, "atol": atol or 0.0} if joint else {}
        return StopRule(
            max_iter=own("max_iter"),
            mode=own("stop_mode"),
            check_every=own("check_every"),
            norm=self.f_stop_norm if side == "f" else "l2",  # backward residuals are relative
            sync_stop=self.sync_stop,
            **({"tol": own("tol")} | test),
        )


# __new__ hides the parameters of __init__ from tools.
DEQConfig.__signature__ = inspect.signature(DEQConfig.__init__)  # type: ignore[attr-defined]


def read_config(
    args: Any,
    options: Mapping[str, Any],
    core_options: Iterable[str] = (),
    open_ended: bool = False,
) -> DEQConfig:
    """Return a config from the options that a program passes.

    Args:
        args: the options of the program.
        options: keywords, which win over `args`.
        core_options: the names of options that a core adds to those of the library.
        open_ended: whether the core takes any other keyword, too; a near miss of an option warns.
    """
    names, core_options = DEQConfig.names(), set(core_options)
    values, extra = dict[str, Any](), dict[str, Any]()
    from_dict = dict(args) if isinstance(args, Mapping) else {}
    for key, value in {**from_dict, **options}.items():
        current = current_name(key)
        if current in names or not (key in core_options or key in WITHOUT_EFFECT or open_ended):
            values[current] = value
        elif key not in WITHOUT_EFFECT:
            extra[key] = value
    if open_ended:
        warn_near_misses(extra.keys() - core_options, set(names) - set(values))
    config = DEQConfig(None if isinstance(args, Mapping) else args, **values)
    object.__setattr__(config, "_extra", config._extra | extra)
    return config
