"""`model.predict`: the log-probabilities of a text are those of evaluation."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm import DEQTransformer
from deq_zoo.lm.results import score_file
from deq_zoo.lm.tokens import Bytes, Words
from deq_zoo.predictions import OutFolder
from tests.zoo.lm.nets import DESIGNS, make_config, make_model, measure
from tests.zoo.lm.test_task import make_task
from tests.zoo.training import train

SIZES: dict[str, Any] = {"length": 4, "memory": 4}
TEXT = list(range(10))


def test_a_text_in_segments_has_the_loss_of_evaluation(tmp_path: Path) -> None:
    task = make_task(eval_batch=1, eval_limit=0)
    model = train(task, 3, lr=0.02).model.train()
    model.facts = task.facts()
    text = Bytes().decode(task.val_set.tolist())
    (tmp_path / "val.txt").write_text(text)
    expected = measure(task, model)
    model.train()
    for x in (text, tmp_path / "val.txt", task.val_set, task.val_set.tolist()):
        score = model.predict(x).prediction
        assert score.loss == pytest.approx(expected["loss"], rel=1e-6)
        assert score.perplexity == pytest.approx(expected["perplexity"], rel=1e-5)
        assert len(score.log_probs) == len(score.ids) - 1 == len(task.val_set) - 1
    assert model.training  # as it was


@pytest.mark.parametrize("design", DESIGNS)
def test_log_probabilities_are_those_of_each_token_given_the_ones_before(design: str) -> None:
    model = make_model(design)
    out = model.predict(TEXT, length=20, memory=20)
    with torch.no_grad():
        log_p = model.log_prob(model(torch.tensor([TEXT[:-1]])).z)
    expected = log_p[0, torch.arange(9), torch.tensor(TEXT[1:])]
    assert_close(out.prediction.log_probs.double(), expected, atol=1e-6, rtol=0)
    assert out.prediction.perplexity == pytest.approx(exp(-expected.mean()), rel=1e-5)
    assert not out.state.requires_grad


def test_a_start_at_the_solution_needs_fewer_evaluations() -> None:
    model = make_model("convergent")
    first = model.predict(TEXT, **SIZES)
    again = model.predict(TEXT, first.state, **SIZES)
    assert first.state.shape == (1, 9, 8)
    assert first.stats is not None
    assert again.stats is not None
    assert len(first.stats.status) == 3  # segments
    assert again.stats.nfe < first.stats.nfe / 2
    assert_close(again.prediction.log_probs, first.prediction.log_probs, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"each token but the last, \(1, 9, 8\), got \(1, 10, 8\)"):
        model.predict(TEXT, torch.zeros(1, 10, 8), **SIZES)


def test_options_of_the_call_reach_every_segment() -> None:
    stats = make_model("redesigned").predict(TEXT, **SIZES, f_max_iter=5).stats
    assert stats is not None
    assert stats.nfe == 15


def test_unknown_words_are_counted() -> None:
    model = make_model("original", tokens=4, cutoffs=(), shrink=1)
    model.lexicon.tokenizer = Words.of(["a b <unk>"])
    score = model.predict("a zebra b\ngiraffe", **SIZES).prediction
    assert score.unknown_words == 2
    assert model.lexicon.tokenizer.decode(score.ids.tolist()) == "a <unk> b\n<unk>"


def test_inputs_that_are_no_text_are_errors(tmp_path: Path) -> None:
    model = make_model("convergent")
    cases: list[tuple[Any, type[Exception], str]] = [
        (3.5, TypeError, "a text is a str, a path or token ids, got float"),
        (b"a b", TypeError, "a text is a str, a path or token ids, got bytes"),
        ([0.5, 1.0], ValueError, "whole numbers"),
        (torch.zeros(2, 3, dtype=torch.long), ValueError, r"shape \(tokens,\), got torch.int64"),
        ([1, 11], ValueError, r"must lie in \[0, 11\), got 1 to 11"),
        ([1], DataError, "the text has 1 tokens"),
        ([], DataError, "the text has 0 tokens"),
        (tmp_path / "none.txt", DataError, "cannot be read"),
        ("a b", ZooError, "came without their vocabulary"),
    ]
    for x, kind, message in cases:
        with pytest.raises(kind, match=message):
            model.predict(x, **SIZES)
    with pytest.raises(ZooError, match="pass length= and memory="):
        model.predict(TEXT)
    with pytest.raises(ValueError, match="length must be at least 1"):
        model.predict(TEXT, length=0, memory=1)


@pytest.mark.parametrize(("design", "doubtful"), [("original", True), ("redesigned", False)])
def test_a_solve_that_does_not_settle_is_said(design: str, doubtful: bool, tmp_path: Path) -> None:
    """A map without a fixed point has nothing to settle at."""
    deq = {"f_max_iter": 2, "eval_f_max_iter": 2, "f_tol": 1e-9, "f_stop_mode": "rel"}
    shape = make_config(design, tokens=256, cutoffs=(), shrink=1)
    model = DEQTransformer(shape, deq).eval()
    model.lexicon.tokenizer, model.facts = Bytes(), SIZES
    (tmp_path / "a.txt").write_text("abcdefgh")
    text = score_file(model, tmp_path / "a.txt", OutFolder(tmp_path, asked=False)).text
    assert ("the solves of 2 of its 2 segments did not settle" in text) == doubtful
    patient = DEQTransformer(shape, {**deq, "f_tol": 0.0}).eval()
    patient.lexicon.tokenizer, patient.facts = Bytes(), SIZES
    text = score_file(patient, tmp_path / "a.txt", OutFolder(tmp_path, asked=False)).text
    assert "settle" not in text


def test_the_memory_of_evaluation_is_that_of_predictions() -> None:
    task = make_task(memory=16, eval_memory=40)
    assert task.facts() == {"length": 16, "memory": 40}
    assert replace(task, eval_memory=0).facts()["memory"] == 16
