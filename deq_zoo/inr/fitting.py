"""A signal to a field in one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.fitting import fit as fit_preset
from deq_zoo.inr.data import crop, with_channels
from deq_zoo.inr.model import FieldConfig
from deq_zoo.inr.readers import read_signal
from deq_zoo.inr.recipes import SHORT
from deq_zoo.inr.representation import Representation
from deq_zoo.inr.signal import NAMES, Kind, Signal
from deq_zoo.inr.task import FitSignal
from deq_zoo.optim import Adam
from deq_zoo.preset import Preset
from torchdeq import DEQConfig

#: Input scales of the paper, by kind of signal.
SCALES = {"image": 128.0, "video": 128.0, "audio": 25000.0}
_KINDS: dict[int, Kind] = {2: "audio", 3: "image", 4: "video"}  # by the axes of a tensor
_SOURCE_OPTIONS = ("data", "file", "data_dir", "index")  # of a task; `fit` has a source instead


def fit(
    source: str | Path | Tensor | Signal,
    steps: int = 500,
    *,
    net: FieldConfig | None = None,
    deq: DEQConfig | None = None,
    lr: float = 1e-3,
    seed: int = 0,
    seconds: float | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, float], object] | None = None,
    channels: int | None = None,
    side: int = 0,
    shrink: int = 1,
    length: int = 0,
    **task: Any,
) -> Representation:
    """Return a signal as a field, fitted by the paper's recipe: warm starts, 3 phantom steps, Adam.

    Raises `ZooError` if the loss or the weights become NaN or infinite.

    Args:
        source: an image, wav or video file; a tensor (H, W, 1 or 3) or (T, H, W, 3) of bytes or
            numbers from 0 to 1, or (n, 1) from -1 to 1; a signal.
        steps: updates.
        net: the shape of the field; by default 256 wide with the paper's scale for the signal.
        deq: options of the equilibrium.
        lr: learning rate of Adam.
        seed: of the initial weights and the order of points.
        seconds: stop after so long.
        device: to train on.
        progress: called with the step and the loss after every step.
        channels: of an image, 3 or 1; by default a tensor's own, and 3 for a file.
        side: of a square in the middle of every picture; 0 takes the whole picture.
        shrink: divide the sides of pictures by this first.
        length: fit so many frames or samples from the start; 0 fits all.
        **task: further options of `FitSignal`, e.g. `batch=65536`.
    """
    refused = [name for name in _SOURCE_OPTIONS if name in task]
    if refused:
        raise TypeError(f"fit takes the signal as source: drop {', '.join(refused)}")
    signal = as_signal(source, channels, length)
    net = FieldConfig(width=256, input_scale=SCALES[signal.kind]) if net is None else net
    options = FitSignal(
        net=net, deq=SHORT if deq is None else deq, side=side, shrink=shrink, length=length, **task
    )
    chosen = options.with_signal(crop(signal, side, shrink, length))
    preset = Preset(chosen, Adam(lr=lr, decoupled=False), steps=max(1, steps), seed=seed)
    model = _train(preset, steps, device, seconds, progress)
    assert isinstance(model, Representation)
    return model.eval()


def _train(
    preset: Preset,
    steps: int,
    device: torch.device | str,
    seconds: float | None,
    progress: Callable[[int, float], object] | None,
) -> Any:
    """Return a trained model; without steps, one with its initial weights."""
    if steps < 1:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(preset.seed)
            return preset.task.build().to(device)
    return fit_preset(preset, device=device, max_seconds=seconds, progress=progress)


def as_signal(
    source: str | Path | Tensor | Signal, channels: int | None = None, length: int = 0
) -> Signal:
    """Return the signal in a file or a tensor.

    Args:
        source: a file, a tensor or a signal.
        channels: of an image; by default a tensor's own, and 3 for a file.
        length: read only so many frames of a video file; 0 reads all.
    """
    if channels not in (None, 1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if isinstance(source, Signal):
        signal = source
    elif isinstance(source, Tensor):
        signal = _from_tensor(source)
    else:
        signal = read_signal(Path(source).expanduser(), channels or 3, length)
    if channels is None or signal.channels == channels:
        return signal
    if signal.kind != "image":
        raise ValueError(f"channels is an option for images, got {NAMES[signal.kind]}: drop it")
    return Signal("image", with_channels(signal.values, channels))


def _from_tensor(source: Tensor) -> Signal:
    if source.dim() not in _KINDS:
        raise DataError(
            "a tensor to fit is a sound (n, 1), an image (H, W, c) or a video (T, H, W, c), got "
            f"{tuple(source.shape)}"
        )
    return Signal(_KINDS[source.dim()], source.detach().contiguous())
