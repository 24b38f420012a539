"""How long does a first command take? Whole processes, from their start to their end."""

from __future__ import annotations

import subprocess
import sys
from statistics import median
from time import perf_counter

from benchmarks.help import answer_help
from benchmarks.storing import RESULTS, store

FILE = RESULTS / "startup.json"
ROUNDS = 7
COMMANDS = {
    "`python -c pass`": ("-c", "pass"),
    "`deq-zoo --version`": ("-m", "deq_zoo", "--version"),
    "`deq-zoo --help`": ("-m", "deq_zoo", "--help"),
    "`deq-zoo list`": ("-m", "deq_zoo", "list"),
    "`import deq_zoo`": ("-c", "import deq_zoo"),
    "`import torch`": ("-c", "import torch"),
    "`import torchdeq`": ("-c", "import torchdeq"),
}


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS + 1):  # the first round fills the caches of files
        for name, words in COMMANDS.items():
            began = perf_counter()
            subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=120)
            times[name].append(perf_counter() - began)
    rows = {name: median(found[1:]) for name, found in times.items()}
    for name, seconds in rows.items():
        print(f"{name:24} {seconds:.2f} s")
    store(FILE, {"seconds": rows}, seeds=[], threads=None)


if __name__ == "__main__":
    answer_help(__doc__)
    main()
