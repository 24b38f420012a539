"""The options of a norm: fields of its class, set by keywords or by command-line flags."""

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


def read_options(norm: Any, args: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the dataclass `norm` that keywords (in either spelling) and `args` set.

    `args` stands for the command line and overrides the keywords, as in torchdeq 0.1.0, with a
    warning if they differ: a Namespace contains every flag, whether the user set it or not.
    """
    names = {f.name for f in fields(norm)} - {"names", "dims"}
    flags = {flag: name for flag, name in FLAGS.items() if name in names}
    options: dict[str, Any] = {}
    for key, value in keywords.items():
        name = flags.get(key, key)
        if name not in names:
            tail = suggest(key, [*names, *flags])
            raise TypeError(f"{norm.__name__} has no option {key!r}{tail}")
        if name in options:
            raise TypeError(f"{key!r} and its other name set the same option: pass one of them")
        options[name] = _field_value(key, value)
    config = args if isinstance(args, DEQConfig) else DEQConfig(args)
    for flag, name in flags.items():
        value = config.get(flag)
        if value is None:
            continue
        value = _field_value(flag, value)
        if options.get(name, value) != value:
            warnings.warn(
                f"{name}={options[name]} is overridden by {flag} in args ({name}={value}): "
                "leave one of them out",
                stacklevel=stack_level(),
            )
        options[name] = value
    return options


def _field_value(key: str, value: Any) -> Any:
    """Return the value of the field that a keyword or flag sets; one flag negates its field."""
    return not value if key == "norm_no_scale" else value
