"""Warm starts in training: the last state of every sample, kept and returned by its index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchdeq.checks import require, require_whole
from torchdeq.pytree import S, State, map_tensors, walk

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class WarmStarts:
    """The last states of the samples of a data set, to start their next solves from.

    A fixed point does not depend on its start, so warm starts change the cost of a solve and not
    its answer, if the fixed point is unique and the solve converges. The memory is allocated at the
    first `put`: `size` states, i.e. `size * numbers per sample * bytes per number`, and no more
    later. Nothing is read from the device.

    With several processes, each keeps the states of the samples that it has seen itself.

    Args:
        size: the number of samples in the data set; indices run from 0 to `size - 1`.
        device: where states are kept; by default on the device of the first one. On `"cpu"` the
            memory of an accelerator stays free, and every batch is copied there and back.
        dtype: in which states are kept; by default their own. `torch.bfloat16` takes half the
            memory, and a start need not be precise.
        max_bytes: an error instead of an allocation above this.

    Example:
        >>> warm = WarmStarts(len(data))
        >>> for index, x, y in loader:  # index: (B,) which samples the batch has
        ...     states, stats = deq(lambda z: f(z, x), warm.take(index, torch.zeros_like(x)))
        ...     warm.put(index, states[-1], keep=~stats.failed)
    """

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_bytes: int = 4_000_000_000,
    ) -> None:
        require_whole("size, the number of samples,", size)
        require(
            dtype is None or dtype.is_floating_point, "dtype must be a floating-point dtype", dtype
        )
        self.size, self.dtype, self.max_bytes = int(size), dtype, max_bytes
        self.device = None if device is None else torch.device(device)
        self._kept: dict[str, Tensor] = {}  # (size, ...) by the path of a tensor in a state
        self._seen: Tensor | None = None  # (size,)

    @property
    def nbytes(self) -> int:
        """Return the memory that is allocated, in bytes."""
        return sum(t.nbytes for t in self._kept.values()) + (0 if self._seen is None else self.size)

    @property
    def seen(self) -> Tensor:
        """Return (size,) which samples have a state."""
        return torch.zeros(self.size, dtype=torch.bool) if self._seen is None else self._seen

    def take(self, index: Tensor, default: S) -> S:
        """Return the last states of samples, and rows of `default` for samples without one.

        Args:
            index: (B,) whole numbers, the samples.
            default: a start for the same samples, e.g. zeros; its structure, shapes, dtype and
                device are those of the result.
        """
        tensors = _tensors(default)
        index = self._checked(index, tensors)
        if self._seen is None:
            return default
        self._check_layout(tensors)
        rows, device = index.to(self._seen.device), next(iter(tensors.values())).device
        with torch.no_grad():
            last = {
                path: self._kept[path][rows].to(t.device, t.dtype, non_blocking=True)
                for path, t in tensors.items()
            }
            good = self._seen[rows].to(device) & _finite(last.values())
            starts = iter([
                torch.where(_like(good.to(t.device), t), last[path], t)
                for path, t in tensors.items()
            ])  # fmt: skip
        result: S = map_tensors(default, lambda _: next(starts))
        return result

    @torch.no_grad()
    def put(self, index: Tensor, z: State, keep: Tensor | None = None) -> None:
        """Keep states for the next time.

        A state with a NaN or an infinity is not kept, nor one beyond the range of `dtype`.

        Args:
            index: (B,) whole numbers, the samples; no sample twice, which is checked on the CPU.
            z: their states; graphs are not kept.
            keep: (B,) which of them to keep, e.g. `~stats.failed`; all by default.
        """
        tensors = _tensors(z)
        index = self._checked(index, tensors)
        _check_unique(index)
        if keep is not None and not (isinstance(keep, Tensor) and keep.dtype == torch.bool):
            raise TypeError(f"keep must be a tensor of bool, got {_described(keep)}")
        if self._seen is None:
            self._allocate(tensors)
        self._check_layout(tensors)
        assert self._seen is not None
        device = self._seen.device
        new = {
            path: t.to(device, self._kept[path].dtype, non_blocking=True)
            for path, t in tensors.items()
        }
        rows, good = index.to(device), _finite(new.values())
        if keep is not None:
            require(keep.shape == index.shape, "keep must have one flag per sample", keep.shape)
            good = good & keep.to(device)
        for path, t in new.items():
            kept = self._kept[path]
            kept[rows] = torch.where(_like(good, t), t, kept[rows])
        self._seen[rows] = self._seen[rows] | good

    def forget(self, index: Tensor | None = None) -> None:
        """Forget the states of samples, or of all samples, e.g. after their data has changed.

        Args:
            index: (n,) whole numbers, the samples; all by default.
        """
        if index is not None:
            index = self._checked(index, {})
        if self._seen is not None:
            self._seen[slice(None) if index is None else index.to(self._seen.device)] = False

    def state_dict(self) -> dict[str, Any]:
        """Return everything for a checkpoint; the tensors are not copied."""
        return {"size": self.size, "seen": self._seen, "states": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, on the device and in the dtype of this object if it has them.

        Raise `ValueError` if the checkpoint is of another number of samples, or not of this class.
        """
        names = ("size", "seen", "states")
        require(all(n in state for n in names), f"a checkpoint must have {names}", list(state))
        require(
            state["size"] == self.size, f"the checkpoint must be of {self.size} samples",
            state["size"],
        )  # fmt: skip
        seen, states = state["seen"], dict(state["states"])
        lengths = {len(t) for t in (*states.values(), *([] if seen is None else [seen]))}
        require(lengths <= {self.size} and (seen is not None or not states),
                f"tensors of the checkpoint must have {self.size} rows", lengths)  # fmt: skip
        with torch.inference_mode(False):
            self._kept = {k: t.to(self.device, self.dtype, copy=True) for k, t in states.items()}
            self._seen = None if seen is None else seen.to(self.device, copy=True)

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        if self.dtype is not None and any(t.is_complex() for t in tensors.values()):
            raise TypeError(f"complex states lose their imaginary part in dtype={self.dtype}")
        shapes = {path: (self.size, *t.shape[1:]) for path, t in tensors.items()}
        dtypes = {path: self.dtype or t.dtype for path, t in tensors.items()}
        sizes = (torch.Size(shapes[path]).numel() * dtypes[path].itemsize for path in tensors)
        needed = self.size + sum(sizes)
        if needed > self.max_bytes:
            raise ValueError(
                f"the states of {self.size:,} samples take {needed / 1e9:.1f} GB, more than "
                f"max_bytes={self.max_bytes / 1e9:.1f} GB: raise max_bytes, or keep them with "
                "dtype=torch.bfloat16 or device='cpu'"
            )
        device = self.device or next(iter(tensors.values())).device
        with torch.inference_mode(False):  # training writes into them, too
            self._kept = {
                path: torch.zeros(shapes[path], dtype=dtypes[path], device=device)
                for path in tensors
            }
            self._seen = torch.zeros(self.size, dtype=torch.bool, device=device)

    def _checked(self, index: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Return the index in int64, or raise if it does not name a sample for each row."""
        whole = isinstance(index, Tensor) and index.dim() == 1 and index.dtype in _WHOLE
        if not whole:
            raise TypeError(
                f"index must be a tensor of (B,) whole numbers, got {_described(index)}"
            )
        if any(t.dim() == 0 or len(t) != len(index) for t in tensors.values()):
            shapes = [tuple(t.shape) for t in tensors.values()]
            raise ValueError(f"index has {len(index)} samples, and the state has shapes {shapes}")
        # On an accelerator this would wait; there torch itself checks the range.
        on_host = index.device.type == "cpu" and len(index)
        if on_host and not 0 <= int(index.min()) <= int(index.max()) < self.size:
            raise IndexError(f"indices must lie within 0 and {self.size - 1}, got {index.tolist()}")
        return index.long()  # uint8 would be a mask

    def _check_layout(self, tensors: dict[str, Tensor]) -> None:
        got, expected = (
            {path: tuple(t.shape[1:]) for path, t in ts.items()} for ts in (tensors, self._kept)
        )
        require(got == expected, f"states of one sample must have the shapes {expected}", got)
        for path, t in tensors.items():
            if t.is_complex() != self._kept[path].is_complex():
                raise TypeError(
                    f"states must be all real or all complex: got {t.dtype}, kept are "
                    f"{self._kept[path].dtype}"
                )


def _tensors(z: State) -> dict[str, Tensor]:
    """Return the tensors of a state by their paths, in order."""
    leaves = dict(walk(z))
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves.values()):
        raise TypeError("a state must be a tensor, or a tuple, list or dict of tensors")
    return leaves


def _finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return (B,) whether all numbers of each sample are finite, on the device of the first."""
    flags = [t.isfinite().reshape(len(t), t.shape[1:].numel()).all(1) for t in tensors]
    return torch.stack([flag.to(flags[0].device) for flag in flags]).all(0)


def _check_unique(index: Tensor) -> None:
    """Raise `ValueError` if a sample is there twice; an accelerator would wait for the answer."""
    if index.device.type == "cpu" and len(index.unique()) < len(index):
        raise ValueError(f"index must have no sample twice, got {index.tolist()}")


def _described(value: object) -> str:
    """Return what a value is, for an error."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


def _like(flags: Tensor, t: Tensor) -> Tensor:
    """Return flags (B,) in a shape that broadcasts with (B, ...)."""
    return flags.reshape(-1, *(1,) * (t.dim() - 1))
