"""The attractor: no leak of later tokens, memory, gradients, and a start that converges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from deq_zoo.lm.attention import causal_mask
from deq_zoo.lm.attractor.decode import AttractorDecoder, KeyCache
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.build import build_model
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.decode import Chunked, make_decoder
from deq_zoo.lm.model import DEQTransformer
from tests.zoo.lm.attractor.golden import TIGHT, Golden
from tests.zoo.lm.attractor.nets import draw_ids, make_config, make_model

SOLVERS: list[dict[str, Any]] = [
    {"f_solver": "fixed_point_iter"},
    {"f_solver": "anderson", "f_solver_kwargs": {"m": 5}},
    {"f_solver": "broyden"},
]


@pytest.mark.parametrize("tolerance", [0.0, 3e-4])
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda each: each["f_solver"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_later_tokens_change_no_earlier_logit_at_any_number_of_evaluations(
    solver: dict[str, Any], tolerance: float, dtype: torch.dtype
) -> None:
    golden = Golden("B")
    options = {"f_tol": tolerance, "f_stop_mode": "rel", "on_failure": "ignore"}
    model = golden.make_model(solver | options).to(dtype)
    ids = golden["input/ids"]
    others = ids.clone()
    others[:, 16:] = (others[:, 16:] + 7) % 64
    for evaluations in (0, 1, 2, 3, 7, 20):
        z, moved = (model(each, f_max_iter=evaluations).z for each in (ids, others))
        log_p, log_p_moved = model.log_prob(z), model.log_prob(moved)
        assert torch.equal(log_p[:, :16], log_p_moved[:, :16]), evaluations
        assert not torch.equal(log_p[:, 16:], log_p_moved[:, 16:])


@torch.no_grad()
def test_the_published_solver_leaks_later_tokens() -> None:
    golden = Golden("B", mixing="published")
    model, ids = golden.make_model(golden.published_options()), golden["input/ids"]
    others = ids.clone()
    others[:, -1] = (others[:, -1] + 7) % 64
    change = (model(ids).z - model(others).z)[:, :-1].abs().max()
    expected = golden.facts["facts"]["B/causality"]["default_solver_change_of_earlier_positions"]
    assert float(change) == pytest.approx(expected, rel=1e-6)


@torch.no_grad()
def test_an_answer_does_not_depend_on_the_other_sequences() -> None:
    golden = Golden("B")
    options = {"f_solver": "anderson", "f_tol": 1e-4, "f_stop_mode": "rel"}
    model, ids = golden.make_model(options), golden["input/ids"]
    for k in range(3):
        assert_close(model(ids[k : k + 1]).z, model(ids).z[k : k + 1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("variant", ["A", pytest.param("B", marks=pytest.mark.slow)])
@torch.no_grad()
def test_the_relative_ridge_needs_no_more_evaluations_than_the_published_one(variant: str) -> None:
    golden, counts = Golden(variant), []
    for ridge in ({"ridge": 1e-4, "lam": 0.0}, {}):
        own = {"m": 5} | ridge
        options = {"f_solver": "anderson", "f_solver_kwargs": own, "f_max_iter": 400}
        model = golden.make_model(options | {"f_tol": 1e-10, "f_stop_mode": "rel"})
        out = model(golden["input/ids"])
        assert bool(out.stats.converged.all())
        counts.append(out.stats.nfe)
    assert counts[1] < counts[0]


@torch.no_grad()
def test_a_position_that_meets_a_tolerance_is_that_near_its_fixed_point() -> None:
    golden = Golden("A")
    tight = golden["y_star"]
    for tol in (1e-2, 1e-4, 1e-6):
        options = {"f_solver": "anderson", "f_tol": tol, "f_stop_mode": "rel"}
        z = golden.make_model(options)(golden["input/ids"]).z
        error = (z - tight).norm(dim=2) / tight.norm(dim=2)
        assert float(error.max()) < 4 * tol


@torch.no_grad()
def test_positions_finish_together_with_those_before_them() -> None:
    golden, tol = Golden("B"), 1e-5
    options = {"f_solver": "anderson", "f_tol": tol, "f_stop_mode": "rel", "f_max_iter": 99}
    out = golden.make_model(options)(golden["input/ids"])
    residual = (out.f(out.z) - out.z).norm(dim=2) / out.z.norm(dim=2)
    assert float(residual.max()) < 1.5 * tol  # 2.9 * tol if each finished alone
    finished = out.stats["nstep"].view(3, 24)
    assert torch.equal(finished, finished.cummax(1).values)


@pytest.mark.parametrize(
    "rule",
    [
        {"f_tol": 1e-4, "f_stop_mode": "rel"},
        {"f_tol": 1e-4, "f_stop_mode": "abs"},
        {"f_rtol": 1e-4, "f_atol": 1e-5},
        {"f_rtol": 1e-4, "f_atol": 1e-5, "f_stop_norm": "rms"},
        {"f_rtol": 1e-4, "f_atol": 0.0},
    ],
    ids=lambda rule: " ".join(rule),
)
@torch.no_grad()
def test_no_position_converges_before_an_earlier_one_by_any_rule(rule: dict[str, Any]) -> None:
    ids = draw_ids(length=16)
    for seed in range(5):
        model = make_model({"f_max_iter": 99} | rule)
        torch.manual_seed(seed)
        for p in model.vocabulary.parameters():  # tokens of unequal size
            p.mul_(torch.rand(len(p), 1).double().mul(4).exp() / 8)
        steps = model(ids).stats["nstep"].view(2, 16)
        assert torch.equal(steps, steps.cummax(1).values), seed


@pytest.mark.parametrize("changes", [{}, {"cutoffs": (4, 7), "shrink": 2}, {"window": 3}])
@torch.no_grad()
def test_a_text_read_in_pieces_has_the_equilibrium_of_the_whole(changes: dict[str, Any]) -> None:
    model, ids = make_model(**changes), draw_ids()
    whole = model(ids)
    memory, parts = None, []
    for piece in ids.split(4, dim=1):
        out = model(piece, memory=memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 9)
        parts.append(out)
    assert_close(torch.cat([p.z for p in parts], dim=1), whole.z, atol=1e-10, rtol=0)
    assert_close(torch.cat([p.kept for p in parts], dim=1), whole.kept, atol=1e-10, rtol=0)


@torch.no_grad()
def test_the_backbone_computes_keys_and_values_once() -> None:
    model, ids = make_model(), draw_ids()
    x = model.embed(ids)
    around = model.surroundings(x)
    with FlopCounterMode(display=False) as counter:
        _, kept = model.run_backbone(x, around)
    width, inner, blocks = 8, 12, 2
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert products == blocks * 2 * ids.numel() * (4 * width**2 + 2 * width * inner)
    expected = model.blocks[0].keys(x)
    for part, own in zip(kept[..., : 2 * width].chunk(2, dim=2), expected, strict=True):
        assert_close(part, own.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_a_memory_keeps_keys_and_values_and_nothing_else() -> None:
    model, ids = make_model(), draw_ids()
    out = model(ids)
    memory = model.empty_memory(out.u).followed_by(out, 5)
    assert memory.z.shape == (2, 5, 2 * 4 * 8)
    assert memory.u.numel() == 0


@pytest.mark.parametrize("variant", ["A", "B"])
@torch.no_grad()
def test_incremental_decoding_equals_full_recomputation(variant: str) -> None:
    golden = Golden(variant)
    model, ids = golden.make_model(), golden["input/ids"][:, :12]
    decoder = AttractorDecoder(model, span=50)
    whole = model.log_prob(model(ids).z)
    assert_close(decoder.feed(ids[:, :5]), whole[:, 4], atol=1e-9, rtol=0)
    for k in range(5, 12):
        assert_close(decoder.feed(ids[:, k : k + 1]), whole[:, k], atol=1e-9, rtol=0)
    assert decoder.stats is not None


@torch.no_grad()
def test_decoding_forgets_what_is_beyond_its_span() -> None:
    model, ids = make_model(), draw_ids(length=12)
    decoder, memory = AttractorDecoder(model, span=3, length=1), None
    for k in range(12):
        result = decoder.feed(ids[:, k : k + 1])
        out = model(ids[:, k : k + 1], memory=memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 3)
        assert_close(result, model.log_prob(out.z)[:, 0], atol=1e-9, rtol=0)
    memory = None
    for piece in ids.split(4, dim=1):
        out = model(piece, memory=memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 4)
    result = AttractorDecoder(model, span=4).feed(ids)
    assert_close(result, model.log_prob(out.z)[:, -1], atol=1e-9, rtol=0)


def test_a_cache_keeps_the_latest_tokens() -> None:
    cache, kv = KeyCache(), torch.arange(40.0).view(1, 1, 1, 1, 40, 1).repeat(2, 1, 1, 1, 1, 1)
    assert cache.read() is None
    end = 0
    for n in (1, 2, 1, 4, 1, 1, 9, 3, 5, 1):
        cache.append(kv[..., end : end + n, :])
        end += n
        cache.keep_last(5)
        now = cache.read()
        assert now is not None
        assert now[0].flatten().tolist() == list(range(max(0, end - 5), end))
        assert len(cache) == min(5, end)
    cache.keep_last(0)
    assert len(cache) == 0


def test_the_implicit_gradient_is_that_of_long_unrolling() -> None:
    ids, grads = draw_ids(), []
    unrolled = {"f_max_iter": 0, "grad": [120], "eval_f_max_iter": 9}
    for options in (None, unrolled):
        model = make_model(options).train()
        model.nll(model(ids).z, ids).mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for exact, long in zip(*grads, strict=True):
        assert exact is not None
        assert long is not None
        assert_close(exact, long, atol=1e-10, rtol=0)


@torch.no_grad()
def test_attention_step_by_step_is_that_of_the_fused_kernel() -> None:
    fused, plain = make_model(), make_model({"higher_order": True, "ift": True, "f_max_iter": 5})
    assert [block.attn.plain for block in (*fused.blocks, *plain.blocks)] == [False] * 4 + [
        True
    ] * 4
    for window in (0, 3):
        x = fused.embed(draw_ids())
        around = [each._replace(mask=causal_mask(9, 0, window, like=x)) for each in
                  fused.surroundings(x)]  # fmt: skip
        assert_close(
            fused.apply_core(x, around[2:]), plain.apply_core(x, around[2:]), atol=1e-12, rtol=0
        )


def test_activations_that_are_computed_again_give_the_same_gradient() -> None:
    ids, grads = draw_ids(), []
    for recompute in (False, True):
        model = make_model({"f_max_iter": 4, "grad": [2]}, recompute=recompute).train()
        model.nll(model(ids).z, ids).mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("rms", "gate", "core", "converges"),
    [(0.5, 0.25, "zeros", True), (0.5, 0.25, "random", True), (0.0, 0.75, "random", False)],
)
@torch.no_grad()
def test_a_new_model_converges_by_our_start_and_not_by_the_published_one(
    rms: float, gate: float, core: Any, converges: bool
) -> None:
    torch.manual_seed(0)
    config = LMConfig(design="attractor", width=128, heads=4, inner=512, blocks=1, backbone=1,
                      input_rms=rms, gate_start=gate, core_start=core,
                      dropout=0.0)  # fmt: skip
    model = Attractor(config, {"f_max_iter": 30, "f_tol": 0.0}).eval()
    stats = model(torch.randint(256, (2, 64))).stats
    worst = float(stats["rel_lowest"].max())
    assert worst < 1e-5 if converges else worst > 0.1


def test_dropout_is_the_same_in_all_evaluations_of_a_solve() -> None:
    model = make_model({"f_max_iter": 60, "f_tol": 1e-9, "f_solver": "anderson"}, dropout=0.3)
    model.train()
    stats = [model(draw_ids()).stats for _ in range(2)]
    assert all(bool(each.converged.all()) for each in stats)
    assert not torch.equal(model(draw_ids()).z, model(draw_ids()).z)


def test_the_radius_is_that_of_whole_sequences() -> None:
    golden = Golden("A")
    model, ids = golden.make_model(), golden["input/ids"]
    radius = model(ids, sradius_mode=True).stats["sradius"]
    expected = golden.facts["facts"]["A/jacobian"]["spectral_radius"]
    assert radius.tolist() == pytest.approx(expected, rel=0.1)


def test_each_design_has_its_class_and_decoder() -> None:
    assert isinstance(build_model(make_config()), Attractor)
    assert isinstance(make_decoder(make_model(), 4, 4), AttractorDecoder)
    published = make_model({"f_max_iter": 9}, mixing="published")
    assert isinstance(make_decoder(published, 4, 4), Chunked)
    with pytest.raises(ValueError, match="use Chunked, or mixing=positions"):
        AttractorDecoder(published, 4)
    with pytest.raises(ValueError, match="has the design attractor, got redesigned"):
        Attractor(LMConfig())
    with pytest.raises(ValueError, match="build Attractor"):
        DEQTransformer(make_config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"design": "attractor", "leak": 0.5}, "leak=0.5 would have no effect in the design attr"),
        ({"design": "original", "backbone": 2}, "backbone=2 would have no effect in the design or"),
        ({"design": "attractor", "min_evaluations": 8}, "no effect in .* with mixing=positions"),
        ({"design": "attractor", "gate_start": 0.9}, "gate_start must lie in"),
        ({"design": "attractor", "heads": 128}, "heads of even width"),
        ({"design": "attractor", "rotary_base": 1.0}, "rotary_base must be above 1"),
        ({"design": "attractor", "rotary_base": float("inf")}, "rotary_base must be .* finite"),
        ({"design": "attractor", "gate_max": float("inf")}, "gate_max must be .* finite"),
        ({"design": "attractor", "mixing": "position"}, "mixing must be one of 'positions'"),
        ({"design": "attractor", "core_start": "zero"}, "core_start must be one of 'zeros'"),
        ({"design": "atractor"}, "design must be one of 'original'"),
        ({"init": "Scaled"}, "init must be one of 'normal'"),
    ],
)
def test_options_that_contradict_each_other_are_errors(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LMConfig(**changes)


@pytest.mark.parametrize("solver", ["auto", "simple_fixed_point_iter"])
def test_a_solver_without_an_order_is_refused_when_the_model_is_built(solver: str) -> None:
    with pytest.raises(ValueError, match="set f_solver to anderson, broyden or fixed_point_iter"):
        make_model({"f_solver": solver})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_half_precision_can_be_built(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Attractor(make_config(), {"f_max_iter": 3})
    finally:
        torch.set_default_dtype(before)
    assert all(p.dtype == dtype and bool(p.isfinite().all()) for p in model.parameters())


def test_the_published_solver_refuses_options_that_it_does_not_have() -> None:
    for options in (
        {"f_solver": "broyden"},
        {"f_solver": "anderson", "f_solver_kwargs": {"lam": 1.0}},
        {"grad": [2]},
        {"f_stop_mode": "abs"},
        {"b_stop_mode": "abs"},
        {"on_failure": "raise"},
        {"backward": "reversible"},
        {"f_atol": 1e-3, "f_rtol": 1e-3},
        {"tau": 0.5},
        {"core": "indexing"},
        {"coupled": True},
        {"higher_order": True},
        {"compile_f": True},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.*mixing=positions"):
            make_model(options, mixing="published")


def test_a_memory_of_other_streams_is_an_error() -> None:
    model = make_model()
    ids = draw_ids()
    with pytest.raises(ValueError, match="the memory is of 3 streams, the tokens of 2"):
        model(ids, memory=model.empty_memory(torch.zeros(3, 1)))


@torch.no_grad()
def test_newtons_method_solves_an_attractor() -> None:
    newton = make_model(TIGHT | {"f_solver": "newton_krylov"})
    ids = draw_ids()
    assert_close(newton(ids).z, make_model()(ids).z, atol=1e-8, rtol=0)
