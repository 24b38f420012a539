"""Scenes in layers: the flow beside the frames, occlusion beside labels, repeatable draws."""

from __future__ import annotations

from dataclasses import replace
from math import pi

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.errors import ZooError
from deq_zoo.flow.layers import pixel_grid
from deq_zoo.flow.leaves import dead_leaves
from deq_zoo.flow.scene_task import SceneTask
from deq_zoo.flow.scenes import (
    SCENE_PHOTOGRAPHS,
    Dice,
    Layer,
    Scenes,
    Shape,
    compose,
    draw_layers,
    hidden,
)
from deq_zoo.flow.warps import sample
from deq_zoo.preset import find_preset
from deq_zoo.task import Shard, generator

SIZE = (64, 80)
COLOURS = torch.cat((torch.eye(3), torch.zeros(3, 1)), dim=1)
BOX = Shape((35.0, 30.0), (14.0, 10.0), 0.4, 6.0, (0.1, 1.0, 2.0))
DISC = Shape((50.0, 34.0), (9.0, 9.0), 0.0, 2.0, (0.0, 0.0, 0.0))


def waves(phase: float) -> Tensor:
    """Return a smooth texture (3, 160, 160), which bilinear sampling hardly changes."""
    y, x = torch.meshgrid(torch.arange(160.0), torch.arange(160.0), indexing="ij")
    parts = [
        torch.sin(x / a + phase) + torch.cos(y / b - phase) for a, b in ((9, 11), (14, 8), (10, 17))
    ]
    return 128 + 60 * torch.stack(parts)


def layer(phase: float, flow: Tensor, shape: Shape | None = None) -> Layer:
    return Layer(waves(phase), 0.9, 0.3, (40.0, 30.0), flow, shape, COLOURS)


def shifted(x: float, y: float) -> Tensor:
    return torch.tensor([x, y])[:, None, None].expand(2, *SIZE).contiguous()


def inside(ends: Tensor, margin: float = 0.0) -> Tensor:
    height, width = ends.shape[1:]
    x, y = ends
    return (x >= margin) & (x <= width - 1 - margin) & (y >= margin) & (y <= height - 1 - margin)


def away_from_edges(layers: list[Layer], points: Tensor) -> Tensor:
    """Return where no shape has an edge within two pixels."""
    clear = torch.ones(points.shape[1:], dtype=torch.bool)
    for each in layers[1:]:
        assert each.shape is not None
        for dx, dy in ((0, 0), (2, 0), (-2, 0), (0, 2), (0, -2)):
            cover = each.shape.alpha(points + torch.tensor([dx, dy])[:, None, None])
            here = each.shape.alpha(points)
            clear &= ((cover == 0) | (cover == 1)) & (cover == here)
    return clear


def test_the_second_frame_at_the_end_of_the_flow_is_the_first_frame() -> None:
    bend = 0.05 * (pixel_grid(torch.empty(SIZE))[0] - 30).flip(0)
    layers = [
        layer(0.0, shifted(2.3, -1.7) + bend),
        layer(1.0, shifted(-5.2, 3.4), BOX),
        layer(2.0, shifted(7.6, 1.1) - bend, DISC),
    ]
    pair, covered = compose(layers), hidden(layers)
    grid = pixel_grid(pair.flow)[0]
    ends = grid + pair.flow
    starts = [away_from_edges([layers[0], each], grid + each.flow) for each in layers[1:]]
    clear = inside(ends, 1) & ~covered & away_from_edges(layers, ends) & starts[0] & starts[1]
    assert clear.float().mean() > 0.4
    seen = sample(pair.image2, ends)
    assert (seen - pair.image1).abs()[:, clear].max() < 1.0  # grey levels of 255
    assert (seen - pair.image1).abs()[:, covered & inside(ends)].mean() > 20


def test_the_flow_of_a_pixel_is_that_of_its_uppermost_layer() -> None:
    flows = [shifted(1, 0), shifted(0, 2), shifted(-3, 1)]
    layers = [layer(0.0, flows[0]), layer(1.0, flows[1], BOX), layer(2.0, flows[2], DISC)]
    flow = compose(layers).flow
    grid = pixel_grid(flow)[0]
    rng = torch.Generator().manual_seed(0)
    for k in torch.randperm(SIZE[0] * SIZE[1], generator=rng)[:400].tolist():
        y, x = divmod(k, SIZE[1])
        want = flows[0][:, y, x]
        for each in layers[1:]:
            assert each.shape is not None
            if each.shape.alpha((grid + each.flow)[:, y, x, None, None]) > 0.5:
                want = each.flow[:, y, x]
        assert torch.equal(flow[:, y, x], want)
    assert len(flow.flatten(1).unique(dim=1).mT) == 3  # every layer shows


def test_a_pixel_is_hidden_where_its_end_shows_another_layer() -> None:
    moves = [(3, 0), (-4, 2), (5, -3)]  # whole pixels, so that ends are pixels
    shapes = [None, BOX, DISC]
    layers = [
        layer(float(k), shifted(*move), shape)
        for k, (move, shape) in enumerate(zip(moves, shapes, strict=True))
    ]
    grid = pixel_grid(torch.empty(SIZE))[0]
    label1, label2 = torch.zeros(2, *SIZE, dtype=torch.long)
    for k, each in enumerate(layers[1:], 1):
        assert each.shape is not None
        label1[each.shape.alpha(grid + each.flow) > 0.5] = k
        label2[each.shape.alpha(grid) > 0.5] = k
    x, y = (grid + compose(layers).flow).long()
    there = inside(torch.stack((x, y)).float())
    shown = label2[y.clamp(0, SIZE[0] - 1), x.clamp(0, SIZE[1] - 1)]
    covered = hidden(layers)
    assert torch.equal(covered[there], (shown != label1)[there])
    assert covered.any()


def test_a_shape_covers_its_centre_fades_within_a_pixel_and_ends() -> None:
    line = torch.stack((torch.linspace(50, 70, 2001), torch.full((2001,), 34.0)))[:, None]
    cover = DISC.alpha(line)[0]
    assert cover[0] == 1
    assert cover[-1] == 0
    assert abs(float(line[0, 0, int((cover > 0.5).sum())]) - 59) < 0.02  # centre + radius
    faded = line[0, 0, (cover > 0) & (cover < 1)]
    assert 0.5 < float(faded[-1] - faded[0]) < 2


def test_scenes_at_rest_and_in_one_shift_are_among_the_draws() -> None:
    flows = [compose(draw_layers("train", SIZE, Dice(generator("t", k)))).flow for k in range(40)]
    spread = torch.stack([(flow - flow.mean((1, 2), keepdim=True)).abs().max() for flow in flows])
    length = torch.stack([flow.norm(dim=0).mean() for flow in flows])
    assert ((spread < 1e-3) & (length == 0)).sum() >= 1
    assert ((spread < 1e-3) & (length > 0)).sum() >= 1
    assert (spread > 1).sum() > 20
    assert length.max() > 8


def test_frames_at_rest_are_equal_before_light_and_noise() -> None:
    for k in range(60):
        pair = compose(draw_layers("train", SIZE, Dice(generator("t", k))))
        if not pair.flow.any():
            assert torch.equal(pair.image1, pair.image2)
            return
    raise AssertionError("no scene at rest among 60")


def test_draws_depend_on_their_number_seed_and_split_alone() -> None:
    again, other = Scenes("train").draw(5, SIZE, 1), Scenes("train").draw(5, SIZE, 2)
    for a, b in zip(Scenes("train").draw(5, SIZE, 1), again, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(again.image1, other.image1)
    assert not torch.equal(again.image1, Scenes("val").draw(5, SIZE, 1).image1)


def test_no_photograph_belongs_to_two_splits() -> None:
    names = [name for split in SCENE_PHOTOGRAPHS.values() for name in split]
    assert len(names) == len(set(names))


def test_leaves_are_textures_of_bytes_and_differ() -> None:
    first, second = dead_leaves("train", 0), dead_leaves("val", 0)
    assert first.shape == (3, 384, 384)
    assert first.min() >= 0
    assert first.max() <= 255
    assert first.std() > 30
    assert not torch.equal(first, second)


def small_task(**options: object) -> SceneTask:
    task = find_preset("flow-nano").task
    assert isinstance(task, SceneTask)
    sizes = ((64, 64), (64, 96), (96, 128), (128, 128))
    return replace(task, **{"batch": 4, "sizes": sizes, "grow": 10, **options})  # type: ignore[arg-type]


def test_frames_grow_and_batches_keep_their_pixels() -> None:
    task = small_task()
    assert {task.size_at(step, 0) for step in range(10)} == {(64, 64)}
    assert {task.size_at(step, 0) for step in range(10, 20)} == {(64, 64), (64, 96)}
    assert {task.size_at(step, 0) for step in range(30, 200)} == set(task.sizes[1:])
    assert [task.pairs_of(size) for size in task.sizes] == [4, 3, 1, 1]
    for step in (0, 35):
        image1, _, flow, valid, z0 = task.train_batch(step, 0)
        height, width = task.size_at(step, 0)
        assert image1.shape == (task.pairs_of((height, width)), 3, height, width)
        assert flow.shape[2:] == valid.shape[1:] == (height, width)
        assert z0.shape == (image1.shape[0], 2, height // 8, width // 8)


def test_batches_are_functions_of_step_and_seed() -> None:
    task = small_task()
    for a, b in zip(task.train_batch(3, 1), small_task().train_batch(3, 1), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(task.train_batch(3, 1)[0], task.train_batch(4, 1)[0])


def test_processes_share_a_batch_and_each_has_a_pair() -> None:
    task = small_task()
    whole = task.train_batch(3, 0)
    parts = [task.train_batch(3, 0, Shard(rank, 2)) for rank in range(2)]
    assert torch.equal(whole[0][0::2], parts[0][0])
    assert torch.equal(whole[4][1::2], parts[1][4])
    large = [task.train_batch(35, 0, Shard(rank, 2)) for rank in range(2)]
    count = task.pairs_of(task.size_at(35, 0))
    assert sum(len(part[0]) for part in large) == max(2, count)
    with pytest.raises(ZooError, match="too small for 5 processes"):
        task.train_batch(3, 0, Shard(0, 5))


def test_some_solves_start_near_the_truth() -> None:
    flow, z0 = small_task(near=1.0, near_error=0.0).train_batch(3, 0)[2::2]
    mean = torch.nn.functional.avg_pool2d(flow, 8) / 8
    assert_close(z0, mean)
    assert not small_task(near=0.0).train_batch(3, 0)[4].any()


def test_noise_of_the_task_reaches_the_frames() -> None:
    plain, noisy = small_task(), small_task(noise=20.0)
    assert noisy.train_batch(3, 0)[0].is_floating_point()
    assert not plain.train_batch(3, 0)[0].is_floating_point()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ()}, "one at least"),
        ({"sizes": (64, 64)}, "pairs of multiples of 8"),
        ({"sizes": ((64,),)}, "pairs of multiples of 8"),
        ({"sizes": ((64.0, 64.0),)}, "pairs of multiples of 8"),
        ({"sizes": ((128, 160), (64, 64))}, "the smallest first"),
        ({"near_error": float("inf")}, "finite"),
        ({"sizes": ((64, 60),)}, "multiples of 8"),
        ({"near": 1.5}, "from 0 to 1"),
        ({"grow": 0}, "grow must be at least 1"),
        ({"near_error": -1.0}, "near_error"),
    ],
)
def test_bad_options_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_task(**options)


def test_scenes_read_no_data_from_disk() -> None:
    with pytest.raises(ZooError, match="drop --data-dir"):
        small_task(data_dir="somewhere")


def test_turns_and_zooms_of_a_draw_are_moderate() -> None:
    """No drawn flow folds the frame over: its Jacobian stays positive within every layer."""
    for k in range(20):
        for each in draw_layers("train", SIZE, Dice(generator("fold", k))):
            (u_y, u_x), (v_y, v_x) = (torch.gradient(part) for part in each.flow)
            assert ((1 + u_x) * (1 + v_y) - u_y * v_x).min() > 0.3
            assert abs(each.angle) <= pi
