"""The answer to `--help` of a benchmark that takes no arguments."""

from __future__ import annotations

import argparse


def answer_help(description: str | None) -> None:
    """Print the description and end if the command line asks for help; refuse other arguments."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=description, formatter_class=form).parse_args()
