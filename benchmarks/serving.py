"""Does the server answer every request under load, how fast, and does its memory stay flat?

2,000 requests, 50 at a time, on loopback: images of mixed sizes as forms and as JSON, 5 % of them
malformed, and 1 % of the clients leave before the answer. The model is that of `mdeq-smoke`, so the
figures are about the server, not about a network.

`python -m benchmarks.serving`; `--requests 200` for a try, `--run FOLDER` for another classifier.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from threading import Timer
from typing import Any, NamedTuple

from benchmarks.load import Outcome, count_outcomes, make_calls, send_all, unexpected
from benchmarks.storing import RESULTS, store

_START, _STOP = 120.0, 60.0  # seconds for a server to start and to stop
_WARM = 200  # requests before the memory is measured


class Server(NamedTuple):
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    port: int

    @property
    def resident(self) -> int:
        """Return the memory of the process in bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def processor_seconds(self) -> float:
        """Return the time that processors have spent on the process."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> tuple[int, float, str]:
        """Send SIGTERM; return the exit code, the seconds until the end and what it printed."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=_STOP)
        return self.process.returncode, time.monotonic() - began, errors


@contextmanager
def running_server(run: Path, *options: str) -> Iterator[Server]:
    """Start a server on a free port of this machine; it is gone after the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deq_zoo", "serve", str(run), "--cpu", "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    alarm = Timer(_START, process.kill)  # ends the wait for its first line
    alarm.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        alarm.cancel()
        if "http://" not in line:
            raise RuntimeError(f"the server did not start: {process.communicate()[1]}")
        yield Server(process, int(line.split("http://")[1].split()[0].rpartition(":")[2]))
    finally:
        alarm.cancel()
        if process.poll() is None:
            process.kill()
            process.communicate()


def measure(server: Server, requests: int, at_a_time: int = 50) -> dict[str, Any]:
    """Send requests to a server; return counts, latencies and memory."""
    asyncio.run(send_all(server.port, make_calls(_WARM, seed=1), at_a_time))
    before, spent, began = server.resident, server.processor_seconds, time.monotonic()
    outcomes = asyncio.run(send_all(server.port, make_calls(requests), at_a_time))
    seconds = time.monotonic() - began
    return {
        "requests": requests,
        "at_a_time": at_a_time,
        "outcomes": count_outcomes(outcomes),
        "unexpected": len(unexpected(outcomes)),
        "per_second": requests / seconds,
        "processor_ms_per_request": 1e3 * (server.processor_seconds - spent) / requests,
        **_latencies(outcomes),
        "resident_mb": [before / 1e6, server.resident / 1e6],
    }


def _latencies(outcomes: list[Outcome]) -> dict[str, float]:
    spent = [o.seconds for o in outcomes if o.call.kind == "good" and o.fate == "answered"]
    cuts = quantiles(spent, n=100)
    return {"p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--run", type=Path, help="a trained model; mdeq-smoke by default")
    parser.add_argument("--save", action="store_true", help="write serving.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or train_smoke(Path(folder))
        with running_server(run) as server:
            figures = measure(server, args.requests)
            code, seconds, errors = server.stop()
    figures |= {"exit_code": code, "stop_seconds": seconds}
    print(json.dumps(figures, indent=1), errors, sep="\n")
    if args.save:
        store(RESULTS / "serving.json", figures, seeds=[0, 1])


def train_smoke(folder: Path) -> Path:
    """Train `mdeq-smoke` in a folder; return its run."""
    run = folder / "run"
    subprocess.run(
        [sys.executable, "-m", "deq_zoo", "train", "mdeq-smoke", "--cpu", "--quiet",
         "--no-report", "--out", str(run)],
        check=True, timeout=600, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return run


if __name__ == "__main__":
    main()
