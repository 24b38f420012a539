"""Pretrained models: small weights that come with the package, found by their names.

A model has three files here. `NAME.safetensors` is a checkpoint without the state of training,
`NAME.json` has what was measured, `NAME.md` says the same for people. `python -m tools.pretrain`
in the repository writes all three from runs. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from deq_zoo.errors import ZooError
from deq_zoo.pretrained.cards import Card, read_card
from deq_zoo.spelling import did_you_mean

__all__ = [
    "FOLDER",
    "Card",
    "as_source",
    "find_weights",
    "is_pretrained",
    "names",
    "pretrained_card",
]

FOLDER = Path(__file__).parent
_log = logging.getLogger("deq_zoo")


def names() -> list[str]:
    """Return the names of all pretrained models."""
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def pretrained_card(name: str) -> Card:
    """Return the card of a pretrained model; raise `ZooError` if there is none of that name."""
    if name not in names():
        raise ZooError(f"there is no pretrained model {name!r}{_hint(name)}")
    return read_card(FOLDER / f"{name}.json")


def as_source(text: str | Path) -> Path:
    """Return what a user calls a model by as a path; `./NAME` and `NAME/` are paths, not names."""
    if not str(text):
        raise ZooError("a model has a name or a path, got nothing")
    path = Path(text)
    try:
        path.exists()
    except (OSError, ValueError) as error:  # too long, or with a null character
        raise ZooError(f"{str(text)[:40]!r}... is no name and no path: {error.args[-1]}") from None
    return path.absolute() if str(path) in names() and str(text) != str(path) else path


def is_pretrained(source: Path) -> bool:
    """Return whether `find_weights` takes a source for the name of a pretrained model."""
    return str(source) in names() and not _hides(source)


def find_weights(source: Path) -> Path:
    """Return the folder or file of a source: a run folder, a checkpoint, or a pretrained model.

    What is on disk wins: a run folder or a file `mdeq-digits` in the working directory hides the
    pretrained model of that name, and a warning of the log says so.
    """
    name = str(source)
    if name in names():
        if _hides(source):
            _log.warning("%s is taken from disk; it hides the pretrained model", source.absolute())
            return source
        return _verified(name)
    if _is_there(source):
        return source
    raise ZooError(
        f"there is no run folder or checkpoint at {source}, and no pretrained model of that name"
        f"{_hint(name)}"
    )


def _hides(source: Path) -> bool:
    """Return whether something that may be a model is at the path that a name is, too."""
    return (source / "config.json").exists() if source.is_dir() else _is_there(source)


def _is_there(source: Path) -> bool:
    return source.exists() or source.is_symlink()


def _verified(name: str) -> Path:
    """Return the weights of a pretrained model; raise `ZooError` if they are not its card's."""
    file = FOLDER / f"{name}.safetensors"
    card, digest = pretrained_card(name), hashlib.sha256(file.read_bytes()).hexdigest()
    if card.sha256 != digest:
        raise ZooError(
            f"the weights in {file} are not those that the card of {card.name} describes (SHA-256 "
            f"{digest[:12]}..., not {card.sha256[:12]}...): install the package again"
        )
    return file


def _hint(name: str) -> str:
    return did_you_mean(name, names()) or "; deq-zoo list --pretrained shows the models"
