"""A service whose answers wait for the test."""

from __future__ import annotations

from threading import Event, Semaphore
from typing import Any

from torch import nn

from deq_zoo.model import Model
from deq_zoo.serving.service import Field, Service, Values


class Linear(Model):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(1, 1)


class SlowService(Service[Linear]):
    """Answers with its text in capitals, as soon as the test lets it.

    Attributes:
        started: released once for each request that is being solved.
        go: set it to let requests go on.
    """

    fields = (Field("text", "text", "any text"), Field("list", "numbers", "numbers", True))

    def __init__(self) -> None:
        super().__init__(Linear())
        self.started, self.go = Semaphore(0), Event()

    def answer(self, values: Values) -> dict[str, Any]:
        self.started.release()
        assert self.go.wait(30)
        if values["text"] == "break":
            raise RuntimeError(f"no luck with {values['text']}")
        return {"prediction": values["text"].upper(), "evaluations": 2, "status": "CONVERGED"}
