"""More or fewer experts in a trained layer: split the busiest, drop or merge the least used.

All take the MoE layer of any module (`model.ffn`, or `model.decoder.pairs.sparse.ffn` with its
leading dimension Y of stacked layers) and return a new one; the old one is untouched. What belongs to
an expert is found by its name: E stands where the name says, in `wi_EMH` as in `kernel_ME`, so that
the router's columns follow their experts.

Letters beside the project's key: F experts after the change, X what is left of an array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe.errors import UserError
from moe.layers import ConditionalMoE, MoE, ResidualMoE, Router, Rule, SharedExperts
from moe.layers.routers.override import RouterWithout
from moe.models import Transformer
from moe.upcycle.dense import check_noise, noisy

Layer: TypeAlias = MoE | SharedExperts | ResidualMoE | ConditionalMoE


def grow_experts(
    layer: Layer,
    num_experts: int,
    load: Any = None,
    *,
    router: Rule | None = None,
    noise: float = 0.0,
    rngs: nnx.Rngs | None = None,
) -> Layer:
    """Makes a layer with more experts: copies of the busiest, each with a copy of its router column.

    The copies are handed out one by one, each to the expert with the largest load a copy, and stand
    behind the old experts, which keep their places.

    In evaluation without drops a token gets what it got, up to rounding, if
    - there is no load and F = r E, and `router` is `TopK` with r K choices where the old one had K:
      it goes to all r copies of its experts, whatever the gates convention; or
    - gates are divided by their sum, and it chose no expert that was split, or only as its last
      choice. With K = 1 that is every token.
    Else equal logits let it choose two copies of one expert in place of two experts. Where gates are
    probabilities (Top1, `gates="softmax_then_top_k"`) copies share an expert's, and gates shrink.

    Args:
      layer: with a learned column for each expert (`kernel_ME`) and no groups of experts.
      num_experts: F, larger than E.
      load: how busy each expert is, E numbers (YE for stacked layers) from 0, as `assigned_E` of the
        layer's statistics. None: all the same.
      router: another rule for the new layer, with the same parameters; None keeps the old one.
      noise: as in `upcycle`, on all that the copies have; the old experts stay. Without it a tie
        always goes to the old one, and only a loss on the router's probabilities parts them.
      rngs: the stream "params" is read for the noise.

    Raises:
      UserError: no more experts than there are, a load that does not fit, noise without rngs, or a
        router without columns or with groups.
    """
    load_E = _checked_load(layer, load)
    num_old = load_E.shape[-1]
    if num_experts <= num_old:
        raise UserError(
            f"num_experts must be larger than the layer's: got {num_experts}, it has {num_old}. "
            "Use merge_experts or prune_experts for fewer."
        )
    check_noise(noise)
    if noise > 0 and rngs is None:
        raise UserError(f"rngs must be given for noise: got None, noise={noise}. Pass nnx.Rngs(0).")
    source_F = _for_each(lambda load_E: _split_busiest(load_E, num_experts), load_E)

    def copy(x_EX: jax.Array) -> jax.Array:
        x_FX = _taken(x_EX, source_F)
        old, copies = jnp.split(x_FX, [num_old], axis=source_F.ndim - 1)
        each = tuple(range(source_F.ndim, x_FX.ndim))  # the dimensions of one expert's array
        if rngs is None or not each:
            return x_FX
        return jnp.concatenate([old, noisy(copies, noise, rngs, each)], axis=source_F.ndim - 1)

    return _changed(layer, copy, router)


def prune_experts(layer: Layer, load: Any, keep: int, *, router: Rule | None = None) -> Layer:
    """Makes a layer of the `keep` experts with the largest load, in their old order.

    Every token is routed as by the rule `Without(experts=those dropped)`: what had chosen a dropped
    expert goes to its next best. With gates divided by their sum all other tokens get what they got.

    Args:
      layer: as for `grow_experts`.
      load: how busy each expert is, E numbers (YE for stacked layers) from 0. Of equal ones the
        first are kept.
      keep: F, less than E and at least 2 and the rule's number of choices.
      router: another rule for the new layer, with the same parameters; None keeps the old one.

    Raises:
      UserError: a number out of range, a load that does not fit, a router without columns or with
        groups.
    """
    load_E = _checked_load(layer, load)
    _check_fewer("keep", keep, load_E.shape[-1])
    busiest_E = np.argsort(-load_E, axis=-1, kind="stable")
    source_F = np.sort(busiest_E[..., :keep], axis=-1)
    return _changed(layer, lambda x_EX: _taken(x_EX, source_F), router)


def merge_experts(layer: Layer, load: Any, into: int, *, router: Rule | None = None) -> Layer:
    """Makes a layer of `into` experts: again and again the least used joins the one most like it.

    Alike is by the cosine of all their weights. Both become their average weighed by load (even
    averages where nothing was used), the router's columns too: a token's new logit is the average of
    its two. That is less than their probabilities together would have, so a merged expert wins a
    little less often than its two parts did.

    Merging exact copies is exact: it undoes `grow_experts`. Experts that began as copies of one FFN,
    as after `upcycle`, average well. Those initialised apart have hidden units in no common order,
    whose average is neither: use `prune_experts`.

    Args:
      layer: as for `grow_experts`.
      load: how busy each expert is, E numbers (YE for stacked layers) from 0.
      into: F, less than E and at least 2 and the rule's number of choices.
      router: another rule for the new layer, with the same parameters; None keeps the old one.

    Raises:
      UserError: as `prune_experts`.

    Source: the load-weighted average of Li et al. 2023, Merge, Then Compress (arXiv:2310.01334), who
    align hidden units first and group by the likeness of router logits; we by that of the weights.
    """
    load_E = _checked_load(layer, load)
    _check_fewer("into", into, load_E.shape[-1])
    products_EE = _products(layer, load_E.shape)
    mix_FE = _for_each(
        lambda load_E, products_EE: _merge_least(load_E, products_EE, into), load_E, products_EE
    )

    def average(x_EX: jax.Array) -> jax.Array:
        flat_EX = x_EX.astype(jnp.float32).reshape(*load_E.shape, -1)
        flat_FX = jnp.matmul(mix_FE, flat_EX, precision=jax.lax.Precision.HIGHEST)
        return flat_FX.reshape(*mix_FE.shape[:-1], *x_EX.shape[load_E.ndim :]).astype(x_EX.dtype)

    return _changed(layer, average, router)


def resize_model(
    model: Transformer,
    num_experts: int,
    loads: Mapping[str, Any],
    *,
    fewer: Literal["merge", "prune"] = "merge",
    noise: float = 0.0,
    rngs: nnx.Rngs | None = None,
) -> Transformer:
    """Makes a Transformer with another number of experts in every MoE layer, by the rules above.

    Args:
      model: with experts.
      num_experts: F of every layer; the model's own number gives an equal model.
      loads: by stack the load, YE: `{name: s.assigned_E for name, s in stats.items()}` of what a call
        of the model returned.
      fewer: what happens where there are too many.
      noise: as in `grow_experts`, with `rngs`.

    Raises:
      UserError: a dense model, a stack without its load, and as the rules.
    """
    if not model.config.num_experts or loads.keys() != {"encoder", "decoder"}:
        raise UserError(
            f"loads must be those of the encoder and the decoder of a model with experts: got "
            f"{sorted(loads)}, num_experts={model.config.num_experts}. See upcycle_model for a dense one."
        )
    new = nnx.merge(*nnx.split(model))
    new.config = dataclasses.replace(model.config, num_experts=num_experts)
    for stack, load_YE in loads.items():
        sparse = getattr(new, stack).pairs.sparse
        if num_experts > model.config.num_experts:
            sparse.ffn = grow_experts(sparse.ffn, num_experts, load_YE, noise=noise, rngs=rngs)
        elif num_experts < model.config.num_experts:
            shrink = merge_experts if fewer == "merge" else prune_experts
            sparse.ffn = shrink(sparse.ffn, load_YE, num_experts)
    return new


def _split_busiest(load_E: np.ndarray, num_experts: int) -> np.ndarray:
    """source_F: which old expert each new one is; the old ones first."""
    copies_E = np.ones(len(load_E))
    source = list(range(len(load_E)))
    while len(source) < num_experts:
        source.append(int(np.argmax(load_E / copies_E)))
        copies_E[source[-1]] += 1
    return np.array(source)


def _merge_least(load_E: np.ndarray, products_EE: np.ndarray, into: int) -> np.ndarray:
    """mix_FE: the share of each old expert in each new one."""
    load, mix = list(load_E), list(np.eye(len(load_E)))
    while len(mix) > into:
        mixed = np.stack(mix)
        products = mixed @ products_EE @ mixed.T
        norms = np.sqrt(np.maximum(np.diag(products), np.finfo(np.float32).tiny))
        least = int(np.argmin(load))
        likeness = products[least] / norms
        likeness[least] = -np.inf
        keep, gone = sorted((least, int(np.argmax(likeness))))
        total = load[keep] + load[gone]
        share = load[gone] / total if total > 0 else 0.5
        mix[keep] = (1 - share) * mix[keep] + share * mix[gone]
        load[keep] = total
        del mix[gone], load[gone]
    return np.stack(mix).astype(np.float32)


def _products(layer: Layer, shape: tuple[int, ...]) -> np.ndarray:
    """products_EE: the inner product of all weights of two experts, in the layers of `shape`."""
    products = np.zeros((*shape, shape[-1]))
    for x in jax.tree.leaves(nnx.state(_moe(layer).experts)):  # E is first in every name
        x_EX = jnp.asarray(x, jnp.float32).reshape(*shape, -1)
        gram_EE = jnp.matmul(x_EX, x_EX.mT, precision=jax.lax.Precision.HIGHEST)
        products += np.asarray(gram_EE)
    return products


def _changed(layer: Layer, change: Callable[[jax.Array], jax.Array], rule: Rule | None) -> Layer:
    """A layer in which `change` (from E X to F X) was done to all that belongs to experts."""
    graph, state = nnx.split(layer)

    def one(path, variable: nnx.Variable) -> nnx.Variable:
        letters = path[-1].key.rpartition("_")[2]
        if not letters.isupper() or "E" not in letters:
            return variable
        first, place = -len(letters), letters.index("E") - len(letters)
        new = change(jnp.moveaxis(variable[...], place, first))
        return variable.replace(jnp.moveaxis(new, first, place))

    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    new = nnx.merge(graph, jax.tree_util.tree_map_with_path(one, state, is_leaf=is_variable))
    router = _moe(new).router
    assert isinstance(router, Router)  # as of the old layer
    num_experts = router.kernel_ME.shape[-1]
    if rule is not None:
        kind = type(nnx.eval_shape(lambda: rule.router(2, num_experts, rngs=nnx.Rngs(0))))
        if kind is not type(router):
            raise UserError(
                f"router must have the parameters of the layer's: got {type(rule).__name__} for one "
                f"trained with {type(router.rule).__name__}. Use a rule of the same kind."
            )
        router.rule = rule
    _check_rule(router.rule, num_experts)
    return new


def _taken(x_EX: jax.Array, source_F: np.ndarray) -> jax.Array:
    index = source_F.reshape(*source_F.shape, *(1,) * (x_EX.ndim - source_F.ndim))
    return jnp.take_along_axis(x_EX, index, axis=source_F.ndim - 1)


def _for_each(function: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """The function of the arrays of one layer, for each of those stacked along Y, if any."""
    load_E = arrays[0]
    if load_E.ndim == 1:
        return function(*arrays)
    return np.stack([_for_each(function, *of_one) for of_one in zip(*arrays, strict=True)])


def _moe(layer: Layer) -> MoE:
    return layer if isinstance(layer, MoE) else layer.moe


def _checked_load(layer: Layer, load: Any) -> np.ndarray:
    """The load in float64, ones if there is none, after a look at the layer."""
    router = _moe(layer).router
    if not isinstance(router, Router) or isinstance(router, RouterWithout):
        raise UserError(
            f"router must have a column for each expert, kernel_ME: got {type(router).__name__}. "
            "Use a layer whose rule learns one, as Top2 or TopK."
        )
    shape = router.kernel_ME.shape[:-2] + router.kernel_ME.shape[-1:]
    load_E = np.ones(shape) if load is None else np.asarray(load, np.float64)
    if load_E.shape != shape or not (np.isfinite(load_E) & (load_E >= 0)).all():
        raise UserError(
            f"load must be a number from 0 for each expert, of shape {shape}: got {load_E.shape}, "
            f"least {load_E.min(initial=0):g}. Use assigned_E of the statistics of this layer."
        )
    return load_E


def _check_fewer(name: str, num_experts: int, num_old: int) -> None:
    if not 2 <= num_experts < num_old:
        raise UserError(
            f"{name} must be at least 2 and less than the layer's experts: got {num_experts}, it has "
            f"{num_old}. Use grow_experts for more."
        )


def _check_rule(rule: Rule, num_experts: int) -> None:
    num_choices = getattr(rule, "num_choices", 1)
    if num_choices > num_experts:
        raise UserError(
            f"num_experts must be at least the rule's num_choices, {num_choices}: got {num_experts}. "
            "Keep more experts, or pass router= with fewer choices."
        )
    num_groups = getattr(rule, "num_expert_groups", 1)
    if num_groups > 1:
        raise UserError(
            f"router must have no groups of experts: got num_expert_groups={num_groups}, where an "
            "expert's place matters. Pass router= with one group."
        )
