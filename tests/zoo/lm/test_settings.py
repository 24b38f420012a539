"""Settings that would be lost or contradict each other, in whatever order they come."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from deq_zoo.cli import main
from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm.presets import CONVERGENT, IMPLICIT, UNROLLED, lm_quick, lm_wt103_final
from deq_zoo.settings import with_settings
from tests.zoo.lm.nets import make_config
from tests.zoo.lm.test_task import SMALL, make_task


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deq": IMPLICIT, "consistency": 1.0}, "consistency=1.0 compares the last two unrolled"),
        ({"deq": IMPLICIT, "ahead": 4}, "ahead=4 draws the number of evaluations"),
        (
            {"deq": CONVERGENT.with_options(f_max_iter=20), "ahead": 4},
            "so f_max_iter and ift would",
        ),
        ({"deq": CONVERGENT.with_options(ift=True)}, "set f_max_iter above 0"),
        ({"deq": CONVERGENT.with_options(jac_loss_weight=0.1)}, "alone has no effect"),
        ({"deq": CONVERGENT.with_options(jac_loss_freq=0.1)}, "jac_loss_weight=0.0, jac_incremen"),
    ],
)
def test_what_would_do_nothing_in_training_is_an_error(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(**changes).build()


@pytest.mark.parametrize(
    "options",
    [
        *({"sup_gap": 2}, {"sup_loc": [1]}, {"indexing": [3]}, {"n_states": 2}, {"gamma": 0.5}),
        *({"sradius_mode": True}, {"b_solver": "anderson"}, {"b_tol": 0.1}, {"higher_order": True}),
    ],
)
def test_options_without_effect_are_errors(options: Any) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} would have no effect: LanguageTask makes no use"):
        make_task(deq=CONVERGENT.with_options(**options))


def test_options_of_the_backward_solve_have_an_effect_with_implicit_gradients() -> None:
    solve = {"b_solver": "anderson", "b_tol": 0.1, "b_max_iter": 9, "higher_order": True}
    for flag in ({"ift": True}, {"hook_ift": True}, {"backward": "ift"}):
        task = make_task(deq=CONVERGENT.with_options(f_max_iter=20, **flag, **solve))
        assert task.uses > set(solve)


def test_the_redesigned_map_warns_of_other_steps_and_of_implicit_gradients() -> None:
    shape = make_config("redesigned", tokens=256, cutoffs=(), shrink=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_task(net=shape, deq=UNROLLED).build()
        make_task(net=SMALL, deq=CONVERGENT.with_options(eval_f_max_iter=100)).build()
    with pytest.warns(UserWarning, match="the 6 evaluations of training, not 12: set eval_f_max"):
        make_task(net=shape, deq=UNROLLED.with_options(grad=[6])).build()
    plain = make_config("original", tokens=256, cutoffs=(), shrink=1, pre_norm=True)
    for net, what in ((shape, "design=redesigned"), (plain, "pre_norm=true")):
        with pytest.warns(UserWarning, match=f"{what} has no fixed point, so it has no implicit"):
            make_task(net=net, deq=IMPLICIT).build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "a.txt"}, "file=a.txt has no effect with data=counting: .* data=file"),
        ({"data_dir": "a"}, "data_dir=a has no effect with data=counting: .* data=wikitext"),
        ({"data": "wikitext", "pieces": 300, "data_dir": "a"}, "pieces=300 has no effect"),
    ],
)
def test_data_that_would_not_be_read_is_an_error(changes: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        assert make_task(**changes).steps_per_epoch


def test_a_text_too_short_to_evaluate_is_an_error_before_training() -> None:
    with pytest.raises(
        DataError, match=r"too short for 500 streams .* eval_batch if it is validation or test"
    ):
        assert make_task(eval_batch=500).steps_per_epoch


def test_flags_and_settings_count_in_any_order(capsys: Any) -> None:
    """Apply flags first, whatever their place: a later setting may hold what they need."""
    off = ["--set", "consistency=0", "--set", "ahead=0", "--f_max_iter", "20"]
    assert main(["info", "lm-quick", "--ift", *off]) == 0
    assert main(["info", "lm-quick", *off, "--ift"]) == 0
    capsys.readouterr()
    assert main(["info", "lm-quick", "--ift"]) == 2
    assert "cannot be built: consistency" in capsys.readouterr().err
    for words in (["--n_states", "2"], ["--set", "deq.n_states=2"]):
        assert main(["info", "lm-quick", *words]) == 2
        assert "n_states would have no effect" in capsys.readouterr().err
    with pytest.raises(ZooError, match="n_states would have no effect"):
        lm_quick().with_deq(n_states=2)


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
