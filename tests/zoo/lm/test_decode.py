"""Writing: incremental equals recomputed, and choices follow their options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.errors import ZooError
from deq_zoo.lm.decode import Chunked, Incremental, Sampling, choose, make_decoder, write
from deq_zoo.lm.tokens import Bytes, Words
from tests.zoo.lm.nets import draw_ids, make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("design", ["original", "convergent"])
@torch.no_grad()
def test_incremental_decoding_equals_full_recomputation(design: str, warm: bool) -> None:
    model, tokens = make_model(design), draw_ids(length=9)
    decoder = Incremental(model, span=50, warm=warm)
    log_p_whole = model.log_prob(model(tokens).z)
    assert_close(decoder.feed(tokens[:, :3]), log_p_whole[:, 2], atol=1e-8, rtol=0)
    for k in range(3, 9):
        assert_close(decoder.feed(tokens[:, k : k + 1]), log_p_whole[:, k], atol=1e-8, rtol=0)
    assert decoder.stats is not None
    assert bool(decoder.stats.converged.all())


@torch.no_grad()
def test_a_warm_start_that_leads_nowhere_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model("original"), draw_ids(length=6)[:, [0, 1, 2, 0, 1, 2]]
    log_p_whole = model.log_prob(model(tokens).z)
    solve, hopeless = model.solve, list[Tensor]()

    def solve_badly(u: Tensor, contexts: Any, z0: Tensor | None = None) -> Any:
        if z0 is None:
            return solve(u, contexts)
        hopeless.append(z0)
        with monkeypatch.context() as patch:
            patch.setattr(model.deq, "eval_f_max_iter", 1)
            return solve(u, contexts, z0)

    monkeypatch.setattr(model, "solve", solve_badly)
    decoder = Incremental(model, span=50)
    for k in range(6):
        assert_close(decoder.feed(tokens[:, k : k + 1]), log_p_whole[:, k], atol=1e-8, rtol=0)
    assert len(hopeless) == 3


@torch.no_grad()
def test_a_warm_start_is_the_last_state_of_the_same_token() -> None:
    model, decoder = make_model("convergent"), Incremental(make_model("convergent"), span=3)
    text = torch.tensor([[1, 2, 1], [3, 4, 5]])
    z = model(text).z
    decoder.feed(text)
    assert decoder._start(torch.tensor([[7], [7]])) is None
    result = decoder._start(torch.tensor([[1, 2], [1, 3]]))
    assert result is not None
    assert_close(result[0], z[0, [2, 1]], atol=1e-8, rtol=0)
    assert_close(result[1], torch.stack((torch.zeros_like(z[1, 0]), z[1, 0])), atol=1e-8, rtol=0)
    decoder.feed(torch.tensor([[6], [6]]))  # the first of three is forgotten
    assert decoder._start(torch.tensor([[9], [3]])) is None


@torch.no_grad()
def test_incremental_decoding_forgets_what_is_beyond_its_span() -> None:
    model, tokens = make_model("convergent"), draw_ids(length=8)
    decoder = Incremental(model, span=3)
    memory = None
    for k in range(8):
        result = decoder.feed(tokens[:, k : k + 1])
        out = model(tokens[:, k : k + 1], memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 3)
        assert_close(result, model.log_prob(out.z)[:, 0], atol=1e-8, rtol=0)


@pytest.mark.parametrize("design", ["original", "convergent"])
@torch.no_grad()
def test_a_prompt_beyond_the_span_is_read_as_evaluation_reads_it(design: str) -> None:
    model, tokens = make_model(design), draw_ids(length=10)
    memory = None
    for start in (0, 4, 8):
        out = model(tokens[:, start : start + 4], memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 4)
    result = Incremental(model, span=4).feed(tokens)
    assert_close(result, model.log_prob(out.z)[:, -1], atol=1e-8, rtol=0)


@torch.no_grad()
def test_chunked_decoding_is_the_evaluation_of_the_same_segments() -> None:
    model, tokens = make_model("redesigned"), draw_ids(length=10)
    log_p_whole, memory = [], None
    for start in (0, 4, 8):
        out = model(tokens[:, start : start + 4], memory)
        log_p_whole.append(model.log_prob(out.z))
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 4)
    expected = torch.cat(log_p_whole, dim=1)
    decoder = Chunked(model, span=4, length=4)
    assert_close(decoder.feed(tokens[:, :6]), model.log_prob(model(tokens[:, 4:6],
                 _compute_memory(model, tokens[:, :4])).z)[:, -1])  # fmt: skip
    for k in (6, 7, 8, 9):
        result = decoder.feed(tokens[:, k : k + 1])
    assert_close(result, expected[:, 9], atol=1e-10, rtol=0)


def _compute_memory(model: Any, tokens: torch.Tensor) -> Any:
    out = model(tokens)
    return model.empty_memory(out.u).followed_by(out, 4)


def test_each_design_gets_the_decoder_that_is_right_for_it() -> None:
    assert isinstance(make_decoder(make_model("redesigned"), 4, 4), Chunked)
    for design in ("original", "convergent"):
        assert isinstance(make_decoder(make_model(design), 4, 4), Incremental)


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

    def __init__(self, text: str) -> None:
        self.left = list(text.encode())

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        log_p = torch.full((1, 256), -1e9)
        log_p[0, self.left.pop(0)] = 0.0
        return log_p


def test_text_comes_line_by_line_and_wrapped_at_words() -> None:
    text = "ein Wörtchen und noch eins\nzwei\n\ndrei"
    options = Sampling(prompt="Es ist ", tokens=len(text.encode()), columns=16)
    lines = list(write(Script(text), Bytes(), options, CPU))  # type: ignore[arg-type]
    assert lines == ["Es ist ein ", "Wörtchen und ", "noch eins", "zwei", "", "drei"]


class Shy:
    """A decoder whose likeliest token its tokenizer does not have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fed: list[int] = []

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.dtype == torch.long
        self.fed += tokens[0].tolist()
        return torch.arange(self.size, dtype=torch.float32)[None].log_softmax(1)


@pytest.mark.parametrize("tokenizer", [Words.of(["a b c"]), Bytes()], ids=lambda t: t.kind)
def test_a_model_with_room_for_more_tokens_writes_those_there_are(tokenizer: Any) -> None:
    for temperature in (0.0, 100.0):
        options = Sampling(prompt="a", tokens=20, temperature=temperature)
        assert list(write(Shy(tokenizer.size + 50), tokenizer, options, CPU))  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", "   "])
def test_a_prompt_without_words_begins_a_line(prompt: str) -> None:
    shy = Shy(4)
    assert list(write(shy, Words.of(["a b c"]), Sampling(prompt=prompt, tokens=1), CPU))  # type: ignore[arg-type]
    assert shy.fed == [0]


def test_what_cannot_be_written_is_an_error() -> None:
    with pytest.raises(ValueError, match="no fixed point to solve for: use Chunked"):
        Incremental(make_model("redesigned"), 4)
    for wrong, message in (
        ({"columns": 0}, "columns must be at least 1"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"temperature": float("inf")}, "temperature must be at least 0 and finite"),
        ({"seed": 2**70}, "seed must be a number from 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**wrong)
    with pytest.raises(ValueError, match=r"needs model.eval\(\)"):
        Incremental(make_model("convergent").train(), 4)
    with pytest.raises(ValueError, match="span must be at least 1"):
        Incremental(make_model("convergent"), 0)
    with pytest.raises(ValueError, match="length must be at least 1"):
        Chunked(make_model("redesigned"), 4, 0)
    with pytest.raises(ValueError, match="top_p must lie"):
        Sampling(top_p=0.0)
    with pytest.raises(ZooError, match="came without their vocabulary"):
        make_model("convergent").lexicon.require()
