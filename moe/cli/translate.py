"""`moe translate`: lines of text through a trained run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from moe.cli.arguments import BeamArguments, RunFolder, check_folder_exists
from moe.cli.devices import MeshArguments, from_first, on_mesh, read_options, waiting
from moe.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslateArguments(BeamArguments):
    """Translate lines of text with a trained run: standard input to standard output."""

    run: RunFolder
    """Run folder."""
    to: str
    """Language to translate into."""
    input: str | None = None
    """File to read instead of standard input; UTF-8, one sentence a line."""
    output: str | None = None
    """File to write instead of standard output."""
    checkpoint: str = "best"
    """best, last, or a step."""
    mesh: MeshArguments = MeshArguments()
    """The devices."""


def translate(arguments: Sequence[str]) -> int:
    """Translate lines of text with a trained run."""
    options = read_options(TranslateArguments, arguments, prog="moe translate")
    from moe import decoding
    from moe.training import load_model, open_run
    from moe.training.hosts import agree

    config = options.decoding_config()
    with on_mesh(options.mesh) as mesh:
        run = agree(lambda: open_run(options.run))
        run.tokenizer.source.tag_id(options.to)  # what is wrong is told before the work is done
        sentences = from_first(lambda: _read_lines(options))
        model, _ = agree(lambda: load_model(run, options.checkpoint, mesh=mesh))
        lines = decoding.translate(
            model,
            run.tokenizer,
            sentences,
            target_lang=options.to,
            config=config,
            wait_for_all=waiting(),
        )
        from_first(lambda: _write_lines(options, lines))
    return 0


def _write_lines(options: TranslateArguments, lines: Sequence[str]) -> None:
    text = "".join(line + "\n" for line in lines)
    if options.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(options.output).write_text(text, encoding="utf-8")


def _read_lines(options: TranslateArguments) -> list[str]:
    check_folder_exists("output", options.output)
    path = options.input
    if path is None:
        data = sys.stdin.buffer.read()
    elif Path(path).is_file():
        data = Path(path).read_bytes()
    else:
        raise UserError(f"input must be a file: got {path}, which does not exist. Check the path.")
    try:
        return data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"input must be UTF-8: got byte {data[error.start]:#x} in line {line}. Convert the text."
        ) from error
