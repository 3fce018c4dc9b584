"""The evaluation as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from moe.evaluation.evaluate import RESOURCES, SYSTEMS, Evaluation
from moe.evaluation.metrics import Scores


def table(evaluation: Evaluation) -> Table:
    """Directions by resource, then the averages, in 80 columns.

    The caption says what was measured and how.
    """
    result = Table(
        caption=_caption(evaluation), box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True
    )
    result.add_column("direction", no_wrap=True)
    for column in ("train", "test"):
        result.add_column(f"{column}\npairs", justify="right")
    for measure in ("BLEU", "chrF++"):
        for system in SYSTEMS:
            result.add_column(f"{measure}\n{system}", justify="right")
    for resource in RESOURCES:
        rows = [row for row in evaluation.directions if row.resource == resource]
        for row in rows:
            counts = f"{row.num_training_pairs:,}", f"{row.num_sentences:,}"
            result.add_row(row.direction, *counts, *_cells(row.scores))
        if rows:
            result.add_section()
    several = len({row.resource for row in evaluation.directions}) > 1
    for average in evaluation.averages:
        if average.resource != "all" and not several:
            continue  # the same numbers again
        name = f"{average.resource} mean" if average.side == "all" else f"  {average.side}"
        result.add_row(name, f"({average.num_directions})", "", *_cells(average.scores))
    return result


def samples_table(evaluation: Evaluation) -> Table:
    """The first sample of each direction: source, reference and what the model said."""
    result = Table("direction", "", "text", box=SIMPLE_HEAD, padding=(0, 1))
    for row in evaluation.directions:
        for sample in row.samples[:1]:
            result.add_row(row.direction, "source", Text(sample.source))
            result.add_row("", "reference", Text(sample.reference))
            result.add_row("", "model", Text(sample.output, style="bold"))
            result.add_section()
    return result


def _cells(scores: Mapping[str, Scores]) -> list[str]:
    values = [
        getattr(scores[system], measure) for measure in ("bleu", "chrf") for system in SYSTEMS
    ]
    return [f"{value:.1f}" for value in values]


def _caption(evaluation: Evaluation) -> str:
    config = evaluation.config
    bleu = dict.fromkeys(row.signatures["bleu"] for row in evaluation.directions)
    chrf = dict.fromkeys(row.signatures["chrf"] for row in evaluation.directions)
    lines = [
        "copy: the source; nearest: translation of the most similar training sentence",
        f"high: from {config.high_resource:,} training pairs; mid: from {config.mid_resource:,}; "
        "low: fewer; (n): mean of n directions",
        f"{evaluation.sentences_per_second:.1f} sentences/s, compilation included",
        *(f"BLEU {signature}" for signature in bleu),
        *(f"chrF++ {signature}" for signature in chrf),
    ]
    if evaluation.without_test_sentences:
        lines.append(f"no test sentences: {', '.join(evaluation.without_test_sentences)}")
    return "\n".join(lines)
