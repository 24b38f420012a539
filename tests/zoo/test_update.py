"""One update of the weights, and the trees of tensors that batches are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from deq_zoo.errors import ZooError
from deq_zoo.finite import check_loss
from deq_zoo.task import WHOLE
from deq_zoo.tree import detached, map_tensors, tensors, to_device
from deq_zoo.update import Learner, OneDevice
from tests.zoo.toy import toy


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_tensors_are_reached_and_replaced_at_every_depth() -> None:
    one = torch.ones(2, requires_grad=True)
    tree: Any = {"a": [one, (Pair(one + 1, "b"), None)], "c": 3}
    assert [t.sum().item() for t in tensors(tree)] == [2.0, 4.0]
    doubled = map_tensors(lambda t: 2 * t, tree)
    assert isinstance(doubled["a"][1][0], Pair)
    assert doubled["a"][1][0].name == "b"
    assert doubled["a"][1][1] is None
    assert doubled["c"] == 3
    assert [t.sum().item() for t in tensors(doubled)] == [4.0, 8.0]
    assert not any(t.requires_grad for t in tensors(detached(tree)))
    assert [t.device.type for t in tensors(to_device(tree, torch.device("meta")))] == ["meta"] * 2


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip": 0.01}, {"clip_value": 1e-3}])
def test_an_update_is_a_gradient_step_on_the_mean_of_its_batches(options: dict[str, Any]) -> None:
    preset = replace(toy(), **options)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(preset.task.build())
    ours, plain = models
    batches = [preset.task.train_batch(k, 0, WHOLE) for k in range(3)]
    learner = Learner(preset, ours, preset.optim.make(ours.parameters()), OneDevice("cpu"), 10)
    seen = []
    torch.manual_seed(1)  # the toy draws masks
    learner.update(iter(batches), lambda loss, samples: seen.append((loss.value.item(), samples)))
    torch.manual_seed(1)
    optimizer = preset.optim.make(plain.parameters())
    preset.optim.set_rate(optimizer, 0, 10)
    carry = None
    for batch in batches[: preset.accumulate]:
        loss = preset.task.loss(plain.train(), batch, carry)
        (loss.value / preset.accumulate).backward()
        carry = detached(loss.carry)
    if preset.clip:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), preset.clip)
    if preset.clip_value:
        torch.nn.utils.clip_grad_value_(plain.parameters(), preset.clip_value)
    optimizer.step()
    assert len(seen) == preset.accumulate
    assert learner.step == 1
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    check_loss(1.0, 3)
    with pytest.raises(ZooError, match="the loss is nan at step 3: lower the learning rate"):
        check_loss(float("nan"), 3)
