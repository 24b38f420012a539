"""Optimiser, average, learning rate, layers: numbers of the authors' programs for each rule."""

from __future__ import annotations

from dataclasses import replace
from math import erf, sqrt

import pytest
import torch

from deq_zoo.reason import config
from deq_zoo.reason.config import ReasonConfig
from deq_zoo.reason.core import Core
from deq_zoo.reason.layers import (
    Rotation,
    board_angles,
    from_uniform,
    inner_width,
    rotate,
    truncated_normal,
)
from deq_zoo.reason.loss import cell_losses, log_stablemax
from deq_zoo.reason.model import Reasoner
from deq_zoo.reason.optim import ATan2, LateCosine, step_rows
from tests.golden import assert_matches, load_tensors, select

IO = load_tensors("reason", "common_io")


def test_golden_steps_of_the_optimiser_are_reproduced() -> None:
    io = select(IO, "adam_atan2/")
    p = io["p0"].clone().requires_grad_()
    optimizer = ATan2([p], weight_decay=0.1)
    for t, (g, lr) in enumerate(zip(io["grads"], io["lr"], strict=True), start=1):
        optimizer.param_groups[0]["lr"] = float(lr)
        p.grad = g
        optimizer.step()
        assert_matches(p.detach(), io[f"p{t}"])
    assert_matches(optimizer.state[p]["exp_avg"], io["m3"])
    assert_matches(optimizer.state[p]["exp_avg_sq"], io["v3"])


def test_golden_step_of_the_puzzles_own_vectors_is_reproduced() -> None:
    io = select(IO, "signsgd/")
    g = torch.zeros_like(io["table0"]).index_add(0, io["ids"].long(), io["local_grads"])
    used = torch.zeros(len(g), 1, dtype=torch.bool)
    used[io["ids"].long()] = True
    table = torch.where(used, step_rows(io["table0"], g, 1e-2, 0.1), io["table0"])
    assert_matches(table, io["table1"])
    p = io["table0"].clone().requires_grad_()
    p.grad = g
    ATan2([{"params": [p], "by_sign": True}], 1e-2, weight_decay=0.1).step()
    # The optimiser sees the sum alone: a row whose gradients cancel exactly counts as not used.
    moved = (g != 0).any(1)
    assert_matches(p.detach()[moved], io["table1"][moved])
    assert torch.equal(p.detach()[~moved], io["table0"][~moved])


def test_golden_average_is_reproduced() -> None:
    io = select(IO, "ema/")
    net = ReasonConfig(cells=4, vocab=6, width=8, blocks=1)
    model = Reasoner(net, decay=0.999).double()
    assert model.average is not None
    weight, average = model.core.embed_tokens.embedding_weight, model.average.embed_tokens
    with torch.no_grad():
        average.embedding_weight[0, :6] = io["sequence"][0]
        for row in io["sequence"][1:]:
            weight[0, :6] = row
            model.update_average()
    assert_matches(average.embedding_weight[0, :6], io["shadow"])


@pytest.mark.parametrize("floor", [1.0, 0.1])
def test_golden_learning_rates_are_reproduced(floor: float) -> None:
    schedule = LateCosine(warmup=2000, floor=floor)
    rates = [1e-4 * schedule.factor(int(t) - 1, 65104) for t in IO["lr/steps"]]
    assert rates == pytest.approx(IO[f"lr/ratio{floor}"].tolist(), rel=1e-9)


@pytest.mark.parametrize("std", [1.0, 0.25])
def test_golden_truncated_normal_is_reproduced(std: float) -> None:
    edge = erf(sqrt(2))
    u = -edge + 2 * edge * IO["trunc_normal/u01"]
    assert_matches(from_uniform(u, std), IO[f"trunc_normal/std{std}"])


def test_drawn_numbers_have_the_standard_deviation_that_was_asked_for() -> None:
    drawn = truncated_normal(torch.empty(200_000), 0.3)
    assert float(drawn.std()) == pytest.approx(0.3, rel=0.01)
    assert float(drawn.abs().max()) <= 0.3 * 2.2738
    assert not truncated_normal(torch.ones(3), 0.0).any()


def test_golden_stablemax_is_reproduced() -> None:
    io = select(IO, "stablemax/")
    logits = io["logits"].clone().requires_grad_()
    assert_matches(log_stablemax(logits).detach(), io["logp"])
    ce = cell_losses(logits, io["labels"].long())
    assert_matches(ce.detach(), io["ce"])
    ce.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_golden_rotation_on_a_board_is_reproduced() -> None:
    io = select(IO, "rope2d/")
    tables = Rotation(board_angles(3, 4, 8), groups=2).tables(io["q"])
    for name in ("q", "k"):
        turned = rotate(io[name].transpose(1, 2), tables).transpose(1, 2)
        assert_matches(turned, io[f"{name}_out"])


def test_golden_inner_widths_are_reproduced() -> None:
    widths = [inner_width(int(size), 4.0) for size in IO["swiglu/dim"]]
    assert widths == IO["swiglu/inner_expansion4"].tolist()


def test_golden_learned_positions_are_reproduced() -> None:
    io = select(IO, "learned_pos/")
    net = ReasonConfig(
        kind="trm", cells=3, vocab=4, width=6, heads=1, mixer="attention", position="learned"
    )
    core = Core(net).double()
    with torch.no_grad():
        core.embed_tokens.embedding_weight.copy_(io["embed"])
        core.embed_pos.embedding_weight.copy_(io["pos"])
        x = core.embed(io["tokens"].long(), None)
    torch.testing.assert_close(x, io["x"], rtol=0, atol=1e-12)


MAZE = config.EQR_MAZE


@pytest.mark.parametrize(
    ("net", "count"),
    [
        (config.HRM, 27_275_266),
        (config.TRM_ATTENTION, 6_828_034),
        (config.TRM_MLP, 5_028_866),
        (config.EQR_SUDOKU, 4_855_298),
        (replace(config.EQR_SUDOKU, slots=16, puzzle_width=512), 5_028_866),
        (MAZE, 263_938),
        (replace(MAZE, width=42, heads=3), 39_902),
        (replace(MAZE, width=44, heads=2), 42_154),
        (replace(MAZE, width=40, heads=2), 37_682),
        (replace(MAZE, width=36, heads=2), 33_338),
        (replace(MAZE, width=24, heads=3, answer_blocks=1, kind="trm"), 41_810),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else value.kind,
)
def test_published_counts_of_parameters(net: ReasonConfig, count: int) -> None:
    with torch.device("meta"):
        core = Core(net)
    assert sum(p.numel() for p in core.parameters()) == count
