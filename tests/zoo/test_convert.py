"""Released weights in and out; every wrong file is answered in one line."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.convert import bare_state, find_state, read_state
from deq_zoo.errors import CheckpointError
from deq_zoo.task import Weights
from tests.zoo.toy import Toy

WEIGHTS = {"a.weight": torch.ones(2), "a.bias": torch.zeros(1)}


def released(width: int = 8) -> dict[str, Tensor]:
    """Return weights of the toy in the layout of a release."""
    state = Toy(width=width).build().state_dict()
    return {key.replace("f.", "linear."): value for key, value in state.items()}


def zipped(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.ones(2))
    return buffer.getvalue()


WRONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "text": (lambda: b"accuracy: 95 %\n", "a text file;"),
    "json": (lambda: b'{"lr": 1}', "a text file with JSON"),
    "html": (lambda: b"\n<!DOCTYPE html><html>Sign in", "an HTML page"),
    "lfs": (lambda: b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
    "empty": (lambda: b"", "it is empty"),
    "image": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(90), "a PNG image"),
    "noise": (lambda: bytes(range(1, 128)), "of a format that is not known"),
    "zip": (lambda: zipped(readme=b"hello"), "a zip archive without weights"),
    "nested": (lambda: zipped(**{"net.pth": b"x"}), "unpack it and convert net.pth"),
    "npz": (npz, "an archive of NumPy arrays"),
    "torn": (lambda: saved(WEIGHTS)[:-200], "incomplete or damaged"),
    "script": (lambda: zipped(**{"net/data.pkl": b"", "net/code/a.py": b""}), "a TorchScript"),
    "bomb": (lambda: saved({"state_dict": Bomb()}), "runs code to make"),
    "pickle": (lambda: pickle.dumps({"a": 1}), "a pickle without tensors"),
    "list": (lambda: saved([1, {"a": 2}]), "a list of 2 items (int, dict)"),
    "numbers": (lambda: saved({"epoch": 1}), "'epoch' in"),
    "tensor": (lambda: saved(torch.ones(2)), "it is a Tensor"),
    "other": (lambda: saved({f"layer{k}.weight": torch.ones(2) for k in range(300)}),
              "does not fit the model"),
    "size": (lambda: saved(released(width=4)), "does not fit the model: f.bias is (4,)"),
    "nan": (lambda: saved({k: v * float("nan") for k, v in released().items()}),
            "f.weight in"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.filterwarnings("error")
def test_a_wrong_file_is_answered_in_one_line(
    kind: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, message = WRONG[kind]
    file, out = tmp_path / f"net{suffix}", tmp_path / "out.safetensors"
    file.write_bytes(make())
    assert main(["convert", str(file), "--preset", "toy", "--out", str(out)]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
    assert len(output) < 500
    assert "weights_only" not in output
    assert not out.exists()


def test_folders_and_files_of_this_zoo_are_recognised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(path: Path) -> str:
        words = ["convert", str(path), "--preset", "toy", "--out", str(tmp_path / "o.safetensors")]
        assert main(words) == 2
        return capsys.readouterr().err

    assert "is a folder; expected a .safetensors" in convert(tmp_path)
    torch.save(released(), tmp_path / "net.pth")
    assert "name a file in it, e.g. net.pth" in convert(tmp_path)
    assert main(["convert", str(tmp_path / "net.pth"), "--preset", "toy"]) == 0
    assert "is a checkpoint of this zoo already" in convert(tmp_path / "net.safetensors")
    run = tmp_path / "run"
    assert main(["train", "toy", "--steps", "1", "--quiet", "--no-report", "--out", str(run)]) == 0
    assert "is a run of this zoo" in convert(run)


def test_a_file_is_read_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "a.pth")
    torch.save({"args": argparse.Namespace(lr=1), "net": WEIGHTS}, tmp_path / "a.safetensors")
    for name in ("a.pth", "a.safetensors"):
        torch.testing.assert_close(read_state(tmp_path / name), WEIGHTS)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (WEIGHTS, ""),
        ({"state_dict": WEIGHTS, "epoch": 3}, "state_dict"),
        ({"model": {"state_dict": WEIGHTS}}, "model.state_dict"),
        ({"ema": {f"module.{k}": v for k, v in WEIGHTS.items()}, "optimizer": {"a": 1}}, "ema"),
    ],
)
def test_weights_under_a_usual_key_are_read(content: Any, key: str) -> None:
    state, used = find_state(content, "file")
    assert used == key
    torch.testing.assert_close(state, WEIGHTS)


def test_no_part_of_a_file_is_chosen_silently() -> None:
    other = {key: value + 1 for key, value in WEIGHTS.items()}
    both = {"model": WEIGHTS, "ema": other}
    with pytest.raises(CheckpointError, match="under 'model' and 'ema': choose with --key model"):
        bare_state(both, "file")
    torch.testing.assert_close(find_state(both, "file", "ema").state, other)
    with pytest.raises(CheckpointError, match="dicts of tensors under generator: choose with"):
        bare_state({"generator": WEIGHTS, "step": 3}, "file")
    listed = [WEIGHTS, {"lr": 1}, other]
    with pytest.raises(
        CheckpointError, match=r"a list of 3 items .* under 0, 2: choose with --key"
    ):
        bare_state(listed, "file")
    torch.testing.assert_close(find_state(listed, "file", "2").state, other)
    with pytest.raises(CheckpointError, match="has nothing under 'emma': it is a dict with"):
        find_state(both, "file", "emma")


def test_a_task_picks_the_weights_of_its_own_training_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_of_list(self: Toy, content: Any) -> Weights | None:
        return content[-1] if isinstance(content, list) else None

    monkeypatch.setattr(Toy, "pick_state", last_of_list)
    state = released()
    torch.save([{k: v + 1 for k, v in state.items()}, 3, state], tmp_path / "net.pth")
    assert main(["convert", str(tmp_path / "net.pth"), "--preset", "toy"]) == 0
    weights = deq_zoo.load(tmp_path / "net.safetensors").state_dict()
    torch.testing.assert_close(weights["f.bias"], state["linear.bias"])


def test_an_error_of_a_converter_is_about_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Toy, state: Weights) -> Any:
        return {"a": state["encoder.weight"]}

    monkeypatch.setattr(Toy, "from_authors", fail)
    torch.save(WEIGHTS, tmp_path / "net.pth")
    assert main(["convert", str(tmp_path / "net.pth"), "--preset", "toy"]) == 2
    assert "not have the weights of toy: KeyError 'encoder.weight'" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_go_to_the_layout_of_the_authors_and_back(
    suffix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def to_authors(self: Toy, state: Weights) -> dict[str, Tensor]:
        return {key.replace("f.", "linear."): value for key, value in state.items()}

    state, out = released(), tmp_path / f"theirs{suffix}"
    torch.save({"state_dict": state}, tmp_path / "net.pth")
    assert main(["convert", str(tmp_path / "net.pth"), "--preset", "toy"]) == 0
    assert "4 tensors of 'state_dict' written to" in capsys.readouterr().out
    words = ["convert", str(tmp_path / "net.safetensors"), "--to-authors", "--out", str(out)]
    assert main(words) == 2
    assert "no released weights to convert to" in capsys.readouterr().err
    monkeypatch.setattr(Toy, "to_authors", to_authors)
    assert main(words) == 0
    again = load_file(out) if suffix == ".safetensors" else torch.load(out, weights_only=True)
    torch.testing.assert_close(again, state, rtol=0, atol=0)
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "theirs.txt")]) == 2
    assert "--out ends with .safetensors or .pth" in capsys.readouterr().err
