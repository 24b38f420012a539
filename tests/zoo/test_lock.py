"""Locks of run folders: one writer, and owners that are gone are recognised."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import ZooError
from deq_zoo.lock import locked
from deq_zoo.process_id import ProcessId

QUIET: Any = {"quiet": True, "cpu": True, "report": False}


def write_lock(path: Path, owner: ProcessId, age: float = 0.0) -> None:
    path.write_text(json.dumps({**asdict(owner), "since": time.time() - age}))
    os.utime(path, (time.time() - age,) * 2)


def test_a_live_run_is_neither_replaced_nor_resumed_but_read(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = deq_zoo.train("toy", out=out, **QUIET).run
    files = {file: file.read_bytes() for file in out.iterdir() if file.is_file()}
    message = rf"process {os.getpid()} on .+ has been training in .*run since \d{{4}}-"
    with run.locked():
        for option in ("force", "resume"):
            with pytest.raises(ZooError, match=message):
                deq_zoo.train("toy", out=out, **QUIET, **{option: True})
        assert deq_zoo.load(out).preset is not None
        assert main(["evaluate", str(out), "--cpu"]) == 0
        assert run.lock_file.exists()
    assert {file: file.read_bytes() for file in out.iterdir() if file.is_file()} == files
    assert deq_zoo.train("toy", out=out, **QUIET, resume=True).finished
    assert deq_zoo.train("toy", out=out, **QUIET, force=True).finished


def test_a_lock_of_a_process_that_has_ended_is_stale(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    assert process.pid is not None
    process.join()
    own = ProcessId.own()
    for owner in (replace(own, pid=process.pid), replace(own, started="1")):  # its number again
        write_lock(tmp_path / "lock", owner)
        with locked(tmp_path / "lock"):
            assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        assert not list(tmp_path.iterdir())


def test_a_lock_of_another_machine_is_stale_when_it_is_old(tmp_path: Path) -> None:
    lock, owner = tmp_path / "lock", replace(ProcessId.own(), host="elsewhere")
    write_lock(lock, owner, age=60)
    with pytest.raises(ZooError, match="on elsewhere has been training"), locked(lock):
        pass
    assert lock.exists()
    write_lock(lock, owner, age=600)
    with locked(lock):
        assert "elsewhere" not in lock.read_text()


def test_a_lock_is_renewed_and_leaves_that_of_another_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deq_zoo.lock._RENEWED", 0.01)
    lock = tmp_path / "lock"
    with locked(lock):
        os.utime(lock, (0, 0))
        for _ in range(500):
            if lock.stat().st_mtime > 1:
                break
            time.sleep(0.01)
        assert time.time() - lock.stat().st_mtime < 60
        write_lock(lock, replace(ProcessId.own(), host="thief"))
    assert "thief" in lock.read_text()


def test_a_lock_that_was_not_written_whole_is_stale_after_a_while(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("{")
    with pytest.raises(ZooError, match="another process starts a run"), locked(lock):
        pass
    os.utime(lock, (0, 0))
    with locked(lock):
        pass


def test_a_process_knows_whether_another_one_lives() -> None:
    assert ProcessId.own().is_alive()
    assert replace(ProcessId.own(), host="elsewhere").is_alive() is None
    zombie = multiprocessing.get_context("fork").Process(target=int)
    zombie.start()
    assert zombie.pid is not None
    started = ProcessId(**{**asdict(ProcessId.own()), "pid": zombie.pid, "started": "?"})
    assert started.is_alive() is False  # another process had that number
    state = Path(f"/proc/{zombie.pid}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)  # until it has ended, and nobody has waited for it
    assert replace(ProcessId.own(), pid=zombie.pid).is_alive() is False
    zombie.join()
