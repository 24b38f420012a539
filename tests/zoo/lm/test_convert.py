"""The authors' checkpoints, there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deq_zoo
from deq_zoo.cli import main
from deq_zoo.errors import CheckpointError
from deq_zoo.lm import DEQTransformer, LMConfig
from deq_zoo.lm.convert import from_authors, to_authors
from deq_zoo.lm.lexicon import Lexicon
from tests.zoo.lm.authors import AuthorsModel, draw_state
from tests.zoo.lm.golden import Golden
from tests.zoo.lm.nets import draw_ids, make_config, make_model

VOCABULARIES: dict[str, dict[str, Any]] = {
    "clusters": {"cutoffs": (4, 7), "shrink": 2},
    "clusters of one width": {"cutoffs": (4, 7), "shrink": 1},
    "clusters of one width, projected": {"cutoffs": (4, 7), "shrink": 1, "embed": 6},
    "no clusters": {"cutoffs": (), "shrink": 1},
    "no clusters, projected": {"cutoffs": (), "shrink": 1, "embed": 6},
    "no clusters, a projection of the same width": {"cutoffs": (), "shrink": 4},
}


def release(model: DEQTransformer) -> dict[str, Tensor]:
    return to_authors(model.config, model.state_dict())


def convert(config: LMConfig, norm: str, state: dict[str, Tensor]) -> DEQTransformer:
    """Build our model of the authors' weights."""
    model = DEQTransformer(config, {"norm_type": norm}).double()
    words = {"lexicon._extra_state": Lexicon().get_extra_state()}
    model.load_state_dict(from_authors(config, state) | words)
    return model.eval()


@torch.no_grad()
def compare_outputs(config: LMConfig, norm: str) -> None:
    """Compare embedding, f and softmax with the authors' equations, and convert back."""
    state = draw_state(config, norm)
    model, reference = convert(config, norm, state), AuthorsModel(config, state)
    ids, z = draw_ids(), torch.randn(2, 6, 8, dtype=torch.float64)
    exact: dict[str, Any] = {"atol": 1e-10, "rtol": 0}
    torch.testing.assert_close(model.vocabulary.embed(ids), reference.embed(ids), **exact)
    torch.testing.assert_close(model(ids).f(z), reference.apply_f(z, ids), **exact)
    torch.testing.assert_close(model.log_prob(z), reference.log_prob(z), **exact)
    again = release(model)
    assert again.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(again[key], value), key


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("design", ["original", "redesigned"])
def test_every_vocabulary_of_the_authors_converts(design: str, vocabulary: str) -> None:
    compare_outputs(make_config(design, **VOCABULARIES[vocabulary]), "weight_norm")


@pytest.mark.parametrize("norm", ["spectral_norm", "none"])
@pytest.mark.parametrize("design", ["original", "redesigned"])
def test_every_norm_of_the_authors_converts(design: str, norm: str) -> None:
    compare_outputs(make_config(design), norm)


def test_weights_trained_with_norms_on_the_inputs_convert_by_a_setting() -> None:
    compare_outputs(make_config("original", pre_norm=True), "weight_norm")


def test_weights_that_do_not_record_their_norms_are_converted_with_a_warning(caplog: Any) -> None:
    config = make_config("original")
    from_authors(config, draw_state(config, "weight_norm"))
    assert "--set net.pre_norm=true" in caplog.text
    caplog.clear()
    config = make_config("original", pre_norm=True)
    from_authors(config, draw_state(config, "weight_norm"))
    config = make_config("redesigned")
    from_authors(config, draw_state(config, "weight_norm"))
    assert not caplog.text


def test_a_file_converts_without_the_text_and_keeps_its_sizes(tmp_path: Path, capsys: Any) -> None:
    model = make_model("redesigned").float()
    torch.save(release(model), tmp_path / "a.pth")
    shape = {"tokens": 11, "width": 8, "heads": 2, "inner": 12, "blocks": 2, "cutoffs": "4,7",
             "shrink": 2, "length": 5, "memory": 7}  # fmt: skip
    settings = [word for name, value in shape.items() for word in ("--set", f"{name}={value}")]
    words = ["convert", str(tmp_path / "a.pth"), "--preset", "lm-wt103-final", *settings]
    assert main(words) == 0
    again = deq_zoo.load(tmp_path / "a.safetensors")
    assert again.facts == {"length": 5, "memory": 7}
    ids = [1, 2, 3, 4, 5, 6, 7]
    expected = model.predict(ids, length=5, memory=7).prediction.log_probs
    assert torch.equal(again.predict(ids).prediction.log_probs, expected)


@pytest.mark.parametrize("design", ["original", "redesigned"])
def test_weights_go_to_the_authors_names_and_back(design: str) -> None:
    model = make_model(design)
    released = release(model)
    state = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    back = from_authors(model.config, released)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


@pytest.mark.parametrize("name", ["deq-lm", "deq-seq"])
def test_golden_weights_go_round(name: str) -> None:
    golden = Golden(name)
    again = to_authors(golden.config, golden.make_model().state_dict())
    assert again.keys() == golden.weights.keys()
    for key, value in golden.weights.items():
        torch.testing.assert_close(again[key].float(), value, rtol=1e-6, atol=0)


def test_weights_that_are_not_the_authors_are_errors() -> None:
    model = make_model("redesigned")
    released = release(model)
    released["crit.out_projs.1.weight"] += 1
    with pytest.raises(CheckpointError, match=r"out_projs\.1\.weight should equal word_emb"):
        from_authors(model.config, released)
    with pytest.raises(CheckpointError, match="other is no weight"):
        from_authors(model.config, {"other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="convergent design is ours"):
        release(make_model("convergent"))
    with pytest.raises(CheckpointError, match="the authors have no weights of it"):
        from_authors(make_config("convergent"), released)


def test_weights_of_the_other_design_or_another_size_are_errors() -> None:
    weights = {design: release(make_model(design)) for design in ("original", "redesigned")}
    for released, wanted in (("original", "redesigned"), ("redesigned", "original")):
        message = f"weights of the {released} design, the preset is of the {wanted}"
        with pytest.raises(CheckpointError, match=message):
            from_authors(make_config(wanted), weights[released])
    with pytest.raises(CheckpointError, match=r"out_layers\.0\.bias has 11 rows, a model of 12"):
        from_authors(
            make_config("original", tokens=12, **VOCABULARIES["no clusters"]),
            release(make_model("original", **VOCABULARIES["no clusters"])),
        )
    with pytest.raises(CheckpointError, match="another size"):
        from_authors(make_config("redesigned", width=20, heads=10), weights["redesigned"])
