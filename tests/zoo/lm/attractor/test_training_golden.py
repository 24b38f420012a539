"""Muon, AdamW and eight published training steps against the authors' numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from deq_zoo.muon import Muon, MuonAdamW, orthogonalised
from tests.golden import load_tensors
from tests.zoo.lm.attractor.golden import Golden

EXACT: dict[str, Any] = {"atol": 1e-12, "rtol": 0}


@pytest.mark.parametrize(
    ("names", "rule", "lr", "decay"),
    [
        (("muon0", "muon1", "muon2", "muon3"), "muon", 8e-3, 0.2),
        (("adamw0",), "adamw", 4e-3, 0.1),
        (("adamw1",), "adamw", 8e-3, 0.0),
    ],
)
def test_golden_updates_of_muon_and_adamw_are_reproduced(
    names: tuple[str, ...], rule: str, lr: float, decay: float
) -> None:
    io = load_tensors("attractor", "io")
    weights = {name: nn.Parameter(io[f"optim/{name}/p0"].clone()) for name in names}
    group = {"params": list(weights.values()), "rule": rule, "lr": lr, "weight_decay": decay}
    optimizer = MuonAdamW([group | {"momentum": 0.9, "betas": (0.8, 0.95), "eps": 1e-10}])
    for k in range(4):
        for name, p in weights.items():
            p.grad = io[f"optim/{name}/grads"][k].clone()
        optimizer.step()
        for name, p in weights.items():
            torch.testing.assert_close(p.detach(), io[f"optim/{name}/p"][k], **EXACT)


def train(golden: Golden) -> Iterator[list[float]]:
    """Yield loss, gradient norm, evaluations and rate of each published training step."""
    model = golden.make_model(golden.published_options()).train()
    optim, steps = Muon(), 8
    optimizer = optim.make_for(model)
    for k in range(steps):
        rate = optim.set_rate(optimizer, k, steps)
        out = model(golden["input/ids"])
        loss = golden.loss(model, out.z)
        model.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
        yield [float(loss.detach()), float(norm), out.stats.nfe, rate]
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1.0, 1 / (float(norm) + 1e-6)))
        if k:  # the authors discard their first gradient
            optimizer.step()


def test_golden_training_run_is_reproduced() -> None:
    golden = Golden("A", mixing="published")
    rows = torch.tensor(list(train(golden)), dtype=torch.float64)
    torch.testing.assert_close(rows, golden["train"], atol=1e-9, rtol=0)


def test_every_weight_of_an_attractor_has_the_published_rule() -> None:
    golden = Golden("A")
    model, optim = golden.make_model(), Muon()
    names = {p: name for name, p in model.named_parameters()}
    groups = [
        (group["rule"], group["lr"], group["weight_decay"], {names[p] for p in group["params"]})
        for group in optim.make_for(model).param_groups
    ]
    expected: list[tuple[str, float, float, set[str]]] = []
    for group in golden.facts["optimizer_groups_variant_A"]:
        ours = {
            name.replace("transformer.wte", "vocabulary").replace("transformer.ln_f", "output_norm")
            .replace("transformer.core_block", "core").removeprefix("transformer.")
            for name in group["params"]
        }  # fmt: skip
        row = (group["kind"], group["lr"], group["weight_decay"], ours)
        if expected and expected[-1][:3] == row[:3]:  # theirs have one group for each shape
            row = (*row[:3], expected.pop()[3] | ours)
        expected.append(row)
    assert groups == expected


def test_matrices_of_the_equilibrium_may_have_the_rule_of_the_others() -> None:
    model = Golden("A").make_model()
    names = {p: name for name, p in model.named_parameters()}
    rules: dict[str, str] = {}
    optim = Muon(core_muon=True, matrix_lr=4e-3, core_factor=0.5, weight_decay=0.3)
    for group in optim.make_for(model).param_groups:
        rules |= {names[p]: group["rule"] for p in group["params"]}
        if group["rule"] == "muon":
            is_core = names[group["params"][0]].startswith("core")
            assert (group["lr"], group["weight_decay"]) == (2e-3 if is_core else 4e-3, 0.3)
    matrices = {name for name, rule in rules.items() if rule == "muon"}
    blocks = tuple(f"{part}.{k}" for part in ("prelude", "core") for k in range(2))
    assert {name for name in rules if name.startswith(blocks) and ".c_q." in name} <= matrices
    assert not any("vocabulary" in name or "norm" in name for name in matrices)
    with pytest.raises(ValueError, match=r"core_decay=0\.2 would have no effect"):
        Muon(core_muon=True, core_decay=0.2)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    x = orthogonalised(torch.randn(3, 12, 7, dtype=torch.float64))
    values = torch.linalg.svdvals(x)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
