"""The counts and the modelled times, by hand; the published models, by the paper's table."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe import routing
from moe.cli import read_experiment
from moe.errors import UserError
from moe.models import Transformer
from moe.planning import CHIPS, Slice, read_slice
from moe.planning.flops import product_flops
from moe.planning.plan import count_parameters
from moe.planning.step_time import StepTime, all_to_all_seconds, model_step_time, one_exchange
from moe.sharding import Collective, MeshConfig, make_mesh

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
GSHARD, GSPMD = EXPERIMENTS / "gshard.py", EXPERIMENTS / "gspmd.py"


def counted(path, model):
    config = read_experiment(path, model)
    shapes = jax.eval_shape(lambda: nnx.state(Transformer(config.model, rngs=nnx.Rngs(0))))
    return config, count_parameters(config, shapes)


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
def test_gshards_parameters_are_the_published_ones_to_the_digit(model, billions):
    config, parameters = counted(GSHARD, model)
    experts, pairs = config.model.num_experts, config.model.num_encoder_layers
    assert parameters.experts == experts * pairs * 2 * 1024 * 8192
    assert round(parameters.experts / 1e9, 1) == billions
    assert config.mesh.expert == experts
    # A pair of layers besides its experts: a dense FFN, the router, and in the encoder two attentions
    # of four matrices and four norms, in the decoder four and six. Then two vocabularies and two norms.
    attention, norm = 4 * 1024 * 16 * 128, 1024
    pair = 2 * (2 * 1024 * 8192 + 1024 * experts) + (2 + 4) * attention + (4 + 6) * norm
    rest = pairs // 2 * pair + (64_000 + 32_000) * 1024 + 2 * norm
    assert parameters.total == parameters.experts + rest
    assert parameters.active == parameters.total - parameters.experts // experts * (experts - 2)


def test_as_many_slots_as_the_paper_has():
    config = read_experiment(GSHARD, "2048e_12l")
    rule = config.model.router
    slots = {
        experts: routing.expert_capacity(
            config.model.group_size, experts, rule.capacity_factor, min_capacity=rule.min_capacity
        )
        for experts in (128, 512, 2048)
    }
    assert slots == {128: 16, 512: 4, 2048: 1}  # 2 S / E


@pytest.mark.parametrize(
    ("model", "published"), [("128b", 137_702_416_384), ("1t", 1_100_041_175_040)]
)
def test_gspmds_parameters_are_the_published_ones_but_for_what_a_decoder_alone_lacks(
    model, published
):
    config, parameters = counted(GSPMD, model)
    m, layers = config.model, config.model.num_encoder_layers * 2
    cross_attention = 4 * m.d_model * m.num_heads * 128 + m.d_model  # and the norm before it
    positions = (
        (layers - 2) * 32 * m.num_heads
    )  # a table for each layer, ours has one for each stack
    ours = parameters.total - layers // 2 * cross_attention - m.d_model + positions
    assert ours == published


@pytest.mark.parametrize(
    ("model", "gibi"), [("64b", 64), ("128b", 128), ("256b", 256), ("512b", 512), ("1t", 1024)]
)
def test_gspmds_layers_have_the_parameters_that_name_the_model(model, gibi):
    m = read_experiment(GSPMD, model).model
    attention, ffn = 4 * m.d_model * m.num_heads * m.head_width, 3 * m.d_model * m.d_hidden
    assert 2 * m.expert_width == m.d_hidden
    assert 2 * m.num_encoder_layers * (attention + ffn) == gibi * 2**30


def test_the_dense_models_are_found_beside_gshards():
    assert read_experiment(GSHARD, "1t") == read_experiment(GSPMD, "1t")


def test_an_unknown_published_model_is_told():
    with pytest.raises(UserError, match=r"2048e_60l, 64b, .* 1t: got '4096e_12l'"):
        read_experiment(GSHARD, "4096e_12l")
    with pytest.raises(UserError, match="1t: got '2t'"):
        read_experiment(GSPMD, "2t")


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


def test_products_within_a_manual_region_are_counted_on_each_device():
    mesh = make_mesh(MeshConfig(data=2, expert=2), jax.devices()[:4])
    rows = jax.P("data")
    by_hand = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(rows, jax.P()), out_specs=rows)
    # Two rows of four each, on two devices of `expert` alike: 4 times 2 x (2 x 3 x 5).
    shapes = jnp.zeros((4, 3)), jnp.zeros((3, 5))
    assert product_flops(jax.make_jaxpr(by_hand)(*shapes)) == 4 * 2 * 2 * 3 * 5


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
