"""Settings: typed, from the command line and from files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deq_zoo.errors import ZooError
from deq_zoo.optim import SGD, MultiStep
from deq_zoo.settings import walk, with_settings
from deq_zoo.values import _MOVED, from_data, to_data
from tests.zoo.toy import Toy, toy


class TestValues:
    def test_a_preset_survives_json(self) -> None:
        preset = replace(toy(), optim=SGD(schedule=MultiStep(at=(0.2, 0.8))))
        again = from_data(json.loads(json.dumps(to_data(preset))))
        assert again == preset
        assert again.optim.schedule.at == (0.2, 0.8)
        assert again.task.deq.f_max_iter == 20

    def test_options_that_were_left_alone_stay_so(self) -> None:
        again = from_data(to_data(toy())).task.deq
        assert again.given == toy().task.deq.given
        assert again.get("norm_type", "mine") == "mine"
        changed = with_settings(toy(), ["tau=0.5"]).task.deq
        assert changed.given == again.given | {"tau"}

    def test_settings_are_typed_and_may_be_shortened(self) -> None:
        changed = with_settings(
            toy(), ["f_max_iter=7", "task.width=4", "optim.lr=3e-4", "precision=bf16",
                    "sizes=10,20", "data_dir=/x", "grad=3", "ift=true", "betas=(0.8, 0.9)"],
        )  # fmt: skip
        assert changed.task.deq.f_max_iter == 7
        assert changed.task.deq.grad == [3]
        assert changed.task.deq.ift is True
        assert (changed.task.width, changed.task.sizes) == (4, (10, 20))
        assert changed.optim.lr == 3e-4
        assert changed.optim.betas == (0.8, 0.9)
        assert changed.task.data_dir == "/x"
        assert with_settings(changed, ["data_dir=none"]).task.data_dir is None

    @pytest.mark.parametrize(
        ("setting", "message"),
        [
            ("widht=3", "unknown setting 'widht'; did you mean 'width'"),
            ("task.lr=3", "unknown setting 'task.lr'; did you mean 'optim.lr'"),
            ("task.widht=3", "unknown setting 'task.widht'; did you mean 'width'"),
            ("width", "a setting reads key=value, got 'width'"),
            ("width=3.5", "task.width takes int, got '3.5'"),
            ("precision=half", "precision is one of no, bf16, fp16, float64, got 'half'"),
            ("precision=bf61", "precision is one of .* got 'bf61'; did you mean 'bf16'"),
            ("jac_loss_weight=1", "jac_loss_weight would have no effect: Toy makes no use of it"),
            ("ift=perhaps", "task.deq.ift takes bool, got 'perhaps'"),
            ("tau=2", r"tau=2.0: tau must lie in \(0, 1\]"),
            ("steps=0", "give either steps or epochs"),
            ("steps=inf", "steps takes int, got 'inf'"),
            ("seed=-1", "seed must be a number from 0"),
            ("lr=-1", "lr must be at least 0 and finite"),
            ("lr=nan", "lr must be at least 0 and finite"),
            ("betas=0.9", "optim.betas takes 2 values, got 1"),
            ("target=5", "target takes Target, or none, got '5'"),
            ("f_solver_kwargs=5", "task.deq.f_solver_kwargs takes name=value pairs, got '5'"),
            ("clip=-1", "clip must be at least 0"),
            ("clip_value=-1", "clip_value must be at least 0"),
        ],
    )
    def test_a_wrong_setting_is_an_error(self, setting: str, message: str) -> None:
        with pytest.raises(ZooError, match=message):
            with_settings(toy(), [setting])

    def test_steps_and_epochs_replace_each_other(self) -> None:
        by_epochs = with_settings(toy(), ["epochs=3"])
        assert (by_epochs.steps, by_epochs.epochs) == (0, 3)
        for settings in (["steps=5"], ["steps=5", "epochs=0"], ["epochs=0", "steps=5"]):
            changed = with_settings(by_epochs, settings)
            assert (changed.steps, changed.epochs) == (5, 0)

    def test_steps_and_epochs_together_are_an_error(self) -> None:
        with pytest.raises(ZooError, match="give either steps or epochs, got both"):
            with_settings(toy(), ["steps=5", "epochs=2"])

    def test_another_solver_does_not_inherit_options(self) -> None:
        preset = toy().with_deq(f_solver="broyden", f_solver_kwargs={"l_thres": None})
        assert preset.with_deq(f_solver="anderson").task.deq.f_solver_kwargs == {}
        assert preset.with_deq(f_max_iter=3).task.deq.f_solver_kwargs == {"l_thres": None}

    def test_an_unknown_setting_is_answered_in_one_short_line(self) -> None:
        for name in ("lrr", "zzzzz"):
            with pytest.raises(ZooError) as error:
                with_settings(toy(), [f"{name}=1"], "deq-zoo info NAME shows all")
            assert len(str(error.value)) < 80
        assert str(error.value) == "unknown setting 'zzzzz'; deq-zoo info NAME shows all"

    @pytest.mark.parametrize(
        "path", ["os:system", "subprocess:Popen", "deq_zoo.__main__:main", "deq_zoo.optim:a.b"]
    )
    def test_a_file_cannot_name_any_class(self, path: str) -> None:
        with pytest.raises(ZooError, match="only classes of the zoo") as error:
            from_data({"class": path, "args": ["true"]})
        assert "trust" not in str(error.value)

    def test_a_class_or_field_of_another_version_is_an_error(self) -> None:
        with pytest.raises(ZooError, match="does not exist"):
            from_data({"class": "deq_zoo.optim:Nothing"})
        with pytest.raises(ZooError, match=r"'lrr'; did you mean 'lr'.* another version wrote"):
            from_data({"class": "deq_zoo.optim:Adam", "lrr": 1.0})

    def test_fields_of_earlier_versions_are_renamed_or_dropped(self) -> None:
        data = to_data(Toy(width=4))
        data["widht"] = data.pop("width")
        assert from_data(data | {"gone": 3}) == Toy(width=4)

    @pytest.mark.parametrize(("old", "new"), _MOVED.items())
    def test_classes_that_moved_are_read_under_their_old_names(self, old: str, new: str) -> None:
        required = {"channels": [8, 8]} if "MDEQConfig" in old else {}
        again = from_data({"class": old, **required})
        assert to_data(again)["class"] == new

    def test_every_field_has_a_path(self) -> None:
        all_paths = {field.path for field in walk(toy())}
        assert {"task.deq.f_solver", "optim.lr", "optim.betas", "seed", "task.sizes"} <= all_paths

    def test_an_option_without_effect_is_left_out_of_an_earlier_configuration(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        data = to_data(toy())
        data["task"]["deq"]["jac_loss_weight"] = 1.0
        with caplog.at_level("INFO", logger="deq_zoo"):
            assert from_data(data) == toy()
        assert "jac_loss_weight would have no effect" in caplog.text
