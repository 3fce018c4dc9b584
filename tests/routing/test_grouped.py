"""Products of ragged groups beside a loop over rows, in values and gradients."""

from __future__ import annotations

import importlib.util
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing import ExpertWeights, blocks, grouped_ffn, grouped_product, native
from tests import oracle

# M is a multiple of 8, as the product of few rows asks for; R is enough for blocks of every kind.
E, M, H, R = 5, 8, 11, 67
FEW = 13  # rows, about one or two for an expert, as in decoding
GROUP_SIZES = {
    "even": [13, 14, 13, 14, 13],
    "skewed": [1, 40, 0, 9, 17],
    "one expert takes all": [0, 0, 67, 0, 0],
    "rows past the end": [3, 0, 29, 20, 0],
    "nobody": [0, 0, 0, 0, 0],
}
FEW_SIZES = {
    "few, skewed": [1, 0, 8, 4, 0],
    "few, all to the last": [0, 0, 0, 0, 13],
    "few, rows past the end": [0, 2, 1, 0, 6],
}
CASES = {name: (R, sizes) for name, sizes in GROUP_SIZES.items()}
CASES |= {name: (FEW, sizes) for name, sizes in FEW_SIZES.items()}


@pytest.fixture(autouse=True, scope="module")
def blocks_of_every_size():
    """As for work that is worth many sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SMALL_FLOPS", 0)
        patch.setattr(blocks, "LARGE_FLOPS", 0)
        yield


has_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed"
)
each_case = pytest.mark.parametrize("case", CASES)
each_implementation = pytest.mark.parametrize(
    "implementation",
    ["native", "blocked", "ragged_dot", pytest.param("tokamax", marks=has_tokamax)],
)


def rows_and_sizes(case):
    num_rows, group_sizes = CASES[case]
    rng = np.random.default_rng(num_rows)
    x_RM, dy_RH = (rng.normal(size=(num_rows, n)).astype(np.float32) for n in (M, H))
    return x_RM, dy_RH, np.array(group_sizes, np.int32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(scale=0.3, size=shape).astype(np.float32)


def loop_product(x_RM, w_EMH, group_sizes_E):
    y_RH = np.zeros((len(x_RM), w_EMH.shape[2]), np.result_type(x_RM, w_EMH))
    row = 0
    for expert, size in enumerate(group_sizes_E):
        for _ in range(size):
            y_RH[row] = x_RM[row] @ w_EMH[expert]
            row += 1
    return y_RH


def loop_product_gradients(x_RM, w_EMH, group_sizes_E, dy_RH):
    dx_RM, dw_EMH = np.zeros_like(x_RM), np.zeros_like(w_EMH)
    row = 0
    for expert, size in enumerate(group_sizes_E):
        for _ in range(size):
            dx_RM[row] = w_EMH[expert] @ dy_RH[row]
            dw_EMH[expert] += np.outer(x_RM[row], dy_RH[row])
            row += 1
    return dx_RM, dw_EMH


@partial(jax.jit, static_argnames="implementation")
def product_and_gradients(x_RM, w_EMH, group_sizes_E, dy_RH, implementation):
    y_RH, back = jax.vjp(
        lambda x, w: grouped_product(x, w, group_sizes_E, implementation=implementation),
        x_RM,
        w_EMH,
    )
    # Not differentiated, it need not be the same code.
    alone_RH = grouped_product(x_RM, w_EMH, group_sizes_E, implementation=implementation)
    return y_RH, alone_RH, *back(dy_RH)


@each_implementation
@each_case
def test_product_and_gradients_are_those_of_a_loop_over_rows(case, implementation):
    x_RM, dy_RH, group_sizes_E = rows_and_sizes(case)
    w_EMH = normal(1, E, M, H)
    y_RH, alone_RH, dx_RM, dw_EMH = product_and_gradients(
        x_RM, w_EMH, group_sizes_E, dy_RH, implementation=implementation
    )
    wanted_RH = loop_product(x_RM, w_EMH, group_sizes_E)
    wanted_dx_RM, wanted_dw_EMH = loop_product_gradients(x_RM, w_EMH, group_sizes_E, dy_RH)
    # Sums of 8, 11 and at most 67 products of numbers near 1: a few units in the seventh digit.
    np.testing.assert_allclose(y_RH, wanted_RH, 1e-5, 1e-5)
    np.testing.assert_allclose(alone_RH, wanted_RH, 1e-5, 1e-5)
    np.testing.assert_allclose(dx_RM, wanted_dx_RM, 1e-5, 1e-5)
    np.testing.assert_allclose(dw_EMH, wanted_dw_EMH, 1e-5, 3e-5)
    assert not dw_EMH[group_sizes_E == 0].any()


@each_implementation
@pytest.mark.parametrize("case", ["rows past the end", "few, rows past the end", "nobody"])
def test_what_rows_past_the_end_hold_does_not_matter(case, implementation):
    x_RM, dy_RH, group_sizes_E = rows_and_sizes(case)
    w_EMH = normal(1, E, M, H)
    clean = product_and_gradients(x_RM, w_EMH, group_sizes_E, dy_RH, implementation=implementation)
    end = group_sizes_E.sum()
    x_RM[end:], dy_RH[end:] = np.nan, np.inf
    dirty = product_and_gradients(x_RM, w_EMH, group_sizes_E, dy_RH, implementation=implementation)
    for ours, theirs in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for rows in dirty[:3]:
        assert not np.asarray(rows)[end:].any()


@pytest.mark.parametrize("implementation", ["native", "blocked"])
@each_case
def test_bad_numbers_stay_with_their_expert(case, implementation):
    x_RM, dy_RH, group_sizes_E = rows_and_sizes(case)
    w_EMH = normal(1, E, M, H)
    sick = 3
    expert_R = np.repeat(np.arange(E), group_sizes_E)
    x_RM[: len(expert_R)][expert_R == sick] = np.nan
    _, y_RH, _, dw_EMH = product_and_gradients(
        x_RM, w_EMH, group_sizes_E, dy_RH, implementation=implementation
    )
    others_R = np.ones(len(x_RM), bool)
    others_R[: len(expert_R)] = expert_R != sick
    assert np.isfinite(np.asarray(y_RH)[others_R]).all()
    assert np.isfinite(np.delete(dw_EMH, sick, axis=0)).all()


@pytest.mark.parametrize("implementation", ["native", "blocked"])
@pytest.mark.parametrize("case", ["skewed", "few, skewed"])
def test_weights_of_an_expert_without_rows_are_not_read(case, implementation):
    x_RM, dy_RH, group_sizes_E = rows_and_sizes(case)
    w_EMH = normal(1, E, M, H)
    w_EMH[group_sizes_E == 0] = np.nan  # zero times NaN would show
    results = product_and_gradients(x_RM, w_EMH, group_sizes_E, dy_RH, implementation)
    assert all(np.isfinite(array).all() for array in results)


@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 3), (12, 40), (97, 3), (701, 7)])
def test_blocks_hold_each_row_once_and_little_else(num_rows, num_experts):
    def count(block, counts):
        times_R, computed = counts
        own_B = block.mask_B1[:, 0].astype(jnp.int32)
        times_R = jax.lax.dynamic_update_slice_in_dim(
            times_R, block.rows(times_R) + own_B, block.start, 0
        )
        return times_R, computed + len(own_B)

    @jax.jit
    def counts(group_sizes_E):
        zeros = jnp.zeros(num_rows, jnp.int32), jnp.zeros((), jnp.int32)
        return blocks.for_each_block(group_sizes_E, num_rows, count, zeros, num_flops=1)

    rng = np.random.default_rng(num_rows)
    for skew in (0, 1, 3):
        share_E = np.exp(skew * rng.normal(size=num_experts))
        group_sizes_E = rng.multinomial(num_rows, share_E / share_E.sum()).astype(np.int32)
        times_R, computed = counts(group_sizes_E)
        np.testing.assert_array_equal(times_R, 1)
        # A block is less than twice its rows, but for the smallest size, an eighth of the mean.
        smallest = -(-num_rows // num_experts // 8) + 1
        assert computed <= 2 * num_rows + np.count_nonzero(group_sizes_E) * smallest
        if skew == 0 and num_rows // num_experts >= 100:
            assert computed <= 1.05 * num_rows  # near the mean, sizes are 1/32 apart


@pytest.mark.parametrize("implementation", ["native", "blocked", "ragged_dot"])
def test_no_tensor_of_experts_times_rows(implementation):
    num_experts, num_rows = 16, 96
    x_RM, dy_RH = normal(0, num_rows, M), normal(1, num_rows, H)
    group_sizes_E = np.full(num_experts, num_rows // num_experts, np.int32)
    compiled = product_and_gradients.lower(
        x_RM, normal(2, num_experts, M, H), group_sizes_E, dy_RH, implementation=implementation
    ).compile()
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    largest = max(np.prod([int(size) for size in shape.split(",")]) for shape in shapes)
    everyone_on_everything = num_experts * num_rows * min(M, H)
    # `ragged_dot` on CPU is the control: it does have such a tensor.
    assert (largest >= everyone_on_everything) == (implementation == "ragged_dot")


def loop_ffn(x_RM, weights: ExpertWeights, group_sizes_E):
    """Row by row, SiLU; accepts complex numbers, for `oracle.gradient`."""

    def silu(values):
        return values / (1 + np.exp(-values))

    y_RM = np.zeros(x_RM.shape, np.result_type(x_RM, *(w for w in weights if w is not None)))
    expert_R = np.repeat(np.arange(E), group_sizes_E)
    for row, e in enumerate(expert_R):
        h_H = x_RM[row] @ weights.wi_EMH[e]
        if weights.bi_EH is not None:
            h_H = h_H + weights.bi_EH[e]
        if weights.wg_EMH is None:
            h_H = silu(h_H)
        else:
            h_H = silu(x_RM[row] @ weights.wg_EMH[e] + weights.bg_EH[e]) * h_H
        y_RM[row] = h_H @ weights.wo_EHM[e]
        if weights.bo_EM is not None:
            y_RM[row] += weights.bo_EM[e]
    return y_RM


@partial(jax.jit, static_argnames="implementation")
def ffn_and_gradients(x_RM, weights, group_sizes_E, dy_RM, implementation):
    y_RM, back = jax.vjp(
        lambda x, w: grouped_ffn(
            x, w, group_sizes_E, activation=jax.nn.silu, implementation=implementation
        ),
        x_RM,
        weights,
    )
    return y_RM, *back(dy_RM)


def kinds_of_weights() -> dict[str, ExpertWeights]:
    wi_EMH, wg_EMH, wo_EHM = normal(1, E, M, H), normal(2, E, M, H), normal(3, E, H, M)
    return {
        "plain": ExpertWeights(wi_EMH, wo_EHM),
        "gated, with biases": ExpertWeights(
            wi_EMH, wo_EHM, wg_EMH, normal(4, E, H), normal(5, E, H), normal(6, E, M)
        ),
    }


@each_implementation
@pytest.mark.parametrize("kind", kinds_of_weights())
@pytest.mark.parametrize("case", ["few, skewed", "few, rows past the end"])
def test_feed_forward_and_gradients_are_those_of_a_loop_over_rows(case, kind, implementation):
    x_RM, _, group_sizes_E = rows_and_sizes(case)
    weights, dy_RM = kinds_of_weights()[kind], normal(7, *x_RM.shape)
    end = group_sizes_E.sum()
    x_RM[end:], dy_RM[end:] = np.nan, np.nan
    y_RM, dx_RM, dweights = ffn_and_gradients(
        x_RM, weights, group_sizes_E, dy_RM, implementation=implementation
    )
    np.testing.assert_allclose(y_RM, loop_ffn(x_RM, weights, group_sizes_E), 1e-5, 1e-5)

    def loss(**changed):
        x = changed.pop("x_RM", x_RM)
        y = loop_ffn(x, weights._replace(**changed), group_sizes_E)
        return np.sum(y[:end] * dy_RM[:end])

    wanted = oracle.gradient(lambda x: loss(x_RM=x), x_RM)
    # Two layers of sums of at most 13 products near 1.
    np.testing.assert_allclose(dx_RM[:end], wanted[:end], 1e-5, 1e-5)
    assert not np.asarray(dx_RM)[end:].any()
    for name, value in weights._asdict().items():
        if value is not None:
            wanted = oracle.gradient(lambda w, name=name: loss(**{name: w}), value)
            np.testing.assert_allclose(getattr(dweights, name), wanted, 1e-5, 1e-5, err_msg=name)


@pytest.mark.parametrize("case", ["few, skewed"])
def test_bfloat16_is_the_rounded_product(case):
    x_RM, dy_RH, group_sizes_E = rows_and_sizes(case)
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in (x_RM, normal(1, E, M, H), dy_RH)]
    x_RM, w_EMH, dy_RH = (np.asarray(a, np.float32) for a in arrays)
    ours = product_and_gradients(arrays[0], arrays[1], group_sizes_E, arrays[2], "blocked")
    assert all(array.dtype == jnp.bfloat16 for array in ours)
    y_RH = loop_product(x_RM, w_EMH, group_sizes_E)
    theirs = y_RH, y_RH, *loop_product_gradients(x_RM, w_EMH, group_sizes_E, dy_RH)
    for our, their in zip(ours, theirs, strict=True):
        # 8 bits of mantissa: half a unit is 1/512 of the largest; weights add up a few blocks.
        our = np.asarray(our, np.float32)
        assert np.abs(our - their).max() <= np.abs(their).max() / 128


def test_no_rows_and_no_gradient_for_group_sizes():
    w_EMH = normal(1, E, M, H)
    none_E = np.zeros(E, np.int32)
    y_RH, _, dx_RM, dw_EMH = product_and_gradients(
        np.zeros((0, M), np.float32), w_EMH, none_E, np.zeros((0, H), np.float32), "blocked"
    )
    assert y_RH.shape == (0, H)
    assert dx_RM.shape == (0, M)
    assert not dw_EMH.any()
    x_RM, _, group_sizes_E = rows_and_sizes("few, skewed")
    loss = lambda sizes: grouped_product(x_RM, w_EMH, sizes, implementation="blocked").sum()  # noqa: E731
    assert jax.grad(loss, allow_int=True)(group_sizes_E).dtype == jax.dtypes.float0


def test_layers_stacked_for_a_scan_and_tokens_split_over_devices_give_the_same():
    num_layers, num_devices = 2, 4
    w_YEMM = normal(1, num_layers, E, M, M)
    x_RM, dy_RM = normal(2, num_devices * FEW, M), normal(3, num_devices * FEW, M)
    sizes = np.array(
        [[1, 0, 8, 4, 0], [0, 0, 0, 0, 13], [0, 2, 1, 0, 6], [3, 3, 3, 3, 1]], np.int32
    )

    def layers(x_RM, w_YEMM, sizes_E):
        step = lambda x_RM, w_EMM: (grouped_product(x_RM, w_EMM, sizes_E), None)  # noqa: E731
        return jax.lax.scan(step, x_RM, w_YEMM)[0]

    mesh = jax.make_mesh((num_devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.shard_map(
        lambda x_RM, w_YEMM, sizes_1E: layers(x_RM, w_YEMM, sizes_1E[0]),
        mesh=mesh,
        in_specs=(jax.P("data"), jax.P(), jax.P("data")),
        out_specs=jax.P("data"),
        check_vma=False,
    )
    y_RM, back = jax.vjp(jax.jit(lambda x, w: split(x, w, sizes)), x_RM, w_YEMM)
    dx_RM, dw_YEMM = jax.jit(back)(dy_RM)

    wanted_dw_YEMM = np.zeros_like(w_YEMM)
    for device, sizes_E in enumerate(sizes):
        here = slice(device * FEW, (device + 1) * FEW)
        middle_RM = loop_product(x_RM[here], w_YEMM[0], sizes_E)
        np.testing.assert_allclose(
            y_RM[here], loop_product(middle_RM, w_YEMM[1], sizes_E), 1e-5, 1e-5
        )
        dmiddle_RM, dw_EMM = loop_product_gradients(middle_RM, w_YEMM[1], sizes_E, dy_RM[here])
        wanted_dw_YEMM[1] += dw_EMM
        wanted_dx_RM, dw_EMM = loop_product_gradients(x_RM[here], w_YEMM[0], sizes_E, dmiddle_RM)
        wanted_dw_YEMM[0] += dw_EMM
        np.testing.assert_allclose(dx_RM[here], wanted_dx_RM, 1e-5, 1e-5)
    np.testing.assert_allclose(dw_YEMM, wanted_dw_YEMM, 1e-5, 1e-5)


def test_unknown_and_missing_implementations_are_told():
    x_RM, _, group_sizes_E = rows_and_sizes("few, skewed")
    w_EMH = normal(1, E, M, H)
    with pytest.raises(UserError, match=r"one of \('auto', 'native', .*: got 'fast'"):
        grouped_product(x_RM, w_EMH, group_sizes_E, implementation="fast")
    if importlib.util.find_spec("tokamax") is None:
        with pytest.raises(UserError, match="got 'tokamax', which is not"):
            grouped_product(x_RM, w_EMH, group_sizes_E, implementation="tokamax")


@pytest.mark.parametrize("compiler", [True, False])
def test_auto_is_decided_by_the_platform_compiled_for(compiler, monkeypatch):
    if not compiler:
        monkeypatch.setattr(native, "missing", lambda: "there is no compiler")
    x_RM, _, group_sizes_E = rows_and_sizes("few, skewed")
    arrays = x_RM, normal(1, E, M, H), group_sizes_E
    programs = {
        platform: jax.jit(lambda *arrays: grouped_product(*arrays))  # traced anew
        .trace(*arrays)
        .lower(lowering_platforms=(platform,))
        .as_text()
        for platform in ("cpu", "cuda")
    }
    assert ("@moe_grouped_rows" in programs["cpu"]) == compiler
    assert ("stablehlo.while" in programs["cpu"]) != compiler
    assert "ragged_dot" not in programs["cpu"]
    assert "stablehlo.while" not in programs["cuda"]
    assert "@moe_grouped_rows" not in programs["cuda"]
    if importlib.util.find_spec("tokamax") is None:
        assert "ragged_dot" in programs["cuda"]


def test_auto_takes_blocks_for_other_numbers_than_float32():
    x_RM, _, group_sizes_E = rows_and_sizes("few, skewed")
    arrays = jnp.bfloat16(x_RM), jnp.bfloat16(normal(1, E, M, H)), group_sizes_E
    assert "stablehlo.while" in jax.jit(grouped_product).lower(*arrays).as_text()
    with pytest.raises(UserError, match="must be float32 for 'native': got bfloat16, bfloat16"):
        grouped_product(*arrays, implementation="native")


def test_less_work_is_cut_into_blocks_of_fewer_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SMALL_FLOPS", 1e8)
        patch.setattr(blocks, "LARGE_FLOPS", 2e10)
        counts = [len(blocks.block_sizes(6400, 64, num_flops=f)) for f in (1e7, 1e9, 1e11)]
        assert counts == [2, 5, 13]
        assert blocks.block_sizes(67, 5, num_flops=1e6) == [21, 7]  # 1.5 and 0.5 times 13.4


def test_products_of_small_work_are_those_of_a_loop_over_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SMALL_FLOPS", 1e8)
        x_RM, _, group_sizes_E = rows_and_sizes("skewed")
        w_EMH = normal(5, E, M, H)
        y_RH = jax.jit(partial(grouped_product, implementation="blocked"))(
            x_RM, w_EMH, group_sizes_E
        )
    np.testing.assert_allclose(y_RH, loop_product(x_RM, w_EMH, group_sizes_E), rtol=1e-5, atol=1e-6)
