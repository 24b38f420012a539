"""What every family of the zoo promises; a registered one is tested without further ado."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file

import deq_zoo
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.descriptions import undescribed
from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.evaluate import evaluate
from deq_zoo.family import preset_summaries
from deq_zoo.model import Model
from deq_zoo.output import Output
from deq_zoo.preset import PRESETS, load_presets
from deq_zoo.run import Run
from deq_zoo.task import Evaluation, Split
from deq_zoo.values import from_data, to_data
from tests.contracts.families import (
    NAMES,
    SmokeRuns,
    family_of,
    inputs_of,
    smoke,
    train_smoke,
)
from tests.zoo.launching import finish, launch
from torchdeq import DEQConfig

# Tests of one family share its smoke run, so they go to one process.
every_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES]
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SmokeRuns:
    return SmokeRuns(tmp_path_factory.mktemp("families"))


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return Checkpoint.load(run.last).model


def assert_equal_weights(a: Run, b: Run) -> None:
    torch.testing.assert_close(weights_of(a), weights_of(b), rtol=0, atol=0, equal_nan=True)


@every_family
class TestDeclaration:
    def test_it_is_complete_and_true(self, name: str) -> None:
        family = family_of(name)
        assert family.name == name
        assert family.description.endswith(".")
        assert family.predicts or family.samples
        load_presets(family)
        own = {key for key in PRESETS if key.partition("-")[0] == name}
        assert f"{name}-smoke" in own
        summaries = preset_summaries(family)
        assert summaries.keys() == own
        assert all(summaries.values())
        for key in own:
            assert (PRESETS[key].__doc__ or "").strip().startswith(summaries[key])

    def test_every_preset_is_a_value_of_a_declared_task(self, name: str) -> None:
        family = family_of(name)
        load_presets(family)
        for key in preset_summaries(family):
            preset = PRESETS[key]()
            kind = type(preset.task)
            assert f"{kind.__module__}:{kind.__qualname__}" in family.tasks
            assert from_data(json.loads(json.dumps(to_data(preset)))) == preset
            assert undescribed(preset) == []  # `info` has a sentence for every setting

    def test_the_names_of_the_package_can_be_imported(self, name: str) -> None:
        package = import_module(family_of(name).presets.rpartition(".")[0])
        for public in getattr(package, "__all__", []):
            assert getattr(package, public) is not None
        with pytest.raises(AttributeError, match="nothing"):
            package.nothing  # noqa: B018


@every_family
class TestTraining:
    def test_a_run_logs_scores_and_reports(self, name: str, runs: SmokeRuns) -> None:
        run, preset = runs.run(name), smoke(name)
        losses = [line["loss"] for line in run.lines("train")]
        assert losses
        assert all(isfinite(loss) for loss in losses)
        assert Checkpoint.load(run.last).step == preset.total_steps
        (test,) = run.lines("test")
        assert isfinite(test["metrics"][preset.task.score.name])
        validates = preset.task.val_set is not None
        assert bool(list(run.lines("eval"))) == validates
        assert run.report.exists()

    def test_a_stopped_run_resumes_bit_for_bit(
        self, name: str, runs: SmokeRuns, tmp_path: Path
    ) -> None:
        assert train_smoke(name, tmp_path / "run", "--max-seconds", "1e-9", "--no-report") == 0
        stopped = Run.open(tmp_path / "run")
        assert Checkpoint.load(stopped.last).step == 1
        assert train_smoke(name, stopped.path, "--resume", "--no-report") == 0
        assert_equal_weights(stopped, runs.run(name))
        logs = [[line["loss"] for line in run.lines("train")] for run in (stopped, runs.run(name))]
        assert logs[0] == logs[1]

    @pytest.mark.slow
    def test_it_resumes_bit_for_bit_from_every_step(
        self, name: str, runs: SmokeRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = tmp_path / "saved"
        saved.mkdir()
        save = Checkpoint.save

        def save_and_keep(checkpoint: Checkpoint, path: Path) -> None:
            save(checkpoint, path)
            if path.name == "last.safetensors":
                (saved / f"{checkpoint.step}").write_bytes(path.read_bytes())

        monkeypatch.setattr(Checkpoint, "save", save_and_keep)
        options = ("--set", "save_every=1", "--no-report")
        assert train_smoke(name, tmp_path / "run", *options) == 0
        monkeypatch.setattr(Checkpoint, "save", save)
        whole = Run.open(tmp_path / "run")
        log = whole.log_file.read_text()
        steps = sorted(int(path.name) for path in saved.iterdir())
        assert steps == list(range(smoke(name).total_steps + 1))
        expected = weights_of(whole)
        for step in steps[1:-1]:
            whole.last.write_bytes((saved / str(step)).read_bytes())
            whole.log_file.write_text(log)
            assert train_smoke(name, whole.path, "--resume", "--no-report") == 0
            torch.testing.assert_close(weights_of(whole), expected, rtol=0, atol=0, equal_nan=True)

    def test_it_trains_in_bfloat16(self, name: str, tmp_path: Path) -> None:
        options = ("--set", "precision=bf16", "--set", "steps=2", "--set", "log_every=1")
        assert train_smoke(name, tmp_path / "run", *options, "--no-report") == 0
        losses = [line["loss"] for line in Run.open(tmp_path / "run").lines("train")]
        assert len(losses) == 2
        assert all(isfinite(loss) for loss in losses)


# One family in every run, the others in `make test-all`; MDEQ has running statistics that differ.
one_family = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "mdeq" else [pytest.mark.slow]) for name in NAMES],
)


@one_family
def test_two_processes_whose_scores_disagree_train_one_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, score = type(smoke(name).task), smoke(name).task.score
    alone = kind.evaluate

    def disagree(task: Any, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        evaluation, rank = alone(task, model, split, thorough), int(os.environ.get("RANK", 0))
        value = evaluation.metrics[score.name] * (1 - 2 * rank)  # best for one, worst for the other
        return replace(evaluation, metrics={**evaluation.metrics, score.name: value})

    monkeypatch.setattr(kind, "evaluate", disagree)
    run, preset = tmp_path / "run", smoke(name)
    command = ["train", f"{name}-smoke", "--cpu", "--quiet", "--no-report", "--out", str(run)]
    command += ["--set", "eval_every=1"]
    outputs = finish(tmp_path / "log", launch(tmp_path / "log", 2, *command), timeout=240)
    assert all(output.endswith("exit 0") for output in outputs), outputs
    assert Checkpoint.load(Run.open(run).last).step == preset.total_steps
    resumed = finish(tmp_path / "log", launch(tmp_path / "log", 2, *command, "--resume"))
    assert all(output.endswith("exit 0") for output in resumed), resumed


@every_family
class TestUse:
    def test_a_model_comes_back_with_its_facts(self, name: str, runs: SmokeRuns) -> None:
        model, preset = runs.model(name), smoke(name)
        assert isinstance(model, Model)
        assert not model.training
        assert model.preset == preset
        facts = preset.task.facts()
        assert model.facts == json.loads(json.dumps(facts)) == facts

    def test_a_saved_model_is_the_same_model(
        self, name: str, runs: SmokeRuns, tmp_path: Path
    ) -> None:
        model, (line,) = runs.model(name), runs.run(name).lines("test")
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        weights = model.state_dict()
        torch.testing.assert_close(again.state_dict(), weights, rtol=0, atol=0, equal_nan=True)
        assert (again.preset, again.facts) == (model.preset, model.facts)
        results = ModelCard.load(tmp_path / "README.md").data.eval_results
        found = {each.metric_type: each.metric_value for each in results}
        assert found == {k: v for k, v in line["metrics"].items() if v is not None}
        assert (tmp_path / "README.md").read_text().count("deq-zoo train") == 1

    def test_both_splits_have_the_same_metrics(self, name: str, runs: SmokeRuns) -> None:
        model, task = runs.model(name), smoke(name).task
        splits: list[Split] = ["test"] if task.val_set is None else ["val", "test"]
        metrics = [evaluate(task, model, split, thorough=False).metrics for split in splits]
        assert all(found.keys() == metrics[0].keys() for found in metrics)
        assert task.score.name in metrics[0]
        again = evaluate(task, model, "test", thorough=False).metrics
        assert again == metrics[-1]

    def test_one_input_gives_one_output(self, name: str, runs: SmokeRuns) -> None:
        model, x = runs.model(name), inputs_of(name).python_input()
        model.train()
        out = model.predict(x)
        assert model.training
        assert isinstance(out, Output)
        assert len(out.predictions) == 1
        if out.stats is not None and out.state is not None:
            again = model.predict(x, out.state)
            assert again.stats.nfe <= out.stats.nfe

    def test_a_served_answer_is_that_of_predict(self, name: str, runs: SmokeRuns) -> None:
        if not family_of(name).service:
            pytest.skip("this family cannot be served")
        pytest.importorskip("fastapi", reason="the extra serve is not installed")
        from deq_zoo.serving.command import make_service
        from deq_zoo.serving.limits import Limits
        from deq_zoo.serving.reading import read_values
        from deq_zoo.serving.service import describe_stats

        given, x = inputs_of(name).served_input()
        model = runs.model(name)
        service = make_service(model, f"{name}-smoke")
        answer = service.answer(read_values(given, service.fields, Limits()))
        expected = describe_stats(model.predict(x).stats)
        if name == "flow":  # its flow says whether it has settled, not its state
            del expected["settled"]
        assert expected.items() <= answer.items()
        assert isinstance(answer["prediction"], str)
        json.dumps(answer)

    def test_predictions_of_files(
        self, name: str, runs: SmokeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if not family_of(name).predicts:
            pytest.skip(f"{name} predicts nothing from files")
        good, broken = inputs_of(name).predict_inputs(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        command = ["predict", str(runs.run(name).path), "--cpu", "--out", str(tmp_path / "out")]
        assert main([*command, *map(str, good)]) == 0
        records = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
        assert records
        assert all("source" in json.loads(line) for line in records)
        capsys.readouterr()
        assert main([*command, *map(str, good)]) == 2
        assert "exists already" in capsys.readouterr().err
        assert main([*command, "--force", *map(str, [*broken, *good])]) == 1
        output = capsys.readouterr()
        assert all(path.name in output.err for path in broken)
        assert "Traceback" not in output.err
        assert {path: path.read_bytes() for path in before} == before

    def test_samples(self, name: str, runs: SmokeRuns, tmp_path: Path) -> None:
        if not family_of(name).samples:
            pytest.skip(f"{name} samples nothing")
        command = ["sample", str(runs.run(name).path), "--cpu", "--out", str(tmp_path / "out")]
        assert main(command) == 0
        assert list((tmp_path / "out").iterdir())
        assert main(command) == 2
        assert main([*command, "--force"]) == 0

    def test_weights_go_to_the_authors_and_back(
        self, name: str, runs: SmokeRuns, tmp_path: Path
    ) -> None:
        family, model = family_of(name), runs.model(name)
        if not family.converter:
            pytest.skip(f"{name} has no released weights")
        module = import_module(family.converter)
        assert callable(module.from_authors)
        assert callable(module.to_authors)
        theirs = smoke(name).task.to_authors(model.state_dict())
        save_file({k: v.contiguous() for k, v in theirs.items()}, tmp_path / "theirs.safetensors")
        source, out = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
        preset = f"{name}-smoke"
        assert main(["convert", str(source), "--preset", preset, "--out", str(out)]) == 0
        again = deq_zoo.load(out)
        ours = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
        for key, value in smoke(name).task.to_authors(again.state_dict()).items():
            assert torch.equal(value, theirs[key]), key
        assert ours.keys() <= again.state_dict().keys()

    def test_weights_that_are_not_finite_are_refused(
        self, name: str, runs: SmokeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checkpoint = Checkpoint.load(runs.run(name).last)
        key = next(k for k, v in checkpoint.model.items() if v.is_floating_point() and v.numel())
        checkpoint.model[key] = torch.full_like(checkpoint.model[key], torch.nan)
        checkpoint.save(tmp_path / "bad.safetensors")
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            deq_zoo.load(tmp_path / "bad.safetensors")
        assert main(["evaluate", str(tmp_path / "bad.safetensors"), "--cpu"]) == 2
        assert "NaN or infinity" in capsys.readouterr().err

    def test_pictures_say_what_they_show(self, name: str, runs: SmokeRuns) -> None:
        pictures = smoke(name).task.pictures(runs.model(name))
        for picture in pictures:
            assert picture.caption.endswith(".")
            assert picture.png.startswith(b"\x89PNG")
        assert len({picture.name for picture in pictures}) == len(pictures)


#: A value other than the default for every option of a DEQ.
OTHER: dict[str, Any] = {
    "f_solver": "anderson",
    "b_solver": "neumann",
    "f_stop_mode": "rel",
    "b_stop_mode": "rel",
    "f_rtol": 1e-2,
    "f_atol": 1e-2,
    "b_rtol": 1e-2,
    "b_atol": 1e-2,
    "f_stop_norm": "rms",
    "f_solver_kwargs": {"tau": 0.5},
    "b_solver_kwargs": {"tau": 0.5},
    "on_failure": "raise",
    "coupled": True,
    "norm_type": "spectral_norm",
    "core": "indexing",
    "backward": "phantom",
    "b_init": "shine",
    "indexing": [1],
    "grad": [2],
    "sup_loc": [1],
    "tau": 0.5,
    "sup_gap": 1,
    "eval_factor": 2.0,
    "gamma": 0.5,
}


def other_value(option: str) -> Any:
    default = DEQConfig.defaults()[option]
    if option in OTHER:
        return OTHER[option]
    return not default if isinstance(default, bool) else default + 1


@every_family
class TestOptions:
    def test_options_without_effect_are_errors(self, name: str) -> None:
        preset = smoke(name)
        unused = [option for option in DEQConfig.names() if option not in preset.task.uses]
        assert unused, "no task uses every option: spectral radii are estimated by the zoo"
        for option in unused:
            value = other_value(option)
            with pytest.raises(ZooError, match=f"{option}.*no effect"):
                preset.with_deq(**{option: value})
            deq = DEQConfig(preset.task.deq, **{option: value})
            with pytest.raises(ValueError, match=f"{option}.*no effect"):
                replace(preset.task, deq=deq)  # type: ignore[type-var]

    def test_flags_and_settings_without_effect_are_errors(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for words in (["--sradius_mode"], ["--set", "sradius_mode=true"]):
            assert train_smoke(name, tmp_path / "run", *words) == 2
            assert "sradius_mode would have no effect" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    def test_unknown_settings_are_errors(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train_smoke(name, tmp_path / "run", "--set", "log_evry=3") == 2
        error = capsys.readouterr().err
        assert "log_every" in error
        assert len(error) < 500
        assert not (tmp_path / "run").exists()
