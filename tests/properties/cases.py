"""Cases of a random map, a backward and a transform, and the expected result by unrolling."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import CheckpointError, checkpoint

from tests.properties.grammar import (
    STARTS,
    VIAS,
    Model,
    Run,
    Settled,
    sentences,
    settle,
    unroll,
)
from tests.properties.pieces import B, D, Draw
from torchdeq.experimental import Reversible
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, Phantom, make_adjoint_solver
from torchdeq.solver import Anderson, ConvergenceWarning, Coupling, FixedPointIter, StopRule

Params = dict[str, Tensor]
Out = Callable[[Params, Tensor], Tensor]

ADJOINTS = (
    "gmres",
    "anderson",
    "broyden",
    "fixed_point_iter",
    "bicgstab",
    "neumann",
    "newton_krylov",
)
TOLERANCE = 1e-8
REVERSIBLE_STEPS = 8


@dataclass(frozen=True)
class Setting:
    """The tensors that the transforms need besides the map."""

    params: Params
    x: Tensor
    xs: Tensor  # (2, B, D)
    C: Tensor  # weights of the loss
    tangents: Params
    dx: Tensor

    def loss(self, out: Out) -> Out:
        return lambda p, x: (self.C * torch.sin(out(p, x))).sum()


def _leaves(s: Setting) -> tuple[Params, Tensor]:
    leaf = lambda t: t.detach().clone().requires_grad_()  # noqa: E731
    return {k: leaf(p) for k, p in s.params.items()}, leaf(s.x)


def _plain(order: int, wrapped: bool = False) -> Callable[[Out, Setting], Any]:
    """Return a function that differentiates `order` times by plain autograd."""

    def run(out: Out, s: Setting) -> Any:
        p, x = _leaves(s)
        leaves = [x, *p.values()]
        loss = s.loss(out)
        value = checkpoint(loss, p, x, use_reentrant=False) if wrapped else loss(p, x)
        for k in range(order):
            last = k + 1 == order
            g = torch.autograd.grad(
                value, leaves, create_graph=not last, allow_unused=True, materialize_grads=True
            )
            value = sum((t * torch.cos(t)).sum() for t in g)
        return g

    return run


def _dual(out: Out, s: Setting) -> Any:
    with forward_ad.dual_level():
        p = {k: forward_ad.make_dual(t, s.tangents[k]) for k, t in s.params.items()}
        t = forward_ad.unpack_dual(out(p, forward_ad.make_dual(s.x, s.dx))).tangent
        assert t is not None
        return t.clone()


def _scalar_of(g: tuple[Params, Tensor]) -> Tensor:
    """Return a scalar function of a gradient, to differentiate it again."""
    return (g[1] * torch.cos(g[1])).sum() + sum((t**2).sum() for t in g[0].values())


def _hessian_product(out: Out, s: Setting) -> Any:
    return jvp(grad(s.loss(out), (0, 1)), (s.params, s.x), (s.tangents, s.dx))


def _grads(out: Out, s: Setting, order: int) -> Any:
    h: Callable[..., Any] = s.loss(out)
    for k in range(order):
        g = grad(h, (0, 1))
        if k + 1 < order:
            h = lambda p, x, g=g: _scalar_of(g(p, x))  # noqa: E731
    return g(s.params, s.x)


def _each(fn: Callable[[Tensor], Any], s: Setting, batched: bool) -> Any:
    """Return `fn` of both inputs: under `vmap`, or one after the other."""
    if batched:
        return vmap(fn)(s.xs)
    return tree_map(lambda *ts: torch.stack(ts), *(fn(x) for x in s.xs))


@dataclass(frozen=True)
class Transform:
    """A way to differentiate; `reference` is the same way without `vmap` over the solve."""

    name: str
    order: int
    apply: Callable[[Out, Setting], Any]
    reference: Callable[[Out, Setting], Any]
    functional: bool = True  # whether it runs inside torch.func or with dual numbers


def _both(name: str, order: int, apply: Any, **kw: Any) -> Transform:
    return Transform(name, order, apply, apply, **kw)


def _vmapped(name: str, order: int, inner: Callable[[Out, Setting], Any], **kw: Any) -> Transform:
    return Transform(
        name,
        order,
        lambda out, s: _each(inner(out, s), s, True),
        lambda out, s: _each(inner(out, s), s, False),
        **kw,
    )


_ALL = (
    _both("autograd", 1, _plain(1), functional=False),
    _both("functional_call", 1, _plain(1), functional=False),
    Transform("checkpoint", 1, _plain(1, wrapped=True), _plain(1), functional=False),
    _both("grad", 1, lambda out, s: _grads(out, s, 1)),
    _both("vjp", 1, lambda out, s: vjp(out, s.params, s.x)[1](s.C)),
    _both("jacrev", 1, lambda out, s: jacrev(lambda x: out(s.params, x))(s.x)),
    _vmapped("vmap(grad)", 1, lambda out, s: lambda x: grad(s.loss(out), (0, 1))(s.params, x)),
    _both("jvp", 1, lambda out, s: jvp(out, (s.params, s.x), (s.tangents, s.dx))),
    _both("dual level", 1, _dual),
    _both("jacfwd", 1, lambda out, s: jacfwd(lambda x: out(s.params, x))(s.x)),
    _vmapped("vmap(jvp)", 1, lambda out, s: lambda x: jvp(out, (s.params, x), (s.tangents, s.dx))),
    _both("autograd twice", 2, _plain(2), functional=False),
    _both("hessian", 2, lambda out, s: hessian(lambda x: s.loss(out)(s.params, x))(s.x)),
    _both("grad(grad)", 2, lambda out, s: _grads(out, s, 2)),
    _both("jvp(grad)", 2, _hessian_product),
    _vmapped("vmap(hessian)", 2, lambda out, s: hessian(lambda x: s.loss(out)(s.params, x))),
    _both("autograd thrice", 3, _plain(3), functional=False),
    _both("grad(grad(grad))", 3, lambda out, s: _grads(out, s, 3)),
)
#: The outcomes that pass. `torch refuses`: torch cannot transform a loop over f either.
FINE = ("agrees", "clear error", "torch refuses", "no reference")
TRANSFORMS = {t.name: t for t in _ALL}
METHODS = (*ADJOINTS, "higher_order", "higher_order", "higher_order", "phantom", "reversible")


@dataclass(frozen=True)
class Case:
    """One map, one backward, one transform."""

    seed: int
    model: Model
    setting: Setting
    steps: int  # the number after which plain iteration has converged
    switched: bool  # whether a decision at the fixed point differs from that at the start
    transform: Transform
    method: str
    adjoint: str
    grad: int  # the number of phantom steps
    tau: float  # the damping of phantom and reversible
    coupled: Coupling

    def describe(self) -> str:
        how = f"{self.method}[{self.adjoint}]" if self.method == "higher_order" else self.method
        pieces = " ".join(self.model.names)
        return (
            f"seed {self.seed}: {self.transform.name} of {how}; {pieces}; via {self.model.via}, "
            f"start {self.model.start}, coupled={self.coupled}"
        )

    @cached_property
    def backward(self) -> Any:
        if self.method == "phantom":
            return Phantom(grad=self.grad, tau=self.tau)
        if self.method == "reversible":
            return Reversible(tau=self.tau)
        return Implicit(
            solver=make_adjoint_solver(self.adjoint, {}),
            stop=StopRule(200, 1e-12),
            higher_order=self.method == "higher_order",
        )

    def solve(self, f: Any, z0: Tensor, args: tuple[Any, ...]) -> Tensor:
        """Return the fixed point that the library computes."""
        if self.method == "reversible":
            budget = StopRule(REVERSIBLE_STEPS, 0.0)
            return fixed_point(f, z0, args, stop=budget, backward=self.backward).z
        # A map with decisions may have several fixed points: compute that of the reference.
        solver = FixedPointIter() if self.model.decides else Anderson()
        return fixed_point(
            f, z0, args, solver=solver, stop=StopRule(200, 1e-13), backward=self.backward,
            coupled=self.coupled,
        ).z  # fmt: skip

    def unrolled(self, f: Any, z: Tensor, args: tuple[Any, ...]) -> Tensor:
        """Return the definition of each backward: a loop for plain differentiation."""
        if self.method == "reversible":
            older = z
            for _ in range(REVERSIBLE_STEPS):
                older, z = z, (1 - self.tau) * older + self.tau * f(z, *args)
            return z
        # Derivatives of order k converge like n^k times the error of the state: a few steps more.
        z = unroll(self.steps + 15)(f, z, args)
        if self.method == "phantom":
            z = z.detach()
            for _ in range(self.grad):
                z = (1 - self.tau) * z + self.tau * f(z, *args)
        return z

    def out(self, run: Run) -> Out:
        def call(p: Params, x: Tensor) -> Tensor:
            z: Tensor = functional_call(self.model, p, (x, run))
            return z

        return call

    def expected(self) -> Any:
        self.model.by_formula = True
        try:
            return self.transform.reference(self.out(self.unrolled), self.setting)
        finally:
            self.model.by_formula = False

    def got(self) -> Any:
        s = self.setting
        if self.transform.name == "autograd":  # with the module's own parameters
            x = s.x.clone().requires_grad_()
            z = self.model(x, self.solve)
            leaves = [x, *self.model.parameters()]
            return torch.autograd.grad(
                (s.C * torch.sin(z)).sum(), leaves, allow_unused=True, materialize_grads=True
            )
        return self.transform.apply(self.out(self.solve), s)

    def refusal(self) -> str | None:
        """Return why plain torch cannot differentiate a loop over the same map in this way."""
        try:
            self.transform.apply(self.out(self.unrolled), self.setting)
        except Exception as error:
            return _first_line(error)
        return None

    def outcome(self) -> str:
        """Return one of `FINE`, or what is wrong."""
        try:
            expected, structure = tree_flatten(self.expected())
        except Exception:  # a gap of torch, e.g. masked_scatter in forward mode under vmap
            return "no reference"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", ConvergenceWarning)
                got, same = tree_flatten(self.got())
        except Exception as error:
            if _RAW.search(str(error)):
                return f"raw error: {_first_line(error)}"
            if self.model.nested and CLEAR.search(str(error)):
                return "clear error"
            if isinstance(error, CheckpointError):  # raised by torch 2.6
                return "clear error"
            message, refusal = _first_line(error), self.refusal()
            if refusal is not None and (_REFUSALS.search(message) or message == refusal):
                return "torch refuses"
            return f"error: {message}"
        if len(got) != len(expected):
            return f"other structure: {same} instead of {structure}"
        worst = max(
            (float((a - b).abs().max() / max(1.0, float(b.abs().max()))) if b.numel() else 0.0)
            for a, b in zip(_detached(got), _detached(expected), strict=True)
        )
        return "agrees" if worst <= TOLERANCE else f"wrong by {worst:.1e}"


def _detached(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach() for t in tensors]


def _first_line(error: Exception) -> str:
    return (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
    )


#: A clear message names the cause (an operation inside f) and a way out, and is not torch's own.
CLEAR = re.compile(
    r"(?is)(?!.*(functorch transform|saved tensor hooks))"
    r"(?=.*(autograd\.grad|autograd\.backward|checkpoint|requires_grad_|differentiates))"
    r"(?=.*(\buse\b|\bpass\b|\bdrop\b|\bcall\b|\binstead\b))"
)
#: Messages of torch about operations that it does not support.
_REFUSALS = re.compile(
    r"functorch transform|saved tensor hooks|vmap: |data-dependent|dynamic shape"
)
_RAW = re.compile(r"INTERNAL ASSERT|please report a bug|Attempt(ed|ing) to .* dead")


def case(seed: int) -> Case:
    """Return the case of a seed, always the same."""
    draw = Draw(seed)
    transform = _ALL[seed % len(_ALL)]
    choices = [m for m in METHODS if _allowed(m, transform)]
    method = draw.choose.choice(choices)
    adjoint = method if method in ADJOINTS else draw.choose.choice(ADJOINTS)
    for names in sentences(draw):
        model = Model(draw, names, draw.choose.choice(VIAS), draw.choose.choice(STARTS))
        setting = _draw_setting(draw, model, transform)
        ends = [_settled(model, setting.params, x) for x in setting.xs]
        if all(end is not None for end in ends):
            break
    declared: tuple[Coupling, ...] = (None, None, True, "adjoint")
    coupled = draw.choose.choice(declared if model.couples else (None, False))
    settled = [end for end in ends if end is not None]
    return Case(
        seed=seed,
        model=model,
        setting=setting,
        steps=max(end.steps for end in settled),
        switched=settled[0].switched,
        transform=transform,
        method=method,
        adjoint=adjoint,
        grad=draw.choose.randint(1, 4),
        tau=draw.choose.choice((0.5, 0.8)),
        coupled=coupled,
    )


def _draw_setting(draw: Draw, model: Model, transform: Transform) -> Setting:
    x = draw.normal(B, D)
    xs = torch.stack((x, x + 0.1 * draw.normal(B, D)))
    # The modules' own parameters, or others in their place.
    moved = 0.02 if transform.name != "autograd" else 0.0
    params = {
        name: p.detach() * (1 + moved * draw.choose.uniform(-1, 1))
        for name, p in model.named_parameters()
    }
    tangents = {name: draw.normal(*p.shape) for name, p in params.items()}
    return Setting(params, x, xs, draw.normal(B, D), tangents, draw.normal(B, D))


def _settled(model: Model, params: Params, x: Tensor) -> Settled | None:
    return settle(lambda run: functional_call(model, params, (x, run)), model)


def _allowed(method: str, transform: Transform) -> bool:
    if method in ADJOINTS or method == "reversible":  # first order, except under torch.func
        return transform.functional or transform.order == 1
    return True
