"""The model: its designs, memory, sizes, copies and gradients."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from deq_zoo.lm import DEQTransformer, LMConfig, LMOutput, Memory
from deq_zoo.lm.presets import SMALL_FINAL, SMALL_ORIGINAL, SMALL_OURS
from deq_zoo.preset import PRESETS, Preset
from tests.zoo.lm.nets import DESIGNS, draw_ids, make_config, make_model
from torchdeq import SolverStat, jac_reg


def count_parameters(config: LMConfig) -> int:
    with torch.device("meta"):
        model = DEQTransformer(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("lm-wt103-final", 97_571_288),
        ("lm-wt103-seq", 97_691_888),
        ("lm-wt103-ours", 97_573_388),
    ],
)
def test_presets_have_the_published_sizes(name: str, count: int) -> None:
    preset: Preset = PRESETS[name]()
    assert count_parameters(preset.task.net) == count  # type: ignore[attr-defined]


def test_small_models_have_the_same_size() -> None:
    sizes = [count_parameters(config) for config in (SMALL_ORIGINAL, SMALL_FINAL, SMALL_OURS)]
    assert max(sizes) < 1.001 * min(sizes)


@pytest.mark.parametrize("design", DESIGNS)
def test_later_tokens_do_not_touch_earlier_ones(design: str) -> None:
    model, tokens = make_model(design), draw_ids()
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 11
    with torch.no_grad():
        assert_close(model(tokens).z[:, :-1], model(other).z[:, :-1], atol=1e-10, rtol=0)
        assert not torch.allclose(model(tokens).z[:, -1], model(other).z[:, -1])


@pytest.mark.parametrize("design", ["original", "convergent"])
def test_memory_gives_what_reading_in_one_go_gives(design: str) -> None:
    model, tokens = make_model(design), draw_ids(length=7)
    with torch.no_grad():
        whole = model(tokens)
        first = model(tokens[:, :4])
        memory = model.empty_memory(first.u).followed_by(first, most=10)
        second = model(tokens[:, 4:], memory=memory)
    assert_close(torch.cat((first.z, second.z), dim=1), whole.z, atol=1e-10, rtol=0)
    assert bool(whole.stats.converged.all())


def test_the_redesigned_map_commutes_with_a_constant_and_the_convergent_does_not() -> None:
    tokens = draw_ids()
    z = torch.randn(2, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        redesigned, convergent = (
            make_model("redesigned")(tokens).f,
            make_model("convergent")(tokens).f,
        )
        assert_close(redesigned(z + 3.0), redesigned(z) + 3.0, atol=1e-9, rtol=0)
        leaked = convergent(z + 3.0) - convergent(z)
    assert_close(leaked, torch.full_like(leaked, 3.0 * 0.7), atol=1e-6, rtol=0)  # equal leaks


def test_iterates_of_the_convergent_map_stay_bounded() -> None:
    model = make_model("convergent")
    with torch.no_grad():
        f = model(draw_ids()).f
        z = 1e6 * torch.randn(2, 6, 8, dtype=torch.float64)
        for _ in range(200):
            z = f(z)
        assert float((f(z) - z).norm() / z.norm()) < 1e-6


def test_memory_keeps_the_last_tokens() -> None:
    z, u = torch.arange(6.0).view(1, 6, 1), torch.arange(6.0).view(1, 6, 1) + 10

    def make_segment(first: int, last: int) -> LMOutput:
        part = z[:, first:last]
        return LMOutput(
            predictions=[part], state=part, stats=SolverStat(), u=u[:, first:last], kept=part,
            f=lambda z: z,
        )  # fmt: skip

    past = Memory(z[:, :2], u[:, :2])
    assert past.followed_by(make_segment(2, 4), 3).z.flatten().tolist() == [1, 2, 3]
    assert past.followed_by(make_segment(2, 6), 3).u.flatten().tolist() == [13, 14, 15]
    assert past.followed_by(make_segment(2, 3), 9).z.flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_frozen_in_a_forward_pass_and_its_gradient(design: str, recompute: bool) -> None:
    model = make_model(design, dropout=0.3, attention_dropout=0.2, recompute=recompute).train()
    out = model(draw_ids())
    z = out.z.detach()
    assert torch.equal(out.f(z), out.f(z))
    model.nll(out.z, draw_ids()).mean().backward()
    assert torch.equal(out.f(z), out.f(z))
    assert not torch.equal(model(draw_ids()).f(z), out.f(z))


def test_recomputing_gives_the_same_gradient() -> None:
    grads = []
    for recompute in (False, True):
        model = make_model("redesigned", dropout=0.3, recompute=recompute).train()
        torch.manual_seed(3)
        model.nll(model(draw_ids()).z, draw_ids()).mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, atol=1e-12, rtol=0)


def test_the_jacobian_term_is_differentiated_through_the_fixed_point() -> None:
    model = make_model("original").train()

    def compute_value() -> Any:
        torch.manual_seed(5)
        out = model(draw_ids(1, 3))
        return jac_reg(out.f(out.z), out.z)

    compute_value().backward()
    weight = model.injection.bias
    assert weight.grad is not None
    gradient, eps = weight.grad[3].clone(), 1e-5
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[3] += sign * eps
        ends.append(float(compute_value().detach()))
        with torch.no_grad():
            weight[3] -= sign * eps
    assert float(gradient) == pytest.approx((ends[0] - ends[1]) / (2 * eps), rel=1e-4)


@pytest.mark.parametrize("design", DESIGNS)
def test_copies_moves_and_state_dicts_keep_the_function(design: str) -> None:
    model, tokens = make_model(design), draw_ids()
    with torch.no_grad():
        expected = model.log_prob(model(tokens).z)
        for other in (deepcopy(model), make_model(design)):
            other.load_state_dict(model.state_dict())
            assert_close(other.log_prob(other(tokens).z), expected)
    single = deepcopy(model).float()
    assert len(list(single.parameters())) == len(list(model.parameters()))
    with torch.no_grad():
        assert_close(single.log_prob(single(tokens).z).double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("design", DESIGNS)
def test_half_precision_and_autocast_run(design: str) -> None:
    deq = {"f_max_iter": 3, "grad": [2], "f_tol": 0.0}
    model = DEQTransformer(make_config(design), deq).bfloat16()
    out = model(draw_ids())
    model.nll(out.z, draw_ids()).mean().backward()
    assert out.z.dtype == torch.bfloat16
    model = DEQTransformer(make_config(design), deq)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(draw_ids(), memory=model.empty_memory(torch.zeros(2, 1)))
        model.nll(out.z, draw_ids()).mean().backward()
    assert out.z.dtype == torch.float32


def test_initialisation_is_as_it_says() -> None:
    torch.manual_seed(0)
    by_fan_in = (3 * 64) ** -0.5
    for init, std, outside in (
        ("normal", 0.01, 0.01),
        ("uniform", by_fan_in, 0.01),
        ("scaled", by_fan_in, by_fan_in),
    ):
        model = DEQTransformer(make_config("original", width=64, inner=64, init=init))
        weight = next(iter(model.func)).attention.qkv_net.weight
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)
        assert float(model.injection.weight.detach().std()) == pytest.approx(outside, rel=0.05)


def test_a_batch_of_one_and_an_empty_batch() -> None:
    model, tokens = make_model("convergent"), draw_ids()
    with torch.no_grad():
        assert_close(model(tokens[:1]).z, model(tokens).z[:1], atol=1e-10, rtol=0)
        assert model(tokens[:0]).z.shape == (0, 6, 8)


def test_no_options_of_the_solver_may_be_said_as_none() -> None:
    model = make_model("redesigned")
    with torch.no_grad():
        assert torch.equal(model(draw_ids(), solver_kwargs=None).z, model(draw_ids()).z)


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        LMConfig(width=10, heads=4)
    with pytest.raises(ValueError, match="leak must lie"):
        make_model("convergent", leak=1.0)
    model = make_model("original")
    with pytest.raises(ValueError, match="memory is of 3 streams, the tokens of 2"):
        model(draw_ids(), memory=model.empty_memory(torch.zeros(3, 1)))
