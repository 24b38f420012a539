"""The two golden attractors: weights and tensors of the original implementation, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deq_zoo.lm.attractor.convert import from_authors
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.lexicon import Lexicon
from tests.golden import load_facts, load_tensors

TIGHT: dict[str, Any] = {
    "ift": True,
    "f_solver": "anderson",
    "b_solver": "gmres",
    "f_max_iter": 900,
    "f_tol": 1e-15,
    "f_stop_mode": "rel",
    "b_max_iter": 900,
    "b_tol": 1e-14,
    "on_failure": "ignore",
}


class Golden:
    """A variant, A or B, with its inputs and outputs."""

    def __init__(self, variant: str, **config: Any) -> None:
        facts = load_facts("attractor")
        self.variant, self.facts = variant, facts
        self.options = options = facts["variants"][variant]
        self.parameters: list[str] = facts["parameters"][variant]
        shape: dict[str, Any] = {
            "design": "attractor",
            "tokens": options["vocab_size"],
            "width": options["n_embd"],
            "heads": options["num_attention_heads"],
            "inner": options["intermediate_size"],
            "backbone": options["n_backbone_layers"],
            "blocks": options["n_fp_blocks"],
            "gate_max": options["gamma_max"],
            "gate_start": options["layer_scale_init"],
            "rotary_base": facts["rope_base"],
            "core_start": "random",
            "input_rms": 0.0,
            "dropout": 0.0,
        }
        self.config = LMConfig(**(shape | config))
        weights = load_tensors("attractor", "weights")
        unused = f"transformer.core_block.{self.config.blocks}."
        self.weights = {k: v for k, v in weights.items() if not k.startswith(unused)}
        self.io = load_tensors("attractor", "io")

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor of this variant, or one that both share."""
        own = f"{self.variant}/{name}"
        return self.io[own] if own in self.io else self.io[name]

    def make_model(self, deq: dict[str, Any] | None = None) -> Attractor:
        """Build the model with the golden weights."""
        model = Attractor(self.config, TIGHT if deq is None else deq).double()
        words = {"lexicon._extra_state": Lexicon().get_extra_state()}
        model.load_state_dict(from_authors(self.config, self.weights) | words)
        return model.eval()

    def published_options(self, **changes: Any) -> dict[str, Any]:
        """Return the options of the DEQ with which the authors trained this variant."""
        o = self.options
        own = {"m": o["anderson_m"], "tau": o["anderson_beta"]}
        solved = o["backward_type"] != "onestep"
        options: dict[str, Any] = {
            "f_solver": "anderson",
            "f_solver_kwargs": own,
            "f_max_iter": o["max_iter"],
            "f_tol": o["tol"],
            "f_stop_mode": "rel",
        }
        if solved:
            options |= {
                "ift": True,
                "b_solver": "anderson",
                "b_solver_kwargs": own,
                "b_max_iter": o["backward_max_iter"],
                "b_tol": o["backward_tol"],
            }
        return options | changes

    def gradients(self, model: Attractor) -> dict[str, Tensor]:
        """Return the gradients of a model under the authors' names."""
        own = {name: p.grad for name, p in model.named_parameters()}
        names = from_authors(self.config, {k: torch.empty(0) for k in self.parameters})
        pairs = zip(self.parameters, names, strict=True)
        grads = {theirs: own[ours] for theirs, ours in pairs}
        assert all(grad is not None for grad in grads.values())
        return grads  # type: ignore[return-value]

    def fingerprint(self, model: Attractor) -> Tensor:
        """Return norm, sum and a weighted sum of every gradient, (parameters, 3)."""
        rows = []
        for grad in self.gradients(model).values():
            flat = grad.flatten()
            wave = torch.cos(0.7 * torch.arange(len(flat), dtype=torch.float64) + 0.3)
            rows.append(torch.stack((flat.norm(), flat.sum(), flat @ wave)))
        return torch.stack(rows)

    def loss(self, model: Attractor, z: Tensor) -> Tensor:
        """Return the mean loss of states on the golden labels; -100 is padding."""
        labels = self["input/labels"]
        return model.nll(z, labels.clamp_min(0))[labels >= 0].mean()
