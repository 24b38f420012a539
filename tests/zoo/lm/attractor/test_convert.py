"""The authors' attractors, there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError
from deq_zoo.lm.convert import from_authors, to_authors
from tests.zoo.lm.attractor.golden import Golden
from tests.zoo.lm.attractor.nets import make_config, make_model


@pytest.mark.parametrize("variant", ["A", "B"])
def test_golden_weights_of_attractors_go_round(variant: str) -> None:
    golden = Golden(variant)
    released = to_authors(golden.config, golden.make_model().state_dict())
    assert released.keys() == {*golden.weights, "lm_head.weight"}
    assert torch.equal(released["lm_head.weight"], golden.weights["transformer.wte.weight"])
    for key, value in golden.weights.items():
        if key == "freqs_cis":
            torch.testing.assert_close(released[key][:, :24], value, atol=1e-14, rtol=0)
        else:
            assert torch.equal(released[key], value), key
    wrapped = {f"module._orig_mod.{key}": value for key, value in released.items()}
    state = golden.make_model().state_dict()
    for key, value in from_authors(golden.config, wrapped).items():
        assert torch.equal(value, state[key])


def test_a_file_of_an_attractor_converts_by_settings(tmp_path: Path) -> None:
    model = make_model(input_rms=0.0).float()
    torch.save(to_authors(model.config, model.state_dict()), tmp_path / "a.pth")
    shape = {"tokens": 11, "width": 8, "heads": 2, "inner": 12, "backbone": 2, "blocks": 2,
             "gate_start": 0.25, "length": 5, "memory": 7}  # fmt: skip
    settings = [word for name, value in shape.items() for word in ("--set", f"{name}={value}")]
    preset = "lm-fineweb-140m-attractor"
    assert main(["convert", str(tmp_path / "a.pth"), "--preset", preset, *settings]) == 0
    again = deq_zoo.load(tmp_path / "a.safetensors")
    for name, p in model.named_parameters():
        assert torch.equal(again.get_parameter(name), p)


def test_weights_that_are_no_attractor_of_the_authors_are_errors() -> None:
    config = make_config(input_rms=0.0)
    released = to_authors(config, make_model(input_rms=0.0).state_dict())
    with pytest.raises(CheckpointError, match="other is no weight of an attractor"):
        from_authors(config, {"other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"should equal transformer\.wte\.weight"):
        from_authors(config, released | {"lm_head.weight": torch.zeros(11, 8)})
    with pytest.raises(CheckpointError, match="is not the rotary table of 2 heads of width 4"):
        from_authors(make_config(input_rms=0.0, rotary_base=10_000.0), released)
    for table in (torch.zeros(()), torch.zeros(3)):
        with pytest.raises(CheckpointError, match="is not the rotary table"):
            from_authors(config, released | {"freqs_cis": table})
    with pytest.raises(CheckpointError, match="set input_rms=0"):
        from_authors(make_config(), released)
    with pytest.raises(CheckpointError, match="without clusters or projections"):
        to_authors(make_config(input_rms=0.0, cutoffs=(4,)), released)
    with pytest.raises(CheckpointError, match="two weights have the same name"):
        from_authors(config, released | {"model.lm_head.weight": released["lm_head.weight"]})
