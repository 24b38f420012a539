"""Presets of DEQ-INR: the paper's, one for any file, a quick one and a smoke test."""

from __future__ import annotations

from typing import Literal

from deq_zoo.inr.duel import Duel
from deq_zoo.inr.model import FieldConfig
from deq_zoo.inr.recipes import CORRECTED, EXACT, RECIPE, SHORT
from deq_zoo.inr.shape_task import FitShape
from deq_zoo.inr.task import FitSignal, GeneraliseImage
from deq_zoo.optim import Adam
from deq_zoo.preset import PRESETS, Preset, Target


@PRESETS.register("inr-nature")
def inr_nature() -> Preset:
    """DEQ-SIREN of 512 between the pixels of natural images, of which it learns every fourth."""
    return _generalise("nature", steps=500, psnr=25.70)


@PRESETS.register("inr-text")
def inr_text() -> Preset:
    """DEQ-SIREN of 512 between the pixels of images of text."""
    return _generalise("text", steps=1000, psnr=28.58)


@PRESETS.register("inr-video")
def inr_video() -> Preset:
    """DEQ-SIREN of 2048 on a video, 65,536 points a step, with fixed-point correction."""
    return Preset(
        task=FitSignal(
            net=FieldConfig(width=2048), deq=CORRECTED, data="video", batch=65536, warm=False
        ),
        optim=Adam(lr=1e-3),
        steps=10_000,
        clip_value=0.1,
        log_every=100,
        eval_every=2000,
        save_every=2000,
        target=Target("psnr", 30.37, "paper, Tab. deq-inr, Cat video"),
    )


@PRESETS.register("inr-audio")
def inr_audio() -> Preset:
    """DEQ-SIREN of 512 on a sound, all samples at every step."""
    return Preset(
        task=FitSignal(
            net=FieldConfig(input_scale=25000.0),
            deq=SHORT,
            data="audio",
        ),
        optim=Adam(lr=1e-3),
        steps=3000,
        eval_every=500,
        save_every=500,
        target=Target("psnr", 51.35, "paper, Tab. deq-inr, audio"),
    )


@PRESETS.register("inr-camera")
def inr_camera() -> Preset:
    """DEQ-MFN (Fourier) on the cameraman; also --set filter=gabor, width=512 or layers=4."""
    return Preset(
        task=FitSignal(
            net=FieldConfig(filter="fourier", width=256, input_scale=256.0),
            deq=RECIPE,
            data="camera",
            channels=1,
        ),
        optim=Adam(lr=1e-3),
        steps=5000,
        eval_every=500,
        save_every=500,
    )


@PRESETS.register("inr-celeba")
def inr_celeba() -> Preset:
    """DEQ-MFN (Fourier) on a face; also --set filter=gabor, width=256 or layers=4."""
    return Preset(
        task=FitSignal(
            net=FieldConfig(filter="fourier", width=128, input_scale=64.0),
            deq=RECIPE,
            data="celeba",
        ),
        optim=Adam(lr=3e-3),
        steps=3000,
        eval_every=500,
        save_every=500,
    )


@PRESETS.register("inr-file")
def inr_file() -> Preset:
    """Any image, wav or video: --set file=PATH; for sounds also --set input_scale=25000."""
    return Preset(
        task=FitSignal(net=FieldConfig(width=256), deq=RECIPE, data="file", batch=65536),
        optim=Adam(lr=1e-3),
        steps=1000,
        eval_every=250,
        save_every=250,
    )


@PRESETS.register("inr-gradient")
def inr_gradient() -> Preset:
    """A photograph from its gradients alone, exact through the equilibrium."""
    return Preset(
        task=FitSignal(
            net=FieldConfig(width=128, input_scale=32.0),
            deq=EXACT,
            data="camera",
            channels=1,
            shrink=8,
            warm=False,
            supervise="gradient",
        ),
        optim=Adam(lr=1e-3),
        steps=300,
        eval_every=100,
    )


@PRESETS.register("inr-shape")
def inr_shape() -> Preset:
    """A signed distance with |gradient| = 1: --set shape=torus, or silhouette with file=PATH."""
    return Preset(
        task=FitShape(deq=EXACT, shape="box"), optim=Adam(lr=1e-3), steps=300, eval_every=100
    )


@PRESETS.register("inr-quick")
def inr_quick() -> Preset:
    """A photograph by DEQ-SIREN and SIREN of as many parameters: about a minute on one core."""
    return Preset(
        task=Duel(
            net=FieldConfig(width=128, input_scale=48.0),
            rival=FieldConfig(kind="siren", width=128, layers=2, input_scale=48.0),
            deq=RECIPE,
            data="astronaut",
            shrink=3,
        ),
        optim=Adam(lr=1e-3),
        steps=400,
        eval_every=100,
    )


@PRESETS.register("inr-smoke")
def inr_smoke() -> Preset:
    """DEQ-SIREN between the pixels of 16 x 16 ripples, for tests: seconds."""
    return Preset(
        task=GeneraliseImage(
            net=FieldConfig(width=16, input_scale=8.0), deq=RECIPE, data="ripples"
        ),
        optim=Adam(lr=1e-3),
        steps=20,
        log_every=5,
        eval_every=10,
        save_every=10,
    )


def _generalise(data: Literal["nature", "text"], steps: int, psnr: float) -> Preset:
    return Preset(
        task=GeneraliseImage(net=FieldConfig(), deq=RECIPE, data=data),
        optim=Adam(lr=1e-3),
        steps=steps,
        log_every=50,
        eval_every=100,
        save_every=100,
        target=Target("psnr", psnr, f"paper, Tab. deq-inr, {data.title()}, mean over images"),
    )
