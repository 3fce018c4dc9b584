"""The rule in which training assigns tokens by a balanced transport plan."""

from __future__ import annotations

import dataclasses
from typing import Literal, Unpack

from moe.errors import UserError
from moe.layers.routers.token_choice import KChoices, Slots, check_unused
from moe.routing import RoutingPlan
from moe.routing.checks import check_choice
from moe.routing.sinkhorn import Gating, sinkhorn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinkhorn(KChoices):
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
        check_choice("gating", self.gating, Gating)
        if self.num_iterations < 1:
            raise UserError(
                f"num_iterations must be at least 1: got {self.num_iterations}. Raise it."
            )
        check_unused(self, "balance", "balance_over")

    def route(self, logits_GSE, *, key, **slots: Unpack[Slots]) -> RoutingPlan:
        """`sinkhorn`; a key means training, though the method draws nothing."""
        return sinkhorn(
            logits_GSE,
            num_choices=self.num_choices,
            num_iterations=0 if key is None else self.num_iterations,
            gating=self.gating,
            **slots,
        )
