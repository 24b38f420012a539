"""Programs for the interface of torchdeq 0.1.0, answered by whichever torchdeq is imported.

Run as a script this file is a process that answers requests: pickled `(name, options)` in,
pickled answers out. With 0.1.0 first on the path that release answers; in the tests, ours does.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import torchdeq
from torchdeq.core import DEQBase
from torchdeq.grad import backward_factory
from torchdeq.solver import get_solver, solver_stat_from_final_step
from torchdeq.utils.layer_utils import deq_decorator

Answer = dict[str, Any]
PROGRAMS: dict[str, Callable[..., Answer]] = {}
BATCH, WIDTH = 3, 6


def program(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Let a function be asked for by its name."""
    PROGRAMS[function.__name__] = function
    return function


class Layer(nn.Module):
    """A contraction on each kind of state, in double precision, the same numbers at every call."""

    def __init__(self, state: str = "tensor", gain: float = 0.5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        W = draw(WIDTH, WIDTH)
        self.W = nn.Parameter(gain * W / torch.linalg.matrix_norm(W, 2))
        self.x = nn.Parameter(draw(BATCH, WIDTH))
        self.conv = nn.Conv2d(2, 2, 3, padding=1).double()
        with torch.no_grad():
            for p in self.conv.parameters():
                p.copy_(0.05 * draw(*p.shape))
        self.image = nn.Parameter(draw(BATCH, 2, 4, 4))
        self.state = state
        self.cotangents = {"tensor": [draw(BATCH, WIDTH)], "image": [draw(BATCH, 2, 4, 4)]}
        self.cotangents["pair"] = [self.cotangents["tensor"][0], self.cotangents["image"][0]]

    @property
    def start(self) -> Any:
        zeros = [torch.zeros_like(t) for t in self.cotangents[self.state]]
        return tuple(zeros) if self.state == "pair" else zeros[0]

    def forward(self, *z: Tensor) -> Any:
        if self.state == "tensor":
            return torch.tanh(z[0] @ self.W.mT + self.x)
        if self.state == "image":
            return torch.tanh(self.conv(z[0]) + self.image)
        mean = z[1].mean((1, 2, 3), keepdim=True)
        a = torch.tanh(z[0] @ self.W.mT + self.x + 0.3 * mean.flatten(1))
        return a, torch.tanh(self.conv(z[1]) + self.image + 0.1 * z[0].sum(1)[:, None, None, None])

    def gradients(self, states: list[Any]) -> list[Tensor]:
        """Of a loss in which every tensor of every state has a share of its own."""
        loss: Any = 0.0
        for k, state in enumerate(states):
            tensors = [state] if isinstance(state, Tensor) else state
            for z, c in zip(tensors, self.cotangents[self.state], strict=True):
                loss = loss + ((k + 1) * c * z).sum()
        found = torch.autograd.grad(loss, list(self.parameters()), allow_unused=True)
        return [g for g in found if g is not None]


def tensors(states: list[Any]) -> list[Tensor]:
    """The values of states, tuples taken apart."""
    return [t.detach() for z in states for t in ([z] if isinstance(z, Tensor) else z)]


@program
def run_deq(
    options: dict[str, Any],
    state: str = "tensor",
    training: bool = True,
    call: dict[str, Any] | None = None,
) -> Answer:
    """The states of a DEQ, and in training the gradients of a loss on all of them."""
    layer = Layer(state)
    deq = torchdeq.get_deq(**options).train(training)
    states, _ = deq(layer, layer.start, solver_kwargs=call)
    gradients = layer.gradients(states) if training else []
    return {"states": tensors(states), "gradients": gradients}


@program
def run_solver(solver: str, options: dict[str, Any], shape: tuple[int, ...] = (3, 4)) -> Answer:
    """A solver as a function: the state, recorded states and statistics."""
    b = torch.linspace(-1, 1, max(1, torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
    func, x0 = deq_decorator(lambda z: 0.4 * torch.sin(z) + b, torch.zeros_like(b))
    z, states, info = get_solver(solver)(func, x0, **options)
    keys = ("abs_lowest", "rel_lowest", "nstep")
    return {"z": z, "states": states, **{key: info[key].double() for key in keys}}


class Normed(nn.Module):
    """Every kind of layer that norms know, one of them filtered out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.conv = nn.Conv1d(6, 3, 3, padding=1)
        self.up = nn.ConvTranspose1d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        return self.head(torch.tanh(self.up(torch.tanh(self.conv(h[:, :, None])))).squeeze(2))


@program
def train_normed(options: dict[str, Any], state: dict[str, Tensor] | None, steps: int) -> Answer:
    """Some steps of gradient descent on a normalised model, from a given state."""
    torch.manual_seed(1)
    model = Normed()
    torchdeq.apply_norm(model, filter_out="head", **options)
    if state is not None:
        model.load_state_dict(state)
    first = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, outputs = torch.linspace(-1, 1, 20).view(5, 4), []
    for _ in range(steps):
        torchdeq.reset_norm(model)
        outputs.append(model(x))
        optimizer.zero_grad()
        outputs[-1].square().sum().backward()
        optimizer.step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.eval()
    torchdeq.reset_norm(model)
    outputs.append(model(x))
    last = {key: value.clone() for key, value in model.state_dict().items()}
    torchdeq.remove_norm(model)
    outputs.append(model(x))
    return {
        "first": first,
        "outputs": [t.detach() for t in outputs],
        "gradients": gradients,
        "last": last,
        "removed": model.state_dict(),
    }


@program
def draw_masks(kind: str, options: dict[str, Any], shape: tuple[int, ...]) -> Answer:
    """Variational dropout twice, with a reset between two pairs of calls."""
    torch.manual_seed(5)
    layer = getattr(torchdeq, kind)(**options)
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    outputs = [layer(x), layer(2 * x)]
    torchdeq.reset_dropout(layer)
    outputs += [layer(x), layer.eval()(x)]
    return {"outputs": outputs}


@program
def correct(n: int, weight_func: str, options: dict[str, Any]) -> Answer:
    """The fixed-point correction of a squared error over `n` states."""
    states = [torch.full((2, 3), float(k), requires_grad=True) for k in range(n)]
    target = torch.ones(2, 3)
    loss, values = torchdeq.fp_correction(
        lambda z, y: (z - y).square().mean(),
        (states, target),
        weight_func=weight_func,
        return_loss_values=True,
        **options,
    )
    plain = torchdeq.fp_correction(nn.MSELoss(), (states, target), weight_func, **options)
    gradients = torch.autograd.grad(loss, states)
    return {"loss": loss.detach(), "values": values, "plain": plain.detach(), "grads": gradients}


@program
def regularise(vecs: int) -> Answer:
    """The Jacobian loss and its gradient under a seed; the spectral radius of a symmetric map."""
    torch.manual_seed(2)
    A = torch.randn(4, 4)
    A = (A @ A.mT / torch.linalg.matrix_norm(A @ A.mT, 2)).requires_grad_()
    z = torch.randn(3, 4, requires_grad=True)
    loss = torchdeq.jac_reg(torch.tanh(z @ A.mT), z, vecs=vecs)
    (gradient,) = torch.autograd.grad(loss, A)
    _, radius = torchdeq.power_method(z @ A.mT, z, n_iters=200)
    return {"loss": loss.detach(), "gradient": gradient, "radius": radius.detach()}


@program
def recompute() -> Answer:
    """A module through `mem_gc`: values, and gradients of its input and its parameters."""
    layer = Layer()
    z = torch.linspace(-1, 1, BATCH * WIDTH, dtype=torch.float64).view(BATCH, WIDTH)
    z.requires_grad_()
    out = torchdeq.mem_gc(layer, (z,))
    gradients = torch.autograd.grad(out.sum(), (z, layer.W, layer.x))
    return {"out": out.detach(), "gradients": list(gradients)}


@program
def draw_start(shape: tuple[int, ...]) -> Answer:
    """A mixed start under a seed."""
    torch.manual_seed(3)
    return {"z": torchdeq.mixed_init(shape), "after": torch.rand(2)}


def conv(channels: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, padding=1)


class Multiscale(nn.Module):
    """Two resolutions in the manner of MDEQ: residual blocks, then fusion."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([nn.Sequential(conv(4), nn.GroupNorm(2, 4)) for _ in range(2)])
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.up = nn.Conv2d(4, 4, 1)
        self.norm = nn.ModuleList([nn.GroupNorm(2, 4) for _ in range(2)])
        self.x = nn.Parameter(torch.randn(2, 4, 8, 8))

    def start(self) -> Any:
        return torch.zeros(2, 4, 8, 8), torch.zeros(2, 4, 4, 4)

    def forward(self, a: Tensor, b: Tensor) -> Any:
        a = torch.relu(self.block[0](a) + self.x + a)
        b = torch.relu(self.block[1](b) + b)
        up = nn.functional.interpolate(self.up(b), scale_factor=2)
        return self.norm[0](torch.relu(a + up)), self.norm[1](torch.relu(b + self.down(a)))


class Attention(nn.Module):
    """A causal attention block after its residual and layer norm, as in the DEQ transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.ff = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12))
        self.norms = nn.ModuleList([nn.LayerNorm(12), nn.LayerNorm(12)])
        self.x = nn.Parameter(torch.randn(2, 6, 12))

    def start(self) -> Any:
        return torch.zeros(2, 6, 12)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.qkv(z + self.x).chunk(3, -1)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.norms[0](z + self.x + self.out(h))
        return self.norms[1](h + self.ff(h))


class Recurrent(nn.Module):
    """A gated convolution with a flow beside it, as in DEQ-Flow."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 2, 3, padding=1)
        self.x = nn.Parameter(torch.randn(2, 4, 6, 6))

    def start(self) -> Any:
        return torch.zeros(2, 4, 6, 6), torch.zeros(2, 2, 6, 6)

    def forward(self, h: Tensor, flow: Tensor) -> Any:
        x = self.x + torch.cat((flow, flow), 1)
        gate = torch.sigmoid(self.gate(torch.cat((h, x), 1)))
        h = (1 - gate) * h + gate * torch.tanh(self.new(torch.cat((h, x), 1)))
        return h, 0.5 * flow + self.head(h)


class Sine(nn.Module):
    """A sine of an affine map, as in DEQ-INR."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.x = nn.Linear(16, 16), nn.Parameter(3 * torch.randn(5, 16))

    def start(self) -> Any:
        return torch.zeros(5, 16)

    def forward(self, z: Tensor) -> Tensor:
        return torch.sin(self.W(z) + self.x)


class Graph(nn.Module):
    """`relu(A z W + x)` with nodes as rows, as in IGNN."""

    def __init__(self) -> None:
        super().__init__()
        A = torch.rand(10, 10)
        self.A, self.W = A / A.sum(1, keepdim=True), nn.Linear(6, 6)
        self.x = nn.Parameter(torch.randn(10, 6))

    def start(self) -> Any:
        return torch.zeros(10, 6)

    def forward(self, z: Tensor) -> Tensor:
        return torch.relu(self.A @ self.W(z) + self.x)


class Chain(nn.Module):
    """Every step of a diffusion chain as a row, each made from those before it, as in DEQ-DDIM."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 6))
        self.x = nn.Parameter(torch.randn(1, 6))

    def start(self) -> Any:
        return self.x.detach().repeat(8, 1)

    def forward(self, z: Tensor) -> Tensor:
        before = torch.cat((self.x, z[:-1]))
        return self.x + 0.3 * torch.cumsum(self.net(before), 0)


class Random(nn.Module):
    """`tanh` of a random matrix whose spectral radius is about `gain`."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.W = nn.Parameter(gain * torch.randn(24, 24) / 24**0.5)
        self.x = nn.Parameter(torch.randn(4, 24))

    def start(self) -> Any:
        return torch.zeros(4, 24)

    def forward(self, z: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.mT + self.x)


MAPS: dict[str, Callable[..., Any]] = {
    "mdeq": Multiscale,
    "lm": Attention,
    "flow": Recurrent,
    "inr": Sine,
    "ignn": Graph,
    "ddim": Chain,
    "random": Random,
}


@program
def residual_after(
    kind: str, solver: str, f_max_iter: int, seed: int = 0, gain: float | None = None
) -> Answer:
    """The residual of every sample, in double precision, where a solver's budget ends."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        f = MAPS[kind]() if gain is None else MAPS[kind](gain)
        deq = torchdeq.get_deq(f_solver=solver, f_max_iter=f_max_iter, f_tol=0.0).eval()
        with torch.no_grad():
            (z,), _ = deq(f, f.start())
            pairs = [(z, f(z))] if isinstance(z, Tensor) else list(zip(z, f(*z), strict=True))
            rows = torch.cat([(fz - z).flatten(1) for z, fz in pairs], 1)
        return {"residual": rows.norm(dim=1)}
    finally:
        torch.set_default_dtype(torch.float32)


@program
def parse(argv: list[str]) -> Answer:
    """What the flags parse to."""
    parser = argparse.ArgumentParser()
    torchdeq.add_deq_args(parser)
    return vars(parser.parse_args(argv))


def relaxation(func: Any, x0: Any, max_iter: int = 50, tol: float = 1e-3, **kwargs: Any) -> Any:
    """A solver as clients of 0.1.0 write them; what it does not know, it ignores."""
    x = x0
    for _ in range(max_iter):
        fx = func(x)
        x = 0.5 * x + 0.5 * fx
    indexing = [x] if kwargs.get("indexing") else []
    return x, indexing, solver_stat_from_final_step(x, fx, max_iter)


class ClientCore(DEQBase):
    """A core as clients of 0.1.0 write them: every helper of the old base class, no new one."""

    def __init__(self, args: Any = None, ift: bool = False, grad: Any = 1, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        self.attach = backward_factory(
            "ift" if self.args.get("ift", ift) else 2,
            b_solver=self.b_solver,
            b_solver_kwargs={
                "max_iter": self.b_max_iter,
                "tol": self.b_tol,
                "stop_mode": self.b_stop_mode,
            },
        )

    def _solve_fixed_point(self, deq_func: Any, z_init: Any, f_max_iter: int) -> Any:
        with torch.no_grad():
            z, trajectory, info = self.f_solver(
                deq_func,
                x0=z_init,
                max_iter=f_max_iter,
                tol=self.f_tol,
                stop_mode=self.f_stop_mode,
                indexing=[f_max_iter],
            )
        return z, trajectory, info

    def forward(self, func: Any, z_init: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        deq_func, z = deq_decorator(func, z_init, no_stat=False)
        z, trajectory, info = self._solve_fixed_point(deq_func, z, self.f_max_iter)
        z_out = self.attach(self, deq_func, deq_func.detach(trajectory[-1]))
        return [deq_func.vec2list(each) for each in z_out], info


class HalfNorm:
    """A norm as clients of 0.1.0 write them: it halves the weight."""

    _target_modules: ClassVar[dict[type, tuple[str, int]]] = {nn.Linear: ("weight", 0)}
    factor: float

    @classmethod
    def apply(cls, module: nn.Module, deq_args: Any = None, factor: float = 0.5) -> HalfNorm:
        norm = cls()
        norm.factor = deq_args.get("norm_target_norm", factor)
        weight = module._parameters.pop("weight")
        module.register_parameter("weight_raw", weight)
        norm(module)
        return norm

    def __call__(self, module: Any) -> None:
        module.weight = self.factor * module.weight_raw

    def remove(self, module: Any) -> None:
        weight = module.weight.detach()
        del module.weight, module.weight_raw
        module.register_parameter("weight", nn.Parameter(weight))


@program
def run_client(state: str, ift: bool, f_solver: str) -> Answer:
    """A client's solver, core and norm, registered after the parser was built."""
    warnings.simplefilter("ignore")  # registering a name again warns
    parser = argparse.ArgumentParser()
    torchdeq.add_deq_args(parser)
    torchdeq.register_solver("relaxation", relaxation)
    torchdeq.register_deq("client", ClientCore)
    torchdeq.register_norm("half", HalfNorm)
    flags = ["--core", "client", "--f_solver", f_solver, "--f_max_iter", "80", "--f_tol", "1e-9"]
    flags += ["--b_tol", "1e-9", "--norm_type", "half", "--norm_target_norm", "0.25"]
    args = parser.parse_args([*flags, "--ift"] if ift else flags)
    layer = Layer(state)
    states, info = torchdeq.get_deq(args).train()(layer, layer.start)
    model = nn.Linear(3, 3, bias=False)
    nn.init.eye_(model.weight)
    torchdeq.apply_norm(model, args=args)
    torchdeq.reset_norm(model)
    weight = model.weight.detach()
    torchdeq.remove_norm(model)
    return {
        "states": tensors(states),
        "gradients": layer.gradients(states),
        "nstep": info["nstep"].double(),
        "weight": weight,
        "removed": model.state_dict(),
    }


@program
def half_map(options: dict[str, Any], scale: float = 1.0, twice: bool = False) -> Answer:
    """`z = z / 2 + w` has the solution 2 w: the value and gradient of `scale * z` at w = 1."""
    w = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    deq = torchdeq.get_deq(**options).train()
    runs = [deq(lambda z: 0.5 * z + w, torch.zeros_like(w))[0] for _ in range(1 + twice)]
    (gradient,) = torch.autograd.grad(sum(scale * z[-1].sum() for z in runs), w)
    return {"z": float(runs[0][-1]), "states": len(runs[0]), "gradient": float(gradient)}


@program
def second_derivative(options: dict[str, Any]) -> Answer:
    """Of the solution `z = w^2 / (1 - w / 2)` of `z = z w / 2 + w^2`, twice, at w = 1."""
    w = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    deq = torchdeq.get_deq(ift=True, f_tol=1e-12, b_tol=1e-12, f_max_iter=80, b_max_iter=80,
                           **options).train()  # fmt: skip
    z = deq(lambda z: 0.5 * w * z + w**2, torch.zeros_like(w))[0][-1]
    (first,) = torch.autograd.grad(z.sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    return {"first": float(first), "second": float(second)}


@program
def poisoned_step(solver: str) -> Answer:
    """A solve whose last evaluation is NaN."""
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (0.5 * z + 1) * (torch.nan if calls == 8 else 1.0)

    z, _, _ = get_solver(solver)(f, torch.zeros(1, 2), max_iter=8, tol=1e-9)
    return {"finite": bool(z.isfinite().all())}


@program
def counted(solver: str, budget: int) -> Answer:
    """How often a solver evaluates `f`, and whether it moved."""
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 0.5 * z + 1

    z, _, _ = get_solver(solver)(f, torch.zeros(2, 3), max_iter=budget, tol=1e-9)
    return {"calls": calls, "moved": bool((z != 0).any())}


@program
def with_mates(solver: str) -> Answer:
    """How much the answer of an easy sample depends on a hard one beside it."""
    rates = torch.tensor([[0.2], [0.98]], dtype=torch.float64)

    def run(rows: int) -> Tensor:
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)[:rows]
        z: Tensor = get_solver(solver)(
            lambda z: torch.tanh(rates[:rows] * z + x), torch.zeros_like(x), max_iter=100, tol=1e-3
        )[0]
        return z[:1]

    return {"difference": float((run(2) - run(1)).abs().max())}


@program
def evaluate_with_gradient() -> Answer:
    """Whether a state found in evaluation can be differentiated, e.g. for forces."""
    w = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    deq = torchdeq.get_deq(ift=True, f_tol=1e-9, b_tol=1e-9).eval()
    z = deq(lambda z: 0.5 * z + w, torch.zeros_like(w))[0][-1]
    return {"gradient": float(torch.autograd.grad(z.sum(), w)[0]) if z.requires_grad else None}


@program
def initialise_late() -> Answer:
    """A weight that is initialised after the norm was applied, as the layer then uses it."""
    model = nn.Linear(2, 2)
    torchdeq.apply_norm(model, "weight_norm")
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    torchdeq.reset_norm(model)
    return {"weight": model.weight.tolist()}


@program
def slip(option: str) -> Answer:
    """A misspelt option, and what becomes of the dict it came in."""
    given = {"f_max_iter": 5, option: "rel"}
    torchdeq.get_deq(given, core="indexing")
    return {"given": given}


def answer(name: str, options: dict[str, Any]) -> Answer:
    """Run a program; an error is an answer too."""
    try:
        return PROGRAMS[name](**options)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}


def main(folder: str) -> None:
    """Answer until the input ends."""
    found = Path(str(torchdeq.__file__))
    if not found.is_relative_to(folder):
        raise ImportError(f"torchdeq came from {found}, expected it in {folder}")
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library may print
    torch.set_num_threads(1)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(answer(*request), replies)
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
