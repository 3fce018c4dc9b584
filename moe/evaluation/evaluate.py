"""Evaluation of a translator: every direction decoded once, for all measures."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe.data.pairs import Direction, Pairs, SentencePair
from moe.errors import UserError
from moe.evaluation.baselines import NearestSentence
from moe.evaluation.metrics import Scores, score, signatures

Translate = Callable[[Sequence[str], Sequence[str]], list[str]]
"""(sentences, target language of each) -> translations."""

SYSTEMS = ("model", "copy", "nearest")
RESOURCES = ("high", "mid", "low")
SIDES = ("into en", "out of en")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is evaluated, and which languages count as high-, mid- and low-resource."""

    limit: int | None = 200
    """Test sentences of a direction: the first in a fixed random order; None is all."""
    directions: tuple[str, ...] = ()
    """Directions to evaluate, such as en-de; empty is all that have test sentences."""
    high_resource: int = 10_000
    """Training pairs from which on a direction is high-resource."""
    mid_resource: int = 4_000
    """Training pairs from which on a direction is mid-resource; fewer are low-resource."""
    num_samples: int = 3
    """Translations of each direction to keep as examples."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit must be at least 1: got {self.limit}. Use None for all.")
        if not 0 <= self.mid_resource <= self.high_resource:
            raise UserError(
                "mid_resource must be in [0, high_resource]: got "
                f"mid_resource={self.mid_resource}, high_resource={self.high_resource}. "
                "Change one of them."
            )

    def resource(self, num_training_pairs: int) -> str:
        """One of RESOURCES."""
        if num_training_pairs >= self.high_resource:
            return "high"
        return "mid" if num_training_pairs >= self.mid_resource else "low"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A translation to look at."""

    source: str
    reference: str
    output: str


@dataclass(frozen=True, kw_only=True)
class DirectionResult:
    """The scores of one direction; `scores` has an entry for each of SYSTEMS."""

    direction: str
    resource: str
    side: str
    """"into en", "out of en", or "other"."""
    num_training_pairs: int
    num_sentences: int
    scores: Mapping[str, Scores]
    signatures: Mapping[str, str]
    samples: Sequence[Sample]


@dataclass(frozen=True, kw_only=True)
class Average:
    """Mean scores of a group of directions, such as low-resource languages into English."""

    resource: str
    """One of RESOURCES, or "all"."""
    side: str
    """"into en", "out of en", or "all"."""
    num_directions: int
    scores: Mapping[str, Scores]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything measured; `as_json` is what `evaluation.json` of a run holds."""

    config: EvaluationConfig
    directions: Sequence[DirectionResult]
    averages: Sequence[Average]
    without_test_sentences: Sequence[str]
    seconds: float
    """Time spent translating, compilation included."""
    sentences_per_second: float

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)


def evaluate(
    translate: Translate, train: Pairs, test: Pairs, *, config: EvaluationConfig
) -> Evaluation:
    """Translates test sentences of each direction and scores them beside two baselines.

    The baselines see the same sentences: "copy" answers with the source, "nearest" with the
    translation of the most similar training sentence. The chosen sentences depend on their text
    alone; directions that share English sentences are measured on the same ones where they can be.

    Args:
      translate: called once, with the sentences of all directions and their target languages.
      train: training pairs, for the nearest sentences and the resource of each direction.
      test: test pairs.
      config: see `EvaluationConfig`.

    Raises:
      UserError: a direction that the test data does not have or has no sentence for; none at all.
    """
    chosen = _chosen(test, config)
    start = time.perf_counter()
    outputs = translate(*_sentences(chosen))
    seconds = time.perf_counter() - start
    rest = iter(outputs)
    results = [
        _result(d, pairs, [next(rest) for _ in pairs], train.get(d, ()), config)
        for d, pairs in chosen.items()
    ]
    return Evaluation(
        config=config,
        directions=results,
        averages=_averages(results),
        without_test_sentences=[str(d) for d in sorted(test) if not len(test[d])],
        seconds=seconds,
        sentences_per_second=len(outputs) / seconds,
    )


def chosen_sentences(test: Pairs, config: EvaluationConfig) -> tuple[list[str], list[str]]:
    """What `evaluate` calls its translator with, for a process that only helps to translate.

    Raises:
      UserError: as `evaluate`.
    """
    return _sentences(_chosen(test, config))


def _chosen(test: Pairs, config: EvaluationConfig) -> dict[Direction, list[SentencePair]]:
    return {d: _choose(test[d], config.limit) for d in _directions(test, config)}


def _sentences(chosen: Mapping[Direction, list[SentencePair]]) -> tuple[list[str], list[str]]:
    """The sources and the target language of each."""
    pairs = list(itertools.chain(*chosen.values()))
    return [pair.source for pair in pairs], [pair.target_lang for pair in pairs]


def _directions(test: Pairs, config: EvaluationConfig) -> list[Direction]:
    filled = {str(direction): direction for direction in sorted(test) if len(test[direction])}
    missing = [name for name in config.directions if name not in filled]
    if missing or not filled:
        raise UserError(
            f"directions must have test sentences: got none for {', '.join(missing) or 'any'}. "
            f"Choose of: {', '.join(filled) or 'none, so add data'}."
        )
    return [filled[name] for name in config.directions or filled]


def _choose(pairs: Sequence[SentencePair], limit: int | None) -> list[SentencePair]:
    """The first `limit` pairs by a hash of the English side."""

    def order(pair: SentencePair):
        return hashlib.sha256(pair.key.encode()).digest(), pair.source, pair.target

    return sorted(pairs, key=order)[:limit]


def _result(
    direction: Direction,
    pairs: Sequence[SentencePair],
    outputs: Sequence[str],
    train: Sequence[SentencePair],
    config: EvaluationConfig,
) -> DirectionResult:
    sources, references = [p.source for p in pairs], [p.target for p in pairs]
    nearest = NearestSentence([p.source for p in train], [p.target for p in train])
    answers = dict(zip(SYSTEMS, (outputs, sources, nearest(sources)), strict=True))
    target_lang = direction.target_lang
    samples = zip(sources, references, outputs, strict=True)
    return DirectionResult(
        direction=str(direction),
        resource=config.resource(len(train)),
        side=_side(direction),
        num_training_pairs=len(train),
        num_sentences=len(pairs),
        scores={
            system: score(texts, references, target_lang=target_lang)
            for system, texts in answers.items()
        },
        signatures=signatures(target_lang),
        samples=[
            Sample(source=source, reference=reference, output=output)
            for source, reference, output in list(samples)[: config.num_samples]
        ],
    )


def _side(direction: Direction) -> str:
    if direction.target_lang == "en":
        return "into en"
    return "out of en" if direction.source_lang == "en" else "other"


def _averages(results: Sequence[DirectionResult]) -> list[Average]:
    """Means by resource and by side of English, and of both together."""
    averages = []
    for resource, side in itertools.product(("all", *RESOURCES), ("all", *SIDES)):
        group = [
            result.scores
            for result in results
            if resource in ("all", result.resource) and side in ("all", result.side)
        ]
        if group:
            scores = {s: Scores.mean(scores[s] for scores in group) for s in SYSTEMS}
            averages.append(
                Average(resource=resource, side=side, num_directions=len(group), scores=scores)
            )
    return averages
