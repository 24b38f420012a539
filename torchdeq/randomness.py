"""Random numbers drawn once more: dropout masks of a call that is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Randomness:
    """The state of the random generators of the host and of one device, as it is now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = self._now()

    def _now(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    @property
    def used(self) -> bool:
        """Whether numbers have been drawn since."""
        return not all(map(torch.equal, self._states, self._now()))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """A block that draws the same numbers; those drawn afterwards are not affected."""
        now = self._now()
        self._set(self._states)
        try:
            yield
        finally:
            self._set(now)

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(self._device).set_rng_state(state, self._device)
