"""The configuration of a language model in the interface of transformers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedConfig

from deq_zoo.checks import check_integers
from deq_zoo.lm.config import LMConfig
from torchdeq import DEQConfig


class DEQLanguageConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of a `DEQForCausalLM`.

    Args:
        net: the fields of an `LMConfig`.
        deq: the options of the DEQ that differ from their defaults.
        length: tokens of a segment: a longer text is read segment by segment.
        memory: tokens before a segment that the model remembers; 0 for none.
        tokenizer_size: tokens of the tokenizer, among which `generate` chooses; 0 if the tokenizer
            has as many as the model.
        **kwargs: of every configuration.
    """

    model_type = "deq_lm"

    def __init__(
        self,
        net: dict[str, Any] | None = None,
        deq: dict[str, Any] | None = None,
        length: int = 64,
        memory: int = 64,
        tokenizer_size: int = 0,
        **kwargs: Any,
    ) -> None:
        shape = LMConfig(**_as_tuples(net or {}))
        check_integers(1, length=length)
        check_integers(0, memory=memory, tokenizer_size=tokenizer_size)
        if tokenizer_size > shape.tokens:
            raise ValueError(
                f"the tokenizer has {tokenizer_size} tokens (tokenizer_size), and the model has "
                f"room for {shape.tokens}"
            )
        sizes = _sizes(shape, length + memory)
        for name, value in sizes.items():
            if kwargs.get(name, value) != value:
                raise ValueError(
                    f"{name}={kwargs[name]} differs from the {value} that net, length and memory "
                    f"give: drop {name}, or change these"
                )
        options = DEQConfig(**(deq or {}))
        self.net = {**asdict(shape), "cutoffs": list(shape.cutoffs)}
        self.deq = {name: getattr(options, name) for name in sorted(options.given)}
        self.length, self.memory, self.tokenizer_size = length, memory, tokenizer_size
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**(kwargs | sizes))

    @property
    def padding_id(self) -> int:
        """Return the id of padding, the first after those of the tokenizer."""
        size: int = self.tokenizer_size or self.vocab_size
        return size

    @property
    def shape(self) -> LMConfig:
        """Return the shape of the model."""
        return LMConfig(**_as_tuples(self.net))


def _sizes(shape: LMConfig, positions: int) -> dict[str, int]:
    """Return the sizes by the names that every configuration of transformers has."""
    explicit = shape.backbone if shape.design == "attractor" else 0
    return {
        "vocab_size": shape.tokens,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": explicit + shape.blocks,
        "max_position_embeddings": positions,
    }


def _as_tuples(net: dict[str, Any]) -> dict[str, Any]:
    """Return fields of an `LMConfig` with lists, which JSON has, as tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in net.items()}
