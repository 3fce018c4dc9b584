"""The Mixture-of-Experts layer: GShard's Algorithm 2, for any router."""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx

from moe import routing
from moe.errors import UserError
from moe.layers.dispatch import Dispatch, DispatchChoice, choose_dispatch, run_experts
from moe.layers.experts import Activation, Experts
from moe.layers.routers import Rule, Top2
from moe.routing import RoutingPlan, SoftPlan
from moe.sharding import constrain, num_shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEStats(routing.ExpertLoad):
    """The load of one layer and its unweighted losses; see `moe.routing.ExpertLoad`.

    Attributes:
      aux_loss: float32 scalar, the router's balance loss: for most 1 balanced, E collapsed. Add it
        times 0.01 or so.
      z_loss: float32 scalar, router z-loss, nats squared. Add it times 0.001 or so.
      budget_loss: float32 scalar, of a `ConditionalMoE` alone: how far its use of experts is from
        what it may use.
      num_balanced: int32 scalar, the parts with a real token that `aux_loss` is the mean of: groups,
        or sequences where the rule balances these.
      plan: the routing itself, where the layer's `capture_plan` is set; see docs/routing.md.
      dispatch: the back-end that ran and why.
    """

    aux_loss: jax.Array
    z_loss: jax.Array
    budget_loss: jax.Array | float = 0.0
    num_balanced: jax.Array | int = 1
    plan: RoutingPlan | SoftPlan | None = None
    dispatch: DispatchChoice | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, plan: RoutingPlan | SoftPlan, /, **more) -> MoEStats:
        """The statistics of one plan."""
        load = plan.load()
        fields = {field.name: getattr(load, field.name) for field in dataclasses.fields(load)}
        return cls(
            aux_loss=plan.aux_loss,
            z_loss=plan.z_loss,
            budget_loss=jnp.zeros((), jnp.float32),
            **fields,
            **more,
        )

    def over_microbatches(self) -> MoEStats:
        """Of the whole batch, where every field is led by layers and micro-batches Y, M; leaves Y.

        Counts are added, means are weighed by what they are over. A balance loss over all tokens of
        a call is no such mean: what comes out is the mean of the micro-batches' losses.
        """

        def mean(x, count):
            weight = count.reshape(*count.shape, *(1,) * (x.ndim - 2))
            return jnp.sum(x * weight, axis=1) / jnp.maximum(jnp.sum(weight, axis=1), 1)

        of_tokens = ("mean_prob_E", "entropy", "z_loss", "budget_loss")
        means = {name: mean(getattr(self, name), self.num_tokens) for name in of_tokens}
        counts = jax.tree.map(lambda x: jnp.sum(x, axis=1), self)
        aux_loss = mean(self.aux_loss, self.num_balanced)
        return dataclasses.replace(counts, **means, aux_loss=aux_loss)


class MoE(nnx.Module):
    """Replaces a feed-forward layer by E of which each token uses few.

    The output holds only what the experts said: a token that lost all of them gets zeros, so put
    the layer on a residual branch.

    Set `capture_plan` (`model.set_attributes(capture_plan=True)` for every layer of a model) and the
    plan of each call is in its statistics; pass a plan back to force it.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        *,
        router: Rule = Top2(),  # noqa: B008  (frozen)
        dispatch: Dispatch = "auto",
        exchange_chunks: int = 1,
        group_size: int = 1024,
        activation: Activation = jax.nn.relu,
        gated: bool = False,
        use_bias: bool = False,
        output_masking: float = 0.0,
        causal: bool = False,
        dtype: jnp.dtype | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the layer.

        Args:
          d_model: M, width of the tokens.
          d_hidden: H, width inside one expert.
          num_experts: E, at least 2.
          router: the routing rule; see `moe.layers.routers` and docs/routing.md.
          dispatch: "sorted" (rows by expert, nothing padded), "gather" (slots of limited capacity, by
            indices), "einsum" (the paper's one-hot form) or "auto" (the fastest for the platform and
            mesh); same numbers. Which one ran and why is in the statistics.
          exchange_chunks: where experts are split over devices, the groups of a device go to them in
            this many equal parts (the next smaller number that divides them), so that the compiler
            may overlap one part's exchange with the experts of another; same numbers.
          group_size: S, tokens that compete for the same slots. The tokens of a call are cut into
            groups in order, the last filled up with padding; fewer tokens make one smaller group.
            A result depends on it (not on the mesh) wherever capacity is limited.
          activation: of the experts.
          gated: experts of the form (act(x wg) * (x wi)) wo: SwiGLU with silu, GEGLU with gelu.
          use_bias: experts have biases.
          output_masking: share of expert outputs that training masks (NLLB's EOM).
          causal: the layer stands in a causal decoder, where a token must not depend on later ones.
          dtype: type of the experts' computation; None is that of the input. Routing is float32.
          rngs: the stream "params" is read.

        Raises:
          UserError: fewer than 2 experts, an unknown dispatch, a size below 1, a masking rate outside
            [0, 1), or a rule that looks ahead in a causal decoder.
        """
        if num_experts < 2:
            raise UserError(
                f"num_experts must be at least 2: got {num_experts}. Use a dense layer or add experts."
            )
        if dispatch not in get_args(Dispatch):
            raise UserError(
                f"dispatch must be one of {get_args(Dispatch)}: got {dispatch!r}. Choose one of them."
            )
        sizes = {
            "d_model": d_model,
            "d_hidden": d_hidden,
            "group_size": group_size,
            "exchange_chunks": exchange_chunks,
        }
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"{name} must be at least 1: got {size}. Raise it.")
        if not 0 <= output_masking < 1:
            raise UserError(f"output_masking must be in [0, 1): got {output_masking}. Lower it.")
        if causal:
            check_causal(router)
        self.group_size = group_size
        self.dispatch = dispatch
        self.exchange_chunks = exchange_chunks
        self.dtype = dtype
        self.output_masking = output_masking
        self.capture_plan = False
        self.router = router.router(d_model, num_experts, rngs=rngs)
        self.experts = Experts(
            d_model,
            d_hidden,
            num_experts,
            activation=activation,
            gated=gated,
            use_bias=use_bias,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x_BLM: jax.Array,
        token_mask_BL: jax.Array | None = None,
        key: jax.Array | None = None,
        *,
        ids_BL: jax.Array | None = None,
        plan: RoutingPlan | SoftPlan | None = None,
    ) -> tuple[jax.Array, MoEStats]:
        """Sends every real token to its experts and adds up what they say.

        Args:
          x_BLM: tokens.
          token_mask_BL: False for padding, which takes no slot and counts nowhere.
          key: randomness of training; None is deterministic evaluation.
          ids_BL: an integer for each token, for the rules that route on it: `Hash`, `TaskRouting`.
          plan: a routing to follow in place of the router's; made for as many groups and tokens.

        Returns:
          y_BLM in x's type, and the layer's losses and load.

        Source: Lepikhin et al. 2020 (arXiv:2006.16668), Algorithm 2. We group inside the layer.
        """
        x_GSM = self._group(x_BLM)
        if plan is None:
            plan = self.route(x_BLM, token_mask_BL, key, ids_BL=ids_BL)
        elif plan.token_mask_GS.shape != x_GSM.shape[:2]:
            raise UserError(
                f"plan must be of as many groups and tokens as the input: got "
                f"{plan.token_mask_GS.shape}, the input has {x_GSM.shape[:2]}. "
                "Capture it with the same group size on an input of the same shape."
            )
        choice = choose_dispatch(self.dispatch, plan)
        y_GSM = run_experts(
            choice,
            plan,
            x_GSM.astype(self.dtype or x_GSM.dtype),
            self.experts,
            exchange_chunks=self.exchange_chunks,
        )

        num_tokens = x_BLM.shape[0] * x_BLM.shape[1]
        y_TM = y_GSM.astype(x_BLM.dtype).reshape(-1, x_BLM.shape[-1])[:num_tokens]
        y_BLM = constrain(y_TM.reshape(x_BLM.shape), "batch", None, None)
        captured = plan if self.capture_plan else None
        num_balanced = self._num_balanced(plan, token_mask_BL)
        return y_BLM, MoEStats.of(plan, num_balanced=num_balanced, plan=captured, dispatch=choice)

    def route(
        self,
        x_BLM: jax.Array,
        token_mask_BL: jax.Array | None = None,
        key: jax.Array | None = None,
        *,
        ids_BL: jax.Array | None = None,
    ) -> RoutingPlan | SoftPlan:
        """The plan that a call with the same arguments follows."""
        if token_mask_BL is None:
            token_mask_BL = jnp.ones(x_BLM.shape[:2], bool)
        for name, array_BL in (("token_mask_BL", token_mask_BL), ("ids_BL", ids_BL)):
            if array_BL is not None and array_BL.shape != x_BLM.shape[:2]:
                raise UserError(
                    f"{name} must have the shape of the tokens: got {array_BL.shape}, "
                    f"x_BLM has {x_BLM.shape}. Pass one value for each token."
                )
        row_BL = jnp.broadcast_to(jnp.arange(len(x_BLM))[:, None], x_BLM.shape[:2])
        plan = self.router(
            self._group(x_BLM),
            token_mask_GS=self._group(token_mask_BL.astype(bool)),
            ids_GS=None if ids_BL is None else self._group(ids_BL),
            sequence_GS=self._group(row_BL),
            key=key,
        )
        if self.output_masking:
            masking_key = None if key is None else jax.random.fold_in(key, 1)
            plan = routing.mask_expert_outputs(plan, self.output_masking, key=masking_key)
        return plan

    def _num_balanced(self, plan, token_mask_BL: jax.Array | None) -> jax.Array:
        over = getattr(getattr(self.router, "rule", None), "balance_over", "group")
        parts = plan.token_mask_GS
        if over == "sequence" and token_mask_BL is not None:
            parts = token_mask_BL
        return jnp.sum(jnp.any(parts, axis=1), dtype=jnp.int32)

    def _group(self, x: jax.Array) -> jax.Array:
        """Cuts B L tokens into groups of S in order: G S; what is missing in the last is zero.

        Raises:
          UserError: groups that the devices of a mesh cannot share.
        """
        num_tokens = x.shape[0] * x.shape[1]
        group_size = min(self.group_size, num_tokens)
        missing = -num_tokens % group_size
        x_T = x.reshape(num_tokens, *x.shape[2:])
        x_T = jnp.pad(x_T, ((0, missing), *((0, 0),) * (x.ndim - 2)))
        x_GS = x_T.reshape(-1, group_size, *x.shape[2:])
        if len(x_GS) % (num_devices := num_shards("groups")):
            of_device, left = divmod(num_tokens, num_devices)
            cure = "Change the batch or the mesh" if left else f"Take {of_device}, a group for each"
            raise UserError(
                f"group_size must give each device as many groups: got {self.group_size}, and so "
                f"{len(x_GS)} groups of {num_tokens} tokens on {num_devices} devices. {cure}."
            )
        return constrain(x_GS, "groups", *(None,) * (x_GS.ndim - 1))


def check_causal(rule: Rule) -> None:
    """Raises a UserError if the rule lets a token depend on later ones, even in evaluation."""
    if not rule.causal_safe:
        raise UserError(
            f"router must not look ahead in a causal decoder: got {type(rule).__name__}, where a "
            "token's experts depend on later tokens. Use a token-choice rule such as Top2 there."
        )
