"""Checks that configurations share."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from deq_zoo.checks import check_at_least, check_fields, check_integers


def test_values_at_the_bound_pass() -> None:
    check_at_least(1, batch=1, rate=float("inf"))
    check_fields(SimpleNamespace(width=0, tol=0.0), 0, "width", "tol", finite=True)


@pytest.mark.parametrize("value", [0, -3, float("nan")])
def test_the_error_names_option_bound_and_value(value: float) -> None:
    with pytest.raises(ValueError, match=f"^width must be at least 1, got {value}$"):
        check_at_least(1, batch=4, width=value)
    with pytest.raises(ValueError, match=f"^width must be at least 1, got {value}$"):
        check_fields(SimpleNamespace(width=value), 1, "width")


def test_infinity_is_an_error_where_a_number_must_be_finite() -> None:
    with pytest.raises(ValueError, match=r"^tol must be at least 0 and finite, got inf$"):
        check_at_least(0, finite=True, tol=float("inf"))


def test_numbers_of_numpy_are_numbers() -> None:
    check_integers(1, length=np.int64(3))
    check_at_least(0, rate=np.float32(0.5), count=np.int64(3))


@pytest.mark.parametrize("value", ["16", 2.5, None])
def test_what_is_no_integer_is_named(value: object) -> None:
    with pytest.raises(TypeError, match=f"^length must be an integer, got {value!r}$"):
        check_integers(1, length=value)
    if value != 2.5:
        with pytest.raises(TypeError, match=f"^tol must be a number, got {value!r}$"):
            check_at_least(0, tol=value)
    with pytest.raises(ValueError, match=r"^length must be at least 1, got 0$"):
        check_integers(1, length=0)
