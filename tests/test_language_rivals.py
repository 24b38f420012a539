"""The baselines of the comparison of language models are what the tables say they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from benchmarks import lm
from benchmarks.lm_contest import HELD_OUT, contestants
from benchmarks.lm_rivals import Explicit, FromZeros, Plain, Recomputing
from benchmarks.lm_training import LanguageTraining
from deq_zoo.lm import data as corpora
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.task import LanguageTask
from deq_zoo.preset import Preset
from tests.zoo.lm import nets
from tests.zoo.lm.attractor.golden import TIGHT
from tests.zoo.lm.attractor.nets import draw_ids, make_config, make_model
from tools.tables.language import DESIGNS


def write_wikitext(folder: Path) -> None:
    for k, name in enumerate(("train", "valid")):
        lines = (f"w{n % 17} w{n % 5} w{(n + k) % 11}" for n in range(4000))
        (folder / f"{name}.txt").write_text("\n".join(lines))


def make_preset(folder: Path, name: str, **changes: Any) -> Preset:
    preset = contestants(str(folder), 1, 1)[name]
    assert isinstance(preset.task, LanguageTask)
    return replace(preset, task=replace(preset.task, **changes))


def test_held_out_text_is_the_end_of_the_training_file_and_valid_the_test(tmp_path: Path) -> None:
    write_wikitext(tmp_path)
    task = make_preset(tmp_path, "attractor").task
    assert isinstance(task, LanguageTask)
    whole = corpora.wikitext(tmp_path)
    cut = len(whole.train) - len(whole.train) // HELD_OUT
    assert_close(task.train_set, whole.train[:cut])
    assert_close(task.val_set, whole.train[cut:])
    assert_close(task._encode_split("test", whole.tokenizer), whole.val)


def test_the_explicit_network_has_the_blocks_of_the_attractor_and_no_solve() -> None:
    config = make_config(backbone=2, blocks=2)
    plain = Plain(config, TIGHT).double().eval()
    attractor = make_model(backbone=2, blocks=2)
    gates = sum(p.numel() for name, p in attractor.named_parameters() if "gamma" in name)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (plain, attractor)]
    assert gates > 0
    assert sizes[0] == sizes[1] - gates
    ids = draw_ids()
    later = ids.clone()
    later[:, -1] = (later[:, -1] + 1) % 11
    a, b = plain(ids), plain(later)
    assert a.stats.nfe == 0
    assert_close(a.z[:, :-1], b.z[:, :-1], rtol=0, atol=0)


def test_a_start_at_zeros_leads_to_the_same_fixed_point() -> None:
    own = make_model()
    other = FromZeros(make_config(), TIGHT).double().eval()
    other.load_state_dict(own.state_dict())
    ids = draw_ids()
    assert_close(other(ids).z, own(ids).z, rtol=0, atol=1e-8)


def test_explicit_batches_end_at_their_share_of_the_time(tmp_path: Path, monkeypatch: Any) -> None:
    write_wikitext(tmp_path)
    preset = make_preset(tmp_path, "attractor", explicit=70)
    training = LanguageTraining(replace(preset, steps=100), 0, 1.0, tmp_path / "run.safetensors")
    seen: list[bool] = []
    make_batch = LanguageTask.make_batch

    def note(self: LanguageTask, *args: Any, explicit: bool) -> Any:
        seen.append(explicit)
        return make_batch(self, *args, explicit=explicit)

    monkeypatch.setattr(LanguageTask, "make_batch", note)
    torch.manual_seed(0)
    for share in (0.0, 0.69, 0.7, 0.99):
        training.carry = training.update(share)
        training.step += 1
    assert seen == [True, True, False, False]


def make_explicit() -> Explicit:
    """Build a Transformer-XL of two blocks in float64."""
    torch.manual_seed(0)
    model = Explicit(nets.make_config("redesigned")).double().eval()
    model.load_state_dict(nets.make_model("redesigned").state_dict())
    return model


@torch.no_grad()
def test_the_transformer_xl_is_one_evaluation_of_the_redesigned_map_at_the_embedding() -> None:
    explicit, ids = make_explicit(), draw_ids()
    redesigned = nets.make_model("redesigned", {"f_max_iter": 1, "f_tol": 0.0})
    out = explicit(ids)
    assert_close(out.z, redesigned(ids, explicit.vocabulary.embed(ids)).z, rtol=0, atol=1e-12)
    assert out.stats.nfe == 0


@torch.no_grad()
def test_the_transformer_xl_is_causal() -> None:
    model, ids = make_explicit(), draw_ids()
    later = ids.clone()
    later[:, 5] = (later[:, 5] + 1) % 11
    a, b = model(ids).z, model(later).z
    assert_close(a[:, :5], b[:, :5], rtol=0, atol=1e-12)
    assert (a[:, 5:] - b[:, 5:]).abs().amax(dim=(0, 2)).min() > 1e-6


@torch.no_grad()
def test_the_transformer_xl_reads_a_text_in_pieces_as_in_one_piece() -> None:
    model, ids = make_explicit(), draw_ids()
    whole, memory, pieces = model(ids), None, []
    for piece in ids.split(2, dim=1):
        out = model(piece, memory=memory)
        memory = (memory or model.empty_memory(out.u)).followed_by(out, ids.shape[1])
        pieces.append(out.z)
    assert_close(torch.cat(pieces, dim=1), whole.z, rtol=0, atol=1e-12)
    alone = model(ids[:, -1:]).z  # without a memory a token has other states
    assert (alone - whole.z[:, -1:]).abs().max() > 1e-3


def test_the_transformer_xl_has_the_blocks_and_parameters_of_the_table() -> None:
    tasks = {name: preset.task for name, preset in lm.presets(".", lm.SMALL).items()}
    with torch.device("meta"):
        explicit, redesigned = (tasks[name].build() for name in ("explicit", "redesigned"))
    assert isinstance(explicit, Explicit)
    assert f"{len([*explicit.func])} explicit blocks" in DESIGNS["explicit"]
    shapes = [{k: p.shape for k, p in m.named_parameters()} for m in (explicit, redesigned)]
    assert shapes[0] == shapes[1]


def make_any(design: str) -> LanguageModel:
    """Build a small model of any design, or a Transformer-XL."""
    if design == "Transformer-XL":
        return make_explicit()
    return make_model() if design == "attractor" else nets.make_model(design)


@pytest.mark.parametrize("design", [*nets.DESIGNS, "attractor", "Transformer-XL"])
@torch.no_grad()
def test_recomputing_gives_the_values_of_the_whole_text(design: str) -> None:
    ids, model = draw_ids(), make_any(design)
    decoder = Recomputing(model)
    whole = model.log_prob(model(ids).z)
    assert_close(decoder.feed(ids[:, :4]), whole[:, 3], rtol=0, atol=1e-8)
    for k in range(4, ids.shape[1]):
        assert_close(decoder.feed(ids[:, k : k + 1]), whole[:, k], rtol=0, atol=1e-8)
