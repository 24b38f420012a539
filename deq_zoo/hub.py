"""Saving and loading models as the Hugging Face Hub has them: folders and repositories.

`Model` has these functions as methods. It does not inherit from `huggingface_hub.ModelHubMixin`,
whose names and meanings they follow. The mixin's `save_pretrained` deletes a `config.json` that is
not ours, its `__new__` copies every argument of a model's constructor, its `__init_subclass__` runs
for the classes that `fully_shard` makes, and every command would take a third of a second longer to
import it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from deq_zoo.checkpoint import Checkpoint
from deq_zoo.errors import ZooError
from deq_zoo.files import write_atomically
from deq_zoo.finite import check_parameters
from deq_zoo.loading import open_model
from deq_zoo.model import Model
from deq_zoo.model_card import Subject, without_data_dir, write_card
from deq_zoo.origin import find_origin
from deq_zoo.packages import optional
from deq_zoo.preset import Preset
from deq_zoo.pretrained import as_source, find_weights, is_pretrained
from deq_zoo.saved_model import (
    CARD,
    CONFIG,
    FILES,
    FORMAT,
    WEIGHTS,
    card_digest,
    check_replaceable,
    is_own_card,
    is_saved_model,
    read_config,
)
from deq_zoo.tree import local
from deq_zoo.values import to_data
from torchdeq import __version__

_log = logging.getLogger("deq_zoo")


def save_pretrained(model: Model, folder: Path, source: str = "FOLDER") -> None:
    """Write a model to a folder; see `Model.save_pretrained`.

    Args:
        model: the model.
        folder: where to write.
        source: what the model card loads.
    """
    check_replaceable(folder)
    preset = _saved_preset(model)
    origin = find_origin(model, preset)
    config = {"name": origin.name, "preset": to_data(preset)}
    notes = {} if origin.results is None else {"results": origin.results}
    checkpoint = Checkpoint(
        origin.step, model.state_dict(), notes=notes, config=config, facts=dict(model.facts)
    )
    size = sum(p.numel() for p in model.parameters())
    kind = type(model).__name__
    card = write_card(Subject(origin.name, preset, kind, size, origin.step, origin.results, source))
    keeps_card = _keeps_card(folder / CARD, read_config(folder / CONFIG))
    checkpoint.save(folder / WEIGHTS)
    if not keeps_card:
        write_atomically(folder / CARD, card)
    # Last: this file marks the folder as a saved model.
    described = {
        "format": FORMAT,
        "library_name": "torchdeq",
        "torchdeq_version": __version__,
        "architecture": kind,
        "name": origin.name,
        "settings": config["preset"],
        "card": card_digest(card),
    }
    write_atomically(folder / CONFIG, json.dumps(described, indent=1) + "\n")


def from_pretrained(
    kind: type[Model],
    source: str | Path,
    revision: str | None,
    cache_dir: str | Path | None,
    local_files_only: bool,
    token: str | bool | None,
) -> Model:
    """Return the model in a folder or repository; see `Model.from_pretrained`."""
    path = as_source(source)
    if path.exists() or is_pretrained(path):
        if revision is not None:
            raise ZooError(f"{path} is on this machine and has no revision {revision!r}: drop it")
    elif "/" not in str(source):  # repositories are OWNER/NAME
        path = find_weights(path)  # raises, and says which names are near
    else:
        path = _download(str(source), revision, cache_dir, local_files_only, token)
        if not is_saved_model(path):
            raise ZooError(f"the repository {source} has no model that deq_zoo saved")
    model, _ = open_model(path)
    if not isinstance(model, kind):
        actual = type(model).__name__
        raise ZooError(
            f"{source} has a model of the class {actual}, not {kind.__name__}: use "
            f"{actual}.from_pretrained, or Model.from_pretrained for any model"
        )
    return model


def push_to_hub(
    model: Model,
    repo_id: str,
    commit_message: str,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    create_pr: bool,
) -> str:
    """Upload a model and return the address of the commit; see `Model.push_to_hub`."""
    hub = optional("huggingface_hub", "frame", "uploads")
    _saved_preset(model)  # an error before anything is made
    with TemporaryDirectory() as temporary, _readable_errors(f"{repo_id} was not uploaded", token):
        folder = Path(temporary) / "model"
        api = hub.HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        save_pretrained(model, folder, repo_id)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        keeps_card = _keeps_remote_card(api, repo_id, revision)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            allow_patterns=[name for name in FILES if not (name == CARD and keeps_card)],
        )
        return str(commit.pr_url or commit.commit_url)


def _saved_preset(model: Model) -> Preset:
    """Return the preset to save with a model; raise `ZooError` if it could not be loaded again."""
    kind = type(model).__name__
    if model.preset is None:
        raise ZooError(
            f"this {kind} has no preset, from which it could be built again: set model.preset to a "
            "Preset whose task builds it"
        )
    if any(local(t) is not t for t in model.parameters()):
        raise ZooError(
            f"the weights of this {kind} are shared out between processes: save the model that "
            "deq_zoo.load returns for the run"
        )
    check_parameters(model)
    if model.dtype == torch.float64 and model.preset.precision != "float64":
        raise ZooError(
            f"this {kind} has weights in float64, and its preset the precision "
            f"{model.preset.precision!r}, in which it would be loaded: call model.float(), or set "
            "precision='float64' in model.preset"
        )
    return without_data_dir(model.preset)


def _keeps_card(card: Path, config: dict[str, Any] | None) -> bool:
    """Return whether there is a model card that we did not write, or that was edited."""
    if not card.exists() or is_own_card(card, config):
        return False
    _log.warning("%s was edited and stays as it is; it may name results of other weights", card)
    return True


def _keeps_remote_card(api: Any, repo_id: str, revision: str | None) -> bool:
    """Return whether a repository has a model card to keep; raise if its model is not ours."""
    present = set(api.list_repo_files(repo_id, revision=revision))
    config = None
    if CONFIG in present:
        config = read_config(Path(api.hf_hub_download(repo_id, CONFIG, revision=revision)))
    foreign = [name for name in (WEIGHTS, CONFIG) if name in present]
    if foreign and config is None:
        raise ZooError(
            f"the repository {repo_id} has a {' and a '.join(foreign)} that deq_zoo did not write: "
            "choose another repository"
        )
    if CARD not in present:
        return False
    return _keeps_card(Path(api.hf_hub_download(repo_id, CARD, revision=revision)), config)


def _download(
    repo_id: str,
    revision: str | None,
    cache_dir: str | Path | None,
    local_files_only: bool,
    token: str | bool | None,
) -> Path:
    """Return a folder of the cache with the files of a repository."""
    hub = optional("huggingface_hub", "frame", "models of repositories")
    what = f"there is no folder {repo_id}, and the Hub has no such model"
    with _readable_errors(what, token):
        folder = hub.snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            token=token,
            allow_patterns=list(FILES),
        )
    return Path(folder)


@contextmanager
def _readable_errors(what: str, token: str | bool | None) -> Iterator[None]:
    """Raise every error of the Hub as a `ZooError` of one paragraph that shows no token."""
    try:
        yield
    except ZooError:
        raise
    except Exception as error:  # connections, permissions, names: classes of several packages
        reason = " ".join(str(error).split())
        if isinstance(token, str) and token:
            reason = reason.replace(token, "[token]")
        raise ZooError(f"{what}: {reason}") from None
