"""The rule in which training assigns tokens by a balanced transport plan."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from moe.errors import UserError
from moe.layers.routers.by_id import check_num_choices, check_unused
from moe.layers.routers.token_choice import TokenChoice
from moe.routing import RoutingPlan
from moe.routing.checks import check_choice
from moe.routing.sinkhorn import Gating, sinkhorn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinkhorn(TokenChoice):
    """Balanced assignment in training, plain top-k in evaluation; see `moe.routing.sinkhorn`."""

    num_choices: int = 1
    """Experts of a token."""
    num_iterations: int = 8
    """Of the transport plan, in training. Enough for logits of standard deviation 4; for 14 take 16."""
    gating: Gating = "sigmoid"
    """A gate is the sigmoid of its logit, or its softmax over all experts."""
    capacity_factor: float | None = 1.25
    """As in `TokenChoice`; loads spread by about a tenth, so 1.0 would drop some 5 % of choices."""
    kind: Literal["sinkhorn"] = "sinkhorn"

    def __post_init__(self):
        super().__post_init__()
        check_num_choices(self.num_choices)
        check_choice("gating", self.gating, Gating)
        if self.num_iterations < 1:
            raise UserError(
                f"num_iterations must be at least 1: got {self.num_iterations}. Raise it."
            )
        check_unused(self, "balance", "balance_over")

    def __call__(
        self,
        logits_GSE: jax.Array,
        *,
        token_mask_GS: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> RoutingPlan:
        """The plan for `logits_GSE`; a key means training, though the method draws nothing."""
        _, group_size, num_experts = logits_GSE.shape
        training = key is not None
        return sinkhorn(
            logits_GSE,
            capacity=self.capacity(group_size, num_experts, self.num_choices, training=training),
            num_choices=self.num_choices,
            num_iterations=self.num_iterations if training else 0,
            gating=self.gating,
            token_mask_GS=token_mask_GS,
            **self.queueing,
        )
