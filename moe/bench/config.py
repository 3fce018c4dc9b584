"""What `bench_layer` measures: sizes, device and cases."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from moe.bench.results import CEILING
from moe.bench.workload import Workload
from moe.errors import UserError

# What each optional package adds to the table.
PEERS = {
    "torch": ("dense-torch", "dense-torch-swiglu", "torch-grouped"),
    "transformers": (
        "nllb-corrected",
        "nllb-shipped",
        "switch",
        "mixtral-grouped",
        "mixtral-eager",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBenchConfig:
    """Time the MoE layer beside a dense layer of the same active FLOPs and beside its peers.

    The defaults are those of a CPU; `--device gpu` has its own.
    """

    device: Literal["cpu", "gpu"] = "cpu"
    """Where to run."""
    experts: tuple[int, ...] = (8, 32, 128)
    """Numbers of experts; each token uses two."""
    tokens: tuple[int, ...] = (4096,)
    """Tokens of a call in training: forward, and forward + backward."""
    decode_tokens: tuple[int, ...] = (64,)
    """Tokens of a call in decoding: forward only, evaluation mode."""
    d_model: int = 512
    """Width of the tokens."""
    d_hidden: int = 2048
    """Width inside one expert; the dense layer has twice as much."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of tokens and expert weights."""
    threads: tuple[int, ...] = (1, 2)
    """Cores the process may use, a table each; not read on a GPU."""
    rounds: int = 5
    """Times that every case is timed, in turns; medians are shown."""
    skew: float = 0.0
    """0: uniform routing. 1: popularity of experts spreads as much as a token's own preferences."""
    capacity_factor: float = 1.25
    """Of the back-ends with a capacity; auto and sorted are dropless."""
    group_size: int = 1024
    """Tokens that compete for slots in those back-ends (einsum: at most 256)."""
    cases: tuple[str, ...] = ()
    """Names of cases or patterns such as 'moe-*'; empty is all."""

    def __post_init__(self):
        for name in ("experts", "tokens", "decode_tokens", "threads"):
            least = 2 if name == "experts" else 1
            values = getattr(self, name)
            if any(value < least for value in values):
                raise UserError(
                    f"{name} must be at least {least} each: got {values}. Raise the smallest."
                )
        for name in ("d_model", "d_hidden", "rounds", "group_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1: got {getattr(self, name)}. Raise it.")
        if self.skew < 0:
            raise UserError(f"skew must be at least 0: got {self.skew}. 0 is uniform routing.")
        if not self.capacity_factor > 0:
            raise UserError(
                f"capacity_factor must be positive: got {self.capacity_factor}. 1.25 is usual."
            )
        if not list(self.workloads()):
            raise UserError(
                f"experts, threads, and tokens or decode_tokens must name something to measure: got "
                f"experts={self.experts}, threads={self.threads}, tokens={self.tokens}, "
                f"decode_tokens={self.decode_tokens}. Give at least one of each."
            )

    def workloads(self) -> Iterator[Workload]:
        """The sections, training before decoding."""
        sizes = [(tokens, True) for tokens in self.tokens]
        sizes += [(tokens, False) for tokens in self.decode_tokens]
        for threads in self.threads if self.device == "cpu" else (1,):
            for num_tokens, training in sizes:
                for num_experts in self.experts:
                    yield Workload(
                        tokens=num_tokens,
                        training=training,
                        num_experts=num_experts,
                        threads=threads,
                        d_model=self.d_model,
                        d_hidden=self.d_hidden,
                        dtype=self.dtype,
                        device=self.device,
                        skew=self.skew,
                        capacity_factor=self.capacity_factor,
                        group_size=self.group_size,
                    )


GPU_CONFIG = LayerBenchConfig(
    device="gpu",
    experts=(8, 64, 128),
    tokens=(16384, 65536),
    decode_tokens=(),
    d_model=2048,
    d_hidden=8192,
    dtype="bfloat16",
    rounds=10,
    skew=1.0,
    cases=(
        CEILING,
        "dense-jax",
        "dense-torch",
        "moe-auto",
        "moe-sorted",
        "moe-gather",
        "moe-einsum",
        "torch-grouped",
    ),
)
"""The defaults of `--device gpu`: large, bfloat16, skewed routing as in text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBenchOptions(LayerBenchConfig):
    """Time the MoE layer beside a dense layer of the same active FLOPs and beside its peers.

    The defaults are those of a CPU; `--device gpu` has its own.
    """

    output: str | None = None
    """File to write settings, environment and all samples to, as JSON."""

    def __post_init__(self):
        super().__post_init__()
        if self.output is not None and not Path(self.output).absolute().parent.is_dir():
            raise UserError(
                f"output must be in a folder that exists: got {self.output}. Make the folder first."
            )

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> LayerBenchOptions:
        """What the fields are that a command line leaves out: those of its device."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--device", nargs="?")
        on_gpu = parser.parse_known_args(arguments)[0].device == "gpu"
        return cls(**vars(GPU_CONFIG)) if on_gpu else cls()


def case_names(patterns: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names of the cases that match one of these; without any, all. Installed or not.

    Raises:
      UserError: a pattern that no case matches.
    """
    from moe.bench.jax_layers import CASES

    names = [*CASES, *(name for peers in PEERS.values() for name in peers)]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"cases must match the name of a case: got {pattern!r}. There are "
                f"{', '.join(names)}."
            )
    wanted = {name for pattern in patterns or ("*",) for name in fnmatch.filter(names, pattern)}
    return tuple(name for name in names if name in wanted)
