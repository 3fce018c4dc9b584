"""What all kinds of data sources share: the split and the stored configuration."""

from __future__ import annotations

import json
import random
from typing import Annotated

import pydantic
import pytest

from moe.data.sources import (
    DataSource,
    Generated,
    Gettext,
    JsonLines,
    ParallelText,
    TabSeparated,
    TfdsSource,
)
from moe.errors import UserError
from tests.data.written import lines, write


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


SOURCES = [
    TfdsSource(name="tiny_fixed", languages=("de",)),
    JsonLines(path="a.jsonl"),
    TabSeparated(path="a.tsv", source_lang="en", target_lang="de"),
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
