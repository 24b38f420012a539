"""Many texts at once: each token is a sample of a stream, and leaves it when it has converged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.checks import check_integers
from deq_zoo.lm.attractor.decode import AttractorDecoder, Proposal
from deq_zoo.lm.attractor.layers import Surroundings
from deq_zoo.lm.attractor.model import Attractor
from deq_zoo.lm.prediction import check_ids
from torchdeq.stream import Request, Stream


class Written(NamedTuple):
    """A text that is complete.

    Args:
        prompt: the number of its prompt.
        ids: (N,) its tokens, the prompt first.
        evaluations: of f for each new token, the first excepted.
    """

    prompt: int
    ids: Tensor
    evaluations: list[int]


@dataclass
class _Text:
    """A text that grows."""

    index: int
    ids: list[int]
    decoder: AttractorDecoder
    evaluations: list[int] = field(default_factory=list)
    new: Proposal | None = None  # the last token, whose state is to be found


def most_likely(log_prob: Tensor) -> int:
    """Return the likeliest token of log-probabilities (V,)."""
    return int(log_prob.argmax())


def write_many(
    model: Attractor,
    prompts: Sequence[Tensor | Sequence[int]],
    tokens: int,
    *,
    span: int,
    length: int | None = None,
    slots: int = 16,
    choose: Callable[[Tensor], int] = most_likely,
) -> Iterator[Written]:
    """Return texts as they become complete; each goes on without waiting for the others.

    The tokens of all texts are solved side by side. One that has converged leaves at once, and the
    next token of any text takes its place. The texts are those that each prompt alone would give.

    Args:
        model: in evaluation mode.
        prompts: (N,) tokens each, of any lengths, as tensors or lists.
        tokens: how many to add to each.
        span: how many tokens before a segment a text remembers.
        length: tokens of a segment; as many as `span` by default.
        slots: tokens that are solved at the same time, at most.
        choose: returns the next token for log-probabilities (V,).
    """
    check_integers(1, tokens=tokens, slots=slots)
    if not isinstance(model, Attractor) or model.published is not None:
        got = "mixing='published'" if isinstance(model, Attractor) else type(model).__name__
        raise TypeError(
            "write_many needs an attractor with mixing='positions', whose tokens are solved one by "
            f"one, got {got}: write texts of other models by make_decoder"
        )
    texts = [
        _Text(k, _check_prompt(k, prompt, model), AttractorDecoder(model, span, length))
        for k, prompt in enumerate(prompts)
    ]
    return _write(model, texts, tokens, slots, choose)


@torch.no_grad()
def _write(
    model: Attractor,
    texts: Sequence[_Text],
    tokens: int,
    slots: int,
    choose: Callable[[Tensor], int],
) -> Iterator[Written]:
    """Yield texts with so many more tokens than their prompts."""
    for text in texts:
        ids = torch.tensor([text.ids], device=text.decoder.device)
        text.ids.append(choose(text.decoder.feed(ids)[0]))
    if tokens == 1:  # a prompt gives the first token
        yield from map(_written, texts)
        return
    waiting, active = deque(texts), len(texts)
    while active:
        # With no more slots than texts, a free slot means that a text is waiting.
        stream = _open(model, min(slots, active))
        in_work: dict[int, _Text] = {}
        for result in stream.run(_requests(waiting, in_work)):
            if result.error is not None:
                raise result.error
            text = in_work.pop(result.id)
            text.evaluations.append(result.evaluations)
            assert isinstance(result.z, Tensor)
            assert text.new is not None
            z = result.z.view(1, 1, -1)
            text.decoder.accept(text.new, z)
            text.ids.append(choose(model.log_prob(z)[0, 0]))
            if len(text.evaluations) + 1 < tokens:
                waiting.append(text)
            else:
                active -= 1
                yield _written(text)


def _check_prompt(index: int, prompt: Tensor | Sequence[int], model: Attractor) -> list[int]:
    """Return the tokens of a prompt, which has one at least."""
    ids = check_ids(prompt, model.config.tokens)
    if not len(ids):
        raise ValueError(f"a prompt is at least one token, and prompt {index} has none")
    return ids.tolist()


def _written(text: _Text) -> Written:
    return Written(text.index, torch.tensor(text.ids), text.evaluations)


def _requests(waiting: deque[_Text], in_work: dict[int, _Text]) -> Iterator[Request]:
    """Yield a request for the last token of each text that waits, as long as one does."""
    while waiting:
        text = waiting.popleft()
        in_work[text.index] = text
        decoder, device = text.decoder, text.decoder.device
        text.new = decoder.propose(torch.tensor([text.ids[-1:]], device=device))
        c = text.new.c[0, 0]
        around = text.new.around[0]
        kv = decoder.core_cache()
        assert kv is not None, "a prompt comes first"
        kv = kv[:, :, 0]  # (2, blocks, H, n, e)
        keys = decoder.span + decoder.length  # at most, with the new token
        free = keys - 1 - kv.shape[3]
        k, v = F.pad(kv, (0, 0, free, 0))
        hidden = torch.zeros(keys, dtype=c.dtype, device=device)
        window = decoder.model.config.window or keys
        hidden[: max(free, keys - window)] = -torch.inf
        yield Request(c, (c, k, v, hidden, around.cos[0], around.sin[0]), id=text.index)


def _open(model: Attractor, slots: int) -> Stream:
    """Return a stream of single tokens, each with the keys and values of its own past."""

    def f(
        y: Tensor, c: Tensor, k: Tensor, v: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        turn = cos[:, None, None], sin[:, None, None]  # (b, 1, 1, e)
        mask = hidden[:, None, None]  # (b, 1, 1, keys)
        around = [Surroundings(*turn, k[:, i], v[:, i], mask) for i in range(model.config.blocks)]
        return model.apply_core((y + c)[:, None], around)[:, 0] - y

    deq = model.deq
    stop = replace(deq.config.f_stop, max_iter=deq.eval_f_max_iter)
    return Stream(f, slots=slots, solver=deq.make_solver({}), stop=stop)
