from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchdeq.packing import Packing, take_rows


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def leaves() -> st.SearchStrategy[Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return shapes.map(lambda shape: torch.randn(2, *shape))


states = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
    ),
    max_leaves=5,
)


@given(state=states)
def test_unpacking_undoes_packing_for_any_pytree(state: Any) -> None:
    packing = Packing(state)
    matrix = packing.pack(state)
    assert matrix.shape == (2, sum(packing.sizes))
    again = packing.unpack(matrix)
    assert type(again) is type(state)
    torch.testing.assert_close(again, state, rtol=0, atol=0)


def test_a_named_tuple_keeps_its_type() -> None:
    state = Pair(torch.ones(2, 3), torch.zeros(2))
    again = Packing(state).unpack(Packing(state).pack(state))
    assert isinstance(again, Pair)
    assert torch.equal(again.first, state.first)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_tensor_is_never_copied(layout: torch.memory_format) -> None:
    z = torch.randn(2, 3, 4, 4).to(memory_format=layout)
    packing = Packing(z)
    matrix = packing.pack(z)
    assert matrix.data_ptr() == z.data_ptr()
    seen: list[Tensor] = []

    def double(t: Tensor) -> Tensor:
        seen.append(t)
        return t * 2

    image = packing.wrap(double)(matrix)
    assert seen[0].data_ptr() == z.data_ptr()
    assert seen[0].stride() == z.stride()
    assert torch.equal(packing.unpack(image), z * 2)


def test_numbers_and_vectors_are_samples() -> None:
    assert Packing(torch.tensor(1.0)).pack(torch.tensor(1.0)).shape == (1, 1)
    assert Packing(torch.zeros(5)).pack(torch.zeros(5)).shape == (5, 1)
    assert Packing(torch.tensor(1.0)).unpack(torch.ones(1, 1)).shape == ()


def test_several_tensors_are_written_straight_into_the_buffer() -> None:
    state = (torch.randn(2, 3), torch.randn(2, 2, 2))
    packing = Packing(state)
    buffer = torch.empty(2, 7)
    image = packing.wrap(lambda a, b: [a + 1, b + 1])(packing.pack(state), buffer)
    assert image is buffer
    assert torch.equal(buffer, packing.pack(state) + 1)


def test_list_and_tuple_are_interchangeable_and_dict_order_does_not_matter() -> None:
    state = {"a": torch.zeros(2, 1), "b": (torch.ones(2, 2), torch.ones(2))}
    packing = Packing(state)
    f = packing.wrap(lambda z: {"b": list(z["b"]), "a": z["a"]})
    assert torch.equal(f(packing.pack(state)), packing.pack(state))


@pytest.mark.parametrize(
    ("z0", "error", "message"),
    [
        ((), ValueError, "holds no tensor"),
        ((torch.zeros(2), 3), TypeError, r"got int at z0\[1\]"),
        (torch.zeros(2, dtype=torch.long), TypeError, "floating point: got torch.int64"),
        ((torch.zeros(2), torch.zeros(2).double()), TypeError, "share one dtype.*float32 at .0."),
        ((torch.zeros(2, 3), torch.zeros(3, 2)), ValueError, r"one batch size: got \(2, 3\) at"),
        ((torch.zeros(2), torch.zeros(2, device="meta")), ValueError, "share one device"),
    ],
)
def test_a_bad_start_is_refused(z0: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Packing(z0)


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda a, b: a, ValueError, "f's output must be a tuple or list of 2 items: got Tensor"),
        (lambda a, b: (a, b, a), ValueError, "list of 2 items: got 3 items"),
        (lambda a, b: (a, None), TypeError, r"f's output\[1\] must be a tensor: got NoneType"),
        (lambda a, b: (a, b[:, :1]), ValueError, r"got \[\(2, 3\), \(2, 1\)\], expected"),
        (
            lambda a, b: (a, b.long()),
            TypeError,
            r"got torch.int64 at \[1\], expected torch.float32",
        ),
        (lambda a, b: (a, b.to("meta")), ValueError, r"got meta at \[1\], expected cpu"),
    ],
)
def test_what_f_returns_is_checked(f: Any, error: type[Exception], message: str) -> None:
    state = (torch.zeros(2, 3), torch.zeros(2, 2))
    packing = Packing(state)
    with pytest.raises(error, match=message):
        packing.wrap(f)(packing.pack(state))


def test_a_wrong_shape_is_told_with_what_was_expected() -> None:
    packing = Packing(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"got \(2, 4\), expected \(2, 3\)"):
        packing.wrap(lambda z: torch.zeros(2, 4))(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"keys \['a'\]: got keys \['b'\]"):
        Packing({"a": torch.zeros(1)}).wrap(lambda z: {"b": z["a"]})(torch.zeros(1, 1))


@pytest.mark.parametrize("inference", [False, True])
def test_another_float_dtype_is_cast_to_that_of_the_state(inference: bool) -> None:
    with torch.inference_mode(inference):
        packing = Packing(torch.zeros(2, 3))
        f = packing.wrap(lambda z: z.bfloat16())
        assert f(torch.zeros(2, 3)).dtype == torch.float32
        assert f.eps == torch.finfo(torch.bfloat16).eps


def test_the_precision_of_autocast_is_known() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        f = Packing(torch.zeros(2, 3)).wrap(lambda z: z)
    assert f.eps == torch.finfo(torch.bfloat16).eps


def test_writing_into_the_input_or_returning_one_buffer_is_refused() -> None:
    packing, buffer = Packing(torch.ones(2, 3)), torch.empty(2, 3)
    with pytest.raises(RuntimeError, match="f wrote into its input"):
        packing.wrap(lambda z: z.mul_(0.5))(torch.ones(2, 3))
    f = packing.wrap(lambda z: torch.mul(z, 0.5, out=buffer))
    with pytest.raises(RuntimeError, match="return a new tensor"):
        f(f(torch.ones(2, 3)))


def test_arguments_follow_the_samples_that_stay() -> None:
    rows = torch.tensor([2, 0])
    kept = take_rows((torch.arange(3), {"a": [torch.arange(3.0)]}, "text", None), rows)
    assert kept[0].tolist() == [2, 0]
    assert kept[1]["a"][0].tolist() == [2.0, 0.0]
    assert kept[2:] == ("text", None)


def test_a_mapping_keeps_its_type_and_what_it_holds_beside_its_items() -> None:
    state: Any = defaultdict(list, {"a": torch.zeros(2, 1), "b": torch.ones(2)})
    again = Packing(state).unpack(Packing(state).pack(state))
    assert isinstance(again, defaultdict)
    assert again.default_factory is list
    assert torch.equal(again["b"], state["b"])
    assert again is not state
