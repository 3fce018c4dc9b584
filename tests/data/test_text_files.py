"""Sources of JSON lines, tab-separated and parallel text: what they yield, what they say about a bad file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from moe.data.pairs import SentencePair
from moe.data.sources import JsonLines, ParallelText, TabSeparated
from moe.errors import UserError
from tests.data.written import ALL_TRAIN, DE_EN, EN_DE, lines, write

HELLO = {"en": "Hello there", "translations": {"de": "Hallo du", "pt_BR": "Olá"}}
FLAT = {"source": "Guten Tag", "target": "Good day", "source_lang": "de", "target_lang": "en"}


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_json_lines_of_both_forms_give_both_directions(tmp_path, ending):
    path = write(tmp_path / f"data.jsonl{ending}", lines(HELLO, FLAT) + "\n")
    pairs = JsonLines(path=path, **ALL_TRAIN).pairs("train")
    assert {str(d): list(p) for d, p in pairs.items()} == {
        "en-de": [
            SentencePair("Hello there", "Hallo du", "en", "de"),
            SentencePair("Good day", "Guten Tag", "en", "de"),
        ],
        "de-en": [
            SentencePair("Hallo du", "Hello there", "de", "en"),
            SentencePair("Guten Tag", "Good day", "de", "en"),
        ],
        "en-pt-BR": [SentencePair("Hello there", "Olá", "en", "pt-BR")],
        "pt-BR-en": [SentencePair("Olá", "Hello there", "pt-BR", "en")],
    }


def test_one_direction_alone_can_be_asked_for(tmp_path):
    path = write(tmp_path / "data.jsonl", lines(FLAT))
    pairs = JsonLines(path=path, both_directions=False, **ALL_TRAIN).pairs("train")
    assert {str(direction) for direction in pairs} == {"de-en"}


def test_languages_are_chosen_by_any_of_their_names(tmp_path):
    path = write(tmp_path / "data.jsonl", lines(HELLO))
    pairs = JsonLines(path=path, languages=("pt-br",), **ALL_TRAIN).pairs("train")
    assert {str(direction) for direction in pairs} == {"en-pt-BR", "pt-BR-en"}


def test_unknown_language_lists_those_there_are(tmp_path):
    path = write(tmp_path / "data.jsonl", lines(HELLO))
    with pytest.raises(UserError, match=r"data\.jsonl: got xx\. There are de, pt-BR"):
        JsonLines(path=path, languages=("de", "xx")).pairs("train")


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "[1, 2]",
        "7",
        '{"en": "Hello"}',
        '{"en": "Hello", "translations": {"de": 3}}',
        '{"en": "Hello", "translations": {"de": " "}}',
        '{"en": "Hello", "translations": ["Hallo"]}',
        '{"translations": {"de": "Hallo"}}',
        '{"source": "a", "target": "b", "source_lang": "de", "target_lang": "de"}',
        '{"source": "a", "target": "b", "source_lang": "de"}',
    ],
)
def test_malformed_json_line_is_named(tmp_path, line):
    path = write(tmp_path / "data.jsonl", lines(HELLO) + line + "\n")
    with pytest.raises(UserError, match=r"line 2 of .*data\.jsonl must be a JSON object"):
        JsonLines(path=path).pairs("train")


def test_tab_separated_ignores_further_columns_and_empty_lines(tmp_path):
    path = write(tmp_path / "data.tsv", "\ufeffHello\tHallo\tby me\r\n\nYes sir\tJa\n")
    source = TabSeparated(path=path, source_lang="en", target_lang="de", **ALL_TRAIN)
    assert list(source.pairs("train")[EN_DE]) == [
        SentencePair("Hello", "Hallo", "en", "de"),
        SentencePair("Yes sir", "Ja", "en", "de"),
    ]


@pytest.mark.parametrize("line", ["Hello Hallo", "Hello\t", "\tHallo", "Hello\t \tby me"])
def test_malformed_tab_separated_line_is_named(tmp_path, line):
    path = write(tmp_path / "data.tsv", f"Hi\tHallo\n\n{line}\n")
    with pytest.raises(UserError, match=r"line 3 of .*data\.tsv must be two texts with a tab"):
        TabSeparated(path=path, source_lang="en", target_lang="de").pairs("train")


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_parallel_text_pairs_line_by_line_without_the_empty_ones(tmp_path, ending):
    english = write(tmp_path / f"a.en{ending}", "Hello\n\nYes\u2028sir\nNo\n")
    german = write(tmp_path / f"a.de{ending}", "Hallo\nWas?\nJa\n\n")
    source = ParallelText(
        source_path=english, target_path=german, source_lang="en", target_lang="de", **ALL_TRAIN
    )
    assert [(p.source, p.target) for p in source.pairs("train")[EN_DE]] == [
        ("Hello", "Hallo"),
        ("Yes\u2028sir", "Ja"),
    ]
    assert [(p.source, p.target) for p in source.pairs("train")[DE_EN]] == [
        ("Hallo", "Hello"),
        ("Ja", "Yes\u2028sir"),
    ]


@pytest.mark.parametrize(("english", "german"), [(3, 5), (5, 3), (0, 2), (2, 0)])
def test_parallel_files_of_different_length_are_refused(tmp_path, english, german):
    source = ParallelText(
        source_path=write(tmp_path / "a.en", "Hello\n" * english),
        target_path=write(tmp_path / "a.de", "Hallo\n" * german),
        source_lang="en",
        target_lang="de",
    )
    with pytest.raises(UserError, match=f"same number of lines: got {english} and {german}"):
        source.pairs("train")


def tab_separated(path: str, **options) -> TabSeparated:
    return TabSeparated(path=path, source_lang="en", target_lang="de", **options)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"path must name a file: got .*nowhere\.tsv"):
        tab_separated(str(tmp_path / "nowhere.tsv")).pairs("train")


def test_empty_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="must hold at least one sentence pair: got none"):
        tab_separated(write(tmp_path / "empty.tsv", "\n\n")).pairs("train")


def test_wrong_encoding_is_named_with_its_line_and_byte(tmp_path):
    path = write(tmp_path / "data.tsv", "Hello\tHallo\nDoor\tTür\n".encode("latin1"))
    with pytest.raises(UserError, match=r"line 2 of .*data\.tsv must be UTF-8: got the byte 0xfc"):
        tab_separated(path).pairs("train")


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_truncated_and_false_compressed_files_are_refused(tmp_path, ending):
    path = Path(write(tmp_path / f"data.tsv{ending}", os.urandom(50_000).hex()))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match="must be a whole compressed file"):
        tab_separated(str(path)).pairs("train")
    path.write_bytes(b"Hello\tHallo\n")
    with pytest.raises(UserError, match="must be a whole compressed file"):
        tab_separated(str(path)).pairs("train")


def test_one_language_on_both_sides_is_refused():
    with pytest.raises(UserError, match="must be two languages: got 'pt_BR' and 'pt-br'"):
        TabSeparated(path="x", source_lang="pt_BR", target_lang="pt-br")


def test_a_split_of_an_aligned_column_can_be_sliced(tmp_path):
    path = write(tmp_path / "data.tsv", "".join(f"text {i}\tText {i}\n" for i in range(5)))
    pairs = tab_separated(path, **ALL_TRAIN).pairs("train")[EN_DE]
    assert list(pairs[1:3]) == [pairs[1], pairs[2]]
    assert pairs[-1].target == "Text 4"
    assert pickle.loads(pickle.dumps(pairs)) == pairs
