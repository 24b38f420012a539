"""Checkpoints: whole, complete and refused when they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deq_zoo.checkpoint import Checkpoint, digest
from deq_zoo.errors import CheckpointError
from deq_zoo.randomness import random_state, restore_random_state


class TestCheckpoints:
    def test_everything_comes_back(self, tmp_path: Path) -> None:
        shared = torch.randn(3)
        checkpoint = Checkpoint(
            7, {"a": shared, "b": shared, "c": torch.randn(2, 2).mT},
            {"state": {0: {"step": torch.tensor(3.0), "m": shared}}, "param_groups": [{"lr": 0.1}]},
            carry=(torch.ones(2, dtype=torch.bfloat16), None, [1, "x"]), randomness=random_state(),
            notes={"best": None}, config={"name": "toy"},
        )  # fmt: skip
        checkpoint.save(tmp_path / "deep" / "x.safetensors")
        again = Checkpoint.load(tmp_path / "deep" / "x.safetensors")
        torch.testing.assert_close(again.model, checkpoint.model)
        assert again.optimizer["param_groups"] == [{"lr": 0.1}]
        assert torch.equal(again.optimizer["state"][0]["m"], shared)
        assert isinstance(again.carry, tuple)
        assert again.carry[0].dtype == torch.bfloat16
        expected = torch.rand(3), __import__("numpy").random.rand(), __import__("random").random()
        restore_random_state(again.randomness)
        got = torch.rand(3), __import__("numpy").random.rand(), __import__("random").random()
        assert torch.equal(got[0], expected[0])
        assert got[1:] == expected[1:]
        assert not list(tmp_path.rglob("*.part"))

    def test_bad_files_are_errors(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="there is no checkpoint"):
            Checkpoint.load(tmp_path / "none.safetensors")
        broken = tmp_path / "broken.safetensors"
        broken.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{garbage")
        with pytest.raises(CheckpointError, match="cannot be read"):
            Checkpoint.load(broken)
        from safetensors.torch import save_file

        save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
        with pytest.raises(CheckpointError, match="not a checkpoint of this zoo"):
            Checkpoint.load(tmp_path / "other.safetensors")

    def test_every_flipped_bit_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        half, empty = torch.ones(3, dtype=torch.bfloat16), torch.ones(0, 2)
        Checkpoint(7, {"a": torch.randn(4), "b": half, "c": empty}, config={"name": "toy"}).save(
            path
        )
        content = path.read_bytes()
        for place in range(0, len(content), 3):
            damaged = bytearray(content)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                Checkpoint.load(path)
        path.write_bytes(content)
        assert Checkpoint.load(path).step == 7

    def test_what_was_loaded_does_not_change_with_its_file(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        weights = {"a": torch.randn(1000)}
        Checkpoint(7, weights).save(path)
        loaded = Checkpoint.load(path)
        path.write_bytes(bytes(path.stat().st_size))  # in its place, as cp does
        assert torch.equal(loaded.model["a"], weights["a"])

    def test_a_file_without_checksum_loads_with_one_note(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("deq_zoo.checkpoint._notes_given", set())
        folder = Path(__file__).parents[1] / "golden" / "runs"
        with caplog.at_level("INFO", logger="deq_zoo"):
            for name in ("lm-smoke", "mdeq-smoke"):
                Checkpoint.load(folder / name / "last.safetensors")
        (record,) = caplog.records
        assert record.levelname == "INFO"
        assert "has no checksum: an earlier version wrote it" in record.message

    def test_a_digest_tells_values_types_and_shapes_apart(self) -> None:
        ones = torch.ones(4)
        assert digest(ones) == digest(torch.ones(8)[::2])
        others = [2 * ones, ones.double(), ones.view(2, 2), ones[:3]]
        assert len({digest(t) for t in (ones, *others)}) == 5

    def test_a_failed_write_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "x.safetensors"
        Checkpoint(1, {"a": torch.ones(1)}).save(path)

        def raise_full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("deq_zoo.checkpoint.save_file", raise_full)
        with pytest.raises(
            CheckpointError,
            match=r"No space left .* that was there is intact",
        ):
            Checkpoint(2, {"a": torch.ones(1)}).save(path)
        assert Checkpoint.load(path).step == 1
