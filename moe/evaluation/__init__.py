"""How good the translations are: BLEU and chrF++ for each direction, beside two baselines."""

from moe.evaluation.baselines import NearestSentence
from moe.evaluation.evaluate import Evaluation, EvaluationConfig, chosen_sentences, evaluate
from moe.evaluation.metrics import Scores, score
from moe.evaluation.table import samples_table, table

__all__ = [
    "Evaluation",
    "EvaluationConfig",
    "NearestSentence",
    "Scores",
    "chosen_sentences",
    "evaluate",
    "samples_table",
    "score",
    "table",
]
