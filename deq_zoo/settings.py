"""Settings: the fields below a configuration by their dotted names, and changes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from deq_zoo.errors import ZooError
from deq_zoo.parsing import parse_value
from deq_zoo.preset import Preset
from deq_zoo.spelling import suggest
from deq_zoo.uses import UnusedOptions, check_chosen
from torchdeq import DEQConfig

_DEQ = "task.deq."  # how paths of options of the equilibrium begin
_EITHER = {"steps": "epochs", "epochs": "steps"}  # of a preset


class Field(NamedTuple):
    """A field somewhere below a configuration.

    Args:
        owner: the dataclass that has it.
        name: the name in `owner`.
        path: the dotted name from the configuration on.
        kind: the type.
        value: the value.
    """

    owner: Any
    name: str
    path: str
    kind: Any
    value: Any


def walk(config: Any, prefix: str = "") -> Iterator[Field]:
    """Yield every field below a configuration that is not a configuration itself."""
    hints = get_type_hints(type(config))
    for f in fields(config):
        if not f.init:
            continue
        path, value = f"{prefix}{f.name}", getattr(config, f.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from walk(value, f"{path}.")
        else:
            yield Field(config, f.name, path, hints[f.name], value)


def with_settings(config: Any, settings: Sequence[str], all_names: str = "") -> Any:
    """Return a configuration with `path=value` settings applied.

    A path may be shortened to its last parts as long as one field alone ends with them. All are
    applied together, since one may need another that comes after it. Of `steps` and `epochs`, one
    may be set: it replaces the other.

    Args:
        config: the configuration.
        settings: the changes.
        all_names: where users read the names of all settings, for errors.
    """
    changes = _parse_settings(config, settings, all_names)
    return _replace(config, changes) if changes else config


def _parse_settings(config: Any, settings: Sequence[str], all_names: str) -> dict[str, Any]:
    """Return the values of settings by the paths of their fields; see `with_settings`."""
    parsed: list[tuple[str, Any]] = []
    kinds = {field.path: field.kind for field in walk(config)}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ZooError(f"a setting reads key=value, got {setting!r}")
        path = _complete(name, kinds, all_names)
        parsed.append((path, parse_value(text, kinds[path], path)))
    exclusive = [path for path, new in parsed if path in _EITHER and new]
    if len(set(exclusive)) > 1:
        raise ZooError(f"give either {' or '.join(_EITHER)}, got both")
    changes: dict[str, Any] = {}
    # Zeros of fields that exclude each other come last: by then the other one is set.
    for path, new in sorted(parsed, key=lambda item: item[0] in _EITHER and not item[1]):
        other = _EITHER.get(path)
        if other is None or other not in kinds:
            changes[path] = new
        elif new:
            changes |= {other: 0, path: new}
        elif not changes.get(other, getattr(config, other)):
            changes[path] = new
    return changes


def _complete(name: str, paths: Iterable[str], all_names: str) -> str:
    """Return the one path that a name stands for."""
    paths = list(paths)
    if name in paths:
        return name
    ends = [path for path in paths if path.endswith(f".{name}")]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ZooError(f"the setting {name!r} could be any of {', '.join(ends)}: name it in full")
    last = name.rsplit(".", 1)[-1]
    elsewhere = [path for path in paths if path.rsplit(".", 1)[-1] == last]
    if elsewhere:
        hint = f"; did you mean {elsewhere[0]!r}?"
    else:
        hint = suggest(last, (path.rsplit(".", 1)[-1] for path in paths), all_names)
    raise ZooError(f"unknown setting {name!r}{hint}")


def _replace(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a configuration with the fields at these paths below it replaced."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, new in changes.items():
        head, _, rest = path.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = new
        else:
            own[head] = new
    for head, inner in below.items():
        own[head] = _replace(own.get(head, getattr(config, head)), inner)
    try:
        if isinstance(config, DEQConfig):
            return config.with_options(**own)
        return replace(config, **own)
    except (ValueError, TypeError, KeyError) as error:
        given = {path: new for path, new in changes.items() if not isinstance(new, DEQConfig)}
        settings = ", ".join(f"{path}={new!r}" for path, new in given.items())
        raise ZooError(f"{settings}: {error}" if settings else str(error)) from None


def change_settings(preset: Preset, settings: Mapping[str, Any]) -> Preset:
    """Return a preset with settings changed; raise `ZooError` for one that is unknown or wrong.

    Args:
        preset: the preset.
        settings: values by name. A name is shortened as for `--set` (`lr` is `optim.lr`); options
            of the equilibrium have their own names, and `data_dir` is a folder.
    """
    deq = {name: value for name, value in settings.items() if name in DEQConfig.names()}
    others = [f"{k}={v}" for k, v in settings.items() if k not in deq and k != "data_dir"]
    return change_preset(preset, others, deq, settings.get("data_dir"))


def change_preset(
    preset: Preset,
    settings: Sequence[str],
    deq: Mapping[str, Any],
    data_dir: str | Path | None,
    all_names: str = "",
) -> Preset:
    """Return a preset with options of the equilibrium, other settings and then its data changed.

    Options and settings are applied together: one may need the other to have an effect. Another
    precision brings tolerances that it can meet, unless these changes set them.

    Args:
        preset: the preset.
        settings: `path=value`, see `with_settings`.
        deq: options of the equilibrium by name.
        data_dir: the folder of the data; None leaves it.
        all_names: where users read the names of all settings, for errors.
    """
    own = _parse_settings(preset, settings, all_names)
    options = {**deq, **{p.removeprefix(_DEQ): v for p, v in own.items() if p.startswith(_DEQ)}}
    changes = {path: new for path, new in own.items() if not path.startswith(_DEQ)}
    if options:
        changes["task.deq"] = preset.change_deq(**options)
    result: Preset = _replace(preset, changes) if changes else preset
    former, now = (getattr(each.task, "data_dir", None) for each in (preset, result))
    folder = now if data_dir is None and now != former else data_dir
    if folder is not None:
        result = result.with_data_dir(folder)
    named = {*options, *own}
    if result.precision != preset.precision:
        result = result.with_reachable_tolerances(named)
    try:
        check_chosen(result.task, named)
    except UnusedOptions as error:
        raise ZooError(str(error)) from None
    return result.with_deq()  # checks options of the equilibrium among `settings`
