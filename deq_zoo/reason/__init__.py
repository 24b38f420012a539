"""Reasoners: small recursive models that solve puzzles (HRM, TRM and EqR)."""

from typing import TYPE_CHECKING

from deq_zoo.lazy import lazy_names

if TYPE_CHECKING:
    from deq_zoo.reason.config import (
        EQR_MAZE,
        EQR_SUDOKU,
        HRM,
        TRM_ATTENTION,
        TRM_MLP,
        ReasonConfig,
    )
    from deq_zoo.reason.core import Core, States
    from deq_zoo.reason.inference import Answer, find_answers, open_search
    from deq_zoo.reason.model import Reasoner
    from deq_zoo.reason.optim import AdamATan2, ATan2
    from deq_zoo.reason.prediction import SolvedPuzzle
    from deq_zoo.reason.search import Search
    from deq_zoo.reason.sides import for_side

__all__ = [
    "EQR_MAZE",
    "EQR_SUDOKU",
    "HRM",
    "TRM_ATTENTION",
    "TRM_MLP",
    "ATan2",
    "AdamATan2",
    "Answer",
    "Core",
    "ReasonConfig",
    "Reasoner",
    "Search",
    "SolvedPuzzle",
    "States",
    "find_answers",
    "for_side",
    "open_search",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ATan2": "optim",
        "AdamATan2": "optim",
        "Answer": "inference",
        "Core": "core",
        "EQR_MAZE": "config",
        "EQR_SUDOKU": "config",
        "HRM": "config",
        "ReasonConfig": "config",
        "Reasoner": "model",
        "Search": "search",
        "SolvedPuzzle": "prediction",
        "States": "core",
        "TRM_ATTENTION": "config",
        "TRM_MLP": "config",
        "find_answers": "inference",
        "for_side": "sides",
        "open_search": "inference",
    },
)
