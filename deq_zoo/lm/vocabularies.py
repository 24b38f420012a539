"""Which tokenizer a model reads with: its own, or that of the training text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deq_zoo.errors import DataError
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.tokens import Tokenizer, Words

if TYPE_CHECKING:
    from deq_zoo.lm.task import LanguageTask


def find_vocabulary(task: LanguageTask, model: LanguageModel) -> Tokenizer:
    """Return the tokenizer of a model; one without gets that of the training text.

    Released weights come without. The model's own tokenizer wins over that of the data, since the
    same words have other ids in the vocabulary of another text.
    """
    lexicon = model.lexicon
    if lexicon.tokenizer is None and not (task.data == "wikitext" and task.data_dir is None):
        tokenizer = task.corpus.tokenizer
        if isinstance(tokenizer, Words) and tokenizer.size != task.net.tokens:
            raise DataError(
                f"these weights came without their {task.net.tokens} words, and {task.data_dir} "
                f"has {tokenizer.size}: name the folder of the text they were trained with, or set "
                "model.lexicon.tokenizer"
            )
        lexicon.adopt(tokenizer)
    return lexicon.require()
