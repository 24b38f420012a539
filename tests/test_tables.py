"""Tables of the documentation show the numbers that were measured, and say where they come from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.provenance import Provenance
from benchmarks.storing import RESULTS, origins
from deq_zoo.family import find_family, preset_summaries
from deq_zoo.preset import find_preset
from tools import tables
from tools.tables import frame, sentences
from tools.tables.claims import verdict
from tools.tables.frame import ROOT

#: Tables with many digits that no program measures: page, beginning of the header, and the reason.
EXCEPTIONS = {
    ("docs/cookbook.md", "| What you see |"): "the digits are numbers of sections",
    ("docs/losses.md", "| `weight_func` |"): "formulas",
    ("docs/serving.md", "| Status | Reason |"): "HTTP statuses, and limits that are settings",
    ("docs/zoo.md", "| Family | Model |"): "addresses of papers and names of data sets",
    ("docs/zoo.md", "| Model | What it does |"): "made from the cards of pretrained models",
    ("deq_zoo/diffusion/README.md", "| name | data |"): "settings of presets",
}
_PLACES = re.compile(r"<!-- table: \w+ -->.*?<!-- end of table -->", re.DOTALL)
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"^(\|.*)\n\|[ :|-]+\|\n((?:\|.*\n?)+)", re.MULTILINE)


def name_of(page: Path) -> str:
    """Return the path of a page inside the repository."""
    return page.relative_to(ROOT).as_posix()


def measured_by_hand(text: str) -> Iterator[str]:
    """Yield the headers of tables outside of markers in which most cells have a digit."""
    for header, body in _TABLE.findall(_CODE.sub("", _PLACES.sub("", text))):
        rows = [line.strip().strip("|").split("|")[1:] for line in body.splitlines()]
        cells = [cell for row in rows for cell in row]
        if 2 * sum(bool(re.search(r"\d", cell)) for cell in cells) > len(cells):
            yield header


def excepted(page: str, header: str) -> bool:
    """Return whether a table is one of the exceptions."""
    return any(page == where and header.startswith(begin) for where, begin in EXCEPTIONS)


@pytest.mark.parametrize("page", list(tables.pages()), ids=name_of)
def test_the_tables_of_every_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert tables.write(text, page) == text, "run `python -m tools.tables`"


@pytest.mark.parametrize("page", list(tables.pages()), ids=name_of)
def test_no_page_has_a_measured_table_that_is_written_by_hand(page: Path) -> None:
    found = [h for h in measured_by_hand(page.read_text()) if not excepted(name_of(page), h)]
    assert not found, "put the numbers into benchmarks/results and the table into tools/tables"


def test_every_exception_is_needed() -> None:
    headers = {
        (name_of(page), header)
        for page in tables.pages()
        for header in measured_by_hand(page.read_text())
    }
    for where, begin in EXCEPTIONS:
        assert any(page == where and header.startswith(begin) for page, header in headers), begin


def test_a_table_of_numbers_is_recognised_and_one_of_words_is_not() -> None:
    numbers = "| a | b |\n| --- | --- |\n| x | 1.5 |\n| y | 2 |\n"
    assert list(measured_by_hand(numbers)) == ["| a | b |"]
    assert not list(measured_by_hand(numbers.replace("2", "no")))
    assert not list(measured_by_hand(f"<!-- table: a -->\n{numbers}<!-- end of table -->"))


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_a_page_shows_the_table(name: str) -> None:
    assert any(f"<!-- table: {name} -->" in page.read_text() for page in tables.pages())


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_the_sources_of_a_table_are_what_it_reads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results, cards of pretrained models and published results: the line under it names them."""
    seen = set[str]()
    for kind, reader in frame.READERS.items():

        def record(what: str, kind: str = kind, reader: Callable[[str], Any] = reader) -> Any:
            seen.add(f"{kind}:{what}" if kind else what)
            return reader(what)

        monkeypatch.setitem(frame.READERS, kind, record)
    tables.TABLES[name].make()
    assert seen == set(tables.TABLES[name].sources)


def test_tables_take_numbers_of_cards_and_papers_from_their_sources_alone() -> None:
    for file in Path(frame.__file__).parent.glob("*.py"):
        if file.stem not in ("frame", "claims"):  # claims name the papers in their rows
            assert "pretrained_card" not in file.read_text(), file.name
            assert "target.value" not in file.read_text(), file.name


def test_the_line_under_a_table_links_cards_and_names_papers() -> None:
    sources = ["card:mdeq-digits", "card:reason-6x6", "target:mdeq-cifar10-tiny"]
    sources += ["target:mdeq-cifar10-large", "target:reason-trm-sudoku"]
    assert frame.origin(sources, ROOT / "deq_zoo" / "mdeq" / "README.md") == (
        "*the cards of [`mdeq-digits`](../pretrained/mdeq-digits.md), "
        "[`reason-6x6`](../pretrained/reason-6x6.md), with commands and commit; Published numbers: "
        "arXiv:2310.18605 (Tab. mdeq, median of 6 seeds; Tab. mdeq, median of 3 seeds); "
        "arXiv:2510.04871 (Tab. 4, Sudoku-Extreme).*"
    )


def test_the_verdict_on_a_claim_is_that_of_its_comparisons() -> None:
    assert verdict(True, True) == "reproduced"
    assert verdict(True, False) == "in part"
    assert verdict(True, False, False) == "differs"


def test_no_table_writes_a_verdict_of_its_own() -> None:
    for file in Path(frame.__file__).parent.glob("reproduced*.py"):
        assert not re.search('"(reproduced|in part|differs)"', file.read_text()), file.name


def test_another_measurement_is_another_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    row = frame.read("reason/halting")["rows"]["all restarts"]
    monkeypatch.setitem(row, "top1", row["one"] - 1)
    (line,) = (
        line
        for line in tables.TABLES["reproduced_reason"].make().splitlines()
        if "random starts" in line
    )
    assert "| differs |" in line


@pytest.mark.parametrize("name", list(tables.TABLES))
def test_a_changed_number_is_noticed(name: str) -> None:
    place = re.compile(rf"<!-- table: {name} -->.*?<!-- end of table -->", re.DOTALL)
    page, right = next((p, m[0]) for p in tables.pages() if (m := place.search(p.read_text())))
    digit = re.search(r"\d", right)
    assert digit is not None
    wrong = right[: digit.start()] + str(9 - int(digit[0])) + right[digit.end() :]
    assert wrong != right
    assert tables.write(wrong, page) == right


@pytest.mark.parametrize("page", list(sentences.PHRASES))
def test_the_sentences_of_a_page_have_the_numbers_of_the_results(page: str) -> None:
    lacking = sentences.missing(page, _PLACES.sub("", (ROOT / page).read_text()))
    assert not lacking, "; ".join(f"{page} should say: {phrase}" for phrase in lacking)


def test_a_phrase_that_a_page_lacks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sentences.PHRASES, "a.md", [lambda: iter(["12 MB more", "in 3 rounds"])])
    assert sentences.missing("a.md", "It takes 12 MB\nmore, in 4 rounds.") == ["in 3 rounds"]


def test_a_claim_that_does_not_hold_any_longer_is_in_no_page() -> None:
    assert sentences.claim(True, "less than half") == "less than half"
    assert sentences.claim(False, "less than half") == "(no longer true: less than half)"
    assert [sentences.fraction(x) for x in (0.47, 0.41, 0.12)] == ["half", "two fifths", "a tenth"]


def test_a_changed_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = next(p for p in tables.pages() if "<!-- table: loading -->" in p.read_text())
    row = tables.read("loading")["rows"][0]
    monkeypatch.setitem(row, "images_per_s", [1.0, 2.0, 3.0])
    assert tables.write(page.read_text(), page) != page.read_text()


def test_a_table_without_an_end_is_an_error() -> None:
    page = "<!-- table: rivals -->\nwords\n<!-- table: stream -->\n<!-- end of table -->"
    with pytest.raises(ValueError, match=r"the table 'rivals' of a\.md has no end"):
        tables.write(page, ROOT / "a.md")


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"a\.md asks for a table 'rivalz'; known: .*rivals"):
        tables.write("<!-- table: rivalz -->\n<!-- end of table -->", ROOT / "a.md")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_results_say_where_they_come_from(file: Path) -> None:
    if file.stem.startswith("partial"):
        pytest.skip("a trial run, which is not kept")
    found = origins(json.loads(file.read_text()))
    assert found
    for record in found:
        assert record is not None, f"{file.name} has a part without provenance"
        assert set(record) - {"source"} == set(Provenance.__annotations__)
        assert record["commit"] is not None
        text = json.dumps(record)
        assert not re.search(r"/(home|root|tmp|work|Users)\b", text), text


#: Rows of the table of benchmarks: module, file of results, and the cell with links to pages.
_BENCHMARK = re.compile(r"^\| `(benchmarks[\w.]*)[^`]*` \|.*?\| `(\w+)\.json` \| (.*?) \|", re.M)


def benchmarks_by_results() -> dict[str, tuple[str, set[Path]]]:
    """Return, for each file of results, its module and the pages that the table says show it."""
    page = ROOT / "docs" / "benchmarks.md"
    return {
        file: (
            module,
            {
                (page.parent / link).resolve() if link else page
                for link in re.findall(r"\]\(([^)#]*)[^)]*\)", links)
            },
        )
        for module, file, links in _BENCHMARK.findall(page.read_text())
    }


def test_the_page_about_benchmarks_names_every_module_and_every_file_of_results() -> None:
    found = benchmarks_by_results()
    files = {file.stem for file in RESULTS.glob("*.json") if not file.stem.startswith("partial")}
    assert found.keys() | {"published", "recorded"} == files
    for file, (module, _) in found.items():
        for record in origins(json.loads((RESULTS / f"{file}.json").read_text())):
            for command in record["command"].split(" and "):
                assert command.split()[:3] == ["python", "-m", module]


@pytest.mark.parametrize("file", list(benchmarks_by_results()))
def test_the_pages_that_a_benchmark_names_show_its_results(file: str) -> None:
    for page in benchmarks_by_results()[file][1]:
        shown = re.findall(r"<!-- table: (\w+) -->", page.read_text())
        sources = {source for name in shown for source in tables.TABLES[name].sources}
        assert file in {source.partition("/")[0] for source in sources}, page


def test_published_numbers_are_the_targets_of_the_presets() -> None:
    parts = json.loads((RESULTS / "published.json").read_text())
    rows = [row for part in parts.values() for row in part.get("rows", [])]
    shown = {
        preset: value
        for row in rows
        for preset, value in zip(
            row["presets"], row["published"] or [None] * len(row["presets"]), strict=True
        )
    }
    targets = {preset: find_preset(preset).target for preset in shown}
    assert shown == {preset: target and target.value for preset, target in targets.items()}


@pytest.mark.parametrize("name", [name for name in tables.TABLES if name.endswith("_presets")])
def test_a_table_of_presets_has_every_preset_of_its_family(name: str) -> None:
    family = name.removesuffix("_presets")
    shown = [
        preset for row in tables.read(f"published/{family}")["rows"] for preset in row["presets"]
    ]
    assert sorted(shown) == sorted(preset_summaries(find_family(family)))
