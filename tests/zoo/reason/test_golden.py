"""Against numbers of the authors' programs: float64, 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deq_zoo.reason.carry import Carry, advance, refill, value_of_going_on
from deq_zoo.reason.core import States
from deq_zoo.reason.loss import (
    Losses,
    cell_accuracy,
    cell_losses,
    compute_losses,
    log_stablemax,
    solved,
)
from deq_zoo.reason.optim import ATan2
from deq_zoo.reason.reasoned import Reasoned
from tests.golden import assert_matches
from tests.zoo.reason.golden import NAMES, Golden, check_carry

every_model = pytest.mark.parametrize("name", NAMES)


def train_step(
    golden: Golden, carry: Carry | None, prefix: str, index: int | None = None
) -> tuple[Carry, Reasoned, Losses]:
    """Take one supervision step of training with given batches and draws; do not update."""
    model, net = golden.model.train(), golden.net
    carry = refill(carry, golden.puzzles(prefix, index))
    tokens, labels, ids = carry.puzzles
    start = golden.start(prefix, index)
    out = model(tokens, carry.states, ids=ids, fresh=carry.halted, start=start)
    target = None if out.next_q is None else value_of_going_on(out.next_q, carry.steps, net)
    losses = compute_losses(out.prediction, out.q, labels, target)
    carry = advance(carry, out.state, out.q, net, golden.drawn(prefix, index))
    return carry, out, losses


@every_model
@torch.no_grad()
def test_golden_pieces_are_reproduced(name: str) -> None:
    golden = Golden(name)
    core, io = golden.model.core, golden.io
    h, inject = io["piece/h"], io["piece/inject"]
    tables = core._tables(h)
    block: Any = core.L_level.layers[0]
    raw = block.mlp_t(h.mT).mT if golden.net.mixer == "mlp" else block.self_attn(h, tables)
    golden.compare("piece/mixer_raw", raw)
    golden.compare("piece/swiglu_raw", block.mlp(h))
    golden.compare("piece/block_out", block(h, tables))
    if golden.has("piece/F_out"):
        golden.compare("piece/F_out", core._step(core.L_level, h, inject, None))
    if golden.net.kind == "hrm":
        golden.compare("piece/FH_out", core.H_level(h, inject, tables))
    if tables is not None:
        golden.compare("rope/cos", tables.cos)
        golden.compare("rope/sin", tables.sin)


@every_model
@torch.no_grad()
def test_golden_embedding_steps_and_rounds_are_reproduced(name: str) -> None:
    golden = Golden(name)
    model, core, puzzles = golden.model, golden.model.core, golden.puzzles("batch1")
    x = model.inject(puzzles.tokens, puzzles.ids)
    if golden.has("x_embed"):
        golden.compare("x_embed", x)
    states = golden.start("batch1")
    inner = core.inner_step(states, x)
    if golden.has("step/inner_z"):
        golden.compare("step/inner_z", inner.z)
    golden.compare("step/answer_y", core.answer_step(inner).y)
    for r, (y, z) in enumerate(core.rounds(states, x), start=1):
        if golden.has(f"round{r}/y"):
            golden.compare(f"round{r}/y", y)
        golden.compare(f"round{r}/z", z)


@every_model
def test_golden_supervision_steps_and_gradients_are_reproduced(name: str) -> None:
    golden = Golden(name)
    model, io, carry = golden.model, golden.io, None
    # The weights of the model stay: only these copies are updated, by the same gradients.
    copies = {key: p.detach().clone().requires_grad_() for key, p in golden.named_parameters()}
    optimizer = ATan2(copies.values(), 1e-3, weight_decay=1.0)
    for t in (1, 2, 3):
        if not golden.has(f"sup{t}/logits"):
            break
        model.zero_grad()
        carry, out, losses = train_step(golden, carry, f"batch{t}")
        check_carry(golden, f"sup{t}", carry)
        golden.compare(f"sup{t}/logits", out.prediction)
        assert out.q is not None
        golden.compare(f"sup{t}/q_halt_logits", out.q[:, 0])
        if golden.has(f"sup{t}/q_continue_logits"):
            golden.compare(f"sup{t}/q_continue_logits", out.q[:, 1])
        check_losses(golden, f"sup{t}", carry, out, losses)
        (losses.total / 3).backward()
        check_gradients(golden, t)
        if t < 3 and golden.has(f"atan2_step2_norm/{golden.order[0]}"):
            for key, p in golden.named_parameters():
                copies[key].grad = p.grad
            optimizer.step()
            for key, p in copies.items():
                if t == 1 and golden.has(f"atan2_step1/{key}"):
                    golden.compare(f"atan2_step1/{key}", p)
                elif t == 2:
                    golden.compare(f"atan2_step2_norm/{key}", p.detach().norm())
    assert bool(io["sup1/all_finish"]) == bool(io["sup1/halted"].all())


def check_losses(golden: Golden, prefix: str, carry: Carry, out: Reasoned, losses: Losses) -> None:
    io, labels = golden.io, carry.puzzles.labels
    golden.compare(f"{prefix}/loss_total", losses.total)
    golden.compare(f"{prefix}/metric_lm_loss", losses.cells)
    golden.compare(f"{prefix}/metric_q_halt_loss", losses.halt)
    if losses.go_on is not None:
        golden.compare(f"{prefix}/metric_q_continue_loss", losses.go_on)
    if golden.has(f"{prefix}/token_ce"):
        golden.compare(f"{prefix}/token_ce", cell_losses(out.prediction, labels))
        golden.compare(f"{prefix}/log_stablemax", log_stablemax(out.prediction))
    counted = carry.halted & (labels != -100).any(1)
    assert out.q is not None
    assert int(counted.sum()) == int(io[f"{prefix}/metric_count"])
    right = solved(out.prediction, labels)
    assert int((counted & right).sum()) == int(io[f"{prefix}/metric_exact_accuracy"])
    agrees = (out.q[:, 0] >= 0) == right
    assert int((counted & agrees).sum()) == int(io[f"{prefix}/metric_q_halt_accuracy"])
    assert int(carry.steps[counted].sum()) == int(io[f"{prefix}/metric_steps"])
    share = float(cell_accuracy(out.prediction, labels)[counted].sum())
    assert share == pytest.approx(float(io[f"{prefix}/metric_accuracy"]), abs=1e-6)


def check_gradients(golden: Golden, t: int) -> None:
    for key, p in golden.named_parameters():
        assert p.grad is not None, key
        golden.compare(f"gradnorm{t}/{key}", p.grad.norm())
        if t == 1:
            golden.compare(f"grad1/{key}", p.grad)
    table = golden.model.puzzle_rows
    if table is not None:
        assert table.grad is not None
        local = golden.io[f"grad{t}/puzzle_emb.local_weights"]
        ids = golden.io[f"sup{t}/cur_ids"].long()
        assert_matches(table.grad, torch.zeros_like(table).index_add(0, ids, local))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "eqr_att"])
@torch.no_grad()
def test_golden_evaluation_is_reproduced(name: str) -> None:
    golden = Golden(name)
    model, puzzles = golden.model.eval(), golden.puzzles("batch2")
    out = model.recurse(puzzles.tokens, z0=golden.start("batch2"), ids=puzzles.ids, every=True)
    assert len(out.predictions) == golden.net.max_steps
    for k, logits in enumerate(out.predictions, start=1):
        golden.compare(f"eval/logits{k}", logits)
    golden.compare("eval/y", out.state.y)
    assert out.q is not None
    golden.compare("eval/q_halt3", out.q[:, 0])
    assert out.stats is not None
    assert out.stats.nfe == 3


@pytest.mark.parametrize("name", ["eqr_mlp", "eqr_slots"])
def test_golden_noise_is_reproduced(name: str) -> None:
    golden = Golden(name, noise=float(Golden(name).io["noise/beta"]))
    model, puzzles, eps = golden.model.train(), golden.puzzles("batch1"), golden.io["noise/eps"]
    x, start = model.inject(puzzles.tokens, puzzles.ids), golden.start("batch1")
    draws = iter(eps)
    for r, (y, z) in enumerate(model.core.rounds(start, x, lambda h: next(draws)), start=1):
        golden.compare(f"noise/round{r}_y", y)
        golden.compare(f"noise/round{r}_z", z)
    draws = iter(eps)
    out = model(puzzles.tokens, start, ids=puzzles.ids, noise=lambda h: next(draws))
    golden.compare("noise/logits", out.prediction)
    golden.compare("noise/q", out.q)
    losses = compute_losses(out.prediction, out.q, puzzles.labels)
    golden.compare("noise/loss_total", losses.total)
    (losses.total / 3).backward()
    for key, p in golden.named_parameters():
        assert p.grad is not None
        golden.compare(f"noise/gradnorm/{key}", p.grad.norm())
    frozen = model.apply_step(*start, x, eps.transpose(0, 1))
    golden.compare("noise/round2_y", frozen.y)


@pytest.mark.parametrize("name", ["eqr_mlp", "eqr_slots", "trm_mlp", "hrm"])
def test_golden_five_training_steps_are_reproduced(name: str) -> None:
    """AdamW, the table's own step, and the average, over carried batches."""
    golden = Golden(name)
    model, io, carry = golden.model, golden.io, None
    adam = torch.optim.AdamW(
        model.core.parameters(), 2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    rows = [] if model.puzzle_rows is None else [model.puzzle_rows]
    table = ATan2([{"params": rows, "by_sign": True}], 1e-2, weight_decay=0.1)
    for t in range(5):
        model.zero_grad()
        carry, _, losses = train_step(golden, carry, "trace", t)
        (losses.total / 3).backward()
        table.step()
        adam.step()
        model.update_average()
        assert_matches(losses.total.detach() / 3, io["trace/loss"][t])
        assert_matches(losses.cells.detach() / 3, io["trace/lm_loss"][t])
        assert_matches(losses.halt.detach() / 3, io["trace/q_halt_loss"][t])
        assert carry.steps.tolist() == io["trace/steps"][t].tolist()
        assert carry.halted.tolist() == io["trace/halted"][t].bool().tolist()
        norms = torch.stack([p.detach().norm() for _, p in golden.named_parameters()])
        assert_matches(norms, io["trace/param_norms"][t])
        if "trace/ema_norms" in io:
            assert model.average is not None
            average = dict(model.average.named_buffers())
            keys = [key.removeprefix("model.inner.") for key in golden.order]
            assert_matches(torch.stack([average[k].norm() for k in keys]), io["trace/ema_norms"][t])
        if model.puzzle_rows is not None:
            assert_matches(model.puzzle_rows.detach(), io["trace/puzzle_table"][t])
    for key, p in golden.named_parameters():
        if f"trace/final/{key}" in io:
            golden.compare(f"trace/final/{key}", p)


@every_model
def test_golden_states_are_detached_and_constants(name: str) -> None:
    """Only the differentiated part has a graph: the start gets no gradient."""
    golden = Golden(name)
    puzzles = golden.puzzles("batch1")
    start = States(*(h.clone().requires_grad_() for h in golden.start("batch1")))
    out = golden.model.train()(puzzles.tokens, start, ids=puzzles.ids)
    assert not out.state.y.requires_grad
    out.prediction.sum().backward()
    assert start.y.grad is None
    assert start.z.grad is None
