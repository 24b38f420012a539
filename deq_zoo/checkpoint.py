"""Checkpoints: one safetensors file that is either whole or not there.

Everything a run needs to go on is in it: weights, optimiser, what a task carries from step to step,
and the state of the random generators. Tensors are entries of the file, all else is JSON in its
header; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deq_zoo.errors import CheckpointError

_FORMAT = "deq-zoo 1"


@dataclass
class Checkpoint:
    """A moment of a run."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any] = field(default_factory=dict)
    carry: Any = None
    randomness: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)  # e.g. the best score so far
    config: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] | None = None  # about the data; None if an earlier version wrote it

    def save(self, path: Path) -> None:
        """Write the file under a temporary name, then give it its own."""
        tensors: dict[str, Tensor] = {}
        plain = {
            name: _strip(getattr(self, name), name, tensors)
            for name in ("model", "optimizer", "carry", "randomness")
        }
        header = {"step": self.step, "notes": self.notes, "config": self.config, **plain}
        header["facts"] = self.facts
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, {"format": _FORMAT, "state": json.dumps(header)})
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.chmod(0o666 & ~_umask())
            part.replace(path)
        except (OSError, SafetensorError) as error:
            part.unlink(missing_ok=True)
            raise CheckpointError(
                f"could not write {path}: {error}"
                + ("; the checkpoint that was there is intact" if path.exists() else "")
            ) from None

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a file that `save` wrote."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint at {path}") from None
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} is not a checkpoint of this zoo; `deq-zoo convert` reads released weights"
            )
        names = ("model", "optimizer", "carry", "randomness")
        try:
            header = json.loads(metadata["state"])
            held = {name: _restore(header[name], tensors) for name in names}
            plain = {name: header[name] for name in ("step", "notes", "config")}
            return cls(**plain, **held, facts=header.get("facts"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the header of {path} is damaged: {error!r}") from None


def _umask() -> int:
    """The process's mask for new files, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def random_state() -> dict[str, Any]:
    """The state of every global random generator."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put them back."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The structure of a value, its tensors moved into `tensors`."""
    if isinstance(value, Tensor):
        if path in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
            path = f"{path}#{len(tensors)}"
        # A copy of its own: safetensors refuses tensors that share memory.
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": path}
    if isinstance(value, Mapping):
        items = [[_key(k), _strip(v, f"{path}.{k}", tensors)] for k, v in value.items()]
        return {"map": items}
    if isinstance(value, (list, tuple)):
        items = [_strip(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a checkpoint holds tensors and plain values, got {type(value).__name__}")


def _key(key: Any) -> Any:
    if not isinstance(key, (str, int)):
        raise TypeError(f"a checkpoint's keys are strings and numbers, got {key!r}")
    return key


def _restore(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "map":
        return {key: _restore(item, tensors) for key, item in held}
    items = [_restore(item, tensors) for item in held]
    return tuple(items) if kind == "tuple" else items
