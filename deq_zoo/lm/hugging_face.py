"""Language models of the zoo where people load language models: Hugging Face transformers.

Importing this module tells `AutoConfig` and `AutoModelForCausalLM` about them. Folders are read and
written without a network.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationConfig,
        GenerationMixin,
        LogitsProcessorList,
        PreTrainedModel,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    from deq_zoo.errors import MissingPackage
    from deq_zoo.packages import install

    raise MissingPackage(
        f"models in Hugging Face form need transformers: {install('transformers')} ({error})"
    ) from None

from deq_zoo.errors import ZooError
from deq_zoo.lm.build import build_model
from deq_zoo.lm.hugging_face_cache import EquilibriumCache, check_no_holes, padding_before
from deq_zoo.lm.hugging_face_checks import (
    check_arguments,
    check_cache,
    check_labels,
    check_padding,
    check_positions,
    check_texts,
    check_whole,
)
from deq_zoo.lm.hugging_face_config import DEQLanguageConfig
from deq_zoo.lm.hugging_face_tokens import OnlyTokens, SilentLexicon, as_fast_tokenizer
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.memory import Memory
from deq_zoo.loading import load


class DEQForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A language model of the zoo in the interface of transformers.

    Logits are log-probabilities. A text is read in segments, as evaluation in the zoo reads it.
    With `use_cache` the texts of a batch grow token by token; a design with a fixed point solves
    only for the new tokens then. Logits with a cache are those without one, up to the tolerance of
    the solves. So are those with padding, on either side, and those without.

    Args:
        config: the configuration.
    """

    config_class = DEQLanguageConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules: ClassVar[list[str]] = []

    def __init__(self, config: DEQLanguageConfig) -> None:
        super().__init__(config)
        self.model: LanguageModel = build_model(config.shape, config.deq)
        self.model.facts = {"length": config.length, "memory": config.memory}
        self.model.lexicon = SilentLexicon()
        self.post_init()

    @classmethod
    def from_zoo(cls, source: str | Path | LanguageModel) -> DEQForCausalLM:
        """Return a model of the zoo, with copies of its weights.

        Args:
            source: a run folder, a checkpoint file, or a model that `deq_zoo.load` has returned.
        """
        own = source if isinstance(source, LanguageModel) else load(source)
        if not isinstance(own, LanguageModel):
            raise ZooError(f"{source} is no language model, but a {type(own).__name__}")
        options = own.deq.config
        # Nobody sees the statistics here, so solves that fail must warn.
        deq = {name: getattr(options, name) for name in options.given if name != "on_failure"}
        sizes = {name: own.facts[name] for name in ("length", "memory") if name in own.facts}
        tokenizer = own.lexicon.tokenizer
        tokenizer_size = 0 if tokenizer is None else tokenizer.size
        model = cls(
            DEQLanguageConfig(
                net=asdict(own.config), deq=deq, tokenizer_size=tokenizer_size, **sizes
            )
        )
        model.to(own.dtype).eval()
        state = {k: v for k, v in own.state_dict().items() if not k.endswith("_extra_state")}
        model.model.load_state_dict(state)
        model.model.lexicon.tokenizer = tokenizer
        return model

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the model of a folder, as every model of transformers does.

        Raises:
            ValueError: if the folder lacks a weight, has one that the configuration has no place
                for, or one with NaN or infinity.
        """
        wanted = kwargs.pop("output_loading_info", False)
        model, report = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        check_whole(model, report, source)
        return (model, report) if wanted else model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: EquilibriumCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits, and the loss of labels.

        Args:
            input_ids: (B, L) tokens; with a cache, the tokens after those in it.
            attention_mask: (B, L), 0 for padding at the beginning or the end of a text; with a
                cache, it includes the tokens there.
            past_key_values: the cache of the tokens before.
            labels: (B, L) tokens, as `input_ids`; -100 is not scored.
            use_cache: return a cache with these tokens, too. A cache has no gradient, so there is
                none in training and none beside a loss.
            logits_to_keep: return the logits of the last so many positions; 0 of all. A tensor has
                the positions themselves.
            num_items_in_batch: the number by which the sum of losses is divided; by default the
                number of scored labels.
            return_dict: False returns a tuple.
            **others: `position_ids` and `cache_position` follow from the mask and the cache, and
                other ones are an error; so is any other argument of transformers that is set.
        """
        check_arguments(others)
        check_cache(past_key_values, self.model)
        check_texts(input_ids, attention_mask, past_key_values, labels)
        check_positions(others, input_ids, attention_mask)
        check_labels(labels, self.config.vocab_size)
        padding = input_ids == self.config.padding_id
        check_padding(padding, attention_mask)
        # Padding may have an id beyond the vocabulary. It has no effect: any token can stand there.
        input_ids = input_ids.masked_fill(padding, 0)
        wanted = use_cache and labels is None and not self.training
        cached = past_key_values is not None or bool(wanted)
        if labels is not None and past_key_values is not None:
            raise ValueError("a loss needs the whole text: pass labels without past_key_values")
        if cached:
            if past_key_values is None:
                sizes = self.config.memory, self.config.length
                past_key_values = EquilibriumCache(self.model, *sizes)
            z = past_key_values.advance(input_ids, attention_mask)
        else:
            z = self._read_padded(input_ids, attention_mask)
        loss = None
        if labels is not None:
            loss = self._loss(z, labels, attention_mask, num_items_in_batch)
        if isinstance(logits_to_keep, Tensor):
            z = z[:, logits_to_keep]
        elif logits_to_keep:
            z = z[:, -logits_to_keep:]
        # A decoder has no gradient: that of the vocabulary alone would look like a whole one.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not cached):
            logits = self.model.log_prob(z)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        use_tuple = not (self.config.return_dict if return_dict is None else return_dict)
        return out.to_tuple() if use_tuple else out

    def _read_padded(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return states (B, L, D); the text of each row begins at the first position.

        No token depends on later ones, so padding at the end of a row has no effect.
        """
        if mask is not None:
            check_no_holes(mask)
        if mask is None or bool((mask[:, 0] != 0).all()):
            return self._read(ids)
        shift = padding_before(mask)[:, None]
        order = torch.arange(ids.shape[1], device=ids.device)
        z = self._read(ids.gather(1, (order + shift) % ids.shape[1]))
        back = (order - shift) % ids.shape[1]
        return z.gather(1, back[..., None].expand(-1, -1, z.shape[2]))

    def _read(self, ids: Tensor) -> Tensor:
        """Return states (B, L, D) of texts, read segment by segment."""
        states: list[Tensor] = []
        memory: Memory | None = None
        most = self.config.memory
        for piece in ids.split(self.config.length, dim=1):
            out = self.model(piece, memory=memory)
            memory = (memory or self.model.empty_memory(out.u)).followed_by(out, most)
            states.append(out.z)
        return torch.cat(states, dim=1)

    def _loss(
        self, z: Tensor, labels: Tensor, mask: Tensor | None, count: Tensor | int | None
    ) -> Tensor:
        """Return the mean negative log-likelihood of the labels after the first token of a text."""
        target = labels[:, 1:]
        scored = target != -100
        if mask is not None:
            scored = scored & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)  # padding predicts nothing
        nll = self.model.nll(z[:, :-1], torch.where(scored, target, 0))
        return torch.where(scored, nll, 0.0).sum() / (scored.sum() if count is None else count)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return texts with new tokens, as every model of transformers does.

        A model may have room for more tokens than its tokenizer has; it generates none of these.
        """
        processors = LogitsProcessorList(logits_processor or ())
        if 0 < self.config.tokenizer_size < self.config.vocab_size:
            processors.append(OnlyTokens(self.config.tokenizer_size))
        return super().generate(inputs, generation_config, processors, *args, **kwargs)

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the module with the vectors of the tokens."""
        vocabulary: torch.nn.Module = self.model.vocabulary  # type: ignore[assignment]
        return vocabulary

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        """Return the module with the vectors of the tokens; raise if their number should change."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"a DEQForCausalLM keeps its {self.config.vocab_size} tokens, and "
                f"{new_num_tokens} were asked for: train a model with another vocabulary"
            )
        return self.get_input_embeddings()

    def get_output_embeddings(self) -> None:
        """Return None: input and output share their vectors inside one module."""
        return

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Do nothing: each design initialises its own weights."""

    @classmethod
    def get_init_context(cls, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the blocks around building a model that is loaded, on a device with memory.

        A design initialises its weights where it is built, from numbers that a meta device lacks.
        """
        blocks = super().get_init_context(*args, **kwargs)
        return [each for each in blocks if not isinstance(each, torch.device)]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes an `EquilibriumCache`


def save_folder(source: str | Path | LanguageModel, folder: str | Path) -> DEQForCausalLM:
    """Write a model of the zoo with its tokenizer to a folder; return it.

    `pipeline("text-generation", model=folder)` reads the folder once this module is imported.

    Args:
        source: a run folder, a checkpoint file, or a model.
        folder: where to write.
    """
    if Path(folder).exists() and not Path(folder).is_dir():
        raise FileExistsError(f"{folder} is a file, and the model needs a folder: name another one")
    model = DEQForCausalLM.from_zoo(source)
    tokenizer = as_fast_tokenizer(model.model.lexicon.require())
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


AutoConfig.register(DEQLanguageConfig.model_type, DEQLanguageConfig, exist_ok=True)
AutoModelForCausalLM.register(DEQLanguageConfig, DEQForCausalLM, exist_ok=True)
# The Trainer shifts the labels of these names only, where it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DEQLanguageConfig.model_type] = DEQForCausalLM.__name__
