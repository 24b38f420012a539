"""The golden cases: weights and tensors of the original implementation, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deq_zoo.lm import DEQTransformer, LMConfig
from deq_zoo.lm.convert import from_authors
from deq_zoo.lm.model import Memory
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
    """One of the two models, and what it said; token-major throughout."""

    def __init__(self, name: str, **config: Any) -> None:
        self.original = name == "deq-seq"
        told = load_facts(name)["config"]
        self.config = LMConfig(
            design="original" if self.original else "redesigned",
            tokens=told["n_token"],
            width=told["d_model"],
            heads=told["n_head"],
            inner=told["d_inner"],
            blocks=told["n_layer"],
            embed=told["d_embed"],
            cutoffs=tuple(told["cutoffs"]),
            shrink=told["div_val"],
            position_dropout="offsets" if self.original else "features",
            **config,
        )
        self.weights = load_tensors(name, "state_dict")
        self.io = load_tensors(name, "io", torch.float64)

    def model(self, deq: dict[str, Any] | None = None) -> DEQTransformer:
        """The model with the golden weights."""
        deq = deq or (TIGHT if self.original else UNROLLED)
        model = DEQTransformer(self.config, deq).double()
        state = from_authors(self.config, self.weights)
        kept = {k: v for k, v in model.state_dict().items() if k.endswith("_extra_state")}
        model.load_state_dict(state | kept)
        return model.eval()

    def state(self, name: str) -> Tensor:
        """A tensor of states, injections or positions, tokens first."""
        value = self.io[name]
        return value.mT if self.original else value

    def injection(self, name: str) -> Tensor:
        """An injection in our order of queries, keys and values."""
        u = self.state(name)
        if self.original:
            return u
        return u.unflatten(2, (self.config.heads, 3, -1)).transpose(2, 3).flatten(2)

    def memory(self, segment: int) -> Memory | None:
        """The memory given to a segment."""
        if segment == 0:
            return None
        z, u = self.state(f"seg{segment}.z_hist"), self.injection(f"seg{segment}.u_hist")
        return Memory(z, u)

    def mask(self, name: str) -> Tensor:
        """A dropout mask, for our layout."""
        value = self.io[f"drop.mask.{name}"]
        swapped = self.original and name.split(".")[-1] in ("drop", "pos_drop", "iodrop_output")
        return value.mT if swapped else value
