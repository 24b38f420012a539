"""Tables of what papers report of language models, and what was found here."""

from __future__ import annotations

from tools.tables import designs
from tools.tables.claims import Finding, findings, published
from tools.tables.frame import read, table
from tools.tables.language import SEEDS

#: Perplexity of the explicit transformer beside the published attractor, arXiv:2605.12466, Tab. 1.
_EXPLICIT_140M = 21.48


@table(
    "lm/compare",
    "lm_designs/compare",
    "target:lm-wt103-final",
    "target:lm-wt103-seq",
    "target:lm-wt103-seq-jr",
    "target:lm-fineweb-140m-attractor",
)
def reproduced_lm() -> str:
    """Return the findings about language models."""
    return findings("lm", *_transformers(), *_equal_times())


def _transformers() -> tuple[Finding, ...]:
    """Return the findings about designs of the DEQ transformer."""

    def runs(design: str, what: str = "perplexity") -> str:
        found = (read("lm/compare")["rows"][f"{design} {seed}"] for seed in SEEDS)
        return " and ".join(f"{run[what]:.0f}" for run in found)

    small = "WikiText-2, 0.98M parameters, six minutes of training, two seeds"
    return (
        Finding(
            "the redesigned transformer is ahead of the original, perplexity",
            f"{published('lm-wt103-final'):g} against {published('lm-wt103-seq'):g}",
            f"{runs('redesigned')} against {runs('original')}",
            "reproduced",
            f"the direction: {small}",
        ),
        Finding(
            "a regularised Jacobian needs fewer evaluations, at no cost in perplexity",
            f"{published('lm-wt103-seq-jr'):g} against {published('lm-wt103-seq'):g}",
            f"{runs('original, JR', 'nfe')} evaluations instead of {runs('original', 'nfe')}; "
            f"perplexity {runs('original, JR')} against {runs('original')}",
            "reproduced",
            small,
        ),
    )


def _equal_times() -> tuple[Finding, ...]:
    """Return the findings about equilibria beside an explicit network."""
    attractor = "; ".join(
        f"{millions} M: {_pair('attractor', millions)} against {_pair('explicit', millions)}"
        for millions in designs.SIZES
    )
    return (
        Finding(
            "an equilibrium is as good as an explicit transformer with as many parameters",
            "as good",
            "; ".join(f"{millions} M: {_equal_time(millions)}" for millions in designs.SIZES),
            "differs",
            f"perplexity on WikiText-2 after 20 minutes each, two seeds; the explicit one makes "
            f"{_more_updates()} times as many updates, and its blocks are those of the attractor",
        ),
        Finding(
            "an attractor is ahead of an explicit transformer with as many parameters, perplexity",
            f"{published('lm-fineweb-140m-attractor'):.2f} against {_EXPLICIT_140M}, equal tokens",
            attractor,
            "reproduced" if _ahead("attractor", "explicit") else "differs",
            "every run of one compared with every run of the other; WikiText-2, 20 minutes of "
            "training each, two seeds",
        ),
    )


def _ahead(first: str, second: str) -> bool:
    """Return whether every run of one design is ahead of every run of another, at both sizes."""
    return all(
        max(designs.scores(first, m)) < min(designs.scores(second, m)) for m in designs.SIZES
    )


def _more_updates() -> str:
    """Return how many times as many updates an explicit network makes, least and most."""
    ratios = [
        explicit["updates"] / run["updates"]
        for m in designs.SIZES
        for design in ("original", "convergent")
        for explicit, run in zip(designs.runs("explicit", m), designs.runs(design, m), strict=True)
    ]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _pair(name: str, millions: int) -> str:
    """Return the perplexities of a design, one for each seed."""
    return " and ".join(f"{score:.1f}" for score in designs.scores(name, millions))


def _equal_time(millions: int) -> str:
    """Return the perplexities of the equilibria without a backbone, and of the explicit network."""
    return ", ".join(f"{n} {_pair(n, millions)}" for n in ("original", "convergent", "explicit"))
