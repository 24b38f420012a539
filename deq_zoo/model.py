"""The base of the zoo's models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.output import Output

if TYPE_CHECKING:
    from deq_zoo.preset import Preset

#: A matrix of a linear map or any other weight; `core_` if an equilibrium uses it.
WeightKind = Literal["matrix", "vector", "core_matrix", "core_vector"]


class Model(nn.Module):
    """A network with an equilibrium inside.

    `forward(x, z0=None, **call)` returns an `Output`; `z0` is a state to start from, `**call` are
    options of this call of the DEQ, e.g. `f_max_iter=30`.

    Attributes:
        facts: what the checkpoint says about the data the model was trained with, e.g. names of
            classes; see `Task.facts`.
        preset: the preset it was trained with, if it comes from a run or a checkpoint.
        origin: the checkpoint file that its weights come from, if they come from one.
    """

    facts: Mapping[str, Any]
    preset: Preset | None
    origin: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self.facts = {}
        self.preset = None

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        return next(self.parameters()).device

    def shard_units(self) -> Iterable[nn.Module]:
        """Return modules whose weights `parallel=fsdp` gathers just for their forward pass.

        All other weights are gathered for the whole computation of a loss, which is right for every
        model. A unit saves memory where its forward pass ends before the loss does. Each process
        must call each unit equally often, so no unit may be inside a solve.
        """
        return ()

    def copied_weights(self) -> Mapping[str, str]:
        """Return the names of buffers that are copies of parameters, with the names of these.

        With `parallel=fsdp` they are shared out as the parameters are, e.g. an average of weights.
        """
        return {}

    def weight_kind(self, name: str) -> WeightKind:
        """Return what a parameter is, by its name in `named_parameters`; see `Muon`.

        By default the weights of linear layers are matrices, and all others vectors.
        """
        owner, _, own = name.rpartition(".")
        linear = own == "weight" and isinstance(self.get_submodule(owner), nn.Linear)
        return "matrix" if linear else "vector"

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of the parameters."""
        return next(self.parameters()).dtype

    def place(self, t: Tensor) -> Tensor:
        """Return a tensor on the device of the parameters; one of floats comes in their dtype."""
        return t.to(self.device, self.dtype if t.is_floating_point() else t.dtype)

    def predict(self, x: Any, z0: Any = None, **call: Any) -> Output[Any, Any]:
        """Return the output for one input as users have it, e.g. the path of an image.

        Dropout is off and there is no graph; the model is left in the mode it was in. The single
        `prediction` of the output is in units of the user: names of classes, pixels, text.

        Args:
            x: the input; each family says which kinds it takes.
            z0: a state to start from, e.g. `state` of an earlier output.
            **call: options of this call of the DEQ, e.g. `f_max_iter=30`.
        """
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                return self._predict(x, z0, **call)
        finally:
            self.train(training)

    def _predict(self, x: Any, z0: Any, **call: Any) -> Output[Any, Any]:
        """Implement `predict`, in evaluation mode and without a graph."""
        raise ZooError(f"{type(self).__name__} has nothing to predict")

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> Self:
        """Return a saved model in evaluation mode, with its `preset` and `facts`.

        `Model.from_pretrained` takes a model of any class; on a subclass, a model of another class
        is an error. The checkpoint's checksum is verified, and no code of the files is run.

        Args:
            source: a folder that `save_pretrained` wrote, a run folder or a checkpoint file; the
                name of a pretrained model, e.g. `mdeq-digits`; or the name of a repository on the
                Hugging Face Hub, e.g. `user/name`.
            revision: branch, tag or commit of the repository.
            cache_dir: where downloads are kept; by default the cache of huggingface_hub.
            local_files_only: do not use the network: the cache must have the files.
            token: for private repositories; by default the one that `hf auth login` stored.
        """
        model = _hub().from_pretrained(cls, source, revision, cache_dir, local_files_only, token)
        assert isinstance(model, cls)
        return model

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model to a folder that `from_pretrained`, `deq_zoo.load` and `deq-zoo` take.

        The folder gets `model.safetensors` (a checkpoint with weights, preset, facts, results and a
        checksum), `config.json` (the settings) and `README.md` (a model card). The results are
        those that the run logged on test data, if the model still has the weights that were
        scored. `data_dir`, a folder of this machine, is left out of the settings.

        A saved model in the folder is replaced, a card that was edited since stays; files of others
        with these names are an error.

        Args:
            folder: where to write; it is made.
        """
        _hub().save_pretrained(self, Path(folder))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload a model of deq_zoo",
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload the files of `save_pretrained` to the Hugging Face Hub in one commit.

        The repository is made if it does not exist. One that has a model of another library is an
        error; a model card that was edited there stays.

        Args:
            repo_id: the name of the repository, e.g. `user/name`.
            commit_message: of the commit.
            private: whether a new repository is private; None follows the account.
            token: with the right to write; by default the one that `hf auth login` stored.
            revision: the branch; by default the main one. A new branch is made.
            create_pr: propose the commit instead of making it.

        Returns:
            The address of the commit or proposal.
        """
        address: str = _hub().push_to_hub(
            self, repo_id, commit_message, private, token, revision, create_pr
        )
        return address


def _hub() -> Any:
    """Import `deq_zoo.hub`, by name and late: it builds models, so it is above this module."""
    return import_module("deq_zoo.hub")
