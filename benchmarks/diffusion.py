"""Is it worth solving a sampling chain as one equilibrium, and which gradient inverts best?

Three questions, each with a table. `sampling`: sequential chain beside plain iteration, Anderson
and Broyden, whole and in a window, by the number of steps: rounds, evaluations, time, error.
`inversion`: twenty images at once by the exact gradient, the paper's phantom gradient, the chain
step by step, and the scheme of the authors' release. `memory`: a chain of 1000 steps of the
CIFAR-10 denoiser in a process of its own.

Times are the processor's: the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.storing import results_file, store_part
from deq_zoo.diffusion import Adjoint, ParallelChain, invert, make_unet, parallel_sample
from deq_zoo.diffusion.data import scaled
from deq_zoo.diffusion.model import CIFAR10
from deq_zoo.diffusion.package import diffusers
from deq_zoo.images.mnist import digits_table
from deq_zoo.loading import open_model
from torchdeq import Phantom, StopRule
from torchdeq.solver import Anderson

NAME = "diffusion"


@dataclass(frozen=True)
class Size:
    """The amount of work of each part."""

    steps: tuple[int, ...] = (50, 200, 1000)
    images: int = 2
    row_seconds: float = 150.0
    inverted: int = 20
    chain: int = 50
    adam_steps: int = 50
    inversion_seconds: float = 300.0
    memory_steps: int = 1000
    memory_rounds: int = 2


SMALL = Size(
    steps=(20,), images=2, row_seconds=30.0, inverted=2, chain=10, adam_steps=4,
    inversion_seconds=30.0, memory_steps=20, memory_rounds=2,
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A denoiser with its scheduler and images."""

    name: str
    unet: nn.Module
    scheduler: Any
    images: Tensor  # not trained on, in [-1, 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the questions")
    parser.add_argument("--run", type=Path, help="a run of diffusion-quick")
    parser.add_argument("--data-dir", type=Path, help="folder with ddpm_mnist/")
    parser.add_argument("--small", action="store_true", help="a minute or two, to try it out")
    parser.add_argument("--measure-memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = SMALL if args.small else Size()
    if args.measure_memory:
        print(json.dumps(measure_memory(size)))
        return
    file = results_file(NAME, args.small)
    for name in [args.only] if args.only else list(PARTS):
        rows = []
        for row in PARTS[name](size, args):
            rows.append(row)
            print("  ".join(f"{key} {_show(value)}" for key, value in row.items()), flush=True)
            # At once: a later part may fail.
            store_part(file, name, {"rows": rows}, seeds=[0])


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def models(args: argparse.Namespace) -> Iterator[Model]:
    """Yield the models of the command line: a trained run, a third party's denoiser of MNIST."""
    if args.run is None and args.data_dir is None:
        raise SystemExit(
            "give --run RUN of diffusion-quick, --data-dir DIR with ddpm_mnist/, or both"
        )
    if args.run is not None:
        model, preset = open_model(args.run)
        tests = preset.task.test_set
        images = tests.take(torch.arange(min(100, len(tests))))
        yield Model("digits", model, model.plan.scheduler, images)  # type: ignore[union-attr]
    if args.data_dir is not None:
        (path,) = args.data_dir.rglob("ddpm_mnist_unet.npz")
        unet = MNISTDenoiser(path).eval()
        yield Model("ddpm_mnist", unet, diffusers().DDIMScheduler(clip_sample=False), full_digits())


def full_digits() -> Tensor:
    """Return digits in their own size, 28 x 28."""
    table = digits_table()[::50, :-1]
    return scaled(torch.from_numpy(table.reshape(-1, 1, 28, 28)))


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return run(), time.process_time() - began


class OutOfTime(Exception):
    """A row of a table has spent its time."""


def sampling(size: Size, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for every way of solving the chain, from the same noise."""
    ways: dict[str, dict[str, Any]] = {
        "plain": {"solver": "fixed_point_iter"},
        "plain, window": {"solver": "fixed_point_iter", "window": -1},
        "anderson": {"solver": "anderson"},
        "anderson per timestep": {"solver": "anderson", "scope": "timestep"},
        "broyden": {"solver": "broyden"},
    }
    for model in models(args):
        for T in size.steps:
            x = torch.randn(
                size.images, *model.images.shape[1:], generator=torch.Generator().manual_seed(0)
            )
            chain = ParallelChain(model.unet, model.scheduler, T)
            with torch.no_grad():
                exact, seconds = timed(lambda: chain.sequential(x))  # noqa: B023
            common = {"model": model.name, "steps": T, "images": size.images}
            yield {
                **common, "way": "sequential", "rounds": T, "evaluations": T * size.images,
                "seconds": seconds, "error": 0.0,
            }  # fmt: skip
            for name, way in ways.items():
                row = _solve(model, T, x, exact, way, size.row_seconds)
                yield {**common, "way": name, **row}


def _solve(
    model: Model, T: int, x: Tensor, exact: Tensor, way: dict[str, Any], limit: float
) -> dict[str, Any]:
    chain = ParallelChain(model.unet, model.scheduler, T, scope=way.get("scope", "trajectory"))
    window = max(1, T // 5) if way.get("window") else 0
    began, rounds = time.process_time(), 0

    def watch(k: int, residual: float) -> None:
        nonlocal rounds
        rounds = k
        if time.process_time() - began > limit:
            raise OutOfTime

    try:
        with torch.no_grad():
            trajectory = parallel_sample(
                chain, x, solver=way["solver"], stop=StopRule(2 * T + 10, 1e-4, "rel"),
                window=window, on_failure="ignore", progress=watch,
            )  # fmt: skip
    except OutOfTime:
        return {"rounds": rounds, "seconds": limit, "error": "out of time"}
    return {
        "rounds": trajectory.work.rounds,
        "evaluations": trajectory.work.evaluations,
        "seconds": time.process_time() - began,
        "error": float((trajectory.image - exact).norm() / exact.norm()),
        "converged": int(trajectory.stats.converged.sum()),
    }


def inversion(size: Size, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield errors after equal numbers of Adam's steps, and the time to the release's error.

    The first model of the command line is used. The learning rate of the exact gradient was chosen
    among 0.005, 0.02 and 0.05 on five other digits that the model was not trained on.
    """
    few = StopRule(15, 1e-3, "rel")
    schemes: dict[str, dict[str, Any]] = {
        "release": {
            "method": "phantom", "keep_states": False, "scope": "timestep", "lr": 0.005,
            "solver": Anderson(m=5, lam=0.0, ridge=1e-3), "stop": StopRule(15, 1e-3),
            "phantom": Phantom(tau=0.1),
        },
        "phantom": {"method": "phantom", "lr": 0.005, "stop": few},
        "implicit": {"method": "implicit", "lr": 0.02, "stop": few},
        "implicit, parallel adjoint": {
            "method": "implicit", "lr": 0.02, "stop": few, "adjoint": Adjoint(window=10, tol=1e-3),
        },
        "sequential": {"method": "sequential", "lr": 0.02},
    }  # fmt: skip
    schemes["release, rate 0.02"] = {**schemes["release"], "lr": 0.02}
    model = next(models(args))
    x = model.images[-size.inverted :]
    goal: float | None = None
    for name, scheme in schemes.items():
        row = _invert(model, x, scheme, size)
        curve = row.pop("curve")
        goal = curve[-1][1] if goal is None else goal  # the release comes first
        row["seconds_to_release"] = next((s for s, e in curve if e <= goal), None)
        yield {"model": model.name, "images": len(x), "scheme": name, **row, "curve": curve}


def _invert(model: Model, x: Tensor, scheme: dict[str, Any], size: Size) -> dict[str, Any]:
    options = {k: v for k, v in scheme.items() if k != "scope"}
    chain = ParallelChain(
        model.unet, model.scheduler, size.chain, scope=scheme.get("scope", "trajectory")
    )
    began, curve = time.process_time(), []
    best = torch.full((len(x),), torch.inf)

    def watch(k: int, sse: Tensor) -> bool:
        nonlocal best
        best = torch.minimum(best, sse)
        spent = time.process_time() - began
        curve.append((round(spent, 2), float(best.mean())))
        return spent > size.inversion_seconds

    if not options.get("keep_states", True):  # as released: solves start from the encoded noise
        options["x"] = chain.encode(x)
        options["z0"] = options["x"][:, None].expand(-1, len(chain), -1, -1, -1)
    result = invert(chain, x, steps=size.adam_steps, each=watch, **options)
    with torch.no_grad():
        again = (chain.sequential(result.noise) - x).square().sum(dim=(1, 2, 3))
    return {
        "sse": float(result.sse.mean()),
        "sse_of_the_chain": float(again.mean()),
        "psnr": float(result.psnr.mean()),
        "adam_steps": len(result.history),
        "seconds": curve[-1][0],
        "rounds": result.work.rounds,
        "evaluations": result.work.evaluations,
        "curve": curve,
    }


def memory(size: Size, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure in a process of its own: freed memory stays resident."""
    words = [sys.executable, "-m", "benchmarks.diffusion", "--measure-memory"]
    words += ["--small"] if args.small else []
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    yield json.loads(out.strip().splitlines()[-1])


def measure_memory(size: Size) -> dict[str, Any]:
    """Measure some rounds of a long chain of the CIFAR-10 denoiser, with Anderson's history."""
    torch.manual_seed(0)
    scheduler = diffusers().DDIMScheduler(clip_sample=False)
    chain = ParallelChain(make_unet(CIFAR10).eval(), scheduler, size.memory_steps, chunk=32)
    before = _resident()
    with torch.no_grad():
        trajectory, seconds = timed(
            lambda: parallel_sample(
                chain, torch.randn(1, 3, 32, 32), on_failure="ignore",
                stop=StopRule(size.memory_rounds, None),
            )
        )  # fmt: skip
    return {
        "steps": size.memory_steps,
        "rounds": trajectory.work.rounds,
        "seconds": seconds,
        "resident_before_gb": before,
        "peak_gb": _resident(),
    }


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


PARTS = {"sampling": sampling, "inversion": inversion, "memory": memory}


class MNISTDenoiser(nn.Module):
    """A third party's noise predictor of 28 x 28 digits, from its arrays."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                key = name.removeprefix("network.").replace(".", "_")
                self.register_buffer(key, torch.from_numpy(arrays[name]))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        e = F.embedding(t, self.get_buffer("time_embed_weight"))
        o1 = self._level("b1", x + self._time("te1", e))
        o2 = self._level("b2", self._conv("down1", o1, 2) + self._time("te2", e))
        o3 = self._level("b3", self._conv("down2", o2, 2) + self._time("te3", e))
        low = self._conv("down3_2", F.silu(self._conv("down3_0", o3, pad=0)), 2)
        m = self._level("b_mid", low + self._time("te_mid", e))
        up = self._up("up1_2", F.silu(self._up("up1_0", m, 2)), pad=0)
        o4 = self._level("b4", torch.cat((o3, up), 1) + self._time("te4", e))
        o5 = self._level("b5", torch.cat((o2, self._up("up2", o4, 2)), 1) + self._time("te5", e))
        o = torch.cat((o1, self._up("up3", o5, 2)), 1) + self._time("te_out", e)
        return self._conv("conv_out", self._level("b_out", o), pad=1)

    def _get(self, name: str) -> tuple[Tensor, Tensor]:
        weight: Tensor = getattr(self, f"{name}_weight")
        bias: Tensor = getattr(self, f"{name}_bias")
        return weight, bias

    def _time(self, name: str, e: Tensor) -> Tensor:
        hidden = F.silu(F.linear(e, *self._get(f"{name}_0")))
        return F.linear(hidden, *self._get(f"{name}_2"))[:, :, None, None]

    def _conv(self, name: str, x: Tensor, stride: int = 1, pad: int = 1) -> Tensor:
        return F.conv2d(x, *self._get(name), stride=stride, padding=pad)

    def _up(self, name: str, x: Tensor, stride: int = 1, pad: int = 1) -> Tensor:
        return F.conv_transpose2d(x, *self._get(name), stride=stride, padding=pad)

    def _level(self, name: str, x: Tensor) -> Tensor:
        for i in range(3):
            block = f"{name}_{i}"
            if block != "b_out_2" and hasattr(self, f"{block}_ln_weight"):
                x = F.layer_norm(x, x.shape[1:], *self._get(f"{block}_ln"))
            x = F.silu(self._conv(f"{block}_conv1", x))
            x = F.silu(self._conv(f"{block}_conv2", x))
        return x


if __name__ == "__main__":
    main()
