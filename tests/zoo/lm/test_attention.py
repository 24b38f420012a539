"""Relative attention against a double loop over queries and keys."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from deq_zoo.lm.attention import Context, RelativeAttention, causal_mask, shift_to_keys, sinusoids

D, H = 8, 2


def make_layer() -> RelativeAttention:
    torch.manual_seed(0)
    return RelativeAttention(D, H, torch.nn.Identity(), dropout=0.5).double()


def make_context(
    attention: RelativeAttention, u: Tensor, z: Tensor, u_past: Tensor, window: int
) -> Context:
    keys = z.shape[1] + u.shape[1]
    r = attention.distances(sinusoids(keys, D, like=u))
    k, v = attention.keys(z, u_past)
    return Context(u, k, v, r, causal_mask(u.shape[1], z.shape[1], window, like=u))


@pytest.mark.parametrize(("past", "length", "window"), [(3, 4, 0), (0, 5, 0), (3, 4, 2), (4, 1, 3)])
@pytest.mark.parametrize("training", [False, True])
def test_attention_is_its_formula(past: int, length: int, window: int, training: bool) -> None:
    attention, B, d = make_layer().train(training), 2, D // H
    x, u = torch.randn(B, length, D).double(), torch.randn(B, length, 3 * D).double()
    z, u_past = torch.randn(B, past, D).double(), torch.randn(B, past, 3 * D).double()
    ones = torch.ones(B, H, length, past + length).double()
    kept = (torch.rand_like(ones) < 0.5).double() * 2
    attention.drop.mask = kept
    result = attention(x, make_context(attention, u, z, u_past, window))

    everything = torch.cat((z, x), dim=1) @ attention.qkv_net.weight.mT
    everything = everything + torch.cat((u_past, u), dim=1)
    q, k, v = (part.unflatten(2, (H, d)) for part in everything.chunk(3, dim=2))
    heads = torch.zeros(B, length, H, d).double()
    for b in range(B):
        for h in range(H):
            for i in range(length):
                seen = [j for j in range(past + i + 1) if not window or past + i - j < window]
                query, scores = q[b, past + i, h], []
                for j in seen:
                    table = sinusoids(past + i - j + 1, D, like=x)[0]  # the largest distance
                    r = (attention.r_net.weight @ table).view(H, d)[h]
                    content = (query + attention.r_w_bias[h]) @ k[b, j, h]
                    distance = (query + attention.r_r_bias[h]) @ r
                    scores.append((content + distance) / sqrt(d))
                weights = torch.stack(scores).softmax(0)
                if training:
                    weights = weights * kept[b, h, i, seen]
                heads[b, i, h] = weights @ v[b, seen, h]
    assert_close(result, attention.o_net(heads.flatten(2)))


def test_shifting_moves_distances_to_their_keys() -> None:
    scores = torch.arange(3 * 5.0).view(3, 5)
    moved = shift_to_keys(scores)
    for i in range(3):
        for j in range(2 + i + 1):  # the keys up to its own
            assert moved[i, j] == scores[i, j + 3 - 1 - i]
    assert torch.equal(shift_to_keys(scores[:1]), scores[:1])


def test_the_table_of_distances_is_sines_then_cosines() -> None:
    table = sinusoids(4, 6, like=torch.zeros((), dtype=torch.float64))
    for row, distance in enumerate((3, 2, 1, 0)):
        angles = torch.tensor([distance * 10000 ** (-2 * m / 6) for m in range(3)]).double()
        assert_close(table[row], torch.cat((angles.sin(), angles.cos())), rtol=1e-6, atol=1e-6)
    assert sinusoids(3, 4, like=torch.zeros((), dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_query_without_anything_to_hide_needs_no_mask() -> None:
    like = torch.zeros(())
    assert causal_mask(1, 7, 0, like) is None
    assert causal_mask(1, 7, 8, like) is None
    narrow = causal_mask(1, 7, 3, like)
    assert narrow is not None
    assert narrow.isfinite().sum() == 3


def test_heads_must_share_the_width() -> None:
    with pytest.raises(ValueError, match="cannot be divided among 3 heads"):
        RelativeAttention(8, 3, torch.nn.Identity())
