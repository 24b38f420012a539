"""The task: batches, losses, evaluation, presets and commands."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import DataError
from deq_zoo.lm.loss import last_step
from deq_zoo.lm.presets import CONVERGENT, REGULARISED
from deq_zoo.lm.task import LanguageTask
from deq_zoo.optim import WarmCosine
from deq_zoo.task import Shard, Split
from tests.zoo.lm.inputs import predict_inputs, python_input
from tests.zoo.lm.nets import make_config
from tests.zoo.training import train

SMALL = make_config("convergent", tokens=256, cutoffs=(), shrink=1)


def make_task(**changes: Any) -> LanguageTask:
    options: dict[str, Any] = {
        "net": SMALL,
        "deq": CONVERGENT.with_options(grad=[3]),
        "data": "counting",
        "batch": 4,
        "length": 16,
        "memory": 16,
        "eval_batch": 2,
        "eval_limit": 2,
    }
    return LanguageTask(**(options | changes))


def test_the_smoke_preset_trains_reports_reads_and_writes(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "run"
    assert main(["train", "lm-smoke", "--cpu", "--out", str(out)]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert "<h2>Examples</h2>" in (out / "report.html").read_text()
    assert {"page", "steps"} <= {p.stem for p in (out / "pictures").glob("*.png")}
    assert main(["evaluate", str(out), "--cpu"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    words = ["sample", str(out), "--cpu", "--prompt", "10 11", "--tokens", "20", "--top-k", "3"]
    assert main([*words, "--out", str(tmp_path / "samples")]) == 0
    assert capsys.readouterr().out.startswith("10 11")
    assert (tmp_path / "samples" / "sample.txt").read_text().startswith("10 11")
    good, _ = predict_inputs(tmp_path)
    words = ["predict", str(out), *map(str, good), "--cpu", "--out", str(tmp_path / "scores")]
    assert main(words) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(words) == 2
    model = deq_zoo.load(out)
    assert model.predict(python_input()).prediction.perplexity > 1


def test_learning_lowers_the_loss() -> None:
    task = make_task()
    model = train(task, 40, lr=0.02).model
    with torch.no_grad():
        result = task.evaluate(model, "val", thorough=True)
    assert result.metrics["loss"] < 4.0  # log 256 = 5.5
    assert result.metrics["perplexity"] == pytest.approx(exp(result.metrics["loss"]))
    assert len(result.solver.radii) == 2


@pytest.mark.parametrize(("limit", "split"), [(0, "val"), (2, "val"), (0, "test")])
def test_perplexity_is_the_mean_over_all_predicted_tokens(limit: int, split: Split) -> None:
    task = make_task(eval_limit=limit, memory=200)
    model = train(task, 2, lr=0.02).model
    with torch.no_grad():
        loss = task.evaluate(model, split).metrics["loss"]
        ids = task.val_set if split == "val" else task.test_set
        rows = ids[: len(ids) // 2 * 2].view(2, -1)
        rows = rows[:, : 2 * 16 + 1] if limit else rows
        memory, total = None, 0.0
        for start in range(0, rows.shape[1] - 1, 16):
            part = rows[:, start : start + 16][:, : rows.shape[1] - 1 - start]
            out = model(part, memory=memory)
            target = rows[:, start + 1 : start + 17]
            total += float(-model.log_prob(out.z).gather(2, target[..., None]).sum())
            memory = (memory or model.empty_memory(out.u)).followed_by(out, 200)
    assert loss == pytest.approx(total / (rows.numel() - 2), rel=1e-5)


def test_batches_depend_on_their_step_alone_and_memory_starts_with_a_text() -> None:
    task = make_task(ahead=3)
    per_epoch = task.steps_per_epoch
    a, b = (task.train_batch(5, 1, Shard()) for _ in range(2))
    assert torch.equal(a.ids, b.ids)
    assert a.ahead == b.ahead
    assert task.train_batch(per_epoch, 0, Shard()).first
    assert not a.first
    parts = [task.train_batch(5, 1, Shard(rank, 2)).ids for rank in range(2)]
    assert torch.equal(torch.cat(parts), a.ids)
    assert task.batch_size(a) == 64


def test_a_share_of_batches_begins_without_memory() -> None:
    task = make_task(forget=0.25)
    steps = range(1, len(task._train_streams))
    first = [task.train_batch(step, 0).first for step in steps]
    assert first == [task.train_batch(step, 0).first for step in steps]
    assert first != [task.train_batch(step, 1).first for step in steps]
    many = [task._forgets(step, 0) for step in range(2000)]
    assert 0.2 < sum(many) / len(many) < 0.3
    assert not any(make_task().train_batch(step, 0).first for step in steps)
    with pytest.raises(ValueError, match="a share of batches, from 0 to 1"):
        make_task(forget=1.5)


def test_memory_is_carried_without_a_graph_and_left_at_a_new_text() -> None:
    task = make_task()
    model = task.build()
    first = task.loss(model, task.train_batch(0, 0, Shard()), None)
    assert first.carry.z.shape == (4, 16, 2 * 8)  # for each of two blocks
    assert not first.carry.z.requires_grad
    segment = task.train_batch(1, 0, Shard())
    with_memory = task.loss(model, segment, tuple(first.carry))  # as a checkpoint gives it back
    without = task.loss(model, segment._replace(first=True), first.carry)
    assert with_memory.value.item() != without.value.item()


def test_the_weight_of_the_jacobian_rises_and_is_drawn_by_step() -> None:
    task = make_task(net=make_config("original", tokens=256, cutoffs=(), shrink=1), deq=REGULARISED)
    weights = [task.train_batch(step, 0, Shard()).jac_weight for step in range(400)]
    assert set(weights) == {0.0, 0.1}
    assert sum(w > 0 for w in weights) == pytest.approx(160, abs=40)
    rising = REGULARISED.with_options(jac_loss_weight=0.0, jac_loss_freq=1.0)
    assert replace(task, deq=rising).train_batch(60_000, 0, Shard()).jac_weight == 0.2
    late = {task.train_batch(step, 0, Shard()).jac_weight for step in range(90_000, 90_050)}
    assert max(late) == pytest.approx(0.4)
    model = task.build()
    segment = task.train_batch(0, 0, Shard())
    losses = [
        task.loss(model, segment._replace(jac_weight=w), None) for w in (0.0, 1.0)
    ]  # fmt: skip
    assert losses[1].value.item() > losses[0].value.item()
    assert losses[1].metrics["nll"].item() == pytest.approx(losses[0].metrics["nll"].item())
    losses[1].value.backward()


def test_a_weight_of_the_loss_is_finite() -> None:
    with pytest.raises(ValueError, match="consistency must be at least 0 and finite, got inf"):
        make_task(consistency=float("inf"))


def test_consistency_penalises_the_last_step() -> None:
    plain, task = make_task(), make_task(consistency=2.0)
    torch.manual_seed(0)
    model = task.build()
    segment = task.train_batch(0, 0, Shard())
    loss = task.loss(model, segment, None)
    total = loss.metrics["nll"] + 2.0 * loss.metrics["last_step"]
    assert loss.value.item() == pytest.approx(total.item())
    assert plain.loss(model, segment, None).value.item() == pytest.approx(
        loss.metrics["nll"].item()
    )
    a, b = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 5.0]]])
    assert float(last_step(a, b)) == pytest.approx(10 / 25)


def test_the_published_rate_starts_loud_and_drops_after_the_rise() -> None:
    rate = WarmCosine(8_000, loud_start=True)
    assert rate.factor(0, 150_000) == 1.0
    assert rate.factor(1, 150_000) == pytest.approx(1 / 8_000)
    assert 2.5e-4 * rate.factor(7_999, 150_000) == pytest.approx(2.4997e-4, rel=1e-4)
    assert 2.5e-4 * rate.factor(8_000, 150_000) == pytest.approx(2.4825e-4, rel=1e-4)
    assert WarmCosine(10).factor(0, 100) == pytest.approx(0.1)


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(DataError, match=r"different tokens, the model 100: --set net.tokens=256"):
        assert make_task(net=replace(SMALL, tokens=100)).corpus
    with pytest.raises(ValueError, match="batch must be at least 1"):
        make_task(batch=0)
