"""Presets of reasoners: the published ones, small ones on generated puzzles, and a smoke test."""

from __future__ import annotations

from dataclasses import replace

from deq_zoo.optim import Adam, Cosine
from deq_zoo.preset import PRESETS, Preset, Target
from deq_zoo.reason.config import EQR_MAZE, EQR_SUDOKU, HRM, TRM_ATTENTION, TRM_MLP, ReasonConfig
from deq_zoo.reason.optim import AdamATan2
from deq_zoo.reason.search import Search
from deq_zoo.reason.task import SolvePuzzles
from torchdeq import DEQConfig

_SUDOKU_SOURCE = "2510.04871, Tab. 4, Sudoku-Extreme"


def _deq(depth: int, tol: float = 1e-3) -> DEQConfig:
    """Return one supervision step for each update, and `depth` of them for each attempt."""
    return DEQConfig(
        f_max_iter=1,
        eval_f_max_iter=depth,
        f_tol=tol,
        f_stop_mode="rel",
    )


def _published(net: ReasonConfig, steps: int, target: Target | None = None) -> Preset:
    """Return a published run on a folder that the authors' programs wrote."""
    return Preset(
        task=SolvePuzzles(
            net=net,
            deq=_deq(64),
            data="folder",
            puzzles=0,
            val_puzzles=0,
            test_puzzles=0,
            augment=False,
            decay=0.0 if net.kind == "hrm" else 0.999,
        ),
        optim=AdamATan2(),
        steps=steps,
        precision="bf16",
        log_every=50,
        eval_every=5000,
        save_every=1000,
        target=target,
    )


@PRESETS.register("reason-hrm-sudoku")
def reason_hrm_sudoku() -> Preset:
    """HRM of 27M parameters on 1,000 Sudoku-Extreme puzzles, as published for 8 GPUs."""
    return _published(HRM, 26_040, Target("exact", 55.0, _SUDOKU_SOURCE))


@PRESETS.register("reason-hrm-maze")
def reason_hrm_maze() -> Preset:
    """HRM of 27M parameters on 1,000 Maze-Hard puzzles of 30x30."""
    net = replace(HRM, cells=900, vocab=6)
    return _published(net, 26_040, Target("exact", 74.5, "2510.04871, Tab. 4, Maze-Hard"))


@PRESETS.register("reason-trm-sudoku")
def reason_trm_sudoku() -> Preset:
    """TRM of 5M parameters with an MLP over the cells, on 1,000 Sudoku-Extreme puzzles."""
    return _published(TRM_MLP, 65_100, Target("exact", 87.4, _SUDOKU_SOURCE))


@PRESETS.register("reason-trm-sudoku-attention")
def reason_trm_sudoku_attention() -> Preset:
    """TRM of 7M parameters with attention, on 1,000 Sudoku-Extreme puzzles."""
    return _published(TRM_ATTENTION, 65_100, Target("exact", 74.7, _SUDOKU_SOURCE))


@PRESETS.register("reason-trm-maze")
def reason_trm_maze() -> Preset:
    """TRM of 7M parameters with attention, on 1,000 Maze-Hard puzzles of 30x30."""
    net = replace(TRM_ATTENTION, cells=900, vocab=6, inner=4)
    return _published(net, 65_100, Target("exact", 85.3, "2510.04871, Tab. 4, Maze-Hard"))


@PRESETS.register("reason-eqr-sudoku")
def reason_eqr_sudoku() -> Preset:
    """EqR of 5M parameters with an MLP over the cells, on 1,000 Sudoku-Extreme puzzles."""
    return _published(EQR_SUDOKU, 50_000, Target("exact", 86.4, "2605.21488, depth 16, one start"))


@PRESETS.register("reason-eqr-maze")
def reason_eqr_maze() -> Preset:
    """EqR of 264K parameters with attention, on 1,000 Maze-Unique puzzles of 30x30."""
    return _published(EQR_MAZE, 100_000, Target("exact", 82.2, "2605.21488, depth 16, one start"))


@PRESETS.register("reason-eqr-maze-tiny")
def reason_eqr_maze_tiny() -> Preset:
    """EqR of 42K parameters on Maze-Unique, as tuned by its authors in 2026."""
    net = replace(EQR_MAZE, width=44, heads=2, slots=16, puzzle_width=44)
    preset = _published(net, 150_000, Target("exact", 99.6, "EqR, supplements/maze_unique"))
    return replace(preset, optim=AdamATan2(lr=1e-3, weight_decay=0.1))


@PRESETS.register("reason-sudoku9")
def reason_sudoku9() -> Preset:
    """A small EqR on generated 9x9 Sudokus, with all orbits of the test held out: hours."""
    net = replace(EQR_SUDOKU, width=96, rounds=2, inner=3, max_steps=8)
    return Preset(
        task=SolvePuzzles(
            net=net,
            deq=_deq(64),
            search=Search(restarts=4),
            data="sudoku9",
            puzzles=2000,
            test_puzzles=500,
            extra_givens=12,
            batch=16,
            decay=0.995,
        ),
        optim=Adam(lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1, schedule=Cosine(warmup=200)),
        steps=40_000,
        eval_every=2000,
        log_every=50,
    )


@PRESETS.register("reason-sudoku6")
def reason_sudoku6() -> Preset:
    """A small EqR on generated 6x6 Sudokus, with all orbits of the test held out."""
    net = ReasonConfig(cells=36, vocab=8, width=64, rounds=2, inner=3, max_steps=8)
    return Preset(
        task=SolvePuzzles(
            net=net,
            deq=_deq(64),
            search=Search(restarts=8),
            data="sudoku6",
            puzzles=2000,
            test_puzzles=500,
            batch=64,
            decay=0.995,
        ),
        optim=Adam(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, schedule=Cosine(warmup=100)),
        steps=2000,
        eval_every=200,
        log_every=20,
    )


@PRESETS.register("reason-maze13")
def reason_maze13() -> Preset:
    """A tiny EqR with a convolution on generated mazes of 13x13 with one path each.

    An update is two supervision steps without noise, `f_max_iter` and `grad` of them, and the
    gradient is that of the whole second one: such a model settles on larger mazes, too.
    """
    net = ReasonConfig(
        cells=169, vocab=6, width=32, blocks=1, mixer="conv", rounds=2, inner=2, max_steps=8,
        multiple=32, noise=0.0,
    )  # fmt: skip
    return Preset(
        task=SolvePuzzles(
            net=net,
            deq=_deq(64),
            gradient="deq",
            search=Search(restarts=8),
            cell_loss="softmax",
            data="maze",
            puzzles=4000,
            test_puzzles=500,
            batch=8,
            decay=0.995,
        ),
        optim=Adam(lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, schedule=Cosine(warmup=100)),
        steps=16_000,
        eval_every=1000,
        log_every=50,
    )


@PRESETS.register("reason-quick")
def reason_quick() -> Preset:
    """A tiny EqR on generated 4x4 Sudokus of unseen orbits: about two minutes."""
    net = ReasonConfig(cells=16, vocab=6, width=48, rounds=3, inner=2, max_steps=6)
    return Preset(
        task=SolvePuzzles(
            net=net,
            deq=_deq(32),
            search=Search(restarts=4),
            data="sudoku4",
            puzzles=1000,
            val_puzzles=100,
            test_puzzles=200,
            extra_givens=2,
            batch=64,
            decay=0.98,
        ),
        optim=Adam(lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, schedule=Cosine(warmup=20)),
        steps=400,
        eval_every=100,
        log_every=10,
    )


@PRESETS.register("reason-smoke")
def reason_smoke() -> Preset:
    """A minute EqR on a few 4x4 Sudokus, for tests: seconds."""
    net = ReasonConfig(
        cells=16, vocab=6, width=8, blocks=1, rounds=2, inner=1, max_steps=3, puzzle_width=8
    )
    return Preset(
        task=SolvePuzzles(
            net=net,
            deq=_deq(4),
            search=Search(restarts=1, slots=4),
            data="sudoku4",
            puzzles=24,
            val_puzzles=6,
            test_puzzles=8,
            extra_givens=4,
            batch=8,
            decay=0.9,
        ),
        optim=AdamATan2(lr=3e-3, weight_decay=0.1, table_lr=1e-2),
        steps=9,
        log_every=3,
        eval_every=4,
        save_every=4,
    )
