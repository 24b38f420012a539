"""Against numbers of the original implementation: float64, 1e-9."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.golden import assert_matches
from tests.zoo.mdeq.nets import Golden

NAMES = ("tiny", "mini4")


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_golden_injection_and_one_application_of_f_are_reproduced(name: str) -> None:
    golden = Golden(name)
    u = golden.model.inject(golden.io["x"])
    assert_matches(u, golden.io["u0"])
    image = golden.model.full_stage(*golden.read_pyramid("z_in"), u)
    assert_matches(image, golden.read_pyramid("f_z_in"))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_golden_logits_of_given_pyramids_are_reproduced(name: str) -> None:
    golden = Golden(name)
    for state in ("z_in", "z_star"):
        logits = golden.model.classify(golden.read_pyramid(state))
        assert_matches(logits, golden.io[f"logits_from_{state}"])


@pytest.mark.parametrize("solver", ["fixed_point_iter", "anderson", "broyden"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_golden_fixed_point_is_reproduced(name: str, solver: str) -> None:
    golden = Golden(name, f_solver=solver, f_max_iter=200, f_tol=1e-13, f_stop_mode="rel")
    out = golden.model(golden.io["x"])
    assert bool(out.stats.converged.all())
    (z,), _ = golden.model.solve(golden.model.inject(golden.io["x"]))
    assert_matches(z, golden.read_pyramid("z_star"))
    assert_matches(out.prediction, golden.io["logits_from_z_star"])


@pytest.mark.parametrize("name", NAMES)
def test_golden_training_step_is_reproduced(name: str) -> None:
    options = {"f_max_iter": 200, "f_tol": 1e-13, "f_stop_mode": "rel", "grad": 5, "tau": 0.5}
    golden = Golden(name, **options)
    model = golden.model.train()
    logits = model(golden.io["x"]).prediction
    loss = F.cross_entropy(logits, golden.io["labels"])
    assert_matches(logits, golden.io["train_logits"])
    assert_matches(loss, golden.io["train_loss"][0])
    assert_matches(loss.item(), golden.reference["loss"])

    statistics = {k: v for k, v in golden.io.items() if k.startswith("after_train_step.")}
    assert len(statistics) == 2
    for key, value in statistics.items():
        assert_matches(model.state_dict()[key.removeprefix("after_train_step.")], value)

    loss.backward()
    expected = golden.reference["grad_per_param"]
    assert expected.keys() == {key for key, _ in model.named_parameters()}
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        # Biases before a batch norm have no gradient but rounding: the absolute part is for them.
        norm, first = parameter.grad.norm().item(), parameter.grad.flatten()[:3].tolist()
        assert norm == pytest.approx(expected[key]["norm"], rel=1e-9, abs=1e-13), key
        assert first == pytest.approx(expected[key]["first"], rel=1e-9, abs=1e-11), key


@pytest.mark.parametrize("name", NAMES)
def test_golden_sizes_are_reproduced(name: str) -> None:
    golden = Golden(name)
    assert sum(p.numel() for p in golden.model.parameters()) == golden.parameters
    shapes = {key: value.shape for key, value in golden.weights.items()}
    assert {key: value.shape for key, value in golden.model.state_dict().items()} == shapes
