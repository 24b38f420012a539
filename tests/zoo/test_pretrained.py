"""Pretrained models: found by name, hidden by what is on disk, made from runs."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import deq_zoo
from benchmarks.provenance import commit, machine
from deq_zoo import pretrained
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.pretrained.cards import read_card
from deq_zoo.run import Run
from tools.pretrain import in_half, package, write_card

NOTES = """
summary = "A tiny model
of noise."
data = "Noise."
examples = ["deq-zoo evaluate mdeq-tiny"]
limits = ["Of no use."]
""".replace("model\nof", "model of")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        words = ["train", "mdeq-smoke", "--cpu", "--quiet", "--no-report", "--seed", str(seed)]
        assert main([*words, "--epochs", "1", "--out", str(folder / f"{seed}")]) == 0
    return [Run.open(folder / f"{seed}") for seed in (0, 1)]


@pytest.fixture(scope="module")
def packaged(runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaged")
    (folder / "mdeq-tiny.toml").write_text(NOTES)
    package("mdeq-tiny", [run.path for run in runs], folder, notes=folder)
    return folder


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packaged: Path) -> Path:
    """Return a folder of pretrained models that has one, `mdeq-tiny`; work in another folder."""
    shelf = tmp_path / "shelf"
    shutil.copytree(packaged, shelf)
    monkeypatch.setattr(pretrained, "FOLDER", shelf)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return shelf


class TestNames:
    def test_a_model_is_loaded_by_its_name(self, shelf: Path, runs: list[Run]) -> None:
        card = pretrained.pretrained_card("mdeq-tiny")
        model = deq_zoo.load("mdeq-tiny")
        trained = deq_zoo.load(runs[card.seed].path)
        for name, weight in trained.state_dict().items():
            loaded = model.state_dict()[name]
            assert loaded.dtype == weight.dtype
            torch.testing.assert_close(loaded, weight, rtol=1e-3, atol=1e-6)

    def test_what_is_on_disk_hides_a_pretrained_model(
        self, shelf: Path, runs: list[Run], caplog: pytest.LogCaptureFixture
    ) -> None:
        Path("mdeq-tiny").symlink_to(runs[0].path)
        with caplog.at_level(logging.WARNING, "deq_zoo"):
            model = deq_zoo.load("mdeq-tiny")
        assert "hides the pretrained model" in caplog.text
        expected = deq_zoo.load(runs[0].path).state_dict()
        torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)

    def test_a_folder_without_a_model_hides_nothing(self, shelf: Path) -> None:
        Path("mdeq-tiny").mkdir()  # as an output folder may be
        assert deq_zoo.load("mdeq-tiny").origin == shelf / "mdeq-tiny.safetensors"

    @pytest.mark.parametrize("path", ["./mdeq-tiny", "mdeq-tiny/", "mdeq-tiny/."])
    def test_a_path_is_no_name(self, shelf: Path, path: str) -> None:
        with pytest.raises(ZooError, match=r"there is no run folder or checkpoint at .*mdeq-tiny"):
            deq_zoo.load(path)

    def test_a_link_that_leads_nowhere_is_not_passed_over(self, shelf: Path) -> None:
        Path("mdeq-tiny").symlink_to("gone")
        with pytest.raises(ZooError):
            deq_zoo.load("mdeq-tiny")

    @pytest.mark.parametrize("name", ["", "a" * 5000, "a\0b"], ids=["empty", "long", "null"])
    def test_names_of_nothing_are_errors(self, shelf: Path, name: str) -> None:
        with pytest.raises(ZooError):
            deq_zoo.load(name)

    def test_the_last_weights_cannot_be_asked_for(self, shelf: Path) -> None:
        with pytest.raises(ZooError, match="best=False chooses a checkpoint of a run folder"):
            deq_zoo.load("mdeq-tiny", best=False)

    def test_weights_of_another_model_are_refused(self, shelf: Path, runs: list[Run]) -> None:
        card = pretrained.pretrained_card("mdeq-tiny")
        shutil.copy(runs[1 - card.seed].best, shelf / "mdeq-tiny.safetensors")
        with pytest.raises(ZooError, match="are not those that the card of mdeq-tiny describes"):
            deq_zoo.load("mdeq-tiny")

    def test_an_untouched_model_keeps_its_results_when_saved(
        self, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("deq_zoo.origin.FOLDER", shelf)
        deq_zoo.load("mdeq-tiny").save_pretrained(tmp_path / "saved")
        assert "No results are known" not in (tmp_path / "saved" / "README.md").read_text()

    def test_a_misspelt_name_is_answered_with_the_nearest(self, shelf: Path) -> None:
        with pytest.raises(ZooError, match="did you mean 'mdeq-tiny'"):
            deq_zoo.load("mdeq-tyni")
        with pytest.raises(ZooError, match="list --pretrained shows the models"):
            deq_zoo.load("runs/none")
        with pytest.raises(ZooError, match="did you mean 'mdeq-tiny'"):
            pretrained.pretrained_card("mdeq-tini")

    def test_damage_is_noticed(self, shelf: Path) -> None:
        weights = shelf / "mdeq-tiny.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        with pytest.raises(ZooError, match="install the package again"):
            deq_zoo.load("mdeq-tiny")
        (shelf / "mdeq-tiny.json").write_text("{}")
        with pytest.raises(ZooError, match="cannot be read"):
            pretrained.pretrained_card("mdeq-tiny")


class TestCommands:
    def test_commands_take_a_name_where_they_take_a_run(
        self, shelf: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["evaluate", "mdeq-tiny", "--cpu", "--json"]) == 0
        scores = json.loads(capsys.readouterr().out)["metrics"]
        card = pretrained.pretrained_card("mdeq-tiny")
        assert scores == pytest.approx(dict(card.scores["test"]))
        assert main(["convert", "mdeq-tiny", "--to-authors", "--out", "theirs.pth"]) == 0

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["evaluate", "mdeq-tiny", "--last"], "mdeq-tiny is a pretrained model"),
            (["export", "mdeq-tiny", "--last"], "mdeq-tiny is a pretrained model"),
            (["report", "mdeq-tiny"], "it has a card"),
            (["export", "mdeq-tiny"], "mdeq-tiny.pt2 exists already"),
            (["sample", "mdeq-tinny"], "did you mean 'mdeq-tiny'"),
            (["evaluate", "mdeq-tiny", "--data-dir", "x"], "drop --data-dir"),
            (["predict", "./mdeq-tiny", "x.png"], "there is no run folder or checkpoint at"),
            (["evaluate", ""], "a model has a name or a path"),
        ],
    )
    def test_mistakes(
        self, shelf: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("mdeq-tiny.pt2").touch()  # where an export would go
        assert main(words) == 2
        assert message in capsys.readouterr().err

    def test_the_list(self, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["list", "--pretrained"]) == 0
        assert capsys.readouterr().out.startswith("mdeq-tiny          A tiny model of noise. Test:")
        assert main(["list", "--pretrained", "--json", "mdeq"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)
        assert entry["preset"] == "mdeq-smoke"
        assert entry["scores"] == pretrained.pretrained_card("mdeq-tiny").scores["test"]
        assert main(["list", "--pretrained", "lm"]) == 0
        assert capsys.readouterr().out == ""
        assert main(["info", "mdeq-smoke"]) == 0
        assert "pretrained: mdeq-tiny, in place of a run" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "content", ["[]", "{}", "no JSON", '{"name": "other"}'], ids=lambda text: text
    )
    def test_one_damaged_card_hides_no_other(
        self,
        shelf: Path,
        content: str,
        capsys: pytest.CaptureFixture[str],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (shelf / "mdeq-bad.safetensors").touch()
        (shelf / "mdeq-bad.json").write_text(content)
        assert main(["list", "--pretrained"]) == 0
        assert capsys.readouterr().out.startswith("mdeq-tiny")
        assert "mdeq-bad is left out: the card" in caplog.text
        assert main(["info", "mdeq-smoke"]) == 0

    def test_a_card_of_another_model_is_refused(self, shelf: Path) -> None:
        shutil.copy(shelf / "mdeq-tiny.json", shelf / "mdeq-other.json")
        with pytest.raises(ZooError, match="it is that of mdeq-tiny"):
            read_card(shelf / "mdeq-other.json")

    def test_info_shows_the_card_of_a_name_that_is_no_preset(
        self, shelf: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["info", "mdeq-tiny"]) == 0
        assert capsys.readouterr().out == (shelf / "mdeq-tiny.md").read_text()

    def test_the_list_imports_no_torch(self) -> None:
        code = (
            "import sys; from deq_zoo.cli import main; main(['list', '--pretrained']);"
            "print('torch' in sys.modules, file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert done.stderr.strip() == b"False"


class TestPackaging:
    def test_the_seed_with_the_best_validation_score_is_packaged(
        self, shelf: Path, runs: list[Run]
    ) -> None:
        card = read_card(shelf / "mdeq-tiny.json")
        assert [run.seed for run in card.runs] == [0, 1]
        best = max(card.runs, key=lambda run: run.val["accuracy"])
        assert card.runs[card.seed].val["accuracy"] == best.val["accuracy"]
        assert card.settings == ("epochs=1",)
        assert card.commands[0].startswith("deq-zoo train mdeq-smoke --seed 0 --set epochs=1")
        checkpoint = Checkpoint.load(shelf / "mdeq-tiny.safetensors")
        assert not checkpoint.optimizer
        assert checkpoint.model["classifier.weight"].dtype == torch.float16

    def test_a_card_keeps_its_values(self, shelf: Path) -> None:
        card = read_card(shelf / "mdeq-tiny.json")
        write_card(replace(card, measured={"Further": {"share": 0.5}}), shelf)
        again = read_card(shelf / "mdeq-tiny.json")
        assert again.measured == {"Further": {"share": 0.5}}
        assert replace(again, measured={}) == card
        assert "| share | 0.5 |" in (shelf / "mdeq-tiny.md").read_text()

    def test_a_card_says_by_which_code_and_on_which_machine(self, shelf: Path) -> None:
        card = read_card(shelf / "mdeq-tiny.json")
        assert (card.commit, card.machine) == (commit(), machine())
        text = (shelf / "mdeq-tiny.md").read_text()
        assert f"Packaged by the code of commit {commit()} on this machine: {machine()}." in text

    def test_a_card_without_commit_and_machine_is_read_and_says_so(self, shelf: Path) -> None:
        file = shelf / "mdeq-tiny.json"
        older = json.loads(file.read_text())
        del older["commit"], older["machine"]
        file.write_text(json.dumps(older))
        card = read_card(file)
        words = "Packaged in an unknown commit; the machine was not recorded."
        assert words in card.to_markdown()
        brought = replace(card, commit="485eb28").to_markdown()
        assert words.replace("an unknown commit", "commit 485eb28") in brought

    def test_the_last_weights_are_packaged_on_demand(self, shelf: Path, tmp_path: Path) -> None:
        out, rising = tmp_path / "rising", ["--set", "optim.lr=1e3"]  # soon worse than at first
        words = ["train", "mdeq-smoke", "--cpu", "--quiet", "--no-report", "--out", str(out)]
        assert main([*words, *rising, "--steps", "4", "--set", "eval_every=1"]) == 0
        run = Run.open(out)
        assert run.checkpoint(best=True).step < 4
        card = package("mdeq-tiny", [out], shelf, notes=shelf, best=False)
        assert card.runs[0].step == 4
        assert card.commands[-1].endswith(" --last")
        stored = Checkpoint.load(shelf / "mdeq-tiny.safetensors").model
        last = in_half(run.checkpoint(best=False).model)
        assert all(torch.equal(stored[name], last[name]) for name in last)

    def test_runs_of_other_settings_and_unfinished_ones_are_refused(
        self, shelf: Path, runs: list[Run], tmp_path: Path
    ) -> None:
        with pytest.raises(ZooError, match="two seeds; they differ in nothing"):
            package("mdeq-tiny", [runs[0].path, runs[0].path], shelf, notes=shelf)
        out = tmp_path / "short"
        words = ["--epochs", "2", "--max-seconds", "0.01", "--out", str(out)]
        main(["train", "mdeq-smoke", "--cpu", "--quiet", *words])
        with pytest.raises(ZooError, match="train it to its end"):
            package("mdeq-tiny", [out], shelf, notes=shelf)

    def test_mistakes_leave_the_old_files_as_they_were(
        self, shelf: Path, runs: list[Run], tmp_path: Path
    ) -> None:
        before = {path.name: path.read_bytes() for path in shelf.iterdir()}
        (tmp_path / "mdeq-tiny.toml").write_text(NOTES + 'colour = "red"')
        with pytest.raises(ZooError, match="it should have summary, data, examples, limits"):
            package("mdeq-tiny", [runs[0].path], shelf, notes=tmp_path)
        (tmp_path / "flow-tiny.toml").write_text(NOTES)
        with pytest.raises(ZooError, match="a run of the family mdeq"):
            package("flow-tiny", [runs[0].path], shelf, notes=tmp_path)
        with pytest.raises(ZooError, match=r"mdeq-none\.toml is missing"):
            package("mdeq-none", [runs[0].path], shelf, notes=tmp_path)
        assert {path.name: path.read_bytes() for path in shelf.iterdir()} == before

    def test_a_copy_of_the_weights_is_stored_once(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        quick = [
            "--steps",
            "2",
            "--set",
            "previews=0",
            "--set",
            "inversion.images=0",
            "--no-report",
        ]
        assert (
            main(["train", "diffusion-smoke", "--cpu", "--quiet", "--out", str(out), *quick]) == 0
        )
        (tmp_path / "diffusion-tiny.toml").write_text(NOTES)
        card = package("diffusion-tiny", [out], tmp_path, notes=tmp_path)
        model = deq_zoo.load(tmp_path / "diffusion-tiny.safetensors")
        state = model.state_dict()
        trained = deq_zoo.load(out).state_dict()
        for copy, original in model.copied_weights().items():
            torch.testing.assert_close(state[copy], trained[copy], rtol=1e-3, atol=1e-6)
            assert torch.equal(state[original], state[copy])
        numbers = sum(v.numel() for k, v in state.items() if k.startswith("unet."))
        assert card.size < 2 * numbers + 60_000

    def test_values_that_half_precision_would_change_stay(self) -> None:
        fine, large, small = torch.randn(9), torch.tensor([1e5]), torch.tensor([3e-5])
        count = torch.tensor(7)
        kept = in_half({"fine": fine, "large": large, "small": small, "count": count})
        assert [value.dtype for value in kept.values()] == [
            torch.float16,
            torch.float32,
            torch.float16,
            torch.int64,
        ]
