"""Checks of the arguments of a language model in the interface of transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deq_zoo.finite import find_not_finite
from deq_zoo.lm.hugging_face_cache import EquilibriumCache
from deq_zoo.lm.language_model import LanguageModel

#: Arguments of other models that follow from the tokens, their mask and the cache.
_POSITIONS = ("position_ids", "cache_position")
#: Arguments of `generate` that transformers passes on.
_PASSED_ON = {"tokenizer", "assistant_tokenizer"}


def check_texts(
    ids: Tensor, mask: Tensor | None, past: EquilibriumCache | None, labels: Tensor | None
) -> None:
    """Raise `ValueError` for shapes that are not those of texts, their mask and their labels."""
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(
            f"input_ids must have the shape (texts, tokens) and a token at least, got shape "
            f"{tuple(ids.shape)}"
        )
    seen = 0 if past is None else past.get_seq_length()
    expected = (ids.shape[0], seen + ids.shape[1])
    if mask is not None and tuple(mask.shape) != expected:
        raise ValueError(
            f"attention_mask must have the shape {expected}, of the texts with the {seen} tokens "
            f"in the cache, got {tuple(mask.shape)}"
        )
    if mask is not None and not bool((mask != 0).any(dim=1).all()):
        raise ValueError("attention_mask has only 0 for a text: a text needs a token")
    if labels is not None and labels.shape != ids.shape:
        raise ValueError(
            f"labels must have the shape of input_ids, {tuple(ids.shape)}, got "
            f"{tuple(labels.shape)}"
        )


def check_cache(cache: object, model: LanguageModel) -> None:
    """Raise an error for a cache that another model has made."""
    if cache is None:
        return
    if not isinstance(cache, EquilibriumCache):
        raise TypeError(
            f"past_key_values must be an EquilibriumCache, got {type(cache).__name__}: use the one "
            "that the model returns with use_cache=True"
        )
    if cache.model is not model:
        raise ValueError("past_key_values is the cache of another model: begin a new one")


def check_labels(labels: Tensor | None, tokens: int) -> None:
    """Raise `ValueError` for labels that are neither tokens nor -100."""
    if labels is None:
        return
    wrong = (labels != -100) & ((labels < 0) | (labels >= tokens))
    if bool(wrong.any()):
        raise ValueError(
            f"labels must lie in [0, {tokens}), or be -100 where there is no score, got "
            f"{int(labels[wrong][0])}"
        )


def check_padding(padding: Tensor, mask: Tensor | None) -> None:
    """Raise `ValueError` for padding (B, L) that a model would read as a token.

    `generate` goes on with padding after the end of a text, where the mask has 1: it is allowed as
    long as no token comes after it.
    """
    if not bool(padding.any()):
        return
    if mask is None:
        raise ValueError("input_ids has padding, and there is no attention_mask: pass one")
    read = padding & (mask[:, -padding.shape[1] :] != 0)
    if bool((read[:, :-1] & ~padding[:, 1:]).any()):
        raise ValueError(
            "input_ids has padding before a token where attention_mask has 1: set the mask to 0 at "
            "padding, and keep the padding token out of texts"
        )


def check_whole(model: nn.Module, report: dict[str, Any], source: object) -> None:
    """Raise `ValueError` if a loaded model has not exactly the weights of its file, all finite.

    Args:
        model: the model.
        report: what transformers says about loading it.
        source: the name of the folder.
    """
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, report.get(what) or ()))
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"the weights of {source} do not fit its config.json: {what.replace('_', ' ')} "
                f"{names[0]}{more}"
            )
    name = find_not_finite(model)
    if name is not None:
        raise ValueError(f"{name} in {source} holds NaN or infinity: its answers mean nothing")


def check_positions(others: dict[str, Any], ids: Tensor, mask: Tensor | None) -> None:
    """Raise `ValueError` for positions of two texts in a row, which a model would read as one."""
    for name in _POSITIONS:
        positions = others.get(name)
        if positions is None:
            continue
        try:
            steps = positions.expand_as(ids).diff(dim=1)
        except RuntimeError:
            raise ValueError(
                f"{name} must have the shape of input_ids, {tuple(ids.shape)}, got "
                f"{tuple(positions.shape)}"
            ) from None
        if mask is not None:
            read = mask[:, -ids.shape[1] :] != 0
            steps = steps.where(read[:, 1:] & read[:, :-1], 1)
        if bool((steps != 1).any()):
            raise ValueError(
                f"{name} must rise by 1 from token to token, as in one text: several texts in a "
                "row of input_ids would see each other, so put each in a row of its own"
            )


def check_arguments(others: dict[str, Any]) -> None:
    """Raise `ValueError` for arguments that are set and that these models do not have."""
    for name, value in others.items():
        if name not in _PASSED_ON.union(_POSITIONS) and value is not None and value is not False:
            raise ValueError(
                f"{name} has no effect on a DEQForCausalLM, which takes input_ids and returns "
                f"logits, a loss and a cache: drop {name}"
            )
