"""The benchmark of reasoners: runs can be built, and tables do not depend on their order."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import reason
from deq_zoo.reason.task import SolvePuzzles
from tools.tables import reason as tables


@pytest.mark.parametrize("size", [reason.Size(), reason.SMALL], ids=["whole", "small"])
@pytest.mark.parametrize("part", ["gradients", "mazes", "larger"])
def test_every_gradient_has_a_run_that_can_be_built(part: str, size: reason.Size) -> None:
    jobs = list(reason.PARTS[part](size, ""))
    assert len(jobs) == len(reason.GRADIENTS) * size.seeds
    for job in jobs:
        task = job.arguments[0].task
        assert isinstance(task, SolvePuzzles)
        assert task.net.noise == 0
        assert task.build().gradient == task.gradient


def test_tables_do_not_depend_on_the_order_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        f"{factor}x": {"evaluations": factor, "exact": 9, "residual": 0.1, "confidence": 50}
        for factor in (16, 2, 1)
    }
    found = list[str]()
    for items in (rows.items(), reversed(rows.items())):
        part: dict[str, Any] = {"rows": dict(items)}
        monkeypatch.setattr(tables, "read", lambda source, part=part: part)
        found.append(tables.reason_depth())
    assert found[0] == found[1]
    assert [line[2:4].strip() for line in found[0].splitlines()[2:]] == ["1", "2", "16"]
