"""Checks of option values, each with an error that names the option, the rule and the value."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

from torchdeq.registry import suggest


def require(holds: object, rule: str, value: object) -> None:
    """Raise `ValueError` with the rule and the value unless the rule holds."""
    if not holds:
        raise ValueError(f"{rule}, got {value}")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise `ValueError` with a suggestion unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}{suggest(value, choices)}")


def require_whole(name: str, value: object, least: int = 1) -> None:
    """Raise `ValueError` unless the value is a whole number and not below the least one."""
    whole = isinstance(value, Real) and float(value).is_integer()
    require(
        whole and float(value) >= least,  # type: ignore[arg-type]
        f"{name} must be a whole number >= {least}",
        value,
    )


def require_damping(tau: float) -> None:
    """Raise `ValueError` unless a damping factor lies in (0, 1]."""
    require(0 < tau <= 1, "tau must lie in (0, 1]", tau)
