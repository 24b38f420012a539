"""The text of `lm-reference`: docstrings, and pages that are held out whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deq_zoo.errors import MissingPackage
from deq_zoo.lm import reference
from deq_zoo.lm.data import split_text, topic_pages, topics
from deq_zoo.lm.presets import lm_reference
from deq_zoo.lm.reference import (
    REPEATS,
    describe_versions,
    docstrings,
    docstrings_of,
    reference_splits,
)
from deq_zoo.lm.task import LanguageTask
from deq_zoo.lm.tokens import Pieces

LONG = "words that explain a function in enough detail to be kept, " * 4


def test_docstrings_come_from_code_that_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        f'"""Module. {LONG}"""\nraise SystemExit\n'
        f'def f():\n    """F.\n\n    {LONG}\n    """\n\n'
        f'class C:\n    """short"""\n    async def g(self):\n        """G. {LONG}"""\n'
        f'add_newdoc("m", "h", ("h", """\n    H. {LONG}\n    """))\nprint("P. {LONG}")\n'
    )
    found = list(docstrings_of(file))
    assert sorted(text[:2] for text in found) == ["F.", "G.", "H.", "Mo"]
    assert f"F.\n\n{LONG.strip()}" in [text.strip() for text in found]
    file.write_text("def (:")
    assert not list(docstrings_of(file))


def test_held_out_pages_are_whole_and_have_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = split_text(topics())
    line = next(each for each in splits["val"].splitlines() if len(each) >= 60)
    words = splits["test"].split()[2000:2030]
    code = "\n".join(words[:15]) + "\n\n" + "\n    ".join(words[15:])  # cut in other places
    texts = [f"an own text\n\na copy\n{line}\n\nits end", f"before\n\n{code}\n\n\nafter"]
    monkeypatch.setattr(reference, "docstrings", lambda: texts)
    result = reference_splits.__wrapped__()
    assert (result["val"], result["test"]) == (splits["val"], splits["test"])
    half, end = (result["train"].index(f"\n\n{text}\n\n") / len(result["train"]) for text in
                 ("an own text\n\nits end", "before\n\nafter"))  # fmt: skip
    assert 0.45 < half < 0.55 < 0.95 < end  # docstrings are spread evenly
    train, held_out = (" ".join(each.split()) for each in (result["train"],
                       splits["val"] + splits["test"]))  # fmt: skip
    windows = {held_out[k : k + 60] for k in range(len(held_out) - 59)}
    assert not any(train[k : k + 60] in windows for k in range(len(train) - 59))
    size = 0
    for page in topic_pages():  # in order: those that end before the held-out text, and no other
        size += len(page) + 2
        assert (page[:40] in result["train"]) == (size <= len(splits["train"]))
    assert len(result["train"]) > 0.9 * REPEATS * len(splits["train"])


def test_evaluation_reads_no_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[str]:
        raise AssertionError("a docstring was read")

    monkeypatch.setattr(reference, "docstrings", refuse)
    whole = lm_reference().task
    assert isinstance(whole, LanguageTask)
    task = replace(whole, eval_limit=1)
    model = task.build().eval()
    model.lexicon.adopt(Pieces.of(topics(), 300))
    with torch.no_grad():
        assert task.evaluate(model, "test").metrics["bits_per_byte"] > 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PACKAGES", {"no_such_package": "none"})
    with pytest.raises(MissingPackage, match=r"needs no_such_package: .*\[reference\]"):
        docstrings()


def test_the_preset_is_small_enough_to_be_kept() -> None:
    model = lm_reference().task.build()
    assert sum(p.numel() for p in model.parameters()) <= 900_000
    assert describe_versions().startswith("Python 3.")


@pytest.mark.slow
def test_the_whole_text_is_megabytes_of_english() -> None:
    splits = reference_splits()
    assert len(splits["train"]) > 5_000_000
    assert len(splits["val"].encode()) == len(split_text(topics())["val"].encode())
