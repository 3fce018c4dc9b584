"""The Mixture-of-Experts layer: GShard's Algorithm 2."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from moe import routing
from moe.errors import UserError
from moe.layers.experts import Activation, Experts
from moe.layers.router import Router, Top2
from moe.routing import RoutingPlan
from moe.sharding import constrain

Dispatch = Literal["gather", "einsum"]

_BACK_ENDS = {
    "gather": (routing.gather_dispatch, routing.gather_combine),
    "einsum": (routing.einsum_dispatch, routing.einsum_combine),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEStats(routing.ExpertLoad):
    """The load of one layer and its unweighted losses; see `moe.routing.ExpertLoad`.

    Attributes:
      aux_loss: float32 scalar, load-balance loss: 1 balanced, E collapsed. Add it times 0.01 or so.
      z_loss: float32 scalar, router z-loss, nats squared. Add it times 0.001 or so.
    """

    aux_loss: jax.Array
    z_loss: jax.Array

    @classmethod
    def of(cls, plan: RoutingPlan) -> MoEStats:
        """The statistics of one plan."""
        load = plan.load()
        fields = {field.name: getattr(load, field.name) for field in dataclasses.fields(load)}
        return cls(aux_loss=plan.aux_loss, z_loss=plan.z_loss, **fields)


class MoE(nnx.Module):
    """Replaces a feed-forward layer by E of which each token uses two.

    The output holds only what the experts said: a token that lost both its experts gets zeros, so
    put the layer on a residual branch.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        *,
        router: Top2 = Top2(),  # noqa: B008  (frozen)
        dispatch: Dispatch = "gather",
        group_size: int = 1024,
        activation: Activation = jax.nn.relu,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          d_model: M, width of the tokens.
          d_hidden: H, width inside one expert.
          num_experts: E, at least 2.
          router: the rule from logits to a plan.
          dispatch: "gather" (indices, the default) or "einsum" (the paper's form); same numbers.
          group_size: S, tokens that compete for the same slots. The tokens of a call are cut into
            groups in order, the last filled up with padding; fewer tokens make one smaller group.
            A result depends on it (not on the mesh) wherever capacity is limited.
          activation: of the experts.
          dtype: type of the experts' computation; None is that of the input. Routing is float32.
          rngs: the stream "params" is read.

        Raises:
          UserError: fewer than 2 experts, an unknown dispatch, or a size below 1.
        """
        if num_experts < 2:
            raise UserError(
                f"num_experts must be at least 2: got {num_experts}. Use a dense layer or add experts."
            )
        if dispatch not in _BACK_ENDS:
            raise UserError(
                f"dispatch must be one of {tuple(_BACK_ENDS)}: got {dispatch!r}. Choose one of them."
            )
        for name, size in (
            ("d_model", d_model),
            ("d_hidden", d_hidden),
            ("group_size", group_size),
        ):
            if size < 1:
                raise UserError(f"{name} must be at least 1: got {size}. Raise it.")
        self.group_size = group_size
        self.rule = router
        self.dispatch = dispatch
        self.dtype = dtype
        self.router = Router(d_model, num_experts, rngs=rngs)
        self.experts = Experts(
            d_model, d_hidden, num_experts, activation=activation, dtype=dtype, rngs=rngs
        )

    def __call__(
        self,
        x_BLM: jax.Array,
        token_mask_BL: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats]:
        """Sends every real token to its experts and adds up what they say.

        Args:
          x_BLM: tokens.
          token_mask_BL: False for padding, which takes no slot and counts nowhere.
          key: randomness of training; None is deterministic, dropless evaluation (see `Top2`).

        Returns:
          y_BLM in x's type, and the layer's losses and load.

        Source: Lepikhin et al. 2020 (arXiv:2006.16668), Algorithm 2. We group inside the layer.
        """
        x_GSM, mask_GS = self._group(x_BLM, token_mask_BL)
        plan = self.rule(self.router(x_GSM), token_mask_GS=mask_GS, key=key)
        dispatch, combine = _BACK_ENDS[self.dispatch]

        x_GECM = dispatch(plan, x_GSM.astype(self.dtype or x_GSM.dtype))
        y_GECM = from_experts(self.experts(to_experts(x_GECM)))
        y_GSM = combine(plan, y_GECM).astype(x_BLM.dtype)

        num_tokens = x_BLM.shape[0] * x_BLM.shape[1]
        y_BLM = y_GSM.reshape(-1, x_BLM.shape[-1])[:num_tokens].reshape(x_BLM.shape)
        return constrain(y_BLM, "batch", None, None), MoEStats.of(plan)

    def _group(self, x_BLM, token_mask_BL) -> tuple[jax.Array, jax.Array]:
        """Cuts the tokens into groups of S in order; what is missing in the last is padding."""
        if token_mask_BL is None:
            token_mask_BL = jnp.ones(x_BLM.shape[:2], bool)
        if token_mask_BL.shape != x_BLM.shape[:2]:
            raise UserError(
                f"token_mask_BL must have the shape of the tokens: got {token_mask_BL.shape}, "
                f"x_BLM has {x_BLM.shape}. Pass one Boolean for each token."
            )
        num_tokens = x_BLM.shape[0] * x_BLM.shape[1]
        group_size = min(self.group_size, num_tokens)
        missing = -num_tokens % group_size
        x_TM = jnp.pad(x_BLM.reshape(num_tokens, -1), ((0, missing), (0, 0)))
        mask_T = jnp.pad(token_mask_BL.reshape(num_tokens).astype(bool), (0, missing))
        x_GSM = x_TM.reshape(-1, group_size, x_BLM.shape[-1])
        mask_GS = mask_T.reshape(-1, group_size)
        return constrain(x_GSM, "groups", None, None), constrain(mask_GS, "groups", None)


def to_experts(x_GECM: jax.Array) -> jax.Array:
    """From the devices that hold the tokens to those that hold the experts: x[E_expert, G, C, M].

    Swapped between two constraints, this compiles to one all-to-all. Written as a single einsum to
    EGCM with one constraint it would cost all-gathers.
    """
    x_GECM = constrain(x_GECM, "groups", None, None, None)
    return constrain(jnp.swapaxes(x_GECM, 0, 1), "experts", "exchanged_groups", None, None)


def from_experts(y_EGCM: jax.Array) -> jax.Array:
    """The way back, the second all-to-all: y[G_(data,expert), E, C, M]."""
    y_EGCM = constrain(y_EGCM, "experts", "exchanged_groups", None, None)
    return constrain(jnp.swapaxes(y_EGCM, 0, 1), "groups", None, None, None)
