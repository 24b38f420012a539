"""What a server counts: requests, statuses, evaluations and seconds; nothing of any input."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

_RECENT = 2048  # answers from which percentiles are computed
_PERCENTILES = (50, 90, 99)


class Metrics:
    """Counts since the start of a server.

    Attributes:
        accepted: requests that had a place and arrived whole.
        responses: by status of HTTP; 499 is a client that left before the answer.
        statuses: of solves, by name.
        evaluations: of `f`, summed over answered requests.
    """

    def __init__(self) -> None:
        self.accepted = self.evaluations = 0
        self.responses: Counter[int] = Counter()
        self.statuses: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._began = monotonic()

    def count_answer(self, answer: Mapping[str, Any], seconds: float) -> None:
        """Count the answer to a request."""
        self._seconds.append(seconds)
        self.evaluations += answer.get("evaluations", 0)
        if "status" in answer:
            self.statuses[answer["status"]] += 1

    def as_data(self, **now: int) -> dict[str, Any]:
        """Return all counts as plain values.

        Args:
            **now: what else there is to report, e.g. the length of the queue.
        """
        return {
            **now,
            "uptime_seconds": monotonic() - self._began,
            "accepted": self.accepted,
            "responses": {str(code): count for code, count in sorted(self.responses.items())},
            "statuses": dict(self.statuses),
            "evaluations": self.evaluations,
            "latency_seconds": percentiles(self._seconds),
        }

    def summary(self) -> str:
        """Return the counts of requests in one line."""
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.responses.items()))
        return f"{self.accepted} requests accepted; answers by status: {codes or 'none'}"


def percentiles(seconds: deque[float]) -> dict[str, float | None]:
    """Return the percentiles of latencies by name; None without any."""
    ordered = sorted(seconds)
    return {
        f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] if ordered else None
        for p in _PERCENTILES
    }


def as_prometheus(data: Mapping[str, Any]) -> str:
    """Return what `Metrics.as_data` returned in the text format of Prometheus."""
    lines = []
    for name, label, kind in (
        ("slots", "", "gauge"),
        ("busy", "", "gauge"),
        ("waiting", "", "gauge"),
        ("uptime_seconds", "", "gauge"),
        ("accepted", "", "counter"),
        ("evaluations", "", "counter"),
        ("responses", "code", "counter"),
        ("statuses", "status", "counter"),
        ("latency_seconds", "percentile", "gauge"),
    ):
        full = f"deq_zoo_{name}" + ("_total" if kind == "counter" else "")
        lines.append(f"# TYPE {full} {kind}")
        values = (
            {f'{{{label}="{key}"}}': v for key, v in data[name].items()}
            if label
            else {"": data[name]}
        )
        lines += [f"{full}{key} {value}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"
