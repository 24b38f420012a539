"""Against tensors of the authors' implementation, at the manifest's tolerances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deq_zoo.diffusion import Adjoint, ParallelChain, invert, parallel_sample
from deq_zoo.diffusion.convert import to_ddpm
from deq_zoo.diffusion.inversion import _Forward
from tests.golden import load_tensors
from tests.zoo.diffusion.nets import error, golden, scheduler
from torchdeq import Phantom, StopRule
from torchdeq.solver import Anderson

CHAINS = ("uniform10", "quad10", "uniform10_eta0.5", "uniform10_eta1")
PLAIN = StopRule(12, 1e-7, "rel")


def chain_of(name: str, scope: str = "trajectory") -> ParallelChain:
    unet, _, facts = golden()
    told = facts["inversion"] if name == "inv" else facts["chains"][name]
    made = scheduler(exact=False)
    return ParallelChain(unet, made, told["seq"][::-1], told.get("eta", 0.0), scope)  # type: ignore[arg-type]


def noise_of(name: str) -> Tensor | None:
    held = golden()[1].get(f"{name}.noise")
    return None if held is None else held[None]


@torch.no_grad()
def test_golden_network_and_its_parameters() -> None:
    unet, io, facts = golden()
    assert sum(p.numel() for p in unet.parameters()) == facts["config"]["parameters"]
    assert error(unet(io["unet.x"], io["unet.t"]).sample, io["unet.out"]) < 1e-5


def test_golden_weights_come_back_under_their_old_names() -> None:
    unet, _, _ = golden()
    given, back = load_tensors("deq-ddim", "weights_tiny"), to_ddpm(unet.state_dict())
    assert given.keys() == back.keys()
    assert all(torch.equal(given[key], back[key]) for key in given)


@pytest.mark.parametrize("name", CHAINS)
@torch.no_grad()
def test_golden_function(name: str) -> None:
    _, io, _ = golden()
    chain, z0, noise = chain_of(name), io[f"{name}.xT"], noise_of(name)
    s = chain.steps
    assert s.t.tolist() == io[f"{name}.t"].tolist()
    P = s.a.cumprod(0)
    assert error(P, io[f"{name}.alpha_ratio"].double()) < 1e-5
    rows = io[f"{name}.z0"]
    # The network's first input is row 0 of the state there, not the noise.
    assert error(chain.apply(rows[None, :-1], z0, noise)[0], io[f"{name}.f_z0"][1:]) < 1e-5
    Z = z0[:, None].expand(1, 10, -1, -1, -1)
    for _ in range(4):
        Z = chain(Z, z0, noise)
    assert error(Z[0], io[f"{name}.zK"][1:]) < 1e-5


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("window", [0, 4])
@torch.no_grad()
def test_golden_fixed_point_is_the_sequential_chain(name: str, window: int) -> None:
    _, io, _ = golden()
    chain, z0, noise = chain_of(name), io[f"{name}.xT"], noise_of(name)
    found = parallel_sample(
        chain, z0, noise, solver="fixed_point_iter", stop=PLAIN, window=window
    ).states
    assert error(found[0], io[f"{name}.zstar"][1:]) < 1e-4
    assert error(found[0], io[f"{name}.sequential"][1:]) < 1e-5
    assert error(chain.states(z0, noise)[0], io[f"{name}.sequential"][1:]) < 1e-5


def test_golden_encoder() -> None:
    _, io, _ = golden()
    assert error(chain_of("inv").encode(io["inv.target"])[0], io["inv.encoded"][-1]) < 1e-5


@pytest.mark.parametrize("window", [1, 4, 0])
def test_golden_exact_gradient(window: int) -> None:
    _, io, _ = golden()
    z0 = io["inv.encoded"][-1:].clone().requires_grad_()
    adjoint = Adjoint(window=window, solver="fixed_point_iter")
    found = parallel_sample(
        chain_of("inv"), z0, solver="fixed_point_iter", stop=PLAIN, adjoint=adjoint
    )
    (found.image - io["inv.target"]).square().sum().backward()
    assert z0.grad is not None
    assert error(z0.grad[0], io["inv.exact_grad_xT"]) < 1e-4


def test_golden_inversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the release's start: rows after the first stay at the encoded noise."""
    _, io, facts = golden()
    chain, encoded = chain_of("inv", "timestep"), io["inv.encoded"][-1:]
    noises, states = list[Tensor](), list[Tensor]()
    monkeypatch.setattr(chain, "check", lambda z, noise: noises.append(z.detach().clone()))
    monkeypatch.setattr(_Forward, "_keep", lambda self, Z: states.append(Z.detach().clone()))
    found = invert(
        chain,
        io["inv.target"],
        method="phantom",
        steps=7,  # the seventh solve sees the noise after six updates
        lr=0.005,
        start=encoded,
        states=encoded[:, None].expand(1, 10, -1, -1, -1),
        warm=False,
        solver=Anderson(m=5, lam=0.0, ridge=1e-3),
        stop=StopRule(15, 1e-3),
        phantom=Phantom(tau=0.1),
    )
    losses = torch.tensor(facts["inversion"]["losses"])
    assert float(((found.history[:6, 0] - losses) / losses).abs().max()) < 1e-2
    assert error(states[0][0], io["inv.first_x_eq"][1:]) < 5e-3
    assert error(noises[6][0], io["inv.final_xT"].squeeze(0)) < 5e-3
    assert float(found.sse) <= float(found.history.min())


def test_golden_phantom_gradient_is_the_direct_path() -> None:
    _, io, _ = golden()
    chain, equilibrium = chain_of("inv"), io["inv.first_x_eq"]
    P = float(chain.steps.a.prod())
    direct = 0.1 * P * 2 * (equilibrium[-1] - io["inv.target"][0])
    assert error(direct, io["inv.first_grad_row0"]) < 1e-6
