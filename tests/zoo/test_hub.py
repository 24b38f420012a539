"""Saved models: folders that hold a model, its card and its configuration; the Hub's habits."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError, MissingPackage, ZooError
from deq_zoo.mdeq import MDEQClassifier
from deq_zoo.model import Model
from deq_zoo.model_card import remaking_command
from deq_zoo.preset import Preset, find_preset
from deq_zoo.run import Run
from tests.zoo.toy import ToyModel, toy

FILES = {"model.safetensors", "config.json", "README.md"}
SECRET = "hf_a_secret_of_the_user"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("hub") / "run"
    return deq_zoo.train("toy", out=out, quiet=True, cpu=True, report=False, lr=0.03).run


@pytest.fixture
def model(run: Run) -> Model:
    return deq_zoo.load(run.path)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same_model(a: Model, b: Model) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)
    assert (a.preset, a.facts) == (b.preset, b.facts)


class TestFolders:
    def test_a_saved_model_comes_back(self, model: Model, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path / "saved")
        assert names(tmp_path / "saved") == FILES
        sources: list[Any] = [tmp_path / "saved", str(tmp_path / "saved")]
        for source in sources:
            for again in (Model.from_pretrained(source), deq_zoo.load(source)):
                assert_same_model(again, model)
                assert not again.training
        again = ToyModel.from_pretrained(tmp_path / "saved")
        again.save_pretrained(tmp_path / "twice")
        for name in ("README.md", "config.json"):
            assert (tmp_path / "twice" / name).read_text() == (
                tmp_path / "saved" / name
            ).read_text()

    def test_commands_take_it(
        self, model: Model, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model.save_pretrained(tmp_path / "saved")
        saved = str(tmp_path / "saved")
        assert main(["evaluate", saved, "--cpu", "--json"]) == 0
        (line,) = run.lines("test")
        assert json.loads(capsys.readouterr().out)["metrics"] == line["metrics"]
        assert main(["sample", saved, "--cpu", "--out", str(tmp_path / "samples")]) == 0
        with pytest.raises(SystemExit, match="0"):
            main(["evaluate", saved, "--help"])
        assert "settings of toy" in capsys.readouterr().out
        for command in ("evaluate", "export"):
            assert main([command, saved, "--last"]) == 2
            assert "is a saved model" in capsys.readouterr().err
        assert main(["report", saved]) == 2
        assert "a report needs the log of a run folder" in capsys.readouterr().err
        assert main(["train", "toy", "--out", saved, "--force"]) == 2
        assert "is not a run folder" in capsys.readouterr().err
        assert names(tmp_path / "saved") == FILES

    def test_another_class_is_an_error(self, model: Model, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path)
        with pytest.raises(ZooError, match=r"class ToyModel, not MDEQClassifier: use ToyModel"):
            MDEQClassifier.from_pretrained(tmp_path)
        with pytest.raises(ZooError, match="has no revision 'v1'"):
            Model.from_pretrained(tmp_path, revision="v1")

    def test_files_of_others_are_never_replaced(
        self, model: Model, run: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text('{"editor": "vim"}')
        (tmp_path / "thesis.tex").write_text("x")
        for folder, name in ((tmp_path, "config.json"), (run.path, "config.json")):
            before = names(folder)
            with pytest.raises(ZooError, match=f"has a {name} that save_pretrained did not write"):
                model.save_pretrained(folder)
            assert names(folder) == before
        with pytest.raises(ZooError, match="is a file: choose a folder"):
            model.save_pretrained(tmp_path / "thesis.tex")
        (tmp_path / "config.json").unlink()
        model.save_pretrained(tmp_path)
        assert names(tmp_path) == FILES | {"thesis.tex"}

    def test_an_edited_card_stays_and_another_is_replaced(
        self, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model.save_pretrained(tmp_path)
        first = (tmp_path / "README.md").read_text()
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        model.save_pretrained(tmp_path)
        second = (tmp_path / "README.md").read_text()
        assert first != second
        caplog.clear()
        (tmp_path / "README.md").write_text("mine")
        for _ in range(2):  # also after the configuration was written again
            model.save_pretrained(tmp_path)
            assert (tmp_path / "README.md").read_text() == "mine"
        assert "was edited and stays as it is" in caplog.text

    def test_damage_and_disagreement_are_errors(self, model: Model, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path / "saved")
        config = tmp_path / "saved" / "config.json"
        text = config.read_text()
        config.write_text(text.replace('"width": 8', '"width": 9'))
        with pytest.raises(CheckpointError, match="have different settings"):
            Model.from_pretrained(tmp_path / "saved")
        config.write_text(text.replace("deq-zoo model 1", "deq-zoo model 99"))
        with pytest.raises(CheckpointError, match="has the format 'deq-zoo model 99'"):
            deq_zoo.load(tmp_path / "saved")
        config.write_text(text)
        weights = tmp_path / "saved" / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        with pytest.raises(CheckpointError, match="checksum is wrong"):
            Model.from_pretrained(tmp_path / "saved")
        weights.unlink()
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            Model.from_pretrained(tmp_path / "saved")

    def test_what_could_not_be_loaded_is_not_saved(self, model: Model, tmp_path: Path) -> None:
        bare = ToyModel(8, toy().task.deq)
        with pytest.raises(ZooError, match="this ToyModel has no preset"):
            bare.save_pretrained(tmp_path)
        with pytest.raises(ZooError, match="has weights in float64"):
            copy.deepcopy(model).double().save_pretrained(tmp_path)
        sharded = copy.deepcopy(model)
        parameter: Any = next(sharded.parameters())
        parameter.to_local = parameter.detach  # as a DTensor has it
        with pytest.raises(ZooError, match="shared out between processes"):
            sharded.save_pretrained(tmp_path)
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
        with pytest.raises(ZooError, match="holds NaN or infinity"):
            model.save_pretrained(tmp_path)
        assert names(tmp_path) == set()

    def test_no_folder_of_the_machine_is_saved(self, run: Run, tmp_path: Path) -> None:
        model = deq_zoo.load(run.path, data_dir=tmp_path / "private")
        model.save_pretrained(tmp_path / "saved")
        assert model.preset is not None
        assert model.preset.task.data_dir == str(tmp_path / "private")  # type: ignore[attr-defined]
        assert all(b"private" not in data for data in contents(tmp_path / "saved").values())

    def test_copies_and_pickles_keep_what_is_known(self, model: Model, tmp_path: Path) -> None:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.save_pretrained(tmp_path)
            assert "model-index" in (tmp_path / "README.md").read_text()
        compiled: Any = torch.compile(model, backend="eager")
        compiled.save_pretrained(tmp_path)
        assert_same_model(Model.from_pretrained(tmp_path), model)


class TestCards:
    def test_it_has_the_results_of_the_run(self, model: Model, run: Run, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path)
        card = ModelCard.load(tmp_path / "README.md")
        (line,) = run.lines("test")
        (result,) = card.data.eval_results
        assert result.metric_type == "mse"
        assert result.metric_value == line["metrics"]["mse"]
        assert result.dataset_split == "test"
        assert card.data.library_name == "torchdeq"
        assert "deep-equilibrium-model" in card.data.tags
        assert f"{line['solver']['nfe']:.3g} evaluations of `f` per solve" in card.text
        assert "deq-zoo train toy --set optim.lr=0.03 --data-dir DATA" in card.text
        assert 'Model.from_pretrained("FOLDER")' in card.text

    @pytest.mark.parametrize("change", ["weights", "settings", "file"])
    def test_results_of_other_weights_are_left_out(
        self, change: str, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        copied = Path(shutil.copytree(run.path, tmp_path / "run"))
        model = deq_zoo.load(copied)
        assert model.preset is not None
        if change == "weights":
            next(model.parameters()).data[0] += 1e-6
        elif change == "settings":
            model.preset = replace(model.preset, task=replace(model.preset.task, batch=3))  # type: ignore[type-var]
        else:
            shutil.rmtree(copied)
        model.save_pretrained(tmp_path / "saved")
        assert "the saved model has no results" in caplog.text
        card = ModelCard.load(tmp_path / "saved" / "README.md")
        assert card.data.eval_results is None
        assert "No results are known" in card.text

    def test_results_belong_to_the_weights_that_were_scored(self, tmp_path: Path) -> None:
        result = deq_zoo.train("toy", out=tmp_path / "run", quiet=True, cpu=True, report=False)
        shutil.copy(result.run.last, tmp_path / "last.safetensors")
        (line,) = result.run.lines("test")
        line["step"] = 1  # as if another checkpoint had been scored
        result.run.log_file.write_text(json.dumps(line))
        for model in (result.model(), deq_zoo.load(tmp_path / "last.safetensors")):
            model.save_pretrained(tmp_path / "saved")
            assert "No results are known" in (tmp_path / "saved" / "README.md").read_text()

    @pytest.mark.parametrize(
        ("preset", "name"),
        [(toy(), "toy"), (replace(find_preset("mdeq-smoke"), steps=1, epochs=0), "mdeq")],
    )
    def test_a_model_of_fit_has_the_name_of_its_preset_or_family(
        self, preset: Preset, name: str, tmp_path: Path
    ) -> None:
        deq_zoo.fit(preset).save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["name"] == name
        assert Model.from_pretrained(tmp_path).preset == preset
        own = "With settings of its own" in (tmp_path / "README.md").read_text()
        assert own == (name == "mdeq")

    def test_a_model_that_was_trained_on_has_the_name_of_its_new_preset(
        self, model: Model, tmp_path: Path
    ) -> None:
        for preset, name in ((replace(toy(), seed=5), "toy"), (toy(), "toy")):
            model.preset = preset
            model.save_pretrained(tmp_path)
            assert json.loads((tmp_path / "config.json").read_text())["name"] == name
        assert "deq-zoo train toy --data-dir DATA\n" in (tmp_path / "README.md").read_text()

    def test_the_command_gives_the_settings_or_there_is_none(self) -> None:
        preset = replace(toy(), steps=0, epochs=2, clip=0.5)
        command = remaking_command("toy", preset)
        assert command is not None
        assert "--set epochs=2" in command
        assert remaking_command("toy", toy()) == "deq-zoo train toy --data-dir DATA"
        assert remaking_command("no-such-preset", preset) is None
        other = replace(find_preset("mdeq-smoke"), seed=3)
        assert remaking_command("toy", other) is None


class FakeApi:
    """The Hub as a folder: what would be uploaded, and what is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, token: Any = None) -> FakeApi:
        self.token = token
        return self

    def create_repo(self, repo_id: str, **options: Any) -> SimpleNamespace:
        self.calls.append(("create_repo", options))
        return SimpleNamespace(repo_id=f"user/{repo_id}")

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", options))

    def list_repo_files(self, repo_id: str, revision: str | None = None) -> list[str]:
        return [".gitattributes", *names(self.folder)]

    def hf_hub_download(self, repo_id: str, name: str, revision: str | None = None) -> str:
        return str(self.folder / name)

    def upload_folder(self, *, folder_path: Path, allow_patterns: list[str], **options: Any) -> Any:
        self.calls.append(("upload_folder", options))
        for name in allow_patterns:
            shutil.copy(folder_path / name, self.folder)
        return SimpleNamespace(commit_url="https://hub/commit/1", pr_url=None)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    (tmp_path / "remote").mkdir()
    fake = FakeApi(tmp_path / "remote")
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    return fake


class TestUploads:
    def test_three_files_go_up_in_one_commit(
        self, model: Model, api: FakeApi, capfd: pytest.CaptureFixture[str]
    ) -> None:
        address = model.push_to_hub("toy", private=True, token=SECRET, revision="next")
        assert address == "https://hub/commit/1"
        assert names(api.folder) == FILES
        assert [name for name, _ in api.calls] == ["create_repo", "create_branch", "upload_folder"]
        assert api.calls[0][1] == {"private": True, "exist_ok": True}
        assert api.calls[-1][1]["revision"] == "next"
        assert api.token == SECRET
        assert_same_model(Model.from_pretrained(api.folder), model)
        assert 'from_pretrained("user/toy")' in (api.folder / "README.md").read_text()
        assert all(SECRET.encode() not in data for data in contents(api.folder).values())
        output = capfd.readouterr()
        assert SECRET not in output.out + output.err

    def test_an_edited_card_of_the_repository_stays(self, model: Model, api: FakeApi) -> None:
        model.push_to_hub("toy")
        model.push_to_hub("toy")
        (api.folder / "README.md").write_text("mine")
        model.push_to_hub("toy")
        assert (api.folder / "README.md").read_text() == "mine"

    def test_a_model_of_others_is_never_replaced(self, model: Model, api: FakeApi) -> None:
        (api.folder / "config.json").write_text('{"model_type": "bert"}')
        with pytest.raises(ZooError, match=r"user/toy has a config\.json that deq_zoo did not"):
            model.push_to_hub("toy")
        assert names(api.folder) == {"config.json"}

    def test_nothing_is_made_for_a_model_that_cannot_be_saved(self, api: FakeApi) -> None:
        with pytest.raises(ZooError, match="has no preset"):
            ToyModel(8, toy().task.deq).push_to_hub("toy")
        assert api.calls == []

    def test_errors_show_no_token(
        self, model: Model, api: FakeApi, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(repo_id: str, **options: Any) -> None:
            raise PermissionError(f"401 for {SECRET}")

        monkeypatch.setattr(api, "create_repo", refuse)
        with pytest.raises(ZooError, match=r"toy was not uploaded: 401 for \[token\]") as error:
            model.push_to_hub("toy", token=SECRET)
        assert error.value.__suppress_context__
        assert names(api.folder) == set()


class TestRepositories:
    def fill_cache(self, model: Model, cache: Path) -> None:
        """Lay a repository out as huggingface_hub's cache does."""
        commit, repo = "0" * 40, cache / "models--user--toy"
        model.save_pretrained(repo / "snapshots" / commit)
        for name in ("main", "v1"):
            (repo / "refs").mkdir(exist_ok=True)
            (repo / "refs" / name).write_text(commit)

    def test_a_repository_in_the_cache_needs_no_network(self, model: Model, tmp_path: Path) -> None:
        self.fill_cache(model, tmp_path)
        for revision in (None, "v1"):
            again = Model.from_pretrained(
                "user/toy", revision=revision, cache_dir=tmp_path, local_files_only=True
            )
            assert_same_model(again, model)
        with pytest.raises(ZooError, match="there is no folder user/toy, and the Hub"):
            Model.from_pretrained(
                "user/toy", revision="v2", cache_dir=tmp_path, local_files_only=True
            )

    def test_all_options_reach_the_hub(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model.save_pretrained(tmp_path / "saved")
        given: dict[str, Any] = {}

        def download(repo_id: str, **options: Any) -> str:
            given.update(options, repo_id=repo_id)
            return str(tmp_path / "saved")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        Model.from_pretrained("user/toy", revision="v1", cache_dir=tmp_path, token=SECRET)
        assert set(given.pop("allow_patterns")) == FILES
        assert given == {
            "repo_id": "user/toy",
            "revision": "v1",
            "cache_dir": tmp_path,
            "local_files_only": False,
            "token": SECRET,
        }
        (tmp_path / "saved" / "config.json").unlink()
        with pytest.raises(ZooError, match="user/toy has no model that deq_zoo saved"):
            Model.from_pretrained("user/toy")

    def test_a_name_that_is_none_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ZooError, match="there is no folder runs/no/such"):
            Model.from_pretrained("runs/no/such")

    def test_without_huggingface_hub_folders_still_load(
        self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model.save_pretrained(tmp_path / "saved")
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        assert_same_model(Model.from_pretrained(tmp_path / "saved"), model)
        for use in (
            lambda: Model.from_pretrained("user/toy"),
            lambda: model.save_pretrained(tmp_path / "other"),
            lambda: model.push_to_hub("toy"),
        ):
            with pytest.raises(MissingPackage, match=r"need huggingface_hub: pip install"):
                use()
        assert not (tmp_path / "other").exists()
