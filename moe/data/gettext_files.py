"""Sentence pairs in gettext catalogues, the .po and .mo files of translated programs."""

from __future__ import annotations

import gzip
import lzma
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import polib

from moe.data.cleaning import clean_pair
from moe.data.pairs import SentencePair, language_tag
from moe.data.pool import PooledSource
from moe.data.text_files import open_binary
from moe.errors import UserError

_CATALOGUE = re.compile(r"\.(po|mo)(\.gz|\.xz)?$")
_LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z0-9]+)*(@\w+)?")
# What str.splitlines, with which polib reads, takes for line ends and gettext does not.
_NOT_LINE_ENDS = {ord(character): " " for character in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"}


@dataclass(frozen=True, kw_only=True)
class Gettext(PooledSource):
    """The .po and .mo catalogues in a folder and all folders below it.

    The language of a catalogue is the folder above LC_MESSAGES (`locale/de/LC_MESSAGES/app.po`),
    else its name (`po/de.po`), else what its header says. Where a .po and a .mo file lie side by
    side the .po is read. Entries that are fuzzy, obsolete, untranslated or have plural forms are
    left out, and the strings are cleaned: see `clean_pair`.

    Attributes:
      path: the folder, or one catalogue; catalogues may be plain, .gz or .xz.
      source_lang: the language the program is written in, that is of the msgid strings.
    """

    path: str
    source_lang: str = "en"
    kind: Literal["gettext"] = "gettext"

    def _place(self) -> str:
        return self.path

    def _rows(self) -> Iterator[SentencePair]:
        source_lang = language_tag(self.source_lang)
        seen: set[SentencePair] = set()
        for path in self._catalogues():
            catalogue = parse_catalogue(_read(path), str(path))
            lang = catalogue_language(path.as_posix(), catalogue)
            if lang.split("-")[0] == source_lang.split("-")[0]:
                continue
            for msgid, msgstr in translated(catalogue):
                if cleaned := clean_pair(msgid, msgstr, lang):
                    row = SentencePair(*cleaned, source_lang, lang)
                    if row not in seen:
                        seen.add(row)
                        yield row

    def _catalogues(self) -> list[Path]:
        root = Path(self.path)
        if root.is_file():
            return [root]
        found = {path for path in root.rglob("*") if _CATALOGUE.search(path.name)}
        if not found:
            raise UserError(
                f"path must hold .po or .mo files: got {self.path}, which has none. "
                "Name the folder that holds the catalogues, often called locale or po."
            )
        stems = {_CATALOGUE.sub("", str(path)) for path in found if ".po" in path.suffixes}
        return sorted(
            path
            for path in found
            if ".mo" not in path.suffixes or _CATALOGUE.sub("", str(path)) not in stems
        )


def parse_catalogue(data: bytes, place: str) -> polib.POFile | polib.MOFile:
    """The catalogue in the bytes of a .po or .mo file.

    Raises:
      UserError: where the bytes are not a catalogue; the message names `place` and the line.
    """
    try:
        if data[:4] in (b"\xde\x12\x04\x95", b"\x95\x04\x12\xde"):
            return polib.mofile(data)
        text = data.decode(polib.detect_encoding(data))
        return polib.pofile(text.translate(_NOT_LINE_ENDS))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"line {line} of {place} must be in the encoding {error.encoding} of its header: got "
            f"the byte 0x{data[error.start]:02x}. Correct the charset in the header."
        ) from error
    except (OSError, struct.error, ValueError, IndexError) as error:
        line_number = re.search(r"line (\d+)", str(error))
        where = f"line {line_number[1]} of {place}" if line_number else place
        raise UserError(
            f"{where} must be a gettext catalogue: got something else ({error}). "
            "Check it with `msgfmt --check`, or remove it."
        ) from error


def translated(catalogue: polib.POFile | polib.MOFile) -> Iterator[tuple[str, str]]:
    """(msgid, msgstr) of the entries that have one translation approved by a translator."""
    for entry in catalogue:
        if entry.msgstr and not (entry.obsolete or entry.msgid_plural or "fuzzy" in entry.flags):
            yield entry.msgid, entry.msgstr


def catalogue_language(path: str, catalogue: polib.POFile | polib.MOFile) -> str:
    """The language of a catalogue as a BCP-47 tag, from its place in a tree or its header."""
    place = PurePosixPath(path)
    if place.parent.name == "LC_MESSAGES":
        return language_tag(place.parent.parent.name)
    stem = _CATALOGUE.sub("", place.name)
    for name in (stem, catalogue.metadata.get("Language", "")):
        if _LANGUAGE.fullmatch(name):
            return language_tag(name)
    raise UserError(
        f"{path} must say its language: got neither LANGUAGE/LC_MESSAGES/ above it, nor a name "
        "such as de.po, nor a Language line in its header. Rename it."
    )


def _read(path: Path) -> bytes:
    try:
        with open_binary(path) as file:
            return file.read()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} must be a whole compressed file: got an error ({error}). Fetch it again."
        ) from error
