"""Checkpoints: one safetensors file that is either whole or not there.

It holds everything that a run needs to go on: weights, optimiser, the tensors that a task carries
from step to step, and the state of the random generators. Tensors are entries of the file, all else
is JSON in its header; nothing is ever unpickled. A checksum over both reveals damage.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deq_zoo.errors import CheckpointError

_FORMAT = "deq-zoo 2"
_WITHOUT_CHECKSUM = "deq-zoo 1"  # of earlier versions
_TREES = ("model", "optimizer", "carry", "randomness", "by_process")  # with tensors inside
_PLAIN = ("step", "notes", "config", "facts")
_log = logging.getLogger("deq_zoo")
_notes_given: set[str] = set()


@dataclass
class Checkpoint:
    """A moment of a run.

    Args:
        step: updates so far.
        model: the state_dict.
        optimizer: its state_dict.
        carry: `Loss.carry` of every process.
        randomness: the state of the random generators of every process.
        notes: further state of the training loop, e.g. the best score so far.
        config: name and preset of the run.
        facts: about the data, see `Task.facts`; None in files of earlier versions.
        by_process: further state of every process in which processes differ.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any] = field(default_factory=dict)
    carry: Any = None
    randomness: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] | None = None
    by_process: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file under a temporary name, then rename it."""
        tensors: dict[str, Tensor] = {}
        header = {name: _strip(getattr(self, name), name, tensors) for name in _TREES}
        header |= {name: getattr(self, name) for name in _PLAIN}
        state = json.dumps(header)
        metadata = {"format": _FORMAT, "state": state, "checksum": _checksum(state, tensors)}
        part = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, part, metadata)
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
        """Read a file that `save` wrote; raise `CheckpointError` if it is damaged."""
        metadata, tensors = _read(path)
        if metadata.get("format") not in (_FORMAT, _WITHOUT_CHECKSUM):
            raise CheckpointError(
                f"{path} is not a checkpoint of this zoo; `deq-zoo convert` reads released weights"
            )
        _verify(path, metadata, tensors)
        try:
            header = json.loads(metadata["state"])
            trees = {k: _restore(header[k], tensors) for k in _TREES if k in header}
            return cls(**trees, **{k: header[k] for k in _PLAIN if k in header})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the header of {path} is damaged: {error!r}") from None


def digest(tensor: Tensor) -> str:
    """Return a checksum of the type, shape and values of a tensor."""
    return _checksum("", {"": tensor.detach().cpu()})


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            # Copies: a tensor of the file itself would change with it, also after the checksum.
            return metadata, {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _verify(path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` unless the checksum of a file is right."""
    if metadata["format"] == _WITHOUT_CHECKSUM:
        if "checksum" not in _notes_given:
            _log.info("%s has no checksum: an earlier version wrote it", path)
            _notes_given.add("checksum")
    elif metadata.get("checksum") != _checksum(metadata.get("state", ""), tensors):
        raise CheckpointError(
            f"{path} is damaged: its checksum is wrong. Copy it again from where it came from, or "
            "use another checkpoint of the run"
        )


def _checksum(state: str, tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.blake2b(state.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _umask() -> int:
    """Return the process's mask for new files; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return the structure of a value as plain data; move its tensors into `tensors`.

    A tensor that a mapping has under several names, e.g. a state_dict, is stored once.
    """
    if isinstance(value, Tensor):
        if path in tensors:  # {"a.b": ...} beside {"a": {"b": ...}}
            path = f"{path}#{len(tensors)}"
        # A copy of its own: safetensors refuses tensors that share memory.
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": path}
    if isinstance(value, Mapping):
        places: dict[int, Any] = {}
        items = []
        for key, item in value.items():
            if not isinstance(item, Tensor) or id(item) not in places:
                places[id(item)] = _strip(item, f"{path}.{_key(key)}", tensors)
            items.append([_key(key), places[id(item)]])
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
    """Return the value that `_strip` took apart."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "map":
        return {key: _restore(item, tensors) for key, item in content}
    items = [_restore(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
