"""Language models in the interface of transformers, in folders, without a network."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.tokens import Bytes, Pieces, Tokenizer, Words
from tests.zoo.lm.attractor import nets as attractors
from tests.zoo.lm.nets import DESIGNS, make_model

pytest.importorskip("transformers")

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from deq_zoo.lm.hugging_face import DEQForCausalLM, save_folder
from deq_zoo.lm.hugging_face_cache import EquilibriumCache
from deq_zoo.lm.hugging_face_tokens import as_fast_tokenizer

ALL = [*DESIGNS, "attractor"]
#: Each has a decoder of its own; the original design shares that of the convergent one.
SOLVED = ["redesigned", pytest.param("convergent", marks=pytest.mark.slow), "attractor"]
TEXT = "one two\n three\ttwo \n\n  four Āé\r\nfive\u2028six\x1ctwo \x1f\x85one "


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make(design: str, **changes: Any) -> LanguageModel:
    """Build a model of bytes in float64."""
    model: LanguageModel
    if design == "attractor":
        model = attractors.make_model(tokens=256, **changes)
    elif design == "published":
        plain = {"f_solver": "fixed_point_iter", "f_max_iter": 400, "f_tol": 1e-13}
        model = attractors.make_model(plain, tokens=256, mixing="published", **changes)
    else:
        model = make_model(design, tokens=256, cutoffs=(40, 70), **changes)
    model.facts = {"length": 16, "memory": 16}
    model.lexicon.tokenizer = Bytes()
    return model


def draw(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("design", ALL)
@torch.no_grad()
def test_a_folder_keeps_model_and_tokenizer(design: str, tmp_path: Path) -> None:
    model, ids = make(design), draw()
    save_folder(model, tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert isinstance(again, DEQForCausalLM)
    assert not any(info.values())
    assert AutoConfig.from_pretrained(tmp_path).shape == model.config
    for name, p in again.model.named_parameters():
        assert torch.equal(p, model.get_parameter(name)), name
    assert_close(again(ids).logits, model.log_prob(model(ids).z), atol=1e-9, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("äb\n")["input_ids"] == list("äb\n".encode())


@pytest.mark.parametrize("design", SOLVED)
@torch.no_grad()
def test_texts_of_unequal_length_grow_as_if_each_were_alone(design: str) -> None:
    model = DEQForCausalLM.from_zoo(make(design))
    tokenizer = as_fast_tokenizer(Bytes())
    batch = tokenizer(["hello", "a", "bye", "hi"], return_tensors="pt", padding=True)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 256}
    cached = model.generate(**batch, **options)
    again = model.generate(**batch, **options, use_cache=False)
    assert torch.equal(cached, again)
    for row, mask, result in zip(*batch.values(), cached, strict=True):
        alone = model.generate(row[None, mask.bool()], **options)
        assert torch.equal(alone[0, -3:], result[-3:])


@pytest.mark.parametrize("design", ALL)
@torch.no_grad()
def test_padding_on_either_side_changes_no_logit(design: str) -> None:
    model, ids = DEQForCausalLM.from_zoo(make(design)), draw()
    pad, mask = torch.full((2, 3), 256), torch.ones(2, 9, dtype=torch.long)
    expected = model(ids).logits
    none = torch.zeros_like(pad)
    left = model(torch.cat((pad, ids), 1), attention_mask=torch.cat((none, mask), 1)).logits
    right = model(torch.cat((ids, pad), 1), attention_mask=torch.cat((mask, none), 1)).logits
    assert_close(left[:, 3:], expected, atol=1e-9, rtol=0)
    assert_close(right[:, :9], expected, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="padding_side='left'"):
        model(torch.cat((ids, pad), 1), torch.cat((mask, none), 1), use_cache=True)


@torch.no_grad()
def test_only_tokens_of_the_tokenizer_are_generated(tmp_path: Path) -> None:
    own = attractors.make_model(tokens=300)
    own.facts, own.lexicon.tokenizer = {"length": 16, "memory": 16}, Bytes()
    own.get_parameter("vocabulary.weight")[256:] *= 9  # so large that many are the likeliest tokens
    ids = draw(4, 5)
    assert bool((own.log_prob(own(ids).z)[:, -1].argmax(1) >= 256).any())
    save_folder(own, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for options in ({}, {"num_beams": 2}, {"do_sample": True, "top_k": 2}):
        texts = model.generate(ids, max_new_tokens=6, pad_token_id=256, **options)
        assert int(texts.max()) < 256, options
    out = model(ids, labels=torch.full_like(ids, 299))
    assert bool(out.loss.isfinite())  # the loss is over all tokens of the model


@torch.no_grad()
def test_a_cache_is_repeated_on_its_own_device() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw(length=4)
    cache = model(ids[:, :3], use_cache=True).past_key_values
    with torch.device("meta"):  # a new tensor without a device would be there
        cache.batch_repeat_interleave(2)
    result = model(ids[:, 3:].repeat_interleave(2, 0), past_key_values=cache).logits
    expected = model(ids).logits[:, 3:].repeat_interleave(2, 0)
    assert_close(result, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("design", SOLVED)
@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_whole_text(design: str) -> None:
    model, ids = DEQForCausalLM.from_zoo(make(design)), draw(length=12)
    whole = model(ids).logits
    first = model(ids[:, :7], use_cache=True)
    assert isinstance(first.past_key_values, EquilibriumCache)
    assert_close(first.logits, whole[:, :7], atol=1e-8, rtol=0)
    for k in range(7, 12):
        out = model(ids[:, k : k + 1], past_key_values=first.past_key_values, logits_to_keep=1)
        assert_close(out.logits, whole[:, k : k + 1], atol=1e-8, rtol=0)
    assert first.past_key_values.get_seq_length() == 12


@pytest.mark.parametrize("memory", [0, 4, 8])
@pytest.mark.parametrize("design", [*ALL, "published"])
@torch.no_grad()
def test_a_cache_forgets_what_a_model_without_one_forgets(design: str, memory: int) -> None:
    own = make(design)
    own.facts = {"length": 8, "memory": memory}
    model, ids = DEQForCausalLM.from_zoo(own), draw(length=19, seed=2)
    cache, parts = None, []
    for piece in ids.split([3, *[1] * 16], dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert_close(torch.cat(parts, dim=1), model(ids).logits, atol=1e-8, rtol=0)


@pytest.mark.parametrize("design", SOLVED)
@torch.no_grad()
def test_beam_search_with_a_cache_is_that_without(design: str) -> None:
    model = DEQForCausalLM.from_zoo(make(design))
    batch = as_fast_tokenizer(Bytes())(["hello", "ab"], return_tensors="pt", padding=True)
    options: dict[str, Any] = {"max_new_tokens": 3, "num_beams": 2, "pad_token_id": 256}
    beams = [model.generate(**batch, **options, use_cache=use) for use in (True, False)]
    assert torch.equal(*beams)


def test_a_pipeline_writes_from_a_folder(tmp_path: Path) -> None:
    save_folder(make("attractor").float(), tmp_path)
    write = pipeline("text-generation", model=str(tmp_path))
    (result,) = write("hello", max_new_tokens=3, do_sample=False)
    assert result["generated_text"].startswith("hello")
    assert len(result["generated_text"]) > 5
    pair = write(["hello", "a"], max_new_tokens=3, do_sample=False, batch_size=2)
    assert pair[0][0] == result


@pytest.mark.parametrize("design", ["original", "attractor"])
def test_a_trainer_makes_a_step(design: str, tmp_path: Path) -> None:
    model = DEQForCausalLM.from_zoo(make(design).float())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in draw(4, 8)]
    options = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    Trainer(model=model, args=options, train_dataset=rows).train()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert any("core" in name or "func" in name for name in changed)


def test_the_loss_is_the_mean_over_scored_labels() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("convergent")), draw()
    labels = ids.clone()
    labels[0, 4:] = -100
    out = model(ids, labels=labels)
    log_p = out.logits[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    expected = -torch.cat((log_p[0, :3], log_p[1])).mean()
    assert_close(out.loss, expected)
    assert_close(model(ids, labels=labels, num_items_in_batch=22).loss, expected / 2)
    assert model(ids, labels=labels, return_dict=False)[0] == out.loss
    with pytest.raises(ValueError, match="without past_key_values"):
        model(ids, labels=ids, past_key_values=EquilibriumCache(model.model, 16, 16))


@pytest.mark.parametrize(
    "tokenizer",
    [Bytes(), Pieces.of("one two three four " * 9, 300), Words(["<eos>", "two", "<unk>", "one"])],
    ids=lambda each: each.kind,
)
def test_every_tokenizer_keeps_its_ids(tokenizer: Tokenizer) -> None:
    fast = as_fast_tokenizer(tokenizer)
    text = TEXT
    if isinstance(tokenizer, Words):
        text = tokenizer.with_unknown("one two\nthree one\n\ntwo")
    ids = tokenizer.encode(text).tolist()
    assert fast(text)["input_ids"] == ids
    assert fast.decode(ids) == tokenizer.decode(ids)
    assert fast.pad_token_id == tokenizer.size


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_padded_texts_is_that_of_the_texts(side: str) -> None:
    model = DEQForCausalLM.from_zoo(make("attractor"))
    ids = draw(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    if side == "right":
        mask = mask.flip(1)
    whole = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
    sums = [model(row, labels=row, num_items_in_batch=1).loss for row in whole]
    expected = sum(sums) / sum(row.shape[1] - 1 for row in whole)
    for ones in (mask, 3 * mask, mask.bool(), mask.double() / 2):
        labels = ids.masked_fill(mask == 0, -100)
        assert_close(model(ids, attention_mask=ones, labels=labels).loss, expected)
        assert_close(model(ids, attention_mask=ones, labels=ids).loss, expected)


def test_no_gradient_is_a_part_of_one() -> None:
    """A decoder has no gradient; that of the vocabulary alone would look like a whole one."""
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw()
    weights = list(model.parameters())
    found = [
        torch.autograd.grad(model(ids, labels=ids, use_cache=cached).loss, weights)
        for cached in (False, True)
    ]
    assert_close(found[1], found[0])
    assert not model(ids, use_cache=True).logits.requires_grad


@torch.no_grad()
def test_a_cache_that_was_reset_begins_again() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw()
    first = model(ids, use_cache=True)
    first.past_key_values.reset()
    assert first.past_key_values.get_seq_length() == 0
    again = model(ids, past_key_values=first.past_key_values)
    assert torch.equal(again.logits, first.logits)


def test_a_text_that_spells_the_padding_token_is_a_text(tmp_path: Path) -> None:
    save_folder(make("attractor"), tmp_path)
    text = "a<|pad|>b"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer([text, "a"], padding=True)["input_ids"][1][0] == 256


@torch.no_grad()
def test_a_text_ends_at_stop_strings(tmp_path: Path) -> None:
    save_folder(make("attractor"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([list(b"one ")])
    letters = {"suppress_tokens": [*range(97), *range(123, 256)], "do_sample": False}
    free = model.generate(ids, max_new_tokens=6, **letters)[0, 4:].tolist()
    stopped = model.generate(
        ids, max_new_tokens=6, stop_strings=[chr(free[2])], tokenizer=tokenizer, **letters
    )[0, 4:].tolist()
    assert stopped == free[: free.index(free[2]) + 1]


def test_logits_of_chosen_positions() -> None:
    model = DEQForCausalLM.from_zoo(make("attractor"))
    ids = draw()
    every = model(ids).logits
    assert_close(model(ids, logits_to_keep=torch.tensor([1, 4])).logits, every[:, [1, 4]])
    assert_close(model(ids, logits_to_keep=2).logits, every[:, -2:])


@torch.no_grad()
def test_a_copy_of_a_cache_goes_on_by_itself() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw(2, 6)
    mask = torch.ones_like(ids)
    mask[1, 0] = 0
    cache = model(ids[:, :4], mask[:, :4], use_cache=True).past_key_values
    copy = deepcopy(cache)
    assert copy.model is model.model
    first = model(ids[:, 4:5], mask[:, :5], past_key_values=cache).logits
    for _ in range(2):  # the copy is not touched by the original, nor by its own copies
        again = model(ids[:, 4:5], mask[:, :5], past_key_values=deepcopy(copy)).logits
        assert_close(again, first, atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_changed_length_of_segments_holds_with_and_without_a_cache() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw(1, 12)
    whole = model(ids).logits
    model.config.length, model.config.memory = 4, 0
    assert_close(model(ids, use_cache=True).logits, model(ids).logits, atol=1e-9, rtol=0)
    assert not torch.allclose(model(ids).logits, whole)


def train_with(folder: Path, model: DEQForCausalLM, **options: Any) -> dict[str, torch.Tensor]:
    """Train a copy for a step; return its parameters."""
    rows = [{"input_ids": row, "labels": row} for row in draw(4, 8)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=1e-2, **options,
    )  # fmt: skip
    copy = deepcopy(model)
    Trainer(model=copy, args=arguments, train_dataset=rows).train()
    return {name: p.detach() for name, p in copy.named_parameters()}


def test_noise_on_embeddings_reaches_the_model(tmp_path: Path) -> None:
    model = DEQForCausalLM.from_zoo(make("attractor").float())
    plain, noisy = train_with(tmp_path, model), train_with(tmp_path, model, neftune_noise_alpha=50)
    assert any(not torch.equal(plain[name], noisy[name]) for name in plain)


def test_smoothed_labels_are_those_of_the_next_token() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw()
    assert model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # the Trainer asks so
    out = model(ids)
    smooth = LabelSmoother(epsilon=0.0)({"logits": out.logits}, ids, shift_labels=True)
    assert_close(smooth, model(ids, labels=ids).loss)


def test_a_compiled_model_has_the_same_logits() -> None:
    model, ids = DEQForCausalLM.from_zoo(make("attractor")), draw()
    with torch.no_grad():
        assert_close(torch.compile(model, backend="eager")(ids).logits, model(ids).logits)
