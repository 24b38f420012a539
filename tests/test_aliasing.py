"""Maps that write into their input, or return the same memory at every call.

Most maps here compute `z / 2 + 1`, whose fixed point is 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.solver import SOLVERS, FixedPointIter, StopRule, solve

Map = Callable[[Tensor], Tensor]


def in_place(z: Tensor) -> Tensor:
    return z.mul_(0.5).add_(1)


def in_place_through_a_view(z: Tensor) -> Tensor:
    return z.view(-1).mul_(0.5).add_(1).view_as(z)


def writes_and_returns_another(z: Tensor) -> Tensor:
    out = 0.5 * z + 1
    z.zero_()
    return out


def one_buffer(alias: Callable[[Tensor], Tensor]) -> Callable[[], Map]:
    """Return a factory of maps that write all outputs into one buffer and return its alias."""

    def new_map() -> Map:
        buffer = torch.empty(2, 3)

        def f(z: Tensor) -> Tensor:
            buffer.copy_(0.5 * z + 1)
            return alias(buffer)

        return f

    return new_map


BUFFERS: dict[str, Callable[[], Map]] = {
    "itself": one_buffer(lambda t: t),
    "a view": one_buffer(lambda t: t.view(2, 3)),
    "detached": one_buffer(lambda t: t.detach()),
    "data": one_buffer(lambda t: t.data),
    "numpy": one_buffer(lambda t: torch.from_numpy(t.numpy())),
    "dlpack": one_buffer(lambda t: from_dlpack(t)),
}
WRITERS = [in_place, in_place_through_a_view, writes_and_returns_another]


@pytest.mark.parametrize("f", WRITERS)
@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("inference", [False, True])
def test_writing_into_the_input_is_refused(f: Map, solver: str, inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="wrote into its input"):
        solve(f, torch.zeros(2, 3), SOLVERS[solver](), StopRule(20, 1e-6))


@pytest.mark.parametrize("inference", [False, True])
def test_writing_into_one_tensor_of_several_is_refused(inference: bool) -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * a + 1, b.mul_(0.5)

    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="wrote into its input"):
        solve(f, (torch.zeros(2, 3), torch.ones(2, 1)), FixedPointIter(), StopRule(20))


@pytest.mark.parametrize("alias", BUFFERS)
@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("inference", [False, True])
def test_one_buffer_for_all_outputs_gives_the_right_states_or_an_error(
    alias: str, solver: str, inference: bool
) -> None:
    options: Any = {"jacobian": "difference"} if solver == "newton_krylov" else {}
    ask: Any = (torch.zeros(2, 3), SOLVERS[solver](**options), StopRule(6, 0.0), [1, 2, 3, 6])
    with torch.inference_mode(inference):
        expected = solve(lambda z: 0.5 * z + 1, *ask)
        try:
            got = solve(BUFFERS[alias](), *ask)
        except RuntimeError as error:
            if "return a new tensor" not in str(error):
                raise
        else:
            torch.testing.assert_close(got.states, expected.states)
            torch.testing.assert_close(got.z, expected.z)


@pytest.mark.parametrize("alias", BUFFERS)
def test_plain_iteration_finds_one_buffer_however_it_is_returned(alias: str) -> None:
    with pytest.raises(RuntimeError, match="return a new tensor"):
        solve(BUFFERS[alias](), torch.zeros(2, 3), FixedPointIter(), StopRule(6, 0.0), [1, 2, 6])


def test_two_buffers_in_turn_are_found_too() -> None:
    buffers = [torch.empty(2, 3), torch.empty(2, 3)]

    def f(z: Tensor) -> Tensor:
        buffers.reverse()
        return buffers[0].copy_(0.5 * z + 1).data

    with pytest.raises(RuntimeError, match=r"\.data, NumPy, DLPack.*return a new tensor"):
        solve(f, torch.zeros(2, 3), FixedPointIter(), StopRule(6, 0.0), [1, 2, 6])


@pytest.mark.parametrize("inference", [False, True])
def test_buffers_of_several_tensors_are_refused_or_right(inference: bool) -> None:
    def states(f: Any) -> Any:
        z0 = (torch.zeros(2, 3), torch.zeros(2, 3))
        return solve(
            f, z0, SOLVERS["simple_fixed_point_iter"](), StopRule(6, 0.0), [1, 2, 6]
        ).states

    with torch.inference_mode(inference):
        f, g = BUFFERS["itself"](), BUFFERS["itself"]()
        expected = states(lambda a, b: (0.5 * a + 1, 0.5 * b + 1))
        if inference:
            torch.testing.assert_close(states(lambda a, b: (f(a), g(b))), expected)
        else:
            with pytest.raises(RuntimeError, match="return a new tensor"):
                states(lambda a, b: (f(a), g(b)))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_the_identity_views_of_it_and_constants_are_maps_like_others(
    solver: str, inference: bool
) -> None:
    with torch.inference_mode(inference):
        constant, start = torch.full((2, 2, 3), 3.0), torch.ones(2, 2, 3)
        identities: list[Map] = [lambda z: z, lambda z: z.view(z.shape), lambda z: z.mT.mT]
        for f in identities:
            z = solve(f, start, SOLVERS[solver](), StopRule(5), on_failure="ignore").z
            assert torch.equal(z, start)
        constants: list[Map] = [lambda z: constant, lambda z: constant.view(2, 2, 3)]
        for f in constants:
            z = solve(f, start, SOLVERS[solver](), StopRule(6, 0.0), [1, 3]).z
            torch.testing.assert_close(z, constant)
        assert torch.equal(constant, torch.full((2, 2, 3), 3.0))


def test_memory_that_is_given_out_again_is_no_reuse_by_f() -> None:
    packing = Packing(torch.ones(2, 3))
    f, addresses = PackedFn(packing, lambda z: 0.5 * z), set()
    for _ in range(300):  # outputs are freed at once, and the allocator reuses their memory
        addresses.add(f(torch.ones(2, 3)).data_ptr())
    assert len(addresses) < 300
