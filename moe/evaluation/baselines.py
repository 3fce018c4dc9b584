"""What a model must beat: the translation of the most similar training sentence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sp

from moe.data.pairs import normalise

_CELLS = 20_000_000  # similarities held at a time


class NearestSentence:
    """Answers with the translation of the training sentence most like the given one.

    Similarity is the cosine of TF-IDF vectors of character trigrams, over normalised text. Of
    equals the first counts; an identical source goes before all. Without training sentences every
    answer is empty.
    """

    def __init__(self, sources: Sequence[str], targets: Sequence[str]):
        self._targets = list(targets)
        # Backwards, so that the first of identical sources stays.
        self._exact = dict(zip(reversed(sources), reversed(self._targets), strict=True))
        if self._targets:
            row, trigram = _trigrams(sources)
            self._vocabulary = np.unique(trigram)
            counts = self._counts(row, trigram, len(sources))
            document_frequency = np.diff(counts.tocsc().indptr)
            self._weights = 1.0 + np.log(len(sources) / document_frequency)
            self._training = self._unit_rows(counts).T.tocsr()

    def __call__(self, sentences: Sequence[str]) -> list[str]:
        """One answer a sentence."""
        if not self._targets:
            return [""] * len(sentences)
        chunk = max(1, _CELLS // len(self._targets))
        nearest: list[int] = []
        for start in range(0, len(sentences), chunk):
            part = sentences[start : start + chunk]
            vectors = self._unit_rows(self._counts(*_trigrams(part), len(part)))
            nearest += (vectors @ self._training).toarray().argmax(axis=1).tolist()
        return [
            self._exact.get(sentence, self._targets[index])
            for sentence, index in zip(sentences, nearest, strict=True)
        ]

    def _counts(self, row: np.ndarray, trigram: np.ndarray, num_rows: int) -> sp.csr_array:
        """Sentences by known trigrams."""
        column = np.searchsorted(self._vocabulary, trigram)
        column = np.minimum(column, len(self._vocabulary) - 1)
        known = self._vocabulary[column] == trigram
        ones = np.ones(known.sum(), np.float32)
        shape = (num_rows, len(self._vocabulary))
        return sp.coo_array((ones, (row[known], column[known])), shape=shape).tocsr()

    def _unit_rows(self, counts: sp.csr_array) -> sp.csr_array:
        weighted = counts.multiply(self._weights).tocsr()
        norms = np.sqrt(weighted.multiply(weighted).sum(axis=1))
        return sp.diags_array(1.0 / np.maximum(norms, 1e-9)) @ weighted


def _trigrams(sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The row and the code of every character trigram; a code holds three 21-bit code points."""
    texts = [f" {normalise(sentence)} " for sentence in sentences]
    row = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    points = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32).astype(np.int64)
    code = points[:-2] << 42 | points[1:-1] << 21 | points[2:]
    inside = row[:-2] == row[2:]
    return row[:-2][inside], code[inside]
