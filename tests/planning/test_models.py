"""The counts and the modelled times, by hand; the published models, by the paper's table."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe.cli import read_experiment
from moe.errors import UserError
from moe.models import Transformer
from moe.planning import CHIPS, Slice, read_slice
from moe.planning.flops import product_flops
from moe.planning.plan import count_parameters
from moe.planning.step_time import StepTime, all_to_all_seconds, model_step_time, one_exchange
from moe.sharding import Collective

GSHARD = Path(__file__).parent.parent.parent / "experiments" / "gshard.py"


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("128e_12l", 12.9),
        ("128e_36l", 38.7),
        ("512e_12l", 51.5),
        ("512e_36l", 154.6),
        ("2048e_12l", 206.2),
        ("2048e_36l", 618.5),
        ("2048e_60l", 1030.8),
    ],
)
def test_expert_weights_are_the_published_ones_to_the_digit(model, billions):
    config = read_experiment(GSHARD, model)
    shapes = jax.eval_shape(lambda: nnx.state(Transformer(config.model, rngs=nnx.Rngs(0))))
    parameters = count_parameters(config, shapes)
    experts, layers = config.model.num_experts, config.model.num_encoder_layers * 2
    assert parameters.experts == experts * (layers // 2) * 2 * 1024 * 8192
    assert round(parameters.experts / 1e9, 1) == billions
    assert config.mesh.expert == experts


def test_an_unknown_published_model_is_told():
    with pytest.raises(UserError, match="2048e_60l: got '4096e_12l'"):
        read_experiment(GSHARD, "4096e_12l")


def test_products_are_counted_with_loops_and_backward():
    def loss(w, x):
        def layer(x, _):
            return jax.nn.relu(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, length=5)[0])

    w, x = jnp.zeros((7, 7)), jnp.zeros((3, 7))
    once = 2 * 3 * 7 * 7
    assert product_flops(jax.make_jaxpr(loss)(w, x)) == 5 * once
    # Backward: one product for the gradient of x, one for that of w.
    assert product_flops(jax.make_jaxpr(jax.grad(loss))(w, x)) == 15 * once
    assert product_flops(jax.jit(jnp.dot).trace(x, w).jaxpr) == once


def test_a_ragged_product_counts_each_row_once():
    def ragged(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    shapes = jnp.zeros((11, 3)), jnp.zeros((2, 3, 5)), jnp.array([4, 7])
    assert product_flops(jax.make_jaxpr(ragged)(*shapes)) == 2 * 11 * 3 * 5


def collective(kind, num_bytes, devices):
    return Collective(
        kind=kind,
        axes=("expert",),
        num_devices=devices,
        bytes_per_device=num_bytes,
        source="",
        loops=(),
    )


def test_all_to_all_grows_with_the_square_root_on_a_flat_torus():
    chip = CHIPS["v5e"]
    times = [
        one_exchange(collective("all-to-all", 2**20, side**2), Slice(chip=chip, shape=(side, side)))
        for side in (16, 32)
    ]
    assert times[1] / times[0] == pytest.approx(2)  # four times the chips
    # 1 MiB, side 16, links of 50 GB/s: 2**20 * 16 / (8 * 50e9) s.
    assert times[0] == pytest.approx(2**20 * 16 / 4e11)


def test_a_few_chips_are_limited_by_their_own_links():
    chip = CHIPS["v5p"]
    assert all_to_all_seconds(6e11, 1, chip) == pytest.approx(1.0)  # six links of 100 GB/s


def test_an_all_reduce_takes_twice_a_gather():
    where = read_slice("v5p:2x2x2")
    both = [one_exchange(collective(kind, 800, 8), where) for kind in ("all-reduce", "all-gather")]
    assert both[0] == pytest.approx(2 * both[1]) and both[1] == pytest.approx(700 / 6e11)


def test_a_step_is_the_slower_of_products_and_memory_and_then_the_exchanges():
    where = read_slice("v5p:2x2x2")
    time = model_step_time(
        where,
        flops_per_device=459e12,
        memory_traffic=2765e9 / 2,
        collectives=(collective("collective-permute", 100e9, 2),),
    )
    assert (time.products, time.memory, time.communication) == pytest.approx((1, 0.5, 1))
    assert time.step == pytest.approx(2) and time.utilisation == pytest.approx(0.5)
    assert StepTime(products=0, memory=0, communication=0).utilisation == 0


@pytest.mark.parametrize("topology", ["v9:2x2x2", "v5p:4x4", "v5e:4xb", "v5p"])
def test_a_topology_that_is_none_is_told(topology):
    with pytest.raises(UserError, match=f"got '{topology}'"):
        read_slice(topology)


def test_a_slice_is_called_as_it_was_written():
    assert read_slice("v5p:8x16x16").name == "v5p:8x16x16"
    assert read_slice("v5p:8x16x16").num_chips == 2048
