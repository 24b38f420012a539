"""The options as flags of a command line."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torchdeq.compat.names import OLD_NAMES
from torchdeq.config import DEQConfig


def add_deq_args(parser: argparse._ActionsContainer) -> None:
    """Add every option to a parser, e.g. `--f_solver anderson --f_max_iter 30 --ift`.

    The library looks names of solvers, norms, cores and backwards up when it uses them, so a name
    registered after this call parses too. Pass the parsed arguments to `get_deq(args)`.
    """
    metadata = {f.name: f.metadata for f in fields(DEQConfig)}
    for name, value in DEQConfig.defaults().items():
        help, flag = metadata[name]["help"], metadata[name]["flag"].get("name", name)
        how: dict[str, Any] = {"dest": name, "default": value}
        names = [f"--{flag}", *(f"--{old}" for old, new in OLD_NAMES.items() if new == name)]
        if isinstance(value, bool):
            how["action"] = "store_true"
        elif isinstance(value, dict):
            how |= {"nargs": "+", "action": _Assign, "metavar": "NAME=VALUE"}
        elif isinstance(value, list):
            how |= {"nargs": "+", "type": int, "metavar": "N"}
            help += f" (default: {' '.join(map(str, value)) or 'none'})"
        elif value is None:
            parse = metadata[name]["parse"]
            words = parse is not float
            how |= {"type": parse, "metavar": "auto|true|false|adjoint" if words else "FLOAT"}
            help += f" (default: {'auto' if words else 'none'})"
        else:
            how |= {"type": type(value), "metavar": type(value).__name__.upper()}
            help += f" (default: {value})"
        parser.add_argument(*names, **how, help=help)


class _Assign(argparse.Action):
    """An action that collects `name=value` pairs in a dict; values are literals, or words."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        pairs = dict(getattr(namespace, self.dest, None) or {})
        for text in values or ():
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise argparse.ArgumentError(self, f"expected NAME=VALUE, got {text!r}")
            try:
                pairs[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                pairs[name] = value
        setattr(namespace, self.dest, pairs)
