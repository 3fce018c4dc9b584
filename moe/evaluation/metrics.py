"""BLEU and chrF++ of a set of sentences, by sacrebleu, with signatures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from sacrebleu.metrics import BLEU, CHRF

# BLEU counts words, which these languages do not separate by spaces. "char" counts characters;
# sacrebleu's ja-mecab and ko-mecab would need dictionaries that are not installed by default.
_TOKENIZERS = dict.fromkeys(("ja", "ko", "th", "lo", "km", "my"), "char") | {
    "zh": "zh",
    "yue": "zh",
}


@dataclass(frozen=True)
class Scores:
    """Two measures of the same sentences, each from 0 to 100.

    `bleu` counts matching word sequences and cannot be compared between target languages with
    different tokenizers; `chrf` is chrF++: character sequences with words and word pairs.
    """

    bleu: float
    chrf: float

    @classmethod
    def mean(cls, scores: Iterable[Scores]) -> Scores:
        """The mean over directions, each counting the same."""
        listed = list(scores)
        return cls(fmean(s.bleu for s in listed), fmean(s.chrf for s in listed))


def score(outputs: Sequence[str], references: Sequence[str], *, target_lang: str) -> Scores:
    """The corpus scores of outputs against one reference each.

    Outputs equal to their references score 100, as far as they are long enough: BLEU needs four
    words.

    Source: Papineni et al. 2002 and Popovic 2017 as in sacrebleu (Post 2018).
    """
    bleu = _bleu(target_lang).corpus_score(list(outputs), [list(references)])
    chrf = CHRF(word_order=2).corpus_score(list(outputs), [list(references)])
    return Scores(bleu=bleu.score, chrf=chrf.score)


def signatures(target_lang: str) -> dict[str, str]:
    """What exactly was measured, in sacrebleu's form; it depends on the language's tokenizer."""
    metrics = {"bleu": _bleu(target_lang), "chrf": CHRF(word_order=2)}
    for metric in metrics.values():
        metric.corpus_score([""], [[""]])  # a signature holds the number of references
    return {name: str(metric.get_signature()) for name, metric in metrics.items()}


def _bleu(target_lang: str) -> BLEU:
    return BLEU(tokenize=_TOKENIZERS.get(target_lang.split("-")[0], "13a"))
