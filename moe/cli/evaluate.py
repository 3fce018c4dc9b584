"""`moe evaluate`: scores of a trained run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from moe.cli.arguments import BeamArguments, RunFolder, checked_split
from moe.cli.devices import (
    MeshArguments,
    check_same,
    from_first,
    on_mesh,
    read_options,
    waiting,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from moe.evaluation import Evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateArguments(BeamArguments):
    """Score a trained run on unseen sentences; writes evaluation.json into its folder."""

    run: RunFolder
    """Run folder."""
    split: str = "test"
    """Sentences to score: test, validation or train."""
    limit: int | None = 200
    """Sentences of each direction; None is all."""
    directions: tuple[str, ...] = ()
    """Directions to score, such as en-de; empty is all."""
    checkpoint: str = "best"
    """best, last, or a step."""
    mesh: MeshArguments = MeshArguments()
    """The devices."""


def evaluate(arguments: Sequence[str]) -> int:
    """Score a trained run: BLEU and chrF++ of each direction, beside two baselines."""
    options = read_options(EvaluateArguments, arguments, prog="moe evaluate")
    with on_mesh(options.mesh) as mesh:
        _evaluate(options, mesh)
    return 0


def _evaluate(options: EvaluateArguments, mesh: Mesh | None) -> None:
    """All processes translate all sentences together; process 0 scores, writes and prints."""
    import jax

    from moe import decoding, evaluation
    from moe.training import load_model, open_run
    from moe.training.hosts import agree

    config = evaluation.EvaluationConfig(limit=options.limit, directions=options.directions)
    decoding_config = options.decoding_config()
    is_first = jax.process_index() == 0
    run = agree(lambda: open_run(options.run))
    source = run.config.source
    test = agree(lambda: source.pairs(checked_split(options.split)))
    train = agree(lambda: source.pairs("train") if is_first else {})
    chosen = agree(lambda: evaluation.chosen_sentences(test, config))
    check_same("the SHA-256 of the sentences", sha256(repr(chosen).encode()).hexdigest()[:12])
    model, step = agree(lambda: load_model(run, options.checkpoint, mesh=mesh))

    def translate_all(sentences: Sequence[str], languages: Sequence[str]) -> list[str]:
        return decoding.translate(
            model,
            run.tokenizer,
            sentences,
            target_lang=languages,
            config=decoding_config,
            show_progress=is_first,
            wait_for_all=waiting(),
        )

    def score() -> None:
        result = evaluation.evaluate(translate_all, train, test, config=config)
        document = {"run": run.path.resolve().name, "step": step, "split": options.split}
        document |= {"decoding": dataclasses.asdict(decoding_config)} | result.as_json()
        _show(result, document, run.path / "evaluation.json")

    if not is_first:
        translate_all(*chosen)
    from_first(score)


def _show(result: Evaluation, document: dict[str, Any], path: Path) -> None:
    from moe import evaluation
    from moe.training.run import write_atomically

    write_atomically(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    console = Console()
    console.print(evaluation.samples_table(result))
    console.print(evaluation.table(result))
    console.print(f"Scores and samples: {path}")
