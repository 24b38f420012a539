"""Flow files, there and back, and against bytes typed by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from deq_zoo.errors import DataError, ZooError
from deq_zoo.flow.formats import (
    read_flo,
    read_flow,
    read_kitti,
    read_pfm,
    write_flo,
    write_kitti,
)
from deq_zoo.images.files import read_image
from tests.golden import find_data


def test_a_flo_file_is_the_documented_bytes(tmp_path: Path) -> None:
    flow = torch.arange(12.0).view(2, 2, 3) - 5.5
    write_flo(tmp_path / "x.flo", flow)
    rows = [v for y in range(2) for x in range(3) for v in flow[:, y, x].tolist()]
    want = struct.pack("<fii12f", 202021.25, 3, 2, *rows)
    assert (tmp_path / "x.flo").read_bytes() == want
    assert torch.equal(read_flo(tmp_path / "x.flo"), flow)


@pytest.mark.parametrize(("scale", "order"), [("-1.0", "<f4"), ("1.0", ">f4")])
def test_a_pfm_file_is_read_bottom_up_in_either_order(
    tmp_path: Path, scale: str, order: str
) -> None:
    rows = np.arange(18, dtype=np.float32).reshape(2, 3, 3)
    body = rows[::-1].astype(order).tobytes()
    (tmp_path / "x.pfm").write_bytes(f"PF\n3 2\n{scale}\n".encode() + body)
    assert torch.equal(read_pfm(tmp_path / "x.pfm"), torch.tensor(rows).permute(2, 0, 1))
    flow, mask = read_flow(tmp_path / "x.pfm")
    assert flow.shape == (2, 2, 3)
    assert mask.all()
    (tmp_path / "grey.pfm").write_bytes(b"Pf\n1 1\n-1\n" + struct.pack("<f", 2.5))
    assert read_pfm(tmp_path / "grey.pfm").item() == 2.5
    with pytest.raises(DataError, match="one channel"):
        read_flow(tmp_path / "grey.pfm")


def test_kittis_sixteen_bits_survive(tmp_path: Path) -> None:
    pytest.importorskip("av")
    flow = torch.randn(2, 37, 53) * 100
    valid = torch.rand(37, 53) < 0.3
    write_kitti(tmp_path / "x.png", flow, valid)
    again, mask = read_kitti(tmp_path / "x.png")
    assert torch.equal(mask, valid)
    assert float((again - flow).abs().max()) <= 0.5 / 64 + 1e-4  # rounded, not cut off
    write_kitti(tmp_path / "far.png", torch.tensor([600.0, -600.0])[:, None, None])
    again, mask = read_kitti(tmp_path / "far.png")
    assert again.flatten().tolist() == [(65535 - 32768) / 64, -512.0]
    assert mask.all()
    with Image.open(tmp_path / "x.png") as image:  # a PNG for others too
        assert image.size == (53, 37)


def test_real_kitti_truth_is_read_as_sixteen_bits() -> None:
    pytest.importorskip("av")
    flow, mask = read_kitti(find_data("flow_kitti") / "000000_10_flow_gt.png")
    assert flow.shape == (2, 375, 1242)
    assert_close(float(mask.float().mean()), 0.162, atol=1e-3, rtol=0)
    steps = flow[:, mask] * 64
    assert torch.equal(steps, steps.round())
    assert (steps % 4 != 0).any()  # eight bits would leave steps of 4 pixels


def test_unknown_flow_of_middlebury_is_masked(tmp_path: Path) -> None:
    flow = torch.ones(2, 2, 2)
    flow[:, 0, 1] = 1.6e9
    flow[0, 1, 1] = torch.nan
    write_flo(tmp_path / "x.flo", flow)
    result, mask = read_flow(tmp_path / "x.flo")
    assert mask.tolist() == [[True, False], [True, False]]
    assert result.isfinite().all()


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
def test_pictures_of_any_kind_have_three_channels(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (5, 4), 100 if mode in "LP" else (100,) * len(mode)).save(tmp_path / "x.png")
    assert read_image(tmp_path / "x.png").shape == (3, 4, 5)


def test_files_that_are_wrong_are_errors(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.flo", b"nothing to see", "no .flo file"),
        ("b.flo", struct.pack("<fii", 202021.25, 100, 100), "cut off"),
        ("c.pfm", b"PF\n2 2\n-1\nshort", "no whole .pfm"),
        ("d.png", b"no png", "cannot read"),
        ("e.txt", b"", "a flow is a .flo"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_flow(tmp_path / name)
    with pytest.raises(DataError, match="cannot read"):
        read_flow(tmp_path / "none.flo")
    Image.new("RGB", (3, 3)).save(tmp_path / "eight.png")
    with pytest.raises(DataError, match="16 bits"):
        read_flow(tmp_path / "eight.png")
    with pytest.raises(ValueError, match=r"\(2, height, width\)"):
        write_flo(tmp_path / "x.flo", torch.zeros(3, 4, 4))
    for size in ("-2 -2", "0 2"):
        (tmp_path / "f.pfm").write_bytes(f"PF\n{size}\n-1\n".encode() + bytes(48))
        with pytest.raises(DataError, match="its size is"):
            read_flow(tmp_path / "f.pfm")


def test_grey_of_sixteen_bits_is_not_cut_off(tmp_path: Path) -> None:
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(levels * 257).save(tmp_path / "x.png")
    assert torch.equal(read_image(tmp_path / "x.png")[1], torch.tensor(levels).byte())
    Image.fromarray(levels.astype(np.float32)).save(tmp_path / "x.tiff")
    with pytest.raises(DataError, match="expected 0 to 1: save it with 8 bits"):
        read_image(tmp_path / "x.tiff")


def test_kitti_marks_what_is_no_number(tmp_path: Path) -> None:
    pytest.importorskip("av")
    flow = torch.tensor([[[torch.nan, 1.0, 2.0]], [[0.0, torch.inf, -3.0]]])
    write_kitti(tmp_path / "x.png", flow)
    result, mask = read_kitti(tmp_path / "x.png")
    assert mask.tolist() == [[False, False, True]]
    assert result[:, 0, 2].tolist() == [2.0, -3.0]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = torch.ones(2, 3, 3)
    write_flo(tmp_path / "x.flo", old)

    def raise_full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", raise_full)
    for write in (write_flo, write_kitti):
        with pytest.raises(ZooError, match="no space left"):
            write(tmp_path / "x.flo", 2 * old)
    assert torch.equal(read_flo(tmp_path / "x.flo"), old)
    assert [p.name for p in tmp_path.iterdir()] == ["x.flo"]
