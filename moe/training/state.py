"""What training changes: made, kept on its devices, updated, and brought to the form of checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from moe.models import Transformer, TransformerConfig
from moe.sharding import current_weight_update, shardings, spread
from moe.sharding.weight_update import padded, resized, unpadded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """All that training changes, and all that a checkpoint holds of it.

    Attributes:
      step: int32 scalar, steps taken, skipped ones included.
      params: the model's parameters, an NNX state.
      optimizer: the optimizer's state.

    What the mode in force (`moe.sharding.weight_update`) splits over the batch's axes is stored padded
    where no dimension divides; `logical_shapes` tells the true shapes, those of checkpoints.
    """

    step: jax.Array
    params: nnx.State
    optimizer: Any


def init_state(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    mesh: Mesh | None = None,
) -> tuple[nnx.GraphDef, TrainState]:
    """The model's structure and its first state, created where the mesh wants each part.

    The same seed gives the same numbers on any mesh.
    """
    create = functools.partial(create_state, config, optimizer, seed=seed, mesh=mesh)
    if mesh is None:
        return jax.jit(create)()
    graph, abstract = jax.eval_shape(create)
    return jax.jit(create, out_shardings=(graph, state_shardings(abstract, mesh)))()


def create_state(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    mesh: Mesh | None,
) -> tuple[nnx.GraphDef, TrainState]:
    """What `init_state` compiles; `jax.eval_shape` of it says what a state is made of."""
    graph, params = nnx.split(Transformer(config, rngs=nnx.Rngs(seed)))
    step = jnp.zeros((), jnp.int32)
    state = TrainState(step=step, params=params, optimizer=optimizer.init(params))
    return graph, state if mesh is None else stored(state, mesh)


def state_shardings(state: TrainState, mesh: Mesh | AbstractMesh) -> Any:
    """Where each part of a state lives in the mode in force; shapes are read, values are not."""
    mode = current_weight_update()
    step: Any = NamedSharding(mesh, PartitionSpec())
    return TrainState(
        step=step,
        params=shardings(state.params, mesh, spread=mode == "fully_sharded"),
        optimizer=shardings(state.optimizer, mesh, spread=mode != "replicated"),
    )


def logical_shapes(state: TrainState, mesh: Mesh) -> TrainState:
    """A checkpoint's shapes: without padding, the same on every mesh; and their places on this one."""
    shapes = jax.eval_shape(unpadded, state)
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        shapes,
        state_shardings(shapes, mesh),
    )


def fitted(state: TrainState, like: TrainState) -> TrainState:
    """A state with the shapes and places of another: `logical_shapes` to save it, back to go on.

    Arrays that have their shape already are passed on, not copied.
    """

    def fit(x, like):
        if x.shape == like.shape:
            return x
        return jax.jit(resized, static_argnums=1, out_shardings=like.sharding)(x, like.shape)

    leaves = map(fit, jax.tree.leaves(state), jax.tree.leaves(like))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def updated(
    state: TrainState, grads: nnx.State, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state after an optimizer's update, without padding; `grads` as `spread` leaves them."""
    params = spread(state.params)
    updates, slots = optimizer.update(grads, state.optimizer, params)
    params = optax.apply_updates(params, updates)
    return TrainState(step=state.step + 1, params=params, optimizer=slots)


def placed(state: TrainState) -> TrainState:
    """Tells the compiler to leave a state where the next step takes it, else that is compiled anew."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return state
    state = stored(state, mesh)
    return jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))


def stored(state: TrainState, mesh: Mesh | AbstractMesh) -> TrainState:
    """A state as it is kept between steps: padded where the mode in force needs equal parts."""
    mode = current_weight_update()
    if mode == "fully_sharded":
        state = dataclasses.replace(state, params=padded(state.params, mesh))
    if mode != "replicated":
        state = dataclasses.replace(state, optimizer=padded(state.optimizer, mesh))
    return state
