"""What a router decides: for each token its experts, slots and gates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingPlan:
    """Where every token goes and with what weight it comes back; indices, not one-hot tensors.

    Memory is O(tokens * (K + E)). A dispatch back-end reads the indices; `combine_GSEC` and
    `dispatch_GSEC` are the paper's dense views of the same decision.

    Attributes:
      expert_GSK: int32, the expert of each choice, in [0, E).
      slot_GSK: int32, the choice's place in its expert's queue; C or more where it found none.
        Meaningless where `assigned_GSK` is False.
      gate_GSK: float32, the weight of the expert's output; 0 where the choice was not kept.
      assigned_GSK: bool, the choice was wanted: a real token's, and the policy chose it.
      kept_GSK: bool, it was assigned and its slot is below the capacity.
      token_mask_GS: bool, real tokens.
      probs_GSE: float32, the router's probabilities; uniform for padding, whatever it holds.
      aux_loss: float32 scalar, `load_balance_loss`; unweighted.
      z_loss: float32 scalar, `router_z_loss`; unweighted.
      capacity: C, slots per group and expert.
    """

    expert_GSK: jax.Array
    slot_GSK: jax.Array
    gate_GSK: jax.Array
    assigned_GSK: jax.Array
    kept_GSK: jax.Array
    token_mask_GS: jax.Array
    probs_GSE: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array
    capacity: int = dataclasses.field(metadata={"static": True})

    @property
    def num_experts(self) -> int:
        """E."""
        return self.probs_GSE.shape[-1]

    @property
    def is_dropless(self) -> bool:
        """Whether no choice can be dropped: a token takes at most one slot of an expert."""
        return self.capacity >= self.token_mask_GS.shape[1]

    def combine_GSEC(self) -> jax.Array:
        """The paper's combine weights: the gate at (expert, slot) of each kept choice, else 0."""
        one_hots = self._one_hots(jnp.float32)
        return jnp.einsum(
            "GSK,GSKE,GSKC->GSEC", self.gate_GSK, *one_hots, precision=jax.lax.Precision.HIGHEST
        )

    def dispatch_GSEC(self) -> jax.Array:
        """The paper's dispatch mask, True where a token occupies (expert, slot).

        Built from the integer slots, never from `combine != 0`: a gate that underflows keeps its
        token.
        """
        return jnp.einsum("GSKE,GSKC->GSEC", *self._one_hots(jnp.int32)).astype(bool)

    def flat_slot_GSK(self) -> jax.Array:
        """expert * C + slot of each kept choice; E * C, one past the end, for the others."""
        nowhere = self.num_experts * self.capacity
        return jnp.where(self.kept_GSK, self.expert_GSK * self.capacity + self.slot_GSK, nowhere)

    def load(self) -> ExpertLoad:
        """Counts the plan's choices by expert, over all groups."""
        assigned_E, kept_E = self._count(self.assigned_GSK), self._count(self.kept_GSK)
        weight_GS = self.token_mask_GS.astype(jnp.float32)
        num_real = jnp.maximum(jnp.sum(weight_GS), 1)
        entropy_GS = jnp.sum(jax.scipy.special.entr(self.probs_GSE), axis=-1)
        return ExpertLoad(
            assigned_E=assigned_E,
            kept_E=kept_E,
            dropped_E=assigned_E - kept_E,
            mean_prob_E=jnp.einsum("GSE,GS->E", self.probs_GSE, weight_GS) / num_real,
            entropy=jnp.sum(entropy_GS * weight_GS) / num_real,
            num_tokens=jnp.sum(self.token_mask_GS, dtype=jnp.int32),
            num_unrouted=jnp.sum(self.token_mask_GS & ~self.kept_GSK.any(axis=-1), dtype=jnp.int32),
        )

    def _count(self, counted_GSK: jax.Array) -> jax.Array:
        """How many of the counted choices are of each expert. (One-hots would hold G S K E numbers.)"""
        expert_GSK = jnp.where(counted_GSK, self.expert_GSK, self.num_experts)
        expert_GR = expert_GSK.reshape(len(expert_GSK), -1)
        count = jax.vmap(lambda expert_R: jnp.bincount(expert_R, length=self.num_experts))
        return jnp.sum(count(expert_GR), axis=0, dtype=jnp.int32)

    def _one_hots(self, dtype) -> tuple[jax.Array, jax.Array]:
        """Expert and slot of kept choices, one-hot; a choice that was not kept is all zero."""
        expert_GSK = jnp.where(self.kept_GSK, self.expert_GSK, -1)
        return (
            jax.nn.one_hot(expert_GSK, self.num_experts, dtype=dtype),
            jax.nn.one_hot(self.slot_GSK, self.capacity, dtype=dtype),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftPlan:
    """The plan of a router that mixes tokens instead of choosing: every slot holds all of them a bit.

    Only the einsum back-end can follow it.

    Attributes:
      dispatch_weight_GSEC: float32, the share of each token in a slot; 0 for padding.
      combine_weight_GSEC: float32, the share of each slot in a token's output; 0 for padding.
      token_mask_GS: bool, real tokens.
      aux_loss: 0, there is nothing to balance.
      z_loss: 0.
    """

    dispatch_weight_GSEC: jax.Array
    combine_weight_GSEC: jax.Array
    token_mask_GS: jax.Array
    aux_loss: jax.Array
    z_loss: jax.Array

    @property
    def num_experts(self) -> int:
        """E."""
        return self.dispatch_weight_GSEC.shape[2]

    def combine_GSEC(self) -> jax.Array:
        """The combine weights."""
        return self.combine_weight_GSEC

    def dispatch_GSEC(self) -> jax.Array:
        """The dispatch weights."""
        return self.dispatch_weight_GSEC

    def load(self) -> ExpertLoad:
        """Every expert sees every real token; `mean_prob_E` is its mean share in their outputs."""
        num_real = jnp.sum(self.token_mask_GS, dtype=jnp.int32)
        share_GSE = jnp.sum(self.combine_weight_GSEC, axis=-1)
        entropy_GS = jnp.sum(jax.scipy.special.entr(share_GSE), axis=-1)
        seen_E = jnp.full((self.num_experts,), num_real)
        return ExpertLoad(
            assigned_E=seen_E,
            kept_E=seen_E,
            dropped_E=jnp.zeros_like(seen_E),
            mean_prob_E=jnp.sum(share_GSE, axis=(0, 1)) / jnp.maximum(num_real, 1),
            entropy=jnp.sum(entropy_GS * self.token_mask_GS) / jnp.maximum(num_real, 1),
            num_tokens=num_real,
            num_unrouted=jnp.zeros_like(num_real),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """How the choices of real tokens fell on the experts; nothing here carries a gradient we use.

    Attributes:
      assigned_E: int32, choices wanted by tokens, kept or not.
      kept_E: int32, those that found a slot.
      dropped_E: int32, `assigned_E - kept_E`.
      mean_prob_E: float32, mean router probability over real tokens; sums to 1.
      entropy: float32 scalar, mean over real tokens of the router's entropy, nats; log E when undecided.
      num_tokens: int32 scalar, real tokens.
      num_unrouted: int32 scalar, real tokens that no expert computes: all their choices were dropped,
        or no expert picked them.
    """

    assigned_E: jax.Array
    kept_E: jax.Array
    dropped_E: jax.Array
    mean_prob_E: jax.Array
    entropy: jax.Array
    num_tokens: jax.Array
    num_unrouted: jax.Array | int = 0
