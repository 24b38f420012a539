"""Precision of a run: what its model computes in, and which tolerances that can meet."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from torchdeq import DEQConfig

M = TypeVar("M", bound=nn.Module)

Precision = Literal["no", "bf16", "fp16", "float64"]
#: The precision of the arithmetic under autocast.
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Relative residuals that forward and backward solves reach for every map that was measured.
REACHABLE = {"bf16": 1e-2, "fp16": 1e-3}


def in_precision(model: M, precision: Precision) -> M:
    """Return a model with its weights in float64 if the precision says so, else unchanged."""
    return model.double() if precision == "float64" else model


def reachable_tolerances(
    deq: DEQConfig, precision: Precision, uses: Collection[str], kept: Collection[str] = ()
) -> dict[str, Any]:
    """Return options of a DEQ that raise the tolerances which a precision cannot meet.

    A relative tolerance becomes the residual that the precision reaches. An absolute one stays as
    the absolute part of a test that has this residual as its relative part. Without a tolerance
    there is nothing to raise.

    Args:
        deq: the options so far.
        precision: of the run.
        uses: the options that have an effect on the task.
        kept: options that the user has set; a solve with one of them keeps its tolerance.
    """
    least = REACHABLE.get(precision)
    if least is None:
        return {}
    raised = dict[str, Any]()
    for side in ("f", "b") if deq.implicit else ("f",):
        if not {f"{side}_{name}" for name in ("tol", "rtol", "atol")} & set(kept):
            raised |= _raised(deq, side, least)
    return {name: value for name, value in raised.items() if name in uses}


def _raised(deq: DEQConfig, side: str, least: float) -> dict[str, Any]:
    """Return the options of one solve, `"f"` or `"b"`, that raise its tolerance to `least`."""
    stop = deq.f_stop if side == "f" else deq.b_stop
    if not stop.goal:
        return {}
    if stop.rtol is not None:
        return {f"{side}_rtol": least} if stop.rtol < least else {}
    tol = stop.goal
    if stop.mode == "rel" or side == "b":  # backward residuals are relative to the gradient
        return {f"{side}_tol": least} if tol < least else {}
    return {f"{side}_tol": 0.0, f"{side}_rtol": least, f"{side}_atol": tol}


def describe_tolerances(deq: DEQConfig, precision: Precision) -> str:
    """Return a line about the tolerances of a run in half precision; empty for others."""
    least = REACHABLE.get(precision)
    if least is None:
        return ""
    shown = [
        f"{side}_{name}={getattr(deq, f'{side}_{name}'):g}"
        for side in (("f", "b") if deq.implicit else ("f",))
        for name in ("tol", "rtol", "atol")
        if getattr(deq, f"{side}_{name}")
    ]
    return (
        f"precision {precision}: solves reach a relative residual of {least:g}, and a tolerance "
        f"below it ends as STALLED; this run has {', '.join(shown) or 'no tolerance'}"
    )


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return a block in the mixed precision of a run; without mixed precision, an empty one."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return what scales the losses of fp16, whose gradients would underflow; else None."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None
