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

    The library looks up the names of solvers, norms, cores and backwards only when it uses them, so
    a name registered after this call parses, too. Pass the parsed arguments to `get_deq(args)`.
    `--no-ift` switches an option off again that another default or an earlier flag has set.
    """
    metadata = {f.name: f.metadata for f in fields(DEQConfig)}
    for name, value in DEQConfig.defaults().items():
        help, flag = metadata[name]["help"], metadata[name]["flag"].get("name", name)
        settings: dict[str, Any] = {"dest": name, "default": value}
        names = [f"--{flag}", *(f"--{old}" for old, new in OLD_NAMES.items() if new == name)]
        if isinstance(value, bool):
            settings["action"] = "store_true"
        elif isinstance(value, dict):
            settings |= {"nargs": "+", "action": _Assign, "metavar": "NAME=VALUE"}
        elif isinstance(value, list):
            settings |= {"nargs": "+", "type": int, "metavar": "N"}
            help += f" (default: {' '.join(map(str, value)) or 'none'})"
        elif value is None:
            parse = metadata[name]["parse"]
            words = metadata[name]["flag"].get("metavar")  # of an option that is no number
            settings |= {"type": parse, "metavar": words or "FLOAT"}
            help += f" (default: {'auto' if words else 'none'})"
        else:
            kind = metadata[name]["parse"] or type(value)
            settings |= {"type": kind, "metavar": type(value).__name__.upper()}
            help += f" (default: {value})"
        parser.add_argument(*names, **settings, help=help)
        if isinstance(value, bool):
            settings["action"] = "store_false"
            parser.add_argument(f"--no-{flag}", **settings, help=argparse.SUPPRESS)


class _Assign(argparse.Action):
    """An action that collects `name=value` pairs in a dict; a value that is no literal is text."""

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
