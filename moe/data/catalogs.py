"""The default data set: translations that real programs ship, as a TFDS builder."""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from moe.data.cleaning import clean_pair
from moe.data.gettext_files import catalogue_language, parse_catalogue, translated
from moe.data.pairs import SPLITS, language_tag
from moe.data.split import split_texts
from moe.data.wheels import WHEELS, fetch

MIN_PAIRS = 1000  # a language with fewer is left out
HELD_OUT = 0.04  # of the sentences of three words and more: 2.5 % of all strings in each split

_GETTEXT = re.compile(r".+/locale/[^/]+/LC_MESSAGES/[^/]+\.po")
_JSON = re.compile(r"(.+/translations/(?:\w+\.)?)([A-Za-z]{2,3}(?:-\w+)*)\.json")


@dataclass
class Entry:
    """One English string: the packages that have it and its translations, counted."""

    origins: set[str] = field(default_factory=set)
    translations: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


class MoeCatalogs(tfds.core.GeneratorBasedBuilder):
    """Interface strings of Home Assistant, Wagtail and Django in some 45 languages."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Home Assistant 2024.3.3, Wagtail 8.0.1, Django 5.2.19."}  # noqa: RUF012

    def _info(self) -> tfds.core.DatasetInfo:
        sources = "\n".join(
            f"- {wheel.name} {wheel.version}, {wheel.homepage}, license {wheel.license}"
            for wheel in WHEELS
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description=(
                "English interface strings and their translations, cleaned and without "
                f"near-duplicates between the splits, from the catalogues in:\n{sources}\n"
                "The feature `origin` names the packages that a string was found in."
            ),
            features=tfds.features.FeaturesDict(
                {
                    "translations": tfds.features.TranslationVariableLanguages(),
                    "origin": tfds.features.Text(),
                }
            ),
            homepage=WHEELS[0].homepage,
            license="; ".join(f"{wheel.name}: {wheel.license}" for wheel in WHEELS),
            citation="",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager):
        folder = Path(dl_manager.download_dir) / self.name
        entries: dict[str, Entry] = defaultdict(Entry)
        for wheel in tfds.core.utils.tqdm(WHEELS, desc="Reading catalogues", unit=" packages"):
            add_wheel(entries, fetch(wheel, folder), wheel.name)
        examples = make_examples(entries, min_pairs=MIN_PAIRS)
        splits = split_texts(examples, validation_fraction=HELD_OUT, test_fraction=HELD_OUT)
        divided: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        for english, split in splits.items():
            divided[split].append(examples[english])
        return {split: self._generate_examples(divided[split]) for split in SPLITS}

    def _generate_examples(self, examples: Iterable[dict[str, Any]]):
        for example in examples:
            yield example["translations"]["en"], example


def add_wheel(entries: dict[str, Entry], wheel: Path, origin: str) -> None:
    """Adds to `entries`, by English string, every usable translation in the wheel's catalogues."""
    for lang, english, translation in wheel_strings(wheel):
        if cleaned := clean_pair(english, translation, lang):
            entry = entries[cleaned[0]]
            entry.origins.add(origin)
            entry.translations[lang][cleaned[1]] += 1


def wheel_strings(wheel: Path) -> Iterator[tuple[str, str, str]]:
    """(language, English, translation) of every string of a wheel's catalogues, as they are.

    Catalogues are the gettext files `.../locale/LANGUAGE/LC_MESSAGES/*.po` and the files
    `.../translations/LANGUAGE.json` (or `.../translations/PART.LANGUAGE.json`), whose strings
    belong together by their keys. Variants of English are left out.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in filter(_GETTEXT.fullmatch, names):
            catalogue = parse_catalogue(archive.read(name), f"{wheel}/{name}")
            lang = catalogue_language(name, catalogue)
            if lang.split("-")[0] != "en":
                yield from ((lang, *strings) for strings in translated(catalogue))
        groups: dict[str, dict[str, str]] = defaultdict(dict)
        for match in filter(None, map(_JSON.fullmatch, names)):
            groups[match[1]][match[2]] = match[0]
        for group in groups.values():
            yield from _json_strings(archive, group)


def _json_strings(archive: zipfile.ZipFile, group: dict[str, str]):
    """The strings of one component: `group` maps a language to the name of its file."""
    if "en" not in group:
        return
    english = dict(flatten(json.loads(archive.read(group["en"]))))
    for name, path in group.items():
        lang = language_tag(name)
        if lang.split("-")[0] != "en":
            for key, text in flatten(json.loads(archive.read(path))):
                if key in english:
                    yield lang, english[key], text


def flatten(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple, str]]:
    """The strings of nested JSON objects by path: `{"a": {"b": "c"}}` gives `("a", "b"), "c"`."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, (*prefix, key))
        elif isinstance(value, str):
            yield (*prefix, key), value


def make_examples(entries: dict[str, Entry], *, min_pairs: int) -> dict[str, dict[str, Any]]:
    """One example for each English string, with the commonest translation into each language.

    Languages with fewer than `min_pairs` translations are left out, and strings left without any.

    Returns:
      By English string, `{"translations": {"en": ..., lang: ...}, "origin": "django wagtail"}`.
    """
    counts = Counter(lang for entry in entries.values() for lang in entry.translations)
    examples = {}
    for english, entry in entries.items():
        texts = {
            lang: candidates.most_common(1)[0][0]
            for lang, candidates in sorted(entry.translations.items())
            if counts[lang] >= min_pairs
        }
        if texts:
            examples[english] = {
                "translations": {"en": english, **texts},
                "origin": " ".join(sorted(entry.origins)),
            }
    return examples
