"""A run folder: configuration, log, checkpoints, report."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import ZooError
from deq_zoo.preset import Preset
from deq_zoo.values import from_data, to_data


class Run:
    """The files of one training run, below ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.log_file = path / "config.json", path / "log.jsonl"
        self.last, self.best = path / "last.safetensors", path / "best.safetensors"
        self.report, self.pictures = path / "report.html", path / "pictures"
        self.tensorboard = path / "tensorboard"

    @classmethod
    def create(cls, path: Path, name: str, preset: Preset, force: bool = False) -> Run:
        """A new folder; one that exists is an error, or with ``force`` replaced."""
        run = cls(path)
        if path.exists() and any(path.iterdir()):
            if not force:
                raise ZooError(
                    f"{path} exists already: go on with --resume, choose another folder with --out "
                    "or replace it with --force"
                )
            if not run.config.exists():
                raise ZooError(f"{path} is not a run folder; --force replaces nothing else")
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(
            run.config, json.dumps({"name": name, "preset": to_data(preset)}, indent=1)
        )
        return run

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
        preset = from_data(self._read()["preset"])
        assert isinstance(preset, Preset)
        return preset

    def _read(self) -> dict[str, Any]:
        try:
            held: dict[str, Any] = json.loads(self.config.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ZooError(f"{self.config} cannot be read: {error}") from None
        return held

    def checkpoint(self, best: bool = False) -> Checkpoint:
        """The last checkpoint, or the best if asked and there."""
        return Checkpoint.load(self.best if best and self.best.exists() else self.last)

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a line; a torn last line of a killed run is skipped when the log is read."""
        with self.log_file.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")

    def lines(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The log, oldest first."""
        if not self.log_file.exists():
            return
        for text in self.log_file.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if kind in (None, line["kind"]):
                yield line

    def forget_after(self, step: int) -> None:
        """Drop what was logged after a checkpoint that the run resumes from."""
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        write_atomically(self.log_file, "".join(kept))


def write_atomically(path: Path, content: str | bytes) -> None:
    """A file that is either the old one or the new one, whole."""
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ZooError(f"could not write {path}: {error}") from None
