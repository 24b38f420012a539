"""Programs in the manner of the authors' six models, with their calls, and warnings as errors.

Each model is a few layers of the published kind. The tests check that the program runs unchanged:
training lowers the loss, evaluation gives finite numbers, and there is no warning.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdeq import (
    VariationalDropout,
    add_deq_args,
    apply_norm,
    fp_correction,
    get_deq,
    jac_reg,
    mem_gc,
    notes,
    reset_deq,
    reset_norm,
)


@pytest.fixture(autouse=True)
def _warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(notes, "_written", set())
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def flags(line: str) -> argparse.Namespace:
    """Parse the options of a program: its own and the library's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--name", default="run")
    add_deq_args(parser)
    return parser.parse_args(line.split())


def descend(model: nn.Module, loss_of: Any, steps: int = 3, lr: float = 0.01) -> list[float]:
    """Train, check every gradient, and return the loss of each step and the one after."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    model.train()
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    losses.append(loss_of().item())
    assert losses[-1] < losses[0]
    return losses


class Scales(nn.Module):
    """MDEQ: two resolutions of a picture; a residual block each, then each adds the other."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(2)])
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.up = nn.Conv2d(width, width, 1)
        self.norm = nn.ModuleList([nn.GroupNorm(2, width) for _ in range(4)])

    def forward(self, high: Tensor, low: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        high = F.relu(self.norm[0](self.conv[0](high)) + high + x)
        low = F.relu(self.norm[1](self.conv[1](low)) + low)
        bigger = F.interpolate(self.up(low), scale_factor=2.0)
        return self.norm[2](F.relu(high + bigger)), self.norm[3](F.relu(low + self.down(high)))


class Classifier(nn.Module):
    """A multiscale equilibrium between a stem and a head; `calls` names the program to imitate."""

    def __init__(self, args: argparse.Namespace, calls: str) -> None:
        super().__init__()
        self.args, self.calls = args, calls
        self.stem, self.scales = nn.Conv2d(3, 4, 3, padding=1), Scales()
        self.head = nn.Linear(8, 3)
        apply_norm(self.scales, filter_out=["norm"], args=args)
        self.deq = get_deq(args)

    def forward(self, picture: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
        x = self.stem(picture)
        reset_norm(self.scales)
        z = [torch.zeros_like(x), torch.zeros_like(x[..., ::2, ::2])]
        f = lambda high, low: self.scales(high, low, x)  # noqa: E731
        if self.calls == "cifar":
            z_out, info = self.deq(f, z, writer=None)
        else:
            z_out, info = self.deq(f, z, solver_kwargs={"tau": self.args.tau})
        pooled = [torch.cat([t.mean((2, 3)) for t in state], 1) for state in z_out]
        return [self.head(p) for p in pooled], info


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        ("cifar", "--f_solver broyden --f_max_iter 18 --f_tol 1e-3 --grad 5 --tau 0.5"),
        ("imagenet", "--f_solver broyden --f_max_iter 14 --f_tol 1e-4 --grad 5 --tau 0.7"),
        ("imagenet", "--f_solver fixed_point_iter --f_max_iter 12 --grad 5 --tau 1.0"),
        ("imagenet", "--f_solver anderson --f_max_iter 12 --n_states 2 --grad 2 --tau 0.6"),
    ],
)
@pytest.mark.parametrize("core", ["sliced", "indexing"])
def test_mdeq_trains_with_a_fixed_budget_that_never_reaches_the_tolerance(
    calls: str, line: str, core: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Classifier(flags(f"{line} --core {core}"), calls)
    picture, label = torch.randn(6, 3, 8, 8), torch.arange(6) % 3
    with caplog.at_level(logging.INFO, "torchdeq"):
        descend(model, lambda: F.cross_entropy(model(picture)[0][-1], label))
        with torch.no_grad():
            (logits,), info = model.eval()(picture)
    assert logits.isfinite().all()
    assert (info["abs_lowest"] > 1e-3).any()  # the tolerance was not met
    expected = []
    if calls == "cifar":
        expected = ["the keyword 'writer' of the call of a DEQ has no effect, as in 0.1.0"]
    elif "broyden" in line:
        expected = ["the solver 'broyden' has no option 'tau': it is ignored, as in 0.1.0"]
    assert caplog.messages == expected


class Motion(nn.Module):
    """DEQ-Flow: a gated convolution updates a hidden state, which updates a flow."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.encode, self.gate = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(10, 4, 3, padding=1)
        self.new, self.head = nn.Conv2d(10, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.deq = get_deq(args)
        self.args = args

    def update(self, hidden: Tensor, flow: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat((hidden, x, flow), 1)
        gate = torch.sigmoid(self.gate(seen))
        hidden = (1 - gate) * hidden + gate * torch.tanh(self.new(seen))
        return hidden, 0.3 * flow + self.head(hidden)

    def forward(
        self, frames: Tensor, start: Any = None, sradius_mode: bool = False, **kwargs: Any
    ) -> Any:
        x = self.encode(frames)
        zero = torch.zeros_like(x)
        z0 = (zero, torch.zeros_like(frames)) if start is None else start
        z_out, info = self.deq(
            lambda h, flow: self.update(h, flow, x), z0, sradius_mode=sradius_mode, **kwargs
        )
        return [flow for _, flow in z_out], z_out[-1], info


@pytest.mark.parametrize("solver", ["simple_fixed_point_iter", "fixed_point_iter", "anderson"])
def test_flow_trains_with_corrections_validates_with_best_and_reuses_states(solver: str) -> None:
    args = flags(f"--f_solver {solver} --f_max_iter 12 --eval_factor 1.5 --n_states 3 --grad 1 2 1")
    model = Motion(args)
    frames, truth = torch.randn(2, 2, 6, 6), 0.1 * torch.randn(2, 2, 6, 6)

    def loss() -> Tensor:
        flows, _, _ = model(frames)
        assert len(flows) == 3
        total: Tensor = fp_correction(F.l1_loss, (flows, truth), gamma=args.gamma)
        return total

    descend(model, loss)
    model.eval()
    with torch.no_grad():
        (flow,), state, info = model(frames, sradius_mode=True, best=True)
        assert (info["sradius"] > 0).all()
        (restarted,), _, _ = model(frames, start=[t.detach() for t in state], best=False)
    assert flow.isfinite().all()
    torch.testing.assert_close(restarted, flow, atol=0.1, rtol=0)


class Field(nn.Module):
    """DEQ-INR: a sine of an affine map of the state and the injected coordinates."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.mix, self.inject, self.decode = nn.Linear(16, 16), nn.Linear(2, 16), nn.Linear(16, 1)
        apply_norm(self.mix, args=args)
        self.deq = get_deq(args)

    def forward(self, points: Tensor, z: Tensor | None = None, skip: bool = False) -> Any:
        reset_norm(self)
        u = self.inject(points)
        z = torch.zeros_like(u) if z is None else z
        f = lambda z: torch.sin(self.mix(z) + u)  # noqa: E731
        z_pred, info = self.deq(f, z, solver_kwargs={"f_max_iter": 0} if skip else {})
        return [self.decode(z) for z in z_pred], z_pred[-1].detach(), info


def test_inr_solves_once_and_then_only_follows_the_gradient_steps() -> None:
    model = Field(flags("--f_max_iter 30 --f_tol 1e-4 --grad 3"))
    points = torch.rand(20, 2) * 2 - 1
    values = torch.sin(3 * points).sum(1, keepdim=True)
    cache: list[Tensor] = []

    def loss() -> Tensor:
        states, z, _ = model(points, cache[-1] if cache else None, skip=bool(cache))
        cache.append(z)
        return F.mse_loss(states[-1], values)

    descend(model, loss)
    model.eval()
    with torch.no_grad():
        (output,), _, info = model(points)
    assert output.isfinite().all()
    assert (info["nstep"] <= 30).all()


class GraphLayer(nn.Module):
    """IGNN: `X = relu(W X A + B)` with the features as rows, as in the authors' program."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.W, self.B = nn.Linear(6, 6, bias=False), nn.Linear(4, 6)
        self.out = nn.Linear(6, 2)
        apply_norm(self.W, args=args)
        self.deq = get_deq(args)

    def forward(self, A: Tensor, features: Tensor, X: Tensor | None = None) -> Any:
        reset_norm(self)
        b = self.B(features).mT  # (6, nodes)
        X = torch.zeros_like(b) if X is None else X
        z_out, _ = self.deq(lambda X: F.relu(self.W.weight @ X @ A + b), X)
        return self.out(z_out[-1].mT), z_out[-1].detach()


@pytest.mark.parametrize("line", ["--grad 5 --tau 0.5", "--ift --b_max_iter 60"])
def test_ignn_trains_on_one_graph_from_the_state_of_the_last_epoch(line: str) -> None:
    norm = "--norm_type spectral_norm --norm_no_scale --norm_target_norm 0.7"
    model = GraphLayer(flags(f"--f_max_iter 30 --f_tol 1e-5 {line} {norm}"))
    A = (torch.rand(12, 12) < 0.3).float()
    A = (A + A.mT).clamp(max=1)
    A = A / torch.linalg.matrix_norm(A, 2)
    features, label, cache = torch.randn(12, 4), torch.arange(12) % 2, [None]

    def loss() -> Tensor:
        logits, cache[0] = model(A, features, cache[0])
        return F.cross_entropy(logits, label)

    descend(model, loss)
    with torch.no_grad():
        logits, _ = model.eval()(A, features)
    assert logits.isfinite().all()


class Block(nn.Module):
    """DEQ-Transformer: causal attention and a feed-forward layer, which is recomputed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width))
        self.drop = VariationalDropout(0.05)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        q, k, v = self.qkv(0.3 * z + u).chunk(3, -1)
        # Written out: a Jacobian loss needs second derivatives, which fused attention lacks.
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        h = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        h = self.norms[0](u + 0.3 * self.drop(self.out(h)))
        recomputed: Tensor = mem_gc(self.ff, (h,))
        return self.norms[1](h + 0.3 * recomputed)


class Language(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.embed, self.block = args, nn.Embedding(11, 8), Block()
        self.read = nn.Linear(8, 11)
        apply_norm(self.block, filter_out=["norms"], args=args)
        self.deq = get_deq(args)

    def forward(self, words: Tensor, z: Tensor | None = None, regularise: bool = False) -> Any:
        reset_deq(self)
        u = self.embed(words)
        z = torch.zeros_like(u) if z is None else z
        f = lambda z: self.block(z, u)  # noqa: E731
        z_out, info = self.deq(f, z)
        jac_loss = torch.zeros(())
        if regularise:
            z_last = z_out[-1].detach().requires_grad_()
            jac_loss = jac_reg(f(z_last), z_last, vecs=1)
        return self.read(z_out[-1]), jac_loss, info


@pytest.mark.parametrize(
    "line",
    [
        "--ift --f_solver broyden --b_solver broyden --f_max_iter 35 --b_max_iter 35",
        "--hook_ift --f_solver anderson --b_solver anderson --f_max_iter 30 --b_max_iter 40",
        "--f_max_iter 0 --grad 6 --eval_f_max_iter 12",
    ],
)
def test_the_transformer_trains_with_a_jacobian_loss_and_recomputation(line: str) -> None:
    args = flags(f"{line} --f_stop_mode rel --b_stop_mode rel --b_tol 1e-4 --jac_loss_weight 0.1")
    model = Language(args)
    words = torch.randint(11, (3, 6))

    def loss() -> Tensor:
        torch.manual_seed(1)  # the same masks, so that losses compare
        logits, jac_loss, _ = model(words[:, :-1], regularise=True)
        entropy = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        return entropy + args.jac_loss_weight * jac_loss.mean()

    descend(model, loss)
    with torch.no_grad():
        logits, _, info = model.eval()(words)
    assert logits.isfinite().all()
    assert (info["rel_lowest"] < 0.1).all()


class Noise(nn.Module):
    """DEQ-DDIM: a small network that predicts the noise in a picture at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 3, 1, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat((x, t.view(-1, 1, 1, 1).expand_as(x)), 1))


@pytest.mark.parametrize("line", ["--f_solver anderson --grad 1", "--f_solver anderson --ift"])
def test_ddim_inverts_a_chain_whose_steps_are_rows(
    line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All times of the chain are rows of one state; gradient descent computes the latent."""
    deq = get_deq(flags(f"{line} --f_max_iter 15 --f_tol 1e-3 --b_max_iter 60 --b_tol 1e-4"))
    model, T = Noise().requires_grad_(False), 5
    times = torch.linspace(1, 0.2, T)
    target = 0.5 * torch.randn(1, 1, 4, 4)
    latent = torch.randn(1, 1, 4, 4, requires_grad=True)
    optimizer = torch.optim.Adam([latent], lr=0.05)

    def f(z: Tensor) -> Tensor:
        before = torch.cat((latent, z[:-1]))
        noise = 0.2 * model(before, times)
        return latent - torch.cumsum(noise, 0)

    losses = []
    with caplog.at_level(logging.INFO, "torchdeq"):
        for _ in range(4):
            start = latent.detach().repeat(T, 1, 1, 1)
            z_out, _ = deq(f, start, solver_kwargs={"m": 5, "lam": 1e-3, "beta": 1.0})
            loss = (z_out[-1][-1:] - target).square().sum()
            optimizer.zero_grad()
            loss.backward()
            assert latent.grad is not None
            assert latent.grad.isfinite().all()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert (
        "the solver 'anderson' has no option 'beta': it is ignored, as in 0.1.0" in caplog.messages
    )
    with torch.no_grad():
        (chain,), _ = deq.eval()(f, start, solver_kwargs={"m": 5, "lam": 1e-3, "beta": 1.0})
        z = latent
        for k in range(T):  # one step after the other
            z = z - 0.2 * model(z, times[k : k + 1])
    torch.testing.assert_close(chain[-1:], z, atol=5e-3, rtol=0)
