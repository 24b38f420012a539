"""Data sets that are incomplete, and those that come in other folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deq_zoo.errors import DataError
from deq_zoo.flow import datasets
from deq_zoo.flow.augment import Augment
from deq_zoo.flow.data import SCORED, Mixture, Part, open_scored, spread
from deq_zoo.flow.formats import write_flo
from deq_zoo.task import generator
from tests.zoo.flow.test_data import list_names, write_all_sets, write_flow, write_picture

THINGS = "FlyingThings3D/optical_flow/TRAIN/A/0000/into_future/left"


@pytest.mark.parametrize(
    ("name", "folder", "lost", "message"),
    [
        ("sintel", "Sintel", "training/clean/cave/frame_0002.png", "after .*frame_0001.png is"),
        ("sintel", "Sintel", "training/flow/alley/frame_0001.flo", "frame_0001.flo is missing"),
        ("kitti", "KITTI", "training/image_2/000001_11.png", "000001_11.png is missing"),
        ("kitti", "KITTI", "training/flow_occ/000000_10.png", "000000_10.png is missing"),
        ("hd1k", "HD1K", "hd1k_flow_gt/flow_occ/000000_0001.png", "000000_0001.png is missing"),
    ],
)
def test_a_missing_file_is_an_error_when_a_set_is_opened(
    tmp_path: Path, name: str, folder: str, lost: str, message: str
) -> None:
    pytest.importorskip("av")
    root = write_all_sets(tmp_path) / folder
    (root / lost).unlink()
    with pytest.raises(DataError, match=message):
        getattr(datasets, name)(root)


def test_frames_and_flows_of_things_must_have_the_same_numbers(tmp_path: Path) -> None:
    root = write_all_sets(tmp_path)
    for k in range(6, 9):  # as they are called in the archive
        (root / THINGS / f"{k:04d}.pfm").rename(
            root / THINGS / f"OpticalFlowIntoFuture_{k:04d}_L.pfm"
        )
    assert len(datasets.things(root / "FlyingThings3D")) == 8
    (root / THINGS / "OpticalFlowIntoFuture_0006_L.pfm").rename(root / THINGS / "Flow_0009_L.pfm")
    with pytest.raises(DataError, match="number 6 of one alone"):
        datasets.things(root / "FlyingThings3D")


def test_a_pause_of_hd1k_makes_no_pair(tmp_path: Path) -> None:
    pytest.importorskip("av")
    root = write_all_sets(tmp_path) / "HD1K"
    for k in (7, 8):
        write_picture(root / f"hd1k_input/image_2/000000_{k:04d}.png")
        write_flow(root / f"hd1k_flow_gt/flow_occ/000000_{k:04d}.png")
    first = [a for a, _, _ in list_names(datasets.hd1k(root))]
    assert first == ["000000_0001.png", "000000_0007.png", "000001_0001.png"]


def test_a_set_without_pairs_is_refused(tmp_path: Path) -> None:
    write_picture(tmp_path / "training/clean/cave/frame_0001.png")
    with pytest.raises(DataError, match="no pair of sintel_clean"):
        datasets.sintel(tmp_path)


def test_things_are_evaluated_on_their_test_part(tmp_path: Path) -> None:
    root = write_all_sets(tmp_path) / "FlyingThings3D"
    with pytest.raises(DataError, match="TEST"):
        open_scored("things_clean", str(tmp_path))
    (root / "frames_cleanpass/TRAIN").rename(root / "frames_cleanpass/TEST")
    (root / "optical_flow/TRAIN").rename(root / "optical_flow/TEST")
    validation = open_scored("things_clean", str(tmp_path))
    assert (len(validation), validation.masked) == (4, True)
    fewer = spread(validation, 2)
    assert fewer.masked
    assert fewer.files == validation.files[::2]
    assert spread(validation, 9) is validation
    assert "things_final" in SCORED


def test_middlebury_is_read_as_its_two_archives_unpack(tmp_path: Path) -> None:
    for frame in (10, 11):
        write_picture(tmp_path / f"other-data/Grove2/frame{frame}.png")
    write_flow(tmp_path / "other-gt-flow/Grove2/flow10.flo")
    pair = datasets.middlebury(tmp_path)[0]
    assert pair.image1.shape == (3, 80, 96)


def test_extreme_flow_is_evaluated_but_not_learnt(tmp_path: Path) -> None:
    flow = torch.zeros(2, 80, 96)
    flow[0, :40] = 2000.0
    files = datasets.Files(write_picture(tmp_path / "a.png"), write_picture(tmp_path / "b.png"),
                           tmp_path / "a.flo")  # fmt: skip
    write_flo(tmp_path / "a.flo", flow)
    flow_set = datasets.FlowSet("x", (files,))
    assert flow_set[0].valid.all()
    mixture = Mixture((Part(flow_set, 1, Augment((80, 96), (0.0, 0.0), flips=False)),))
    drawn = mixture.draw(0, generator(0))
    assert not drawn.valid[drawn.flow[0] > 400].any()
    assert drawn.valid.any()
