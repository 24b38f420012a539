"""Anderson acceleration: mix the last images with least-squares weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from torchdeq.checks import require_damping, require_whole
from torchdeq.solver.base import SOLVERS, FixedPointFn, Iterate, Solver
from torchdeq.solver.image_window import ImageWindow
from torchdeq.solver.secant_window import SecantWindow
from torchdeq.solver.window import Window


@SOLVERS.register("anderson")
@dataclass(frozen=True, kw_only=True)
class Anderson(Solver[Window]):
    r"""Anderson acceleration (Anderson, 1965).

    $$z^{k+1} = \sum_i \alpha_i \, [f(z_i) - (1 - \tau)\, g(z_i)], \qquad
    \alpha = \arg\min_{1^\top \alpha = 1}
    \|G \alpha\|^2 + \lambda \sum_i \|g_i\|^2 \alpha_i^2$$

    with $g(z) = f(z) - z$ and the last `m` residuals as the columns of $G$. The answer at each
    iterate is the image $f(z)$.

    Args:
        m: iterates to keep.
        lam: ridge relative to the size of each residual; raise it if the mixing weights blow up.
        ridge: absolute ridge on the squared residuals: `lam` of torchdeq 0.1.0.
        tau: damping in (0, 1]; 1 mixes only the images.
        type: 2 minimises the mixed residual; 1 makes it orthogonal to the steps (the multisecant
            form of Broyden's method), which can help on non-symmetric problems.
        restart: empty the window whenever it is full.
        safeguard: a sample whose residual grew by more than this factor in one step empties its
            window and takes a plain step; None accepts every step.
    """

    m: int = 6
    lam: float = 1e-8
    ridge: float = 0.0
    tau: float = 1.0
    type: int = 2
    restart: bool = False
    safeguard: float | None = None
    needs_contraction: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_damping(self.tau)
        require_whole("m, the iterates to keep,", self.m)
        if not (self.lam >= 0 and self.ridge >= 0):
            raise ValueError(f"lam and ridge must be >= 0, got {self.lam} and {self.ridge}")
        if self.type not in (1, 2):
            raise ValueError(f"type must be 1 or 2, got {self.type}")
        if self.safeguard is not None and self.safeguard <= 0:
            raise ValueError(f"safeguard must be None or > 0, got {self.safeguard}")

    def init(self, it: Iterate) -> Window:
        kind: type[Window] = ImageWindow if self.type == 2 else SecantWindow
        window = kind(it.z, self.m, self.lam, self.ridge, self.restart)
        window.insert(it)
        return window

    def step(self, f: FixedPointFn, it: Iterate, state: Window) -> tuple[Iterate, Window]:
        del it  # the window has all that it needs; `f` may need the memory
        if self.safeguard is not None:
            state.guard(self.safeguard)
        return state.evaluate(f, state.mix(self.tau)), state

    @property
    def streams(self) -> bool:
        return True

    def put(self, it: Iterate, state: Window, rows: Tensor, z: Tensor) -> Iterate:
        state.put(rows, z)
        return it  # the next step looks at the window only


if TYPE_CHECKING:  # published names, which torchdeq.compat.paths sets
    from torchdeq.compat.functions import SolverFunction

    anderson_solver: SolverFunction
