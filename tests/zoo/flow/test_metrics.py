"""Errors, losses, learning rates and colours beside formulas typed again."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from deq_zoo.flow.colours import colour_wheel, flow_to_colour
from deq_zoo.flow.loss import counted, flow_loss, sequence_loss, training_metrics
from deq_zoo.flow.metrics import FlowScores
from deq_zoo.optim import LinearOneCycle


def test_scores_pool_pixels_and_images_as_the_benchmarks_do() -> None:
    truth = [torch.zeros(2, 1, 2), torch.full((2, 2, 2), 100.0)]
    flow = [t.clone() for t in truth]
    flow[0][0, 0, 0] = 2.0  # an error of 2
    flow[1][1, 0, 0] += 4.0  # of 4, but below 5 % of 141
    flow[1][:, 1, 1] -= 30.0
    valid = torch.tensor([[True, True], [False, True]])
    scores = FlowScores()
    scores.add(flow[0], truth[0])
    scores.add(flow[1], truth[1], valid)
    far = 30 * math.sqrt(2)
    assert_close(scores.aepe, (2 + 4 + far) / 5)
    assert_close(scores.aepe_by_image, ((2 + 0) / 2 + (4 + 0 + far) / 3) / 2)
    assert_close(scores.f1_all, 100 / 5)
    assert [scores.within(n) for n in (1, 3, 5)] == [40.0, 60.0, 80.0]
    assert scores.summary("kitti", sparse=True) == {
        "kitti_aepe": scores.aepe_by_image, "kitti_f1": scores.f1_all
    }  # fmt: skip
    assert set(scores.summary("x")) == {"x_aepe", "x_1px", "x_3px", "x_5px"}


def test_pairs_without_truth_count_for_nothing() -> None:
    scores = FlowScores()
    scores.add(torch.ones(2, 3, 3), torch.zeros(2, 3, 3), torch.zeros(3, 3, dtype=torch.bool))
    assert scores.images == 0
    assert all(math.isnan(value) for value in scores.summary("x").values())  # not a perfect score
    assert math.isnan(scores.f1_all)
    with pytest.raises(ValueError, match="both flows"):
        scores.add(torch.ones(2, 3, 3), torch.zeros(2, 3, 4))


def test_a_flow_that_is_no_number_is_an_outlier() -> None:
    scores, flow = FlowScores(), torch.zeros(2, 1, 4)
    flow[0, 0, 0] = torch.nan
    scores.add(flow, torch.zeros(2, 1, 4))
    assert scores.f1_all == 25.0
    assert scores.within(1) == 75.0
    assert math.isnan(scores.aepe)


def test_the_masked_error_counts_extreme_and_unknown_flow_as_it_is() -> None:
    truth, flow = torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)
    flow[0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    truth[1, 0, 1] = 400.0
    valid = torch.tensor([[True, True, True, False]])
    scores = FlowScores()
    scores.add(flow, truth, valid)
    assert_close(scores.aepe_masked, (1 + 3) / 4)
    assert_close(scores.aepe, (1 + math.hypot(2, 400) + 3) / 3)
    assert scores.summary("t", masked=True)["t_masked_aepe"] == scores.aepe_masked


def test_the_loss_counts_masked_pixels_in_its_mean_only() -> None:
    truth = torch.zeros(2, 2, 2, 2)
    truth[1, 0, 0, 0] = 399.0
    truth[1, 1, 1, 1] = 401.0  # too far to count
    valid = torch.ones(2, 2, 2)
    valid[0, 0, 1] = 0
    flows = [torch.full_like(truth, 1.0), torch.full_like(truth, 3.0)]
    mask = counted(truth, valid)
    assert mask.shape == (2, 1, 2, 2)
    assert int(mask.sum()) == 6
    first = flow_loss(flows[0], truth, mask)
    assert_close(first.item(), (11 + 398) / 16)
    second = flow_loss(flows[1], truth, mask)
    assert_close(sequence_loss(flows, truth, valid, 0.8), 0.8 * first + second)


def test_training_metrics_do_not_mix_samples() -> None:
    truth, flow = torch.zeros(2, 2, 4, 4), torch.zeros(2, 2, 4, 4)
    flow[1] = 10.0
    valid = torch.ones(2, 4, 4)
    metrics = training_metrics(flow, truth, valid)
    assert_close(metrics["epe"].item(), 10 * math.sqrt(2) / 2)
    assert metrics["1px"].item() == 50.0
    valid[1] = 0
    assert training_metrics(flow, truth, valid)["epe"].item() == 0.0
    assert training_metrics(flow, truth, valid)["5px"].item() == 100.0


def test_masked_nans_do_not_reach_the_gradient() -> None:
    truth = torch.zeros(1, 2, 2, 2)
    truth[0, :, 0, 0] = torch.nan
    flow = torch.ones(1, 2, 2, 2, requires_grad=True)
    sequence_loss([flow], truth, torch.ones(1, 2, 2)).backward()
    assert flow.grad is not None
    assert flow.grad.isfinite().all()


def test_the_learning_rate_is_pytorchs_one_cycle() -> None:
    steps, rate = 400, 4e-4
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, steps + 100, pct_start=0.05, cycle_momentum=False, anneal_strategy="linear"
    )
    schedule = LinearOneCycle()
    for step in range(steps):
        assert_close(rate * schedule.factor(step, steps), optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()


def test_the_wheel_has_the_colours_of_middlebury() -> None:
    wheel = colour_wheel()
    assert wheel.shape == (55, 3)
    for place, colour in ((0, (255, 0, 0)), (15, (255, 255, 0)), (21, (0, 255, 0)),
                          (25, (0, 255, 255)), (36, (0, 0, 255)), (49, (255, 0, 255))):  # fmt: skip
        assert wheel[place].tolist() == list(colour)
    assert wheel[1].tolist() == [255, 17, 0]
    assert wheel[22].tolist() == [0, 255, 63]


def test_colours_of_flows() -> None:
    still = flow_to_colour(torch.zeros(2, 3, 4))
    assert still.shape == (3, 3, 4)
    assert (still == 255).all()
    flow = torch.tensor([[[5.0, -5.0, 10.0]], [[0.0, 0.0, 0.0]]])
    right, left, far = flow_to_colour(flow, largest=5.0)[:, 0].T.tolist()
    assert right[0] == 255  # red
    assert right[1] < 10
    assert left[2] > 200  # cyan to blue
    assert left[0] < 10
    assert far == pytest.approx([0.75 * 255, 0, 0], abs=15)
    flow[0, 0, 0] = torch.nan
    assert flow_to_colour(flow)[:, 0, 0].tolist() == [0, 0, 0]
    marked = torch.full((2, 1, 2), 3.0)
    marked[:, 0, 0] = 1.6e9  # Middlebury's mark of an unknown flow, which is no length
    black, marked_colour = flow_to_colour(marked)[:, 0].T.tolist()
    assert black == [0, 0, 0]
    assert marked_colour == flow_to_colour(marked[..., 1:])[:, 0, 0].tolist()
    with pytest.raises(ValueError, match="a flow is"):
        flow_to_colour(torch.zeros(3, 4, 4))


def test_a_gallery_is_drawn_where_truth_is_missing_too() -> None:
    from deq_zoo.flow.pictures import Example, gallery  # loads matplotlib

    image = torch.zeros(3, 8, 9, dtype=torch.uint8)
    flow, none = torch.ones(2, 8, 9), torch.zeros(8, 9, dtype=torch.bool)
    picture = gallery([Example("a", image, image, flow, flow, ~none),
                       Example("b", image, image, flow, flow, none)])  # fmt: skip
    assert picture.png.startswith(b"\x89PNG")
