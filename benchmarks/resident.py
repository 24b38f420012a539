"""How much the resident size of a process grows in a forward and backward pass.

Started as `python -m benchmarks.resident CASE METHOD`, a process of its own for every number, as
memory once freed stays resident. What is loaded on first use comes first: the method on a small
case, and one step of the case itself.
"""

from __future__ import annotations

import resource
import sys

import torch

from benchmarks import ours
from benchmarks.gradients import GradientBench, cotangent, trainable


def main(case: str, method: str) -> None:
    """Print the growth in bytes."""
    torch.set_num_threads(1)
    bench = GradientBench(ours)
    bench.backpropagate("mlp", method)
    problem = trainable(case)
    z = ours.phantom(problem.f, problem.z0, 1)
    torch.autograd.grad(z, problem.weights, cotangent(case))
    del z
    before = _highest()
    bench.backpropagate(case, method)
    print(_highest() - before)


def _highest() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


if __name__ == "__main__":
    main(*sys.argv[1:])
