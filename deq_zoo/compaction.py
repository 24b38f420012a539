"""Compaction in evaluation: samples that have finished leave the batch where that saves time."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from deq_zoo.model import Model
from deq_zoo.output import Output

#: Operations of one evaluation of f from which compaction is switched on. A cautious choice, not a
#: measured limit: with convolutions of 2.4 million operations and more, a batch in which one of 32
#: samples takes long is several times faster, and one whose samples finish together loses nothing
#: (`benchmarks/choices.py`). Smaller maps, where copying rows may cost more, were not measured.
LEAST_OPERATIONS = 4_000_000
LEAST_SAMPLES = 8
_log = logging.getLogger("deq_zoo")


class Compaction:
    """A model in evaluation that lets finished samples leave the batch if f is costly.

    The decision depends on counts alone, so it is the same in every run: the first call computes
    with the whole batch while torch counts its floating-point operations. Samples are independent,
    so the results are those of the whole batch up to rounding. f must take what belongs to a sample
    as `args` of the DEQ if its model is called with `compact=True`.

    Args:
        model: in evaluation mode; its DEQ, if it has one, is the attribute `deq`.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._deq = model, getattr(model, "deq", None)
        self.on: bool | None = None  # None before the first call

    def __call__(self, *inputs: Any, **call: Any) -> Output[Any, Any]:
        """Call the model; compact from the second call on if it pays."""
        if self.on is None:
            return self._call_and_decide(*inputs, **call)
        out: Output[Any, Any] = self._model(
            *inputs, **(call | ({"compact": True} if self.on else {}))
        )
        return out

    def _call_and_decide(self, *inputs: Any, **call: Any) -> Output[Any, Any]:
        if not self._can_finish_early():
            self.on = False
            out: Output[Any, Any] = self._model(*inputs, **call)
            return out
        with FlopCounterMode(display=False) as counter:
            out = self._model(*inputs, **call)
        assert out.stats is not None, "a model with a tolerance has solved"
        operations = counter.get_total_flops() / max(1, out.stats.nfe)
        self.on = operations >= LEAST_OPERATIONS and len(out.stats.status) >= LEAST_SAMPLES
        if self.on:
            _log.info(
                "evaluation: finished samples leave the batch (%.0f million operations in an "
                "evaluation of f)", operations / 1e6,
            )  # fmt: skip
        return out

    def _can_finish_early(self) -> bool:
        """Return whether samples stop by themselves, on the kind of device that was measured."""
        if self._deq is None or self._model.device.type != "cpu":
            return False
        config = self._deq.config
        return bool(config.f_stop.goal) and not config.coupled
