"""A model reads and writes in its own vocabulary, whatever text it is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm.vocabularies import find_vocabulary
from deq_zoo.lm.writing import Sampling
from deq_zoo.predictions import Failure, OutFolder, Prediction
from tests.zoo.lm.nets import make_config, measure
from tests.zoo.lm.test_task import make_task
from tests.zoo.training import train

VALID = "a b b a\n" * 30


def write_wikitext(path: Path, common: str, rare: str) -> str:
    """Write a WikiText folder: its vocabulary is sorted by how often words occur."""
    path.mkdir()
    text = f"{common} {common} {common} {rare} {rare} <unk>\n" * 40
    (path / "train.txt").write_text(text)
    for split in ("valid", "test"):
        (path / f"{split}.txt").write_text(VALID)
    return str(path)


def make_words_task(data_dir: str, tokens: int = 4) -> Any:
    shape = make_config("convergent", tokens=tokens, cutoffs=(), shrink=1)
    return make_task(net=shape, data="wikitext", data_dir=data_dir, eval_limit=0)


def test_words_keep_their_ids_beside_another_training_text(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    there = make_words_task(write_wikitext(tmp_path / "b", "b", "a"))
    model = train(here, 5, lr=0.02).model
    assert here.val_set.tolist() != there.val_set.tolist()
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
    ids = tasks[1]._encode_split("val", find_vocabulary(tasks[1], model)).tolist()
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
    model, options = here.build().eval(), Sampling(prompt="a b", tokens=3)
    nowhere = OutFolder(tmp_path / "out", asked=False)
    with pytest.raises(ZooError, match=r"came without their vocabulary: .*--data-dir"):
        list(replace(here, data_dir=None).sample(model, options, nowhere))
    assert next(iter(here.sample(model, options, nowhere))).text.startswith("a b")
    assert replace(here, data_dir=None).predict(model, [], nowhere)  # it has its words now
    larger = make_words_task(str(tmp_path / "a"), tokens=9)
    with pytest.raises(DataError, match=r"without their 9 words, and .* has 4: name the folder"):
        measure(larger, larger.build())


def test_test_data_that_is_missing_or_too_short_is_an_error_before_training(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    here.open_data()
    (tmp_path / "a" / "test.txt").write_text("a\n")
    with pytest.raises(DataError, match="too short for 2 streams"):
        replace(here).open_data()
    (tmp_path / "a" / "test.txt").unlink()
    with pytest.raises(DataError, match=r"should hold test\.txt or wiki\.test\.tokens"):
        replace(here).open_data()
    assert here.steps_per_epoch  # other uses need no test data


def test_a_model_has_its_vocabulary_from_the_beginning_of_a_run(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    model = here.build()
    here.begin(model)
    assert model.lexicon.require() is here.corpus.tokenizer


def test_files_report_unknown_words_and_broken_ones_do_not_end_the_others(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    model = train(here, 1, lr=0.02).model
    model.facts = here.facts()
    texts = {"c": b"a zebra b\nb giraffe", "d": b"a", "e": b"a \xff b", "f": b"a b a"}
    for name, content in texts.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    paths = [tmp_path / f"{name}.txt" for name in (*texts, "none")]
    results = list(here.predict(model, paths, OutFolder(tmp_path / "out", asked=False)))
    assert not (tmp_path / "out").exists()
    unknown, short, broken, plain, missing = results
    assert isinstance(unknown, Prediction)
    assert "over 5 tokens" in unknown.text
    assert unknown.text.endswith("2 of its words are unknown")
    assert unknown.data["unknown_words"] == 2
    assert isinstance(plain, Prediction)
    assert plain.data["tokens"] == 2
    reasons = {r.source: r.reason for r in (short, broken, missing) if isinstance(r, Failure)}
    assert list(reasons) == [str(paths[k]) for k in (1, 2, 4)]
    for reason, words in zip(
        reasons.values(), ("has 1 tokens", "is not UTF-8", "cannot be read"), strict=True
    ):
        assert words in reason


def test_log_probabilities_are_written_where_the_user_asks(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    model = train(here, 1, lr=0.02).model
    model.facts = here.facts()
    (tmp_path / "c.txt").write_text("a b b a")
    out = OutFolder(tmp_path / "out")
    (result,) = here.predict(model, [tmp_path / "c.txt"], out)
    assert isinstance(result, Prediction)
    assert result.files == (tmp_path / "out" / "c.json",)
    written = json.loads(result.files[0].read_text())
    assert model.lexicon.require().decode(written["ids"]) == "a b b a"
    assert -sum(written["log_probs"]) / 3 == pytest.approx(written["loss"])
    with pytest.raises(ZooError, match="exists already"):
        here.predict(model, [tmp_path / "c.txt"], out)
    with pytest.raises(ZooError, match="two results would be written"):
        here.predict(model, [tmp_path / "d.txt", tmp_path / "a" / "d.txt"], out)


def test_a_sample_is_written_where_the_user_asks_and_streams_in_any_case(tmp_path: Path) -> None:
    here = make_words_task(write_wikitext(tmp_path / "a", "a", "b"))
    model = train(here, 1, lr=0.02).model
    options = Sampling(prompt="a b", tokens=30, columns=12)
    lines = list(here.sample(model, options, OutFolder(tmp_path / "out", asked=False)))
    assert not (tmp_path / "out").exists()
    *again, last = here.sample(model, options, OutFolder(tmp_path / "out"))
    assert [each.text for each in again] == [each.text for each in lines]
    assert last.files == (tmp_path / "out" / "sample.txt",)
    text = last.files[0].read_text()
    assert text.split() == " ".join(each.text for each in lines).split()
    assert max(map(len, text.split("\n"))) > 12 or text.count("\n") > 2  # not wrapped
    with pytest.raises(ZooError, match="exists already"):
        here.sample(model, options, OutFolder(tmp_path / "out"))
