"""Tables of what papers report of language models, and what was found here."""

from __future__ import annotations

from statistics import mean

from tools.tables import designs
from tools.tables.claims import Finding, beside, findings, published, verdict
from tools.tables.frame import read, table
from tools.tables.language import SEEDS


@table(
    "lm/compare",
    "lm_designs/compare",
    "published/explicit transformer",
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

    def runs(design: str, what: str = "perplexity") -> list[float]:
        return [read("lm/compare")["rows"][f"{design} {seed}"][what] for seed in SEEDS]

    def shown(design: str, what: str = "perplexity") -> str:
        return " and ".join(f"{value:.0f}" for value in runs(design, what))

    small = "WikiText-2, 0.98M parameters, six minutes of training, two seeds"
    return (
        Finding(
            "the redesigned transformer is ahead of the original, perplexity",
            f"{published('lm-wt103-final'):g} against {published('lm-wt103-seq'):g}",
            f"{shown('redesigned')} against {shown('original')}",
            verdict(max(runs("redesigned")) < min(runs("original"))),
            f"the direction: {small}",
        ),
        Finding(
            "a regularised Jacobian needs fewer evaluations, at no cost in perplexity",
            f"{published('lm-wt103-seq-jr'):g} against {published('lm-wt103-seq'):g}",
            f"{shown('original, JR', 'nfe')} evaluations instead of {shown('original', 'nfe')}; "
            f"perplexity {shown('original, JR')} against {shown('original')}",
            verdict(
                max(runs("original, JR", "nfe")) < min(runs("original", "nfe")),
                mean(runs("original, JR")) <= mean(runs("original")),
            ),
            small,
        ),
    )


def _equal_times() -> tuple[Finding, ...]:
    """Return the findings about equilibria beside an explicit network."""
    attractor = "; ".join(
        f"{millions} M: {_pair('attractor', millions)} against {_pair('explicit', millions)}"
        for millions in designs.SIZES
    )
    theirs = beside("explicit transformer")["140M"]
    return (
        Finding(
            "an equilibrium is as good as an explicit transformer with as many parameters and "
            "blocks of its kind; Bai et al. (2019)",
            "as good",
            "; ".join(f"{millions} M: {_equal_time(millions)}" for millions in designs.SIZES),
            "not comparable",
            "perplexity on WikiText-2 after 20 minutes each, two seeds; in that time the explicit "
            f"one makes {_more_updates()} times as many updates, and its blocks are those of the "
            "attractor",
        ),
        Finding(
            "an attractor is ahead of an explicit transformer with as many parameters, perplexity",
            f"{published('lm-fineweb-140m-attractor'):.2f} against {theirs}, equal tokens",
            attractor,
            verdict(*(_ahead("attractor", "explicit", millions) for millions in designs.SIZES)),
            "every run of one compared with every run of the other; WikiText-2, 20 minutes of "
            "training each, two seeds",
        ),
    )


def _ahead(first: str, second: str, millions: int) -> bool:
    """Return whether every run of one design is ahead of every run of another."""
    return max(designs.scores(first, millions)) < min(designs.scores(second, millions))


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
