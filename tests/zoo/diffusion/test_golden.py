"""Against tensors of the authors' implementation, at the manifest's tolerances."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deq_zoo.diffusion import Adjoint, ParallelChain, invert, parallel_sample
from deq_zoo.diffusion.convert import to_authors
from deq_zoo.diffusion.inversion import _Forward
from tests.golden import load_tensors
from tests.zoo.diffusion.nets import load_golden, make_scheduler, measure_error
from torchdeq import Phantom, StopRule
from torchdeq.solver import Anderson

CHAINS = ("uniform10", "quad10", "uniform10_eta0.5", "uniform10_eta1")
PLAIN = StopRule(12, 1e-7, "rel")


def make_chain(name: str, scope: str = "trajectory") -> ParallelChain:
    unet, _, facts = load_golden()
    case = facts["inversion"] if name == "inv" else facts["chains"][name]
    scheduler = make_scheduler(exact=False)
    return ParallelChain(unet, scheduler, case["seq"][::-1], case.get("eta", 0.0), scope)  # type: ignore[arg-type]


def pick_noise(name: str) -> Tensor | None:
    noise = load_golden()[1].get(f"{name}.noise")
    return None if noise is None else noise[None]


@torch.no_grad()
def test_golden_network_and_its_parameters_are_reproduced() -> None:
    unet, io, facts = load_golden()
    assert sum(p.numel() for p in unet.parameters()) == facts["config"]["parameters"]
    assert measure_error(unet(io["unet.x"], io["unet.t"]).sample, io["unet.out"]) < 1e-5


def test_golden_weights_come_back_under_their_old_names() -> None:
    unet, _, _ = load_golden()
    given, back = load_tensors("deq-ddim", "weights_tiny"), to_authors(unet.state_dict())
    assert given.keys() == back.keys()
    assert all(torch.equal(given[key], back[key]) for key in given)


@pytest.mark.parametrize("name", CHAINS)
@torch.no_grad()
def test_golden_function_is_reproduced(name: str) -> None:
    _, io, _ = load_golden()
    chain, x, noise = make_chain(name), io[f"{name}.xT"], pick_noise(name)
    s = chain.steps
    assert s.t.tolist() == io[f"{name}.t"].tolist()
    P = s.a.cumprod(0)
    assert measure_error(P, io[f"{name}.alpha_ratio"].double()) < 1e-5
    rows = io[f"{name}.z0"]
    # The network's first input is row 0 of the state there, not the noise.
    assert measure_error(chain.apply(rows[None, :-1], x, noise)[0], io[f"{name}.f_z0"][1:]) < 1e-5
    Z = x[:, None].expand(1, 10, -1, -1, -1)
    for _ in range(4):
        Z = chain(Z, x, noise)
    assert measure_error(Z[0], io[f"{name}.zK"][1:]) < 1e-5


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("window", [0, 4])
@torch.no_grad()
def test_golden_fixed_point_is_the_sequential_chain(name: str, window: int) -> None:
    _, io, _ = load_golden()
    chain, x, noise = make_chain(name), io[f"{name}.xT"], pick_noise(name)
    result = parallel_sample(
        chain, x, noise, solver="fixed_point_iter", stop=PLAIN, window=window
    ).states
    assert measure_error(result[0], io[f"{name}.zstar"][1:]) < 1e-4
    assert measure_error(result[0], io[f"{name}.sequential"][1:]) < 1e-5
    assert measure_error(chain.states(x, noise)[0], io[f"{name}.sequential"][1:]) < 1e-5


def test_golden_encoder_is_reproduced() -> None:
    _, io, _ = load_golden()
    encoded = make_chain("inv").encode(io["inv.target"])
    assert measure_error(encoded[0], io["inv.encoded"][-1]) < 1e-5


@pytest.mark.parametrize("window", [1, 4, 0])
def test_golden_exact_gradient_is_reproduced(window: int) -> None:
    _, io, _ = load_golden()
    x = io["inv.encoded"][-1:].clone().requires_grad_()
    adjoint = Adjoint(window=window, solver="fixed_point_iter")
    result = parallel_sample(
        make_chain("inv"), x, solver="fixed_point_iter", stop=PLAIN, adjoint=adjoint
    )
    (result.image - io["inv.target"]).square().sum().backward()
    assert x.grad is not None
    assert measure_error(x.grad[0], io["inv.exact_grad_xT"]) < 1e-4


def test_golden_inversion_is_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the release's start: rows after the first stay at the encoded noise."""
    _, io, facts = load_golden()
    chain, encoded = make_chain("inv", "timestep"), io["inv.encoded"][-1:]
    noises, states = list[Tensor](), list[Tensor]()
    monkeypatch.setattr(chain, "check", lambda z, noise: noises.append(z.detach().clone()))
    monkeypatch.setattr(_Forward, "_keep", lambda self, Z: states.append(Z.detach().clone()))
    result = invert(
        chain,
        io["inv.target"],
        method="phantom",
        steps=7,  # the seventh solve sees the noise after six updates
        lr=0.005,
        x=encoded,
        z0=encoded[:, None].expand(1, 10, -1, -1, -1),
        keep_states=False,
        solver=Anderson(m=5, lam=0.0, ridge=1e-3),
        stop=StopRule(15, 1e-3),
        phantom=Phantom(tau=0.1),
    )
    losses = torch.tensor(facts["inversion"]["losses"])
    assert float(((result.history[:6, 0] - losses) / losses).abs().max()) < 1e-2
    assert measure_error(states[0][0], io["inv.first_x_eq"][1:]) < 5e-3
    assert measure_error(noises[6][0], io["inv.final_xT"].squeeze(0)) < 5e-3
    assert float(result.sse) <= float(result.history.min())


def test_golden_phantom_gradient_is_the_direct_path() -> None:
    _, io, _ = load_golden()
    chain, equilibrium = make_chain("inv"), io["inv.first_x_eq"]
    P = float(chain.steps.a.prod())
    direct = 0.1 * P * 2 * (equilibrium[-1] - io["inv.target"][0])
    assert measure_error(direct, io["inv.first_grad_row0"]) < 1e-6
