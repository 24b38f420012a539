"""Running statistics of several processes as those of one model.

Each process has seen other samples, so the running means and variances of its batch normalisation
differ from the others'. A model to evaluate or save has the mean of the means and the variance of
all samples together: the mean of the variances plus the variance of the means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deq_zoo.checkpoint import digest
from deq_zoo.processes import Processes
from deq_zoo.tree import local

Buffers = dict[str, Tensor]


@contextmanager
def merged_statistics(model: nn.Module, processes: Processes) -> Iterator[Buffers]:
    """Give all processes the same running statistics within a block; yield this process's own.

    Each process goes on with its own statistics after the block: a run that was interrupted must
    not differ from one that was not.
    """
    if processes.count == 1:
        yield {}
        return
    own = {name: buffer.clone() for name, buffer in _statistics(model).items()}
    _merge(model, processes)
    try:
        yield own
    finally:
        with torch.no_grad():
            for name, buffer in _statistics(model).items():
                buffer.copy_(own[name])


def own_buffers(model: nn.Module, own: Buffers, processes: Processes) -> Buffers:
    """Return the buffers of this process that differ from those of the model that is saved.

    Args:
        model: with merged statistics.
        own: this process's own statistics, from `merged_statistics`.
        processes: of the run.
    """
    if processes.count == 1:
        return {}
    saved = _saved_buffers(model)
    expected = processes.from_main(lambda: {name: digest(b) for name, b in saved.items()})
    mine = saved | own
    return {name: b.cpu() for name, b in mine.items() if digest(b) != expected[name]}


def restore_buffers(model: nn.Module, buffers: Buffers) -> None:
    """Set buffers that `own_buffers` returned."""
    places = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in buffers.items():
            places[name].copy_(value)


def _merge(model: nn.Module, processes: Processes) -> None:
    accelerator = processes.accelerator
    with torch.no_grad():
        for module in model.modules():
            mean, variance = _running(module)
            if mean is None or variance is None:
                continue
            means = accelerator.gather(mean.unsqueeze(0)).double()  # (processes, channels)
            variances = accelerator.gather(variance.unsqueeze(0)).double()
            mean.copy_(means.mean(0))
            variance.copy_(variances.mean(0) + means.var(0, correction=0))


def _statistics(model: nn.Module) -> Buffers:
    """Return the running means and variances of a model by their names."""
    statistics: Buffers = {}
    for prefix, module in model.named_modules():
        mean, variance = _running(module)
        if mean is not None and variance is not None:
            dot = f"{prefix}." if prefix else ""
            statistics |= {f"{dot}running_mean": mean, f"{dot}running_var": variance}
    return statistics


def _running(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    mean, variance = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    both = isinstance(mean, Tensor) and isinstance(variance, Tensor)
    return (mean, variance) if both else (None, None)


def _saved_buffers(model: nn.Module) -> Buffers:
    """Return the buffers that belong to the state_dict and that every process has as a whole."""
    saved = model.state_dict().keys()
    named = model.named_buffers()
    return {name: b for name, b in named if name in saved and local(b) is b}
