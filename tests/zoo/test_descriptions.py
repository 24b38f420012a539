"""Every setting has a type, a value and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from deq_zoo import optim
from deq_zoo.descriptions import meanings, read_args, settings, shown, undescribed
from deq_zoo.family import find_family, preset_summaries
from deq_zoo.parsing import kind_name
from deq_zoo.preset import Preset, Target, find_preset
from tests.zoo.toy import toy


def test_the_section_about_arguments_is_read() -> None:
    doc = """Opens with a sentence: of a kind.

    Args:
        first: a sentence
            on two lines: with a colon.
        second: another one.
        **call: the rest.

    Attributes:
        third: not an argument.
    """
    assert read_args(doc) == {
        "first": "a sentence on two lines: with a colon.",
        "second": "another one.",
        "call": "the rest.",
    }
    assert read_args("No section.") == {}


def test_a_class_inherits_the_sentences_of_its_base() -> None:
    @dataclass
    class Base:
        """A base.

        Args:
            a: one.
            b: two.
        """

        a: int = 1
        b: int = 2

    @dataclass
    class Special(Base):
        """A special case.

        Args:
            b: three.
        """

    @dataclass
    class Silent(Special):
        pass

    assert meanings(Silent) == {"a": "one.", "b": "three."}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (int, "int"),
        (int | None, "int, or none"),
        (Literal["no", "bf16"], "no | bf16"),
        (tuple[int, ...], "list of int"),
        (list[str], "list of str"),
        (tuple[float, float], "float,float"),
        (dict[str, Any], "name=value pairs"),
    ],
)
def test_types_are_shown_in_words(kind: Any, name: str) -> None:
    assert kind_name(kind) == name


def test_values_are_shown_as_set_takes_them() -> None:
    assert [shown(v) for v in (None, True, (1, 2), (), 1e-3)] == [
        "none",
        "true",
        "1,2",
        "()",
        "0.001",
    ]


def test_options_without_effect_are_not_shown() -> None:
    paths = {setting.path for setting in settings(toy())}
    assert {"task.deq.f_max_iter", "task.width", "optim.lr"} <= paths
    assert "task.deq.jac_loss_weight" not in paths


@pytest.mark.parametrize(
    "kind",
    [
        each
        for each in vars(optim).values()
        if isinstance(each, type)
        and issubclass(each, (optim.Optim, optim.Schedule))
        and hasattr(each, "__dataclass_fields__")
    ],
)
def test_every_option_of_optimisers_and_schedules_has_a_sentence(kind: type) -> None:
    assert undescribed(kind()) == []


def test_every_setting_of_a_preset_itself_has_a_sentence() -> None:
    for kind in (Preset, Target):
        assert set(kind.__dataclass_fields__) == set(meanings(kind))


@pytest.mark.parametrize("name", preset_summaries(find_family("mdeq")))
def test_every_setting_of_mdeq_has_a_sentence(name: str) -> None:
    assert undescribed(find_preset(name)) == []
