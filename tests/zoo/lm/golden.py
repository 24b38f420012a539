"""The two golden models: weights and tensors of the original implementation, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deq_zoo.lm import DEQTransformer, LMConfig, Memory
from deq_zoo.lm.convert import from_authors
from tests.golden import load_facts, load_tensors

TIGHT: dict[str, Any] = {
    "ift": True,
    "f_solver": "anderson",
    "b_solver": "gmres",
    "f_max_iter": 400,
    "f_tol": 1e-14,
    "f_stop_mode": "rel",
    "b_max_iter": 400,
    "b_tol": 1e-14,
    "on_failure": "ignore",
}
UNROLLED: dict[str, Any] = {"f_max_iter": 0, "grad": [12], "eval_f_max_iter": 12, "f_tol": 0.0}


class Golden:
    """One of the two models with its inputs and outputs; token-major throughout."""

    def __init__(self, name: str, **config: Any) -> None:
        self.original = name == "deq-seq"
        facts = load_facts(name)["config"]
        self.config = LMConfig(
            design="original" if self.original else "redesigned",
            tokens=facts["n_token"],
            width=facts["d_model"],
            heads=facts["n_head"],
            inner=facts["d_inner"],
            blocks=facts["n_layer"],
            embed=facts["d_embed"],
            cutoffs=tuple(facts["cutoffs"]),
            shrink=facts["div_val"],
            position_dropout="offsets" if self.original else "features",
            **config,
        )
        self.weights = load_tensors(name, "state_dict")
        self.io = load_tensors(name, "io", torch.float64)

    def make_model(self, deq: dict[str, Any] | None = None) -> DEQTransformer:
        """Build the model with the golden weights."""
        deq = deq or (TIGHT if self.original else UNROLLED)
        model = DEQTransformer(self.config, deq).double()
        state = from_authors(self.config, self.weights)
        extra = {k: v for k, v in model.state_dict().items() if k.endswith("_extra_state")}
        model.load_state_dict(state | extra)
        return model.eval()

    def read_state(self, name: str) -> Tensor:
        """Return a tensor of states, injections or positions, tokens first."""
        value = self.io[name]
        return value.mT if self.original else value

    def read_injection(self, name: str) -> Tensor:
        """Return an injection in our order of queries, keys and values."""
        u = self.read_state(name)
        if self.original:
            return u
        return u.unflatten(2, (self.config.heads, 3, -1)).transpose(2, 3).flatten(2)

    def read_memory(self, segment: int) -> Memory | None:
        """Return the memory given to a segment."""
        if segment == 0:
            return None
        z, u = self.read_state(f"seg{segment}.z_hist"), self.read_injection(f"seg{segment}.u_hist")
        return Memory(z, u)

    def read_mask(self, name: str) -> Tensor:
        """Return a dropout mask in our layout."""
        value = self.io[f"drop.mask.{name}"]
        swapped = self.original and name.split(".")[-1] in ("drop", "pos_drop", "iodrop_output")
        return value.mT if swapped else value
