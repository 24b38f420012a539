"""Presets of denoisers: the paper's, a quick one and a smoke test."""

from __future__ import annotations

from deq_zoo.diffusion.model import CELEBA, CIFAR10, DIGITS, LSUN, WHOLE_DIGITS, UNetConfig
from deq_zoo.diffusion.options import ChainConfig, InversionConfig
from deq_zoo.diffusion.plan import EXACT
from deq_zoo.diffusion.task import Denoise
from deq_zoo.optim import Adam, Cosine
from deq_zoo.preset import PRESETS, Preset, Target
from torchdeq import DEQConfig

#: The paper's inversion: Anderson per timestep, a phantom gradient of one damped step.
PUBLISHED = DEQConfig(
    f_solver="anderson",
    f_solver_kwargs={"m": 5, "lam": 0.0, "ridge": 1e-3},
    f_max_iter=15,
    f_tol=1e-3,
    grad=[1],
    tau=0.1,
    on_failure="ignore",
)


@PRESETS.register("diffusion-cifar10")
def diffusion_cifar10() -> Preset:
    """Denoiser of 36M parameters on CIFAR-10; inverts with 1000 steps as in the paper."""
    return Preset(
        task=Denoise(
            deq=PUBLISHED,
            chain=ChainConfig(steps=1000, spacing="quad", scope="timestep"),
            inversion=InversionConfig(images=1, steps=1000),
            net=CIFAR10,
            val_images=1000,
            flip=True,
            previews=1,
        ),
        optim=Adam(lr=2e-4),
        clip=1.0,
        steps=800_000,
        log_every=100,
        eval_every=10_000,
        save_every=5_000,
        target=Target("inversion_sse", 0.17, "paper, inversion of CIFAR-10, mean of 100 seeds"),
    )


@PRESETS.register("diffusion-celeba")
def diffusion_celeba() -> Preset:
    """Denoiser of 79M parameters on CelebA, 64 x 64; inverts with 20 steps."""
    return Preset(
        task=Denoise(
            net=CELEBA,
            deq=PUBLISHED,
            chain=ChainConfig(steps=20, scope="timestep"),
            inversion=InversionConfig(images=1, steps=500, lr=0.001),
            data="celeba",
            val_images=500,
            flip=True,
        ),
        optim=Adam(lr=2e-4),
        clip=1.0,
        steps=500_000,
        log_every=100,
        eval_every=10_000,
        save_every=5_000,
    )


@PRESETS.register("diffusion-bedroom")
def diffusion_bedroom() -> Preset:
    """Denoiser of 114M parameters on LSUN bedrooms, 256 x 256; inverts with 10 steps."""
    return _lsun(inversion_steps=2000)


@PRESETS.register("diffusion-church")
def diffusion_church() -> Preset:
    """Denoiser of 114M parameters on LSUN churches, 256 x 256; inverts with 10 steps."""
    return _lsun(inversion_steps=500)


@PRESETS.register("diffusion-quick")
def diffusion_quick() -> Preset:
    """Digits from noise, sampled and inverted in parallel: about two minutes."""
    return Preset(
        task=Denoise(
            net=DIGITS,
            deq=EXACT,
            inversion=InversionConfig(images=4, steps=6, lr=0.02, enough=0.0),
            data="digits",
            val_images=400,
            batch=32,
            decay=0.99,
            prediction="v_prediction",
        ),
        optim=Adam(lr=4e-3, schedule=Cosine(warmup=20)),
        clip=1.0,
        steps=600,
        log_every=20,
        eval_every=100,
    )


@PRESETS.register("diffusion-digits")
def diffusion_digits() -> Preset:
    """Digits of 28 x 28 from noise, of which there are pretrained weights: 85 minutes."""
    return Preset(
        task=Denoise(
            net=WHOLE_DIGITS,
            deq=EXACT,
            inversion=InversionConfig(images=4, steps=10, lr=0.02, enough=0.0),
            data="digits",
            val_images=400,
            batch=64,
            decay=0.998,
            prediction="v_prediction",
        ),
        optim=Adam(lr=2e-3, schedule=Cosine(warmup=100)),
        clip=1.0,
        steps=10000,
        log_every=50,
        eval_every=500,
        save_every=250,
    )


@PRESETS.register("diffusion-smoke")
def diffusion_smoke() -> Preset:
    """A tiny denoiser of discs, for tests: seconds."""
    net = UNetConfig(
        size=8, channels=1, widths=(8, 16), blocks=1, attention=(), dropout=0.0, groups=4
    )
    return Preset(
        task=Denoise(
            net=net,
            deq=EXACT,
            chain=ChainConfig(steps=10),
            inversion=InversionConfig(images=2, steps=2),
            data="blobs",
            val_images=16,
            batch=16,
            decay=0.9,
        ),
        optim=Adam(lr=2e-3),
        steps=8,
        log_every=2,
        save_every=4,
    )


def _lsun(inversion_steps: int) -> Preset:
    return Preset(
        task=Denoise(
            net=LSUN,
            deq=PUBLISHED,
            chain=ChainConfig(steps=10, scope="timestep", chunk=8),
            inversion=InversionConfig(images=1, steps=inversion_steps),
            data="folder",
            val_images=500,
            batch=64,
            decay=0.999,
            eval_images=64,
            previews=1,
        ),
        optim=Adam(lr=2e-5),
        clip=1.0,
        steps=1_000_000,
        log_every=100,
        eval_every=20_000,
        save_every=5_000,
    )
