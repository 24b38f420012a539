"""Reasoners: puzzles in, answers out, by a recursion whose fixed point is the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deq_zoo.model import Model, WeightKind
from deq_zoo.output import Output
from deq_zoo.reason.average import as_buffers, blend
from deq_zoo.reason.config import Gradient, ReasonConfig, SolveNoise
from deq_zoo.reason.core import Core, Noise, States, Tail, check_whole
from deq_zoo.reason.keyed import draw_frozen_noise
from deq_zoo.reason.layers import Convolution, Linear, truncated_normal
from deq_zoo.reason.optim import PuzzleRows
from deq_zoo.reason.prediction import SolvedPuzzle, solve_one
from deq_zoo.reason.reasoned import Reasoned, relative_change, replay
from deq_zoo.reason.search import Search
from torchdeq import DEQConfig, SolverStat, get_deq
from torchdeq.solver import FixedPointIter, StopRule, solve


class Reasoner(Model):
    r"""A reasoner: $(y^\star, z^\star) = f(y^\star, z^\star; x)$ with one supervision step as $f$.

    Shapes: tokens are `(B, L)`, states `(B, N, d)`, logits `(B, L, V)`.

    In training, a call runs supervision steps from the given states, one by default, and returns
    states with the gradient that `gradient` names. In evaluation, a call solves for the fixed point
    as the DEQ says, with the average of the weights; `recurse` runs the published recursion.

    Args:
        net: the shape.
        deq: options of the DEQ: a `DEQConfig`, dict or Namespace.
        gradient: how training differentiates.
        decay: of the average of the weights; 0 keeps none, and evaluation uses the weights.
        solve_noise: the noise of EqR inside a solve: off, or drawn once for each solve; in
            evaluation the drawn numbers depend on the puzzle and on `search.seed` alone. The
            published recursion draws its noise anew for every step.

    Attributes:
        search: how predictions spend evaluations.
    """

    def __init__(
        self,
        net: ReasonConfig,
        deq: Any = None,
        gradient: Gradient = "published",
        decay: float = 0.999,
        solve_noise: SolveNoise = "off",
    ) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        options = DEQConfig(deq)
        self.net, self.decay, self.solve_noise = net, decay, solve_noise
        self.search = Search()
        self.gradient: Gradient = gradient
        if gradient == "published":
            self.gradient = "one_step" if net.kind == "hrm" else "round"
        self.deq = get_deq(options, coupled=options.get("coupled", False))
        self.core = Core(net)
        self.puzzle_rows = (
            PuzzleRows(torch.zeros(net.puzzle_ids, net.puzzle_width)) if net.puzzle_width else None
        )
        if net.kind != "eqr":
            self.register_buffer("H_init", truncated_normal(torch.empty(net.width), 1.0))
            self.register_buffer("L_init", truncated_normal(torch.empty(net.width), 1.0))
        self.average = as_buffers(self.core) if decay else None

    @property
    def body(self) -> Core:
        """Return the networks in use: those in training, or the average in evaluation."""
        return self.core if self.training or self.average is None else self.average

    @property
    def trained_depth(self) -> int:
        """Return the most supervision steps that training makes for a puzzle."""
        deq, unrolled = self.deq.config, 0
        if self.gradient == "deq" and not deq.implicit and deq.backward != "reversible":
            unrolled = deq.grad[0]
        return self.net.max_steps * max(1, self.deq.f_max_iter + unrolled)

    def copied_weights(self) -> dict[str, str]:
        """Return the names of the average."""
        if self.average is None:
            return {}
        return {f"average.{name}": f"core.{name}" for name, _ in self.core.named_parameters()}

    def weight_kind(self, name: str) -> WeightKind:
        owner, _, own = name.rpartition(".")
        inside = name.startswith(("core.L_level.", "core.H_level."))
        if own == "weight" and isinstance(self.get_submodule(owner), (Linear, Convolution)):
            return "core_matrix" if inside else "matrix"
        return "core_vector" if inside else "vector"

    def update_average(self) -> None:
        """Add the present weights to the average."""
        if self.average is not None:
            blend(self.average, self.core, self.decay)

    def inject(self, tokens: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the injection x (B, N, d) of puzzles.

        Args:
            tokens: (B, L).
            ids: (B,), the row of each puzzle's own vector; row 0 by default.
        """
        if self.puzzle_rows is None:
            return self.body.embed(tokens, None)
        ids = tokens.new_zeros(tokens.shape[0]) if ids is None else ids
        check_whole("ids", ids)
        return self.body.embed(tokens, self.puzzle_rows[ids.long()])

    def start(self, n: int, generator: torch.Generator | None = None) -> States:
        """Return the states to start from: one vector everywhere, or EqR's random ones.

        Args:
            n: number of puzzles.
            generator: of EqR's numbers; the global one by default.
        """
        shape = (n, self.net.positions, self.net.width)
        if self.net.kind != "eqr":
            y, z = (h.expand(shape).clone() for h in (self.H_init, self.L_init))  # type: ignore[operator]
            return States(y, z)
        like = next(iter(self.core.parameters()))
        device = like.device if generator is None else generator.device
        y, z = (
            truncated_normal(torch.empty(shape, dtype=like.dtype, device=device), 1.0, generator)
            for _ in range(2)
        )
        return States(y.to(like.device), z.to(like.device))

    @property
    def freezes_noise(self) -> bool:
        """Return whether a solve has noise, which is drawn once."""
        return self.solve_noise == "frozen" and self.net.kind == "eqr" and self.net.noise > 0

    def freeze_noise(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
        """Return the noise of a whole supervision step for a solve, (B, calls, N, d); or nothing.

        Args:
            n: number of puzzles.
            generator: the global one by default.
        """
        net = self.net
        if not self.freezes_noise:
            return ()
        like = next(iter(self.core.parameters()))
        device = like.device if generator is None else generator.device
        shape = (n, net.calls, net.positions, net.width)
        eps = torch.randn(shape, dtype=like.dtype, device=device, generator=generator)
        return (eps.to(like.device),)

    def apply_step(self, y: Tensor, z: Tensor, x: Tensor, eps: Tensor | None = None) -> States:
        """Return the states after one supervision step, the map f of the equilibrium.

        Args:
            y: the answer.
            z: the scratch.
            x: the injection.
            eps: (B, calls, N, d), frozen noise; None for none.
        """
        return self.body.supervise(States(y, z), x, replay(eps))

    def forward(
        self,
        x: Tensor,
        z0: States | None = None,
        *,
        ids: Tensor | None = None,
        fresh: Tensor | None = None,
        start: States | None = None,
        noise: Noise | None = None,
        **call: Any,
    ) -> Reasoned:
        """Return the answers to puzzles.

        Args:
            x: (B, L) tokens.
            z0: states to start from; by default, those of `start`.
            ids: (B,), the row of each puzzle's own vector.
            fresh: (B,), flags of puzzles that start anew in place of `z0`.
            start: where those start; drawn by default.
            noise: the noise of EqR in the published recursion; drawn by default.
            **call: options of the DEQ for this call, e.g. `f_max_iter=30`.
        """
        u = self.inject(x, ids)
        states = self._begin(x.shape[0], z0, fresh, start)  # `len` would fix an export
        if not self.training or self.gradient == "deq":
            reached, stats = self._solve(x, u, states, call)
        else:
            reached, stats = self._unroll(u, states, noise, call)
        last, body = reached[-1], self.body
        kept = States(*(h.detach() for h in last))
        return Reasoned(
            [body.read(state.y) for state in reached],
            kept,
            stats,
            body.halting(last.y),
            self._look_ahead(kept, u),
            relative_change(states, kept),
        )

    @torch.no_grad()
    def _look_ahead(self, states: States, u: Tensor) -> Tensor | None:
        """Return the halting head after one more supervision step, for the training of HRM."""
        if not self.training or self.net.kind != "hrm":
            return None
        return self.core.halting(self.core.supervise(states, u).y)

    def _begin(
        self, n: int, z0: States | None, fresh: Tensor | None, start: States | None
    ) -> States:
        """Return the states that a call starts from."""
        for states in (z0, start):
            if states is not None:
                self.check_states(states, n)
        if z0 is not None and fresh is None:
            return States(*z0)
        new = self.start(n) if start is None else start
        if z0 is None or fresh is None:
            return new
        rows = fresh.view(-1, 1, 1)
        return States(*(torch.where(rows, a, b) for a, b in zip(new, z0, strict=True)))

    def check_states(self, states: States, n: int) -> None:
        """Raise for states of another shape, which would broadcast, or of another type."""
        if not all(isinstance(h, Tensor) for h in states):
            raise TypeError(f"states must be two tensors, got {[type(h).__name__ for h in states]}")
        want, got = (n, self.net.positions, self.net.width), [tuple(h.shape) for h in states]
        if got != [want, want]:
            raise ValueError(f"states must be two tensors {want}, got {got}")

    def _solve(
        self, x: Tensor, u: Tensor, states: States, call: dict[str, Any]
    ) -> tuple[list[States], SolverStat | None]:
        """Return the fixed points as the DEQ finds and differentiates them."""
        if self.training:
            noise = self.freeze_noise(len(x))
        else:
            noise = draw_frozen_noise(self, x, self.search.seed)
        solved, stats = self.deq(self.apply_step, tuple(states), args=(u, *noise), **call)
        return [States(*state) for state in solved], stats

    def _unroll(
        self, u: Tensor, states: States, noise: Noise | None, call: dict[str, Any]
    ) -> tuple[list[States], SolverStat | None]:
        """Return states whose last part has a graph, after `f_max_iter` supervision steps."""
        budget = call.pop("f_max_iter", None)
        if call:
            raise TypeError(f"gradient={self.gradient!r} takes no options of a call, got {call}")
        budget = self.deq.f_max_iter if budget is None else budget
        draw, stats = noise or torch.randn_like, None
        if budget > 1:  # the noise of a solve must not change from step to step
            frozen = self.freeze_noise(len(u))
            rule = replace(self.deq.config.f_stop, max_iter=budget - 1)
            solution = solve(
                self.apply_step,
                tuple(states),
                self.deq.make_solver({}),
                rule,
                args=(u.detach(), *frozen),
                on_failure=self.deq.config.on_failure,
            )
            states, stats = States(*solution.z), solution.stats
            stats.nfe += 1  # the step with a graph
            draw = noise or replay(*frozen)
        tail: Tail = "one_step" if self.gradient == "one_step" else "round"
        return [self.core.supervise(states, u, draw, tail)], stats

    def recurse(
        self,
        x: Tensor,
        depth: int | None = None,
        z0: States | None = None,
        *,
        ids: Tensor | None = None,
        noise: Noise | None = None,
        every: bool = False,
    ) -> Reasoned:
        """Return the answer of the published recursion, the state after its last step.

        Args:
            x: (B, L) tokens.
            depth: supervision steps; `net.max_steps` by default.
            z0: states to start from; by default, those of `start`.
            ids: (B,), the row of each puzzle's own vector.
            noise: of EqR's steps; drawn anew for every step by default.
            every: return the answer after every step, the last one last.
        """
        u, depth = self.inject(x, ids), self.net.max_steps if depth is None else depth
        states = self._begin(len(x), z0, None, None)
        draw = torch.randn_like if noise is None else noise
        solution = solve(
            lambda y, z: tuple(self.body.supervise(States(y, z), u, draw)),
            tuple(states),
            FixedPointIter(),
            StopRule(max_iter=depth, tol=None, return_final=True),
            record=range(1, depth) if every else (),
        )
        reached = [States(*state) for state in [*solution.states, solution.z]]
        last = reached[-1]
        return Reasoned(
            [self.body.read(state.y) for state in reached],
            last,
            solution.stats,
            self.body.halting(last.y),
        )

    def predict(
        self, x: Any, z0: States | None = None, **call: Any
    ) -> Output[SolvedPuzzle, States]:
        """Return the answer to one puzzle.

        Args:
            x: the puzzle: a text, the path of a text file, a list of digits (0 for a blank cell),
                or a tensor of tokens. An impossible one is an error.
            z0: states to start from: `state` of an earlier output. Without it, a puzzle whose
                residual does not meet the tolerance is tried again from new starts.
            **call: `f_max_iter`, the evaluations of an attempt in this call.

        `search` decides about halting, restarts and the choice among attempts; `find_answers`,
        `deq-zoo predict` and `deq-zoo serve` give the same answer. The statistics are those of the
        chosen attempt, except for `nfe`, the evaluations of all attempts; a puzzle that was halted
        counts as converged.
        """
        return super().predict(x, z0, **call)

    def _predict(self, x: Any, z0: States | None, **call: Any) -> Output[SolvedPuzzle, States]:
        return solve_one(self, x, z0, call)
