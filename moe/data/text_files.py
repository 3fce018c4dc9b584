"""Sentence pairs in text files of one's own: JSON Lines, tab-separated, or two aligned files."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Literal

from moe.data.pairs import SentencePair, language_tag
from moe.data.pool import PooledSource
from moe.errors import UserError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class JsonLines(PooledSource):
    """A file with one JSON object a line, of either form; the two may be mixed.

    `{"en": "Hello", "translations": {"de": "Hallo", "fr": "Salut"}}`
    `{"source": "Hello", "target": "Hallo", "source_lang": "en", "target_lang": "de"}`

    Other fields are ignored.

    Attributes:
      path: the file, in UTF-8; plain, .gz or .xz.
    """

    path: str
    kind: Literal["json_lines"] = "json_lines"

    def _place(self) -> str:
        return self.path

    def _rows(self) -> Iterator[SentencePair]:
        for number, line in read_lines(self.path):
            if line.strip():
                yield from self._parse(line, number)

    def _parse(self, line: str, number: int) -> list[SentencePair]:
        try:
            item = json.loads(line)
            if "translations" in item:
                rows = [
                    SentencePair(item["en"], text, "en", language_tag(lang))
                    for lang, text in item["translations"].items()
                ]
            else:
                tags = language_tag(item["source_lang"]), language_tag(item["target_lang"])
                rows = [SentencePair(item["source"], item["target"], *tags)]
            if all(_is_pair(row) for row in rows):
                return rows
        except (ValueError, TypeError, AttributeError, KeyError):
            pass
        raise UserError(
            f"line {number} of {self.path} must be a JSON object with en and translations, or with "
            "source, target, source_lang and target_lang, all text, in two different languages: "
            f"got {_shortened(line)}. Correct or remove the line."
        )


@dataclass(frozen=True, kw_only=True)
class TabSeparated(PooledSource):
    """A file with the source, a tab and the target in every line; further columns are ignored.

    Attributes:
      path: the file, in UTF-8; plain, .gz or .xz.
      source_lang: language of the first column.
      target_lang: language of the second column.
    """

    path: str
    source_lang: str
    target_lang: str
    kind: Literal["tab_separated"] = "tab_separated"

    def __post_init__(self):
        super().__post_init__()
        check_two_languages(self.source_lang, self.target_lang)

    def _place(self) -> str:
        return self.path

    def _rows(self) -> Iterator[SentencePair]:
        tags = language_tag(self.source_lang), language_tag(self.target_lang)
        for number, line in read_lines(self.path):
            if not line.strip():
                continue
            source, tab, rest = line.partition("\t")
            target = rest.split("\t")[0]
            if not (tab and source.strip() and target.strip()):
                raise UserError(
                    f"line {number} of {self.path} must be two texts with a tab between them: "
                    f"got {_shortened(line)}. Correct or remove the line."
                )
            yield SentencePair(source.strip(), target.strip(), *tags)


@dataclass(frozen=True, kw_only=True)
class ParallelText(PooledSource):
    """Two text files whose lines translate one another, as Moses and OPUS have them.

    A line that is empty on either side is left out.

    Attributes:
      source_path: the file of the source language, in UTF-8; plain, .gz or .xz.
      target_path: the file of the target language, likewise.
      source_lang: language of the first file.
      target_lang: language of the second file.
    """

    source_path: str
    target_path: str
    source_lang: str
    target_lang: str
    kind: Literal["parallel_text"] = "parallel_text"

    def __post_init__(self):
        super().__post_init__()
        check_two_languages(self.source_lang, self.target_lang)

    def _place(self) -> str:
        return f"{self.source_path} and {self.target_path}"

    def _rows(self) -> Iterator[SentencePair]:
        tags = language_tag(self.source_lang), language_tag(self.target_lang)
        lines = zip_longest(read_lines(self.source_path), read_lines(self.target_path))
        last = (0, "")
        for source, target in lines:
            if source is None or target is None:
                counts = [last[0], last[0] + 1 + sum(1 for _ in lines)]
                counts = counts if source is None else counts[::-1]
                raise UserError(
                    f"{self._place()} must have the same number of lines: got {counts[0]} and "
                    f"{counts[1]}. Line n of one file must translate line n of the other."
                )
            last = source
            if source[1].strip() and target[1].strip():
                yield SentencePair(source[1].strip(), target[1].strip(), *tags)


def check_two_languages(source_lang: str, target_lang: str) -> None:
    """Raises a UserError unless the two names mean two languages."""
    tags = language_tag(source_lang), language_tag(target_lang)
    if not all(tags) or tags[0] == tags[1]:
        raise UserError(
            "source_lang and target_lang must be two languages: "
            f"got {source_lang!r} and {target_lang!r}. Give tags such as en and de."
        )


def open_binary(path: Path) -> IO[bytes]:
    """Opens a plain, .gz or .xz file for reading, or says what is wrong with the path."""
    if not path.is_file():
        raise UserError(f"path must name a file: got {path}, which is none. Check the spelling.")
    open_file: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    return open_file(path, "rb")


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file with their numbers from 1, without line ends."""
    number = 0
    try:
        with open_binary(Path(path)) as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                yield number, line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"line {number} of {path} must be UTF-8: got the byte 0x{error.object[error.start]:02x}"
            ". Convert the file, for example with `iconv -f latin1 -t utf-8`."
        ) from error
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} must be a whole compressed file: got an error after line {number} ({error}). "
            "Fetch or compress it again."
        ) from error
    except OSError as error:
        raise UserError(
            f"{path} must be readable: got {error.strerror or error}. Check its permissions."
        ) from error


def _is_pair(row: SentencePair) -> bool:
    texts = (row.source, row.target)
    return (
        all(isinstance(text, str) and text.strip() for text in texts)
        and row.source_lang != row.target_lang
    )


def _shortened(line: str) -> str:
    return repr(line if len(line) <= 60 else line[:57] + "...")
