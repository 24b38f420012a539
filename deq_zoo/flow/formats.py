"""Flow on disk: `.flo`, `.pfm` and KITTI's 16-bit `.png`.

A flow is (2, H, W) in single precision, x first; a mask (H, W) says where it is valid.
"""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.files import write_atomically
from deq_zoo.packages import optional

_MAGIC = 202021.25  # the bytes "PIEH"
_UNKNOWN = 1e9  # Middlebury's mark of a pixel without flow is larger
_LONGEST = 1000.0  # pixels; a dense flow beyond is no flow
_ZERO, _STEPS = 32768, 64  # KITTI's code of zero, and steps per pixel


def read_flo(path: str | Path) -> Tensor:
    """Read a flow (2, H, W) in Middlebury's format."""
    data = _bytes(path)
    if len(data) < 12 or struct.unpack("<f", data[:4])[0] != _MAGIC:
        raise DataError(f"{path} is no .flo file: it must begin with the number {_MAGIC}")
    width, height = struct.unpack("<ii", data[4:12])
    if width < 1 or height < 1 or len(data) < 12 + 8 * width * height:
        raise DataError(f"{path} is cut off: {width} x {height} flows do not fit its size")
    flow = np.frombuffer(data, "<f4", 2 * width * height, 12).reshape(height, width, 2)
    return _channels_first(flow.astype(np.float32))


def flo_bytes(flow: Tensor) -> bytes:
    """Return a flow (2, H, W) as a file in Middlebury's format."""
    _check_flow(flow)
    rows = flow.detach().permute(1, 2, 0).float().cpu().contiguous().numpy().astype("<f4")
    return struct.pack("<fii", _MAGIC, flow.shape[2], flow.shape[1]) + rows.tobytes()


def write_flo(path: str | Path, flow: Tensor) -> None:
    """Write a flow (2, H, W) in Middlebury's format."""
    write_atomically(Path(path), flo_bytes(flow))


def read_pfm(path: str | Path) -> Tensor:
    """Read a portable float map (C, H, W); a flow is the first two of three channels."""
    head, _, rest = _bytes(path).partition(b"\n")
    size, _, rest = rest.partition(b"\n")
    scale, _, rest = rest.partition(b"\n")
    try:
        channels = {b"PF": 3, b"Pf": 1}[head.strip()]
        width, height = map(int, size.split())
        if width < 1 or height < 1:
            raise ValueError(f"its size is {width} x {height}")
        order = "<f4" if float(scale) < 0 else ">f4"
        rows = np.frombuffer(rest, order, width * height * channels)
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is no whole .pfm file: {error}") from None
    return _channels_first(rows.reshape(height, width, channels)[::-1].astype(np.float32))


def read_kitti(path: str | Path) -> tuple[Tensor, Tensor]:
    """Read a sparse flow and where it is valid from a PNG of 16 bits: u, v and the mask."""
    pixels = read_png16(path).float()
    return (pixels[:2] - _ZERO) / _STEPS, pixels[2] > 0


def kitti_bytes(flow: Tensor, valid: Tensor | None = None) -> bytes:
    """Return a flow (2, H, W) as KITTI's PNG: 64 steps per pixel, up to 512 pixels.

    Flows that are not finite are marked as invalid.
    """
    _check_flow(flow)
    flow = flow.detach().double().cpu()
    finite = flow.isfinite().all(0)
    mask = finite if valid is None else finite & (valid.cpu() > 0)
    code = (_STEPS * flow.nan_to_num() + _ZERO).round().clamp(0, 2**16 - 1)
    pixels = torch.cat((code, mask.to(code)[None])).permute(1, 2, 0)
    return _png16_bytes(pixels.numpy().astype(np.uint16))


def write_kitti(path: str | Path, flow: Tensor, valid: Tensor | None = None) -> None:
    """Write a flow (2, H, W) in KITTI's format; see `kitti_bytes`."""
    write_atomically(Path(path), kitti_bytes(flow, valid))


def read_png16(path: str | Path) -> Tensor:
    """Read a PNG of 16 bits a channel as integers (3, H, W); Pillow would keep 8 bits only."""
    av = optional("av", "video", "16-bit PNGs")
    _bytes(path)
    try:
        with av.open(str(path)) as file:
            frame = next(file.decode(video=0))
            if frame.format.name not in ("rgb48be", "rgb48le"):
                raise DataError(f"{path} must be a PNG of 16 bits RGB, got {frame.format.name}")
            pixels = frame.to_ndarray().astype(np.int32)
    except (av.error.FFmpegError, StopIteration) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    return _channels_first(pixels)


def _png16_bytes(pixels: np.ndarray) -> bytes:
    """Return (H, W, 3) as a PNG of 16 bits a channel; Pillow cannot write colour of 16 bits."""
    av = optional("av", "video", "16-bit PNGs")
    encoder = av.CodecContext.create("png", "w")
    encoder.height, encoder.width = pixels.shape[:2]
    encoder.pix_fmt, encoder.time_base = "rgb48be", Fraction(1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb48be")
    packets = [*encoder.encode(frame), *encoder.encode(None)]
    return b"".join(bytes(packet) for packet in packets)


def read_flow(path: str | Path) -> tuple[Tensor, Tensor]:
    """Read a flow and where it is valid from any of the formats."""
    suffix = Path(path).suffix.lower()
    if suffix == ".png":
        return read_kitti(path)
    if suffix not in (".flo", ".pfm"):
        raise DataError(f"{path}: a flow is a .flo, .pfm or 16-bit .png file")
    flow = read_flo(path) if suffix == ".flo" else read_pfm(path)[:2]
    if len(flow) != 2:
        raise DataError(f"{path} has one channel, but a flow has two: is it a disparity?")
    valid = valid_mask(flow)
    return torch.where(valid, flow, 0), valid


def valid_mask(flow: Tensor) -> Tensor:
    """Return (H, W): where a flow (2, H, W) is neither NaN nor Middlebury's mark of no flow."""
    return flow.abs().amax(0) < _UNKNOWN  # False for NaN


def plausible(flow: Tensor) -> Tensor:
    """Return (H, W): where a dense flow (2, H, W) is below a thousand pixels."""
    return flow.abs().amax(0) < _LONGEST


def _bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from None


def _channels_first(array: np.ndarray) -> Tensor:
    """Return (H, W, C) as (C, H, W)."""
    return torch.from_numpy(array.copy()).permute(2, 0, 1).contiguous()


def _check_flow(flow: Tensor) -> None:
    if flow.dim() != 3 or flow.shape[0] != 2:
        raise ValueError(f"a flow is (2, height, width), got {tuple(flow.shape)}")
