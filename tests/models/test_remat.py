"""Rematerialisation: less memory, the same numbers, and no exchange repeated that was kept."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe.errors import UserError
from moe.layers.block import View
from moe.models import TransformerConfig
from moe.models.config import Remat
from moe.models.stack import Stack
from moe.sharding import MeshConfig, count_collectives, make_mesh, shardings

B, L, M = 4, 8, 6
CONFIG = TransformerConfig(d_model=M, d_hidden=28, num_heads=1, num_experts=4, group_size=L)


@dataclasses.dataclass
class Gradient:
    values: Any
    bytes: int
    all_to_alls: int


@pytest.fixture(scope="module")
def gradients() -> dict[str, Gradient]:
    """Policy -> the gradient of five pairs of encoder layers, in training, on 4 devices."""
    x_BLM = jax.random.normal(jax.random.key(0), (B, L, M))
    view = View(mask_BLT=jnp.ones((B, L, L), bool), rotary_BL=jnp.tile(jnp.arange(L), (B, 1)))
    mesh = make_mesh(MeshConfig(expert=4), jax.devices()[:4])

    def one(remat: Remat) -> Gradient:
        stack = Stack(CONFIG.block(cross_attention=False), 10, remat=remat, rngs=nnx.Rngs(0))
        graph, params = nnx.split(stack)

        def loss(params, x_BLM):
            y_BLM, stats, _ = nnx.merge(graph, params)(x_BLM, view, key=jax.random.key(1))
            assert stats is not None
            return jnp.mean(y_BLM**2) + jnp.mean(stats.aux_loss)

        with jax.set_mesh(mesh):
            placed = jax.device_put(params, shardings(params, mesh)), x_BLM
            compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*placed).compile()
            memory = compiled.memory_analysis()
            assert memory is not None
            return Gradient(
                jax.device_get(compiled(*placed)),
                memory.temp_size_in_bytes,
                count_collectives(compiled)["all-to-all"],
            )

    return {remat: one(remat) for remat in get_args(Remat)}


@pytest.mark.parametrize(
    "remat", ["exchange", pytest.param("dots", marks=pytest.mark.slow), "full"]
)
def test_a_policy_changes_memory_and_no_number(gradients, remat):
    expected, found = gradients["none"], gradients[remat]
    for a, b in zip(*map(jax.tree.leaves, (expected.values, found.values)), strict=True):
        # The same sums, which the compiler may order otherwise.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert found.bytes < 0.6 * expected.bytes


def test_what_is_kept_orders_the_policies(gradients):
    kept = [gradients[remat].bytes for remat in ("none", "dots", "full")]
    assert kept == sorted(kept, reverse=True)
    assert gradients["full"].bytes < gradients["exchange"].bytes < gradients["none"].bytes


def test_an_exchange_is_repeated_unless_it_is_kept(gradients):
    counts = {remat: gradient.all_to_alls for remat, gradient in gradients.items()}
    # Two forward and two backward; the way there and back once more where they are not kept.
    assert counts == {"none": 4, "exchange": 4, "dots": 6, "full": 6}


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match=r"model.remat must be one of .* got 'some'"):
        TransformerConfig(remat="some")  # type: ignore[arg-type]
