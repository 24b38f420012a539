"""The vocabulary in and out, against formulas typed again."""

from __future__ import annotations

from copy import deepcopy
from math import sqrt
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from deq_zoo.lm import AdaptiveVocabulary

SHAPES: list[dict[str, Any]] = [
    {"embed": 8, "cutoffs": (4, 9), "shrink": 2},
    {"embed": 8, "cutoffs": (4, 9), "shrink": 1},
    {"embed": 6, "cutoffs": (5,), "shrink": 1},
    {"embed": 8},
    {"embed": 6},
]


def make_vocabulary(**shape: Any) -> AdaptiveVocabulary:
    words = AdaptiveVocabulary(15, 8, **shape).double()
    for parameter in words.parameters():
        torch.nn.init.normal_(parameter)
    return words


@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_sum_to_one_and_losses_are_theirs_in_token_order(shape: Any) -> None:
    words, h = make_vocabulary(**shape), torch.randn(3, 5, 8, dtype=torch.float64)
    target = torch.randint(15, (3, 5))
    log_p = words.log_prob(h)
    assert log_p.shape == (3, 5, 15)
    assert_close(log_p.exp().sum(-1), torch.ones(3, 5, dtype=torch.float64))
    assert_close(words.nll(h, target), -log_p.gather(2, target[..., None])[..., 0])


def test_an_embedding_is_the_scaled_projection_of_its_clusters_row() -> None:
    words = make_vocabulary(embed=8, cutoffs=(4, 9), shrink=2)
    for token, (i, row) in {0: (0, 0), 3: (0, 3), 4: (1, 0), 8: (1, 4), 14: (2, 5)}.items():
        expected = sqrt(8) * words.projections[i] @ words.tables[i][row]
        assert_close(words.embed(torch.tensor([[token]]))[0, 0], expected)


def test_without_clusters_input_and_output_are_one_table() -> None:
    words = make_vocabulary(embed=8)
    assert len(list(words.parameters())) == 4  # the table, its bias, and nothing for no clusters
    h = torch.randn(1, 2, 8, dtype=torch.float64)
    assert_close(words.log_prob(h), (h @ words.tables[0].mT + words.biases[0]).log_softmax(-1))


def test_the_tie_holds_through_copies_moves_and_loading() -> None:
    words = make_vocabulary(embed=8, cutoffs=(4, 9), shrink=2)
    again = deepcopy(words).float()
    again.load_state_dict(words.float().state_dict())
    names = [name for name, _ in again.named_parameters()]
    assert len(set(names)) == len(list(again.state_dict()))
    before = again.log_prob(torch.ones(1, 1, 8))
    with torch.no_grad():
        again.tables[2].add_(1)
        again.projections[2].add_(1)
    assert not torch.equal(before, again.log_prob(torch.ones(1, 1, 8)))
    assert torch.equal(again.embed(torch.tensor([[3]])), words.embed(torch.tensor([[3]])))
    assert not torch.equal(again.embed(torch.tensor([[12]])), words.embed(torch.tensor([[12]])))


def test_every_parameter_is_reached_by_the_gradient() -> None:
    words = make_vocabulary(embed=8, cutoffs=(4, 9), shrink=2)
    ids = torch.arange(15)[None]
    words.nll(words.embed(ids), ids.flip(1)).mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in words.parameters())


def test_empty_batches_and_empty_clusters_work() -> None:
    words = make_vocabulary(embed=8, cutoffs=(4, 9), shrink=2)
    assert words.embed(torch.empty(0, 3, dtype=torch.long)).shape == (0, 3, 8)
    ids = torch.zeros(2, 3, dtype=torch.long)  # all in the first cluster
    assert words.nll(words.embed(ids), ids).shape == (2, 3)


def test_half_precision_sums_in_single() -> None:
    words = make_vocabulary(embed=8, cutoffs=(4, 9), shrink=2).bfloat16()
    ids = torch.randint(15, (2, 3))
    e = words.embed(ids)
    assert e.dtype == torch.bfloat16
    assert words.nll(e, ids).dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_that_are_not_there_are_an_error(shape: Any) -> None:
    words, h = make_vocabulary(**shape), torch.zeros(1, 2, 8, dtype=torch.float64)
    for wrong in (15, -1):
        with pytest.raises(ValueError, match=r"tokens must lie in \[0, 15\)"):
            words.embed(torch.tensor([[3, wrong]]))
    for wrong in (15, -1, -100):  # the last is what others leave out of a loss
        with pytest.raises(IndexError):
            words.nll(h, torch.tensor([[3, wrong]]))


def test_shapes_that_cannot_be_are_errors() -> None:
    with pytest.raises(ValueError, match="cutoffs must rise"):
        AdaptiveVocabulary(15, 8, 8, (9, 4), 2)
    with pytest.raises(ValueError, match="no width left"):
        AdaptiveVocabulary(15, 8, 8, (4, 9), 4)
    with pytest.raises(ValueError, match="int64 ids"):
        make_vocabulary(embed=8).embed(torch.zeros(3, dtype=torch.long))
