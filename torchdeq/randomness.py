"""The state of random generators: a repeated call must draw the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Randomness:
    """A snapshot of the random generators of the host and of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._current()

    def _current(self) -> list[torch.Tensor]:
        """Return the state of each generator now."""
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    @property
    def advanced(self) -> bool:
        """Return whether a generator has drawn random numbers since the snapshot."""
        return not all(map(torch.equal, self._states, self._current()))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Return a block that starts from the snapshot and ends with the current state again."""
        current = self._current()
        self._set(self._states)
        try:
            yield
        finally:
            self._set(current)

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(self._device).set_rng_state(state, self._device)
