"""Results say which command, commit, seeds and machine they come from."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import provenance as module
from benchmarks.provenance import (
    CHANGED,
    JOINED,
    ROOT,
    commit,
    continued,
    provenance,
    refuse_changes,
)
from benchmarks.rows import make_rows
from benchmarks.storing import RESULTS, is_kept, origins, read, results_file, store, store_part


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", "-C", str(folder), *settings, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone with one commit of one program."""
    git(tmp_path, "init")
    (tmp_path / "program.py").write_text("1\n")
    git(tmp_path, "add", "program.py")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_the_commit_is_that_of_the_clone_and_says_whether_code_was_changed(clone: Path) -> None:
    name = git(clone, "rev-parse", "--short=7", "HEAD")
    assert commit(clone) == name
    (clone / "program.py").write_text("2\n")
    assert commit(clone) == f"{name} with changes"


def test_a_new_program_is_a_change_of_the_code_and_a_new_file_of_data_is_not(clone: Path) -> None:
    name = commit(clone)
    (clone / "puzzle.txt").write_text("1\n")
    assert commit(clone) == name
    (clone / "new").mkdir()
    (clone / "new" / "möre.py").write_text("1\n")
    assert commit(clone) == f"{name} with changes"


@pytest.mark.parametrize("name", ["1234567", None])
def test_code_of_a_commit_may_make_rows(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_START", name)
    refuse_changes()


def test_code_without_a_commit_makes_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_START", "1234567 with changes")
    with pytest.raises(SystemExit, match="commit first, or try it out with --small"):
        refuse_changes()
    with pytest.raises(SystemExit, match="commit first"):
        make_rows(RESULTS / "reason.json", "nothing", iter(()), seeds=[], processes=1)


def test_results_of_a_trial_run_have_a_file_that_is_not_kept() -> None:
    kept, trial = (results_file("lm", small) for small in (False, True))
    assert (kept.name, trial.name) == ("lm.json", "partial.lm.json")
    assert is_kept(kept)
    assert not is_kept(trial)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda f: f.stem)
def test_every_program_with_trial_runs_keeps_their_results_apart(file: Path) -> None:
    text = file.read_text()
    assert '"--small"' not in text or "results_file(" in text


#: Parts whose rows come from code between two commits, with the reason that they are kept.
BETWEEN_COMMITS = {
    ("reason", "halting"): "a part of its rows; the others have a commit",
    ("lm_reference", "compare"): "two models of 20 minutes of training each",
    ("lm_designs", "curve"): "three models of 20 minutes of training each",
}


def test_results_come_from_code_that_is_in_a_commit() -> None:
    found = {
        (file.stem, part)
        for file in filter(is_kept, sorted(RESULTS.glob("*.json")))
        for part, content in read(file).items()
        if isinstance(content, dict)
        and CHANGED in ((content.get("provenance") or {}).get("commit") or "")
    }
    assert found == set(BETWEEN_COMMITS)


def test_results_of_an_earlier_part_are_no_change_of_the_code(clone: Path) -> None:
    results = clone / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "a.json").write_text("1\n")
    git(clone, "add", "-A")
    git(clone, "commit", "-m", "second")
    (results / "a.json").write_text("2\n")
    assert commit(clone) == git(clone, "rev-parse", "--short=7", "HEAD")


def test_outside_of_a_clone_there_is_no_commit(clone: Path) -> None:
    (clone / "inside").mkdir()
    assert commit(clone / "inside") is None


def test_the_command_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["a.py", "--only", "mlp", "--data-dir", "/home/me/data", "quick=runs/quick", "--n=3"]
    monkeypatch.setattr("sys.argv", words)
    assert module.command().endswith(" --only mlp --data-dir PATH quick=PATH --n=3")


def test_the_record_has_no_name_of_a_host_and_no_path() -> None:
    record = provenance(seeds=[1, 0, 1])
    assert record["seeds"] == [0, 1]
    assert record["machine"] is not None
    assert "cores" in record["machine"]
    text = json.dumps({**record, "command": ""})
    assert "/home" not in text
    assert not platform.node() or platform.node() not in text


def test_parts_keep_their_own_records(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    store_part(file, "one", {"rows": [1]}, seeds=[0])
    before = read(file)["one"]
    store_part(file, "two", {"rows": [2]}, seeds=[0, 1], threads=3)
    after = read(file)
    assert after["one"] == before
    assert after["two"]["rows"] == [2]
    assert [origin["seeds"] for origin in origins(after)] == [[0], [0, 1]]
    assert after["two"]["provenance"]["threads"] == 3


def test_a_resumed_part_names_the_commits_of_both_runs(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    store_part(file, "one", {"rows": [1]}, seeds=[0])
    content = read(file)
    now = content["one"]["provenance"]["commit"] or "unknown"
    content["one"]["provenance"]["commit"] = "1234567"
    file.write_text(json.dumps(content))
    for _ in range(2):  # a third run of the same code adds no name
        store_part(file, "one", {"rows": [1, 2]}, seeds=[0], resumed=True)
        assert read(file)["one"]["provenance"]["commit"] == f"1234567, {now}"
    store_part(file, "one", {"rows": [3]}, seeds=[0])
    assert read(file)["one"]["provenance"]["commit"] != f"1234567, {now}"


def test_rows_of_an_unknown_commit_stay_unknown() -> None:
    now = provenance(seeds=[])
    assert (continued({**now, "commit": "abc"}, None))["commit"] == "unknown, abc"
    there = continued({**now, "machine": "B"}, {**now, "machine": "A"})
    assert continued({**now, "machine": "B"}, there)["machine"] == "A and B"
    more = continued({**now, "command": "b"}, {**now, "command": "a"})
    assert continued({**now, "command": "a"}, more)["command"] == "a and b"


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    store(file, {"rows": [1]}, seeds=[])
    with pytest.raises(TypeError):
        store(file, {"rows": [object()]}, seeds=[])
    assert read(file)["rows"] == [1]


def test_a_part_without_a_record_is_noticed() -> None:
    assert origins({"one": {"provenance": {"command": "a"}}, "two": {}}) == [{"command": "a"}, None]


def test_every_commit_that_results_name_is_in_the_history_or_in_one_that_is() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: there is no history to look in")
    if git(ROOT, "rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("a shallow clone has only a part of the history")
    history = {name[:7] for name in git(ROOT, "rev-list", "HEAD").splitlines()}
    for file in sorted(RESULTS.glob("*.json")):
        for record in origins(read(file)):
            for name in re.findall(r"\b[0-9a-f]{7}\b", record["commit"] or ""):
                assert JOINED.get(name, name) in history, f"{file.name} names {name}"
