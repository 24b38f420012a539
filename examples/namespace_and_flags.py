"""The options of a DEQ on the command line of a program that has options of its own.

python examples/namespace_and_flags.py --width 32 --f_solver broyden --f_opt l_thres=20 --ift
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from torchdeq import add_deq_args, apply_norm, fp_correction, get_deq, reset_deq


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=16)
    add_deq_args(parser)
    parser.set_defaults(f_solver="anderson", n_states=2)  # defaults of this program
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    layer = nn.Linear(args.width, args.width)
    apply_norm(layer, args=args)  # reads --norm_type, --norm_clip, ...
    deq = get_deq(args)  # reads the other options; --width is not one
    print(deq)
    x, target = torch.randn(2, 4, args.width)
    reset_deq(layer)
    states, stats = deq(lambda z: torch.tanh(layer(z) + x), torch.zeros_like(x))
    loss = fp_correction(nn.functional.mse_loss, (states, target), gamma=args.gamma)
    loss.backward()
    print(f"{len(states)} states, loss {loss:.3f}; {stats.summary()}")


if __name__ == "__main__":
    main()
