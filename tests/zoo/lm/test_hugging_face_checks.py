"""Arguments that a language model of transformers would misread are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deq_zoo.errors import ZooError
from deq_zoo.lm.tokens import Bytes

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache

from deq_zoo.lm.hugging_face import DEQForCausalLM, save_folder
from deq_zoo.lm.hugging_face_cache import EquilibriumCache
from deq_zoo.lm.hugging_face_config import DEQLanguageConfig
from deq_zoo.lm.hugging_face_tokens import as_fast_tokenizer
from tests.zoo.lm.test_hugging_face import draw, make
from torchdeq import ConvergenceWarning


@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_a_mask_with_a_hole_is_an_error(use_cache: bool) -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw(length=6)
    for row in ([1, 1, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1]):
        mask = torch.tensor([[1] * 6, row])
        with pytest.raises(ValueError, match="a 0 between two tokens"):
            model(ids, mask, use_cache=use_cache)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="padding must come before the texts"):
        model(ids[:, :1], torch.tensor([[1] * 7, [1] * 6 + [0]]), past_key_values=cache)


@pytest.mark.parametrize(
    "asked", [{"inputs_embeds": torch.zeros(2, 9, 8)}, {"output_hidden_states": True},
              {"output_attentions": True}], ids=lambda each: next(iter(each)),
)  # fmt: skip
@torch.no_grad()
def test_arguments_without_effect_are_errors(asked: dict[str, Any]) -> None:
    model = DEQForCausalLM.from_zoo(make("attractor"))
    with pytest.raises(ValueError, match=f"{next(iter(asked))} has no effect"):
        model(draw(), **asked)
    model(draw(), output_attentions=False, inputs_embeds=None, position_ids=torch.arange(9)[None])


def test_what_has_no_place_is_an_error() -> None:
    class Strange(Bytes):
        kind = "strange"

    assert as_fast_tokenizer(Strange()).pad_token_id == 256
    with pytest.raises(TypeError, match="no tokenizer of transformers for object"):
        as_fast_tokenizer(object())  # type: ignore[arg-type]
    cache = EquilibriumCache(make("convergent"), 16, 16)
    with pytest.raises(NotImplementedError, match="cannot take tokens back"):
        cache.crop(2)
    with pytest.raises(NotImplementedError, match="filled by its model"):
        cache.update()
    model = make("convergent")
    model.lexicon.tokenizer = None
    with pytest.raises(ZooError, match="came without their vocabulary"):
        save_folder(model, "nowhere")


def test_texts_that_do_not_fit_are_errors() -> None:
    model = DEQForCausalLM.from_zoo(make("attractor"))
    ids = draw(2, 5)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds 2 texts, and input_ids has 1"):
        model(ids[:1, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask must have the shape \(2, 6\)"):
        model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"attention_mask must have the shape \(2, 5\)"):
        model(ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="a text needs a token"):
        model(ids, attention_mask=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="labels must have the shape"):
        model(ids, labels=ids[:, 1:])
    with pytest.raises(ValueError, match="input_ids must have the shape"):
        model(ids[:, :0])
    with pytest.raises(ValueError, match=r"lie in \[0, 256\), got 0 to 900"):
        model(torch.tensor([[0, 900]]))


def with_tokenizer(size: int) -> DEQForCausalLM:
    """Return a model with room for 256 tokens, of which its tokenizer has some."""
    config = DEQForCausalLM.from_zoo(make("attractor")).config
    config.tokenizer_size = size
    return DEQForCausalLM(config).eval()


@pytest.mark.parametrize("size", [256, 200])
@torch.no_grad()
def test_padding_that_would_be_read_is_an_error(size: int) -> None:
    model, ids = with_tokenizer(size), draw() % 100
    whole = torch.ones_like(ids)
    ids[0, -2:] = size
    with pytest.raises(ValueError, match="no attention_mask: pass one"):
        model(ids)
    model(ids, attention_mask=whole)  # as `generate` goes on after the end of a text
    ids[0, -1] = 1
    with pytest.raises(ValueError, match="padding before a token where attention_mask has 1"):
        model(ids, attention_mask=whole)


def test_labels_that_are_no_tokens_are_errors() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw()
    for wrong in (-1, 256):
        labels = ids.clone()
        labels[0, 3] = wrong
        with pytest.raises(ValueError, match=rf"labels must lie in \[0, 256\).* got {wrong}"):
            model(ids, labels=labels)


@torch.no_grad()
def test_the_cache_of_another_model_is_an_error() -> None:
    one, other = (DEQForCausalLM.from_zoo(make("attractor")) for _ in range(2))
    cache = one(draw(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cache of another model"):
        other(draw(), past_key_values=cache)
    with pytest.raises(TypeError, match="must be an EquilibriumCache, got DynamicCache"):
        one(draw(), past_key_values=DynamicCache())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"memory": -1}, "memory must be at least 0, got -1"),
        ({"tokenizer_size": 300}, "has 300 tokens .* room for 256"),
        ({"vocab_size": 7}, "vocab_size=7 differs from the 256 that net"),
        ({"hidden_size": 9}, "hidden_size=9 differs from the 8 that net"),
        ({"length": "16"}, "length must be an integer, got '16'"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_an_error(
    wrong: dict[str, Any], message: str
) -> None:
    net = DEQForCausalLM.from_zoo(make("attractor")).config.net
    with pytest.raises((ValueError, TypeError), match=message):
        DEQLanguageConfig(net=net, **wrong)


def test_the_number_of_tokens_stays() -> None:
    model = DEQForCausalLM.from_zoo(make("attractor"))
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(ValueError, match="keeps its 256 tokens, and 300 were asked for"):
        model.resize_token_embeddings(300)


def change_weight(folder: Path, name: str, value: torch.Tensor | None) -> None:
    """Write another value of a weight into a folder, or none."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights if value is None else weights | {name: value}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.vocabulary.weight", None, "missing keys model.vocabulary.weight"),
        ("model.core.0.attn.c_q.weight", torch.full((8, 8), torch.nan), "holds NaN or infinity"),
    ],
)
def test_weights_that_are_missing_or_not_finite_are_errors(
    name: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    save_folder(make("attractor").float(), tmp_path)
    change_weight(tmp_path, name, value)
    for load in (AutoModelForCausalLM, DEQForCausalLM):
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path)


def test_weights_without_a_place_are_errors(tmp_path: Path) -> None:
    model = save_folder(make("attractor").float(), tmp_path)
    model.config.net["blocks"] = 1
    model.config.num_hidden_layers -= 1
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"unexpected keys model\.core\.1\..* and 9 more"):
        DEQForCausalLM.from_pretrained(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(FileExistsError, match="is a file, and the model needs a folder"):
        save_folder(make("attractor"), tmp_path / "a")


@torch.no_grad()
def test_positions_of_two_texts_in_a_row_are_an_error() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw(2, 6)
    for name in ("position_ids", "cache_position"):
        with pytest.raises(ValueError, match=f"{name} must rise by 1 from token to token"):
            model(ids, **{name: torch.tensor([[0, 1, 2, 0, 1, 2]])})
    with pytest.raises(
        ValueError, match=r"position_ids must have the shape .*\(2, 6\), got \(4,\)"
    ):
        model(ids, position_ids=torch.arange(4))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    positions = torch.tensor([[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    expected = model(ids, mask).logits
    assert torch.equal(model(ids, mask, position_ids=positions).logits, expected)


@torch.no_grad()
def test_a_mask_that_contradicts_the_cache_is_an_error() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw(2, 6)
    cache = model(ids[:, :4], use_cache=True).past_key_values
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    with pytest.raises(ValueError, match=r"\[2, 0\] .* the cache has read texts with \[0, 0\]"):
        model(ids[:, 4:5], mask, past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    model(ids[:, 4:5], torch.ones(2, 5), past_key_values=cache)


@torch.no_grad()
def test_a_failed_solve_warns() -> None:
    model = DEQForCausalLM.from_zoo(make("attractor"))
    with torch.no_grad():
        model.model.get_submodule("core.0.attn.c_q").weight.fill_(torch.nan)  # type: ignore[operator]
    with pytest.warns(ConvergenceWarning, match="NONFINITE"):
        model(draw())
