"""Readers of the public layouts, augmentations, and warps with exact flow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from deq_zoo.errors import DataError
from deq_zoo.flow import datasets
from deq_zoo.flow.augment import (
    Augment,
    Jitter,
    Pair,
    erase_boxes,
    mirrored,
    resize_dense,
    resize_sparse,
    turn_hue,
)
from deq_zoo.flow.chairs_split import PAIRS, VALIDATION
from deq_zoo.flow.data import in_batches, training_data
from deq_zoo.flow.formats import write_flo, write_kitti
from deq_zoo.flow.layers import pixel_grid
from deq_zoo.flow.warps import (
    PHOTOGRAPHS,
    Motion,
    Warps,
    motorcycle,
    sample,
    synthetic_video,
    unfolded,
)
from deq_zoo.task import generator
from tests.golden import find_data, load_facts


def write_picture(path: Path, size: tuple[int, int] = (96, 80)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (len(path.name), 50, 99)).save(path)
    return path


def write_flow(path: Path, size: tuple[int, int] = (96, 80)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    flow = torch.zeros(2, size[1], size[0])
    if path.suffix == ".pfm":
        head = f"PF\n{size[0]} {size[1]}\n-1\n".encode()
        path.write_bytes(head + bytes(12 * size[0] * size[1]))
    elif path.suffix == ".png":
        write_kitti(path, flow, torch.rand(size[1], size[0]) < 0.5)
    else:
        write_flo(path, flow)
    return path


def write_all_sets(root: Path) -> Path:
    """Write every data set, with a few frames, in the public layouts."""
    chairs = root / "FlyingChairs_release"
    for k in range(1, 4):
        for image in (1, 2):
            write_picture(chairs / "data" / f"{k:05d}_img{image}.ppm")
        write_flow(chairs / "data" / f"{k:05d}_flow.flo")
    (chairs / "FlyingChairs_train_val.txt").write_text("1\n2\n1\n")
    for each in ("clean", "final"):
        for k in range(6, 9):
            write_picture(root / f"FlyingThings3D/frames_{each}pass/TRAIN/A/0000/left/{k:04d}.png")
        for scene in ("cave", "alley"):
            for k in range(1, 4):
                write_picture(root / f"Sintel/training/{each}/{scene}/frame_{k:04d}.png")
                write_picture(root / f"Sintel/test/{each}/{scene}/frame_{k:04d}.png")
    for way in ("future", "past"):
        for k in range(6, 9):
            write_flow(
                root / f"FlyingThings3D/optical_flow/TRAIN/A/0000/into_{way}/left/{k:04d}.pfm"
            )
    for scene in ("cave", "alley"):
        for k in (1, 2):
            write_flow(root / f"Sintel/training/flow/{scene}/frame_{k:04d}.flo")
    for k in range(2):
        for part in ("training", "testing"):
            for frame in (10, 11):
                write_picture(root / f"KITTI/{part}/image_2/{k:06d}_{frame}.png")
        write_flow(root / f"KITTI/training/flow_occ/{k:06d}_10.png")
        for frame in (1, 2):
            write_picture(root / f"HD1K/hd1k_input/image_2/{k:06d}_{frame:04d}.png")
            write_flow(root / f"HD1K/hd1k_flow_gt/flow_occ/{k:06d}_{frame:04d}.png")
    return root


def list_names(flow_set: datasets.FlowSet) -> list[tuple[str, str, str]]:
    return [(f.image1.name, f.image2.name, f.flow.name if f.flow else "") for f in flow_set.files]


def test_the_public_layouts_are_read(tmp_path: Path) -> None:
    root = write_all_sets(tmp_path)
    assert list_names(datasets.chairs(root / "FlyingChairs_release", "val")) == [
        ("00002_img1.ppm", "00002_img2.ppm", "00002_flow.flo")
    ]
    assert len(datasets.chairs(root / "FlyingChairs_release", "train")) == 2
    assert len(datasets.chairs(root / "FlyingChairs_release", "all")) == 3
    things = list_names(datasets.things(root / "FlyingThings3D"))
    assert len(things) == 8
    assert things[0] == ("0006.png", "0007.png", "0006.pfm")
    assert things[2] == ("0007.png", "0006.png", "0007.pfm")  # into the past
    sintel = datasets.sintel(root / "Sintel")
    assert [f.scene for f in sintel.files] == ["alley", "alley", "cave", "cave"]
    assert list_names(sintel)[1] == ("frame_0002.png", "frame_0003.png", "frame_0002.flo")
    assert list_names(datasets.sintel(root / "Sintel", "test", "final"))[0][2] == ""
    assert list_names(datasets.kitti(root / "KITTI"))[1] == (
        "000001_10.png", "000001_11.png", "000001_10.png"
    )  # fmt: skip
    assert len(datasets.kitti(root / "KITTI", "testing")) == 2
    assert list_names(datasets.hd1k(root / "HD1K")) == [
        (f"{k:06d}_0001.png", f"{k:06d}_0002.png", f"{k:06d}_0001.png") for k in range(2)
    ]
    pair = datasets.sintel(root / "Sintel", "test")[0]
    assert not pair.valid.any()


@pytest.mark.parametrize("stage", ["chairs", "things", "sintel", "kitti"])
def test_every_stage_draws_crops(tmp_path: Path, stage: str) -> None:
    pytest.importorskip("av")
    mixture = training_data(stage, str(write_all_sets(tmp_path)), (64, 72))  # type: ignore[arg-type]
    sizes = {"chairs": 2, "things": 8, "kitti": 2, "sintel": 400 + 400 + 400 + 10 + 4}
    assert len(mixture) == sizes[stage]
    for k in range(0, len(mixture), max(1, len(mixture) // 12)):
        pair = mixture.draw(k, generator("test", k))
        again = mixture.draw(k, generator("test", k))
        assert pair.image1.shape == pair.image2.shape == (3, 64, 72)
        assert pair.flow.shape == (2, 64, 72)
        assert pair.valid.shape == (64, 72)
        assert all(torch.equal(a, b) for a, b in zip(pair, again, strict=True))


def test_missing_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data-dir FOLDER"):
        training_data("chairs", None, (64, 64))
    with pytest.raises(DataError, match="there is no KITTI in"):
        training_data("kitti", str(tmp_path), (64, 64))
    for name in ("chairs", "things", "sintel", "kitti", "hd1k", "middlebury"):
        with pytest.raises(DataError, match=str(tmp_path)):
            getattr(datasets, name)(tmp_path)
    root = write_all_sets(tmp_path)
    (root / "FlyingChairs_release" / "FlyingChairs_train_val.txt").unlink()
    with pytest.raises(DataError, match="has 3 pairs, FlyingChairs has 22872"):
        datasets.chairs(root / "FlyingChairs_release")
    next((root / "FlyingThings3D" / "optical_flow").rglob("*.pfm")).unlink()
    with pytest.raises(DataError, match="incomplete"):
        datasets.things(root / "FlyingThings3D")


def test_golden_split_of_chairs_is_reproduced() -> None:
    facts = load_facts("deq-flow", "chairs_val_indices")
    assert (PAIRS, sorted(VALIDATION)) == (facts["total"], facts["validation"])


def test_real_files_are_read() -> None:
    assert len(datasets.chairs(find_data("flow_chairs"), "all")) == 6
    pair = datasets.middlebury(find_data("flow_middlebury"))[0]
    at = pixel_grid(pair.flow)[0] + pair.flow
    error = (sample(pair.image2, at) - pair.image1).abs().mean(0)[pair.valid].mean()
    still = (pair.image2.float() - pair.image1).abs().mean(0)[pair.valid].mean()
    assert error < 0.7 * still  # the flow says where pixels went


def make_pair(height: int = 90, width: int = 110) -> Pair:
    return Warps("test", (height, width), Motion(shift=2.0)).draw(0, seed=1)


def measure_warp_error(pair: Pair) -> float:
    at = pixel_grid(pair.flow)[0] + pair.flow
    error = (sample(pair.image2, at) - pair.image1).abs().mean(0)
    return float(error[pair.valid].mean())


@pytest.mark.parametrize("k", range(3))
def test_warps_have_exact_flow(k: int) -> None:
    pair = Warps("test", (96, 112), Motion()).draw(k)
    assert measure_warp_error(pair) < 4  # grey levels: what resampling twice costs
    still = (pair.image1.float() - pair.image2).abs().mean(0)[pair.valid].mean()
    assert measure_warp_error(pair) < 0.3 * float(still)
    assert pair.valid.float().mean() > 0.5
    again = Warps("test", (96, 112), Motion()).draw(k)
    assert torch.equal(pair.image1, again.image1)


def test_no_photograph_is_in_two_splits() -> None:
    names = [name for split in PHOTOGRAPHS.values() for name in split]
    assert len(names) == len(set(names))


def test_folds_and_what_leaves_the_frame_are_masked() -> None:
    flow = torch.zeros(2, 8, 10)
    assert unfolded(flow).all()
    flow[0] = 3
    assert unfolded(flow)[0].tolist() == [True] * 7 + [False] * 3
    x = torch.arange(10.0)
    folded = torch.stack(((-2 * (x - 5)).expand(8, 10), torch.zeros(8, 10)))
    assert not unfolded(folded).any()


def test_the_stereo_pair_moves_to_the_left() -> None:
    pair = motorcycle(half=True)
    assert pair.image1.shape == (3, 250, 370)
    assert pair.valid.float().mean() > 0.9
    assert measure_warp_error(pair) < 10
    assert -30.1 < float(pair.flow[0].min()) < -20
    assert not pair.flow[1].any()


def test_a_synthetic_video_has_exact_flow() -> None:
    frames, flows = synthetic_video(3, (80, 96))
    assert (len(frames), len(flows)) == (3, 2)
    for k, flow in enumerate(flows):
        pair = Pair(frames[k], frames[k + 1], flow, unfolded(flow))
        assert measure_warp_error(pair) < 4
        assert 0.2 < float(flow.norm(dim=0).mean()) < 8


@pytest.mark.parametrize("sx", [0.7, 1.0, 1.6])
def test_resizing_keeps_what_the_flow_says(sx: float) -> None:
    pair = resize_dense(make_pair(), sx, 1.3)
    assert pair.valid.shape == (117, round(110 * sx))
    assert measure_warp_error(pair) < 5
    assert resize_dense(make_pair(), 1, 1).valid.equal(make_pair().valid)


def test_sparse_resizing_moves_every_known_pixel() -> None:
    flow, valid = torch.zeros(2, 4, 6), torch.zeros(4, 6, dtype=torch.bool)
    flow[:, 2, 3] = torch.tensor([1.0, -2.0])
    valid[2, 3] = valid[0, 0] = True
    image = torch.zeros(3, 4, 6, dtype=torch.uint8)
    result = resize_sparse(Pair(image, image, flow, valid), 2.0, 2.0)
    assert result.valid.nonzero().tolist() == [[0, 0], [4, 6]]
    assert result.flow[:, 4, 6].tolist() == [2.0, -4.0]


@pytest.mark.parametrize("axis", [0, 1])
def test_mirrors_turn_the_flow(axis: int) -> None:
    pair = make_pair()
    flow = pair.flow.clone()
    turned = mirrored(pair, axis)
    assert measure_warp_error(turned) < 5
    assert torch.equal(pair.flow, flow)  # the caller's own is left alone
    back = mirrored(turned, axis)
    assert all(torch.equal(a, b) for a, b in zip(back, pair, strict=True))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("crop", [(90, 110), (96, 128), (64, 64)])
def test_crops_of_any_size_come_out(sparse: bool, crop: tuple[int, int]) -> None:
    augment = Augment(crop, sparse=sparse)
    for k in range(12):
        assert augment(make_pair(), generator(k)).valid.shape == crop


def test_colours_change_and_hues_turn() -> None:
    image = torch.randint(256, (3, 8, 9), dtype=torch.uint8)
    still = Jitter(1.0, 1.0, 1.0, 0.0, (0, 1, 2, 3))
    assert (still(image).int() - image.int()).abs().max() <= 1
    red = torch.tensor([1.0, 0.0, 0.0])[:, None, None]
    assert_close(turn_hue(red, 1 / 3).flatten(), torch.tensor([0.0, 1.0, 0.0]), atol=1e-6, rtol=0)
    x = torch.rand(3, 5, 5)
    assert_close(turn_hue(turn_hue(x, 0.3), -0.3), x, atol=1e-5, rtol=0)
    grey = Jitter(1.0, 1.0, 0.0, 0.0, (2,))(image)
    assert torch.equal(grey[0], grey[2])
    assert Jitter(0.5, 1.0, 1.0, 0.0, (0,))(image).max() <= 128


def test_erased_boxes_have_the_mean_colour() -> None:
    image = torch.randint(256, (3, 120, 130), dtype=torch.uint8)
    erased = erase_boxes(image, generator("box"))
    changed = (erased != image).any(0)
    assert changed.any()
    colour = image.float().mean(dim=(1, 2)).to(torch.uint8)
    assert torch.equal(erased[:, changed], colour[:, None].expand(3, int(changed.sum())))


def test_batches_hold_one_size() -> None:
    pairs = [make_pair(), make_pair(), make_pair(), make_pair(64, 64)]
    assert [len(batch) for batch in in_batches(pairs, 2)] == [2, 1, 1]
    assert list(in_batches([], 2)) == []
