"""Tables of the README: numbers that say most, and the families with their pictures."""

from __future__ import annotations

from tools.tables.designs import SIZES, mean_perplexity
from tools.tables.fields import best_psnr
from tools.tables.frame import ROOT, markdown, read, table
from tools.tables.library import training_ratios


@table("gradients", "stream")
def front_numbers() -> str:
    """Return three measured numbers with links to how they were measured, for the README."""
    faster = [1 / ratio for ratio in training_ratios().values()]
    kept = {
        row["method"]: f"{row['held'] / 1e6:.0f} MB"
        for row in read("gradients")["passes"]["rows"]
        if row["case"] == "cell"
    }
    hard = [row["ratio"] for row in read("stream")["rows"] if row["load"] == "conv, 1 hard in 64"]
    return markdown(
        ["Measured", "What", "How"],
        [
            [
                f"**{min(faster):.1f} to {max(faster):.1f} times** as fast",
                "a training step to the same residuals, by GMRES, beside torchdeq 0.1.0 with the "
                "faster of its adjoints; two maps, each the median ratio of rounds in turns",
                "[gradients](docs/gradients.md#what-it-costs)",
            ],
            [
                f"**{kept['implicit, 20 calls']}** instead of {kept['unrolled 20']}",
                "kept for the backward pass of 20 evaluations, implicit and unrolled",
                "[gradients](docs/gradients.md#what-it-costs)",
            ],
            [
                f"**{min(hard):.1f} to {max(hard):.1f} times** as fast",
                "a stream beside fixed batches, where one sample in 64 is hard",
                "[streams](docs/benchmarks.md#streams)",
            ],
        ],
    )


def _test(name: str, score: str) -> float:
    """Return a score of a pretrained model on test data."""
    return float(read(f"card:{name}").scores["test"][score])


def _published(preset: str, what: str) -> str:
    return f"{read(f'target:{preset}').value:g} {what} (`{preset}`)"


def _recognised(command: str) -> float:
    """Return the percentage of samples of a command that a classifier recognises."""
    measured = read("card:diffusion-digits").measured
    (values,) = (v for title, v in measured.items() if title.startswith(f"`{command}`"))
    (share,) = (float(value) for what, value in values.items() if what.endswith("%"))
    return share


def _both(design: str) -> str:
    """Return the mean perplexities of a language model of both sizes."""
    return " and ".join(mean_perplexity(design, millions) for millions in SIZES)


@table(
    "pretrained_flow/flow-nano",
    "inr/psnr-images",
    "lm_designs/compare",
    "card:mdeq-digits",
    "card:diffusion-digits",
    "card:ignn-chains",
    "card:reason-6x6",
    "card:reason-mazes",
    "target:mdeq-cifar10-large",
    "target:flow-things-h",
    "target:diffusion-cifar10",
    "target:inr-nature",
    "target:ignn-ppi-large",
    "target:lm-wt103-final",
    "target:reason-trm-sudoku",
)
def front_families() -> str:
    """Return the families: a picture, what to type, a number of ours and a published one."""
    flow = read("pretrained_flow/flow-nano")["errors"]["middlebury"]
    rows = {
        "mdeq": (
            "[MDEQ](deq_zoo/mdeq/README.md), multiscale networks: images",
            "deq-zoo predict mdeq-digits photo.png",
            f"{_test('mdeq-digits', 'accuracy'):.1f} % of 1,000 digits",
            _published("mdeq-cifar10-large", "% of CIFAR-10"),
        ),
        "flow": (
            "[DEQ-Flow](deq_zoo/flow/README.md): motion",
            "deq-zoo predict flow-nano a.png b.png",
            f"{flow:.2f} pixels on Middlebury",
            _published("flow-things-h", "pixels on Sintel"),
        ),
        "diffusion": (
            "[DEQ-DDIM](deq_zoo/diffusion/README.md), diffusion: images from noise",
            "deq-zoo sample diffusion-digits",
            f"{_recognised('deq-zoo sample diffusion-digits'):.0f} % of samples recognised",
            _published("diffusion-cifar10", "squared error of inversions"),
        ),
        "inr": (
            "[DEQ-INR](deq_zoo/inr/README.md), implicit representations: signals",
            "deq-zoo train inr-quick",
            f"{best_psnr('psnr-images', 'DEQ-SIREN'):.1f} dB between the pixels of photographs, "
            f"a SIREN {best_psnr('psnr-images', 'SIREN'):.1f}, each at the "
            "step that these test pixels choose",
            _published("inr-nature", "dB"),
        ),
        "ignn": (
            "[IGNN](deq_zoo/ignn/README.md), implicit graph networks: graphs",
            "deq-zoo evaluate ignn-chains",
            f"{_test('ignn-chains', 'accuracy'):.0f} % along 100 nodes",
            _published("ignn-ppi-large", "micro-F1 on PPI"),
        ),
        "lm": (
            "[Attractors, DEQ transformers](deq_zoo/lm/README.md): text",
            "deq-zoo sample lm-reference",
            "perplexity on the validation text of WikiText-2 after 20 minutes, 1 and 4 M "
            f"parameters: {_both('attractor')}, an explicit transformer {_both('explicit')}",
            _published("lm-wt103-final", "on WikiText-103"),
        ),
        "reason": (
            "[HRM, TRM, EqR](deq_zoo/reason/README.md), recursive reasoners: puzzles",
            "deq-zoo predict reason-6x6 puzzle.txt",
            f"{_test('reason-6x6', 'exact'):.1f} % of 500 Sudokus of 6 x 6, "
            f"{_test('reason-mazes', 'exact'):.1f} % of 500 mazes",
            _published("reason-trm-sudoku", "% of Sudoku-Extreme"),
        ),
    }
    return markdown(
        ["Family", "Try it", "Here", "Published, not repeated here"],
        [[_picture(name) + family, f"`{command}`", ours, theirs]
         for name, (family, command, ours, theirs) in rows.items()],
    )  # fmt: skip


def _picture(family: str) -> str:
    """Return the picture of a family, if it has one, to stand above its name.

    A narrow page shrinks a picture to nothing in a column of its own, but not beside words.
    """
    file = f"docs/figures/families/small/{family}.png"
    return f'<img src="{file}" width="220" alt="{family}"><br>' if (ROOT / file).exists() else ""
