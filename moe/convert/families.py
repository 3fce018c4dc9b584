"""What each family of layers calls its weights, and how it routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax

from moe.errors import UserError
from moe.layers import Top1, Top2, TopK
from moe.layers.experts import Activation

Family = Literal["switch", "nllb-moe", "mixtral", "qwen2-moe", "qwen3-moe"]
Rule = Top1 | Top2 | TopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convention:
    """What a family calls our parameters, and what it does with them.

    Attributes:
      names: theirs by ours, `{e}` for the number of the expert. Their matrices are (out, in), the
        transpose of ours: an array of theirs has our letters backwards.
      rule, activation: of the layer, where the caller names no other.
    """

    names: dict[str, str]
    rule: Rule
    activation: Activation

    @property
    def gated(self) -> bool:
        """SwiGLU experts."""
        return "experts.wg_EMH" in self.names


_CLASSIFIER = {"router.kernel_ME": "router.classifier.weight"}
_QWEN = {
    "router.kernel_ME": "gate.weight",
    "experts.wg_EMH": "experts.{e}.gate_proj.weight",
    "experts.wi_EMH": "experts.{e}.up_proj.weight",
    "experts.wo_EHM": "experts.{e}.down_proj.weight",
}
_SHARED = {
    "ffn.wg_MH": "shared_expert.gate_proj.weight",
    "ffn.wi_MH": "shared_expert.up_proj.weight",
    "ffn.wo_HM": "shared_expert.down_proj.weight",
    "gate_M1": "shared_expert_gate.weight",
}
_DROPLESS = TopK(capacity_factor=None, balance="all", balance_over="global")
FAMILIES: dict[str, Convention] = {
    "switch": Convention(
        names=_CLASSIFIER
        | {
            "experts.wi_EMH": "experts.expert_{e}.wi.weight",
            "experts.wo_EHM": "experts.expert_{e}.wo.weight",
        },
        rule=Top1(),
        activation=jax.nn.relu,
    ),
    "nllb-moe": Convention(
        names=_CLASSIFIER
        | {
            "experts.wi_EMH": "experts.expert_{e}.fc1.weight",
            "experts.bi_EH": "experts.expert_{e}.fc1.bias",
            "experts.wo_EHM": "experts.expert_{e}.fc2.weight",
            "experts.bo_EM": "experts.expert_{e}.fc2.bias",
        },
        rule=Top2(second_policy="all", renormalize_after_drop=True),
        activation=jax.nn.relu,
    ),
    "mixtral": Convention(
        names={
            "router.kernel_ME": "gate.weight",
            "experts.wg_EMH": "experts.{e}.w1.weight",
            "experts.wi_EMH": "experts.{e}.w3.weight",
            "experts.wo_EHM": "experts.{e}.w2.weight",
        },
        rule=dataclasses.replace(_DROPLESS, num_choices=2, gates="renormalized"),
        activation=jax.nn.silu,
    ),
    "qwen2-moe": Convention(
        names=_QWEN | _SHARED,
        rule=dataclasses.replace(_DROPLESS, num_choices=4, gates="softmax_then_top_k"),
        activation=jax.nn.silu,
    ),
    "qwen3-moe": Convention(
        names=_QWEN,
        rule=dataclasses.replace(_DROPLESS, num_choices=8, gates="renormalized"),
        activation=jax.nn.silu,
    ),
}


def convention_of(family: str) -> Convention:
    """The convention, or a UserError for a name that is no family's."""
    if family not in FAMILIES:
        raise UserError(
            f"family must be one of {tuple(FAMILIES)}: got {family!r}. Choose one of them."
        )
    return FAMILIES[family]


def read_rule(config: Mapping[str, Any], *, family: Family) -> Rule:
    """The routing rule that a checkpoint's `config.json` asks for; the weights do not say it.

    Args:
      config: what the JSON holds. Keys that are absent take the default of `read_layer`.
      family: whose configuration it is.

    Returns:
      The rule, for `read_layer(router=...)`. Capacities are not taken over: the peers give them
      as counts of tokens, ours are factors (`Top1.capacity_factor`).

    Raises:
      UserError: an unknown family.
    """
    rule = convention_of(family).rule
    taken: dict[str, Any] = {}
    if isinstance(rule, TopK):
        taken["num_choices"] = config.get("num_experts_per_tok", rule.num_choices)
        if family != "mixtral" and "norm_topk_prob" in config:
            normalized = config["norm_topk_prob"]
            taken["gates"] = "renormalized" if normalized else "softmax_then_top_k"
    elif isinstance(rule, Top2):
        before = config.get("normalize_router_prob_before_dropping", False)
        taken["renormalize_after_drop"] = not before
        taken["batch_priority"] = config.get("batch_prioritized_routing", rule.batch_priority)
        taken["second_policy"] = config.get("second_expert_policy", rule.second_policy)
    else:
        taken["jitter"] = config.get("router_jitter_noise", rule.jitter)
    return dataclasses.replace(rule, **taken)
