"""Routing by an integer that comes with the token, not by its vector: hash and task routing."""

from __future__ import annotations

import dataclasses
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from moe.errors import UserError
from moe.routing.checks import check_choice, check_router_inputs
from moe.routing.plan import RoutingPlan
from moe.routing.token_choice import (
    Queueing,
    best_experts,
    normalized,
    queue_for_slots,
    real_logits,
    values_of,
)

Hashing = Literal["random", "modulo"]


def hash_routing(
    ids_GS: jax.Array | None,
    *,
    num_experts: int,
    capacity: int,
    num_choices: int = 1,
    hashing: Hashing = "random",
    seed: int = 0,
    token_mask_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Sends every token to experts fixed by its token id; nothing is learned.

    Args:
      ids_GS: token ids, integers.
      num_experts: E, at least 2.
      capacity: C, slots per group and expert; S or more is dropless.
      num_choices: K different experts for each id, with gate 1/K each.
      hashing, seed: see `hashed_experts`.
      token_mask_GS: False for padding, which takes no slot.
      queueing: `slot_rule` and `renormalize_after_drop`, see `Queueing`; `batch_priority` is token
        order here, since all tokens are equally certain.

    Returns:
      The plan. Probabilities are 1/K at the chosen experts. Both losses are 0 and no gradient flows:
      there is nothing to learn.

    Raises:
      UserError: missing or non-integer ids, K > E, capacity < 1, an unknown hashing, or a mask whose
        shape is not (G, S).

    Source: Roller et al. 2021 (arXiv:2106.04426), random hashing. Several choices add up the outputs
    of whole experts; the paper's MultiHash joins pieces of their weights instead.
    """
    ids_GS = checked_ids(ids_GS, "hash routing sends a token by its token id")
    uniform_GSE = jnp.zeros((*ids_GS.shape, num_experts), jnp.float32)
    check_router_inputs(
        uniform_GSE, capacity=capacity, num_choices=num_choices, token_mask_GS=token_mask_GS
    )
    _, mask_GS = real_logits(uniform_GSE, token_mask_GS)
    expert_GSK = hashed_experts(
        ids_GS, num_experts, num_choices=num_choices, hashing=hashing, seed=seed
    )
    share_GSE = jnp.sum(jax.nn.one_hot(expert_GSK, num_experts), axis=-2) / num_choices
    plan = queue_for_slots(
        uniform_GSE,
        jnp.where(mask_GS[..., None], share_GSE, 1 / num_experts),
        expert_GSK,
        jnp.full(expert_GSK.shape, 1 / num_choices, jnp.float32),
        assigned_GSK=jnp.broadcast_to(mask_GS[..., None], expert_GSK.shape),
        token_mask_GS=mask_GS,
        capacity=capacity,
        **queueing,
    )
    nothing = jnp.zeros((), jnp.float32)
    return dataclasses.replace(plan, aux_loss=nothing, z_loss=nothing)


def hashed_experts(
    ids_GS: jax.Array,
    num_experts: int,
    *,
    num_choices: int = 1,
    hashing: Hashing = "random",
    seed: int = 0,
) -> jax.Array:
    """The K different experts of each id: expert_GSK, the same on every machine and release.

    "random": the id and each expert are hashed together and the highest hashes win. On average every
    expert gets as many ids, and adding an expert moves one id in E + 1. "modulo": experts id + seed,
    id + seed + 1, ... modulo E; where ids are in order of frequency, as those of a trained vocabulary
    often are, this deals out frequent ids evenly.

    Source: the random rule is rendezvous hashing (Thaler and Ravishankar 1998) with the finalizer of
    MurmurHash3 (Appleby).
    """
    check_choice("hashing", hashing, Hashing)
    if hashing == "modulo":
        first_GS1 = ids_GS[..., None] % num_experts + seed % num_experts
        return ((first_GS1 + jnp.arange(num_choices)) % num_experts).astype(jnp.int32)
    expert_E = jnp.arange(num_experts, dtype=jnp.uint32)
    salt_E = _mixed(expert_E + _mixed(jnp.uint32(seed % 2**32)))
    hash_GSE = _mixed(_mixed(ids_GS.astype(jnp.uint32))[..., None] ^ salt_E)
    # 24 bits, so that the hash is exact in float32.
    return best_experts((hash_GSE >> 8).astype(jnp.float32), num_choices)


def task_routing(
    ids_GS: jax.Array | None,
    logits_task_E: jax.Array,
    *,
    capacity: int,
    num_choices: int = 2,
    token_mask_GS: jax.Array | None = None,
    **queueing: Unpack[Queueing],
) -> RoutingPlan:
    """Sends all tokens of a task, such as a target language, to the same few experts.

    The logits of a task are learned and do not look at the token; from there on as for tokens:
    softmax in float32, the K most probable experts, gates normalised over them (for K = 1 the
    probability itself, which would otherwise get no gradient). A model for one task needs K experts.

    Args:
      ids_GS: the task of each token, in [0, num_tasks).
      logits_task_E: a learned row for each task.
      capacity: C. Where a group holds one task, K experts get all of it: below S tokens are dropped.
      num_choices: K.
      token_mask_GS: False for padding, whose id is not read.
      queueing: `slot_rule`, `batch_priority` and `renormalize_after_drop`; see `Queueing`.

    Returns:
      The plan. Gates, probabilities and losses carry gradient to `logits_task_E`.

    Raises:
      UserError: missing or non-integer ids, a real token's id outside [0, num_tasks) where values can
        be seen (under `jax.jit` they cannot: there its gates are NaN), a table that is not (tasks,
        experts), K > E, capacity < 1, or a mask whose shape is not (G, S).

    Source: Kudugunta et al. 2021 (arXiv:2110.03742), where the gate reads the task in place of the
    token. A row of logits for each task is the most general such gate.
    """
    ids_GS = checked_ids(ids_GS, "task routing sends a token by its task or language")
    if logits_task_E.ndim != 2:
        raise UserError(
            f"logits_task_E must be (tasks, experts): got shape {logits_task_E.shape}. "
            "Give one row of logits for each task."
        )
    num_tasks = len(logits_task_E)
    rows_GSE = jnp.asarray(logits_task_E)[jnp.clip(ids_GS, 0, num_tasks - 1)]
    known_GS1 = ((ids_GS >= 0) & (ids_GS < num_tasks))[..., None]
    logits_GSE = jnp.where(known_GS1, rows_GSE, jnp.nan)
    check_router_inputs(
        logits_GSE, capacity=capacity, num_choices=num_choices, token_mask_GS=token_mask_GS
    )
    logits_GSE, mask_GS = real_logits(logits_GSE, token_mask_GS)
    _check_tasks(ids_GS, mask_GS, num_tasks)
    probs_GSE = jax.nn.softmax(logits_GSE, axis=-1)
    expert_GSK = best_experts(logits_GSE, num_choices)
    gate_GSK = values_of(expert_GSK, probs_GSE)
    return queue_for_slots(
        logits_GSE,
        probs_GSE,
        expert_GSK,
        gate_GSK if num_choices == 1 else normalized(gate_GSK),
        assigned_GSK=jnp.broadcast_to(mask_GS[..., None], expert_GSK.shape),
        token_mask_GS=mask_GS,
        capacity=capacity,
        **queueing,
    )


def checked_ids(ids_GS: jax.Array | None, why: str) -> jax.Array:
    """The ids, or a UserError if they are missing, not integers or not grouped."""
    if ids_GS is None:
        raise UserError(f"ids must be given, for {why}: got None. Pass ids_BL to the layer.")
    if ids_GS.ndim != 2 or not jnp.issubdtype(ids_GS.dtype, jnp.integer):
        raise UserError(
            f"ids_GS must be integers of shape (groups, tokens): got {ids_GS.dtype} of shape "
            f"{ids_GS.shape}. Pass one integer for each token."
        )
    return jnp.asarray(ids_GS, jnp.int32)


def _check_tasks(ids_GS, mask_GS, num_tasks: int):
    if isinstance(ids_GS, jax.core.Tracer) or isinstance(mask_GS, jax.core.Tracer):
        return
    ids = np.asarray(ids_GS)[np.asarray(mask_GS)]
    if ids.size and not 0 <= ids.min() <= ids.max() < num_tasks:
        raise UserError(
            f"ids_GS must be in [0, num_tasks): got {ids.min()} to {ids.max()}, "
            f"num_tasks={num_tasks}. Raise num_tasks or mend the ids."
        )


def _mixed(x: jax.Array) -> jax.Array:
    """A permutation of the 32-bit integers in which every input bit sways every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
