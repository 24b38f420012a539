"""Run many cases and print their outcomes: `python -m tests.properties.run 2000 [first]`."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict

import torch

from tests.properties.cases import FINE, Case, case


def rows(c: Case) -> list[str]:
    """Return the rows of the table to which a case belongs."""
    kinds = [f"piece {name}" for name in sorted(set(c.model.names))]
    kinds += [f"backward {c.method}", f"order {c.transform.order}", f"by {c.transform.name}"]
    kinds += [f"via {c.model.via}", f"start {c.model.start}"]
    kinds += ["switches branch"] * c.switched + ["coupled rows"] * c.model.couples
    return [*kinds, "all"]


def main(count: int, first: int = 0) -> int:
    """Run the cases, print the table and the failures; return how many failed."""
    torch.set_num_threads(1)
    table: dict[str, Counter[str]] = defaultdict(Counter)
    failures: list[str] = []
    begin = time.perf_counter()
    for seed in range(first, first + count):
        c = case(seed)
        outcome = c.outcome()
        if outcome not in FINE:
            failures.append(f"{c.describe()}\n    {outcome}")
            print(failures[-1], flush=True)
        for row in rows(c):
            table[row][outcome if outcome in FINE else "fails"] += 1
    columns = (*FINE, "fails")
    print(f"\n{'':26}" + "".join(f"{name:>15}" for name in columns))
    for row in sorted(table):
        print(f"{row:26}" + "".join(f"{table[row][name]:>15}" for name in columns))
    print(f"{count} cases, {len(failures)} failures, {time.perf_counter() - begin:.0f} s")
    return len(failures)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]] or [2000]
    sys.exit(bool(main(*numbers)))
