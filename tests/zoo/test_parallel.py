"""One model on several processes: replicated, sharded, and resumed by another number of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.model import Model
from deq_zoo.run import Run
from deq_zoo.sharding import Sharded
from deq_zoo.task import Shard
from deq_zoo.update import OneDevice
from tests.contracts.families import NAMES, smoke
from tests.zoo.disagreeing import disagreeing
from tests.zoo.launching import finish, launch

QUIET = ("--cpu", "--quiet", "--no-report")
FSDP = ("--set", "parallel=fsdp")
every = pytest.mark.parametrize("name", NAMES)


#: What the smoke presets leave out.
FURTHER = {
    # From the identity, states rest at the kink of the ReLU: a run in one process whose weights
    # are changed by 1e-8 differs by 0.1 after five steps.
    "projections and warm starts": (
        "ignn-quick", "length=10", "f_max_iter=30", "b_max_iter=30", "warm=true", "init=uniform",
    ),
    "evaluations between steps": (
        "inr-quick", "shrink=32", "net.width=16", "rival.width=16", "look_every=2",
    ),
    "derivatives of higher order": ("inr-shape", "task.batch=63", "width=16", "f_max_iter=30"),
}  # fmt: skip
#: What depends on random numbers of a process, or on half of a batch.
BY_PROCESS = {
    "dropout and probes": ("lm-smoke", "jac_loss_weight=0.5", "jac_loss_freq=0.5"),
    "bfloat16": ("mdeq-smoke", "precision=bf16"),
}


def alone() -> Any:
    """Return one process as the processes of a run."""
    return SimpleNamespace(accelerator=OneDevice("cpu"), is_main=True, count=1)


def settings(words: Sequence[str]) -> list[str]:
    return [part for word in words for part in ("--set", word)]


def train(folder: Path, world: int, name: str, *options: str) -> Run:
    """Train in a folder with some processes, which must all succeed."""
    words = ["train", name, *QUIET, "--out", str(folder), *options]
    logs = folder.with_name(f"{folder.name}-logs")
    for end in finish(logs, launch(logs, world, *words), timeout=240):
        assert end.endswith("exit 0"), end
    return Run.open(folder)


def last(run: Run) -> Checkpoint:
    return Checkpoint.load(run.last)


def gap(one: Any, other: Any) -> float:
    """Return the largest difference of two state_dicts with the same names."""
    assert one.keys() == other.keys()
    gaps = [
        float((v.double() - other[k].double()).abs().max()) for k, v in one.items() if v.numel()
    ]
    return max(gaps)


def gap_of_optimizers(one: Any, other: Any) -> float:
    """Return the largest difference of two states; weights without entries may lack one."""
    first, second = (
        {k: state for k, state in each["state"].items() if state["exp_avg"].numel()}
        for each in (one, other)
    )
    assert first.keys() == second.keys()
    assert one["param_groups"] == other["param_groups"]
    return max(gap(state, second[k]) for k, state in first.items())


class TestAToy:
    """It has dropout and a batch norm; both depend on the number of processes, and on it alone."""

    OPTIONS = tuple(settings(("steps=12", "clip=0.5", "clip_value=0.1", "accumulate=2")))

    def test_shards_train_the_model_of_replicas(self, tmp_path: Path) -> None:
        """Weights, optimiser, clipping, accumulated gradients, logs and evaluations are alike."""
        ddp = train(tmp_path / "ddp", 2, "disagreeing", *self.OPTIONS)
        fsdp = train(tmp_path / "fsdp", 2, "disagreeing", *self.OPTIONS, *FSDP)
        one, other = last(ddp), last(fsdp)
        assert gap(one.model, other.model) < 1e-6
        assert gap_of_optimizers(one.optimizer, other.optimizer) < 1e-6
        for a, b in zip(one.by_process, other.by_process, strict=True):
            assert gap(a["buffers"], b["buffers"]) < 1e-6
        losses = [[line["loss"] for line in run.lines("train")] for run in (ddp, fsdp)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for kind in ("eval", "test"):
            scores = [[line["metrics"]["mse"] for line in run.lines(kind)] for run in (ddp, fsdp)]
            assert scores[0] == pytest.approx(scores[1], rel=1e-5)
            assert scores[0]

    def test_a_sharded_run_resumes_bit_for_bit_or_with_more_processes(self, tmp_path: Path) -> None:
        options = (*self.OPTIONS, *FSDP)
        whole = train(tmp_path / "whole", 2, "disagreeing", *options)
        stopped = train(tmp_path / "run", 2, "disagreeing", *options, "--max-seconds", "1e-9")
        assert last(stopped).step == 1
        first = stopped.last.read_bytes()
        train(stopped.path, 2, "disagreeing", *options, "--resume")
        torch.testing.assert_close(last(stopped).model, last(whole).model, rtol=0, atol=0)
        assert gap_of_optimizers(last(stopped).optimizer, last(whole).optimizer) == 0
        stopped.last.write_bytes(first)
        stopped.log_file.write_text("")
        stopped.best.unlink(missing_ok=True)
        train(stopped.path, 3, "disagreeing", *options, "--resume")
        checkpoint = last(stopped)
        assert checkpoint.step == 12
        assert len(checkpoint.carry) == 3
        message = (tmp_path / "run-logs" / "0.txt").read_text()
        assert "number of processes has changed from 2 to 3" in message
        assert gap(checkpoint.model, last(whole).model) < 0.5  # other dropout


class TestEveryFamily:
    """After five steps, one process, two replicas and two shards have the same weights.

    Where each process draws or measures by itself, runs are equal only without: dropout, and the
    statistics of batch norms, which are those of a process's part of the batch. With batch norms
    in training mode, replicas and shards are compared with each other.
    """

    LENGTH = ("--steps", "5", "--set", "save_every=5", "--set", "eval_every=5")
    #: Adam makes steps of full size even from gradients that are rounding errors; not with this.
    SMOOTH = ("--set", "eps=1e-3")

    def options(self, name: str) -> tuple[str, ...]:
        dropout = ("--set", "net.dropout=0") if name == "lm" else ()
        return (*self.LENGTH, *self.SMOOTH, *dropout)

    @pytest.fixture
    def frozen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keep batch norms in evaluation mode; the processes are forks of this one."""

        def stay(norm: nn.Module, mode: bool = True) -> nn.Module:
            return nn.Module.train(norm, False)

        monkeypatch.setattr(nn.modules.batchnorm._BatchNorm, "train", stay, raising=False)

    @pytest.mark.slow
    @every
    @pytest.mark.usefixtures("frozen")
    def test_the_weights_do_not_depend_on_the_processes(self, name: str, tmp_path: Path) -> None:
        options, preset = self.options(name), f"{name}-smoke"
        one = last(train(tmp_path / "one", 1, preset, *options))
        assert one.step == 5
        for kind in ("ddp", "fsdp"):
            words = (*options, "--set", f"parallel={kind}")
            two = last(train(tmp_path / kind, 2, preset, *words))
            assert gap(one.model, two.model) < 1e-5, kind
            assert gap_of_optimizers(one.optimizer, two.optimizer) < 1e-4, kind

    @pytest.mark.slow
    @pytest.mark.parametrize("case", FURTHER)
    def test_nor_do_those_of_other_presets(self, case: str, tmp_path: Path) -> None:
        name, *changes = FURTHER[case]
        options = (*self.LENGTH, *self.SMOOTH, *settings(changes))
        one = last(train(tmp_path / "one", 1, name, *options))
        for kind in ("ddp", "fsdp"):
            words = (*options, "--set", f"parallel={kind}")
            two = last(train(tmp_path / kind, 2, name, *words))
            assert gap(one.model, two.model) < 1e-5, kind

    @pytest.mark.slow
    @pytest.mark.parametrize("case", BY_PROCESS)
    def test_shards_are_replicas(self, case: str, tmp_path: Path) -> None:
        name, *changes = BY_PROCESS[case]
        options = (*self.LENGTH, *self.SMOOTH, *settings(changes))
        ddp = last(train(tmp_path / "ddp", 2, name, *options))
        fsdp = last(train(tmp_path / "fsdp", 2, name, *options, *FSDP))
        assert gap(ddp.model, fsdp.model) < 1e-5

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name in NAMES if name in ("mdeq", "flow")])
    def test_batch_norms_of_shards_are_those_of_replicas(self, name: str, tmp_path: Path) -> None:
        options, preset = self.options(name), f"{name}-smoke"
        ddp = last(train(tmp_path / "ddp", 2, preset, *options))
        fsdp = last(train(tmp_path / "fsdp", 2, preset, *options, *FSDP))
        assert gap(ddp.model, fsdp.model) < 1e-5
        for a, b in zip(ddp.by_process, fsdp.by_process, strict=True):
            assert gap(a["buffers"], b["buffers"]) < 1e-5

    @pytest.mark.slow
    @every
    @pytest.mark.usefixtures("frozen")
    @pytest.mark.parametrize("worlds", [(2, 1), (1, 2)])
    def test_another_number_of_processes_goes_on_where_the_first_stopped(
        self, name: str, worlds: tuple[int, int], tmp_path: Path
    ) -> None:
        """Samples, carried states and the optimiser are handed over: the weights are equal."""
        options, preset = (*self.options(name), *FSDP), f"{name}-smoke"
        whole = last(train(tmp_path / "whole", 1, preset, *options))
        run = train(tmp_path / "run", worlds[0], preset, *options, "--max-seconds", "1e-9")
        assert last(run).step == 1
        train(run.path, worlds[1], preset, *options, "--resume")
        assert last(run).step == 5
        assert gap(last(run).model, whole.model) < 1e-5


class TestWhatCannotBeSharded:
    def test_a_weight_that_is_a_single_number(self) -> None:
        model = Model()
        model.scale = nn.Parameter(torch.tensor(1.0))
        with pytest.raises(ZooError, match="cannot share out scale, which is a single number"):
            Sharded(disagreeing(), model, alone())

    def test_float16(self) -> None:
        with pytest.raises(ZooError, match="does not scale gradients, which fp16 needs: use bf16"):
            Sharded(replace(disagreeing(), precision="fp16"), Model(), alone())


class TestCarriedStates:
    def test_streams_of_text_are_dealt_out_again(self) -> None:
        task = smoke("lm").task
        z, u = torch.randn(4, 3, 2), torch.randn(4, 3, 6)
        two = [(z[:2], u[:2]), (z[2:], u[2:])]
        four = [task.split_carry(two, Shard(rank, 4)) for rank in range(4)]
        assert torch.equal(torch.cat([memory.z for memory in four]), z)
        assert torch.equal(torch.cat([memory.u for memory in four]), u)

    def test_states_of_points_are_merged(self) -> None:
        task = smoke("inr").task
        kept = torch.arange(8.0).view(4, 2)
        seen = [torch.tensor([True, False, True, False]), torch.tensor([False, True, False, False])]
        carries = [{"kept": kept * s[:, None], "seen": s} for s in seen]
        merged = task.split_carry(carries, Shard(0, 3))
        assert merged["seen"].tolist() == [True, True, True, False]
        assert torch.equal(merged["kept"][:3], kept[:3])
        assert torch.equal(carries[0]["kept"], kept * seen[0][:, None])  # nothing was changed

    def test_a_task_without_a_rule_begins_anew(self) -> None:
        assert disagreeing().task.split_carry([1, 2], Shard(0, 3)) is None


def test_parallel_is_one_of_two_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["train", "toy", "--out", str(tmp_path / "run"), "--set", "parallel=zero"]
    assert main(words) == 2
    assert "parallel" in capsys.readouterr().err
    with pytest.raises(ValueError, match="parallel must be ddp or fsdp, got 'zero'"):
        replace(disagreeing(), parallel="zero")  # type: ignore[arg-type]
