"""The command `moe`: thin commands over functions that can be imported, one command a file.

A mistake that the user can mend ends with one sentence on standard error and exit code 2; a signal
that ends training early with 128 plus its number, after the state is saved; the loss of another
process with 75.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence

from moe import __version__
from moe.cli import analyze, bench, evaluate, plan, train, translate, upcycle
from moe.cli.experiment import read_experiment
from moe.errors import UserError

__all__ = ["COMMANDS", "main", "read_experiment"]

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train.train,
    "translate": translate.translate,
    "evaluate": evaluate.evaluate,
    "analyze": analyze.analyze,
    "plan": plan.plan,
    "bench": bench.bench,
    "upcycle": upcycle.upcycle,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _log_to_stderr()
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(_usage())
            return 0 if arguments else 2
        if arguments[0] == "--version":
            print(f"moe {__version__}")
            return 0
        if arguments[0] not in COMMANDS:
            raise UserError(
                f"command must be one of {', '.join(COMMANDS)}: got {arguments[0]!r}. See `moe --help`."
            )
        return COMMANDS[arguments[0]](arguments[1:])
    except UserError as error:
        print(f"moe: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _log_to_stderr() -> None:
    """Our own warnings as plain lines, whatever the libraries have set up for theirs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("moe")
    logger.handlers, logger.propagate = [handler], False


def _usage() -> str:
    lines = [
        f"  {name:<10} {(function.__doc__ or '').splitlines()[0]}"
        for name, function in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: moe COMMAND ...",
            "",
            "Sparsely-gated Mixture-of-Experts translation on JAX.",
            "",
            *lines,
            "",
            "`moe COMMAND --help` lists the options of a command.",
        ]
    )
