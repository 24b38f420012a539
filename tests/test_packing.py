"""States of any structure as one matrix, and maps of such states."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import take_rows
from torchdeq.solver import SOLVERS, FixedPointIter, StopRule, solve


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
    unpacked = packing.unpack(matrix)
    assert type(unpacked) is type(state)
    torch.testing.assert_close(unpacked, state, rtol=0, atol=0)


def test_a_named_tuple_keeps_its_type() -> None:
    state = Pair(torch.ones(2, 3), torch.zeros(2))
    unpacked = Packing(state).unpack(Packing(state).pack(state))
    assert isinstance(unpacked, Pair)
    assert torch.equal(unpacked.first, state.first)


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

    image = PackedFn(packing, double)(matrix)
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
    image = PackedFn(packing, lambda a, b: [a + 1, b + 1])(packing.pack(state), buffer)
    assert image is buffer
    assert torch.equal(buffer, packing.pack(state) + 1)


def test_list_and_tuple_are_interchangeable_and_dict_order_does_not_matter() -> None:
    state = {"a": torch.zeros(2, 1), "b": (torch.ones(2, 2), torch.ones(2))}
    packing = Packing(state)
    f = PackedFn(packing, lambda z: {"b": list(z["b"]), "a": z["a"]})
    assert torch.equal(f(packing.pack(state)), packing.pack(state))


def strange_starts() -> dict[str, Tensor]:
    """Return states of shape (2, 3, 4) that are not contiguous."""
    return {
        "expanded": torch.zeros(1, 1, 1).expand(2, 3, 4),
        "expanded batch": torch.randn(1, 3, 4).expand(2, 3, 4),
        "transposed": torch.randn(2, 4, 3).mT,
        "batch last": torch.randn(3, 4, 2).permute(2, 0, 1),
        "every other": torch.randn(2, 3, 8)[..., ::2],
    }


@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("layout", strange_starts())
def test_f_may_view_its_input_whatever_the_layout_of_the_start(solver: str, layout: str) -> None:
    def f(z: Tensor) -> Tensor:
        return (0.5 * z.view(2, 12) + 1).view(2, 3, 4)

    z = solve(f, strange_starts()[layout], SOLVERS[solver](), StopRule(60, 1e-6)).z
    torch.testing.assert_close(z, torch.full((2, 3, 4), 2.0))
    torch.testing.assert_close(Packing(z).unpack(Packing(z).pack(z)), z)


def test_a_flat_start_and_a_square_picture_may_have_any_layout_too() -> None:
    for z0 in (torch.zeros(1, 4).expand(2, 4), torch.randn(4, 2).mT):
        z = solve(lambda z: 0.5 * z.view(8).view(2, 4) + 1, z0, FixedPointIter(), StopRule(60)).z
        torch.testing.assert_close(z, torch.full((2, 4), 2.0), atol=1e-2, rtol=0)
    pictures = torch.randn(2, 3, 4, 4).mT  # neither contiguous nor channels last
    seen: list[Tensor] = []
    PackedFn(Packing(pictures), lambda z: seen.append(z) or z)(Packing(pictures).pack(pictures))  # type: ignore[func-returns-value]
    assert seen[0].is_contiguous()
    assert torch.equal(seen[0], pictures)


def test_volumes_with_channels_last_are_not_copied() -> None:
    z = torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    rows = Packing(z).pack(z)
    assert rows.data_ptr() == z.data_ptr()
    assert Packing(z).unpack(rows).stride() == z.stride()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0,), (0, 2, 2)])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_state_without_elements_is_solved(shape: tuple[int, ...], solver: str) -> None:
    z = solve(lambda z: 0.5 * z + 1, torch.zeros(shape), SOLVERS[solver](), StopRule(5)).z
    assert z.shape == shape


@pytest.mark.parametrize(
    ("z0", "error", "message"),
    [
        (
            torch.zeros(2, dtype=torch.complex64),
            TypeError,
            r"the state is complex \(torch.complex64\).*use torch.view_as_real",
        ),
        (
            {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.complex128)},
            TypeError,
            r"the state at \['b'\] is complex",
        ),
        (torch.zeros(2, dtype=torch.bool), TypeError, r"got torch.bool; cast it with .float\(\)"),
        (
            torch.zeros(2).to(torch.float8_e5m2),
            TypeError,
            "no solver computes in torch.float8_e5m2",
        ),
        (torch.zeros(2, 3).to_sparse(), TypeError, r"is sparse \(torch.sparse_coo\).*to_dense"),
        (torch.zeros(2, 3, device="meta"), ValueError, "on the meta device"),
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


def test_a_nested_start_is_refused() -> None:
    z0 = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    with pytest.raises(TypeError, match="is a nested tensor: pad it"):
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
        (
            lambda a, b: (a, torch.complex(b, b)),
            TypeError,
            r"the output of f at \[1\] is complex.*view_as_real",
        ),
        (lambda a, b: (a, b.to_sparse()), TypeError, r"output of f at \[1\] is sparse"),
        (lambda a, b: (a, b.to("meta")), ValueError, r"got meta at \[1\], expected cpu"),
    ],
)
def test_what_f_returns_is_checked(f: Any, error: type[Exception], message: str) -> None:
    state = (torch.zeros(2, 3), torch.zeros(2, 2))
    packing = Packing(state)
    with pytest.raises(error, match=message):
        PackedFn(packing, f)(packing.pack(state))


def test_a_wrong_shape_is_an_error_with_the_expected_one() -> None:
    packing = Packing(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"got \(2, 4\), expected \(2, 3\)"):
        PackedFn(packing, lambda z: torch.zeros(2, 4))(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"keys \['a'\]: got keys \['b'\]"):
        PackedFn(Packing({"a": torch.zeros(1)}), lambda z: {"b": z["a"]})(torch.zeros(1, 1))


@pytest.mark.parametrize("inference", [False, True])
def test_another_float_dtype_is_cast_to_that_of_the_state(inference: bool) -> None:
    with torch.inference_mode(inference):
        packing = Packing(torch.zeros(2, 3))
        f = PackedFn(packing, lambda z: z.bfloat16())
        assert f(torch.zeros(2, 3)).dtype == torch.float32
        assert f.eps == torch.finfo(torch.bfloat16).eps


def test_the_precision_of_autocast_is_known() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        f = PackedFn(Packing(torch.zeros(2, 3)), lambda z: z)
    assert f.eps == torch.finfo(torch.bfloat16).eps


def test_arguments_follow_the_samples_that_stay() -> None:
    rows = torch.tensor([2, 0])
    taken = take_rows((torch.arange(3), {"a": [torch.arange(3.0)]}, "text", None), rows)
    assert taken[0].tolist() == [2, 0]
    assert taken[1]["a"][0].tolist() == [2.0, 0.0]
    assert taken[2:] == ("text", None)


def test_a_mapping_keeps_its_type_and_what_it_holds_beside_its_items() -> None:
    state: Any = defaultdict(list, {"a": torch.zeros(2, 1), "b": torch.ones(2)})
    unpacked = Packing(state).unpack(Packing(state).pack(state))
    assert isinstance(unpacked, defaultdict)
    assert unpacked.default_factory is list
    assert torch.equal(unpacked["b"], state["b"])
    assert unpacked is not state


def test_a_tensor_spread_over_devices_is_refused() -> None:
    class DTensor(Tensor):
        def to_local(self) -> Tensor:
            return self.as_subclass(Tensor)

    spread = torch.zeros(2, 3).as_subclass(DTensor)
    with pytest.raises(TypeError, match=r"the state is a DTensor.*z\.to_local\(\)"):
        Packing(spread)
    f = PackedFn(Packing(torch.zeros(2, 3)), lambda z: z.as_subclass(DTensor))
    with pytest.raises(TypeError, match="the output of f is a DTensor"):
        f(torch.zeros(2, 3))


def test_a_complex_or_sparse_output_of_one_tensor_is_refused() -> None:
    packing = Packing(torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"the output of f is complex \(torch.complex64\)"):
        PackedFn(packing, lambda z: torch.complex(z, z))(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="the output of f is sparse"):
        PackedFn(packing, lambda z: z.to_sparse())(torch.zeros(2, 3))
