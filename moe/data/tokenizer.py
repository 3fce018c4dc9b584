"""SentencePiece with a tag for each language: text to piece numbers and back."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import sentencepiece as spm

from moe.data.pairs import Pairs
from moe.data.sampling import Side, sample_texts
from moe.errors import UserError

_TAG = re.compile(r"<2([^\s<>,\"]+)>")
# The trained model depends on the number of threads (sums of floats are split over them), so it is
# a constant: one seed gives one tokenizer on every machine.
_TRAINING_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How the tokenizer of a run is trained.

    Attributes:
      vocab_size: number of pieces, with the 4 special ones, a tag for each language and 256 bytes.
      source_vocab_size: likewise of a tokenizer for source texts alone; `vocab_size` is then that of
        target texts. None is one tokenizer for both.
      model_type: "unigram" (Kudo 2018) or "bpe" (Sennrich et al. 2016).
      character_coverage: share of the characters in the texts that get a piece of their own; the
        rarest others are spelled in bytes.
      max_sentences: texts drawn from the data to train on.
    """

    vocab_size: int = 8000
    source_vocab_size: int | None = None
    model_type: Literal["unigram", "bpe"] = "unigram"
    character_coverage: float = 0.9995
    max_sentences: int = 200_000

    def __post_init__(self):
        for name in ("vocab_size", "source_vocab_size", "max_sentences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1: got {value}. Raise {name}.")
        if not 0.9 <= self.character_coverage <= 1.0:
            raise UserError(
                f"character_coverage must be in [0.9, 1]: got {self.character_coverage}. "
                "Use 0.9995, or 1.0 for a corpus of few characters."
            )
        if self.model_type not in ("unigram", "bpe"):
            raise UserError(
                f'model_type must be "unigram" or "bpe": got "{self.model_type}". Choose one.'
            )


class Tokenizer:
    """Turns text into pieces and back without losing a character.

    Text is not normalised: NFKC, SentencePiece's default, would rewrite what the reference
    translations contain (full-width Chinese punctuation, the ellipsis, the joiners of Persian and
    Hindi), and spaces are kept. What no piece covers is spelled in UTF-8 bytes, so
    `decode(encode(text)) == text`, with two exceptions: "\u2581", SentencePiece's sign for a space,
    becomes one, and a language tag written in the text, such as "<2de>", is taken for the tag.

    Args:
      model: the bytes of a model file made by `Tokenizer.train`.
      source: the tokenizer of source texts, where it is another.
    """

    pad_id, unk_id, bos_id, eos_id = range(4)

    def __init__(self, model: bytes, *, source: Tokenizer | None = None):
        self._model = model
        self._source = source
        self._processor = spm.SentencePieceProcessor(model_proto=model)
        tags = {}
        for piece_id in range(4, self._processor.vocab_size()):
            if not (tag := _TAG.fullmatch(self._processor.id_to_piece(piece_id))):
                break  # tags stand together, after the special pieces
            tags[tag[1]] = piece_id
        self._tag_ids = tags
        self._first_piece = 4 + len(tags)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        languages: Iterable[str],
        path: str | os.PathLike[str],
        config: TokenizerConfig | None = None,
        source_texts: Iterable[str] = (),
    ) -> Tokenizer:
        """Trains on all the texts given and writes the model file.

        The same texts in the same order give the same file.

        Args:
          texts: sentences of all languages.
          languages: the languages that get a tag `<2xx>`.
          path: the file to write, as `save` does.
          config: `max_sentences` is for those who draw the texts and is not used here.
          source_texts: for the tokenizer of source texts, with `config.source_vocab_size`; `texts`
            are then those of the targets.

        Raises:
          UserError: there is no text, or the vocabulary does not suit the texts.
        """
        config = config or TokenizerConfig()
        tags = [f"<2{language}>" for language in sorted(set(languages))]
        for tag in tags:
            if not _TAG.fullmatch(tag):
                raise UserError(
                    "language must be free of spaces, commas, quotes and brackets: got "
                    f'"{tag[2:-1]}". Name it like "de" or "zh-Hans".'
                )
        source = None
        if config.source_vocab_size is not None:
            source = cls(_trained_model(source_texts, tags, config, "source_vocab_size"))
        tokenizer = cls(_trained_model(texts, tags, config, "vocab_size"), source=source)
        tokenizer.save(path)
        return tokenizer

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads what `save` wrote; a file that is missing, damaged or not ours raises UserError."""
        path, source_path = Path(path), _source_file(path)
        if not path.is_file():
            raise UserError(
                f"tokenizer must be an existing file: got {path}. "
                "Check the path of the run, or train the run first."
            )
        try:
            # An empty file makes SentencePiece an empty model, without an error.
            source = cls.load(source_path) if source_path.is_file() else None
            tokenizer = cls(path.read_bytes() or b"empty", source=source)
        except RuntimeError as error:
            raise UserError(
                f"tokenizer must be a SentencePiece model: got {path}, which is damaged. "
                "Restore the file or train the run again."
            ) from error
        ids = [
            getattr(tokenizer._processor, f"{name}_id")() for name in ("pad", "unk", "bos", "eos")
        ]
        if ids != [0, 1, 2, 3] or not tokenizer._tag_ids:
            raise UserError(
                "tokenizer must have pad, unk, bos, eos as pieces 0 to 3 and a tag <2xx> for each "
                f"language: got {path} with {ids} and {len(tokenizer._tag_ids)} tags. "
                "Use a file written by moe."
            )
        return tokenizer

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model file in one step, so that a reader never sees half of it.

        A tokenizer of source texts goes into `source_<name>` beside it.
        """
        path, source_path = Path(path), _source_file(path)
        if self._source is None:
            source_path.unlink(missing_ok=True)
        else:
            self._source.save(source_path)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_bytes(self._model)
        os.replace(partial, path)

    @property
    def source(self) -> Tokenizer:
        """The tokenizer of source texts: this one, unless they have a vocabulary of their own."""
        return self._source or self

    @property
    def vocab_size(self) -> int:
        """Number of pieces; every id is below it."""
        return self._processor.vocab_size()

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that have a tag, in alphabetical order."""
        return tuple(self._tag_ids)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the model files in hexadecimal: equal exactly if the tokenizers are."""
        source = b"" if self._source is None else self._source._model
        return hashlib.sha256(self._model + source).hexdigest()

    def tag_id(self, language: str) -> int:
        """The id of `<2xx>`, which tells the model into which language to translate."""
        if language not in self._tag_ids:
            raise UserError(
                f'language must be one that the tokenizer knows: got "{language}". '
                f"Choose one of {', '.join(self.languages)}."
            )
        return self._tag_ids[language]

    def encode(self, text: str) -> list[int]:
        """The pieces of a text, without tag, bos and eos."""
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores where there are many."""
        if len(texts) < 100:  # starting the threads costs more than they save
            return [self.encode(text) for text in texts]
        return self._processor.encode(list(texts), num_threads=os.cpu_count() or 1)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the pieces; special pieces and tags leave no trace."""
        return self._processor.decode([int(i) for i in ids if i >= self._first_piece])


def train_tokenizer(
    pairs: Pairs,
    config: TokenizerConfig,
    *,
    temperature: float,
    path: str | os.PathLike[str],
    seed: int = 0,
) -> Tokenizer:
    """Trains a tokenizer for the languages of the data, on texts drawn by temperature."""

    def texts(*sides: Side) -> Iterator[str]:
        return sample_texts(
            pairs,
            num_texts=config.max_sentences,
            temperature=temperature,
            seed=seed,
            sides=sides,
        )

    shared = config.source_vocab_size is None
    return Tokenizer.train(
        texts("source", "target") if shared else texts("target"),
        source_texts=() if shared else texts("source"),
        languages={language for direction in pairs for language in direction},
        path=path,
        config=config,
    )


def _source_file(path: str | os.PathLike[str]) -> Path:
    return Path(path).with_name(f"source_{Path(path).name}")


def _trained_model(
    texts: Iterable[str], tags: list[str], config: TokenizerConfig, size: str
) -> bytes:
    """The model file of a tokenizer with as many pieces as the field `size` of `config` says."""
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=getattr(config, size),
            model_type=config.model_type,
            character_coverage=config.character_coverage,
            byte_fallback=True,
            user_defined_symbols=tags,
            pad_id=Tokenizer.pad_id,
            unk_id=Tokenizer.unk_id,
            bos_id=Tokenizer.bos_id,
            eos_id=Tokenizer.eos_id,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            num_threads=_TRAINING_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(config, size, str(error)) from error
    return model.getvalue()


def _training_error(config: TokenizerConfig, size: str, message: str) -> UserError:
    """Says in our words what the SentencePiece trainer means, with a size that works."""
    if most := re.search(r"too high \(\d+\).*<= (\d+)", message):
        return UserError(
            f"{size} must be at most {most[1]} for these texts: got {getattr(config, size)}. "
            f"Lower {size} to {most[1]} or train on more text."
        )
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return UserError(
            f"{size} must be at least {least[1]} to hold the characters, bytes and tags: got "
            f"{getattr(config, size)}. Raise {size} or lower character_coverage."
        )
    if "sentences_.empty()" in message:
        return UserError("texts must hold at least one sentence: got none. Check the data source.")
    return UserError(
        f"tokenizer must be trainable with these settings: got {config}, and SentencePiece says "
        f"{message!r}. Change the settings."
    )
