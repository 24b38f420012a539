"""The processes of one run: how they decide together, and how they end together.

Process 0 decides (which checkpoint is best, when to stop), and the others do as it says. Every wait
for another process has an end: the timeout, or the loss of that process.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from math import inf
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.peer_watch import PeerWatch
from deq_zoo.precision import AUTOCAST, make_scaler
from deq_zoo.preset import Preset
from deq_zoo.signals import handling

T = TypeVar("T")
#: The environment variable with the seconds that a process waits for another.
TIMEOUT = "DEQ_ZOO_TIMEOUT"
_TIMEOUT = 1800.0
_PAUSE = 0.1  # seconds for threads of a group that caches of DTensor keep: time to become idle


class Processes:
    """The processes of a run, as one of them sees them.

    Args:
        accelerator: devices and precision of this process.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.is_main = self.rank == 0

    def from_main(self, compute: Callable[[], T]) -> T:
        """Return what process 0 computes; raise in all processes if it raises a `ZooError`."""
        if self.count == 1:
            return compute()
        answer: Any = None
        error: ZooError | None = None
        if self.is_main:
            try:
                answer = compute()
            except ZooError as raised:
                error = raised
        (answer, message), *_ = broadcast_object_list([(answer, error and str(error))])
        if error is not None:
            raise error
        if message is not None:
            raise ZooError(f"process 0 ended the run: {message}")
        return cast(T, answer)

    def any_stops(self, reason: int) -> int:
        """Return the largest reason to stop of all processes: they must stop at the same step."""
        if self.count == 1:
            return reason
        reasons = self.accelerator.gather(torch.tensor([reason], device=self.accelerator.device))
        return int(cast(Tensor, reasons).max())

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, by their numbers."""
        return cast("list[T]", gather_object([value]))

    def first(self, value: T | None) -> T | None:
        """Return the value of the first process that has one; all of them must then do the same."""
        if self.count == 1:
            return value
        return next((each for each in self.gather(value) if each is not None), None)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the means of numbers over all processes."""
        if self.count == 1:
            return dict(values)
        rows = self.gather(dict(values))
        return {name: sum(row[name] for row in rows) / self.count for name in values}

    @contextmanager
    def ending_together(self, advice: Callable[[], str]) -> Iterator[None]:
        """Let all processes end soon if one of them fails or is lost within the block.

        Args:
            advice: returns how to go on, for the error.
        """
        if self.count == 1:
            yield
            return

        def explain_end(number: int, frame: object) -> None:
            """Raise an error: a launcher ends the other processes when one of them is lost."""
            reason = watch.reason()
            raise SystemExit(128 + number) if reason is None else ZooError(f"{reason}; {advice()}")

        watch = PeerWatch(self.rank, self.count, lambda reason: f"{reason}; {advice()}")
        watch.start()
        with handling(explain_end, signal.SIGTERM):
            try:
                yield
            except Exception as error:
                if not _of_connection(error):
                    watch.announce(str(error) or type(error).__name__)
                    raise
                reason = watch.reason() or _describe(error)
                watch.announce(reason)
                raise ZooError(f"{reason}; {advice()}") from None
            except BaseException as error:
                watch.announce(type(error).__name__)
                raise
            finally:
                watch.stop()
        atexit.register(_leave_group)


def _leave_group() -> None:
    """Destroy the process group when the program ends: another run may have joined it.

    A thread of gloo that lives on may drop a tensor of an ending interpreter, which aborts it.
    """
    if dist.is_initialized():
        gc.collect()  # a wrapped model keeps the group, and cycles keep the model
        dist.destroy_process_group()
        time.sleep(_PAUSE)


def start_processes(preset: Preset, cpu: bool) -> Processes:
    """Return the processes of a run; waits until all of them have started."""
    _check_launcher()
    if _world_is_set():
        # Its functions keep the group that is there when they are imported, as defaults.
        import_module("torch.distributed.nn.functional")
    if not dist.is_initialized():  # an earlier run of this process may have had other devices
        AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState._reset_state()
    handlers = [
        # Buffers are functions of weights and data that all processes share, or statistics that are
        # merged before they are used. Sending them along with every forward pass would cost time,
        # and hang where processes take a different number of passes.
        DistributedDataParallelKwargs(broadcast_buffers=False),
        InitProcessGroupKwargs(timeout=timedelta(seconds=read_timeout())),
    ]
    try:
        accelerator = Accelerator(
            mixed_precision=preset.precision if preset.precision in AUTOCAST else "no",
            # Without an accelerator, accelerate connects processes only if it is told of the CPU.
            cpu=cpu or not torch.accelerator.is_available(),
            kwargs_handlers=handlers,
        )
    except (dist.DistError, ValueError) as error:
        if not _world_is_set():
            raise
        raise ZooError(
            f"the processes of this run did not find each other: {error}; a launcher such as "
            "torchrun sets WORLD_SIZE and what belongs to it: unset it to train with one process"
        ) from None
    started = os.environ.get("WORLD_SIZE", str(accelerator.num_processes))
    if started != str(accelerator.num_processes):
        # Each of them would train alone, and all into one folder.
        raise ZooError(
            f"a launcher has started {started} processes (WORLD_SIZE), and this one is connected "
            f"to {accelerator.num_processes - 1} others: unset WORLD_SIZE to train with one "
            "process, or use --cpu"
        )
    if preset.precision == "fp16" and accelerator.device.type == "cpu":
        # On a CPU accelerate leaves fp16 out without a word: neither autocast nor scaled losses.
        accelerator.native_amp = True
        accelerator.scaler = make_scaler("fp16", accelerator.device)
    return Processes(accelerator)


def read_timeout() -> float:
    """Return the seconds that a process waits for another, as the environment says."""
    text = os.environ.get(TIMEOUT, str(_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < inf:
        raise ZooError(f"{TIMEOUT} must be a number of seconds above 0, got {text!r}")
    return seconds


def _check_launcher() -> None:
    """Raise `ZooError` if `accelerate launch` was asked for CPU processes that it did not start.

    Its launcher starts several processes on CPUs only through mpirun. Without, it sets the address
    at which they would meet, and starts one.
    """
    environment = os.environ
    asked = environment.get("ACCELERATE_USE_CPU", "").lower() == "true"
    if asked and "MASTER_ADDR" in environment and not _world_is_set():
        raise ZooError(
            "accelerate launch --cpu starts several processes only with --mpirun_hostfile, and has "
            "started one: use torchrun --nproc_per_node N -m deq_zoo train ... instead"
        )


def _world_is_set() -> bool:
    names = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    return any(name in os.environ for name in names)


def _of_connection(error: Exception) -> bool:
    """Return whether an error comes from the connection to another process."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "nccl"))
    )


def _describe(error: Exception) -> str:
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return (
            f"another process gave no answer for {read_timeout():.0f} s (it may be stuck, or "
            f"{TIMEOUT} too short)"
        )
    return "another process of this run has closed its connection"
