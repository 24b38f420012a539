"""A model reads and writes in its own vocabulary, whatever text it is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm.decode import Sampling
from tests.zoo.lm.nets import make_config
from tests.zoo.lm.test_task import make_task
from tests.zoo.training import CPU, measure, train

VALID = "a b b a\n" * 30


def write_wikitext(path: Path, common: str, rare: str) -> str:
    """Write a WikiText folder: its vocabulary is sorted by how often words occur."""
    path.mkdir()
    text = f"{common} {common} {common} {rare} {rare} <unk>\n" * 40
    (path / "train.txt").write_text(text)
    (path / "valid.txt").write_text(VALID)
    return str(path)


def make_words_task(data_dir: str, tokens: int = 4) -> Any:
    shape = make_config("convergent", tokens=tokens, cutoffs=(), shrink=1)
    return make_task(net=shape, data="wikitext", data_dir=data_dir, eval_limit=0)


def test_words_keep_their_ids_beside_another_training_text(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    there = make_words_task(write_wikitext(tmp_path / "b", "b", "a"))
    model = train(here, 5, lr=0.02).model
    assert here.corpus.valid.tolist() != there.corpus.valid.tolist()
    assert measure(there, model)["loss"] == measure(here, model)["loss"]
    (tmp_path / "b" / "valid.txt").write_text("a zebra\n" * 9)
    with pytest.raises(DataError, match="'zebra' is not among the 4"):
        measure(there, model)


def test_a_text_of_pieces_is_read_in_those_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    shape = make_config("convergent", tokens=300, cutoffs=(), shrink=1)
    texts = ["the cat sat on the mat\n" * 90, "quod erat demonstrandum\n" * 90]
    tasks = []
    for text in texts:
        file.write_text(text)
        tasks.append(make_task(net=shape, data="file", file=str(file), pieces=300))
        assert tasks[-1].corpus.tokenizer.size > 256
    model = train(tasks[0], 2, lr=0.02).model
    _, streams = tasks[1]._judged(tasks[1]._tokenizer(model))
    ids = streams.ids.flatten().tolist()
    assert model.lexicon.require().decode(ids) in texts[1]


def test_a_run_does_not_go_on_with_another_vocabulary(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    there = make_words_task(write_wikitext(tmp_path / "b", "b", "a"))
    model = train(here, 1, lr=0.02).model
    here.after_step(model)
    replace(here).after_step(model)  # the same text, opened again
    with pytest.raises(ZooError, match="another vocabulary than these weights"):
        there.after_step(model)


def test_weights_without_words_take_those_of_their_text(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    model = here.build().eval()
    options = Sampling(prompt="a b", tokens=3)
    assert next(iter(here.sample(model, options, tmp_path, CPU))).startswith("a b")
    with pytest.raises(ZooError, match=r"came without their vocabulary: .*--data-dir"):
        replace(here, data_dir=None).sample(model, options, tmp_path, CPU)
    larger = make_words_task(str(tmp_path / "a"), tokens=9)
    with pytest.raises(DataError, match=r"without their 9 words, and .* has 4: name the folder"):
        measure(larger, larger.build())


def test_a_perplexity_reports_unknown_words_and_refuses_unreadable_files(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    model = train(here, 1, lr=0.02).model
    file = tmp_path / "c.txt"
    file.write_text("a zebra b\nb giraffe")
    (line,) = here.predict(model, [file], None, CPU)
    assert line.endswith("over 5 tokens; of its words, 2 are unknown")
    file.write_text("a b a")
    (line,) = here.predict(model, [file], None, CPU)
    assert line.endswith("over 2 tokens")
    file.write_text("a")
    with pytest.raises(DataError, match=r"c\.txt has 1 tokens: a perplexity needs 2"):
        here.predict(model, [file], None, CPU)
    file.write_bytes(b"a \xff b")
    with pytest.raises(DataError, match="is not UTF-8"):
        here.predict(model, [file], None, CPU)
    with pytest.raises(ZooError, match="drop --out"):
        here.predict(model, [file], tmp_path, CPU)
