"""Compiles the real training step for devices that need not be here; nothing is allocated or run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moe.data import Batch
from moe.planning.chips import Slice
from moe.planning.devices import slice_devices
from moe.planning.program import Program, compiled_program, optimised_program
from moe.sharding import make_mesh, weight_update
from moe.training import TrainConfig
from moe.training.optimizer import make_optimizer
from moe.training.state import TrainState, create_state, state_shardings
from moe.training.step import batch_sharding, make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A training step, compiled and not run.

    Attributes:
      config: the run.
      mesh: its mesh.
      state: shapes and shardings of what training changes.
      program: what the compiler made of it, for one device.
      jaxpr: the step as traced, before it is split over devices.
      lower_seconds, compile_seconds: time that tracing and the compiler took.
    """

    config: TrainConfig
    mesh: jax.sharding.Mesh
    state: TrainState
    program: Program
    jaxpr: Any
    lower_seconds: float
    compile_seconds: float


def compile_step(
    config: TrainConfig,
    devices: Sequence[jax.Device],
    *,
    where: Slice | None = None,
    machine_code: bool = False,
) -> CompiledStep:
    """The step of `moe train` for the mesh of `config` over `devices`.

    Vocabularies are as large as `config.model` says: no tokenizer is trained for a plan.

    Args:
      config: the run.
      devices: of the run.
      where: the slice that they are, if they are TPU chips.
      machine_code: for TPU chips, wait for it too; see `moe.planning.program`.

    Raises:
      UserError: a mesh that fits neither the devices, the model nor the batch, or a step that the
        compiler cannot fit into the memory of a chip.
    """
    start = time.perf_counter()
    mesh, state, traced = _trace(config, devices)
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    if where is None or machine_code:
        program = compiled_program(lowered, on_tpu=devices[0].platform == "tpu")
    else:
        program = optimised_program(compile_for_slice, config, where)
    end = time.perf_counter()
    return CompiledStep(
        config=config,
        mesh=mesh,
        state=state,
        program=program,
        jaxpr=traced.jaxpr,
        lower_seconds=lowered_at - start,
        compile_seconds=end - lowered_at,
    )


def compile_for_slice(config: TrainConfig, where: Slice, options: dict[str, Any]) -> None:
    """Compiles the step for a slice's chips, for what the compiler writes on its way."""
    *_, traced = _trace(config, slice_devices(where))
    traced.lower().compile(compiler_options=options)


def _trace(config: TrainConfig, devices: Sequence[jax.Device]):
    """The mesh, the state's shapes and the step as traced."""
    mesh = make_mesh(config.mesh, devices)
    optimizer = make_optimizer(config.optimizer, config.steps)
    create = functools.partial(create_state, config.model, optimizer, seed=config.seed, mesh=mesh)
    with contextlib.ExitStack() as stack:
        stack.enter_context(weight_update(config.mesh.weight_update))
        if mesh.size > 1:  # as in training
            stack.enter_context(jax.set_mesh(mesh))
        graph, abstract = jax.eval_shape(create)
        state = jax.tree.map(_placed, abstract, state_shardings(abstract, mesh))
        key = jax.eval_shape(lambda: jax.random.key(config.seed))
        step: Any = make_train_step(graph, optimizer, config.objective)
        return mesh, state, step.trace(state, abstract_batch(config, mesh), key)


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
