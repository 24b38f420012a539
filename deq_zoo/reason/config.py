"""Shapes of reasoners, with those that were published."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, inf, isqrt
from typing import Literal, get_args

from deq_zoo.checks import check_fields

Kind = Literal["hrm", "trm", "eqr"]
Mixer = Literal["attention", "mlp", "conv"]
Position = Literal["none", "rope", "rope2d", "learned"]
#: How training differentiates: as published for the kind (HRM: `one_step`, others: `round`),
#: through the last inner and the last answer step, through the last round, or as the DEQ says.
Gradient = Literal["published", "one_step", "round", "deq"]
#: The noise of EqR inside a solve.
SolveNoise = Literal["off", "frozen"]

#: Options of EqR alone, with the values that say that a step has neither.
_NONE = {"noise": 0.0, "step_share": 1.0}


@dataclass(frozen=True)
class ReasonConfig:
    """The shape of a reasoner.

    Args:
        kind: the published model whose start, recursion, halting and gradient are used.
        cells: cells of a puzzle.
        vocab: tokens; 0 is padding.
        width: size of the vector of each position.
        heads: heads of the attention; other mixers have none.
        blocks: blocks of the network that changes z (and y, if there is only one network).
        answer_blocks: blocks of a second network, which changes y; 0: one network does both.
        mixer: how positions see each other: attention, an MLP over all positions, or a 3x3
            convolution over the board, which is in no published model.
        position: how the network knows positions: rotary ones are of attention only, learned ones
            are added to the input.
        rounds: rounds of a supervision step, T.
        inner: inner steps of a round, n; an answer step follows them.
        max_steps: updates with one puzzle, at most, K; as published, each is a supervision step.
        slots: positions in front of the cells for the puzzle's own vector, P; 0 takes as many as
            the vector fills.
        puzzle_width: size of a puzzle's own vector; 0: there is none.
        puzzle_ids: number of puzzles' own vectors.
        expansion: inner width of the MLPs relative to their input, before 2/3 of it are rounded up.
        multiple: inner widths are rounded up to a multiple of it.
        step_share: share of the image in each step of EqR, its lambda; the rest is the old state.
        noise: standard deviation of the noise in each step of EqR, its beta.
        exploration: probability that a puzzle may not halt before a random number of steps.
    """

    kind: Kind = "eqr"
    cells: int = 81
    vocab: int = 11
    width: int = 512
    heads: int = 8
    blocks: int = 2
    answer_blocks: int = 0
    mixer: Mixer = "mlp"
    position: Position = "none"
    rounds: int = 3
    inner: int = 6
    max_steps: int = 16
    slots: int = 0
    puzzle_width: int = 0
    puzzle_ids: int = 1
    expansion: float = 4.0
    multiple: int = 256
    step_share: float = 0.95
    noise: float = 0.01
    exploration: float = 0.1

    def __post_init__(self) -> None:
        for name, kind in (("kind", Kind), ("mixer", Mixer), ("position", Position)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if not isinstance(self.multiple, int) or isinstance(self.multiple, bool):
            raise TypeError(f"multiple must be a whole number, got {self.multiple!r}")
        check_fields(
            self,
            1,
            "cells",
            "width",
            "heads",
            "blocks",
            "rounds",
            "inner",
            "max_steps",
            "puzzle_ids",
            "multiple",
        )
        check_fields(self, 2, "vocab")
        check_fields(self, 0, "answer_blocks", "slots", "puzzle_width", "noise", finite=True)
        if not 0 < self.expansion < inf:
            raise ValueError(f"expansion must be a positive finite number, got {self.expansion}")
        if round(self.expansion * self.width * 2 / 3) < 1:
            raise ValueError(f"expansion={self.expansion} leaves an MLP no inner width: raise it")
        if not 0 < self.step_share <= 1:
            raise ValueError(f"step_share must lie in (0, 1], got {self.step_share}")
        if not 0 <= self.exploration <= 1:
            raise ValueError(f"exploration must lie in [0, 1], got {self.exploration}")
        if self.kind == "hrm" and (self.mixer != "attention" or not self.answer_blocks):
            raise ValueError(
                "HRM has two networks of attention: set mixer=attention and answer_blocks >= 1, "
                f"got mixer={self.mixer} and answer_blocks={self.answer_blocks}"
            )
        if self.slots and not self.puzzle_width:
            raise ValueError(f"slots={self.slots} hold a puzzle's vector: set puzzle_width, too")
        if self.puzzle_width > self.extra * self.width:
            raise ValueError(
                f"a vector of {self.puzzle_width} numbers does not fit into slots={self.slots} of "
                f"{self.width}"
            )
        self._check_attention()
        self._check_used()

    def _check_used(self) -> None:
        """Raise `ValueError` for options that have no effect in this shape.

        Defaults are allowed, and values that say that there is no such thing.
        """
        where: dict[str, str] = {}
        if self.kind != "eqr":
            where |= dict.fromkeys(_NONE, f"kind={self.kind}")
        if self.mixer != "attention":
            where["heads"] = f"mixer={self.mixer}"
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in where and value not in (field.default, _NONE.get(field.name)):
                raise ValueError(
                    f"{field.name}={value} would have no effect with {where[field.name]}: drop it"
                )

    def _check_attention(self) -> None:
        if self.mixer != "attention":
            if self.position in ("rope", "rope2d"):
                raise ValueError(
                    f"position={self.position} belongs to attention: set position=none with "
                    f"mixer={self.mixer}"
                )
            if self.mixer == "conv":
                self._check_board("mixer=conv")
            return
        parts = {"rope": 2, "rope2d": 4}.get(self.position, 1)
        if self.width % self.heads or self.width // self.heads % parts:
            raise ValueError(
                f"width={self.width} must be divisible by heads={self.heads}, and the width of a "
                f"head by {parts} with position={self.position}"
            )
        if self.position == "rope2d":
            self._check_board("position=rope2d")

    def _check_board(self, option: str) -> None:
        if self.extra or isqrt(self.cells) ** 2 != self.cells:
            raise ValueError(
                f"{option} needs a square board without slots, got cells={self.cells} and "
                f"{self.extra} slots"
            )

    @property
    def extra(self) -> int:
        """Return the number of positions in front of the cells, P."""
        return self.slots or ceil(self.puzzle_width / self.width)

    @property
    def positions(self) -> int:
        """Return the length of the states, N."""
        return self.cells + self.extra

    @property
    def calls(self) -> int:
        """Return how often a supervision step calls its networks."""
        return self.rounds * (self.inner + 1)


HRM = ReasonConfig(
    kind="hrm",
    blocks=4,
    answer_blocks=4,
    mixer="attention",
    position="rope",
    rounds=2,
    inner=2,
    puzzle_width=512,
)
TRM_MLP = ReasonConfig(kind="trm", slots=16, puzzle_width=512)
TRM_ATTENTION = ReasonConfig(
    kind="trm", mixer="attention", position="rope", slots=16, puzzle_width=512
)
EQR_SUDOKU = ReasonConfig(kind="eqr")
EQR_MAZE = ReasonConfig(
    kind="eqr",
    cells=900,
    vocab=6,
    width=128,
    heads=8,
    blocks=1,
    mixer="attention",
    position="rope",
    inner=4,
)
