"""Results for people and files: the perplexity of text files, and a text by the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.writing import Writing
from deq_zoo.output import solve_data
from deq_zoo.predictions import OutFolder, Prediction
from torchdeq import SolverStat

SAMPLE = "sample.txt"  # the file of a text by the model


def scores_name(path: Path) -> str:
    """Return the name of the file with the log-probabilities of a text."""
    return f"{path.stem}.json"


def score_file(model: LanguageModel, path: Path, out: OutFolder) -> Prediction:
    """Return the perplexity of a text file; write its log-probabilities if the user asked.

    Args:
        model: with its tokenizer.
        path: of the text.
        out: where to write.
    """
    result = model.predict(path)
    score, stats = result.prediction, result.stats
    assert stats is not None, "every solve of a language model has statistics"
    data = score.as_data() | solve_data(stats)
    notes = [_doubts(model, stats)]
    if score.unknown_words:
        notes.append(f"{score.unknown_words} of its words are unknown")
    text = f"perplexity {score.perplexity:.4g} over {len(score.log_probs)} tokens"
    line = f"{path}: {'; '.join([text, *filter(None, notes)])}"
    if not out.asked:
        return Prediction(str(path), line, data)
    tokens = {"ids": score.ids.tolist(), "log_probs": score.log_probs.tolist()}
    file = out.write(scores_name(path), json.dumps(data | tokens) + "\n")
    return Prediction(str(path), line, data, (file,))


def stream_text(writing: Writing, out: OutFolder) -> Iterator[Prediction]:
    """Yield a text line by line; at its end write the whole text if the user asked."""
    prompt = writing.options.prompt
    for line in writing:
        yield Prediction(prompt, line, {"line": line})
    if out.asked:
        file = out.write(SAMPLE, writing.text + "\n")
        yield Prediction(prompt, f"written to {file}", {}, (file,))


def _doubts(model: LanguageModel, stats: SolverStat) -> str:
    """Return a warning if the solve of a segment did not reach its tolerance, else ""."""
    failed, total = int(stats.failed.sum()), len(stats.failed)
    if not failed or not model.config.has_fixed_point or not model.has_tolerance:
        return ""
    rows = "segments" if model.config.design != "attractor" else "tokens"
    which = "its solve" if total == 1 else f"the solves of {failed} of its {total} {rows}"
    residual = float(stats["rel_lowest"].max())
    return f"{which} did not settle: relative residual {residual:.1e}"
