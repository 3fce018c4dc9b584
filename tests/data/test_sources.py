"""Every kind of data source: what it yields, and what it says about a bad file."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
import random
from pathlib import Path
from typing import Annotated

import numpy as np
import polib
import pydantic
import pytest
import tensorflow_datasets as tfds

from moe.data.pairs import Direction, SentencePair
from moe.data.sources import (
    DataSource,
    Generated,
    Gettext,
    JsonLines,
    ParallelText,
    TabSeparated,
    TfdsSource,
)
from moe.data.tfds_source import TranslationRecords
from moe.errors import UserError

ALL_TRAIN = {"validation_fraction": 0.0, "test_fraction": 0.0}
EN_DE, DE_EN = Direction("en", "de"), Direction("de", "en")


def write(path: Path, text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress(data))
    return str(path)


def lines(*items: object) -> str:
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


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


@pytest.mark.parametrize("fractions", [(-0.1, 0.1), (0.5, 0.5)])
def test_impossible_fractions_are_refused(fractions):
    with pytest.raises(UserError, match=f"got {fractions[0]} and {fractions[1]}"):
        Generated(validation_fraction=fractions[0], test_fraction=fractions[1])


def test_file_is_divided_so_that_no_english_sentence_is_in_two_splits(tmp_path):
    rng = random.Random(0)
    english = ["".join(rng.choices("abcdefgh ", k=30)) + " a b c" for _ in range(100)]
    # Every English sentence comes in two languages, once with the German side first.
    items = [
        {"source": f"de {text}", "target": text, "source_lang": "de", "target_lang": "en"}
        for text in english
    ]
    items += [{"en": text.upper(), "translations": {"fr": f"fr {text}"}} for text in english]
    path = write(tmp_path / "data.jsonl", lines(*items))
    source = JsonLines(path=path, validation_fraction=0.2, test_fraction=0.2)
    seen: dict[str, str] = {}
    for split in ("train", "validation", "test"):
        for direction, pairs in source.pairs(split).items():
            assert len(pairs) > 0
            for pair in pairs:
                assert seen.setdefault(pair.key.lower(), split) == split
                assert pair.direction == direction
    assert set(seen.values()) == {"train", "validation", "test"}
    assert len(seen) == 100


def test_a_split_of_an_aligned_column_can_be_sliced(tmp_path):
    path = write(tmp_path / "data.tsv", "".join(f"text {i}\tText {i}\n" for i in range(5)))
    pairs = tab_separated(path, **ALL_TRAIN).pairs("train")[EN_DE]
    assert list(pairs[1:3]) == [pairs[1], pairs[2]]
    assert pairs[-1].target == "Text 4"
    assert pickle.loads(pickle.dumps(pairs)) == pairs


# Gettext

CATALOGUE = """msgid ""
msgstr ""
"Content-Type: text/plain; charset={charset}\\n"
"Language: {language}\\n"

msgid "Open the <b>door</b>"
msgstr "{door}"

#, fuzzy
msgid "Fuzzy entry"
msgstr "Unsicher"

msgid "Not translated"
msgstr ""

msgid "one file"
msgid_plural "%d files"
msgstr[0] "eine Datei"
msgstr[1] "%d Dateien"

#~ msgid "Obsolete entry"
#~ msgstr "Veraltet"
"""


def catalogue(language: str, door: str, charset: str = "UTF-8") -> str:
    return CATALOGUE.format(language=language, door=door, charset=charset)


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_gettext_reads_approved_entries_of_a_tree(tmp_path, ending):
    write(tmp_path / f"locale/de/LC_MESSAGES/app.po{ending}", catalogue("", "Öffne die Tür"))
    write(tmp_path / f"locale/en_GB/LC_MESSAGES/app.po{ending}", catalogue("", "Open ye door"))
    write(tmp_path / f"po/pt_BR.po{ending}", catalogue("", "Abra a porta"))
    write(tmp_path / f"po/francais.po{ending}", catalogue("fr", "Ouvrez la porte"))
    pairs = Gettext(path=str(tmp_path), **ALL_TRAIN).pairs("train")
    assert {str(d): [p.target for p in of] for d, of in pairs.items() if d.source_lang == "en"} == {
        "en-de": ["Öffne die Tür"],
        "en-pt-BR": ["Abra a porta"],
        "en-fr": ["Ouvrez la porte"],
    }
    assert pairs[EN_DE][0].source == "Open the door"


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_gettext_reads_mo_files_but_not_beside_a_po(tmp_path, ending):
    folder = tmp_path / "de/LC_MESSAGES"
    compiled = polib.pofile(catalogue("", "Tür auf")).to_binary()
    write(folder / f"other.mo{ending}", compiled)
    write(folder / f"app.mo{ending}", compiled)
    write(folder / "app.po", catalogue("", "Öffne die Tür"))
    pairs = Gettext(path=str(tmp_path), **ALL_TRAIN).pairs("train")
    assert sorted(pair.target for pair in pairs[EN_DE]) == ["Tür auf", "Öffne die Tür"]


def test_gettext_decodes_as_the_header_says(tmp_path):
    text = catalogue("", "Öffne die Tür", charset="ISO-8859-1")
    path = write(tmp_path / "de.po", text.encode("latin1"))
    assert Gettext(path=path, **ALL_TRAIN).pairs("train")[EN_DE][0].target == "Öffne die Tür"


def test_gettext_with_a_false_charset_names_line_and_byte(tmp_path):
    write(tmp_path / "de.po", catalogue("", "Öffne die Tür").encode("latin1"))
    with pytest.raises(UserError, match=r"line 7 of .*de\.po must be in .*utf-8.*the byte 0xd6"):
        Gettext(path=str(tmp_path)).pairs("train")


def test_malformed_catalogue_is_named_with_its_line(tmp_path):
    write(tmp_path / "de.po", 'msgid "a"\nmsgstr "b"\nmsgsrt "c"\n')
    with pytest.raises(UserError, match=r"line 3 of .*de\.po must be a gettext catalogue"):
        Gettext(path=str(tmp_path)).pairs("train")


def test_truncated_mo_file_is_named(tmp_path):
    compiled = polib.pofile(catalogue("", "Tür auf")).to_binary()
    for size in (4, 20):
        write(tmp_path / "de.mo", compiled[:size])
        with pytest.raises(UserError, match=r"de\.mo must be"):
            Gettext(path=str(tmp_path)).pairs("train")


def test_folder_without_catalogues_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"path must hold \.po or \.mo files: got .*which has none"):
        Gettext(path=str(tmp_path)).pairs("train")


def test_catalogue_of_unknown_language_is_named(tmp_path):
    write(tmp_path / "application.po", catalogue("", "Öffne die Tür"))
    with pytest.raises(UserError, match=r"application\.po must say its language"):
        Gettext(path=str(tmp_path)).pairs("train")


# TFDS


class TinyFixed(tfds.core.GeneratorBasedBuilder):
    """A builder as anyone may write it: a fixed `Translation`, and no validation split."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.Translation(languages=["en", "zh_cn"])
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(6), "test": self._generate_examples(2)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"en": f"text {i}", "zh_cn": f"文本 {i}"}


class TinyVariable(tfds.core.GeneratorBasedBuilder):
    """Variable languages, inside of another feature, with one example without English."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "talk": tfds.features.Text(),
            "translations": tfds.features.TranslationVariableLanguages(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "test": self._generate_test()}

    def _generate_test(self):
        yield 0, {"talk": "numbers", "translations": {"en": "four", "de": "vier"}}

    def _generate_examples(self):
        texts = [{"en": "one", "de": "eins", "fr": "un"}, {"en": "two", "de": "zwei"}]
        for i, item in enumerate([*texts, {"de": "drei", "fr": "trois"}]):
            yield i, {"talk": "numbers", "translations": item}


class TinyNumbers(tfds.core.GeneratorBasedBuilder):
    """No translation at all."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"id": tfds.features.Scalar(dtype=np.int64)})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"id": 0}


def test_fixed_translation_is_read_pair_by_pair(tmp_path):
    source = TfdsSource(name="tiny_fixed", data_dir=str(tmp_path))
    pairs = source.pairs("train")
    forward = pairs[Direction("en", "zh-Hans")]
    assert {str(d): len(p) for d, p in pairs.items()} == {"en-zh-Hans": 6, "zh-Hans-en": 6}
    assert isinstance(forward, TranslationRecords)
    assert sorted(pair.source for pair in forward) == [f"text {i}" for i in range(6)]
    for pair, back in zip(forward, pairs[Direction("zh-Hans", "en")], strict=True):
        assert pair.target == pair.source.replace("text", "文本")
        assert back == pair.reverse
    assert forward[-1] == forward[5]
    with pytest.raises(IndexError):
        forward[6]
    assert forward[4:] == [forward[4], forward[5]]
    assert list(pickle.loads(pickle.dumps(forward))) == list(forward)


def test_missing_split_lists_those_there_are_and_a_slice_replaces_it(tmp_path):
    source = TfdsSource(name="tiny_fixed", data_dir=str(tmp_path))
    with pytest.raises(UserError, match="got 'validation', and there are test, train"):
        source.pairs("validation")
    sliced = TfdsSource(name="tiny_fixed", data_dir=str(tmp_path), validation_split="train[50%:]")
    assert len(sliced.pairs("validation")[Direction("en", "zh-Hans")]) == 3


def test_variable_languages_are_paired_with_english(tmp_path):
    pairs = TfdsSource(name="tiny_variable", data_dir=str(tmp_path)).pairs("train")
    found = {str(d): sorted((p.source, p.target) for p in of) for d, of in pairs.items()}
    assert found == {
        "en-de": [("one", "eins"), ("two", "zwei")],
        "de-en": [("eins", "one"), ("zwei", "two")],
        "en-fr": [("one", "un")],
        "fr-en": [("un", "one")],
    }


def test_languages_of_a_data_set_can_be_chosen(tmp_path):
    source = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("fr",))
    assert {str(direction) for direction in source.pairs("train")} == {"en-fr", "fr-en"}
    unknown = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("it",))
    with pytest.raises(UserError, match=r"those of tiny_variable: got it\. There are de, fr\."):
        unknown.pairs("train")


def test_language_without_a_test_sentence_is_not_in_the_test_but_known(tmp_path):
    chosen = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("de", "fr"))
    assert {str(direction) for direction in chosen.pairs("test")} == {"en-de", "de-en"}
    french = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("fr",))
    assert french.pairs("test") == {}
    unknown = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("it",))
    with pytest.raises(UserError, match=r"got it\. There are de, fr\."):
        unknown.pairs("test")


def test_unknown_data_set_is_named(tmp_path):
    with pytest.raises(UserError, match=r"name must be .* got 'no_such_data'"):
        TfdsSource(name="no_such_data", data_dir=str(tmp_path)).pairs("train")


def test_data_set_without_translations_is_refused(tmp_path):
    with pytest.raises(UserError, match="tiny_numbers must have a Translation"):
        TfdsSource(name="tiny_numbers", data_dir=str(tmp_path)).pairs("train")


def test_damaged_prepared_folder_is_named_with_the_cure(tmp_path):
    TfdsSource(name="tiny_fixed", data_dir=str(tmp_path)).pairs("train")
    (tmp_path / "tiny_fixed/1.0.0/dataset_info.json").unlink()
    with pytest.raises(UserError, match=r"whole in .*tiny_fixed.*got only a part\. Remove that"):
        TfdsSource(name="tiny_fixed", data_dir=str(tmp_path)).pairs("train")


def test_another_process_that_prepares_first_does_no_harm(tmp_path, monkeypatch):
    class Overtaken(TinyFixed, skip_registration=True):
        name = "tiny_fixed"

        def _split_generators(self, dl_manager):
            TinyFixed(data_dir=tmp_path).download_and_prepare(file_format="array_record")
            return super()._split_generators(dl_manager)

    real_builder = tfds.builder
    overtaken = iter([Overtaken(data_dir=tmp_path)])
    monkeypatch.setattr(
        tfds, "builder", lambda *args, **kw: next(overtaken, None) or real_builder(*args, **kw)
    )
    pairs = TfdsSource(name="tiny_fixed", data_dir=str(tmp_path)).pairs("train")
    assert len(pairs[Direction("en", "zh-Hans")]) == 6
    assert [path.name for path in (tmp_path / "tiny_fixed").iterdir()] == ["1.0.0"]


# Configuration

SOURCES = [
    TfdsSource(name="tiny_fixed", languages=("de",)),
    JsonLines(path="a.jsonl"),
    tab_separated("a.tsv"),
    ParallelText(source_path="a", target_path="b", source_lang="en", target_lang="de"),
    Gettext(path="locale"),
    Generated(sentences=7, seed=3),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.kind)
def test_a_stored_source_is_read_back_by_its_kind(source):
    stored = pydantic.TypeAdapter(Annotated[DataSource, pydantic.Field(discriminator="kind")])
    text = stored.dump_json(source)
    assert json.loads(text)["kind"] == source.kind
    assert stored.validate_json(text) == source


def test_every_kind_is_told_apart():
    assert len({source.kind for source in SOURCES}) == len(SOURCES)
