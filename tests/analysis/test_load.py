import numpy as np
import pytest

from moe.analysis import collect_load
from moe.errors import UserError


def test_batches_of_a_direction_add_up(stats):
    load = collect_load(
        [
            ("en-de", {"decoder": stats([[2, 4, 0], [1, 1, 4]])}),
            ("de-en", {"decoder": stats([[0, 2, 2], [2, 1, 1]])}),
            ("en-de", {"decoder": stats([[1, 1, 0], [0, 2, 0]])}),
        ]
    )["decoder"]
    assert load.rows == ("en-de", "de-en")
    assert load.assigned_RYE.tolist() == [[[3, 5, 0], [1, 3, 4]], [[0, 2, 2], [2, 1, 1]]]
    assert load.num_tokens_RY.tolist() == [[4, 4], [2, 2]]  # half of 8 and of 4 choices
    np.testing.assert_allclose(load.share_RYE[0, 0], [3 / 8, 5 / 8, 0])
    # both directions together: [3, 7, 2] of 12 in layer 0
    np.testing.assert_allclose(load.total.share_RYE[0, 0], [3 / 12, 7 / 12, 2 / 12])


def test_means_weigh_tokens_and_not_batches(stats):
    load = collect_load(
        [
            ("en-de", {"encoder": stats([[6, 6]], mean_prob_YE=[[0.5, 0.5]], entropy=0.6)}),
            ("en-de", {"encoder": stats([[2, 2]], mean_prob_YE=[[0.9, 0.1]], entropy=0.2)}),
        ]
    )["encoder"]
    # 6 and 2 tokens: (6 * 0.5 + 2 * 0.9) / 8 = 0.6, (6 * 0.6 + 2 * 0.2) / 8 = 0.5
    np.testing.assert_allclose(load.mean_prob_RYE[0, 0], [0.6, 0.4], rtol=1e-6)
    assert load.mean_entropy_RY[0, 0] == pytest.approx(0.5 / np.log(2))


def test_drop_rate_counts_choices_without_a_slot(stats):
    load = collect_load([("en-de", {"decoder": stats([[6, 2]], kept_YE=[[3, 2]])})])["decoder"]
    assert load.drop_rate_RY[0, 0] == pytest.approx(3 / 8)


def test_a_batch_of_padding_changes_nothing(stats):
    real = ("en-de", {"decoder": stats([[2, 4, 0]])})
    padding = stats([[0, 0, 0]], mean_prob_YE=[[np.nan] * 3], entropy=np.nan)
    alone = collect_load([real])["decoder"]
    padded = collect_load([real, ("en-de", {"decoder": padding})])["decoder"]
    np.testing.assert_array_equal(alone.mean_prob_RYE, padded.mean_prob_RYE)
    np.testing.assert_array_equal(alone.mean_entropy_RY, padded.mean_entropy_RY)


def test_counts_do_not_overflow_int32(stats):
    huge = stats([[2**30, 2**30]])
    load = collect_load([("en-de", {"decoder": huge})] * 4)["decoder"]
    assert load.total.assigned_RYE.tolist() == [[[2**32, 2**32]]]


def test_stacks_may_differ_in_layers_and_experts(stats):
    loads = collect_load([("en-de", {"encoder": stats([[1, 1]]), "decoder": stats([[1] * 3] * 2)})])
    assert {name: (x.num_layers, x.num_experts) for name, x in loads.items()} == {
        "encoder": (1, 2),
        "decoder": (2, 3),
    }


def test_merged_rows_are_sums_named_by_their_first(stats):
    load = collect_load([(f"d{n}", {"s": stats([[n, 1]])}) for n in range(5)])["s"]
    merged = load.merged([0, 2, 4])
    assert merged.rows == ("d0", "d2", "d4")
    assert merged.assigned_RYE[:, 0].tolist() == [[1, 2], [5, 2], [4, 1]]


@pytest.mark.parametrize("batches", [[], ["padding"]])
def test_no_token_is_a_user_error(stats, batches):
    empty = [("en-de", {"decoder": stats([[0, 0]])}) for _ in batches]
    with pytest.raises(UserError, match=r"at least one token: got none\. Use a split"):
        collect_load(empty)


def test_a_dense_model_is_a_user_error(stats):
    no_layers = stats(np.zeros((0, 0)))
    with pytest.raises(UserError, match="must have MoE layers: got none in encoder"):
        collect_load([("en-de", {"encoder": no_layers})])


def test_statistics_of_a_real_layer_are_understood():
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from moe.layers import MoE

    layer = MoE(8, 16, 3, rngs=nnx.Rngs(0))
    x_BLM = jax.random.normal(jax.random.key(1), (2, 7, 8))
    mask_BL = jnp.arange(7) < jnp.array([[7], [4]])
    _, found = layer(x_BLM, token_mask_BL=mask_BL)
    load = collect_load([("en-de", {"encoder": jax.tree.map(lambda x: x[None], found)})])["encoder"]
    assert load.num_tokens_RY.tolist() == [[11]]
    assert load.assigned_RYE.sum() == load.kept_RYE.sum() == 2 * 11
    assert load.mean_prob_RYE.sum() == pytest.approx(1, abs=1e-5)
    assert 0 < load.mean_entropy_RY[0, 0] <= 1
