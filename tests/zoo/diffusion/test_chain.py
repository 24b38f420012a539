"""The chain as an equilibrium: the scheduler's own states, whatever the scheduler does."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deq_zoo.diffusion import ParallelChain, Steps, parallel_sample, spaced
from deq_zoo.diffusion.package import diffusers
from tests.zoo.diffusion.nets import draw, make_net, make_scheduler, measure_error, run_steps
from torchdeq import ConvergenceError, Status, StopRule
from torchdeq.solver import SOLVERS

EXACT = StopRule(60, 1e-14, "rel")


def make_ddpm(**options: Any) -> Any:
    return diffusers().DDPMScheduler(**options)


def solve_states(chain: ParallelChain, x: Tensor, noise: Tensor | None, **options: Any) -> Tensor:
    options = {"solver": "fixed_point_iter", "stop": EXACT, "on_failure": "ignore", **options}
    return parallel_sample(chain, x, noise, **options).states


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_fixed_point_is_the_chain_of_the_scheduler(spacing: str, kind: str, eta: float) -> None:
    scheduler = make_scheduler(timestep_spacing=spacing, prediction_type=kind)
    unet, x = make_net(), draw(2, 1, 6, 6)
    chain = ParallelChain(unet, scheduler, 30, eta)
    noise = chain.noise(x, torch.Generator().manual_seed(1))
    assert (noise is None) == (eta == 0)
    expected = run_steps(unet, scheduler, 30, x, eta, noise)
    for window in (0, 8):
        result = solve_states(chain, x, noise, window=window)
        assert float((result - expected).norm() / expected.norm()) < 1e-12
    assert measure_error(chain.states(x, noise), expected) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"clip_sample": True},
        {"clip_sample": True, "clip_sample_range": 0.5, "prediction_type": "v_prediction"},
        {"thresholding": True, "sample_max_value": 2.0},
        {"set_alpha_to_one": False, "steps_offset": 1},
        {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction",
         "timestep_spacing": "trailing"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_steps_need_not_be_linear(options: dict[str, Any], eta: float) -> None:
    scheduler, unet, x = make_scheduler(**options), make_net(), draw(3, 2, 4, 4)
    unet = make_net(channels=2)
    chain = ParallelChain(unet, scheduler, 12, eta)
    noise = draw(3, 12, 2, 4, 4, seed=5) if eta else None
    expected = run_steps(unet, scheduler, 12, x, eta, noise)
    assert measure_error(solve_states(chain, x, noise), expected) < 1e-11


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large", "fixed_small_log"])
@pytest.mark.parametrize("clip", [False, True])
def test_one_step_of_ddpm(variance: str, clip: bool) -> None:
    scheduler = make_ddpm(variance_type=variance, clip_sample=clip)
    scheduler.set_timesteps(20)
    unet, z = make_net(torch.float32), draw(2, 1, 4, 4, dtype=torch.float32)
    chain = ParallelChain(unet, scheduler, 20)
    noise = torch.zeros(2, 20, 1, 4, 4)
    for k in (0, 7, 19):
        t = int(scheduler.timesteps[k])
        rng = torch.Generator().manual_seed(k)
        with torch.no_grad():
            m = unet(z, torch.full((2,), t))
            expected = scheduler.step(m, t, z, generator=rng).prev_sample
            noise[:, k] = torch.randn(z.shape, generator=torch.Generator().manual_seed(k))
            assert measure_error(chain.step(z, k, noise), expected) < 2e-5


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_float32_is_as_near_to_the_chain_as_rounding_allows(
    spacing: str, kind: str, eta: float
) -> None:
    scheduler = make_scheduler(exact=False, timestep_spacing=spacing, prediction_type=kind)
    unet, x = make_net(torch.float32), draw(2, 1, 8, 8, dtype=torch.float32)
    chain = ParallelChain(unet, scheduler, 50, eta)
    noise = chain.noise(x, torch.Generator().manual_seed(1))
    expected = run_steps(unet, scheduler, 50, x, eta, noise)
    result = solve_states(chain, x, noise, stop=StopRule(60, 1e-7, "rel"))
    assert float((result - expected).norm() / expected.norm()) < 1e-6
    assert measure_error(result, expected) < 1e-5


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "simple_fixed_point_iter"])
@pytest.mark.parametrize("scope", ["trajectory", "timestep"])
def test_every_solver_finds_it(name: str, scope: Any) -> None:
    unet, x = make_net(), draw(2, 1, 4, 4)
    chain = ParallelChain(unet, make_scheduler(), 5, scope=scope)
    expected = run_steps(unet, make_scheduler(), 5, x)
    stop = StopRule(200, 1e-7, "rel")
    assert measure_error(solve_states(chain, x, None, solver=name, stop=stop), expected) < 1e-4


def test_plain_iteration_makes_one_more_state_exact_each_time() -> None:
    unet, x = make_net(), draw(1, 1, 4, 4)
    chain = ParallelChain(unet, make_scheduler(), 9)
    expected, Z = chain.states(x), x[:, None].expand(1, 9, 1, 4, 4)
    with torch.no_grad():
        for k in range(1, 10):
            Z = chain(Z, x)
            assert measure_error(Z[:, :k], expected[:, :k]) < 1e-13


def test_a_window_evaluates_less_and_never_more_rounds_than_steps() -> None:
    unet, x = make_net(), draw(2, 1, 4, 4)
    chain = ParallelChain(unet, make_scheduler(), 40)
    whole = parallel_sample(chain, x, solver="fixed_point_iter", stop=EXACT, on_failure="ignore")
    slid = parallel_sample(chain, x, solver="fixed_point_iter", stop=EXACT, window=10)
    assert slid.work.rounds <= 40
    assert slid.work.evaluations < whole.work.evaluations
    assert slid.stats.converged.all()
    one = parallel_sample(chain, x, solver="fixed_point_iter", stop=EXACT, window=1)
    assert one.work.rounds == 40  # the sequential chain
    assert one.work.evaluations == 80


def test_a_window_out_of_budget_says_so() -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 40)
    stop = StopRule(3, 1e-9, "rel")
    result = parallel_sample(chain, draw(2, 1, 4, 4), window=5, stop=stop, on_failure="ignore")
    assert result.work.rounds == 3
    assert result.stats.status.tolist() == [Status.MAX_ITER] * 2
    with pytest.warns(UserWarning, match="did not converge"):
        parallel_sample(chain, draw(2, 1, 4, 4), window=5, stop=stop)


class Broken(nn.Module):
    """A network that returns NaN from a timestep on, for images above one on average."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        bad = (x.mean(dim=(1, 2, 3)) > 1) & (t < 800)
        return torch.where(bad.view(-1, 1, 1, 1), torch.nan, 0.1 * x)


@pytest.mark.parametrize("solver", ["fixed_point_iter", "anderson"])
def test_a_window_reports_which_chains_are_not_finite(solver: str) -> None:
    chain, x = ParallelChain(Broken().eval(), make_scheduler(), 20), draw(3, 1, 4, 4)
    x[1] += 50
    options: Any = {"window": 5, "solver": solver, "stop": StopRule(400, 1e-9, "rel")}
    result = parallel_sample(chain, x, **options, on_failure="ignore")
    codes = [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    assert result.stats.status.tolist() == codes
    assert result.stats["rel_lowest"][1] == torch.inf
    good = torch.tensor([0, 2])
    assert measure_error(result.states[good], chain.states(x[good])) < 1e-8
    alone = parallel_sample(chain, x[1:2], **options, on_failure="ignore")
    assert alone.stats.status.tolist() == [Status.NONFINITE]
    assert alone.work.rounds < result.work.rounds  # nothing left to solve
    with pytest.raises(ConvergenceError, match="NONFINITE"):
        parallel_sample(chain, x, **options, on_failure="raise")


def test_an_empty_batch_passes_a_window() -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 5)
    assert parallel_sample(chain, draw(0, 1, 4, 4), window=2).image.shape == (0, 1, 4, 4)


@pytest.mark.parametrize("window", [0, 3])
def test_unknown_failure_policies_are_refused(window: int) -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 5)
    with pytest.raises(ValueError, match=r"failure policy 'rise'.*raise"):
        parallel_sample(chain, draw(1, 1, 4, 4), window=window, on_failure="rise")


def test_images_do_not_depend_on_each_other() -> None:
    unet, x = make_net(), draw(3, 1, 4, 4)
    chain = ParallelChain(unet, make_scheduler(), 20, 1.0)
    noise = chain.noise(x, torch.Generator().manual_seed(3))
    assert noise is not None
    stop = StopRule(60, 1e-6, "rel")
    together = parallel_sample(chain, x, noise, solver="anderson", stop=stop)
    for k in range(3):
        alone = parallel_sample(chain, x[k : k + 1], noise[k : k + 1], stop=stop)
        assert measure_error(alone.states, together.states[k : k + 1]) < 1e-10
        assert int(alone.stats.nstep) == int(together.stats.nstep[k])


def test_chunks_change_nothing_and_bound_the_batch() -> None:
    unet, x = make_net(), draw(3, 1, 4, 4)
    expected = solve_states(ParallelChain(unet, make_scheduler(), 10, chunk=1000), x, None)
    unet.calls.clear()
    chain = ParallelChain(unet, make_scheduler(), 10, chunk=7)
    assert measure_error(solve_states(chain, x, None), expected) < 1e-13
    assert max(unet.calls) == 7


def test_repeated_timesteps_are_dropped() -> None:
    quad = spaced("quad", 1000)
    assert len(quad) == 688
    assert quad[0] in (799, 800)
    assert quad == sorted(set(quad), reverse=True)
    assert spaced("uniform", 10) == list(range(900, -1, -100))
    assert len(spaced("uniform", 30)) == 30
    assert Steps.of(make_scheduler(), [900, 900, 400, 400, 0]).t.tolist() == [900, 400, 0]


@pytest.mark.parametrize("n", [10, 50, 198, 777, 1000])
def test_quad_is_what_numpy_makes_of_it(n: int) -> None:
    expected = {int(s) for s in np.linspace(0, np.sqrt(800), n) ** 2}
    assert spaced("quad", n) == sorted(expected, reverse=True)


def test_timesteps_are_whole_numbers() -> None:
    given: Any
    for given in (np.int64(4), 4):
        assert len(Steps.of(make_scheduler(), given)) == 4
    for given in (np.array([900, 400]), torch.tensor([900, 400])):
        assert Steps.of(make_scheduler(), given).t.tolist() == [900, 400]
    for given in (4.0, [900.5, 400.0], "ab"):
        with pytest.raises(TypeError, match="whole numbers"):
            Steps.of(make_scheduler(), given)


def test_empty_batch_one_step_and_strided_noise() -> None:
    chain = ParallelChain(make_net(), make_scheduler(), 5)
    assert parallel_sample(chain, draw(0, 1, 4, 4)).image.shape == (0, 1, 4, 4)
    single = ParallelChain(make_net(), make_scheduler(), 1)
    x = draw(2, 1, 4, 4)
    assert measure_error(parallel_sample(single, x).image, single.sequential(x)) < 1e-12
    strided = draw(2, 4, 4, 1).permute(0, 3, 1, 2)
    got = parallel_sample(chain, strided, stop=EXACT, on_failure="ignore").image
    assert measure_error(got, chain.sequential(strided)) < 1e-10


def test_bfloat16_keeps_its_dtype_and_stays_finite() -> None:
    unet = make_net(torch.bfloat16)
    chain = ParallelChain(unet, make_scheduler(exact=False), 10)
    x = draw(2, 1, 4, 4, dtype=torch.float32).bfloat16()
    result = parallel_sample(chain, x, stop=StopRule(20, 1e-2, "rel"), on_failure="ignore")
    assert result.image.dtype == torch.bfloat16
    assert result.image.isfinite().all()


def test_nothing_of_the_callers_is_changed() -> None:
    scheduler, unet, x = make_scheduler(), make_net(), draw(2, 1, 4, 4)
    before = copy.deepcopy(scheduler.__dict__), x.clone()
    start = draw(2, 10, 1, 4, 4)
    kept = start.clone()
    chain = ParallelChain(unet, scheduler, 10)
    parallel_sample(chain, x, z0=start, window=4, solver="fixed_point_iter")
    assert torch.equal(start, kept)
    assert torch.equal(x, before[1])
    assert scheduler.num_inference_steps == before[0]["num_inference_steps"]
    twin = copy.deepcopy(chain)
    assert torch.equal(twin.sequential(x), chain.sequential(x))


def test_progress_is_reported_every_round() -> None:
    reports: list[tuple[int, float]] = []
    chain = ParallelChain(make_net(), make_scheduler(), 10)
    result = parallel_sample(
        chain, draw(1, 1, 4, 4), solver="fixed_point_iter",
        progress=lambda rounds, residual: reports.append((rounds, residual)),
    )  # fmt: skip
    assert [rounds for rounds, _ in reports] == list(range(1, result.work.rounds + 1))
    assert reports[-1][1] <= 1e-4


def test_encoding_undoes_a_chain_the_better_the_finer_it_is() -> None:
    x, missed = draw(2, 1, 4, 4) / 4, []
    for T in (25, 100):
        chain = ParallelChain(make_net(), make_scheduler(), T)
        missed.append(float((chain.sequential(chain.encode(x)) - x).norm() / x.norm()))
    assert missed[1] < 0.6 * missed[0]
