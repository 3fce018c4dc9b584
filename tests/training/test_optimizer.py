from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.models import Transformer, TransformerConfig
from moe.training.optimizer import OptimizerConfig, learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("schedule", "at_300"),
    # Warm-up to 1 at step 100, then sqrt(100 / 300), 1 - 200 / 300 or 1.
    [("rsqrt", 3**-0.5), ("linear", 1 / 3), ("constant", 1.0)],
)
def test_the_learning_rate_rises_in_a_line_and_then_follows_its_schedule(schedule, at_300):
    rate = learning_rate(
        OptimizerConfig(learning_rate=1.0, warmup_steps=100, schedule=schedule), 400
    )
    np.testing.assert_allclose(
        [rate(0), rate(50), rate(100), rate(300)], [0, 0.5, 1, at_300], rtol=1e-5
    )


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_a_step_with_a_nan_gradient_changes_nothing_and_is_counted(name):
    optimizer = make_optimizer(OptimizerConfig(name=name, schedule="constant", warmup_steps=1), 10)
    params = {"w": jnp.ones((3, 4))}
    state = optimizer.init(params)
    good, bad = {"w": jnp.ones((3, 4))}, {"w": jnp.full((3, 4), jnp.nan)}
    counts = []
    for gradient in (good, bad, bad, good):
        before = state.inner_state
        updates, state = optimizer.update(gradient, state, params)
        if gradient is bad:
            np.testing.assert_array_equal(updates["w"], 0)
            jax.tree.map(np.testing.assert_array_equal, before, state.inner_state)
        counts.append((int(state.notfinite_count), int(state.total_notfinite)))
    assert counts == [(0, 0), (1, 1), (2, 2), (0, 2)]


def test_weight_decay_leaves_vectors_alone():
    config = OptimizerConfig(
        weight_decay=0.5, schedule="constant", warmup_steps=1, learning_rate=0.1
    )
    optimizer = make_optimizer(config, 10)
    params = {"matrix": jnp.ones((2, 3)), "vector": jnp.ones(3)}
    state = optimizer.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    _, state = optimizer.update(zero, state, params)  # the learning rate of step 0 is 0
    updates, _ = optimizer.update(zero, state, params)
    np.testing.assert_allclose(updates["matrix"], -0.1 * 0.5, rtol=1e-6)
    np.testing.assert_array_equal(updates["vector"], 0)


def test_weight_decay_leaves_the_vectors_of_stacked_layers_and_experts_alone():
    model = Transformer(TransformerConfig(d_model=8, d_hidden=12, num_heads=2), rngs=nnx.Rngs(0))
    params = nnx.state(model)
    config = OptimizerConfig(weight_decay=0.5, schedule="constant", warmup_steps=1)
    optimizer = make_optimizer(config, 10)
    state = optimizer.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    _, state = optimizer.update(zero, state, params)  # the learning rate of step 0 is 0
    updates, _ = optimizer.update(zero, state, params)
    layer = updates["encoder"]["pairs"]["sparse"]
    assert not layer["ffn_norm"]["scale"][...].any()  # [Y, M]
    for decayed in (layer["ffn"]["experts"]["wi_EMH"], layer["ffn"]["router"]["kernel_ME"]):
        assert decayed[...].any()


@pytest.mark.parametrize(
    ("field", "value"), [("learning_rate", 0.0), ("clip_norm", -1.0), ("warmup_steps", 0)]
)
def test_malformed_settings_are_refused(field, value):
    with pytest.raises(UserError, match=f"optimizer.{field} must .* got {value}"):
        OptimizerConfig(**{field: value})
