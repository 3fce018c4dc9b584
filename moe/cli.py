"""The command `moe`: thin commands over functions that can be imported.

A mistake that the user can mend ends with one sentence on standard error and exit code 2; a signal
that ends training early with 128 plus its number, after the state is saved; the loss of another
process with 75.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from moe import __version__
from moe.errors import UserError

if TYPE_CHECKING:
    from moe.training import Run, TrainConfig

LOST_PROCESS = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed
_HOSTS_USAGE = (
    "--coordinator HOST:PORT --num-processes N --process-id I, or --distributed to ask the launcher "
    "(by itself under srun and mpirun); --heartbeat-timeout SECONDS"
)
RunFolder = Annotated[str, tyro.conf.Positional]


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


def train(arguments: Sequence[str]) -> int:
    """Train the run of an experiment file, or go on with it."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: moe train experiments/NAME.py [--field value ...]")
        print("`moe train experiments/NAME.py --help` lists every field with its meaning.")
        print(f"Several processes: {_HOSTS_USAGE}; see docs/multihost.md.")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    import jax

    from moe.training import HostsConfig, LostProcessError, join_hosts
    from moe.training import train as run_training

    hosts, others = tyro.cli(
        HostsConfig, args=arguments[1:], return_unknown_args=True, add_help=False
    )
    if not {"-h", "--help"} & set(others):
        join_hosts(hosts)  # before the experiment's file, which may ask JAX for the devices
    config = tyro.cli(
        _config_type(),
        config=(tyro.conf.AvoidSubcommands,),
        prog=f"moe train {arguments[0]}",
        description="Every field of the run, with the experiment's value as its default. "
        f"Several processes: {_HOSTS_USAGE}.",
        default=read_experiment(Path(arguments[0])),
        args=others,
    )
    console = Console(stderr=True, quiet=jax.process_index() > 0)
    try:
        outcome = run_training(config, console=console)
    except LostProcessError as error:
        print(f"moe: {error}", file=sys.stderr, flush=True)
        os._exit(LOST_PROCESS)  # an orderly end would wait for the lost process
    if outcome.signal:
        console.print(f"Stopped at step {outcome.step}; the same command goes on from there.")
        return 128 + outcome.signal
    console.print(f"Trained {outcome.run.path} to step {outcome.step}.")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslateArguments:
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
    beam_size: int = 4
    """Hypotheses kept for each sentence; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of the length normalisation; larger favours longer translations."""


def translate(arguments: Sequence[str]) -> int:
    """Translate lines of text with a trained run."""
    options = tyro.cli(TranslateArguments, prog="moe translate", args=arguments)
    from moe import decoding
    from moe.training import load_model, open_run

    config = decoding.DecodingConfig(
        beam_size=options.beam_size, length_penalty=options.length_penalty
    )
    run = open_run(options.run)
    run.tokenizer.tag_id(options.to)  # what is wrong is told before the work is done
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise UserError(
            f"output must be in a folder that exists: got {options.output}. Make the folder first."
        )
    sentences = _read_lines(options.input)
    model, _ = load_model(run, options.checkpoint)
    lines = decoding.translate(
        model, run.tokenizer, sentences, target_lang=options.to, config=config
    )
    text = "".join(line + "\n" for line in lines)
    if options.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(options.output).write_text(text, encoding="utf-8")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateArguments:
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
    beam_size: int = 4
    """Hypotheses kept for each sentence; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of the length normalisation; larger favours longer translations."""


def evaluate(arguments: Sequence[str]) -> int:
    """Score a trained run: BLEU and chrF++ of each direction, beside two baselines."""
    options = tyro.cli(EvaluateArguments, prog="moe evaluate", args=arguments)
    from moe import decoding, evaluation
    from moe.training import load_model, open_run
    from moe.training.run import write_atomically

    config = evaluation.EvaluationConfig(limit=options.limit, directions=options.directions)
    decoding_config = decoding.DecodingConfig(
        beam_size=options.beam_size, length_penalty=options.length_penalty
    )
    run = open_run(options.run)
    model, step = load_model(run, options.checkpoint)

    def translate_all(sentences: Sequence[str], languages: Sequence[str]) -> list[str]:
        return decoding.translate(
            model,
            run.tokenizer,
            sentences,
            target_lang=languages,
            config=decoding_config,
            show_progress=True,
        )

    source = run.config.source
    result = evaluation.evaluate(
        translate_all,
        source.pairs("train"),
        source.pairs(_checked_split(options.split)),
        config=config,
    )
    document = {"run": run.path.resolve().name, "step": step, "split": options.split}
    document |= {"decoding": dataclasses.asdict(decoding_config)} | result.as_json()
    path = run.path / "evaluation.json"
    write_atomically(path, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    console = Console()
    console.print(evaluation.samples_table(result))
    console.print(evaluation.table(result))
    console.print(f"Scores and samples: {path}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalyzeArguments:
    """Measure the expert load of a trained run and write load.html and load.json into its folder."""

    run: RunFolder
    """Run folder."""
    split: str = "validation"
    """Sentences to measure on: test, validation or train."""
    limit: int = 200
    """Sentences of each direction at most."""
    checkpoint: str = "best"
    """best, last, or a step."""


def analyze(arguments: Sequence[str]) -> int:
    """Show the load of every expert, by layer, language and training step."""
    options = tyro.cli(AnalyzeArguments, prog="moe analyze", args=arguments)
    from moe import analysis
    from moe.training import load_model, open_run

    run = open_run(options.run)
    if not run.config.model.num_experts:
        raise UserError(
            f"run must have MoE layers to analyse: got {run.path} with model.num_experts=0. "
            "Train one with experts."
        )
    if options.limit < 1:
        raise UserError(f"limit must be at least 1: got {options.limit}. Raise it.")
    model, step = load_model(run, options.checkpoint)
    router, config = run.config.model.router, run.config
    report = analysis.LoadReport(
        run=run.path.resolve().name,
        loads=analysis.collect_load(_stats_by_direction(run, model, options)),
        history=analysis.read_history(run.path / "load.jsonl"),
        step=step,
        split=options.split,
        settings=analysis.Settings(
            capacity_factor=getattr(router, "capacity_factor", None),
            balance_weight=config.objective.balance_weight,
            z_weight=config.objective.z_weight,
            batch_priority=getattr(router, "batch_priority", None),
            temperature=config.mixture.temperature,
        ),
    )
    page, _ = analysis.write_report(report, run.path)
    console = Console()
    console.print(analysis.load_table(report))
    console.print(analysis.findings_text(report))
    console.print(f"Report: {page}")
    return 0


def bench(arguments: Sequence[str]) -> int:
    """Time the MoE layer beside a dense layer and the peers that are installed: `moe bench layer`."""
    if arguments[:1] != ["layer"]:
        print("usage: moe bench layer [--device gpu] [--field value ...]")
        print("`moe bench layer --help` lists every field with its meaning.")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    from moe.bench import LayerBenchOptions, bench_layer, show

    options = tyro.cli(
        LayerBenchOptions,
        prog="moe bench layer",
        default=LayerBenchOptions.defaults(arguments[1:]),
        args=arguments[1:],
    )
    benchmark = bench_layer(options, console=Console(stderr=True))
    if options.output is not None:
        text = json.dumps(benchmark.as_json(), indent=2) + "\n"
        Path(options.output).write_text(text, encoding="utf-8")
    show(benchmark, Console())
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpcycleArguments:
    """Start a run with experts from a trained dense run: each expert is a copy of its FFN."""

    run: RunFolder
    """Run folder of a dense model (model.num_experts=0)."""
    new_run: RunFolder
    """Folder to make."""
    num_experts: int = 8
    """Experts of each MoE layer."""
    checkpoint: str = "best"
    """best, last, or a step of the dense run."""
    noise: float = 0.0
    """Noise on the copies, relative to the size of the weights."""


def upcycle(arguments: Sequence[str]) -> int:
    """Start a run with experts from a trained dense run."""
    options = tyro.cli(UpcycleArguments, prog="moe upcycle", args=arguments)
    from moe.training import open_run
    from moe.upcycle.run import upcycle_run, upcycle_run_config

    config = upcycle_run_config(open_run(options.run), options.new_run, options.num_experts)
    run = upcycle_run(options.run, config, checkpoint=options.checkpoint, noise=options.noise)
    console = Console()
    console.print(
        f"Made {run.path} at step 0, with the experts' FFNs from {options.run}. Train it:"
    )
    console.print(
        f"moe train EXPERIMENT.py --run-dir {run.path} "
        f"--model.num-experts {config.model.num_experts} --model.d-expert {config.model.d_expert}",
        soft_wrap=True,
    )
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Compile the training step of an experiment without running it, and say what it would take."""

    topology: str | None = None
    """TPU slice to compile for, such as v5p:8x16x16; needs the extra [tpu] and no TPU."""
    devices: int | None = None
    """CPU devices to simulate instead; without either, the attached devices."""
    model: str | None = None
    """Which of the experiment's models, where its config() takes a name."""
    search: bool = False
    """Compile for every legal mesh, rank those that fit, and show the best."""
    output: str | None = None
    """JSON file to write."""
    page: str | None = None
    """HTML page with charts to write."""


def plan(arguments: Sequence[str]) -> int:
    """Show memory, communication and modelled time of a run before it is paid for."""
    if not arguments or arguments[0].startswith("-"):
        print("usage: moe plan experiments/NAME.py [--topology v5p:4x4x8] [--field value ...]")
        print("`moe plan experiments/NAME.py --help` lists the options of the plan.")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    options, others = tyro.cli(
        PlanArguments,
        prog=f"moe plan {arguments[0]}",
        args=arguments[1:],
        return_unknown_args=True,
    )
    config = tyro.cli(
        _config_type(),
        config=(tyro.conf.AvoidSubcommands,),
        prog=f"moe plan {arguments[0]}",
        default=read_experiment(Path(arguments[0]), options.model),
        args=others,
    )
    for name in ("output", "page"):
        path = getattr(options, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UserError(
                f"{name} must be in a folder that exists: got {path}. Make the folder first."
            )
    _plan(options, config, name=options.model or Path(arguments[0]).stem)
    return 0


def _plan(options: PlanArguments, config: TrainConfig, *, name: str) -> None:
    """Makes the plan on the devices of the options, and writes it where they say."""
    from moe import planning

    where, devices = planning.planned_devices(options.topology, options.devices)
    console = Console()
    if options.search:
        plans = planning.search(config, devices, name=name, where=where)
        console.print(planning.ranking(plans))
        best = plans[0]
    else:
        best = planning.plan(config, devices, name=name, where=where)
    planning.show(best, console)
    if options.output is not None:
        text = json.dumps(best.as_json(), indent=2) + "\n"
        Path(options.output).write_text(text, encoding="utf-8")
    if options.page is not None:
        Path(options.page).write_text(planning.plan_page(best), encoding="utf-8")


def read_experiment(path: Path, model: str | None = None) -> TrainConfig:
    """What `config()` of an experiment file returns, or `config(model)` where a name is given.

    Raises:
      UserError: no such file, no `config()` in it, or one that returns something else.
    """
    if not path.is_file() or path.suffix != ".py":
        raise UserError(
            f"experiment must be a Python file that exists: got {path}. See the folder experiments."
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: it may import its neighbours
    spec.loader.exec_module(module)
    config: Callable[..., TrainConfig] | None = getattr(module, "config", None)
    if callable(config) and model is not None and not inspect.signature(config).parameters:
        raise UserError(
            f"model must be left out where config() takes none: got {model!r} for {path}. "
            "Leave it out, or use --model.FIELD for a field."
        )
    names = () if model is None else (model,)
    result = config(*names) if callable(config) else None
    if not isinstance(result, _config_type()):
        raise UserError(
            f"experiment must define config() that returns a TrainConfig: got {path} with "
            f"{'config() -> ' + type(result).__name__ if callable(config) else 'no config()'}. "
            "See experiments/generated.py."
        )
    return result


def _stats_by_direction(run: Run, model, options: AnalyzeArguments) -> Iterable[tuple]:
    """The expert load of each batch of the split, one direction a batch, in evaluation mode."""
    from flax import nnx

    from moe.training.step import make_eval_step

    graph, params = nnx.split(model)
    eval_step = make_eval_step(graph)
    for direction, batch in run.batches(_checked_split(options.split), options.limit):
        _, _, stats = eval_step(params, batch)
        yield direction, stats


def _log_to_stderr() -> None:
    """Our own warnings as plain lines, whatever the libraries have set up for theirs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("moe")
    logger.handlers, logger.propagate = [handler], False


def _checked_split(split: str):
    if split not in ("train", "validation", "test"):
        raise UserError(f"split must be train, validation or test: got {split!r}. Choose one.")
    return split


def _read_lines(path: str | None) -> list[str]:
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


def _config_type() -> type[TrainConfig]:
    from moe.training import TrainConfig

    return TrainConfig


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "translate": translate,
    "evaluate": evaluate,
    "analyze": analyze,
    "plan": plan,
    "bench": bench,
    "upcycle": upcycle,
}


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


if __name__ == "__main__":
    sys.exit(main())
