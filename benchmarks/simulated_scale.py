"""How much does rank 0 of 8, 64 and 512 send, and what does it hold, in a step of `lm-wt103-ours`?

`python -m benchmarks.simulated_scale` renews `results/simulated_scale.json`, and
`python -m tools.tables` the table of docs/simulated_scale.md. All figures are counts, so a busy
machine gives the same ones as a quiet one. The model has its full size of 98 million parameters and
is sharded by FSDP2 (`fully_shard`), with the DEQ layer, the blocks of f, or the linear maps of f as
units. Beside it is an explicit transformer with as many parameters, sharded by its blocks.

Replaced: the adaptive softmax, whose shapes depend on the data, by a plain one with as many
parameters, taken in blocks of tokens; solves stop after fixed numbers of evaluations and products,
which come from a real run of the same design on a small text. The norm of the weights is off. With
units inside f, each block computes the keys of the memory in its own `forward`, in each evaluation:
FSDP gathers the weights of a unit for its `forward` only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fake_cluster import ClusterMeter, fake_cluster
from benchmarks.help import answer_help
from benchmarks.sharded_language import Language, shard
from benchmarks.storing import RESULTS, store
from deq_zoo.fitting import fit
from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.memory import Memory
from deq_zoo.lm.presets import CONVERGENT, lm_quick, lm_wt103_ours
from deq_zoo.lm.task import LanguageTask
from deq_zoo.task import WHOLE
from torchdeq import DEQConfig

WORLDS = (8, 64, 512)
STREAMS = 7  # of each rank: the preset's 56 divided by 8
#: Implicit gradients for the design, as the counts of the small run have them.
IMPLICIT = CONVERGENT.with_options(
    ift=True, f_max_iter=40, b_solver="gmres", b_max_iter=40, b_tol=1e-3
)


@dataclass(frozen=True)
class Counts:
    """Evaluations and products of a training step, from a real run."""

    evaluations: int
    products: int


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        model: equilibrium or explicit.
        gradient: phantom, implicit, or plain for the explicit model.
        unit: what is gathered at once.
        world: number of processes.
    """

    model: str
    gradient: str
    unit: str
    world: int


def cases() -> Iterator[Case]:
    """Yield every row of the table."""
    for world in WORLDS:
        yield Case("explicit", "plain", "block", world)
        for gradient in ("phantom", "implicit"):
            for unit in ("layer", "block", "linear"):
                if unit != "linear" or gradient == "implicit":
                    yield Case("equilibrium", gradient, unit, world)


def measure_counts(steps: int = 150, batches: int = 8) -> Counts:
    """Return the mean counts of implicit training steps of `lm-quick`, a model of the same design.

    Args:
        steps: updates before the measurement.
        batches: over which the counts are averaged.
    """
    preset = replace(lm_quick(), steps=steps)
    task = preset.task
    assert isinstance(task, LanguageTask)
    trained = fit(preset)
    exact = replace(task, deq=IMPLICIT, ahead=0, consistency=0.0)
    model = exact.build()
    model.load_state_dict(trained.state_dict())
    evaluations, products, carry = list[int](), list[int](), None
    for step in range(batches):
        ids, target, *_ = exact.train_batch(step, 0, WHOLE)
        memory = None if carry is None else Memory(*carry)
        out = model.train()(
            ids, memory=memory, backward_writer=lambda stats: products.append(stats.nfe)
        )
        model.nll(out.z, target).mean().backward()
        evaluations.append(out.stats.nfe)
        carry = (memory or model.empty_memory(out.u)).followed_by(out, exact.memory)
    return Counts(ceil(mean(evaluations)), ceil(mean(products)))


def make_model(case: Case, counts: Counts) -> tuple[Language, int]:
    """Return the model of a case, and its budget of evaluations without a gradient."""
    preset = lm_wt103_ours()
    task = preset.task
    assert isinstance(task, LanguageTask)
    plain = _as_plain_softmax(task.net)
    if case.model == "explicit":
        shape = replace(plain, design="redesigned", blocks=16, inner=_inner_of(plain, 16))
        return Language(shape, DEQConfig(f_max_iter=0, grad=[1], f_tol=0.0, norm_type="none")), 0
    deq = task.deq.with_options(f_tol=0.0, f_stop_mode="abs", norm_type="none")
    if case.gradient == "phantom":
        return Language(plain, deq), task.ahead // 2
    implicit = deq.with_options(
        ift=True, b_solver="gmres", b_max_iter=counts.products, b_tol=0.0, coupled=True,
        f_max_iter=counts.evaluations,
    )  # fmt: skip
    return Language(replace(plain, recompute=False), implicit), counts.evaluations


def _as_plain_softmax(net: LMConfig) -> LMConfig:
    """Return a shape whose one table of vectors has about as many numbers as the clusters."""
    ends = (0, *net.cutoffs, net.tokens)
    sizes = [b - a for a, b in pairwise(ends)]
    numbers = sum(n * (net.width // net.shrink**i) for i, n in enumerate(sizes))
    return replace(net, cutoffs=(), shrink=1, embed=round(numbers / net.tokens))


def _inner_of(net: LMConfig, blocks: int) -> int:
    """Return the hidden features with which more blocks have the parameters of those in `net`."""
    square = 5 * net.width  # columns of the matrices of attention
    return (net.blocks * (square + 2 * net.inner) - blocks * square) // (2 * blocks)


def simulate(case: Case, counts: Counts) -> dict[str, Any]:
    """Return the figures of one training step of rank 0."""
    with fake_cluster(case.world):
        model, budget = make_model(case, counts)
        parameters = sum(p.numel() for p in model.parameters())
        shard(model, case.unit, case.world)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        batch = _batch(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # makes its state
        optimizer.zero_grad(set_to_none=True)
        meter = ClusterMeter(case.world)
        meter.tag("parameters", model.parameters())
        meter.tag("optimiser", _tensors(optimizer.state))
        with meter:
            _step(model, optimizer, batch, budget, meter)
    return {
        **asdict(case),
        "parameters": parameters,
        "evaluations": budget,
        "collectives": dict(meter.collectives),
        "bytes_received": dict(meter.moved),
        "peak_bytes": meter.peak,
    }


def _batch(model: Language) -> tuple[Tensor, Tensor, Memory]:
    task = lm_wt103_ours().task
    assert isinstance(task, LanguageTask)
    ids = torch.zeros(STREAMS, task.length, dtype=torch.long)
    core = model.layer.core
    kept = core.func.memory_states * task.net.width
    memory = Memory(
        torch.zeros(STREAMS, task.memory, kept),
        torch.zeros(STREAMS, task.memory, 3 * task.net.width),
    )
    return ids, ids, memory


def _step(
    model: Language, optimizer: Any, batch: Any, budget: int, meter: ClusterMeter | None = None
) -> None:
    model(*batch, budget).backward()
    if meter is not None:
        meter.tag("gradients", (p.grad for p in model.parameters()), again=True)
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()


def _tensors(state: Any) -> Iterator[Tensor]:
    for values in state.values():
        yield from (t for t in values.values() if isinstance(t, Tensor))


def main() -> None:
    """Measure the counts, simulate every case and write the results."""
    torch.set_num_threads(1)
    counts = measure_counts()
    print(f"counts of lm-quick: {counts}")
    rows = []
    for case in cases():
        rows.append(simulate(case, counts))
        print(json.dumps(rows[-1]), flush=True)
    answers = {"counts": asdict(counts), "rows": rows}
    store(RESULTS / "simulated_scale.json", answers, seeds=[0])  # of lm-quick


if __name__ == "__main__":
    answer_help(__doc__)
    main()
