"""Settings that are groups of values: read as they are shown."""

from __future__ import annotations

import pytest

from deq_zoo.descriptions import shown
from deq_zoo.errors import ZooError
from deq_zoo.parsing import kind_name, parse_value

SIZES = tuple[tuple[int, int], ...]


@pytest.mark.parametrize(
    "text", ["(96,128),(64,72)", "((96, 128), (64, 72))", "[[96,128],[64,72]]", "(96,128),(64,72),"]
)
def test_groups_are_read_in_every_common_form(text: str) -> None:
    assert parse_value(text.rstrip(","), SIZES, "sizes") == ((96, 128), (64, 72))


@pytest.mark.parametrize("value", [((96, 128), (64, 72)), ((96, 128),), (1, 2), ()])
def test_what_is_shown_can_be_given(value: tuple[object, ...]) -> None:
    kind = SIZES if value and isinstance(value[0], tuple) else tuple[int, ...]
    assert parse_value(shown(value), kind, "sizes") == value


@pytest.mark.parametrize("text", ["()", "[]", ""])
def test_no_group_at_all_is_empty(text: str) -> None:
    assert parse_value(text, SIZES, "sizes") == ()


@pytest.mark.parametrize("text", ["96,128", "(96,128", "(96),(128)", "((1,2),(3,4)", "x"])
def test_what_is_no_group_is_an_error(text: str) -> None:
    with pytest.raises(ZooError, match="sizes takes"):
        parse_value(text, SIZES, "sizes")


def test_the_type_of_groups_has_brackets() -> None:
    assert kind_name(SIZES) == "list of (int,int)"
    assert kind_name(tuple[int, ...]) == "list of int"
