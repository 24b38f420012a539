"""The options of a norm: fields of its class, set by keywords or by the flags of a program."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchdeq.callers import stack_level
from torchdeq.config import DEQConfig
from torchdeq.registry import suggest

FLAGS = {
    "norm_no_scale": "learn_scale",
    "norm_target_norm": "target_norm",
    "norm_clip": "clip",
    "norm_clip_value": "clip_value",
    "sn_n_power_iters": "n_power_iterations",
}


def read_options(norm: Any, args: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the dataclass ``norm`` set by keywords, in either spelling, and by ``args``.

    A Namespace holds every flag, asked for or not, and stands for the command line: it wins, as in
    torchdeq 0.1.0, and a difference warns.
    """
    known = {f.name for f in fields(norm)} - {"names", "dims"}
    flags = {flag: name for flag, name in FLAGS.items() if name in known}
    options: dict[str, Any] = {}
    for key, value in given.items():
        name = flags.get(key, key)
        if name not in known:
            tail = suggest(key, [*known, *flags])
            raise TypeError(f"{norm.__name__} has no option {key!r}{tail}")
        if name in options:
            raise TypeError(f"{key!r} and its other name both set one option: give one of them")
        options[name] = _meant(key, value)
    config = args if isinstance(args, DEQConfig) else DEQConfig(args)
    for flag, name in flags.items():
        value = config.get(flag)
        if value is None:
            continue
        value = _meant(flag, value)
        if options.get(name, value) != value:
            warnings.warn(
                f"{name}={options[name]} is overruled by {flag} in args ({name}={value}): "
                "leave one of them out",
                stacklevel=stack_level(),
            )
        options[name] = value
    return options


def _meant(key: str, value: Any) -> Any:
    return not value if key == "norm_no_scale" else value
