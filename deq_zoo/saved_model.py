"""Folders that `save_pretrained` writes: weights, configuration and model card.

`model.safetensors` is a checkpoint of the zoo, with preset, facts, results and checksum; loading
reads it alone. `config.json` repeats the settings for people and programs, and marks the folder as
ours; one that disagrees with the checkpoint is an error. `README.md` is the model card.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import CheckpointError, ZooError

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
FILES = (WEIGHTS, CONFIG, CARD)
FORMAT = "deq-zoo model 1"
_FORMATS = "deq-zoo model "


def is_saved_model(folder: Path) -> bool:
    """Return whether a folder is one that `save_pretrained` wrote."""
    return read_config(folder / CONFIG) is not None


def read_config(file: Path) -> dict[str, Any] | None:
    """Return the configuration of a saved model; None if the file is anything else."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(config, dict) and str(config.get("format")).startswith(_FORMATS)
    return config if ours else None


def read_saved_model(folder: Path) -> Checkpoint:
    """Return the checkpoint of a saved model; raise `CheckpointError` if it is damaged."""
    config = read_config(folder / CONFIG)
    if config is None:
        raise CheckpointError(f"{folder} is not a folder that save_pretrained wrote")
    if config["format"] != FORMAT:
        raise CheckpointError(
            f"{folder} has the format {config['format']!r}, and this version reads {FORMAT!r}: "
            "install the version of torchdeq that wrote it"
        )
    checkpoint = Checkpoint.load(folder / WEIGHTS)
    for ours, theirs in (("settings", "preset"), ("name", "name")):
        if config.get(ours) != checkpoint.config.get(theirs):
            raise CheckpointError(
                f"{folder / CONFIG} and {WEIGHTS} have different {ours}: one of the files was "
                "changed or comes from another model; save the model again"
            )
    return checkpoint


def check_replaceable(folder: Path) -> None:
    """Raise `ZooError` if saving in a folder would replace files that are no saved model's."""
    if folder.exists() and not folder.is_dir():
        raise ZooError(f"{folder} is a file: choose a folder to save the model in")
    if is_saved_model(folder):
        return
    foreign = [name for name in (WEIGHTS, CONFIG) if (folder / name).exists()]
    if foreign:
        raise ZooError(
            f"{folder} has a {' and a '.join(foreign)} that save_pretrained did not write: choose "
            "another folder"
        )


def is_own_card(card: Path, config: dict[str, Any] | None) -> bool:
    """Return whether a model card is as we wrote it: nobody has edited it since.

    Args:
        card: the file.
        config: the configuration of the saved model beside it, if there is one.
    """
    written = None if config is None else config.get("card")
    return written == card_digest(card.read_text(encoding="utf-8", errors="replace"))


def card_digest(text: str) -> str:
    """Return a checksum by which an edited model card is noticed."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
