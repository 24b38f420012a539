"""What every pretrained model promises: small files, a true card, and use without a network."""

from __future__ import annotations

import hashlib
import platform
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deq_zoo
from deq_zoo.checkpoint import Checkpoint
from deq_zoo.cli import main
from deq_zoo.errors import DataError, MissingPackage
from deq_zoo.evaluate import evaluate
from deq_zoo.family import families
from deq_zoo.identity import differing_settings
from deq_zoo.loading import open_model
from deq_zoo.model import Model
from deq_zoo.packages import missing
from deq_zoo.preset import find_preset
from deq_zoo.pretrained import FOLDER, Card, names, pretrained_card
from deq_zoo.run import read_preset
from deq_zoo.settings import change_preset
from tests.contracts.families import inputs_of
from tools.pretrain import table

LARGEST, ALL_TOGETHER = 2_000_000, 8_000_000  # bytes
SHORT = {"diffusion-digits": {"steps": 1, "f_max_iter": 3}}  # options of a quick prediction
OF_PYTHON = {"lm-reference"}  # their held-out text belongs to a version of Python
USABLE = [
    name for name in names() if not missing(families()[pretrained_card(name).family])
]  # their packages are installed


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a pretrained model asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def input_for(name: str) -> Any:
    """Return an argument for `model.predict`."""
    if name == "ignn-chains":
        node, x = np.arange(4), np.zeros((4, 100), dtype=np.float32)
        x[0, 1] = 1  # the first node says class 1
        return {"edge_index": np.stack((node[:-1], node[1:])), "x": x}
    if name == "ignn-mutag":
        node = np.arange(6)  # a ring of carbon atoms, with edges both ways
        there, back = np.stack((node, (node + 1) % 6)), np.stack(((node + 1) % 6, node))
        return {"edge_index": np.concatenate((there, back), 1), "x": np.eye(7)[[0] * 6]}
    if name == "reason-6x6":
        return ".3......1...3.4..2...4...1.2..2...63"
    if name == "reason-mazes":  # a side of its own
        return "#######\n#S    #\n##### #\n#     #\n# #####\n#    G#\n#######"
    return inputs_of(pretrained_card(name).family).python_input()


def test_there_are_pretrained_models_and_they_are_small() -> None:
    sizes = {name: (FOLDER / f"{name}.safetensors").stat().st_size for name in names()}
    assert sizes
    assert max(sizes.values()) <= LARGEST
    assert sum(sizes.values()) <= ALL_TOGETHER


@pytest.mark.parametrize("name", names())
def test_the_card_describes_the_file_and_both_forms_of_it_agree(name: str) -> None:
    card, weights = pretrained_card(name), FOLDER / f"{name}.safetensors"
    assert card.name == name
    assert (card.size, card.sha256) == (
        weights.stat().st_size,
        hashlib.sha256(weights.read_bytes()).hexdigest(),
    )
    assert card.to_markdown() == (FOLDER / f"{name}.md").read_text()
    assert card.to_json() == (FOLDER / f"{name}.json").read_text()
    assert card.scores.keys() == {"val", "test"}
    assert card.seed in [run.seed for run in card.runs]
    assert card.commit is not None


@pytest.mark.parametrize("name", USABLE)
def test_the_name_is_known_to_from_pretrained(name: str) -> None:
    model = Model.from_pretrained(name)
    torch.testing.assert_close(
        model.state_dict(), deq_zoo.load(name).state_dict(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", USABLE)
def test_the_file_has_weights_alone_and_is_of_its_preset(name: str) -> None:
    card, checkpoint = pretrained_card(name), Checkpoint.load(FOLDER / f"{name}.safetensors")
    assert not checkpoint.optimizer
    assert not checkpoint.randomness
    assert checkpoint.config["name"] == card.preset
    changes = [*card.settings, f"seed={card.seed}"]
    usual = change_preset(find_preset(card.preset), changes, {}, None)
    assert differing_settings(read_preset(checkpoint.config, name), usual) == []


@pytest.mark.parametrize("name", USABLE)
def test_it_loads_by_its_name_and_predicts(name: str) -> None:
    model = deq_zoo.load(name)
    assert not model.training
    assert model.dtype == torch.float32
    output = model.predict(input_for(name), **SHORT.get(name, {}))
    assert output.prediction is not None
    assert sum(p.numel() for p in model.parameters()) == pretrained_card(name).parameters


@pytest.mark.parametrize("name", [n for n in USABLE if families()[n.partition("-")[0]].samples])
def test_it_samples(name: str, tmp_path: Path) -> None:
    few = {"diffusion-digits": ["--n", "2", "--steps", "4"]}
    assert main(["sample", name, "--cpu", "--out", str(tmp_path), *few.get(name, [])]) == 0
    assert (tmp_path / "samples.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("name", USABLE)
def test_it_scores_what_its_card_says(name: str, split: str) -> None:
    python = pretrained_card(name).versions["Python"]
    if name in OF_PYTHON and python != platform.python_version():
        pytest.skip(f"the scores are of the reference of Python {python}")
    model, preset = open_model(Path(name))
    try:
        metrics = evaluate(preset.task, model, split).metrics  # type: ignore[arg-type]
    except (DataError, MissingPackage) as error:
        pytest.skip(str(error))
    for metric, value in metrics.items():
        expected = pretrained_card(name).scores[split][metric]
        # Processors round differently: one image in a thousand may change its class.
        assert value == pytest.approx(expected, rel=2e-3, abs=1e-4), metric


def test_the_documentation_lists_what_the_cards_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "zoo.md"
    assert table() in page.read_text(), f"put this there:\n{table()}"


@pytest.mark.parametrize("name", names())
def test_every_page_that_lists_pretrained_models_has_them_all(name: str) -> None:
    root = Path(__file__).parents[2]
    for page in ("docs/new.md", "CHANGELOG.md", "mkdocs.yml"):
        assert name in (root / page).read_text(), page


@pytest.mark.parametrize("name", names())
def test_half_precision_costs_nothing(name: str) -> None:
    card: Card = pretrained_card(name)
    for split, scores in card.scores.items():
        for metric, value in scores.items():
            if metric == card.score or metric.endswith("accuracy"):
                full = card.full_precision[split][metric]
                # one answer of 500 may change
                assert value == pytest.approx(full, rel=2.5e-3), (split, metric)
