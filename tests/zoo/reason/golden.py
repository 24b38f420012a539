"""The published models with given weights, and numbers that the authors' programs computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deq_zoo.reason.carry import Carry, Exploration, Puzzles
from deq_zoo.reason.config import ReasonConfig
from deq_zoo.reason.convert import from_authors
from deq_zoo.reason.core import States
from deq_zoo.reason.model import Reasoner
from tests.golden import assert_matches, load_facts, load_tensors

NAMES = ("eqr_mlp", "eqr_att", "eqr_slots", "trm_mlp", "trm_att", "hrm")


def config_of(published: dict[str, Any], kind: str) -> ReasonConfig:
    """Return the shape that a configuration of the authors' programs describes."""
    return ReasonConfig(
        kind=kind,  # type: ignore[arg-type]
        cells=published["seq_len"],
        vocab=published["vocab_size"],
        width=published["hidden_size"],
        heads=8 if published.get("mlp_t") else published["num_heads"],
        blocks=published["L_layers"],
        answer_blocks=published["H_layers"],
        mixer="mlp" if published.get("mlp_t") else "attention",
        position=published["pos_encodings"],
        rounds=published["H_cycles"],
        inner=published["L_cycles"],
        max_steps=published["halt_max_steps"],
        slots=published.get("puzzle_emb_len", 0),
        puzzle_width=published.get("puzzle_emb_ndim", 0),
        puzzle_ids=published.get("num_puzzle_identifiers", 1),
        step_share=published.get("lambda_", 0.95),
        noise=published.get("noise_scale", 0.0),
        exploration=published["halt_exploration_prob"],
    )


class Golden:
    """One of the published models in float64.

    Args:
        name: of the model.
        noise: standard deviation of EqR's noise.
        **given: options of `Reasoner`.
    """

    def __init__(self, name: str, noise: float = 0.0, **given: Any) -> None:
        facts = load_facts("reason")["models"][name]
        self.order: list[str] = facts["parameter_order"]
        self.net = config_of(facts["config"] | {"noise_scale": noise}, name.partition("_")[0])
        self.io = load_tensors("reason", f"{name}_io", torch.float64)
        self.weights = load_tensors("reason", f"{name}_weights", torch.float64)
        options: dict[str, Any] = {"deq": {"f_max_iter": 1}, "decay": 0.9, **given}
        self.model = Reasoner(self.net, **options).double()
        self.model.load_state_dict(from_authors(self.model, self.weights))

    def has(self, name: str) -> bool:
        return any(key == name or key.startswith(f"{name}|") for key in self.io)

    def compare(self, name: str, value: Tensor) -> None:
        """Compare a tensor with a golden one, or with the summaries of it."""
        expected = {k: v for k, v in self.io.items() if k == name or k.startswith(f"{name}|")}
        assert expected, name
        for key, golden in expected.items():
            assert_matches(summarise(value.detach(), key.partition("|")[2]), golden)

    def puzzles(self, prefix: str, index: int | None = None) -> Puzzles:
        tokens, labels = self._given(prefix, "inputs", index), self._given(prefix, "labels", index)
        if f"{prefix}/puzzle_identifiers" in self.io:
            ids = self._given(prefix, "puzzle_identifiers", index)
        else:
            ids = torch.zeros(len(tokens), dtype=torch.long)
        return Puzzles(tokens.long(), labels.long(), ids.long())

    def start(self, prefix: str, index: int | None = None) -> States:
        if self.net.kind != "eqr":
            return self.model.start(len(self.io["batch1/inputs"]))
        return States(self._given(prefix, "init_y", index), self._given(prefix, "init_z", index))

    def drawn(self, prefix: str, index: int | None = None) -> Exploration:
        least = self._given(prefix, "draw_k", index).long()
        return Exploration(self._given(prefix, "draw_u", index), least)

    def _given(self, prefix: str, name: str, index: int | None) -> Tensor:
        t = self.io[f"{prefix}/{name}"]
        return t if index is None else t[index]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained parameters under the authors' names, in the authors' order."""
        own = {f"model.inner.{name}": p for name, p in self.model.core.named_parameters()}
        assert own.keys() == set(self.order)
        yield from ((name, own[name]) for name in self.order)


def summarise(t: Tensor, how: str) -> Tensor:
    if not how:
        return t
    return t.norm() if how == "norm" else t.flatten()[:: int(how.removeprefix("every"))]


def check_carry(golden: Golden, prefix: str, carry: Carry) -> None:
    """Compare what training carries on with golden tensors."""
    assert carry.states is not None
    golden.compare(f"{prefix}/y", carry.states.y)
    golden.compare(f"{prefix}/z", carry.states.z)
    io = golden.io
    assert carry.steps.tolist() == io[f"{prefix}/steps"].tolist()
    assert carry.halted.tolist() == io[f"{prefix}/halted"].bool().tolist()
    assert carry.puzzles.tokens.tolist() == io[f"{prefix}/cur_inputs"].tolist()
    assert carry.puzzles.labels.tolist() == io[f"{prefix}/cur_labels"].tolist()
    if f"{prefix}/cur_ids" in io:
        assert carry.puzzles.ids.tolist() == io[f"{prefix}/cur_ids"].tolist()
