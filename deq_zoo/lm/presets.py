"""The published language models, the convergent one, and small models of each design."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.task import LanguageTask
from deq_zoo.muon import Muon
from deq_zoo.optim import Adam, Cosine, Trapezoid, WarmCosine
from deq_zoo.preset import PRESETS, Preset, Target
from torchdeq import DEQConfig

#: Implicit gradients, both solves by Broyden's method with every update kept. The authors' 35 steps
#: evaluate f 36 times: at the start, and after each step. The first evaluation of their backward
#: solve, at zero, gives the cotangent; ours starts at the cotangent, so 35 products are left.
IMPLICIT = DEQConfig(
    ift=True,
    f_solver="broyden",
    f_solver_kwargs={"l_thres": None},
    f_max_iter=36,
    f_tol=1e-3,
    f_stop_mode="rel",
    b_solver="broyden",
    b_solver_kwargs={"l_thres": None},
    b_max_iter=35,
    b_tol=1e-3,
    b_stop_mode="rel",
    on_failure="ignore",
)
REGULARISED = IMPLICIT.with_options(jac_loss_weight=0.1, jac_loss_freq=0.4, jac_incremental=30_000)
#: Twelve steps from zeros, in training and evaluation: this map has no fixed point.
UNROLLED = DEQConfig(f_max_iter=0, grad=[12], eval_f_max_iter=12, f_tol=0.0, on_failure="ignore")
#: Six steps with a gradient in training, after up to six without; a fixed point in evaluation.
#: Some samples have a Jacobian of radius above 1; Anderson acceleration converges for these, too.
CONVERGENT = UNROLLED.with_options(
    f_solver="anderson",
    f_solver_kwargs={"m": 5},
    grad=[6],
    eval_f_max_iter=40,
    f_tol=1e-3,
    f_stop_mode="rel",
)
AHEAD, CONSISTENCY = 6, 1.0
#: Two steps with a gradient in training, towards its end; a fixed point in evaluation.
ATTRACTOR = DEQConfig(
    f_max_iter=0,
    grad=[2],
    f_solver="anderson",
    f_solver_kwargs={"m": 5},
    eval_f_max_iter=40,
    f_tol=1e-3,
    f_stop_mode="rel",
    on_failure="ignore",
)
#: The authors' training of the smaller attractors: their solver and their one-step gradient.
ATTRACTOR_PUBLISHED = DEQConfig(
    f_solver="anderson",
    f_solver_kwargs={"m": 5, "tau": 1.0},
    f_max_iter=64,
    f_tol=3e-4,
    f_stop_mode="rel",
    on_failure="ignore",
)

_CUTOFFS = (20_000, 40_000, 200_000)
_ORIGINAL = LMConfig(
    design="original",
    tokens=267_735,
    width=700,
    heads=10,
    inner=48_000,
    blocks=1,
    cutoffs=_CUTOFFS,
    shrink=4,
    position_dropout="offsets",
    init="uniform",
)
_FINAL = replace(
    _ORIGINAL,
    design="redesigned",
    inner=14_800,
    blocks=3,
    position_dropout="features",
    init="normal",
    recompute=True,
)
#: WikiText-2 on a CPU: f of the three designs has the same number of parameters.
SMALL_FINAL = LMConfig(
    tokens=33_278, width=64, heads=4, inner=256, cutoffs=(2_000, 10_000), shrink=2, dropout=0.0
)
SMALL_ORIGINAL = replace(SMALL_FINAL, design="original", inner=1_102, blocks=1, init="uniform")
SMALL_OURS = replace(SMALL_FINAL, design="convergent", init="scaled")
SMALL_ATTRACTOR = replace(SMALL_FINAL, design="attractor", backbone=2, blocks=1)


@PRESETS.register("lm-wt103-seq")
def lm_wt103_seq() -> Preset:
    """The original DEQ transformer of 98M parameters on WikiText-103: implicit gradients."""
    return _wikitext103(
        _ORIGINAL, IMPLICIT, 300_000, 16_000, Target("perplexity", 23.8, "paper, Tab. deq, test")
    )


@PRESETS.register("lm-wt103-seq-jr")
def lm_wt103_seq_jr() -> Preset:
    """The original DEQ transformer on WikiText-103: implicit gradients, regularised Jacobian."""
    target = Target("perplexity", 23.7, "paper, Tab. deq, test")
    return _wikitext103(_ORIGINAL, REGULARISED, 300_000, 16_000, target)


@PRESETS.register("lm-wt103-final")
def lm_wt103_final() -> Preset:
    """The redesigned transformer of 98M parameters on WikiText-103: twelve unrolled steps."""
    return _wikitext103(
        _FINAL, UNROLLED, 150_000, 8_000, Target("perplexity", 22.4, "paper, Tab. deq, test")
    )


@PRESETS.register("lm-wt103-ours")
def lm_wt103_ours() -> Preset:
    """The convergent transformer of 98M parameters on WikiText-103: its map has a fixed point."""
    preset = _wikitext103(replace(_FINAL, design="convergent"), CONVERGENT, 150_000, 8_000, None)
    task = replace(preset.task, ahead=AHEAD, consistency=CONSISTENCY)  # type: ignore[type-var]
    return replace(preset, task=task)


@PRESETS.register("lm-wt2-seq")
def lm_wt2_seq() -> Preset:
    """A small original DEQ transformer on WikiText-2: implicit gradients."""
    return _wikitext2(SMALL_ORIGINAL, IMPLICIT)


@PRESETS.register("lm-wt2-final")
def lm_wt2_final() -> Preset:
    """A small redesigned transformer on WikiText-2: twelve unrolled steps."""
    return _wikitext2(SMALL_FINAL, UNROLLED)


@PRESETS.register("lm-wt2-ours")
def lm_wt2_ours() -> Preset:
    """A small convergent transformer on WikiText-2."""
    return _wikitext2(SMALL_OURS, CONVERGENT, ahead=AHEAD, consistency=CONSISTENCY)


@PRESETS.register("lm-wt2-attractor")
def lm_wt2_attractor() -> Preset:
    """A small attractor on WikiText-2: two explicit blocks, and one in equilibrium."""
    return _wikitext2(SMALL_ATTRACTOR, ATTRACTOR, explicit=2_800, consistency=CONSISTENCY)


@PRESETS.register("lm-wt2-attractor-muon")
def lm_wt2_attractor_muon() -> Preset:
    """The small attractor on WikiText-2, all of its matrices changed by Muon."""
    preset = lm_wt2_attractor()
    adam = preset.optim
    assert isinstance(adam, Adam)
    muon = Muon(
        lr=adam.lr, matrix_lr=2e-2, core_factor=1.0, core_muon=True, betas=adam.betas,
        eps=adam.eps, weight_decay=0.0, schedule=adam.schedule,
    )  # fmt: skip
    return replace(preset, optim=muon)


@PRESETS.register("lm-fineweb-140m-attractor")
def lm_fineweb_140m_attractor() -> Preset:
    """The attractor of 134M parameters as published: --set task.file=FILE with FineWeb-Edu."""
    net = LMConfig(
        design="attractor", tokens=32_768, width=1024, heads=8, inner=4096, backbone=7, blocks=1,
        dropout=0.0, gate_max=0.75, gate_start=0.75, core_start="random", input_rms=0.0,
        mixing="published", min_evaluations=6,
    )  # fmt: skip
    return Preset(
        task=LanguageTask(
            net=net, deq=ATTRACTOR_PUBLISHED, data="file", pieces=32_768, batch=256, length=2048,
            memory=0, eval_batch=8, eval_limit=16,
        ),
        optim=Muon(),
        clip=1.0,
        steps=21_362,
        precision="bf16",
        seed=42,
        log_every=10,
        eval_every=512,
        save_every=512,
        target=Target("perplexity", 18.30, "arXiv:2605.12466, Tab. 1, FineWeb-Edu validation"),
    )  # fmt: skip


@PRESETS.register("lm-file")
def lm_file() -> Preset:
    """Any text file: --set task.file=FILE; bytes, or --set pieces=4000 --set net.tokens=4000."""
    net = LMConfig(
        design="attractor", tokens=256, width=256, heads=8, inner=1024, backbone=2, blocks=1
    )
    return Preset(
        task=LanguageTask(
            net=net, deq=ATTRACTOR, data="file", batch=32, length=128, memory=128,
            explicit=3_500, consistency=CONSISTENCY,
        ),
        optim=Adam(lr=1e-3, schedule=Cosine(warmup=100, floor=0.05)),
        clip=0.5,
        steps=5_000,
        eval_every=500,
        save_every=500,
    )  # fmt: skip


@PRESETS.register("lm-reference")
def lm_reference() -> Preset:
    """An attractor of 0.85M parameters on Python's reference and docstrings of its packages."""
    net = LMConfig(
        design="attractor", tokens=1024, width=128, heads=4, inner=448, backbone=3, blocks=1,
        dropout=0.0,
    )  # fmt: skip
    return Preset(
        task=LanguageTask(
            net=net, deq=ATTRACTOR, data="reference", pieces=1024, batch=8, length=128,
            memory=128, forget=0.1, eval_batch=1, explicit=8_400, consistency=CONSISTENCY,
        ),
        optim=Adam(lr=2e-3, schedule=Trapezoid(cooldown=0.6, warmup=100)),
        clip=0.5,
        steps=12_000,
        log_every=50,
        eval_every=1_000,
        save_every=500,
    )  # fmt: skip


@PRESETS.register("lm-quick")
def lm_quick() -> Preset:
    """A convergent transformer learns Python's reference, and can write, in a minute or two."""
    return Preset(
        task=LanguageTask(
            net=LMConfig(design="convergent", tokens=256, width=128, heads=4, inner=512, blocks=1,
                         dropout=0.0, init="scaled"),
            deq=CONVERGENT.with_options(grad=[4]),
            data="topics", batch=8, length=64, memory=64, eval_batch=8, eval_limit=10,
            ahead=4, consistency=4.0,
        ),
        optim=Adam(lr=3e-3, schedule=Cosine(warmup=30, floor=0.05)),
        clip=0.5,
        steps=600,
        eval_every=200,
        save_every=100,
    )  # fmt: skip


@PRESETS.register("lm-smoke")
def lm_smoke() -> Preset:
    """A tiny original transformer learns to count: seconds, for tests."""
    return Preset(
        task=LanguageTask(
            net=LMConfig(design="original", tokens=256, width=16, heads=2, inner=32, blocks=1),
            deq=IMPLICIT.with_options(f_max_iter=12, b_max_iter=12),
            data="counting", batch=4, length=16, memory=16, eval_batch=2, eval_limit=2,
        ),
        optim=Adam(lr=1e-2),
        steps=6,
        log_every=2,
        eval_every=6,
    )  # fmt: skip


@PRESETS.register("lm-smoke-attractor")
def lm_smoke_attractor() -> Preset:
    """A tiny attractor learns to count, with Muon: seconds, for tests."""
    net = LMConfig(
        design="attractor", tokens=256, width=16, heads=2, inner=32, backbone=1, blocks=1,
        dropout=0.0,
    )  # fmt: skip
    smoke = lm_smoke()
    changes = {"net": net, "deq": ATTRACTOR, "explicit": 2, "ahead": 2, "ramp": 4}
    task = replace(smoke.task, consistency=CONSISTENCY, **changes)  # type: ignore[type-var]
    return replace(smoke, task=task, optim=Muon(lr=1e-2, matrix_lr=1e-2))


def _wikitext103(
    net: LMConfig, deq: DEQConfig, steps: int, warmup: int, target: Target | None
) -> Preset:
    return Preset(
        task=LanguageTask(net=net, deq=deq, batch=56, length=150, memory=150, eval_batch=16),
        optim=Adam(lr=2.5e-4, schedule=WarmCosine(warmup, loud_start=True)),
        clip=0.25,
        steps=steps,
        seed=42,
        log_every=200,
        eval_every=5_000,
        save_every=1_000,
        target=target,
    )


def _wikitext2(net: LMConfig, deq: DEQConfig, **training: Any) -> Preset:
    return Preset(
        task=LanguageTask(net=net, deq=deq, batch=8, length=64, memory=64, **training),
        optim=Adam(lr=2e-3, schedule=Cosine(warmup=50, floor=0.02)),
        clip=0.5,
        steps=4_000,
        eval_every=1_000,
    )
