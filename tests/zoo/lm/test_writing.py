"""Writing: choices follow their options, and lines come as soon as they are complete."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deq_zoo.errors import DataError
from deq_zoo.lm.tokens import Bytes, Pieces, Tokenizer, Words
from deq_zoo.lm.writing import Sampling, Writing, choose


def test_choices_follow_temperature_top_k_and_top_p() -> None:
    log_p = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)
    rng = torch.Generator().manual_seed(0)

    def measure_shares(**options: Any) -> list[float]:
        chosen = choose(log_p, Sampling(**options), rng).flatten()
        return [float(n) for n in chosen.bincount(minlength=4) / len(chosen)]

    assert measure_shares(temperature=0.0) == [1, 0, 0, 0]
    assert measure_shares(temperature=1.0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert measure_shares(temperature=1.0, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert measure_shares(temperature=1.0, top_p=0.75) == pytest.approx(
        [0.625, 0.375, 0, 0], abs=0.03
    )
    assert measure_shares(temperature=1.0, top_p=0.01) == [1, 0, 0, 0]
    assert measure_shares(temperature=1e-40) == [1, 0, 0, 0]
    assert measure_shares(temperature=1e300) == pytest.approx([0.25] * 4, abs=0.03)
    forbidden = torch.tensor([[0.0, -torch.inf]])
    assert choose(forbidden, Sampling(temperature=1e300), rng) == 0
    assert measure_shares(temperature=1.0, top_k=99) == pytest.approx(
        [0.5, 0.3, 0.15, 0.05], abs=0.03
    )
    hot = measure_shares(temperature=0.5)
    assert hot[0] == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=0.03)


def test_every_token_of_a_large_vocabulary_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision the probabilities of these words add up to more than 1."""
    torch.manual_seed(1)
    log_p = torch.randn(1, 267_735).log_softmax(1)
    seen: list[torch.Tensor] = []

    def choose_first(p: torch.Tensor, n: int, generator: torch.Generator) -> torch.Tensor:
        seen.append(p)
        return torch.zeros(1, n, dtype=torch.long)

    monkeypatch.setattr(torch, "multinomial", choose_first)
    choose(log_p, Sampling(temperature=1.0), torch.Generator())
    assert bool((seen[0] > 0).all())


class Script:
    """A decoder that writes a given text, whatever it is fed."""

    device = torch.device("cpu")

    def __init__(self, text: str) -> None:
        self.left = list(text.encode())

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        log_p = torch.full((1, 256), -1e9)
        log_p[0, self.left.pop(0)] = 0.0
        return log_p


def test_text_comes_line_by_line_and_wrapped_at_words() -> None:
    text = "ein Wörtchen und noch eins\nzwei\n\ndrei"
    options = Sampling(prompt="Es ist ", tokens=len(text.encode()), columns=16)
    writing = Writing(Script(text), Bytes(), options)  # type: ignore[arg-type]
    lines = list(writing)
    assert writing.text == "Es ist " + text
    assert lines == ["Es ist ein ", "Wörtchen und ", "noch eins", "zwei", "", "drei"]


class Recorded:
    """A decoder that keeps what it reads.

    Args:
        size: of the vocabulary.
        slope: by how much the logit of a token is above that of the token before; with 0 all are
            equally likely.
    """

    device = torch.device("cpu")

    def __init__(self, size: int, slope: float = 0.0) -> None:
        self.logits = slope * torch.arange(size)
        self.read: list[int] = []

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.long
        self.read += ids[0].tolist()
        return self.logits[None].log_softmax(1)


@pytest.mark.parametrize("tokenizer", [Words.of(["a b c"]), Bytes()], ids=lambda t: t.kind)
def test_a_model_with_room_for_more_tokens_writes_those_there_are(tokenizer: Any) -> None:
    for temperature in (0.0, 100.0):
        options = Sampling(prompt="a", tokens=20, temperature=temperature)
        assert list(Writing(Recorded(tokenizer.size + 50, slope=1.0), tokenizer, options))  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", "   "])
def test_a_prompt_begins_a_paragraph(prompt: str) -> None:
    decoder = Recorded(4)
    assert list(Writing(decoder, Words.of(["a b c"]), Sampling(prompt=prompt, tokens=1)))  # type: ignore[arg-type]
    assert decoder.read == [0, 0]


def test_options_out_of_range_are_errors() -> None:
    for wrong, message in (
        ({"columns": 0}, "columns must be at least 1"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"temperature": float("inf")}, "temperature must be at least 0 and finite"),
        ({"seed": 2**70}, "seed must be a number from 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**wrong)
    with pytest.raises(ValueError, match="top_p must lie"):
        Sampling(top_p=0.0)


def test_the_last_piece_of_a_prompt_is_completed() -> None:
    tokenizer = Pieces.of("the tree then they thesis the then " * 40, 280)
    for prompt in ("tree the", "the t", "the "):
        decoder = Recorded(tokenizer.size)
        writing = Writing(decoder, tokenizer, Sampling(prompt=prompt, tokens=3, seed=2))  # type: ignore[arg-type]
        assert writing.text == prompt
        last = int(tokenizer.encode(prompt)[-1])
        assert last in tokenizer.beginning_with(last)
        list(writing)
        assert writing.text.startswith(prompt)
        assert len(writing._ids) == len(tokenizer.encode("\n\n" + prompt)) + 3
        assert decoder.read == writing._ids[:-1]  # every token once, none of the one left out
    words = Words.of(["a b c"])
    assert words.beginning_with(1) == [1]


def test_a_text_is_written_once() -> None:
    writing = Writing(Recorded(256), Bytes(), Sampling(prompt="a", tokens=2))  # type: ignore[arg-type]
    list(writing)
    with pytest.raises(RuntimeError, match="make a new Writing"):
        list(writing)


@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-40])
def test_a_tiny_temperature_takes_the_likeliest(temperature: float) -> None:
    log_p = torch.tensor([[0.2, 0.5, 0.3]]).log()
    rng = torch.Generator().manual_seed(0)
    assert int(choose(log_p, Sampling(temperature=temperature), rng)) == 1


@pytest.mark.parametrize("tokenizer", [Bytes(), Pieces.of("some words", 256)])
def test_half_a_character_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no character"):
        tokenizer.encode("caf\udce9")
