"""Tables of what the papers report and what was found here, each with the state of the claim."""

from __future__ import annotations

from statistics import median
from typing import Any

from tools.tables.claims import Finding, beside, findings, published, verdict
from tools.tables.fields import GRAPHS, best_psnr, best_steps, percent, psnr, signals
from tools.tables.flow import SETS
from tools.tables.frame import read, table

_POINT = 1.0  # of accuracy: what two training runs may differ by


@table("mdeq", "card:mdeq-digits")
def reproduced_mdeq() -> str:
    """Return the findings about MDEQ."""
    step = {  # the first round warms up
        name: f"{median(times[1:]):.2f}" for name, times in read("mdeq")["seconds"].items()
    }
    card = read("card:mdeq-digits")
    seeds = ", ".join(f"{run.test['accuracy']:.1f}" for run in card.runs)
    return findings(
        "mdeq",
        Finding(
            f"a training step of `TINY`, {read('mdeq')['batch']} images, processor seconds",
            f"{step['0.1.0']} by torchdeq 0.1.0, measured here",
            f"{step['ours']}; {step['floor']} for the calls of `f` and the phantom steps alone",
            "not published",
            "medians of steps in turns, the same weights",
        ),
        Finding(
            "`mdeq-digits`, accuracy on 1,000 test digits, %",
            "",
            f"{card.scores['test']['accuracy']:.1f}; all seeds {seeds}",
            "not published",
            "MNIST in place of CIFAR-10; its [card](../pretrained/mdeq-digits.md)",
        ),
    )


_FLOW = ("flow/budgets", "flow/reuse", "flow/memory", "flow/classical", "pretrained_flow/flow-nano")


@table(*_FLOW)
def reproduced_flow() -> str:
    """Return the findings about DEQ-Flow."""
    budgets, reuse, memory, classical, nano = (read(source) for source in _FLOW)
    trained = {row["way"]: row for row in budgets["rows"] if row["nfe"] == 12}
    along = {
        (row["reuse"], row["most"]): row["aepe"]
        for row in reuse["rows"]
        if row["way"] == "correction, near starts" and not row["tolerance"]
    }
    kept = {
        (row["gradient"], row["steps"]): row["mb_beyond_the_encoders"] for row in memory["rows"]
    }
    counts, phantom = sorted({steps for _, steps in kept}), "phantom, 1 step"
    (tv_l1,) = (row for row in classical["rows"] if row["method"] == "TV-L1")

    def pair(where: str, one: dict[str, float], other: dict[str, float]) -> str:
        return f"{SETS[where]} {one[where]:.2f} against {other[where]:.2f}"

    def megabytes(gradient: str) -> str:
        return ", ".join(f"{kept[gradient, count]:.0f}" for count in counts)

    return findings(
        "flow",
        Finding(
            "correction of several states gives a better flow than that of the last, pixels; "
            "Bai et al. (2022)",
            "better",
            "; ".join(pair(w, trained["correction"], trained["no correction"]) for w in SETS),
            verdict(*(trained["correction"][w] < trained["no correction"][w] for w in SETS)),
            "15 minutes of training each, 12 evaluations, one seed",
        ),
        Finding(
            "along a video, the state of the last pair saves evaluations, pixels; Bai et al. "
            "(2022)",
            "fewer evaluations",
            f"{along[True, 2]:.2f} with 2 from the last state, {along[False, 12]:.2f} with 12 "
            "from zero",
            verdict(along[True, 2] <= along[False, 12]),
            "synthetic videos, trained with near starts; `flow-nano` saves one evaluation",
        ),
        Finding(
            "memory of training does not grow with the evaluations, MB; Bai et al. (2022)",
            "constant",
            f"phantom {megabytes(phantom)}; unrolled {megabytes('unrolled')}",
            verdict(*(kept[phantom, count] <= kept[phantom, counts[0]] for count in counts[1:])),
            f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} evaluations, one pair of 192 x "
            "256",
        ),
        Finding(
            "`flow-nano` beside TV-L1 of scikit-image, pixels",
            "",
            "; ".join(pair(w, nano["errors"], tv_l1) for w in SETS if w != "warps"),
            "not published",
            "other data than the paper's; its [card](../pretrained/flow-nano.md)",
        ),
    )


@table("diffusion/sampling", "diffusion/inversion", "published/chains in parallel")
def reproduced_diffusion() -> str:
    """Return the findings about DEQ-DDIM."""
    theirs = beside("chains in parallel")
    rounds = {
        way: [
            row["rounds"]
            for row in read("diffusion/sampling")["rows"]
            if (row["steps"], row["way"]) == (1000, way)
        ]
        for way in ("anderson", "anderson per timestep")
    }
    shown = {way: " and ".join(map(str, counts)) for way, counts in rounds.items()}
    spent = {
        row["scheme"]: row["seconds_to_release"]
        for row in read("diffusion/inversion")["rows"]
        if row["seconds_to_release"] is not None
    }
    return findings(
        "diffusion",
        Finding(
            "a chain of 1000 steps is solved in few parallel rounds",
            f"{theirs['rounds']}, their budget",
            f"{shown['anderson per timestep']} as theirs; {shown['anderson']} with one Anderson "
            "for all steps",
            verdict(*(n <= theirs["rounds"] for n in rounds["anderson per timestep"])),
            "two small denoisers, relative residual 1e-4",
        ),
        Finding(
            "the equilibrium inverts an image faster than the sequential chain, seconds",
            f"{theirs['time of the chain']:g} of its time",
            f"`phantom` {spent['phantom']:.0f}, `implicit` {spent['implicit']:.0f}; the chain "
            f"{spent['sequential']:.0f}",
            verdict(*(spent[way] < spent["sequential"] for way in ("phantom", "implicit"))),
            "on one thread rounds do not run in parallel; T = 50, small denoiser, to the error of "
            "the release",
        ),
    )


@table(
    "inr/psnr-images",
    "inr/psnr-audio",
    "inr/psnr-video",
    "published/siren",
    "target:inr-nature",
    "target:inr-video",
    "target:inr-audio",
)
def reproduced_inr() -> str:
    """Return the findings about DEQ-INR."""
    names, warm = ("DEQ-SIREN", "SIREN"), ("psnr_equal_time", "DEQ-SIREN, warm")

    def siren(preset: str) -> str:
        return f"{published(preset):.2f} against {beside('siren')[preset]:.2f}"

    def is_ahead(part: str, after: str = "psnr", ours: str = "DEQ-SIREN") -> bool:
        return psnr(part, ours, after) > psnr(part, "SIREN", after)

    def pair(part: str, after: str = "psnr", ours: str = "DEQ-SIREN") -> str:
        return f"{psnr(part, ours, after):.1f} against {psnr(part, 'SIREN', after):.1f}"

    best = " against ".join(f"{best_psnr('psnr-images', name):.1f}" for name in names)
    pictures = signals("psnr-images")
    ahead = [
        picture
        for picture in pictures
        if best_psnr("psnr-images", names[0], picture) > best_psnr("psnr-images", names[1], picture)
    ]
    return findings(
        "inr",
        Finding(
            "between pixels a DEQ-SIREN is ahead of a SIREN with as many parameters, dB",
            siren("inr-nature"),
            f"{pair('psnr-images')} after 300 steps; {best}, each stopped at its best",
            verdict(*(picture in ahead for picture in pictures)),
            f"the SIREN is best at step {best_steps('psnr-images', 'SIREN')}, then overfits; both "
            f"stopped by the test pixels, the DEQ-SIREN is ahead on {len(ahead)} of "
            f"{len(pictures)} photographs, which are not the paper's; width 128",
        ),
        Finding(
            "the same on a video, dB",
            siren("inr-video"),
            f"{pair('psnr-video')}; with warm starts, equal time, {pair('psnr-video', *warm)}",
            verdict(is_ahead("psnr-video"), is_ahead("psnr-video", *warm)),
            "150 steps in place of 10,000: a DEQ-SIREN learns slowly at first",
        ),
        Finding(
            "the same on a sound, dB",
            siren("inr-audio"),
            f"{pair('psnr-audio')}; equal time, {pair('psnr-audio', 'psnr_equal_time')}",
            verdict(is_ahead("psnr-audio"), is_ahead("psnr-audio", "psnr_equal_time")),
            "the direction: 2 s, width 128, 500 steps",
        ),
    )


@table("ignn/chains", "ignn/stability", "published/folds")
def reproduced_ignn() -> str:
    """Return the findings about IGNN."""
    chains = {(r["model"], r["length"]): r["median"] for r in read("ignn/chains")["rows"]}
    start = "IGNN, published start of W"
    reached = max(length for (model, length), score in chains.items()
                  if model == start and score == 100)  # fmt: skip
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (row["set"], row["model"]): row for row in read("ignn/stability")["rows"]
    }

    def plain(data: str) -> dict[str, Any]:
        return rows[data, "IGNN, projection"]

    def score(data: str, model: str = "IGNN, projection", which: str = "median") -> str:
        return percent(rows[data, model][which])

    clipped = "IGNN, projection and clipped spectral norm"
    return findings(
        "ignn",
        Finding(
            "information travels along chains of 100 nodes, accuracy in %; Gu et al. (2020)",
            "as a figure",
            f"{chains['IGNN', 100]:.0f} from W = identity; {chains[start, 100]:.1f} from the "
            "published start",
            verdict(chains[start, 100] == 100),
            f"100 epochs; the published start solves chains of {reached}",
        ),
        *(
            Finding(
                f"{data}, accuracy in %; Gu et al. (2020)",
                f"{value:g}",
                f"{score(data)}; a GCN {score(data, 'GCN')}",
                verdict(plain(data)["median"] >= value - _POINT),
                f"six splits, {plain(data)['epochs']} epochs, checkpoint by "
                "validation data; theirs: ten folds",
            )
            for data, value in beside("folds").items()
        ),
        Finding(
            "Cora, accuracy in %",
            "",
            f"{score('cora')}; a GCN {score('cora', 'GCN')}",
            "not published",
            "six seeds",
        ),
        Finding(
            "a clipped spectral norm makes training steady, worst of six seeds in %",
            "on PPI (arXiv:2310.18605)",
            "; ".join(
                f"{shown} {score(name, clipped, 'worst')}, without {score(name, which='worst')}"
                for name, shown in GRAPHS.items()
            ),
            verdict(*(rows[name, clipped]["worst"] > plain(name)["worst"] for name in GRAPHS)),
            "other sets, minutes of training; PPI was not run with the paper's labels",
        ),
    )


def _longer_gradient(part: str, puzzles: str) -> Finding:
    """Return whether every run with the longer gradient is ahead of every run with the other."""
    rows, theirs = sorted(read(part)["rows"].items()), beside("gradients")
    long, short = (
        [row["exact"] for key, row in rows if f", {rule}, " in key]
        for rule in ("round", "one step")
    )
    here = " against ".join(" and ".join(f"{each:.1f}" for each in runs) for runs in (long, short))
    return Finding(
        "a gradient through the last round is ahead of one through the last two steps, % exact",
        f"{theirs['last round']} against {theirs['last two steps']} (Sudoku-Extreme)",
        here,
        verdict(min(long) > max(short)),
        f"{puzzles}, equal processor time instead of equal updates",
    )


@table(
    "reason/depth",
    "reason/halting",
    "reason/gradients",
    "reason/mazes",
    "published/depth",
    "published/restarts",
    "published/gradients",
)
def reproduced_reason() -> str:
    """Return the findings about reasoners."""
    every = read("reason/halting")["rows"]["all restarts"]
    shallow, *deep = sorted(
        read("reason/depth")["rows"].values(), key=lambda row: float(row["evaluations"])
    )
    theirs = ", ".join(f"{exact} at {steps}" for steps, exact in beside("depth").items())
    one, most = beside("restarts").items()
    return findings(
        "reason",
        Finding(
            "more supervision steps than in training help EqR, % exact",
            f"{theirs} (Sudoku-Extreme)",
            ", ".join(f"{r['exact']:.1f} at {r['evaluations']:.0f}" for r in (shallow, *deep)),
            verdict(*(row["exact"] > shallow["exact"] for row in deep)),
            "`reason-6x6`, 500 Sudokus of 6 x 6 from held-out orbits, trained with 8",
        ),
        Finding(
            "so do random starts, of which the most settled is taken, % exact",
            f"{one[1]} with one, {most[1]} with {most[0]} (Sudoku-Extreme, 64 steps)",
            f"{every['one']:.1f} with one, {every['top1']:.1f} with {every['starts']}",
            verdict(every["top1"] > every["one"]),
            "the same model and puzzles, 64 steps",
        ),
        _longer_gradient("reason/gradients", "Sudokus of 6 x 6"),
        _longer_gradient("reason/mazes", "mazes of 13 x 13"),
    )
