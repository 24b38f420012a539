"""The command `sample`: images from noise, in one picture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deq_zoo.diffusion.grid import as_png, montage
from deq_zoo.diffusion.options import Sampling
from deq_zoo.diffusion.plan import ChainPlan, draw_noise
from deq_zoo.diffusion.sampling import parallel_sample
from deq_zoo.errors import ZooError
from deq_zoo.output import unsettled
from deq_zoo.predictions import OutFolder, Prediction
from torchdeq import ConvergenceError, StopRule
from torchdeq.registry import suggest
from torchdeq.solver import SOLVERS, make_solver

_COLUMNS = 8
_SEQUENTIAL = "sequential"


def sample_images(model: Any, options: Sampling, out: OutFolder) -> Prediction:
    """Sample images and write them as one PNG file."""
    if options.solver != _SEQUENTIAL and options.solver not in SOLVERS:
        hint = suggest(options.solver, [*SOLVERS, _SEQUENTIAL])
        raise ZooError(f"unknown solver {options.solver!r}{hint}")
    name = f"samples-{options.seed}.png"
    out.check([name])
    try:
        images, summary, data = _sample(model, options)
    except (ValueError, NotImplementedError, ConvergenceError) as error:
        raise ZooError(f"cannot sample: {error}") from error
    if not bool(images.isfinite().all()):
        raise ZooError("cannot sample: the chain of the model is not finite")
    path = out.write(name, as_png(montage(images, _COLUMNS)))
    text = f"{options.n} images in {path}: {summary}"
    return Prediction(f"seed {options.seed}", text, {"images": options.n, **data}, (path,))


@torch.no_grad()
def _sample(model: Any, options: Sampling) -> tuple[Tensor, str, dict[str, Any]]:
    plan: ChainPlan = model.plan
    plan = replace(plan, chain=replace(plan.chain, steps=options.steps, eta=options.eta))
    chain, size = plan.make_chain(model), model.config.size
    shape = (options.n, model.config.channels, size, size)
    x, noise = draw_noise(chain, shape, options.seed, model)
    if options.solver == _SEQUENTIAL:
        rounds = len(chain)
        return chain.sequential(x, noise), f"{rounds} rounds", {"rounds": rounds}
    same = options.solver == plan.deq.f_solver
    trajectory = parallel_sample(
        chain,
        x,
        noise,
        solver=make_solver(options.solver, plan.deq.f_solver_kwargs if same else {}),
        # More than plain iteration needs; a window spends several rounds before it slides.
        stop=StopRule((8 if options.window else 2) * (len(chain) + 5), options.tol, "rel"),
        window=options.window,
        on_failure=plan.deq.on_failure,
    )
    work, stats = trajectory.work, trajectory.stats
    residual = float(stats["rel_lowest"].max())
    summary = (
        f"{work.rounds} rounds instead of {len(chain)}, {work.evaluations} evaluations of the "
        f"network, relative residual {residual:.1e}"
    )
    if warning := unsettled(stats):
        summary += f"; {warning}"
    data = {"rounds": work.rounds, "evaluations": work.evaluations, "residual": residual}
    return trajectory.image, summary, data | {"settled": not warning}
