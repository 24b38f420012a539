"""The cost of one evaluation beside `f`: no figure of the kept table may rise."""

from __future__ import annotations

import json
from functools import cache
from itertools import product

import pytest
import torch

from benchmarks import ours
from benchmarks.accelerator import Meter
from benchmarks.cost import DEVICES, Figures
from benchmarks.metering import SIZES, STATES, STOPS, Cell, MeterBench
from benchmarks.storing import RESULTS

PINNED = "2.13.0"  # other versions of torch split operations differently
SLACK = {"read": 0.3, "written": 0.3}  # a sample that improves one step later, on another processor

pytestmark = pytest.mark.skipif(
    torch.__version__.split("+")[0] != PINNED, reason=f"the table was counted with torch {PINNED}"
)


class Ours(MeterBench):
    """The meter on the library of this process."""

    contestant = ours


@cache
def table() -> dict[str, Figures]:
    """Return the figures that the repository keeps."""
    counts: dict[str, Figures] = json.loads((RESULTS / "cost.json").read_text())["counts"]["ours"]
    return counts


def risen(cell: Cell) -> dict[str, tuple[float, float]]:
    """Return the figures of a cell that are larger than those kept, with both values."""
    bench, kept = Ours(), table()[cell.key]
    count = bench.count_products if cell.solver in ours.LINEAR_NAMES else bench.count
    with torch.no_grad():
        now = count(**cell._asdict())
    return {
        name: (kept[name], value)
        for name, value in now.items()
        if value > kept[name] + SLACK.get(name, 0.1)
    }


def cells(slow: bool) -> list[Cell]:
    """Return the cells of the table: the first look at each solver, or all the others."""
    linear = [*product(ours.LINEAR_NAMES, ("tensor",), SIZES, STOPS, DEVICES)]
    every = [
        Cell(*names) for names in (*product(ours.NAMES, STATES, SIZES, STOPS, DEVICES), *linear)
    ]
    return [c for c in every if slow is not (c[1:3] == ("tensor", "small") and c.stop != "every 5")]


@pytest.mark.parametrize("cell", cells(slow=False), ids=lambda cell: cell.key)
def test_no_solver_costs_more_than_before(cell: Cell) -> None:
    assert not risen(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", cells(slow=True), ids=lambda cell: cell.key)
def test_no_solver_costs_more_for_other_states(cell: Cell) -> None:
    assert not risen(cell)


def test_the_simulated_device_tells_reads_from_launches() -> None:
    meter = Meter(simulated=True)
    z = meter.put(torch.ones(2, 3))
    with meter:
        norm = torch.linalg.vector_norm(2 * z, dim=1)
        host = norm.to("cpu") + 1
        float(norm.sum())
        z.copy_(torch.zeros(2, 3))
        with pytest.raises(RuntimeError, match="mixes tensors"):
            norm + host
    tally = meter.tally
    assert (tally.launches, tally.host, tally.reads, tally.uploads) == (3, 2, 2, 1)
