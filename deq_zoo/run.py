"""A run folder: configuration, log, checkpoints, report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError, ZooError
from deq_zoo.files import write_atomically
from deq_zoo.identity import differing_settings
from deq_zoo.lock import locked
from deq_zoo.log import as_json, read_line
from deq_zoo.preset import Preset
from deq_zoo.values import from_data, to_data


class Run:
    """The files of one training run, below `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.log_file = path / "config.json", path / "log.jsonl"
        self.last, self.best = path / "last.safetensors", path / "best.safetensors"
        self.report, self.pictures = path / "report.html", path / "pictures"
        self.tensorboard, self.lock_file = path / "tensorboard", path / "lock.json"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @classmethod
    def create(cls, path: Path, name: str, preset: Preset, force: bool = False) -> Run:
        """Make a new run folder; raise `ZooError` if there is one already, unless `force` is set.

        The caller holds the lock of the folder if others may write to it.
        """
        run = cls(path)
        run.check_replaceable(force)
        run._make_folder()
        run._remove_files()
        run.write_config(name, preset)
        return run

    @classmethod
    def open(cls, path: Path) -> Run:
        """Return the run in an existing folder."""
        run = cls(path)
        if not run.config.exists():
            raise ZooError(f"{path} is not a run folder: it has no config.json")
        return run

    def locked(self) -> AbstractContextManager[None]:
        """Return a block in which no other process can train in the folder, which is made."""
        self._make_folder()
        return locked(self.lock_file)

    @property
    def is_half_made(self) -> bool:
        """Return whether the folder is missing, empty, or of a run that was killed at its start."""
        if not self.path.is_dir():
            return not self.path.exists()
        names = {file.name for file in self.path.iterdir()}
        ours = {self.config.name, self.last.name, self.best.name, self.log_file.name}
        return all(
            name.startswith(self.lock_file.name) or name.removesuffix(".part") in ours - {name}
            for name in names
        )

    def _make_folder(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ZooError(f"cannot make the run folder {self.path}: {error}") from None

    def check_replaceable(self, force: bool) -> None:
        """Raise `ZooError` if the folder has files, unless they are a run's and `force` is set."""
        if self.is_half_made:
            return
        if not force and not self.config.exists():
            raise ZooError(
                f"{self.path} exists already and is not a run folder: choose another with --out"
            )
        if not force:
            raise ZooError(
                f"{self.path} exists already: go on with --resume, choose another folder with "
                "--out or replace it with --force"
            )
        try:
            self._read()
        except ZooError:
            raise ZooError(
                f"{self.path} is not a run folder; --force replaces nothing else"
            ) from None

    def _remove_files(self) -> None:
        """Remove the files of an earlier run, and nothing else; the configuration comes last."""
        for folder in (self.pictures, self.tensorboard):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.log_file, self.last, self.best, self.report, self.config):
            for each in (file.with_name(f"{file.name}.part"), file):
                each.unlink(missing_ok=True)

    def write_config(self, name: str, preset: Preset) -> None:
        """Write the configuration, whole or not at all."""
        config = {"name": name, "preset": to_data(preset)}
        write_atomically(self.config, json.dumps(config, indent=1))

    @property
    def name(self) -> str:
        """Return the name of the preset."""
        return str(self._read()["name"])

    def preset(self) -> Preset:
        """Return the preset of the run, with its settings."""
        return read_preset(self._read(), str(self.config))

    def _read(self) -> dict[str, Any]:
        try:
            config = json.loads(self.config.read_text())
        except (OSError, ValueError) as error:  # of JSON and of UTF-8
            raise ZooError(f"{self.config} cannot be read: {error}") from None
        if not isinstance(config, dict) or not {"name", "preset"} <= set(config):
            raise ZooError(f"{self.config} is not the configuration of a run")
        return config

    def weights(self, best: bool = False) -> Path:
        """Return the file of the last checkpoint, or of the best if there is one."""
        return self.best if best and self.best.exists() else self.last

    def checkpoint(self, best: bool = False) -> Checkpoint:
        """Return the last checkpoint, or the best if there is one; check that it is of this run."""
        path = self.weights(best)
        checkpoint = Checkpoint.load(path)
        differing = differing_settings(read_preset(checkpoint.config, str(path)), self.preset())
        if differing:
            raise CheckpointError(
                f"{path} comes from another run ({checkpoint.config.get('name')}): its settings "
                f"differ from those of {self.config} in {', '.join(differing[:3])}"
                + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
            )
        return checkpoint

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to the log."""
        try:
            with self.log_file.open("a") as file:
                file.write(as_json({"kind": kind, "step": step, **values}) + "\n")
        except OSError as error:
            raise ZooError(f"could not write {self.log_file}: {error}") from None

    def lines(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the lines of the log, oldest first, with the keys and types that `read_line` says.

        Skip lines that training did not write, and the torn last line of a killed run.
        """
        if not self.log_file.exists():
            return
        with self.log_file.open(errors="replace") as file:
            for text in file:
                line = read_line(text)
                if line is not None and kind in (None, line["kind"]):
                    yield line

    def forget_after(self, step: int) -> None:
        """Drop lines that were logged after the checkpoint that the run resumes from."""
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        write_atomically(self.log_file, "".join(kept))


def read_preset(config: Mapping[str, Any], source: str) -> Preset:
    """Return the preset that a configuration describes; raise `ZooError` if it describes none."""
    try:
        preset = from_data(config["preset"])
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise ZooError(f"{source} does not describe a preset: {error}") from None
    if not isinstance(preset, Preset):
        raise ZooError(f"{source} does not describe a preset")
    return preset
