"""A small model learns invented languages well enough to translate sentences it has not seen."""

from __future__ import annotations

import dataclasses

import jax

from moe.data import Generated, TokenizerConfig
from moe.decoding import DecodingConfig, translate
from moe.evaluation import NearestSentence, score
from moe.training import CheckpointConfig, OptimizerConfig, load_model, open_run, train
from tests.training.small import small_config


def test_unseen_sentences_are_translated_far_better_than_by_the_nearest_training_sentence(tmp_path):
    config = small_config(tmp_path / "run")
    config = dataclasses.replace(
        config,
        steps=400,
        source=Generated(languages=("qac",), sentences=2000),
        tokenizer=TokenizerConfig(vocab_size=500),
        model=dataclasses.replace(
            config.model, d_model=64, d_hidden=128, num_heads=4, num_experts=4, dropout=0.0
        ),
        optimizer=OptimizerConfig(
            name="muon", learning_rate=1e-2, warmup_steps=20, schedule="linear"
        ),
        checkpoint=CheckpointConfig(every=400),
        log_every=100,
    )
    train(config, devices=jax.devices()[:1])
    run = open_run(config.run_dir)
    model, _ = load_model(run)
    seen, unseen = config.source.pairs("train"), config.source.pairs("test")
    for direction, pairs in unseen.items():
        pairs = pairs[:40]
        sources, references = [p.source for p in pairs], [p.target for p in pairs]
        answers = translate(
            model,
            run.tokenizer,
            sources,
            target_lang=direction.target_lang,
            config=DecodingConfig(beam_size=1),
        )
        nearest = NearestSentence(
            *zip(*((p.source, p.target) for p in seen[direction]), strict=True)
        )
        ours, theirs = (
            score(texts, references, target_lang=direction.target_lang).chrf
            for texts in (answers, nearest(sources))
        )
        exact = sum(a == b for a, b in zip(answers, references, strict=True)) / len(references)
        assert ours > theirs + 15, (direction, ours, theirs)
        assert exact > 0.25, (direction, exact)
