"""What a server needs of a family: fields of a request, and the way from them to an answer.

A family names a module in `Family.service`; its function `make_service(model)` returns a `Service`.
"""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from PIL import Image
from torch import Tensor

from deq_zoo.model import Model
from deq_zoo.output import solve_data
from deq_zoo.serving.limits import Limits
from torchdeq import SolverStat, Status
from torchdeq.stream import Request, Result, Stream

M = TypeVar("M", bound=Model)

#: The fields of a request by name: an image is bytes (3, H, W), numbers are nested lists.
Values = Mapping[str, Any]


class Field(NamedTuple):
    """A field of a request.

    Args:
        name: in the request.
        kind: `numbers` are nested lists.
        meaning: a few words for the page.
        optional: whether a request may leave the field out.
    """

    name: str
    kind: Literal["image", "text", "numbers"]
    meaning: str
    optional: bool = False


@dataclass(frozen=True)
class Prepared:
    """A request whose solve is one row of a batched solve, and what `finish` needs beside it."""

    request: Request
    context: Any = None


class Service(ABC, Generic[M]):
    """A trained model as a server sees it.

    Answers are plain values, as JSON has them. Methods raise `ZooError`, `ValueError` or
    `TypeError` for values that the model cannot take. They run in threads of the server.

    Args:
        model: in evaluation mode, on its device.
    """

    fields: tuple[Field, ...]

    def __init__(self, model: M) -> None:
        self.model = model

    def open_stream(self, limits: Limits) -> Stream | None:
        """Return a stream whose rows are requests; None if every request is a solve of its own."""
        return None

    @abstractmethod
    def answer(self, values: Values) -> dict[str, Any]:
        """Return what `model.predict` answers; one thread at a time calls this."""

    def prepare(self, values: Values) -> Prepared:
        """Return the request to the stream; several threads call this, if there is a stream."""
        raise NotImplementedError

    def finish(self, result: Result, context: Any) -> dict[str, Any]:
        """Return the answer from a solved row; several threads call this, if there is a stream."""
        raise NotImplementedError


def describe_stats(stats: SolverStat | None) -> dict[str, Any]:
    """Return status, evaluations and residual of a solve; the worst status of several samples."""
    if stats is None:
        return {}
    return {"status": Status(int(stats.status.max())).name, **solve_data(stats)}


def describe_result(result: Result) -> dict[str, Any]:
    """Return status, evaluations and residual of a row of a stream."""
    return {
        "status": result.status.name,
        "evaluations": result.evaluations,
        "residual": result.relative if isfinite(result.relative) else None,
        "settled": not result.status.failed,
    }


def png_text(image: Tensor) -> str:
    """Return an image (C, H, W) of bytes as PNG in base64."""
    pixels = image.cpu().permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
