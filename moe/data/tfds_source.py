"""Sentence pairs in a TensorFlow Datasets (TFDS) data set, read without TensorFlow."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from moe.data.pairs import AlignedTexts, Direction, Pairs, SentencePair, Split, language_tag
from moe.data.pool import wanted_directions
from moe.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TfdsSource:
    """A TFDS data set with a `Translation` or a `TranslationVariableLanguages` feature.

    The data set is prepared as ArrayRecord files at the first use. A fixed `Translation` is then
    read pair by pair as it is asked for; variable languages are read into memory at once.

    Attributes:
      name: the data set, with its configuration if it has any: "moe_catalogs", "opus/medical".
      data_dir: folder of the prepared data sets; TFDS_DATA_DIR or ~/tensorflow_datasets if None.
      languages: the languages wanted beside English; empty for all there are.
      train_split: what to train on, in the split notation of TFDS: "train", "train[:98%]".
      validation_split: what to validate on, likewise.
      test_split: what to test on, likewise.
    """

    name: str = "moe_catalogs"
    data_dir: str | None = None
    languages: tuple[str, ...] = ()
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"
    kind: Literal["tfds"] = "tfds"

    def pairs(self, split: Split) -> Pairs:
        """The pairs of one split by direction: English into each language, and back.

        Data of exactly two languages, neither of them English, has these two directions.
        """
        builder = prepared_builder(self.name, self.data_dir)
        feature, fixed_languages = _translation_feature(builder.info.features, self.name)
        records = self._records(builder, split)
        if fixed_languages is None:
            return self._variable(records, feature, split)
        codes = {language_tag(code): code for code in fixed_languages}
        return {
            direction: TranslationRecords(
                direction,
                records,
                feature,
                codes[direction.source_lang],
                codes[direction.target_lang],
            )
            for direction in self._directions(list(codes), self.languages)
        }

    def _records(self, builder: Any, split: Split) -> Sequence[Any]:
        field = f"{split}_split"
        try:
            return builder.as_data_source(split=getattr(self, field))
        except ValueError as error:
            raise UserError(
                f"{field} must be a split of {self.name}: got {getattr(self, field)!r}, and there "
                f"are {', '.join(sorted(builder.info.splits))}. Name one, or a part of one such as "
                "train[98%:]; the parts of a split must not overlap."
            ) from error
        except NotImplementedError as error:
            raise UserError(
                f"{self.name} in {builder.data_dir} must be ArrayRecord files: got "
                f"{builder.info.file_format}. Give another data_dir, to prepare it anew there."
            ) from error

    def _directions(self, tags: list[str], wanted: Sequence[str]) -> Iterator[Direction]:
        if "en" in tags:
            forward = [Direction("en", tag) for tag in tags if tag != "en"]
        elif len(tags) == 2:
            forward = [Direction(*tags)]
        else:
            raise UserError(
                f"{self.name} must have English or exactly two languages: "
                f"got {', '.join(tags) or 'none'}. Choose another configuration of it."
            )
        for direction in wanted_directions(forward, wanted, self.name):
            yield from (direction, direction.reverse)

    def _variable(self, records: Sequence[Any], feature: str | None, split: Split) -> Pairs:
        columns: dict[str, tuple[list[str], list[str]]] = {}
        for record in records:
            item = record if feature is None else record[feature]
            texts = dict(zip(_texts(item["language"]), _texts(item["translation"]), strict=True))
            english = texts.pop("en", "")
            for code, text in texts.items() if english else ():
                sources, targets = columns.setdefault(language_tag(code), ([], []))
                sources.append(english)
                targets.append(text)
        wanted = {language_tag(lang) for lang in self.languages or columns}
        if split != "train" and not wanted <= columns.keys():
            self.pairs("train")  # refuses a language that is unknown there too
            wanted &= columns.keys()
        if not wanted:
            return {}
        pairs = {}
        for direction in self._directions(["en", *columns], sorted(wanted)):
            sides = columns[max(direction, key=lambda lang: lang != "en")]
            ordered = sides if direction.source_lang == "en" else sides[::-1]
            pairs[direction] = AlignedTexts(direction, *ordered)
        return pairs


@dataclass(frozen=True, slots=True)
class TranslationRecords(Sequence[SentencePair]):
    """The pairs of one direction of a fixed `Translation`, each read when it is asked for."""

    direction: Direction
    records: Sequence[Any]
    feature: str | None
    source_code: str
    target_code: str

    def __len__(self) -> int:
        return len(self.records)

    @overload
    def __getitem__(self, index: int) -> SentencePair: ...
    @overload
    def __getitem__(self, index: slice) -> list[SentencePair]: ...
    def __getitem__(self, index: int | slice) -> SentencePair | list[SentencePair]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        record = self.records[range(len(self))[index]]  # which knows negative ones and the end
        item = record if self.feature is None else record[self.feature]
        source, target = _texts([item[self.source_code], item[self.target_code]])
        return SentencePair(source, target, *self.direction)


def prepared_builder(name: str, data_dir: str | None) -> Any:
    """The TFDS builder of the data set, prepared as ArrayRecord files if it was not before.

    Two processes may prepare the same data set at once: each writes a folder of its own, the first
    to finish gives it its name, and the other uses it.

    Raises:
      UserError: for an unknown name, or where the data cannot be obtained.
    """
    import tensorflow_datasets as tfds  # a third of a second, only for those who use it

    import moe.data.catalogs  # noqa: F401  registers moe_catalogs

    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        raise UserError(
            f"name must be moe_catalogs or a data set of TFDS: got {name!r}. See "
            "https://www.tensorflow.org/datasets/catalog/overview#translate for those there are."
        ) from error
    if _is_whole(builder):
        return builder
    problem: Exception | None = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            builder.download_and_prepare(
                file_format="array_record",
                download_config=tfds.download.DownloadConfig(try_download_gcs=False),
            )
    except (OSError, ImportError) as error:  # among them: another process was first
        problem = error
    builder = tfds.builder(name, data_dir=data_dir)
    if not _is_whole(builder):
        raise UserError(
            f"{name} must be prepared whole in {builder.data_dir}: got {problem or 'only a part'}. "
            "Remove that folder and try again, or train on files of your own (JsonLines, ...)."
        ) from problem
    return builder


def _is_whole(builder: Any) -> bool:
    return (builder.data_path / "dataset_info.json").exists()  # as is_prepared(), but silent


def _translation_feature(features: Any, name: str) -> tuple[str | None, list[str] | None]:
    """(name of the translation feature or None for the whole example, languages if fixed)."""
    import tensorflow_datasets as tfds

    nested = features.items() if isinstance(features, tfds.features.FeaturesDict) else ()
    for key, feature in [(None, features), *nested]:
        if isinstance(feature, tfds.features.Translation):
            return key, feature.languages
        if isinstance(feature, tfds.features.TranslationVariableLanguages):
            return key, None
    raise UserError(
        f"{name} must have a Translation or TranslationVariableLanguages feature: got {features}. "
        "Choose a data set for translation."
    )


def _texts(values: Any) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]
