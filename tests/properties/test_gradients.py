"""Every gradient of a random map equals that of the unrolled loop, or the error is clear."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.properties.cases import CLEAR, FINE, METHODS, TRANSFORMS, case
from tests.properties.grammar import STARTS, VIAS
from tests.properties.pieces import PIECES

SAMPLE = 144  # eight of each transform
ALL = 2016
CHUNK = 96


@pytest.mark.parametrize("seed", range(SAMPLE))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_gradient_of_a_random_map_is_that_of_its_definition(seed: int) -> None:
    c = case(seed)
    outcome = c.outcome()
    assert outcome in FINE, f"{c.describe()}: {outcome}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SAMPLE, ALL, CHUNK))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_gradients_of_many_random_maps_are_those_of_their_definitions(first: int) -> None:
    wrong, agreeing = [], 0
    for seed in range(first, first + CHUNK):
        c = case(seed)
        outcome = c.outcome()
        agreeing += outcome == "agrees"
        if outcome not in FINE:
            wrong.append(f"{c.describe()}: {outcome}")
    assert not wrong, "\n".join(wrong)
    assert agreeing > CHUNK // 2  # the rest are refusals


def test_the_sample_holds_every_kind_and_maps_that_switch_branch_on_the_way() -> None:
    cases = [case(seed) for seed in range(SAMPLE)]
    seen = Counter(name for c in cases for name in c.model.names)
    assert all(seen[name] >= 5 for name in PIECES), seen
    assert {c.method for c in cases} == set(METHODS)
    assert {c.transform.name for c in cases} == set(TRANSFORMS)
    assert {(c.model.via, c.model.start) for c in cases} == {(v, s) for v in VIAS for s in STARTS}
    assert sum(c.switched for c in cases) > SAMPLE // 5
    assert sum(c.model.couples for c in cases) > SAMPLE // 8


def test_a_case_is_always_the_same() -> None:
    first, second = case(7), case(7)
    assert first.describe() == second.describe()
    assert first.setting.x.equal(second.setting.x)
    weights, others = first.model.state_dict(), second.model.state_dict()
    assert all(weights[name].equal(others[name]) for name in weights)


def test_a_clear_message_names_the_cause_and_the_way_out() -> None:
    assert CLEAR.search("f calls torch.autograd.grad inside: use torch.func.grad instead")
    assert not CLEAR.search("You are attempting to call Tensor.requires_grad_() inside of a "
                            "function being transformed by a functorch transform")  # fmt: skip
    assert not CLEAR.search("one that f closes over was replaced; pass it through args")
