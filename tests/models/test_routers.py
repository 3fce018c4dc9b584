"""Every kind of router in the translation Transformer: routing ids, decoding, capture and replay."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers import ExpertChoice, Hash, SigmoidTopK, Soft, TaskRouting, Top2
from moe.models import TransformerConfig
from tests.models.test_transformer import ONE, SMALL, TWO, make_model, rows


def experts_of_tokens(model, row, stack: str) -> np.ndarray:
    """expert_LK of the first MoE layer of a stack, for the tokens of the only row."""
    model.set_attributes(capture_plan=True)
    _, stats = model(**row)
    return np.asarray(stats[stack].plan.expert_GSK)[0, 0]


def test_hash_routing_looks_at_token_ids_alone():
    model = make_model(router=Hash())
    row = rows([([5, 6, 5, 7, 6], [1, 20, 20, 1]), ([6, 5], [20])])
    source_LK = experts_of_tokens(model, row, "encoder")[:7, 0]
    target_LK = experts_of_tokens(model, row, "decoder")[:5, 0]
    for experts, ids in ((source_LK, [5, 6, 5, 7, 6, 6, 5]), (target_LK, [1, 20, 20, 1, 20])):
        found = set(zip(ids, experts.tolist(), strict=True))
        assert len(found) == len(set(ids))  # one expert for each id


def test_task_routing_follows_the_language_tag_of_each_sentence_in_both_stacks():
    model = make_model(router=TaskRouting(num_tasks=16))
    # The first source token of a sentence is its tag: 5 and 9.
    row = rows([ONE, TWO])
    table_EE = np.asarray(jax.tree.leaves(nnx.state(model.decoder.pairs.sparse.ffn.router))[0][0])
    best = {tag: np.argsort(-table_EE[tag], kind="stable")[:2].tolist() for tag in (5, 9)}
    target_LK = experts_of_tokens(model, row, "decoder")
    assert target_LK[:3].tolist() == [best[5]] * 3
    assert target_LK[3:7].tolist() == [best[9]] * 4
    source_LK = experts_of_tokens(model, row, "encoder")
    assert len({tuple(pair) for pair in source_LK[:4].tolist()}) == 1
    assert len({tuple(pair) for pair in source_LK[4:9].tolist()}) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"router": TaskRouting(num_tasks=16)},
        {"router": Hash(num_choices=2), "beside": "shared"},
        {"router": ExpertChoice(), "decoder_router": SigmoidTopK(), "activation": "swiglu"},
        {"beside": "conditional", "output_masking": 0.2},
    ],
    ids=str,
)
def test_decoding_with_a_cache_gives_the_teacher_forced_logits(options):
    model = make_model(num_decoder_layers=2, **options)
    row = rows([TWO], source_length=7, target_length=4)
    logits_BLV, _ = nnx.jit(lambda model: model(**row))(model)
    source_BL, segments_BL = row["source_BL"], row["source_segments_BL"]
    memory, _ = model.encode(source_BL, segments_BL, row["source_positions_BL"])
    cache = model.start_decoding(memory, segments_BL, max_length=4, source_BT=source_BL)
    decode_step = nnx.jit(lambda model, *inputs: model.decode_step(*inputs))
    for step, token in enumerate(TWO[1]):
        logits_BV, cache = decode_step(model, jnp.asarray([token]), jnp.asarray(step), cache)
        np.testing.assert_allclose(logits_BV, logits_BLV[:, step], rtol=1e-4, atol=1e-5)


def test_captured_plans_replay_a_forward_pass_of_the_whole_model():
    model, row = make_model(), rows([ONE, TWO])
    model.set_attributes(capture_plan=True)
    logits_BLV, stats = model(**row, key=jax.random.key(0))
    plans = {stack: stats[stack].plan for stack in stats}
    # Dropout is 0.1: with the same key the same; random second choices are in the plan.
    again_BLV, _ = model(**row, key=jax.random.key(0), plans=plans)
    np.testing.assert_array_equal(logits_BLV, again_BLV)
    moved = (plans["decoder"].expert_GSK + 1) % SMALL["num_experts"]
    plans["decoder"] = dataclasses.replace(plans["decoder"], expert_GSK=moved)
    other_BLV, _ = model(**row, key=jax.random.key(0), plans=plans)
    assert not np.allclose(other_BLV, logits_BLV)


@pytest.mark.parametrize("rule", [ExpertChoice(), Soft()])
def test_a_rule_that_looks_ahead_is_refused_in_the_decoder(rule):
    name = type(rule).__name__
    with pytest.raises(
        UserError, match=f"router must not look ahead in a causal decoder: got {name}"
    ):
        TransformerConfig(**SMALL, router=rule)
    TransformerConfig(**SMALL, router=rule, decoder_router=Top2())
