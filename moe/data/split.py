"""Which sentences are trained on, which are validated on and which are tested on."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

import numpy as np

from moe.data.pairs import Split, normalise

_DIGITS = re.compile(r"\d+")
_GRAM = 4


def split_of(text: str, *, validation_fraction: float, test_fraction: float) -> Split:
    """The split of a sentence, decided by a hash of its normalised form alone.

    The same sentence falls into the same split on every machine, in every file and beside every
    other sentence. Text of fewer than three words is always trained on: labels such as "Off" say
    little about a translator. (In a script without spaces, fewer than ten characters.)

    Args:
      text: the sentence.
      validation_fraction: share of the sentences for validation, in [0, 1).
      test_fraction: share of the sentences for the test, in [0, 1).

    Returns:
      "train", "validation" or "test".
    """
    key = normalise(text)
    if len(key.split()) < 3 and (key.isascii() or len(key) < 10):
        return "train"
    position = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
    if position < test_fraction:
        return "test"
    return "validation" if position < test_fraction + validation_fraction else "train"


def split_texts(
    texts: Iterable[str], *, validation_fraction: float, test_fraction: float
) -> dict[str, Split]:
    """The split of every sentence; those too like a held-out one are left out.

    A sentence hashed into training is dropped where it nearly repeats one of validation or test,
    and one hashed into validation where it nearly repeats one of the test (see `near_duplicates`).

    Args:
      texts: the sentences; repeated ones count once.
      validation_fraction: as in `split_of`.
      test_fraction: as in `split_of`.

    Returns:
      The split of each distinct text, in the order given. A dropped text is not a key.
    """
    splits = {
        text: split_of(text, validation_fraction=validation_fraction, test_fraction=test_fraction)
        for text in dict.fromkeys(texts)
    }
    held_out: list[str] = []
    for held, rest in (("test", "validation"), ("validation", "train")):
        held_out += [text for text, split in splits.items() if split == held]
        rest_texts = [text for text, split in splits.items() if split == rest]
        for text in near_duplicates(rest_texts, held_out):
            del splits[text]
    return splits


def near_duplicates(texts: Iterable[str], held_out: Collection[str]) -> set[str]:
    """Those of the texts that would give a held-out sentence away.

    A text does so in any of three ways:

    - it equals a held-out sentence but for case, punctuation and digits;
    - it contains half or more of the distinct word 4-grams of a held-out sentence;
    - the two share half or more of the distinct character 4-grams of the one that has more.

    Returns:
      A subset of `texts`.
    """
    skeletons = {_skeleton(text) for text in held_out}
    words, characters = (_Grams(kind, held_out) for kind in (_word_grams, _character_grams))

    def gives_away(text: str) -> bool:
        if _skeleton(text) in skeletons:
            return True
        _, shared, of_held_out = words.overlaps(text)
        if np.any(2 * shared >= of_held_out):
            return True
        of_text, shared, of_held_out = characters.overlaps(text)
        return bool(np.any(2 * shared >= np.maximum(of_held_out, of_text)))

    return {text for text in texts if gives_away(text)}


def _skeleton(text: str) -> str:
    return " ".join(_DIGITS.sub(" ", normalise(text)).split()) or text


def _word_grams(text: str) -> set[str]:
    words = normalise(text).split()
    return {" ".join(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)}


def _character_grams(text: str) -> set[str]:
    key = normalise(text)
    return {key[i : i + _GRAM] for i in range(len(key) - _GRAM + 1)}


class _Grams:
    """The n-grams of the held-out sentences, found by n-gram."""

    def __init__(self, grams_of: Callable[[str], set[str]], held_out: Collection[str]):
        self._grams_of = grams_of
        grams = [found for found in map(grams_of, held_out) if found]
        self._sizes = np.array([len(found) for found in grams], np.int32)
        numbers = defaultdict(list)
        for number, found in enumerate(grams):
            for gram in found:
                numbers[gram].append(number)
        self._numbers = {gram: np.array(held, np.int32) for gram, held in numbers.items()}

    def overlaps(self, text: str) -> tuple[int, np.ndarray, np.ndarray]:
        """How many n-grams the text has, shares with each held-out sentence, and each has."""
        grams = self._grams_of(text)
        found = [self._numbers[gram] for gram in grams if gram in self._numbers]
        if not found:
            return len(grams), np.zeros(0, np.int32), np.zeros(0, np.int32)
        shared = np.bincount(np.concatenate(found), minlength=len(self._sizes))
        return len(grams), shared, self._sizes
