"""A run folder: configuration, log, checkpoints, report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import ZooError
from deq_zoo.files import write_atomically
from deq_zoo.preset import Preset
from deq_zoo.values import from_data, to_data


class Run:
    """The files of one training run, below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.log_file = path / "config.json", path / "log.jsonl"
        self.last, self.best = path / "last.safetensors", path / "best.safetensors"
        self.report, self.pictures = path / "report.html", path / "pictures"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def create(cls, path: Path, name: str, preset: Preset, force: bool = False) -> Run:
        """A new folder; one that exists is an error, or with `force` replaced."""
        run = cls(path)
        try:
            if path.exists() and any(path.iterdir()):
                run._make_way(force)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ZooError(f"cannot make the run folder {path}: {error}") from None
        held = {"name": name, "preset": to_data(preset)}
        write_atomically(run.config, json.dumps(held, indent=1))
        return run

    def _make_way(self, force: bool) -> None:
        """Remove the files of an earlier run, and nothing else."""
        if not force:
            raise ZooError(
                f"{self.path} exists already: go on with --resume, choose another folder with "
                "--out or replace it with --force"
            )
        try:
            self.preset()
        except ZooError:
            raise ZooError(
                f"{self.path} is not a run folder; --force replaces nothing else"
            ) from None
        for folder in (self.pictures, self.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.log_file, self.last, self.best, self.report, self.config):
            file.unlink(missing_ok=True)

    @classmethod
    def open(cls, path: Path) -> Run:
        """An existing folder."""
        run = cls(path)
        if not run.config.exists():
            raise ZooError(f"{path} is not a run folder: it has no config.json")
        return run

    @property
    def name(self) -> str:
        """The preset's name."""
        return str(self._read()["name"])

    def preset(self) -> Preset:
        """The configuration the run was started with."""
        return read_preset(self._read(), str(self.config))

    def _read(self) -> dict[str, Any]:
        try:
            held = json.loads(self.config.read_text())
        except (OSError, ValueError) as error:  # of JSON and of UTF-8
            raise ZooError(f"{self.config} cannot be read: {error}") from None
        if not isinstance(held, dict) or not {"name", "preset"} <= set(held):
            raise ZooError(f"{self.config} is not the configuration of a run")
        return held

    def checkpoint(self, best: bool = False) -> Checkpoint:
        """The last checkpoint, or the best if asked and there."""
        return Checkpoint.load(self.best if best and self.best.exists() else self.last)

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a line; a torn last line of a killed run is skipped when the log is read."""
        try:
            with self.log_file.open("a") as file:
                file.write(as_json({"kind": kind, "step": step, **values}) + "\n")
        except OSError as error:
            raise ZooError(f"could not write {self.log_file}: {error}") from None

    def lines(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The log, oldest first."""
        if not self.log_file.exists():
            return
        with self.log_file.open(errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue
                whole = isinstance(line, dict) and {"kind", "step"} <= set(line)
                if whole and kind in (None, line["kind"]):
                    yield line

    def forget_after(self, step: int) -> None:
        """Drop what was logged after a checkpoint that the run resumes from."""
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        write_atomically(self.log_file, "".join(kept))


def read_preset(held: Mapping[str, Any], source: str) -> Preset:
    """The preset that a file describes; anything else in it is told."""
    try:
        preset = from_data(held["preset"])
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise ZooError(f"{source} does not describe a preset: {error}") from None
    if not isinstance(preset, Preset):
        raise ZooError(f"{source} does not describe a preset")
    return preset


def as_json(values: Mapping[str, Any]) -> str:
    """One line of JSON; numbers that it does not know are null."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not isfinite(value):
            return None
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(plain(values))
