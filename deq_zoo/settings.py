"""Settings of a preset by keyword, as `--set` and the paper's flags change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deq_zoo.preset import Preset
from deq_zoo.values import with_settings
from torchdeq import DEQConfig


def change_settings(preset: Preset, settings: Mapping[str, Any]) -> Preset:
    """Return a preset with settings changed; raise `ZooError` for one that is unknown or wrong.

    Args:
        preset: the preset.
        settings: values by name. A name is shortened as for `--set` (`lr` is `optim.lr`); options
            of the equilibrium have their own names, and `data_dir` is a folder.
    """
    options = {name: value for name, value in settings.items() if name in DEQConfig.names()}
    others = [
        f"{name}={value}"
        for name, value in settings.items()
        if name not in options and name != "data_dir"
    ]
    changed = preset.with_deq(**options) if options else preset
    if settings.get("data_dir") is not None:
        changed = changed.with_data_dir(settings["data_dir"])
    result: Preset = with_settings(changed, others)
    return result.with_deq()  # checks options of the equilibrium among `others`
