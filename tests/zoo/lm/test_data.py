"""Tokenizers, corpora and the walk through them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm.data import Streams, read_text, split_text, tokenised, topics, wikitext
from deq_zoo.lm.lexicon import Lexicon
from deq_zoo.lm.tokens import Bytes, Pieces, Tokenizer, Words
from deq_zoo.task import Shard
from tests.golden import find_data, load_facts

TEXT = "the cat sat on the mat\n\nthe dog sat near the cat , naïve as ever\n"


def write_corpus(folder: Path, train: list[str], valid: list[str]) -> None:
    (folder / "train.txt").write_text("\n".join(train) + "\n", encoding="utf-8")
    (folder / "wiki.valid.tokens").write_text("\n".join(valid) + "\n", encoding="utf-8")


def test_golden_vocabulary_ids_and_batches_are_reproduced(tmp_path: Path) -> None:
    facts = load_facts("deq-lm", "data_pipeline")
    write_corpus(tmp_path, facts["train_lines"], facts["valid_lines"])
    corpus = wikitext(tmp_path)
    assert isinstance(corpus.tokenizer, Words)
    assert corpus.tokenizer.words == facts["vocab"]
    assert corpus.train.tolist() == facts["train_ids"]
    assert corpus.val.tolist() == facts["valid_ids"]
    streams = Streams.of(corpus.train, 3, 4)
    segments = [{"data": d.tolist(), "target": t.tolist()} for d, t in streams.segments()]
    expected = [{k: s[k] for k in ("data", "target")} for s in facts["iterator_bsz3_len4"]]
    assert segments == expected
    split_streams = Streams.of(corpus.train, 4, 4)
    for k, batch in enumerate(facts["iterator_bsz2_len4_rank1_of_2"]):
        data, target = split_streams.segment(k, Shard(1, 2))
        assert data.tolist() == batch["data"]
        assert target.tolist() == batch["target"]


@pytest.mark.parametrize(
    "tokenizer", [Words.of(TEXT.split("\n")), Bytes(), Pieces.of(TEXT, 270)], ids=lambda t: t.kind
)
def test_text_goes_to_ids_and_back_and_so_does_the_tokenizer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == torch.long
    assert int(ids.max()) < tokenizer.size
    assert tokenizer.decode(ids.tolist()) == TEXT
    lexicon, other = Lexicon(), Lexicon()
    assert lexicon.state_dict()["_extra_state"].numel() == 0
    lexicon.tokenizer = tokenizer
    other.load_state_dict(lexicon.state_dict())
    assert torch.equal(other.require().encode(TEXT), ids)


def test_unknown_words_are_an_error_or_unk() -> None:
    words = Words.of(["a b <unk>"])
    with pytest.raises(DataError, match="'zebra' is not among the 4"):
        words.encode("a zebra")
    assert words.with_unknown("a zebra\nb") == "a <unk>\nb"
    assert words.count_unknown("a zebra\nb giraffe") == 2
    without = Words.of(["a"])
    assert without.with_unknown("b") == "b"
    with pytest.raises(DataError, match="'b' is not among the 2 of the training text: use only"):
        without.encode("b")


def test_a_text_that_is_not_utf8_is_an_error_and_not_repaired(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("für alle ".encode("latin-1") * 20)
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8: .* at byte 1; convert it"):
        read_text(tmp_path / "a.txt")


def test_the_ends_of_lines_are_those_of_the_file(tmp_path: Path) -> None:
    content = b"one\r\ntwo\nthree\r"
    (tmp_path / "a.txt").write_bytes(content)
    assert read_text(tmp_path / "a.txt").encode() == content


def test_pieces_are_the_bytes_at_least() -> None:
    assert Pieces.of(TEXT, 256).size == 256
    with pytest.raises(DataError, match="pieces=100 is too few"):
        Pieces.of(TEXT, 100)


def test_a_lexicon_keeps_its_vocabulary() -> None:
    lexicon, words = Lexicon(), Words.of(["a b"])
    lexicon.adopt(words)
    lexicon.adopt(Words.of(["a b"]))
    for other in (Words.of(["b a"]), Bytes()):
        with pytest.raises(ZooError, match="another vocabulary"):
            lexicon.adopt(other)
    pieces = Lexicon()
    pieces.adopt(Pieces.of(TEXT, 270))
    again = Lexicon()
    again.load_state_dict(pieces.state_dict())
    again.adopt(Pieces.of(TEXT, 270))  # as a resumed run does


def test_every_target_is_scored_once() -> None:
    ids = torch.arange(23)
    streams = Streams.of(ids, 2, 4)
    targets = torch.cat([t for _, t in streams.segments()], dim=1)
    assert targets.tolist() == [list(range(1, 11)), list(range(12, 22))]
    assert len(streams) == 3


def test_a_text_is_held_out_in_two_parts(tmp_path: Path) -> None:
    text = "".join(chr(97 + k % 26) for k in range(1000))
    parts = split_text(text)
    assert "".join(parts[split] for split in ("train", "val", "test")) == text
    (tmp_path / "a.txt").write_text(text)
    corpus = tokenised(split_text(read_text(tmp_path / "a.txt")), 0)
    assert bytes(corpus.train.tolist()).decode() == parts["train"]
    assert bytes(corpus.val.tolist()).decode() == parts["val"]
    assert len(corpus.val) == len(parts["test"]) == 50


def test_the_embedded_text_is_pythons_reference() -> None:
    corpus = tokenised(split_text(topics()), 0)
    assert len(corpus.train) > 300_000
    assert "assert" in corpus.tokenizer.decode(corpus.train[:2000].tolist())


def test_missing_data_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--data-dir"):
        wikitext(None)
    with pytest.raises(DataError, match=r"train\.txt or wiki\.train\.tokens"):
        wikitext(tmp_path)
    with pytest.raises(DataError, match=r"task\.file=FILE"):
        read_text(None)
    with pytest.raises(DataError, match="cannot be read"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(DataError, match="too short to learn from"):
        split_text("short")
    with pytest.raises(DataError, match="too short for 8 streams"):
        Streams.of(torch.arange(9), 8, 4)
    with pytest.raises(DataError, match="cannot be divided among 2 processes"):
        Streams.of(torch.arange(30), 3, 4).segment(0, Shard(0, 2))


@pytest.mark.slow
def test_wikitext_2_has_its_published_numbers() -> None:
    corpus = wikitext(find_data("wikitext2"))
    assert corpus.tokenizer.size == 33_278
    assert (len(corpus.train), len(corpus.val)) == (2_088_628, 217_646)
