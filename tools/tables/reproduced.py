"""Tables of what the papers report and what was found here, each with the state of the claim."""

from __future__ import annotations

from statistics import median

from tools.tables.claims import Finding, findings, published
from tools.tables.fields import GRAPHS, best_psnr, best_steps, percent, psnr, signals
from tools.tables.flow import SETS
from tools.tables.frame import read, table

#: Accuracy of IGNN in ten folds (Gu et al., 2020).
_FOLDS = {"MUTAG": "89.3", "PROTEINS": "77.7"}
#: PSNR of a SIREN in the TorchDEQ paper, Tab. deq-inr.
_SIREN = {"inr-nature": 25.17, "inr-video": 26.52, "inr-audio": 48.44}


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
    counts = sorted({steps for _, steps in kept})
    (tv_l1,) = (row for row in classical["rows"] if row["method"] == "TV-L1")

    def pair(where: str, one: dict[str, float], other: dict[str, float]) -> str:
        return f"{SETS[where]} {one[where]:.2f} against {other[where]:.2f}"

    def megabytes(gradient: str) -> str:
        return ", ".join(f"{kept[gradient, count]:.0f}" for count in counts)

    return findings(
        "flow",
        Finding(
            "correction of several states gives a better flow than that of the last, pixels",
            "better",
            "; ".join(pair(w, trained["correction"], trained["no correction"]) for w in SETS),
            "in part",
            "15 minutes of training each, 12 evaluations, one seed",
        ),
        Finding(
            "along a video, the state of the last pair saves evaluations, pixels",
            "fewer evaluations",
            f"{along[True, 2]:.2f} with 2 from the last state, {along[False, 12]:.2f} with 12 "
            "from zero",
            "reproduced",
            "synthetic videos, trained with near starts; `flow-nano` saves one evaluation",
        ),
        Finding(
            "memory of training does not grow with the evaluations, MB",
            "constant",
            f"phantom {megabytes('phantom, 1 step')}; unrolled {megabytes('unrolled')}",
            "reproduced",
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


@table("diffusion/sampling", "diffusion/inversion")
def reproduced_diffusion() -> str:
    """Return the findings about DEQ-DDIM."""
    rounds = {
        way: " and ".join(
            str(row["rounds"])
            for row in read("diffusion/sampling")["rows"]
            if (row["steps"], row["way"]) == (1000, way)
        )
        for way in ("anderson", "anderson per timestep")
    }
    spent = {
        row["scheme"]: f"{row['seconds_to_release']:.0f}"
        for row in read("diffusion/inversion")["rows"]
        if row["seconds_to_release"] is not None
    }
    return findings(
        "diffusion",
        Finding(
            "a chain of 1000 steps is solved in few parallel rounds",
            "15, their budget",
            f"{rounds['anderson per timestep']} as theirs; {rounds['anderson']} with one Anderson "
            "for all steps",
            "reproduced",
            "two small denoisers, relative residual 1e-4",
        ),
        Finding(
            "the equilibrium inverts an image faster than the sequential chain, seconds",
            "faster",
            f"`phantom` {spent['phantom']}, `implicit` {spent['implicit']}; the chain "
            f"{spent['sequential']}",
            "differs",
            "on one thread rounds do not run in parallel; T = 50, small denoiser, to the error of "
            "the release",
        ),
    )


@table(
    "inr/psnr-images",
    "inr/psnr-audio",
    "inr/psnr-video",
    "target:inr-nature",
    "target:inr-video",
    "target:inr-audio",
)
def reproduced_inr() -> str:
    """Return the findings about DEQ-INR."""
    names = ("DEQ-SIREN", "SIREN")

    def siren(preset: str) -> str:
        return f"{published(preset):.2f} against {_SIREN[preset]:.2f}"

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
            "differs",
            f"the SIREN is best at step {best_steps('psnr-images', 'SIREN')}, then overfits; both "
            f"stopped by the test pixels, the DEQ-SIREN is ahead on {len(ahead)} of "
            f"{len(pictures)} photographs, which are not the paper's; width 128",
        ),
        Finding(
            "the same on a video, dB",
            siren("inr-video"),
            f"{pair('psnr-video')}; with warm starts, equal time, "
            f"{pair('psnr-video', 'psnr_equal_time', 'DEQ-SIREN, warm')}",
            "differs",
            "150 steps in place of 10,000: a DEQ-SIREN learns slowly at first",
        ),
        Finding(
            "the same on a sound, dB",
            siren("inr-audio"),
            f"{pair('psnr-audio')}; equal time, {pair('psnr-audio', 'psnr_equal_time')}",
            "reproduced",
            "the direction: 2 s, width 128, 500 steps",
        ),
    )


@table("ignn/chains", "ignn/stability")
def reproduced_ignn() -> str:
    """Return the findings about IGNN."""
    chains = {(r["model"], r["length"]): r["median"] for r in read("ignn/chains")["rows"]}
    start = "IGNN, published start of W"
    reached = max(length for (model, length), score in chains.items()
                  if model == start and score == 100)  # fmt: skip
    rows = {(row["set"], row["model"]): row for row in read("ignn/stability")["rows"]}

    def score(data: str, model: str = "IGNN, projection", which: str = "median") -> str:
        return percent(rows[data, model][which])

    clipped = "IGNN, projection and clipped spectral norm"
    return findings(
        "ignn",
        Finding(
            "information travels along chains of 100 nodes, accuracy in %",
            "as a figure",
            f"{chains['IGNN', 100]:.0f} from W = identity; {chains[start, 100]:.1f} from the "
            "published start",
            "differs",
            f"100 epochs; the published start solves chains of {reached}",
        ),
        *(
            Finding(
                f"{data}, accuracy in %; Gu et al. (2020)",
                value,
                f"{score(data)}; a GCN {score(data, 'GCN')}",
                "differs",
                f"six splits, {rows[data, 'IGNN, projection']['epochs']} epochs, checkpoint by "
                "validation data; theirs: ten folds",
            )
            for data, value in _FOLDS.items()
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
            "on PPI",
            "; ".join(
                f"{shown} {score(name, clipped, 'worst')}, without {score(name, which='worst')}"
                for name, shown in GRAPHS.items()
            ),
            "differs",
            "other sets, minutes of training; PPI was not run with the paper's labels",
        ),
    )


def _longer_gradient(part: str, puzzles: str) -> Finding:
    """Return whether every run with the longer gradient is ahead of every run with the other."""
    rows = sorted(read(part)["rows"].items())
    long, short = (
        [row["exact"] for key, row in rows if f", {rule}, " in key]
        for rule in ("round", "one step")
    )
    here = " against ".join(" and ".join(f"{each:.1f}" for each in runs) for runs in (long, short))
    return Finding(
        "a gradient through the last round is ahead of one through the last two steps, % exact",
        "87.4 against 56.5 (Sudoku-Extreme)",
        here,
        "reproduced" if min(long) > max(short) else "differs",
        f"{puzzles}, equal processor time instead of equal updates",
    )


@table("reason/depth", "reason/halting", "reason/gradients", "reason/mazes")
def reproduced_reason() -> str:
    """Return the findings about reasoners."""
    depth, halting = read("reason/depth")["rows"], read("reason/halting")["rows"]
    every = halting["all restarts"]
    deeper = ", ".join(f"{row['exact']:.1f} at {row['evaluations']:.0f}" for row in depth.values())
    return findings(
        "reason",
        Finding(
            "more supervision steps than in training help EqR, % exact",
            "86.4 at 16, 93.0 at 64 (Sudoku-Extreme)",
            deeper,
            "reproduced",
            "`reason-6x6`, 500 Sudokus of 6 x 6 from held-out orbits, trained with 8",
        ),
        Finding(
            "so do random starts, of which the most settled is taken, % exact",
            "93.0 with one, 99.79 with 128 (Sudoku-Extreme, 64 steps)",
            f"{every['one']:.1f} with one, {every['top1']:.1f} with {every['starts']}",
            "reproduced" if every["top1"] > every["one"] else "differs",
            "the same model and puzzles, 64 steps",
        ),
        _longer_gradient("reason/gradients", "Sudokus of 6 x 6"),
        _longer_gradient("reason/mazes", "mazes of 13 x 13"),
    )
