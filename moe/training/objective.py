"""What training minimises: cross-entropy, plus the routers' losses by their weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moe.errors import UserError
from moe.models import Stats
from moe.routing import adapted_weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Weights of the parts of the loss."""

    label_smoothing: float = 0.1
    """Share of the target probability spread evenly over the vocabulary."""
    balance_weight: float = 0.01
    """Weight of the load-balance loss, averaged over MoE layers: 1 balanced, E collapsed."""
    drop_band: tuple[float, float] | None = None
    """Share of dropped choices to stay within: balance_weight is where the weight starts, and each step
    moves it by 2 % if that share is outside, at most to 100 times or a 100th; None keeps the weight."""
    z_weight: float = 0.001
    """Weight of the router z-loss, averaged over MoE layers."""
    budget_weight: float = 0.1
    """Weight of the budget loss of conditional MoE layers (model.beside=conditional), averaged."""

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise UserError(
                f"objective.label_smoothing must be in [0, 1): got {self.label_smoothing}. Lower it."
            )
        if self.drop_band is not None:
            low, high = self.drop_band
            if not (0 <= low <= high <= 1 and self.balance_weight > 0):
                raise UserError(
                    f"objective.drop_band must be in order, in [0, 1], with a positive balance_weight: "
                    f"got {self.drop_band} with balance_weight={self.balance_weight}. Try (0.01, 0.05)."
                )
        for name in ("balance_weight", "z_weight", "budget_weight"):
            if getattr(self, name) < 0:
                raise UserError(
                    f"objective.{name} must not be negative: got {getattr(self, name)}. "
                    "Use 0 to leave the loss out."
                )


def cross_entropy(
    logits_BLV: jax.Array, target_BL: jax.Array, mask_BL: jax.Array, *, label_smoothing: float = 0.0
) -> jax.Array:
    """Mean over real target tokens of -log p(target), nats.

    Smoothing takes the target as (1 - s) on the token and s spread evenly over V.
    0 when there is no real token.

    Source: Szegedy et al. 2016 (arXiv:1512.00567), section 7.
    """
    log_total_BL = jax.nn.logsumexp(logits_BLV, axis=-1)
    target_BL1 = target_BL[..., None]
    hit_BL = jnp.take_along_axis(logits_BLV, target_BL1, axis=-1)[..., 0]
    if label_smoothing:
        mean_BL = jnp.mean(logits_BLV, axis=-1)
        hit_BL = (1 - label_smoothing) * hit_BL + label_smoothing * mean_BL
    loss_BL = (log_total_BL - hit_BL) * mask_BL
    return jnp.sum(loss_BL) / jnp.maximum(jnp.sum(mask_BL), 1)


def router_losses(stats: Stats) -> dict[str, jax.Array]:
    """The routers' losses averaged over all MoE layers, and the share of choices dropped.

    An average, so that the weights mean the same whatever the depth. Empty for a dense model.
    """
    if not stats:
        return {}

    def over_layers(name: str) -> jax.Array:
        return jnp.concatenate([getattr(stack, name) for stack in stats.values()])

    assigned = jnp.sum(over_layers("assigned_E"))
    return {
        "aux_loss": jnp.mean(over_layers("aux_loss")),
        "z_loss": jnp.mean(over_layers("z_loss")),
        "budget_loss": jnp.mean(over_layers("budget_loss")),
        "drop_rate": jnp.sum(over_layers("dropped_E")) / jnp.maximum(assigned, 1),
    }


def total_loss(
    loss: jax.Array,
    routers: dict[str, jax.Array],
    config: ObjectiveConfig,
    balance_weight: jax.Array | None = None,
) -> jax.Array:
    """Cross-entropy plus the weighted router losses; `balance_weight` replaces that of the config."""
    if not routers:
        return loss
    weights = {
        "aux_loss": config.balance_weight if balance_weight is None else balance_weight,
        "z_loss": config.z_weight,
        "budget_loss": config.budget_weight,
    }
    return loss + sum(weight * routers[name] for name, weight in weights.items())


def next_balance_weight(
    weight: jax.Array, drop_rate: jax.Array, config: ObjectiveConfig
) -> jax.Array:
    """The weight of the balance loss after a step; see `ObjectiveConfig.drop_band`."""
    if config.drop_band is None:
        return weight
    low, high = config.drop_band
    least, most = config.balance_weight / 100, config.balance_weight * 100
    return adapted_weight(weight, drop_rate, low=low, high=high, least=least, most=most)
