"""The baselines of the comparison of language models are what the tables say they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close

from benchmarks.lm_contest import HELD_OUT, contestants
from benchmarks.lm_rivals import FromZeros, Plain
from benchmarks.lm_training import LanguageTraining
from deq_zoo.lm import data as corpora
from deq_zoo.lm.task import LanguageTask
from deq_zoo.preset import Preset
from tests.zoo.lm.attractor.golden import TIGHT
from tests.zoo.lm.attractor.nets import draw_ids, make_config, make_model


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
