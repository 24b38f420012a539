"""Decoders: incremental decoding gives what recomputing everything gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.errors import ZooError
from deq_zoo.lm.decode import Chunked, Incremental, make_decoder
from deq_zoo.lm.language_model import LanguageModel
from tests.zoo.lm.attractor import nets as attractors
from tests.zoo.lm.nets import DESIGNS, draw_ids, make_model


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
    decoder, cold = Incremental(model, span=50), Incremental(model, span=50, warm=False)
    for k in range(6):
        token = tokens[:, k : k + 1]
        assert_close(decoder.feed(token), log_p_whole[:, k], atol=1e-8, rtol=0)
        cold.feed(token)
        assert decoder.stats is not None
        assert cold.stats is not None
        assert decoder.stats.nfe == cold.stats.nfe + (k >= 3)  # the lost evaluation counts
    assert len(hopeless) == 3


@torch.no_grad()
def test_a_warm_start_is_the_last_state_of_the_same_token() -> None:
    model, decoder = make_model("convergent"), Incremental(make_model("convergent"), 3, 1)
    text = torch.tensor([[1, 2, 1], [3, 4, 5]])
    z = model(text).z
    for k in range(3):
        decoder.feed(text[:, k : k + 1])
    assert decoder._find_start(torch.tensor([[7], [7]])) is None
    result = decoder._find_start(torch.tensor([[1, 2], [1, 3]]))
    assert result is not None
    assert_close(result[0], z[0, [2, 1]], atol=1e-8, rtol=0)
    assert_close(result[1], torch.stack((torch.zeros_like(z[1, 0]), z[1, 0])), atol=1e-8, rtol=0)
    decoder.feed(torch.tensor([[6], [6]]))  # the first of three is forgotten
    assert decoder._find_start(torch.tensor([[9], [3]])) is None


@pytest.mark.parametrize("design", [*DESIGNS, "attractor", "published"])
@pytest.mark.parametrize(("span", "length"), [(0, 8), (4, 8), (8, 8), (3, 2)])
@torch.no_grad()
def test_a_text_that_grows_has_the_probabilities_of_evaluation(
    design: str, span: int, length: int
) -> None:
    model, tokens = _make_any(design), draw_ids(length=18)
    memory, states = None, []
    for segment in tokens.split(length, dim=1):
        out = model(segment, memory=memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, span)
        states.append(out.z)
    expected = model.log_prob(torch.cat(states, dim=1))
    for sizes in ([1] * 18, [3, 9, 6]):
        decoder = make_decoder(model, span, length)
        result = torch.cat([decoder.advance(piece) for piece in tokens.split(sizes, dim=1)], dim=1)
        assert_close(model.log_prob(result), expected, atol=1e-8, rtol=0)


@torch.no_grad()
def test_incremental_decoding_forgets_what_is_beyond_its_span() -> None:
    model, tokens = make_model("convergent"), draw_ids(length=8)
    decoder = Incremental(model, span=3, length=1)
    memory = None
    for k in range(8):
        result = decoder.feed(tokens[:, k : k + 1])
        out = model(tokens[:, k : k + 1], memory=memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 3)
        assert_close(result, model.log_prob(out.z)[:, 0], atol=1e-8, rtol=0)


@pytest.mark.parametrize("design", ["original", "convergent"])
@torch.no_grad()
def test_a_prompt_beyond_the_span_is_read_as_evaluation_reads_it(design: str) -> None:
    model, tokens = make_model(design), draw_ids(length=10)
    memory = None
    for start in (0, 4, 8):
        out = model(tokens[:, start : start + 4], memory=memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 4)
    result = Incremental(model, span=4).feed(tokens)
    assert_close(result, model.log_prob(out.z)[:, -1], atol=1e-8, rtol=0)


@torch.no_grad()
def test_chunked_decoding_is_the_evaluation_of_the_same_segments() -> None:
    model, tokens = make_model("redesigned"), draw_ids(length=10)
    log_p_whole, memory = [], None
    for start in (0, 4, 8):
        out = model(tokens[:, start : start + 4], memory=memory)
        log_p_whole.append(model.log_prob(out.z))
        memory = (memory or model.empty_memory(out.u)).followed_by(out, 4)
    expected = torch.cat(log_p_whole, dim=1)
    decoder = Chunked(model, span=4, length=4)
    assert_close(decoder.feed(tokens[:, :6]), model.log_prob(model(tokens[:, 4:6],
                 memory=_compute_memory(model, tokens[:, :4])).z)[:, -1])  # fmt: skip
    for k in (6, 7, 8, 9):
        result = decoder.feed(tokens[:, k : k + 1])
    assert_close(result, expected[:, 9], atol=1e-10, rtol=0)


def _make_any(design: str) -> LanguageModel:
    """Build a model of any design; `published` is an attractor with the authors' solver."""
    if design == "published":
        plain = {"f_solver": "fixed_point_iter", "f_max_iter": 400, "f_tol": 1e-13}
        return attractors.make_model(plain, mixing="published")
    return attractors.make_model() if design == "attractor" else make_model(design)


@torch.no_grad()
def test_a_memory_of_one_state_for_two_blocks_is_decoded_by_segments() -> None:
    model, tokens = make_model("original", blocks=2), draw_ids(length=8)
    with pytest.raises(ValueError, match="keeps one state for 2 blocks"):
        Incremental(model, 4)
    decoder, expected = make_decoder(model, 4, 8), model.log_prob(model(tokens).z)
    for k in range(8):
        result = decoder.feed(tokens[:, k : k + 1])
        assert_close(result, expected[:, k], atol=1e-8, rtol=0)


def _compute_memory(model: Any, tokens: torch.Tensor) -> Any:
    out = model(tokens)
    return model.empty_memory(out.u).followed_by(out, 4)


def test_each_design_gets_the_decoder_that_is_right_for_it() -> None:
    assert isinstance(make_decoder(make_model("redesigned"), 4, 4), Chunked)
    for design in ("original", "convergent"):
        assert isinstance(make_decoder(make_model(design), 4, 4), Incremental)


def test_models_and_sizes_that_cannot_decode_are_errors() -> None:
    with pytest.raises(ValueError, match="has no fixed point to solve for: use Chunked"):
        Incremental(make_model("redesigned"), 4)
    with pytest.raises(ValueError, match=r"needs model.eval\(\)"):
        Incremental(make_model("convergent").train(), 4)
    with pytest.raises(ValueError, match="span must be at least 0"):
        Incremental(make_model("convergent"), -1)
    with pytest.raises(ValueError, match="length must be at least 1"):
        Incremental(make_model("convergent"), 0)
    with pytest.raises(ValueError, match="length must be at least 1"):
        Chunked(make_model("redesigned"), 4, 0)
    with pytest.raises(ZooError, match="came without their vocabulary"):
        make_model("convergent").lexicon.require()


@pytest.mark.parametrize("design", [*DESIGNS, "attractor"])
def test_tokens_that_are_not_the_next_ones_are_errors(design: str) -> None:
    model: Any = attractors.make_model() if design == "attractor" else make_model(design)
    decoder = make_decoder(model, 8, 8)
    with pytest.raises(ValueError, match="shape"):
        decoder.feed(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="a token of each text"):
        decoder.feed(torch.zeros(2, 0, dtype=torch.long))
    decoder.feed(torch.tensor([[1, 2], [3, 4]]))
    with pytest.raises(ValueError, match="holds 2 texts, and the tokens are of 1"):
        decoder.feed(torch.tensor([[1]]))
    decoder.select(torch.tensor([1]))
    decoder.feed(torch.tensor([[1]]))


@pytest.mark.parametrize("design", [*DESIGNS, "attractor"])
def test_tokens_that_cannot_be_read_leave_a_decoder_as_it_was(design: str) -> None:
    model: Any = attractors.make_model() if design == "attractor" else make_model(design)
    decoder, untouched = make_decoder(model, 4, 4), make_decoder(model, 4, 4)
    wrong = torch.tensor([[1, 2, 3, 4, 99, 1]])  # in the second segment
    with pytest.raises(ValueError, match=r"lie in \[0, 11\)"):
        decoder.feed(wrong)
    with pytest.raises(ValueError, match=r"lie in \[0, 11\)"):
        decoder.feed(torch.tensor([[99]]))
    ids = draw_ids(2, 6)  # another number of texts
    assert_close(decoder.feed(ids), untouched.feed(ids), atol=0, rtol=0)
