"""Warm starts by sample: what is kept comes back, for the sample it belongs to."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq import WarmStarts, get_deq


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def test_a_state_comes_back_for_its_sample_and_others_get_the_default() -> None:
    warm = WarmStarts(5)
    zeros = torch.zeros(2, 3)
    assert warm.take(ids(0, 1), zeros) is zeros
    z = torch.randn(2, 3, requires_grad=True)
    warm.put(ids(3, 1), z)
    got = warm.take(ids(1, 0, 3), torch.full((3, 3), 7.0))
    assert torch.equal(got, torch.stack([z[1], torch.full((3,), 7.0), z[0]]))
    assert not got.requires_grad
    assert warm.seen.tolist() == [False, True, False, True, False]
    with torch.no_grad():
        z.zero_()  # the caller's tensor is not shared
    assert float(warm.take(ids(1), zeros[:1]).abs().sum()) > 0


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_any_structure_of_tensors(kind: type) -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 4, 5, dtype=torch.float64)
    z: Any = {"a": a, "b": b} if kind is dict else kind((a, b))
    warm = WarmStarts(4)
    warm.put(ids(2, 0), z)
    default: Any = {"a": 0 * a, "b": 0 * b} if kind is dict else kind((0 * a, 0 * b))
    got: Any = warm.take(ids(0, 2), default)
    first, second = list(got.values()) if kind is dict else list(got)
    assert type(got) is kind
    assert torch.equal(first, a.flip(0))
    assert torch.equal(second, b.flip(0))


def test_failed_and_non_finite_states_are_not_kept() -> None:
    warm = WarmStarts(3)
    warm.put(ids(0, 1, 2), torch.ones(3, 2))
    z = torch.tensor([[2.0, 2.0], [float("nan"), 2.0], [2.0, 2.0]])
    warm.put(ids(0, 1, 2), z, keep=torch.tensor([True, True, False]))
    assert warm.take(ids(0, 1, 2), torch.zeros(3, 2))[:, 1].tolist() == [2.0, 1.0, 1.0]
    new = WarmStarts(2)
    new.put(ids(0, 1), torch.tensor([[float("inf")], [1.0]]))
    assert new.seen.tolist() == [False, True]


def test_another_dtype_takes_less_memory_and_comes_back_as_the_default() -> None:
    warm = WarmStarts(10, dtype=torch.bfloat16, device="cpu")
    z = torch.randn(2, 8)
    warm.put(ids(4, 5), z)
    assert warm.nbytes == 10 * 8 * 2 + 10
    got = warm.take(ids(4, 5), torch.zeros(2, 8))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, z, rtol=2**-8, atol=0)


def test_a_checkpoint_continues() -> None:
    warm = WarmStarts(4)
    warm.put(ids(1, 2), torch.randn(2, 3))
    buffer = io.BytesIO()
    torch.save(warm.state_dict(), buffer)
    buffer.seek(0)
    other = WarmStarts(4)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    default = torch.zeros(4, 3)
    assert torch.equal(other.take(torch.arange(4), default), warm.take(torch.arange(4), default))
    other.put(ids(0), torch.ones(1, 3))
    assert not bool(warm.seen[0])
    WarmStarts(4).load_state_dict(WarmStarts(4).state_dict())  # nothing kept yet
    with pytest.raises(ValueError, match="of 5 samples, got 4"):
        WarmStarts(5).load_state_dict(warm.state_dict())


def test_states_can_be_forgotten() -> None:
    warm = WarmStarts(3)
    warm.forget()
    warm.put(ids(0, 1), torch.ones(2, 1))
    warm.forget(ids(0))
    assert warm.seen.tolist() == [False, True, False]
    warm.forget()
    assert not bool(warm.seen.any())


def test_errors_say_what_is_wrong() -> None:
    warm = WarmStarts(4, max_bytes=100)
    with pytest.raises(ValueError, match="more than max_bytes"):
        warm.put(ids(0), torch.zeros(1, 100))
    assert warm.nbytes == 0
    warm.put(ids(0), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="must have the shapes"):
        warm.put(ids(0), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="must have the shapes"):
        warm.take(ids(0), torch.zeros(1, 3))
    with pytest.raises(IndexError, match="within 0 and 3, got"):
        warm.take(ids(4), torch.zeros(1, 2))
    with pytest.raises(IndexError):
        warm.put(ids(-1), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="index has 2 samples"):
        warm.take(ids(0, 1), torch.zeros(1, 2))
    with pytest.raises(TypeError, match="whole numbers"):
        warm.put(torch.tensor([True]), torch.zeros(1, 2))
    with pytest.raises(TypeError, match="a state must be"):
        warm.put(ids(0), "z")
    with pytest.raises(ValueError, match="size, the number of samples"):
        WarmStarts(0)


def test_the_second_epoch_needs_fewer_evaluations_for_the_same_answer() -> None:
    linear = nn.Linear(8, 8)
    x = torch.randn(12, 8)
    deq = get_deq(f_max_iter=200, f_tol=1e-5, f_stop_mode="rel").eval()
    warm, nfe, answers = WarmStarts(12), list[int](), list[Tensor]()
    for _ in range(2):
        for index in torch.arange(12).chunk(3):
            z0 = warm.take(index, torch.zeros(4, 8))
            with torch.no_grad():
                (z,), stats = deq(lambda z, i=index: torch.tanh(linear(z) + x[i]), z0)
            warm.put(index, z, keep=~stats.failed)
            nfe.append(stats.nfe)
            answers.append(z)
    assert sum(nfe[3:]) == 3  # the start meets the tolerance
    torch.testing.assert_close(torch.cat(answers[:3]), torch.cat(answers[3:]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("first", [torch.float16, torch.float32])
def test_a_state_beyond_the_range_of_a_dtype_is_no_start(first: torch.dtype) -> None:
    warm = WarmStarts(3, dtype=first)
    warm.put(ids(0, 1), torch.tensor([[1.0], [1e6]]))
    start = warm.take(ids(0, 1), torch.zeros(2, 1, dtype=torch.float16))
    assert start.flatten().tolist() == [1.0, 0.0]


def test_states_of_a_dict_come_back_by_their_keys() -> None:
    warm = WarmStarts(2)
    warm.put(ids(0), {"a": torch.ones(1, 1), "b": torch.full((1, 1), 2.0)})
    start = warm.take(ids(0), {"b": torch.zeros(1, 1), "a": torch.zeros(1, 1)})
    assert {key: float(t) for key, t in start.items()} == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match="must have the shapes"):
        warm.take(ids(0), {"x": torch.zeros(1, 1), "y": torch.zeros(1, 1)})
    with pytest.raises(TypeError, match="all real or all complex"):
        warm.take(ids(0), {"a": torch.zeros(1, 1) * 1j, "b": torch.zeros(1, 1)})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_an_index_of_any_whole_dtype_names_samples(dtype: torch.dtype) -> None:
    warm = WarmStarts(4)
    warm.put(torch.arange(4, dtype=dtype), torch.arange(4.0)[:, None])
    start = warm.take(torch.tensor([3, 0, 1, 1], dtype=dtype), torch.full((4, 1), -1.0))
    assert start.flatten().tolist() == [3.0, 0.0, 1.0, 1.0]


def test_states_put_in_inference_mode_serve_training_and_empty_batches_are_accepted() -> None:
    warm = WarmStarts(4)
    with torch.inference_mode():
        warm.put(torch.arange(0), torch.ones(0, 2))
        warm.put(ids(0, 1), torch.ones(2, 2))
    warm.put(ids(1, 2), torch.zeros(2, 2))
    weight = torch.ones(2, requires_grad=True)
    (warm.take(ids(0, 1), torch.zeros(2, 2)) * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]


def test_wrong_indices_flags_and_checkpoints_are_errors() -> None:
    warm = WarmStarts(4)
    with pytest.raises(ValueError, match="no sample twice"):
        warm.put(ids(1, 1), torch.ones(2, 1))
    with pytest.raises(TypeError, match="whole numbers, got list"):
        warm.take([0], torch.ones(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keep must be a tensor of bool"):
        warm.put(ids(0), torch.ones(1, 1), keep=ids(1))
    warm.put(ids(0), torch.ones(1, 1))
    with pytest.raises(IndexError, match="within 0 and 3"):
        warm.forget(ids(-1))
    with pytest.raises(ValueError, match="must have 4 rows"):
        warm.load_state_dict({**warm.state_dict(), "seen": torch.ones(3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="a checkpoint must have"):
        warm.load_state_dict({})
    with pytest.raises(TypeError, match="imaginary"):
        WarmStarts(2, dtype=torch.bfloat16).put(ids(0), torch.ones(1, 1) * 1j)
