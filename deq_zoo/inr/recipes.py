"""Options of the equilibrium that the paper's experiments use."""

from __future__ import annotations

from deq_zoo.uses import SOLVE
from torchdeq import DEQConfig

#: Images: one solve, then three phantom steps from the states of the training step before.
RECIPE = DEQConfig(f_max_iter=100, f_tol=1e-3, grad=[3], on_failure="ignore")
#: Sounds: as `RECIPE`, with fewer evaluations.
SHORT = RECIPE.with_options(f_max_iter=40)
#: Videos: fixed-point correction, two slices of ten evaluations, each with its loss. In float32 the
#: residual does not fall to the tolerance, so every solve spends its budget.
CORRECTED = DEQConfig(
    f_max_iter=20, f_tol=1e-6, f_stop_mode="rel", grad=[3], n_states=2, gamma=0.8,
    on_failure="ignore",
)  # fmt: skip
#: Losses on gradients along coordinates: exact derivatives of every order.
EXACT = DEQConfig(
    ift=True, higher_order=True, f_max_iter=60, f_tol=1e-5, f_stop_mode="rel", b_max_iter=60,
    b_tol=1e-5, on_failure="ignore",
)  # fmt: skip
_RECIPES = (RECIPE, SHORT, CORRECTED, EXACT)


def drop_recipe(deq: DEQConfig, uses: frozenset[str]) -> DEQConfig:
    """Return the options of a field; one without equilibrium does not get those of a recipe.

    So the preset of an equilibrium becomes that of an explicit field by its `net.kind` alone. The
    recipe is the one that most options come from, if these are more than half of it. All other
    options are the user's, and stay: the task refuses those without effect.

    Args:
        deq: the options.
        uses: names of the options that have an effect.
    """
    if uses >= SOLVE:
        return deq
    shared, recipe = max(((_shared(deq, each), each) for each in _RECIPES), key=lambda s: len(s[0]))
    dropped = shared - uses if 2 * len(shared) > len(recipe.given) else frozenset()
    return DEQConfig({name: getattr(deq, name) for name in deq.given - dropped})


def _shared(a: DEQConfig, b: DEQConfig) -> frozenset[str]:
    """Return the names of options that both give, with the same value."""
    return frozenset(n for n in a.given & b.given if getattr(a, n) == getattr(b, n))
