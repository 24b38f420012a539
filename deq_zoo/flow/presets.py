"""Presets of DEQ-Flow: the stages of the published training, a quick one and a smoke test."""

from __future__ import annotations

from dataclasses import replace

from deq_zoo.flow.config import FlowConfig
from deq_zoo.flow.scene_task import SceneTask
from deq_zoo.flow.task import StageTask, WarpTask
from deq_zoo.flow.warps import Motion
from deq_zoo.optim import Adam, LinearOneCycle, OneCycle
from deq_zoo.preset import PRESETS, Preset, Target
from torchdeq import DEQConfig

# The published solver has no tolerance: every solve spends its budget.
_PLAIN = DEQConfig(f_solver="simple_fixed_point_iter", on_failure="ignore")
#: Six states along 36 evaluations, one gradient step at each.
DENSE = _PLAIN.with_options(f_max_iter=36, n_states=6, grad=1)
#: Two states along 40 evaluations, three gradient steps at each: sparse correction.
SPARSE = _PLAIN.with_options(f_max_iter=40, n_states=2, grad=3)


@PRESETS.register("flow-chairs-b")
def flow_chairs_b() -> Preset:
    """DEQ-Flow-B (5.2M) on FlyingChairs: plain iteration, correction at six states."""
    return _chairs("base")


@PRESETS.register("flow-chairs-h")
def flow_chairs_h() -> Preset:
    """DEQ-Flow-H (13.4M) on FlyingChairs: plain iteration, correction at six states."""
    return _chairs("huge")


@PRESETS.register("flow-things-b")
def flow_things_b() -> Preset:
    """DEQ-Flow-B on FlyingThings3D, after Chairs (--set task.start_from=RUN): sparse correction."""
    return replace(_things("base"), target=_sintel(1.42, "B, mean of 3 runs"))


@PRESETS.register("flow-things-h")
def flow_things_h() -> Preset:
    """DEQ-Flow-H on FlyingThings3D, after Chairs (--set task.start_from=RUN): sparse correction."""
    return replace(_things("huge"), target=_sintel(1.28, "H"))


@PRESETS.register("flow-sintel-b")
def flow_sintel_b() -> Preset:
    """DEQ-Flow-B fine-tuned for Sintel on a mixture of five sets, after Things."""
    return _fine("base", "sintel")


@PRESETS.register("flow-sintel-h")
def flow_sintel_h() -> Preset:
    """DEQ-Flow-H fine-tuned for Sintel on a mixture of five sets, after Things."""
    return _fine("huge", "sintel")


@PRESETS.register("flow-kitti-b")
def flow_kitti_b() -> Preset:
    """DEQ-Flow-B fine-tuned for KITTI, after Sintel."""
    return _fine("base", "kitti")


@PRESETS.register("flow-kitti-h")
def flow_kitti_h() -> Preset:
    """DEQ-Flow-H fine-tuned for KITTI, after Sintel."""
    return _fine("huge", "kitti")


@PRESETS.register("flow-quick")
def flow_quick() -> Preset:
    """A small DEQ-Flow on warped photographs that come with scikit-image: three minutes.

    Training, evaluation and prediction all make 6 evaluations of f: training makes two slices of 2
    evaluations and a gradient step each.
    """
    deq = _PLAIN.with_options(f_max_iter=4, n_states=2, grad=1, eval_f_max_iter=6)
    task = WarpTask(
        net=FlowConfig(size="nano"),
        deq=deq,
        batch=4,
        crop=(64, 96),
        motion=Motion(shift=8.0, turn=0.03, zoom=0.03, wave=1.5),
        val_pairs=96,  # the mean of fewer is the noise of a few flows that nothing shows
        colour=False,
        near=0.3,
    )
    return Preset(
        task=task,
        optim=Adam(lr=1e-3, weight_decay=1e-5, schedule=OneCycle(rise=0.1)),
        steps=800,
        clip=1.0,
        log_every=20,
        eval_every=200,
    )


@PRESETS.register("flow-nano")
def flow_nano() -> Preset:
    """A small DEQ-Flow for whole frames, on photographs in layers: 100 minutes of one core.

    Training, evaluation and prediction all make 9 evaluations of f: training makes three slices of
    2 evaluations and a gradient step each.
    """
    deq = _PLAIN.with_options(f_max_iter=6, n_states=3, grad=1, eval_f_max_iter=9)
    task = SceneTask(
        net=FlowConfig(size="pocket"),
        deq=deq,
        batch=6,
        sizes=((96, 128), (128, 160), (192, 256), (256, 320), (384, 512)),
        grow=2000,
        val_pairs=16,
    )
    return Preset(
        task=task,
        optim=Adam(lr=2e-3, weight_decay=1e-5, schedule=OneCycle(rise=0.05)),
        steps=10000,
        clip=1.0,
        log_every=50,
        eval_every=1000,
    )


@PRESETS.register("flow-smoke")
def flow_smoke() -> Preset:
    """A small DEQ-Flow on warped photographs, for tests: seconds."""
    deq = _PLAIN.with_options(f_max_iter=4, n_states=2, grad=1)
    task = WarpTask(
        net=FlowConfig(size="nano"),
        deq=deq,
        batch=2,
        crop=(64, 72),
        val_pairs=2,
        eval_pairs=2,
        stereo=False,
    )
    return Preset(
        task=task, optim=Adam(lr=1e-3), steps=4, clip=1.0, log_every=2, save_every=2, eval_every=4
    )


def _chairs(size: str) -> Preset:
    task = StageTask(
        net=FlowConfig(size=size),
        deq=DENSE,
        batch=12,
        crop=(368, 496),
        stage="chairs",
        test_on=("kitti",),
    )
    return _published(task, lr=4e-4, steps=120_000, eval_every=20_000)


def _things(size: str) -> Preset:
    task = StageTask(
        net=FlowConfig(size=size, all_grad=True, freeze_bn=True),
        deq=SPARSE,
        batch=6,
        crop=(400, 720),
        stage="things",
        test_on=("sintel_clean", "sintel_final", "kitti"),
    )
    return _published(task, lr=1.25e-4, steps=120_000, eval_every=5_000)


def _fine(size: str, stage: str) -> Preset:
    """Return the fine-tuning of the authors' first release; the second release has none."""
    to_sintel = stage == "sintel"
    task = StageTask(
        net=FlowConfig(size=size, all_grad=True, freeze_bn=True),
        deq=DENSE.with_options(grad=3 if to_sintel else 1, gamma=0.9),
        batch=6,
        crop=(368, 768) if to_sintel else (288, 960),
        stage="sintel" if to_sintel else "kitti",
        test_on=("sintel_clean", "sintel_final", "kitti") if to_sintel else ("kitti",),
    )
    lr, steps = (1.25e-4, 120_000) if to_sintel else (1e-4, 50_000)
    return _published(task, lr=lr, steps=steps, eval_every=5_000)


def _published(task: StageTask, lr: float, steps: int, eval_every: int) -> Preset:
    return Preset(
        task=task,
        optim=Adam(lr=lr, weight_decay=1e-4, schedule=LinearOneCycle()),
        steps=steps,
        clip=1.0,
        seed=1234,
        log_every=100,
        eval_every=eval_every,
        save_every=5_000,
    )


def _sintel(value: float, which: str) -> Target:
    return Target("sintel_clean_aepe", value, f"paper, Tab. deq-flow, {which}")
