"""Compiles the real training step for devices that need not be here; nothing is allocated or run."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe.data import Batch
from moe.models import Transformer
from moe.sharding import make_mesh, shardings
from moe.training import TrainConfig
from moe.training.optimizer import make_optimizer
from moe.training.step import TrainState, batch_sharding, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A training step, compiled and not run.

    Attributes:
      config: the run.
      mesh: its mesh.
      state: shapes and shardings of what training changes.
      compiled: the program.
      text: its HLO, that of one device.
      jaxpr: the step as traced, before it is split over devices.
      lower_seconds, compile_seconds: time that tracing and the compiler took.
    """

    config: TrainConfig
    mesh: jax.sharding.Mesh
    state: TrainState
    compiled: jax.stages.Compiled
    text: str
    jaxpr: Any
    lower_seconds: float
    compile_seconds: float


def compile_step(config: TrainConfig, devices: Sequence[jax.Device]) -> CompiledStep:
    """The step of `moe train` for the mesh of `config` over `devices`.

    The vocabulary is `config.model.vocab_size`: no tokenizer is trained for a plan.

    Raises:
      UserError: a mesh that fits neither the devices, the model nor the batch.
    """
    mesh = make_mesh(config.mesh, devices)
    optimizer = make_optimizer(config.optimizer, config.steps)

    def create() -> tuple[nnx.GraphDef, TrainState]:
        graph, params = nnx.split(Transformer(config.model, rngs=nnx.Rngs(config.seed)))
        step = jnp.zeros((), jnp.int32)
        return graph, TrainState(step=step, params=params, optimizer=optimizer.init(params))

    with contextlib.ExitStack() as stack:
        if mesh.size > 1:  # as in training
            stack.enter_context(jax.set_mesh(mesh))
        start = time.perf_counter()
        graph, abstract = jax.eval_shape(create)
        state = jax.tree.map(_placed, abstract, shardings(abstract, mesh))
        key = jax.eval_shape(lambda: jax.random.key(config.seed))
        step: Any = make_train_step(graph, optimizer, config.objective)
        traced = step.trace(state, abstract_batch(config, mesh), key)
        lowered = traced.lower()
        lowered_at = time.perf_counter()
        compiled, text = _compile(lowered, devices[0].platform)
        end = time.perf_counter()
    return CompiledStep(
        config=config,
        mesh=mesh,
        state=state,
        compiled=compiled,
        text=text,
        jaxpr=traced.jaxpr,
        lower_seconds=lowered_at - start,
        compile_seconds=end - lowered_at,
    )


def abstract_batch(config: TrainConfig, mesh: jax.sharding.Mesh) -> Batch:
    """Shapes of a batch of the run, split over the mesh."""
    rows, where = config.mixture.batch_size, batch_sharding(mesh)

    def array(name: str) -> Any:
        mixture = config.mixture
        length = mixture.source_length if "source" in name else mixture.target_length
        return jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=where)

    return Batch(*map(array, Batch._fields))


def _placed(x, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _compile(lowered: jax.stages.Lowered, platform: str) -> tuple[jax.stages.Compiled, str]:
    """The program and its text.

    The TPU compiler writes its text while it compiles: libtpu 0.0.52 cannot print a finished program
    in which it gave a gather to the sparse cores ("async-update instruction should have 1 operands").
    """
    if platform != "tpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text() or ""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options)
        (path,) = Path(folder).glob("*.after_optimizations.txt")
        return compiled, path.read_text(encoding="utf-8")
