"""Pictures of the report: captions say what is shown and how it was selected."""

from __future__ import annotations

import warnings

from deq_zoo.lm.pictures import first_words, page
from tests.zoo.lm.test_task import make_task
from tests.zoo.training import train


def test_captions_say_which_text_is_shown_and_that_it_was_not_selected() -> None:
    task = make_task()
    text, steps = task.pictures(train(task, 1, lr=0.02).model)
    assert "seed 0, and not selected" in text.caption
    assert "words of the validation text" in text.caption
    assert "the first 64 tokens of the validation text" in steps.caption  # 2 streams, 2 segments
    assert all(picture.png.startswith(b"\x89PNG") for picture in (text, steps))


def test_any_character_can_be_drawn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page("a", "a\x00b\u0301 \u01c4 \u4e2d \U0001f600 $x_1$\n\n" + "long " * 40, 0)


def test_a_prompt_ends_with_a_whole_word() -> None:
    assert first_words(" the cat sa") == "the cat"
    assert first_words("cat") == "cat"
    assert first_words("t is\n\n  The cat sat\n  on the m") == "The cat sat"
    assert first_words("The cat\n\nsa") == "The"
