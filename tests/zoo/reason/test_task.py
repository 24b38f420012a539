"""The task: batches, carried slots, evaluation, options, weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError, DataError, ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.evaluation_settings import check_evaluation_settings
from deq_zoo.preset import Preset, find_preset
from deq_zoo.reason.carry import Carry, Puzzles, refill, split_carries
from deq_zoo.reason.convert import from_authors, pick_state, to_authors
from deq_zoo.reason.core import States
from deq_zoo.reason.optim import AdamATan2, ATan2, PuzzleRows
from deq_zoo.reason.search import Search
from deq_zoo.reason.sets import VERSION
from deq_zoo.reason.task import SolvePuzzles
from deq_zoo.task import Shard
from tests.golden import FOLDER
from tests.zoo.reason.nets import SETTLING
from torchdeq import DEQConfig

SMOKE = find_preset("reason-smoke")
TASK: Any = SMOKE.task


def test_every_puzzle_comes_once_in_a_pass_and_none_is_left_out() -> None:
    task = replace(TASK, batch=10, augment=False)
    n = len(task.train_set)
    assert n == 24
    rows = torch.cat([task._rows(step, 3, torch.Generator()) for step in range(12)])
    assert sorted(rows[:n].tolist()) == list(range(n))
    assert sorted(rows[n : 2 * n].tolist()) == list(range(n))
    assert rows[:n].tolist() != rows[n : 2 * n].tolist()
    wide = replace(TASK, batch=100)._rows(0, 3, torch.Generator())
    assert len(wide) == 100


def test_batches_depend_on_step_and_seed_alone_and_processes_share_them() -> None:
    whole = TASK.train_batch(2, 5)
    assert all(torch.equal(a, b) for a, b in zip(whole, TASK.train_batch(2, 5), strict=True))
    parts = [TASK.train_batch(2, 5, Shard(rank, 2)) for rank in range(2)]
    assert torch.equal(parts[1].tokens, whole.tokens[1::2])
    assert not torch.equal(whole.tokens, TASK.train_batch(3, 5).tokens)


def make_carry(size: int, offset: int = 0) -> Carry:
    numbers = torch.arange(size) + offset
    rows = numbers[:, None].expand(size, 16)
    puzzles = Puzzles(rows, rows, numbers)
    states = States(*(numbers.double().view(-1, 1, 1).expand(size, 17, 8) for _ in range(2)))
    return Carry(puzzles, states, numbers, numbers % 2 == 0)


def test_slots_keep_their_puzzles_until_they_halt() -> None:
    carry, offered = make_carry(4), make_carry(4, 100).puzzles
    filled = refill(carry, offered)
    assert filled.puzzles.ids.tolist() == [100, 1, 102, 3]
    assert filled.puzzles.tokens[:, 0].tolist() == [100, 1, 102, 3]
    assert filled.steps.tolist() == [0, 1, 0, 3]


def test_slots_are_dealt_out_anew_to_another_number_of_processes() -> None:
    whole = make_carry(6)
    parts = [
        Carry(
            Puzzles(*(t[r::2] for t in whole.puzzles)),
            States(*(t[r::2] for t in whole.states or ())),
            whole.steps[r::2],
            whole.halted[r::2],
        )
        for r in range(2)
    ]
    again = [split_carries(parts, Shard(r, 3)) for r in range(3)]
    assert again[1].steps.tolist() == [1, 4]
    assert again[1].states is not None
    assert again[1].states.y[:, 0, 0].tolist() == [1, 4]
    assert torch.equal(split_carries(parts, Shard(0, 1)).puzzles.tokens, whole.puzzles.tokens)


@pytest.mark.parametrize("how", ["recursion", "solver", "stream"])
def test_all_ways_of_evaluation_have_the_same_metrics(how: Any) -> None:
    torch.manual_seed(0)
    net = replace(SETTLING, puzzle_width=8, noise=0.01)
    task = replace(TASK, net=net, evaluation=how, eval_batch=3)
    model = task.build()
    found = evaluate(task, model, "test", thorough=how == "solver")
    assert set(found.metrics) == {
        "exact", "cells", "head", "confidence", "residual", "evaluations",
    }  # fmt: skip
    assert found.solver.samples == 8
    limit = 4 * 2 if how == "stream" else 3 if how == "recursion" else 4
    assert 0 < found.metrics["evaluations"] <= limit
    assert bool(found.solver.radii) == (how == "solver")
    assert evaluate(task, model, "test", thorough=False).metrics == found.metrics


@pytest.mark.parametrize("how", ["recursion", "solver", "stream"])
def test_metrics_do_not_depend_on_the_batch_and_leave_the_generator_alone(how: Any) -> None:
    torch.manual_seed(0)
    net = replace(SETTLING, noise=0.05)
    noise = "off" if how == "recursion" else "frozen"
    task = replace(TASK, net=net, evaluation=how, solve_noise=noise)
    model = task.build().double().eval()
    before = torch.random.get_rng_state()
    metrics = [
        evaluate(replace(task, eval_batch=n), model, "test", thorough=True).metrics for n in (3, 8)
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-9)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_puzzle_that_does_not_converge_has_spent_the_budget() -> None:
    torch.manual_seed(0)
    deq = TASK.deq.with_options(f_tol=1e-12, eval_f_max_iter=7, f_solver="anderson")
    task = replace(TASK, net=SETTLING, evaluation="solver", deq=deq)
    assert evaluate(task, task.build(), "test", thorough=False).metrics["evaluations"] == 7


ATTENTION = {"mixer": "attention", "heads": 2, "position": "rope", "slots": 2}


@pytest.mark.parametrize(
    ("net", "options"),
    [
        ({"kind": "trm"}, {}),
        ({"kind": "trm", **ATTENTION}, {}),
        ({"kind": "hrm", "answer_blocks": 1, **ATTENTION}, {}),
        ({"max_steps": 1}, {}),
        ({}, {"cell_loss": "softmax"}),
        ({}, {"gradient": "deq", "deq": {"backward": "phantom", "grad": [2]}}),
        ({}, {"gradient": "deq", "deq": {"backward": "reversible", "f_max_iter": 2}}),
        ({}, {"gradient": "deq", "deq": {"ift": True, "b_solver": "gmres"}}),
        ({}, {"solve_noise": "frozen", "deq": {"f_max_iter": 3}}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::torchdeq.solver.ConvergenceWarning")
def test_every_kind_and_every_gradient_trains(net: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    deq = {name: getattr(TASK.deq, name) for name in TASK.deq.given} | options.get("deq", {})
    shape = replace(TASK.net, **net)
    search = replace(TASK.search, restarts=1 if shape.kind == "eqr" else 0)
    task = replace(TASK, net=shape, search=search, **{**options, "deq": DEQConfig(**deq)})
    model = task.build().train()
    optimizer = SMOKE.optim.make(model.parameters())
    carry: Any = None
    SMOKE.optim.set_rate(optimizer, 1999, 10_000)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(2):
        loss = task.loss(model, task.train_batch(step, 0), carry)
        optimizer.zero_grad()
        loss.value.backward()
        optimizer.step()
        carry = loss.carry
        assert bool(loss.value.isfinite())
    assert carry is not None
    assert carry.halted.all() == (shape.max_steps == 1)
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []


def test_evaluation_uses_the_average_of_the_weights() -> None:
    torch.manual_seed(0)
    model, tokens = TASK.build(), TASK.test_set.tokens.long()
    start = model.start(len(tokens))
    before = model.eval()(tokens, start).prediction
    with torch.no_grad():
        for p in model.core.parameters():
            p.add_(1.0)
    assert torch.equal(model(tokens, start).prediction, before)
    model.update_average()
    assert not torch.equal(model(tokens, start).prediction, before)
    without = replace(TASK, decay=0.0).build().eval()
    assert without.average is None
    assert without.body is without.core


def test_an_average_that_is_not_finite_is_an_error() -> None:
    model = TASK.build()
    assert model.average is not None
    with torch.no_grad():
        model.average.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ZooError, match=r"average\.lm_head\.weight holds NaN"):
        evaluate(TASK, model, "test", thorough=False)


def test_options_of_the_gradient_count_only_where_the_deq_differentiates() -> None:
    with pytest.raises(ZooError, match="grad would have no effect"):
        SMOKE.with_deq(grad=[3])
    deq = replace(SMOKE, task=replace(TASK, gradient="deq"))
    assert deq.with_deq(grad=[3], tau=0.5).task.deq.grad == [3]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"data": "sudoku6"}, r"net\.cells=36 and net\.vocab=8"),
        ({"data": "maze"}, r"net\.vocab=6"),
        ({"decay": 1.0}, "decay"),
        ({"paths": (5, 2)}, "lower one first"),
        ({"batch": 0}, "batch"),
        ({"depth": 3, "evaluation": "solver"}, "depth would have no effect"),
        ({"data": "folder", "min_rating": 1, "extra_givens": 0}, "min_rating would have no"),
        ({"data": "folder"}, "extra_givens would have no effect"),
        ({"net": replace(TASK.net, noise=0.0), "solve_noise": "frozen"}, "only EqR"),
        ({"net": replace(TASK.net, kind="trm")}, r"set search\.restarts=0 too"),
        ({"search": Search(halt="both"), "deq": DEQConfig(f_max_iter=1)}, "relative tolerance"),
        (
            {"evaluation": "stream", "deq": DEQConfig(f_max_iter=1, f_solver="newton_krylov")},
            "cannot work with f_solver=newton_krylov",
        ),
        ({"puzzles": 0}, "puzzles to at least 1"),
        ({"test_puzzles": 0}, "test_puzzles to at least 1"),
        ({"min_rating": 1}, "no Sudoku of four digits"),
        ({"paths": (3, 9)}, "paths would have no effect"),
    ],
)
def test_settings_that_do_not_fit_are_errors(options: dict[str, Any], complaint: str) -> None:
    if options.get("data") == "maze":
        options["net"] = replace(TASK.net, vocab=7)
    with pytest.raises(ValueError, match=complaint):
        replace(TASK, **options)


def test_a_stream_evaluates_other_kinds_without_restarts() -> None:
    task = replace(
        TASK, net=replace(TASK.net, kind="trm"), search=Search(slots=3), evaluation="stream"
    )
    assert evaluate(task, task.build(), "test", thorough=False).solver.samples == 8


class TestFiles:
    def task(self, **options: Any) -> SolvePuzzles:
        net = replace(TASK.net, cells=81, vocab=11)
        given = {
            "net": net,
            "extra_givens": 0,
            "puzzles": 0,
            "val_puzzles": 0,
            "test_puzzles": 0,
            **options,
        }
        return replace(TASK, **given)

    def test_a_published_folder_is_trained_on_group_by_group(self) -> None:
        folder = str(FOLDER / "reason" / "sudoku-5")
        task = self.task(data="folder", data_dir=folder, augment=False, batch=5)
        assert task.val_set is None
        assert len(task.train_set) == 15
        groups = (task._rows(0, 0, torch.Generator().manual_seed(1)) // 3).tolist()
        assert sorted(groups) == [0, 1, 2, 3, 4]
        held = replace(task, val_puzzles=2)
        assert held.val_set is not None
        assert (len(held.train_set), len(held.val_set)) == (9, 2)
        train = {tuple(row) for row in held.train_set.tokens.tolist()}
        assert not train & {tuple(row) for row in held.val_set.tokens.tolist()}
        with pytest.raises(DataError, match="leaves none"):
            _ = replace(task, val_puzzles=5).train_set

    def test_csv_files_are_found_and_limited(self, tmp_path: Path) -> None:
        for name in ("train", "test"):
            source = FOLDER / "reason" / f"sudoku_{name}.csv"
            (tmp_path / f"{name}.csv").write_bytes(source.read_bytes())
        task = self.task(data="csv", data_dir=str(tmp_path), puzzles=2, test_puzzles=1)
        assert (len(task.train_set), len(task.test_set)) == (2, 1)
        small = replace(task, net=replace(task.net, cells=16))
        with pytest.raises(DataError, match=r"net\.cells=81"):
            _ = small.train_set
        fewer = replace(task, net=replace(task.net, vocab=10))
        with pytest.raises(DataError, match=r"in row \d+ of .*: raise net\.vocab"):
            _ = fewer.train_set
        with pytest.raises(DataError, match="data-dir"):
            _ = replace(task, data_dir=None).train_set


def test_small_mazes_are_no_sudokus(tmp_path: Path) -> None:
    maze = "source,question,answer,rating\na,#####S  ##G ####,#####So ##G ####,3\n"
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text(maze)
    options: dict[str, Any] = {"data": "csv", "data_dir": str(tmp_path), "extra_givens": 0}
    task = replace(TASK, **options, val_puzzles=0, batch=2)
    assert task.facts() == {"puzzle": "maze", "side": 4}
    assert task.train_batch(0, 0).tokens.tolist() == [task.train_set.tokens[0].tolist()] * 2
    assert TASK.facts() == {"puzzle": "sudoku", "side": 4, "splits": VERSION}
    assert replace(TASK, **options | {"data_dir": None}).facts() == {"puzzle": "sudoku", "side": 4}


def test_a_model_that_was_trained_on_other_splits_is_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = TASK.build()
    for facts in (dict[str, Any](), TASK.facts()):
        model.facts = facts
        evaluate(TASK, model, "test", thorough=False)
        assert not caplog.records
    model.facts = {"puzzle": "sudoku", "side": 4}
    evaluate(TASK, model, "test", thorough=False)
    assert "has seen puzzles that are scored now" in caplog.text


def test_evaluation_does_not_choose_validation_puzzles_of_a_file_anew() -> None:
    folder = str(FOLDER / "reason" / "sudoku-5")
    net = replace(TASK.net, cells=81, vocab=11)
    options: dict[str, Any] = {"data": "folder", "data_dir": folder, "extra_givens": 0}
    files = replace(SMOKE, task=replace(TASK, net=net, **options, val_puzzles=2))

    def changed(preset: Preset, **settings: Any) -> Preset:
        return replace(preset, task=replace(preset.task, **settings))  # type: ignore[type-var]

    with pytest.raises(ZooError, match="val_puzzles may not differ from the training"):
        check_evaluation_settings(files, changed(files, val_puzzles=3), (), "val")
    check_evaluation_settings(files, changed(files, val_puzzles=3), (), "test")
    check_evaluation_settings(files, changed(files, evaluation="solver"), (), "val")
    check_evaluation_settings(SMOKE, changed(SMOKE, val_puzzles=3), (), "val")


class TestWeights:
    def test_wrapped_keys_are_read_and_others_are_errors(self) -> None:
        model = TASK.build()
        theirs = to_authors(model.state_dict())
        assert "model.inner.puzzle_emb.weights" in theirs
        wrapped = {f"_orig_mod.{key}": value for key, value in theirs.items()}
        ours = from_authors(model, wrapped)
        assert ours.keys() == model.state_dict().keys()
        with pytest.raises(CheckpointError, match="lacks"):
            from_authors(model, {k: v for k, v in theirs.items() if "q_head" not in k})

    def test_the_average_of_eqr_is_merged_over_its_model(self) -> None:
        theirs = to_authors(TASK.build().state_dict())
        shadow = {k: v + 1 for k, v in theirs.items() if "puzzle_emb" not in k}
        content = {
            "model": {f"_orig_mod.{k}": v for k, v in theirs.items()},
            "ema": {"shadow": shadow},
        }
        state = pick_state(content)
        assert state is not None
        for key, value in state.items():
            assert torch.equal(value, theirs[key] + (0 if "puzzle_emb" in key else 1))
        assert pick_state(theirs) is None
        assert pick_state({"model": theirs}) is None
        some = {k: v for k, v in shadow.items() if "q_head" not in k}
        with pytest.raises(CheckpointError, match=r"lacks 'q_head\.bias'"):
            pick_state({"model": theirs, "ema": {"shadow": some}})
        with pytest.raises(CheckpointError, match="no such weight"):
            pick_state({"model": theirs, "ema": {"other": torch.ones(1)}})


class TestOptimiser:
    def test_the_rows_of_puzzles_have_a_group_of_their_own(self) -> None:
        model = TASK.build()
        optimizer = AdamATan2(lr=0.1, table_lr=0.3).make(model.parameters())
        rates = [group["base_lr"] for group in optimizer.param_groups]
        assert rates == [0.1, 0.3]
        assert isinstance(optimizer.param_groups[1]["params"][0], PuzzleRows)
        optim = AdamATan2(lr=0.1, table_lr=0.3)
        optim.set_rate(optimizer, 999, 65_100)  # the middle of the warm-up
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.15)
        without = replace(TASK, net=replace(TASK.net, puzzle_width=0)).build()
        assert len(optim.make(without.parameters()).param_groups) == 1

    def test_its_state_goes_to_a_checkpoint_and_back(self, tmp_path: Path) -> None:
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = ATan2([p], 0.1)
        for _ in range(3):
            p.grad = torch.tensor([1.0, -2.0, 0.0])
            optimizer.step()
        path = tmp_path / "a.safetensors"
        Checkpoint(3, {"p": p.detach()}, optimizer=optimizer.state_dict()).save(path)
        q = torch.nn.Parameter(p.detach().clone())
        other = ATan2([q], 0.7)
        other.load_state_dict(Checkpoint.load(path).optimizer)
        for parameter, each in ((p, optimizer), (q, other)):
            parameter.grad = torch.tensor([0.5, 0.5, 0.5])
            each.step()
        assert torch.equal(p, q)
