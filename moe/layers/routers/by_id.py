"""Rules that route by an integer beside the token: its id (hash) or its task."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from moe.errors import UserError
from moe.layers.routers.linear import RuleRouter
from moe.layers.routers.token_choice import KChoices, check_unused
from moe.routing import RoutingPlan
from moe.routing.by_id import Hashing, hash_routing, task_routing
from moe.routing.checks import check_choice
from moe.sharding import param


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hash(KChoices):
    """Experts fixed by the token id; see `moe.routing.hash_routing`. All layers of a rule agree."""

    num_choices: int = 1
    """Different experts for each id."""
    hashing: Hashing = "random"
    """How ids become experts: random, or modulo the number of experts."""
    seed: int = 0
    """Another seed is another assignment."""
    kind: Literal["hash"] = "hash"

    ids: ClassVar[Literal["token"]] = "token"

    def __post_init__(self):
        super().__post_init__()
        check_choice("hashing", self.hashing, Hashing)
        check_unused(self, "balance", "balance_over", "jitter")

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> HashRouter:
        """The router of this rule; it has no parameters."""
        return HashRouter(num_experts, rule=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRouting(KChoices):
    """Experts learned for each task or language; see `moe.routing.task_routing`."""

    num_tasks: int
    """Tasks or languages; ids are below it."""
    capacity_factor: float | None = None
    """As in `TokenChoice`; dropless by default, since a batch of one task fills K experts alone."""
    kind: Literal["task"] = "task"

    ids: ClassVar[Literal["task"]] = "task"

    def __post_init__(self):
        super().__post_init__()
        check_unused(self, "jitter")
        if self.num_tasks < 1:
            raise UserError(f"num_tasks must be at least 1: got {self.num_tasks}. Count the tasks.")

    def router(self, d_model: int, num_experts: int, *, rngs: nnx.Rngs) -> TaskRouter:
        """The router of this rule."""
        return TaskRouter(num_experts, rule=self, rngs=rngs)


class HashRouter(RuleRouter):
    """Calls `hash_routing` with the settings of a rule."""

    def __init__(self, num_experts: int, *, rule: Hash):
        self.num_experts = num_experts
        self.rule = rule

    def plan(self, x_GSM, ids_GS, token_mask_GS, key) -> RoutingPlan:
        """The plan for tokens whose ids are `ids_GS`; a key means training: limited capacity."""
        rule: Hash = self.rule
        training = key is not None
        return hash_routing(
            ids_GS,
            num_experts=self.num_experts,
            num_choices=rule.num_choices,
            hashing=rule.hashing,
            seed=rule.seed,
            **rule.slots(x_GSM.shape[1], self.num_experts, token_mask_GS, training=training),
        )


class TaskRouter(RuleRouter):
    """A learned row of expert logits for each task."""

    def __init__(self, num_experts: int, *, rule: TaskRouting, rngs: nnx.Rngs):
        # As spread as the logits of a token at the start, so that tasks begin on different experts.
        logits_task_E = jax.random.normal(rngs.params(), (rule.num_tasks, num_experts))
        self.logits_task_E = param(logits_task_E, None, None)
        self.rule = rule

    def plan(self, x_GSM, ids_GS, token_mask_GS, key) -> RoutingPlan:
        """The plan for tokens whose tasks are `ids_GS`; a key means training."""
        rule: TaskRouting = self.rule
        table_task_E = self.logits_task_E[...].astype(jnp.float32)
        group_size, num_experts, training = x_GSM.shape[1], table_task_E.shape[1], key is not None
        return task_routing(
            ids_GS,
            table_task_E,
            num_choices=rule.num_choices,
            **rule.slots(group_size, num_experts, token_mask_GS, training=training),
        )
