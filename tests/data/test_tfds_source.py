"""The source of TensorFlow data sets: what it yields, what it says where a name is wrong."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import tensorflow_datasets as tfds

from moe.data.pairs import Direction
from moe.data.sources import TfdsSource
from moe.data.tfds_source import TranslationRecords
from moe.errors import UserError


class TinyFixed(tfds.core.GeneratorBasedBuilder):
    """A builder as anyone may write it: a fixed `Translation`, and no validation split."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.Translation(languages=["en", "zh_cn"])
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(6), "test": self._generate_examples(2)}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"en": f"text {i}", "zh_cn": f"文本 {i}"}


class TinyVariable(tfds.core.GeneratorBasedBuilder):
    """Variable languages, inside of another feature, with one example without English."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "talk": tfds.features.Text(),
            "translations": tfds.features.TranslationVariableLanguages(),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "test": self._generate_test()}

    def _generate_test(self):
        yield 0, {"talk": "numbers", "translations": {"en": "four", "de": "vier"}}

    def _generate_examples(self):
        texts = [{"en": "one", "de": "eins", "fr": "un"}, {"en": "two", "de": "zwei"}]
        for i, item in enumerate([*texts, {"de": "drei", "fr": "trois"}]):
            yield i, {"talk": "numbers", "translations": item}


class TinyNumbers(tfds.core.GeneratorBasedBuilder):
    """No translation at all."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"id": tfds.features.Scalar(dtype=np.int64)})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield 0, {"id": 0}


def test_fixed_translation_is_read_pair_by_pair(tmp_path):
    source = TfdsSource(name="tiny_fixed", data_dir=str(tmp_path))
    pairs = source.pairs("train")
    forward = pairs[Direction("en", "zh-Hans")]
    assert {str(d): len(p) for d, p in pairs.items()} == {"en-zh-Hans": 6, "zh-Hans-en": 6}
    assert isinstance(forward, TranslationRecords)
    assert sorted(pair.source for pair in forward) == [f"text {i}" for i in range(6)]
    for pair, back in zip(forward, pairs[Direction("zh-Hans", "en")], strict=True):
        assert pair.target == pair.source.replace("text", "文本")
        assert back == pair.reverse
    assert forward[-1] == forward[5]
    with pytest.raises(IndexError):
        forward[6]
    assert forward[4:] == [forward[4], forward[5]]
    assert list(pickle.loads(pickle.dumps(forward))) == list(forward)


def test_missing_split_lists_those_there_are_and_a_slice_replaces_it(tmp_path):
    source = TfdsSource(name="tiny_fixed", data_dir=str(tmp_path))
    with pytest.raises(UserError, match="got 'validation', and there are test, train"):
        source.pairs("validation")
    sliced = TfdsSource(name="tiny_fixed", data_dir=str(tmp_path), validation_split="train[50%:]")
    assert len(sliced.pairs("validation")[Direction("en", "zh-Hans")]) == 3


def test_variable_languages_are_paired_with_english(tmp_path):
    pairs = TfdsSource(name="tiny_variable", data_dir=str(tmp_path)).pairs("train")
    found = {str(d): sorted((p.source, p.target) for p in of) for d, of in pairs.items()}
    assert found == {
        "en-de": [("one", "eins"), ("two", "zwei")],
        "de-en": [("eins", "one"), ("zwei", "two")],
        "en-fr": [("one", "un")],
        "fr-en": [("un", "one")],
    }


def test_languages_of_a_data_set_can_be_chosen(tmp_path):
    source = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("fr",))
    assert {str(direction) for direction in source.pairs("train")} == {"en-fr", "fr-en"}
    unknown = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("it",))
    with pytest.raises(UserError, match=r"those of tiny_variable: got it\. There are de, fr\."):
        unknown.pairs("train")


def test_language_without_a_test_sentence_is_not_in_the_test_but_known(tmp_path):
    chosen = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("de", "fr"))
    assert {str(direction) for direction in chosen.pairs("test")} == {"en-de", "de-en"}
    french = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("fr",))
    assert french.pairs("test") == {}
    unknown = TfdsSource(name="tiny_variable", data_dir=str(tmp_path), languages=("it",))
    with pytest.raises(UserError, match=r"got it\. There are de, fr\."):
        unknown.pairs("test")


def test_unknown_data_set_is_named(tmp_path):
    with pytest.raises(UserError, match=r"name must be .* got 'no_such_data'"):
        TfdsSource(name="no_such_data", data_dir=str(tmp_path)).pairs("train")


def test_data_set_without_translations_is_refused(tmp_path):
    with pytest.raises(UserError, match="tiny_numbers must have a Translation"):
        TfdsSource(name="tiny_numbers", data_dir=str(tmp_path)).pairs("train")


def test_damaged_prepared_folder_is_named_with_the_cure(tmp_path):
    TfdsSource(name="tiny_fixed", data_dir=str(tmp_path)).pairs("train")
    (tmp_path / "tiny_fixed/1.0.0/dataset_info.json").unlink()
    with pytest.raises(UserError, match=r"whole in .*tiny_fixed.*got only a part\. Remove that"):
        TfdsSource(name="tiny_fixed", data_dir=str(tmp_path)).pairs("train")


def test_another_process_that_prepares_first_does_no_harm(tmp_path, monkeypatch):
    class Overtaken(TinyFixed, skip_registration=True):
        name = "tiny_fixed"

        def _split_generators(self, dl_manager):
            TinyFixed(data_dir=tmp_path).download_and_prepare(file_format="array_record")
            return super()._split_generators(dl_manager)

    real_builder = tfds.builder
    overtaken = iter([Overtaken(data_dir=tmp_path)])
    monkeypatch.setattr(
        tfds, "builder", lambda *args, **kw: next(overtaken, None) or real_builder(*args, **kw)
    )
    pairs = TfdsSource(name="tiny_fixed", data_dir=str(tmp_path)).pairs("train")
    assert len(pairs[Direction("en", "zh-Hans")]) == 6
    assert [path.name for path in (tmp_path / "tiny_fixed").iterdir()] == ["1.0.0"]
