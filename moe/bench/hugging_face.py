"""The MoE layers of Hugging Face transformers, set so that they drop nothing where they can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import MixtralConfig, NllbMoeConfig, SwitchTransformersConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
)

from moe.bench.measure import Case, CaseSkipped
from moe.bench.torch_layers import torch_case
from moe.bench.workload import TOP_K, Workload

_MOST_SHIPPED_ROWS = 2**16  # as shipped, NLLB-MoE puts N x E rows through experts 0 and 1


class CorrectedNllbMoe(NllbMoeSparseMLP):
    """Hugging Face's layer with its dispatch mended; router, experts and loop stay as they are.

    As shipped in 5.23.0 the experts get the router's 0/1 mask of first choices where they expect
    indices: expert 1 computes every first choice, expert 0 all other pairs, the others nothing.
    """

    def forward(self, hidden_states, padding_mask=None):
        """Every expert computes the tokens that the router gave it."""
        x_NM = hidden_states.flatten(0, 1)
        _, gate_NE, _ = self.router(x_NM, padding_mask)
        y_NM = torch.zeros_like(x_NM)
        kept_NE = gate_NE > 0
        for e in kept_NE.any(0).nonzero().flatten().tolist():
            (token_C,) = torch.where(kept_NE[:, e])
            y_CM = self.experts[f"expert_{e}"](x_NM[token_C]) * gate_NE[token_C, e, None]
            y_NM.index_add_(0, token_C, y_CM.to(y_NM.dtype))
        return y_NM.view_as(hidden_states)


def nllb(workload: Workload, *, corrected: bool) -> Case:
    """NLLB-MoE's layer: top-2 of softmax gates, biases, one expert after another."""
    num_rows = workload.tokens * workload.num_experts
    if not corrected and num_rows > _MOST_SHIPPED_ROWS:
        raise CaseSkipped(f"computes all {num_rows:,} token-expert pairs, on experts 0 and 1")
    config = NllbMoeConfig(
        d_model=workload.d_model,
        num_experts=workload.num_experts,
        expert_capacity=workload.tokens,
        moe_token_dropout=0.0,
    )
    layer: Any = (CorrectedNllbMoe if corrected else NllbMoeSparseMLP)(config, workload.d_hidden)
    return torch_case(
        "nllb-corrected" if corrected else "nllb-shipped",
        layer,
        workload,
        note="capacity for all" + ("" if corrected else "; most pairs go to the wrong expert"),
        router=layer.router.classifier.weight,
        computed=lambda: (
            computed_share(layer, workload, num_choices=2)
            if corrected
            else _shipped_share(layer, workload)
        ),
    )


def switch(workload: Workload) -> Case:
    """Switch's layer: one expert of twice the width, so that its active FLOPs are the others'."""
    config = SwitchTransformersConfig(
        d_model=workload.d_model,
        d_ff=TOP_K * workload.d_hidden,
        num_experts=workload.num_experts,
        expert_capacity=workload.tokens,
        router_jitter_noise=0.0,
        dropout_rate=0.0,
    )
    layer: Any = SwitchTransformersSparseMLP(config)
    return torch_case(
        "switch",
        layer,
        workload,
        note=f"top-1, experts of {TOP_K} x d_hidden, capacity for all",
        router=layer.router.classifier.weight,
        computed=lambda: computed_share(layer, workload, num_choices=1),
    )


def mixtral(workload: Workload, *, experts: str) -> Case:
    """Mixtral's block: dropless top-2 of SwiGLU experts, against a dense SwiGLU."""
    config = MixtralConfig(
        hidden_size=workload.d_model,
        intermediate_size=workload.d_hidden,
        num_local_experts=workload.num_experts,
        num_experts_per_tok=TOP_K,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    config._experts_implementation = experts  # what the keyword experts_implementation sets
    layer: Any = MixtralSparseMoeBlock(config)
    return torch_case(
        f"mixtral-{experts.split('_')[0]}",
        layer,
        workload,
        note=f"dropless, experts_implementation={experts}",
        router=layer.gate.weight,
        computed=lambda: _given_share(layer, workload),
        gated=True,
    )


CASES: dict[str, Callable[[Workload], Case]] = {
    "nllb-corrected": functools.partial(nllb, corrected=True),
    "nllb-shipped": functools.partial(nllb, corrected=False),
    "switch": switch,
    "mixtral-grouped": functools.partial(mixtral, experts="grouped_mm"),
    "mixtral-eager": functools.partial(mixtral, experts="eager"),
}


def computed_share(layer: Any, workload: Workload, *, num_choices: int) -> float:
    """Share of (token, expert) pairs wanted by the router that this expert was really given.

    Watches what each expert is called with and recognises the tokens by their first values, so it
    needs no word from the layer on what it dropped.
    """
    parameter = next(layer.parameters())
    x_NM = torch.as_tensor(workload.arrays().x_NM).to(
        parameter.device, getattr(torch, workload.dtype)
    )
    sorted_names, token_of = _names(x_NM).sort()
    given: set[tuple[int, int]] = set()
    wanted: set[tuple[int, int]] = set()

    def watch_expert(e, inputs):
        place = torch.searchsorted(sorted_names, _names(inputs[0].reshape(-1, x_NM.shape[-1])))
        given.update((n, e) for n in token_of[place].tolist())

    def watch_router(outputs):
        expert_NK = outputs[-1].reshape(len(x_NM), -1).topk(num_choices).indices
        wanted.update((n, e) for n, row in enumerate(expert_NK.tolist()) for e in row)

    hooks = [layer.router.register_forward_hook(lambda _, __, outputs: watch_router(outputs))]
    for e in range(workload.num_experts):
        watch = functools.partial(lambda e, _, inputs: watch_expert(e, inputs), e)
        hooks.append(layer.experts[f"expert_{e}"].register_forward_pre_hook(watch))
    with torch.no_grad():
        layer(x_NM[None])
    for hook in hooks:
        hook.remove()
    return len(wanted & given) / len(wanted)


def _shipped_share(layer: Any, workload: Workload) -> float:
    """The same for NLLB-MoE as shipped, whose experts read the number at (n, e) of a mask as an index.

    Experts 0 and 1 are given every token, but with the gates of others; what counts is that the pair
    of token n and expert e is computed by e.
    """
    x_NM = torch.as_tensor(workload.arrays().x_NM).to(getattr(torch, workload.dtype))
    with torch.no_grad():
        mask_NE, gate_NE, _ = layer.router(x_NM.to(next(layer.parameters()).device))
    right_NE = mask_NE == torch.arange(workload.num_experts, device=mask_NE.device)
    return int((right_NE & (gate_NE > 0)).sum()) / int((gate_NE > 0).sum())


def _names(x_NM: torch.Tensor) -> torch.Tensor:
    """The first eight bytes of each token as one integer; random tokens differ in them."""
    return x_NM[:, : 8 // x_NM.element_size()].contiguous().view(torch.int64).flatten()


def _given_share(layer: Any, workload: Workload) -> float:
    """The same for Mixtral, whose experts are one module: valid indices among those it is given."""
    given: list[torch.Tensor] = []
    hook = layer.experts.register_forward_pre_hook(lambda _, inputs: given.append(inputs[1]))
    x = torch.as_tensor(workload.arrays().x_NM).to(layer.gate.weight)[None]
    with torch.no_grad():
        layer(x)
    hook.remove()
    valid = (given[0] >= 0) & (given[0] < workload.num_experts)
    return int(valid.sum()) / (TOP_K * workload.tokens)
