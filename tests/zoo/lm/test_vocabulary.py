"""A model reads and writes in its own vocabulary, whatever text it is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm.decode import Sampling
from tests.zoo.lm.nets import net
from tests.zoo.lm.test_task import CPU, fit, task

VALID = "a b b a\n" * 30


def folder(path: Path, common: str, rare: str) -> str:
    """WikiText whose vocabulary is in the order of how often words come."""
    path.mkdir()
    train = f"{common} {common} {common} {rare} {rare} <unk>\n" * 40
    (path / "train.txt").write_text(train)
    (path / "valid.txt").write_text(VALID)
    return str(path)


def words_task(data_dir: str, tokens: int = 4) -> Any:
    shape = net("convergent", tokens=tokens, cutoffs=(), shrink=1)
    return task(net=shape, data="wikitext", data_dir=data_dir, eval_limit=0)


def loss_of(told: Any, model: Any) -> float:
    with torch.no_grad():
        return float(told.evaluate(model, CPU, thorough=False).metrics["loss"])


def test_words_keep_their_ids_beside_another_training_text(tmp_path: Path) -> None:
    here = words_task(folder(tmp_path / "a", "a", "b"))
    there = words_task(folder(tmp_path / "b", "b", "a"))
    model, _ = fit(here, 5)
    assert here.corpus.valid.tolist() != there.corpus.valid.tolist()
    assert loss_of(there, model) == loss_of(here, model)
    (tmp_path / "b" / "valid.txt").write_text("a zebra\n" * 9)
    with pytest.raises(DataError, match="'zebra' is not among the 4"):
        loss_of(there, model)


def test_a_text_of_pieces_is_read_in_those_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    shape = net("convergent", tokens=300, cutoffs=(), shrink=1)
    texts = ["the cat sat on the mat\n" * 90, "quod erat demonstrandum\n" * 90]
    told = []
    for text in texts:
        file.write_text(text)
        told.append(task(net=shape, data="file", file=str(file), pieces=300))
        assert told[-1].corpus.tokenizer.size > 256
    model, _ = fit(told[0], 2)
    _, streams = told[1]._judged(told[1]._tokenizer(model))
    ids = streams.ids.flatten().tolist()
    assert model.lexicon.require().decode(ids) in texts[1]


def test_a_run_does_not_go_on_with_another_vocabulary(tmp_path: Path) -> None:
    here = words_task(folder(tmp_path / "a", "a", "b"))
    there = words_task(folder(tmp_path / "b", "b", "a"))
    model, _ = fit(here, 1)
    here.after_step(model)
    replace(here).after_step(model)  # the same text, opened again
    with pytest.raises(ZooError, match="another vocabulary than these weights"):
        there.after_step(model)


def test_weights_without_words_take_those_of_their_text(tmp_path: Path) -> None:
    here = words_task(folder(tmp_path / "a", "a", "b"))
    model = here.build().eval()
    options = Sampling(prompt="a b", tokens=3)
    assert next(iter(here.sample(model, options, tmp_path, CPU))).startswith("a b")
    with pytest.raises(ZooError, match=r"came without their vocabulary: .*--data-dir"):
        replace(here, data_dir=None).sample(model, options, tmp_path, CPU)
    larger = words_task(str(tmp_path / "a"), tokens=9)
    with pytest.raises(DataError, match=r"without their 9 words, and .* has 4: name the folder"):
        loss_of(larger, larger.build().eval())


def test_a_perplexity_tells_of_unknown_words_and_of_what_it_cannot_read(tmp_path: Path) -> None:
    here = words_task(folder(tmp_path / "a", "a", "b"))
    model, _ = fit(here, 1)
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
