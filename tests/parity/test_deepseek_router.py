"""DeepSeek-V3's router as Transformers ships it: the same experts and weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from moe.routing import sigmoid_top_k

pytestmark = pytest.mark.parity


def test_sigmoid_scores_bias_and_group_limit_are_those_of_the_transformers_port():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    num_tokens, width, num_experts = 50, 7, 12
    config = DeepseekV3Config(
        hidden_size=width,
        n_routed_experts=num_experts,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    peer = modeling.DeepseekV3TopkRouter(config)
    rng = np.random.default_rng(0)
    x_TM, kernel_EM, bias_E = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((num_tokens, width), (num_experts, width), (num_experts,))
    )
    with torch.no_grad():
        peer.weight.copy_(torch.from_numpy(kernel_EM))
        peer.e_score_correction_bias.copy_(torch.from_numpy(bias_E))
        logits_TE, weight_TK, expert_TK = (a.numpy() for a in peer(torch.from_numpy(x_TM)))
    plan = sigmoid_top_k(
        jnp.asarray(logits_TE)[None],
        jnp.asarray(bias_E),
        num_choices=3,
        capacity=num_tokens,
        scale=2.5,
        num_expert_groups=4,
        num_kept_groups=2,
    )
    theirs_TE, ours_TE = np.zeros((2, num_tokens, num_experts))
    np.put_along_axis(theirs_TE, expert_TK, weight_TK, 1)
    np.put_along_axis(ours_TE, np.asarray(plan.expert_GSK[0]), np.asarray(plan.gate_GSK[0]), 1)
    # One quotient of float32 sums.
    np.testing.assert_allclose(ours_TE, theirs_TE, rtol=1e-5)
