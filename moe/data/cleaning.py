"""From the strings of a program's translation catalogue to plain sentences."""

from __future__ import annotations

import html
import re
import unicodedata
from functools import lru_cache

_LINE_TAG = re.compile(r"</?(?:br|p|li|ul|ol|div|h\d)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>|<!--.*?-->")
_LINK = re.compile(r"!?\[([^\[\]]*)\] ?\(\s*(?:\{[^{}]*\}|https?:[^()\s]*|[#/][^()\s]*)\s*\)")
_EMPHASIS = re.compile(r"\*\*|`")
_ACCELERATOR = re.compile(r"\s*\([_&]\w\)|(?<!\w)[_&](?=[^\W\d_])")
_PLACEHOLDER = re.compile(  # %(count)d, {name}, %s, %.2f, %%, and addresses
    r"%\(\w+\)[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]|\{[^{}]*\}|%[-+#0]*\d*(?:\.\d+)?[sdifrgx]|%%"
    r"|https?://[!-~]*"
)
_PADDED = re.compile(r"\{\s*(\w+)\s*\}")
_MAX_WORDS = 60
_SPACE = re.compile(r"\s+")
_INVISIBLE = re.compile(r"[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_OTHER_SCRIPT = re.compile(
    r"(am|ar|be|bg|bn|ckb|dv|el|fa|gu|he|hi|hy|ja|ka|kk|km|kn|ko|ky|lo|mk|ml|mn|mr|my|ne|pa|ru|sr|"
    r"ta|te|tg|th|ug|uk|ur|zh)\b(?!.*-Latn)"
)


def clean_pair(english: str, translation: str, lang: str) -> tuple[str, str] | None:
    """Both sides as plain text, or None where the pair would teach nothing or something wrong.

    Markup, links and keyboard accelerators go; placeholders such as `{name}` and `%(count)s` stay.
    A pair is dropped when

    - one side is empty, without a letter, or of more than 60 words;
    - the translation repeats the English, or is not in the script of its language;
    - the two sides have not the same placeholders and addresses;
    - one side is far longer than the other (more than four times, short texts aside).

    Args:
      english: the string of the program.
      translation: its translation, as the catalogue has it.
      lang: BCP-47 tag of the translation.

    Returns:
      (english, translation), or None.
    """
    (source, source_marks), (target, target_marks) = _parts(english), _parts(translation)
    if not source or not target or source.casefold() == target.casefold():
        return None
    if source_marks != target_marks or not _in_script(target, lang):
        return None
    short, long = sorted((len(source), len(target)))
    return None if long + 10 > 4 * (short + 10) else (source, target)


@lru_cache(maxsize=100_000)  # every English string comes once for each language
def _parts(text: str) -> tuple[str, tuple[str, ...]]:
    """The plain text, empty if it is not fit for training, and its placeholders, sorted."""
    plain = plain_text(text)
    words = _PLACEHOLDER.sub("", plain)
    if not any(map(str.isalpha, words)) or words.count(" ") >= _MAX_WORDS:
        return "", ()
    return plain, tuple(sorted(_PLACEHOLDER.findall(plain)))


def plain_text(text: str) -> str:
    """The text as a reader sees it: no tags, no entities, no accelerators, single spaces."""
    text = _TAG.sub("", _LINE_TAG.sub(" ", html.unescape(text)))
    text = _EMPHASIS.sub("", _LINK.sub(r"\1", text))
    text = _ACCELERATOR.sub("", _INVISIBLE.sub("", text))
    text = _PADDED.sub(r"{\1}", text)
    return _SPACE.sub(" ", unicodedata.normalize("NFC", text)).strip()


def _in_script(text: str, lang: str) -> bool:
    """False for a translation in Latin letters alone where the language is written in others."""
    foreign = any(character.isalpha() and character > "\u024f" for character in text)
    return foreign or not _OTHER_SCRIPT.match(lang)
