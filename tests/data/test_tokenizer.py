"""SentencePiece with language tags."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import sentencepiece as spm
from hypothesis import assume, example, given
from hypothesis import strategies as st

from moe.data.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer
from moe.errors import UserError
from tests.data.small_mixture import DE_EN, EN_DE, EN_FR, make_pairs, sentence, small_tokenizer

TEXTS = [sentence(number, language) for number in range(300) for language in ("en", "de")]


def train(path, texts=TEXTS, languages=("de", "en"), **config):
    config = TokenizerConfig(**{"vocab_size": 300, **config})
    return Tokenizer.train(texts, languages=languages, path=path, config=config)


@given(st.text())
@example("eins  zwei ")
@example(" leading and\ttab\r\nand line")
@example("\uff08full\uff0cwidth\uff1a\u3000\u2026\uff09")  # NFKC would change every sign of it
@example("\u0645\u06cc\u200c\u062e\u0648 e\u0301 \ufb01 \u00bd")  # a joiner, an accent, a ligature
@example("</s> <pad> <0x41> {name} %(count)d")
def test_text_survives_the_round_trip(text):
    tokenizer = small_tokenizer()
    assume("\u2581" not in text and not re.search("<2(de|en|fr)>", text))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(4 <= i < tokenizer.vocab_size for i in ids)


def test_special_pieces_come_first_and_then_the_tags_by_name():
    tokenizer = small_tokenizer()
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)
    assert tokenizer.languages == ("de", "en", "fr")
    assert [tokenizer.tag_id(language) for language in tokenizer.languages] == [4, 5, 6]
    assert tokenizer.vocab_size == 310


def test_decoding_drops_special_pieces_and_tags():
    tokenizer = small_tokenizer()
    ids = [tokenizer.tag_id("de"), tokenizer.bos_id, *tokenizer.encode("vier acht"), 3, 0, 0, 1]
    assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids)) == "vier acht"


@pytest.mark.parametrize("num_texts", [0, 3, 500])
def test_a_batch_is_encoded_as_its_texts_are(num_texts):
    tokenizer = small_tokenizer()
    texts = [sentence(number, "fr") for number in range(num_texts)]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_training_twice_gives_the_same_file(tmp_path, model_type):
    first = train(tmp_path / "a", model_type=model_type)
    second = train(tmp_path / "b", model_type=model_type)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert first.fingerprint == second.fingerprint
    assert len(first.encode("seven")) < 6  # the space and the letters would be 6


def test_other_texts_give_another_fingerprint(tmp_path):
    assert train(tmp_path / "a").fingerprint != train(tmp_path / "b", TEXTS[:-9]).fingerprint


def test_loading_gives_the_tokenizer_that_was_saved(tmp_path):
    trained = train(tmp_path / "tokenizer.model")
    for same in (Tokenizer.load(tmp_path / "tokenizer.model"), pickle.loads(pickle.dumps(trained))):
        assert same.fingerprint == trained.fingerprint
        assert same.languages == trained.languages
        assert same.encode("drei vier") == trained.encode("drei vier")
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.model"]


def test_the_tokenizer_of_a_mixture_knows_all_its_languages(tmp_path):
    pairs = make_pairs({EN_DE: 50, DE_EN: 50, EN_FR: 50})
    config = TokenizerConfig(vocab_size=300)
    made = [
        train_tokenizer(pairs, config, temperature=5.0, path=tmp_path / "a", seed=seed)
        for seed in (0, 0)
    ]
    assert made[0].languages == ("de", "en", "fr")
    assert made[0].fingerprint == made[1].fingerprint


def test_source_texts_may_have_a_vocabulary_of_their_own(tmp_path):
    pairs, path = make_pairs({EN_DE: 300, EN_FR: 300}), tmp_path / "model"
    options = {"temperature": 1.0, "path": path}
    config = TokenizerConfig(vocab_size=307, source_vocab_size=288)
    made = train_tokenizer(pairs, config, **options)
    assert (made.vocab_size, made.source.vocab_size) == (307, 288)
    assert made.source.languages == made.languages
    # No German nor French among the sources, no English among the targets.
    assert len(made.source.encode("seven")) < len(made.encode("seven"))
    assert len(made.encode("sieben")) < len(made.source.encode("sieben"))
    same = Tokenizer.load(path)
    assert same.fingerprint == made.fingerprint
    assert same.source.encode("one seven") == made.source.encode("one seven")
    assert Tokenizer(path.read_bytes()).fingerprint != made.fingerprint  # the targets' alone
    shared = train_tokenizer(pairs, TokenizerConfig(vocab_size=300), **options)
    assert shared.source is shared
    assert Tokenizer.load(path).fingerprint == shared.fingerprint
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_an_impossible_size_of_the_sources_vocabulary_is_told_by_its_name(tmp_path):
    config = TokenizerConfig(vocab_size=300, source_vocab_size=5000)
    with pytest.raises(UserError, match=r"source_vocab_size must be at most \d+ .*got 5000"):
        train_tokenizer(make_pairs({EN_DE: 50}), config, temperature=1.0, path=tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_unknown_language_is_an_error_naming_the_known_ones():
    with pytest.raises(UserError, match=r'got "xx"\. Choose one of de, en, fr'):
        small_tokenizer().tag_id("xx")


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize(("vocab_size", "bound"), [(5000, "most"), (270, "least")])
def test_an_impossible_vocabulary_size_is_an_error_whose_cure_works(
    tmp_path, model_type, vocab_size, bound
):
    with pytest.raises(UserError, match=rf"at {bound} \d+ .*got {vocab_size}\. ") as error:
        train(tmp_path / "model", model_type=model_type, vocab_size=vocab_size)
    possible = int(re.search(rf"at {bound} (\d+)", str(error.value))[1])
    made = train(tmp_path / "model", model_type=model_type, vocab_size=possible)
    assert made.vocab_size == possible


def test_failed_training_leaves_the_old_file(tmp_path):
    kept = train(tmp_path / "model").fingerprint
    with pytest.raises(UserError):
        train(tmp_path / "model", vocab_size=5000)
    assert Tokenizer.load(tmp_path / "model").fingerprint == kept
    assert len(list(tmp_path.iterdir())) == 1


def test_training_on_nothing_is_an_error(tmp_path):
    with pytest.raises(UserError, match="at least one sentence: got none"):
        train(tmp_path / "model", texts=[])


def test_a_language_name_that_cannot_be_a_tag_is_an_error(tmp_path):
    with pytest.raises(UserError, match='got "pt br"'):
        train(tmp_path / "model", languages=("de", "pt br"))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"existing file: got .*absent\.model"):
        Tokenizer.load(tmp_path / "absent.model")


@pytest.mark.parametrize(
    "damage", [lambda model: b"", lambda m: b"text", lambda m: m[: len(m) // 2]]
)
def test_a_damaged_file_is_an_error(tmp_path, damage):
    path = tmp_path / "model"
    train(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"must be a SentencePiece model: got .*model, which is"):
        Tokenizer.load(path)


def test_a_sentencepiece_model_of_another_make_is_an_error(tmp_path):
    with (tmp_path / "model").open("wb") as file:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_writer=file, vocab_size=40, minloglevel=2
        )
    with pytest.raises(UserError, match=r"with \[-1, 0, 1, 2\] and 0 tags"):
        Tokenizer.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("source_vocab_size", 0),
        ("max_sentences", 0),
        ("character_coverage", 1.5),
        ("model_type", "word"),
    ],
)
def test_an_impossible_setting_is_an_error(field, value):
    with pytest.raises(UserError, match=f"{field} must be .*{value}"):
        TokenizerConfig(**{field: value})
