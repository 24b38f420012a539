"""The authors' checkpoints, there and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deq_zoo.convert import read_state
from deq_zoo.errors import CheckpointError
from deq_zoo.mdeq import MDEQ, MDEQClassifier, MDEQSegmenter
from deq_zoo.mdeq.convert import load_checkpoint, to_authors
from tests.zoo.mdeq.nets import SMALL, Golden
from torchdeq import remove_norm


def have_equal_weights(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)


def write_authors(model: nn.Module, path: Path, nested: bool, data_parallel: bool) -> None:
    """Write a model in one of the forms that the authors' programs write."""
    checkpoint = to_authors(model.state_dict(), nested, data_parallel)
    save = save_file if path.suffix == ".safetensors" else torch.save
    save(checkpoint, path)


@pytest.mark.parametrize("data_parallel", [False, True])
@pytest.mark.parametrize(
    ("file", "nested"), [("best.pth", False), ("best.pth.tar", True), ("best.safetensors", False)]
)
def test_every_wrapping_goes_round(
    tmp_path: Path, file: str, nested: bool, data_parallel: bool
) -> None:
    model, other = MDEQClassifier(SMALL), MDEQClassifier(SMALL)
    write_authors(model, tmp_path / file, nested, data_parallel)
    assert not have_equal_weights(model, other)
    load_checkpoint(other, tmp_path / file)
    assert have_equal_weights(model, other)


def test_a_training_checkpoint_loads_from_memory_and_is_not_changed() -> None:
    model, other = MDEQClassifier(SMALL), MDEQClassifier(SMALL)
    checkpoint = {"epoch": 3, "perf": 0.9, **to_authors(model.state_dict(), True, True)}
    keys = list(checkpoint["state_dict"])
    load_checkpoint(other, checkpoint)
    assert have_equal_weights(model, other)
    assert list(checkpoint["state_dict"]) == keys
    assert all(key.startswith("module.") for key in keys)
    assert "module.full_stage.branches.0.blocks.0.conv1.weight_g" in keys


def test_a_checkpoint_shares_no_memory_with_the_model() -> None:
    model = MDEQClassifier(SMALL)
    checkpoint = to_authors(model.state_dict())
    before = checkpoint["classifier.bias"].clone()
    with torch.no_grad():
        model.classifier.bias.add_(1)
    assert torch.equal(checkpoint["classifier.bias"], before)


@pytest.mark.parametrize("kind", [MDEQ, MDEQSegmenter])
def test_a_classifiers_backbone_starts_a_segmenter(kind: Any) -> None:
    trained, model = MDEQClassifier(SMALL), kind(SMALL)
    head = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("last_layer")}
    load_checkpoint(model, to_authors(trained.state_dict()), backbone_only=True)
    x = torch.randn(1, 3, 8, 8)
    u = trained.eval().inject(x)
    assert torch.equal(model.eval().inject(x), u)
    z = trained.start(u)
    torch.testing.assert_close(model.full_stage(*z, u), trained.full_stage(*z, u))
    assert all(torch.equal(model.state_dict()[k], v) for k, v in head.items())


def test_folded_weights_load_into_a_normalised_model() -> None:
    folded, model = (MDEQClassifier(SMALL, {"f_tol": 0.0}).eval() for _ in range(2))
    remove_norm(folded)
    load_checkpoint(model, to_authors(folded.state_dict()))
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(x).prediction, folded(x).prediction)


def test_a_checkpoint_that_does_not_fit_says_why_and_changes_nothing() -> None:
    checkpoint = to_authors(MDEQClassifier(SMALL).state_dict())
    for changes, message in (
        ({"classes": 7}, r"classifier.bias is \(5,\), the model's is \(7,\)"),
        ({"downsample_times": 1}, "lacks stage0.0.weight"),
        ({"norm_scope": ()}, "has, and the model lacks, full_stage.*and 13 more"),
    ):
        model = MDEQClassifier(replace(SMALL, **changes))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(model, checkpoint)
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with pytest.raises(CheckpointError, match=r"has, and the model lacks, classifier\.bias"):
        load_checkpoint(MDEQ(SMALL), checkpoint)


class Malice:
    def __reduce__(self) -> Any:
        return print, ("harm",)


def test_only_tensors_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": Malice()}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match=r"evil\.pth cannot be read as weights"):
        read_state(tmp_path / "evil.pth")
    assert "harm" not in capsys.readouterr().out
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"broken\.safetensors"):
        read_state(tmp_path / "broken.safetensors")
    with pytest.raises(CheckpointError, match="there is no file"):
        read_state(tmp_path / "none.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match="a dict of tensors, or have one as 'state_dict'"):
        read_state(tmp_path / "list.pth")
    torch.save({"epoch": 1}, tmp_path / "other.pth")
    with pytest.raises(
        CheckpointError,
        match=r"'epoch' in .*other\.pth is not the name of a tensor: .* its value int",
    ):
        read_state(tmp_path / "other.pth")
    torch.save({3: torch.ones(1)}, tmp_path / "number.pth")
    with pytest.raises(CheckpointError, match=r"3 in .* its key is of type int, its value Tensor"):
        read_state(tmp_path / "number.pth")
    twice = {"module.a": torch.ones(1), "a": torch.zeros(1)}
    torch.save(twice, tmp_path / "twice.pth")
    with pytest.raises(CheckpointError, match=r"has 'a' twice, once with the prefix 'module\.'"):
        read_state(tmp_path / "twice.pth")


def test_golden_weights_load_from_their_file(tmp_path: Path) -> None:
    golden = Golden("mini4")
    model = MDEQClassifier(golden.config)
    save_file(golden.weights, tmp_path / "weights.safetensors")
    load_checkpoint(model, tmp_path / "weights.safetensors")
    written = {f"module.{key}": value for key, value in golden.weights.items()}
    save_file(written, tmp_path / "again.safetensors")
    again = MDEQClassifier(golden.config)
    load_checkpoint(again, tmp_path / "again.safetensors")
    assert have_equal_weights(model, again)
