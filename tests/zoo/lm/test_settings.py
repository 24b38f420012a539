"""Settings that would be lost or contradict each other, in whatever order they come."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from deq_zoo.cli import main
from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm.presets import CONVERGENT, IMPLICIT, UNROLLED, lm_smoke, lm_wt103_final
from deq_zoo.values import with_settings
from tests.zoo.lm.nets import make_config
from tests.zoo.lm.test_task import SMALL, make_task


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deq": IMPLICIT, "consistency": 1.0}, "consistency=1.0 compares unrolled steps"),
        ({"deq": IMPLICIT, "ahead": 4}, "ahead=4 draws the number of evaluations"),
        ({"deq": CONVERGENT.with_options(f_max_iter=20), "ahead": 4}, "to have f_max_iter"),
        ({"deq": CONVERGENT.with_options(ift=True)}, "ift needs f_max_iter > 0"),
        ({"deq": CONVERGENT.with_options(jac_loss_weight=0.1)}, "jac_loss_freq=0.0, of which one"),
        ({"deq": CONVERGENT.with_options(jac_loss_freq=0.1)}, "jac_loss_weight=0.0, jac_incremen"),
    ],
)
def test_what_would_do_nothing_in_training_is_an_error(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(**changes).build()


@pytest.mark.parametrize("options", [{"sup_gap": 2}, {"sup_loc": [1]}, {"indexing": [3]}])
def test_states_that_nobody_would_decode_are_errors(options: Any) -> None:
    with pytest.raises(ValueError, match="decodes one state"):
        make_task(deq=CONVERGENT.with_options(**options))


def test_the_redesigned_map_warns_of_other_steps_and_of_implicit_gradients() -> None:
    shape = make_config("redesigned", tokens=256, cutoffs=(), shrink=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_task(net=shape, deq=UNROLLED).build()
        make_task(net=SMALL, deq=CONVERGENT.with_options(eval_f_max_iter=100)).build()
    with pytest.warns(UserWarning, match="trained with: 6, not 12"):
        make_task(net=shape, deq=UNROLLED.with_options(grad=[6])).build()
    with pytest.warns(UserWarning, match="implicit gradient is not defined"):
        make_task(net=shape, deq=IMPLICIT).build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "a.txt"}, "file=a.txt does nothing with data=counting: .* data=file"),
        ({"data_dir": "a"}, "data_dir=a does nothing with data=counting: .* data=wikitext"),
        ({"data": "wikitext", "pieces": 300, "data_dir": "a"}, "pieces=300 does nothing"),
    ],
)
def test_data_that_would_not_be_read_is_an_error(changes: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        assert make_task(**changes).steps_per_epoch


def test_a_text_too_short_to_evaluate_is_an_error_before_training() -> None:
    with pytest.raises(DataError, match=r"too short for 500 streams .* eval_batch if to evaluate"):
        assert make_task(eval_batch=500).steps_per_epoch


def test_flags_and_settings_count_in_any_order(capsys: Any) -> None:
    """Apply flags first, whatever their place: a later setting may hold what they need."""
    off = ["--set", "consistency=0", "--f_max_iter", "20"]
    assert main(["info", "lm-smoke", "--ift", *off]) == 0
    assert main(["info", "lm-smoke", *off, "--ift"]) == 0
    capsys.readouterr()
    assert main(["info", "lm-smoke", "--ift"]) == 2
    assert "cannot be built: consistency" in capsys.readouterr().err
    assert main(["info", "lm-smoke", "--n_states", "2"]) == 2
    assert "deq-zoo: a language model decodes one state" in capsys.readouterr().err
    with pytest.raises(ZooError, match="decodes one state"):
        lm_smoke().with_deq(n_states=2)


def test_settings_are_applied_at_once() -> None:
    for settings in (["width=16", "heads=2"], ["heads=2", "width=16"]):
        shape: Any = with_settings(lm_wt103_final(), settings).task
        assert (shape.net.width, shape.net.heads) == (16, 2)
    with pytest.raises(ZooError, match="width=15: width must be even"):
        with_settings(lm_wt103_final(), ["width=15"])
    with pytest.raises(ZooError, match="steps=-5: give either steps or epochs"):
        with_settings(lm_wt103_final(), ["steps=-5"])


def test_converting_for_a_preset_that_cannot_be_is_an_error(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.pth").write_bytes(b"")
    words = ["convert", str(tmp_path / "a.pth"), "--preset", "lm-smoke", "--set", "cutoffs=9,4"]
    assert main(words) == 2
    assert "cannot be built: cutoffs must rise" in capsys.readouterr().err
