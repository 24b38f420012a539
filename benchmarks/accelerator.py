"""A simulated accelerator: tensors whose values the host can see only by transfers.

It shows what an accelerator would be asked to do, on a machine without one: which operations are
kernel launches, which values the host waits for, and whether code mixes tensors of both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.tally import READS, Tally

#: The device that simulated tensors name: torch knows it and needs no driver for it.
DEVICE = torch.device("ipu")
_HOST = torch.device("cpu")


class DeviceTensor(Tensor):
    """A tensor on the simulated device, around its values in host memory."""

    device = DEVICE
    is_meta = False
    data_on_host: Tensor
    reads: Callable[[], None]

    @staticmethod
    def __new__(cls, values: Tensor, reads: Callable[[], None]) -> DeviceTensor:
        t: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device("meta"),  # torch enters a device to index; it can enter this one
        )
        t.data_on_host, t.reads = values, reads
        return t

    def tolist(self) -> Any:
        """Return the values as Python numbers: one read by the host."""
        self.reads()
        return self.data_on_host.tolist()

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.data_on_host.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} outside of the meter: a tensor of the simulated device escaped")


class Meter(TorchDispatchMode):
    """A mode that counts the operations of a solver, on the CPU or on the simulated device.

    Args:
        simulated: whether tensors made by `put` and by factories belong to the simulated device.
    """

    def __init__(self, simulated: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.simulated, self.tally, self._paused = simulated, Tally(), False
        self._uploads = _Uploads(self)

    def __enter__(self) -> Meter:
        self._uploads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._uploads.__exit__(*error)  # type: ignore[no-untyped-call]

    def put(self, t: Tensor) -> Tensor:
        """Return a tensor on the device that is metered, without counting the transfer."""
        return DeviceTensor(t, self._count_read) if self.simulated else t

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose operations do not count, for `f` itself."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def count_upload(self) -> None:
        """Count a transfer from the host to the device."""
        self.tally.uploads += not self._paused

    def _count_read(self) -> None:
        self.tally.reads += not self._paused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        on_device = [isinstance(t, DeviceTensor) for t in leaves]
        plain = [_unwrap(t) for t in leaves]
        if not self.simulated:
            out = func(*args, **kwargs)
            self._count(func, plain, out, launched=True)
            return out
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == DEVICE.type
        to_host = target is not None and torch.device(target) == _HOST
        if target is not None:
            kwargs = {**kwargs, "device": _HOST}
        out = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
        moved = self._count_transfer(func, args, to_device, to_host, any(on_device))
        if not moved:
            _refuse_mixture(func, leaves)
            self._count(func, plain, out, launched=any(on_device) or to_device)
        if (any(on_device) and not to_host) or to_device:
            return self._wrap(out, leaves)
        return out

    def _count_transfer(
        self, func: Any, args: Any, to_device: bool, to_host: bool, on_device: bool
    ) -> bool:
        """Count a transfer between host and device; return whether `func` is one."""
        name = _name(func)
        reads = name in READS or (name == "_to_copy" and to_host)
        if name == "copy_":
            target, source = (isinstance(t, DeviceTensor) for t in args[:2])
            if target != source and (args[1].dim() or not source):
                self.tally.reads += source and not self._paused
                if target:
                    self.count_upload()
                return True
            return False
        if reads and on_device:
            self._count_read()
            return True
        if name == "_to_copy" and to_device and not on_device:
            self.count_upload()
            return True
        return False

    def _count(self, func: Any, inputs: list[Any], out: Any, launched: bool) -> None:
        if not self._paused:
            tensors = [t for t in inputs if isinstance(t, Tensor)]
            outputs = [t for t in map(_unwrap, tree_leaves(out)) if isinstance(t, Tensor)]
            self.tally.add(func, tensors, outputs, launched)

    def _wrap(self, out: Any, inputs: list[Any]) -> Any:
        """Return results as device tensors; an input that `func` returns stays the same object."""
        known = {id(t.data_on_host): t for t in inputs if isinstance(t, DeviceTensor)}

        def wrap(t: Any) -> Any:
            if not isinstance(t, Tensor) or isinstance(t, DeviceTensor):
                return t
            return known[id(t)] if id(t) in known else DeviceTensor(t, self._count_read)

        return tree_map(wrap, out)


class _Uploads(TorchFunctionMode):
    """A mode for transfers to the device, whose kernels would enter the real device first."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = kwargs.get(
            "device", next((a for a in args[1:] if isinstance(a, torch.device)), None)
        )
        if name not in ("tensor", "to") or target != DEVICE:
            return func(*args, **kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        args = [a for a in args if not isinstance(a, torch.device)]
        if name == "to" and isinstance(args[0], DeviceTensor):
            return func(*args, **kwargs) if len(args) + len(kwargs) > 1 else args[0]
        self._meter.count_upload()
        moved = func(*args, **kwargs) if name == "tensor" or len(args) > 1 else args[0]
        return self._meter.put(moved.clone())


def _unwrap(t: Any) -> Any:
    return t.data_on_host if isinstance(t, DeviceTensor) else t


def _name(func: Any) -> str:
    name: str = func._schema.name.split("::")[1]
    return name


def _refuse_mixture(func: Any, leaves: list[Any]) -> None:
    """Raise like a real device if an operation mixes its tensors with larger ones of the host."""
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    on_device = [isinstance(t, DeviceTensor) for t in tensors]
    if any(on_device) and not all(
        d or not t.dim() for d, t in zip(on_device, tensors, strict=True)
    ):
        raise RuntimeError(f"{func} mixes tensors of the host and of the device")
