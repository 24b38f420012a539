"""Weights released by the authors of the models, as checkpoints of ours, and the other way."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from deq_zoo.building import try_to_build
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError, DataError, MissingPackage, ZooError
from deq_zoo.files import write_atomically
from deq_zoo.loading import open_model
from deq_zoo.precision import in_precision
from deq_zoo.preset import Preset
from deq_zoo.task import Converted, Task, Weights
from deq_zoo.values import to_data
from deq_zoo.weight_files import check_file, read_content
from deq_zoo.weights import load_weights

#: Keys under which training programs save a state_dict.
_KEYS = ("state_dict", "model_state_dict", "model", "net", "ema")
_LISTED = 5  # keys and items that an error names
_REASON = 200  # characters of the converter's own error


class Conversion(NamedTuple):
    """How many tensors were converted, and the key in the file that they were under."""

    tensors: int
    key: str


class Part(NamedTuple):
    """A state_dict in a file, and the key it was under, e.g. `checkpoint.ema`."""

    state: dict[str, Tensor]
    key: str


def convert_file(
    source: Path, preset: Preset, name: str, out: Path, key: str | None = None
) -> Conversion:
    """Convert a file of the authors for a preset.

    Args:
        source: the file.
        preset: the preset.
        name: its name.
        out: the checkpoint to write.
        key: where in the file the weights are, e.g. `ema`; None looks for them.
    """
    if out.resolve() == source.resolve():
        raise CheckpointError(f"{source} would be overwritten: choose another --out")
    check_file(source)
    _check_settings(preset)
    part = find_state(read_content(source), str(source), key, preset.task)
    weights, facts = _from_authors(preset.task, part.state, str(source), name)
    model = in_precision(preset.task.build(facts), preset.precision)
    load_weights(model, weights, str(source))
    config = {"name": name, "preset": to_data(preset)}
    Checkpoint(0, model.state_dict(), config=config, facts=facts).save(out)
    return Conversion(len(weights), part.key)


def export_file(source: Path, out: Path, best: bool = True) -> int:
    """Write the weights of a run or checkpoint as the authors' programs read them.

    Args:
        source: run folder, saved model or checkpoint file.
        out: the file to write; `.safetensors`, or `.pth` or `.pt` for `torch.save`.
        best: take the best weights of a run, not the last ones.
    """
    if out.suffix not in (".safetensors", ".pth", ".pt"):
        raise ZooError(f"--out ends with .safetensors or .pth, got {out}")
    model, preset = open_model(source, best)
    state = preset.task.to_authors(model.state_dict())
    state = {key: value.detach().cpu().contiguous().clone() for key, value in state.items()}
    if out.suffix == ".safetensors":
        write_atomically(out, save(state))
    else:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(out, buffer.getvalue())
    return len(state)


def read_state(source: Path, key: str | None = None) -> dict[str, Tensor]:
    """Return the state_dict in a `.safetensors` or `.pth` file; no code in the file is run."""
    return find_state(read_content(source), str(source), key).state


def bare_state(content: Any, source: str) -> dict[str, Tensor]:
    """Return the state_dict in the content of a file; see `find_state`."""
    return find_state(content, source).state


def find_state(content: Any, source: str, key: str | None = None, task: Task | None = None) -> Part:
    """Return the state_dict in the content of a file, without the prefix `module.` of its keys.

    It is the part that `key` names, or else that `task.pick_state` returns, or else the content
    itself or the only part under a usual key. Two parts that may be meant are an error.

    Args:
        content: the content.
        source: the name of the file, for errors.
        key: the keys of a part, joined by dots; numbers are positions in lists.
        task: the task that the weights are for.
    """
    picked = task.pick_state(content) if task is not None and key is None else None
    path = "" if key is None else key
    part = content if key is None else _descend(content, source, key)
    if picked is not None:
        part = picked
    while isinstance(part, Mapping) and not _is_state(part):
        keys = [k for k in _KEYS if isinstance(part.get(k), Mapping) and part[k]]
        if len(keys) > 1:
            raise CheckpointError(
                f"{source} has weights under {' and '.join(map(repr, keys))}: choose with --key "
                f"{keys[0]}"
            )
        if not keys:
            break
        part, path = part[keys[0]], f"{path}.{keys[0]}".lstrip(".")
    _check_state(part, content, source)
    state: dict[str, Tensor] = {}
    for name, value in part.items():
        short = name.removeprefix("module.")
        if short in state:
            raise CheckpointError(f"{source} has {short!r} twice, once with the prefix 'module.'")
        state[short] = value
    return Part(state, path)


def _check_settings(preset: Preset) -> None:
    """Raise `ZooError` for settings that do not fit together.

    Without the data that tells a model its sizes, only converting the weights can show it.
    """
    with suppress(DataError, MissingPackage):
        try_to_build(preset)


def _from_authors(task: Task, state: Weights, source: str, name: str) -> Converted:
    """Convert weights; an error of the converter means that they belong to another model."""
    try:
        return task.from_authors(state)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[:_REASON]
        raise CheckpointError(
            f"{source} does not have the weights of {name}: {reason}; its keys are "
            f"{_listed(sorted(state))}"
        ) from None


def _is_state(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and bool(part)
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in part.items())
    )


def _descend(content: Any, source: str, key: str) -> Any:
    """Return the part of the content that a dotted key names."""
    part = content
    for name in key.split("."):
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, (list, tuple)) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        else:
            raise CheckpointError(f"{source} has nothing under {key!r}: it is {_describe(part)}")
    return part


def _check_state(part: Any, content: Any, source: str) -> None:
    """Raise unless a part is a dict of tensors; name other parts that are."""
    if _is_state(part):
        return
    parts = dict(enumerate(content)) if isinstance(content, (list, tuple)) else content
    others = [str(k) for k, v in parts.items() if _is_state(v)] if isinstance(parts, dict) else []
    if not others and isinstance(part, Mapping) and part:
        wrong, value = next(
            (k, v) for k, v in part.items() if not (isinstance(k, str) and isinstance(v, Tensor))
        )
        raise CheckpointError(
            f"{wrong!r} in {source} is not the name of a tensor: its key is of type "
            f"{type(wrong).__name__}, its value {type(value).__name__}; expected a dict of tensors"
        )
    hint = f"; there are dicts of tensors under {_listed(others)}: choose with --key" * bool(others)
    raise CheckpointError(
        f"{source} should be a dict of tensors, or have one as 'state_dict': it is "
        f"{_describe(content)}{hint}"
    )


def _describe(content: Any) -> str:
    if isinstance(content, Mapping):
        keys = _listed(list(map(str, content)))
        return f"a dict with the keys {keys}" if content else "an empty dict"
    if isinstance(content, (list, tuple)):
        kinds = [type(item).__name__ for item in content]
        return f"a {type(content).__name__} of {len(kinds)} items ({_listed(kinds)})"
    return f"a {type(content).__name__}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
