"""Translates lines of text: buckets of like length, one compiled program for each."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from moe.data.tokenizer import Tokenizer
from moe.decoding.batch import search_batch
from moe.decoding.progress import sentences_progress
from moe.decoding.search import SearchConfig
from moe.errors import UserError
from moe.sharding import num_shards

_LOG = logging.getLogger(__name__)
_SMALLEST_BUCKET = 16


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """How sentences are translated."""

    beam_size: int = 4
    """Hypotheses kept for each sentence; 1 is greedy search."""
    length_penalty: float = 0.6
    """GNMT's alpha: 0 favours short translations, 1 nearly compares mean log probabilities."""
    max_length_ratio: float = 2.0
    """A translation is cut at this many tokens for each source token, plus 16."""
    max_source_length: int = 1024
    """Most tokens of a source sentence, tag and end included; a longer one is an error."""
    batch_tokens: int = 1024
    """Source tokens of a batch, padding included: 64 sentences of up to 16, 16 of up to 64. On a mesh
    each part of the rows is such a batch."""

    def __post_init__(self) -> None:
        for name in ("beam_size", "max_source_length", "batch_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1: got {getattr(self, name)}. Raise it.")
        for name in ("length_penalty", "max_length_ratio"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be at least 0: got {getattr(self, name)}. Raise it.")

    def batch_size(self, bucket: int) -> int:
        """Sentences in a batch of sources of up to `bucket` tokens, on all devices of the mesh in force."""
        return max(1, self.batch_tokens // bucket) * num_shards("batch")

    def limit(self, source_length: int) -> int:
        """Most target tokens, end included, for so many source tokens."""
        return int(self.max_length_ratio * source_length) + 16

    def search(self, bucket: int, *, bos_id: int, eos_id: int) -> SearchConfig:
        """The search for sources of up to `bucket` tokens."""
        return SearchConfig(
            bos_id=bos_id,
            eos_id=eos_id,
            max_length=self.limit(bucket),
            beam_size=self.beam_size,
            length_penalty=self.length_penalty,
        )


def translate(
    model: nnx.Module,
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    *,
    target_lang: str | Sequence[str],
    config: DecodingConfig = DecodingConfig(),
    show_progress: bool = False,
    wait_for_all: Callable[[], None] | None = None,
) -> list[str]:
    """Translates each sentence, independently of its neighbours.

    Sentences are sorted into buckets whose length is a power of two. A bucket has one batch
    shape and one compiled program, which later calls with the same model shape use again. The
    same call gives the same text every time; with other neighbours a sentence only sees other
    rounding.

    On a mesh (`jax.set_mesh`) all devices translate together, a batch for each part of the rows, those
    of other processes too: every process makes the same call and gets all translations.

    Args:
      model: offers `encode`, `start_decoding` and `decode_step` as `moe.models.Transformer` does.
      tokenizer: the one the model was trained with.
      sentences: one sentence a line; a line of white space alone gives an empty line.
      target_lang: the language to translate into: one for all, or one for each sentence.
      config: see `DecodingConfig`.
      show_progress: a bar on stderr with sentences a second.
      wait_for_all: called before a program first runs, which one of several processes may have
        compiled long before another; see `moe.training.hosts`.

    Returns:
      The translations in the order of the sentences, each one line. One that reaches its length
      limit without an end is cut there, and a warning is logged with their number.

    Raises:
      UserError: a language without a tag, languages that do not match the sentences, or a
        sentence that is too long, with its line number; before anything is translated.
    """
    sources = _encode(tokenizer, sentences, target_lang, config)
    graph, state = nnx.split(model)
    translations = [""] * len(sentences)
    num_cut, compiled = 0, set[int]()
    with sentences_progress(len(sources), shown=show_progress) as advance:
        for bucket, lines in _batches(sources, config):
            search = config.search(bucket, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
            arrays = _pad([sources[line] for line in lines], bucket, config)
            start = time.perf_counter()
            if wait_for_all is not None and bucket not in compiled:
                search_batch.lower(graph, state, *arrays, config=search).compile()
                wait_for_all()
                compiled.add(bucket)
            found = jax.device_get(search_batch(graph, state, *arrays, config=search))
            seconds = time.perf_counter() - start  # the first batch of a bucket compiles
            _LOG.info("%d sentences of up to %d tokens: %.2f s", len(lines), bucket, seconds)
            for row, line in enumerate(lines):
                ids = found.tokens_BKT[row, 0, : found.lengths_BK[row, 0]].tolist()
                num_cut += ids[-1] != tokenizer.eos_id
                text = tokenizer.decode([i for i in ids if i != tokenizer.eos_id])
                translations[line] = " ".join(text.splitlines())
            advance(len(lines))
    if num_cut:
        _LOG.warning("%d of %d translations were cut at the length limit", num_cut, len(sources))
    return translations


def _encode(
    tokenizer: Tokenizer,
    sentences: Sequence[str],
    target_lang: str | Sequence[str],
    config: DecodingConfig,
) -> dict[int, list[int]]:
    """Line index to source tokens, of all lines with text."""
    languages = [target_lang] * len(sentences) if isinstance(target_lang, str) else target_lang
    if len(languages) != len(sentences):
        raise UserError(
            f"target_lang must be one language or one a sentence: got {len(languages)} languages "
            f"for {len(sentences)} sentences. Pass as many of them."
        )
    tags = {language: tokenizer.source.tag_id(language) for language in dict.fromkeys(languages)}
    lines = [line for line, sentence in enumerate(sentences) if sentence.strip()]
    pieces = tokenizer.source.encode_batch([sentences[line].strip() for line in lines])
    sources = {}
    for line, ids in zip(lines, pieces, strict=True):
        sources[line] = [tags[languages[line]], *ids, tokenizer.eos_id]
        if len(sources[line]) > config.max_source_length:
            raise UserError(
                f"line {line + 1} must have at most max_source_length={config.max_source_length} "
                f"tokens: got {len(sources[line])}. Split the line or raise max_source_length."
            )
    return sources


def _batches(
    sources: Mapping[int, Sequence[int]], config: DecodingConfig
) -> Iterator[tuple[int, list[int]]]:
    """Buckets with the lines of each batch: short ones first, like lengths together."""
    by_length = sorted(sources, key=lambda line: len(sources[line]))
    for bucket, lines in itertools.groupby(by_length, key=lambda line: _bucket(sources[line])):
        while batch := list(itertools.islice(lines, config.batch_size(bucket))):
            yield bucket, batch


def _bucket(source: Sequence[int]) -> int:
    """The next power of two, at least 16."""
    return max(_SMALLEST_BUCKET, 1 << (len(source) - 1).bit_length())


def _pad(
    sources: Sequence[Sequence[int]], bucket: int, config: DecodingConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """source_BL, source_lengths_B and limits_B in the shape of the bucket."""
    batch_size = config.batch_size(bucket)
    source_BL = np.zeros((batch_size, bucket), np.int32)
    lengths_B, limits_B = np.zeros((2, batch_size), np.int32)
    for row, source in enumerate(sources):
        source_BL[row, : len(source)] = source
        lengths_B[row], limits_B[row] = len(source), config.limit(len(source))
    return source_BL, lengths_B, limits_B
