"""Many texts through a stream: each is that which its prompt alone gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deq_zoo.lm.attractor.decode import AttractorDecoder
from deq_zoo.lm.attractor.streaming import write_many
from tests.zoo.lm.attractor.golden import Golden
from tests.zoo.lm.attractor.nets import make_model
from tests.zoo.lm.nets import make_model as make_transformer


def recompute(model: torch.nn.Module, prompt: Tensor, tokens: int) -> list[int]:
    ids = prompt[None]
    for _ in range(tokens):
        log_p = model.log_prob(model(ids).z[:, -1])  # type: ignore[operator]
        ids = torch.cat((ids, log_p.argmax(-1, keepdim=True)), dim=1)
    return ids[0].tolist()


@pytest.mark.parametrize(("slots", "tokens"), [(1, 2), (2, 4), (9, 1)])
@pytest.mark.parametrize("variant", ["A", pytest.param("B", marks=pytest.mark.slow)])
@torch.no_grad()
def test_texts_of_a_stream_are_those_of_full_recomputation(
    variant: str, slots: int, tokens: int
) -> None:
    golden = Golden(variant)
    model, ids = golden.make_model(), golden["input/ids"]
    prompts = [ids[0, :3], ids[1, :7], ids[2, :1], ids[1, 3:5]]
    texts = list(write_many(model, prompts, tokens, span=20, slots=slots))
    assert sorted(text.prompt for text in texts) == [0, 1, 2, 3]
    for text in texts:
        assert text.ids.tolist() == recompute(model, prompts[text.prompt], tokens)
        assert len(text.evaluations) == tokens - 1


@pytest.mark.parametrize(("span", "length"), [(4, None), (0, 3), (2, 4), (4, 1)])
@torch.no_grad()
def test_texts_forget_what_is_beyond_their_span(span: int, length: int | None) -> None:
    model, ids = make_model(), [1, 2, 3]
    (text,) = write_many(model, [torch.tensor(ids)], 6, span=span, length=length)
    decoder = AttractorDecoder(model, span, length)
    log_p = decoder.feed(torch.tensor([ids]))
    for _ in range(6):
        ids.append(int(log_p.argmax()))
        log_p = decoder.feed(torch.tensor([ids[-1:]]))
    assert text.ids.tolist() == ids


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="a prompt is at least one token"):
        list(write_many(make_model(), [torch.empty(0, dtype=torch.long)], 2, span=4))


def test_prompts_and_models_that_cannot_be_written_are_errors() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"lie in \[0, 11\), got 1 to 99"):
        list(write_many(model, [torch.tensor([1, 99])], 2, span=4))
    with pytest.raises(TypeError, match=r"tokens must be an integer, got 2\.5"):
        write_many(model, [torch.tensor([1])], 2.5, span=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="needs an attractor with mixing='positions'"):
        list(write_many(make_transformer("convergent"), [torch.tensor([1])], 2, span=4))  # type: ignore[arg-type]
    as_list, as_tensor = (
        [text.ids.tolist() for text in write_many(model, [prompt], 3, span=4)]
        for prompt in ([1, 2], torch.tensor([1, 2]))
    )
    assert as_list == as_tensor
