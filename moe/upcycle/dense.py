"""Sparse upcycling: every expert starts as a copy of a trained dense FFN, under a fresh router.

Where the gates of a token sum to 1 and nothing is dropped, the sum of its experts is then the dense
FFN, whoever they are: Top2, TopK (unless gates="softmax_then_top_k"), NoisyTopK, SigmoidTopK (scale 1),
TwoLevel, TaskRouting and Hash in evaluation, without `output_masking`. Top1, Sinkhorn and ExpertChoice
weigh the same output by another sum of gates, and Soft mixes tokens before the FFN.

In training the gates also sum to 1 with `capacity_factor=None` and a second expert that is always kept,
or with `renormalize_after_drop=True`, but for tokens that lose every expert.

Source: Komatsuzaki et al. 2022, Sparse Upcycling (arXiv:2212.05055).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moe.errors import UserError
from moe.layers import FeedForward, MoE, Rule, Top2
from moe.models import Transformer, TransformerConfig

# What may differ between a dense model's configuration and the upcycled one's: no shape but E's.
MAY_DIFFER = {
    "num_experts",
    "d_expert",
    "router",
    "decoder_router",
    "dispatch",
    "group_size",
    "output_masking",
    "dropout",
    "dtype",
}


def upcycle(
    ffn: FeedForward | Mapping[str, jax.Array],
    num_experts: int,
    *,
    router: Rule = Top2(),  # noqa: B008  (frozen)
    noise: float = 0.0,
    rngs: nnx.Rngs,
    **settings: Any,
) -> MoE:
    """Makes an MoE layer whose experts are copies of a dense FFN.

    Args:
      ffn: the trained layer; or, from any model, its arrays `wi_MH` and `wo_HM`, with `wg_MH` if it
        is gated, (act(x wg) * (x wi)) wo, and with all of `bi_H`, `bo_M` (and `bg_H`) if it has biases.
      num_experts: E, at least 2.
      router: the routing rule, whose router is new. The layer computes what the FFN does if gates
        sum to 1; see the top of this file.
      noise: standard deviation of what is added to the copies' kernels, in units of a kernel's root
        mean square. Without it the copies differ only by what they learn, which is enough: the paper
        found noise to be of no help.
      rngs: the stream "params" is read.
      settings: other arguments of `MoE`, as `dispatch` and `group_size`. `activation` and `dtype` are
        those of a `FeedForward`; beside arrays the default is ReLU.

    Returns:
      The layer. Its experts are equal, so that without noise the first gradient of the router comes
      from its own losses alone.

    Raises:
      UserError: arrays that are missing, unknown or do not fit, negative noise, and as `MoE`.
    """
    if isinstance(ffn, FeedForward):
        settings = {"activation": ffn.activation, "dtype": ffn.dtype} | settings
        names = ("wi_MH", "wg_MH", "wo_HM", "bi_H", "bg_H", "bo_M")
        ffn = {name: getattr(ffn, name)[...] for name in names if getattr(ffn, name) is not None}
    check_noise(noise)
    _check_arrays(ffn)
    d_model, d_hidden = ffn["wi_MH"].shape

    def make() -> MoE:
        return MoE(
            d_model,
            d_hidden,
            num_experts,
            router=router,
            gated="wg_MH" in ffn,
            use_bias="bi_H" in ffn,
            rngs=nnx.Rngs(0),
            **settings,
        )

    layer = nnx.eval_shape(make)  # no numbers are drawn for experts that are overwritten
    layer.router = router.router(d_model, num_experts, rngs=rngs)
    for name in nnx.state(layer.experts):
        array = jnp.asarray(ffn[dense_name(name)])
        getattr(layer.experts, name).set_value(_copies(array, name, num_experts, noise, rngs))
    return layer


def upcycle_config(config: TransformerConfig, num_experts: int) -> TransformerConfig:
    """The configuration of a dense model with experts, as wide as the FFNs that they come from."""
    return dataclasses.replace(config, num_experts=num_experts, d_expert=2 * config.expert_width)


def upcycle_model(
    model: Transformer,
    config: TransformerConfig,
    *,
    noise: float = 0.0,
    rngs: nnx.Rngs,
) -> Transformer:
    """Makes a Transformer with experts of a dense one: every other FFN is copied to the experts.

    Args:
      model: trained with num_experts=0.
      config: as `upcycle_config` makes it, maybe with another rule; see the top of this file.
      noise: as in `upcycle`.
      rngs: the stream "params" is read.

    Returns:
      The model; all but experts and routers is that of `model`.

    Raises:
      UserError: a model that has experts, or a configuration of other shapes.
    """
    check_noise(noise)
    _check_config(model.config, config)
    key = rngs.params()

    def create(old: nnx.State) -> tuple[nnx.GraphDef, nnx.State]:
        rngs = nnx.Rngs(key)
        graph, new = nnx.split(Transformer(config, rngs=rngs))
        known = dict(nnx.to_flat_state(old))

        def one(path, variable: nnx.Variable) -> nnx.Variable:
            *place, name = (part.key for part in path)
            if (*place, name) in known:
                return known[*place, name]
            if place[-1] == "experts":
                ffn = known[*place[:-1], dense_name(name)]
                return variable.replace(_copies(ffn[...], name, config.num_experts, noise, rngs))
            return variable  # of a router

        is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
        return graph, jax.tree_util.tree_map_with_path(one, new, is_leaf=is_variable)

    return nnx.merge(*jax.jit(create)(nnx.state(model)))


def dense_name(name: str) -> str:
    """What an array of the experts is called in one FFN: wi_MH for wi_EMH."""
    return name.replace("_E", "_")


def check_noise(noise: float) -> None:
    """Raises a UserError below 0."""
    if not noise >= 0:
        raise UserError(f"noise must not be negative: got {noise}. Use 0 for exact copies.")


def _copies(x: jax.Array, name: str, num_experts: int, noise: float, rngs: nnx.Rngs) -> jax.Array:
    """x once for each expert, E where `name` says; there may be more dimensions in front."""
    letters = name.rpartition("_")[2]
    x_E = jnp.repeat(jnp.expand_dims(x, -len(letters)), num_experts, axis=-len(letters))
    return noisy(x_E, noise, rngs) if len(letters) == 3 else x_E


def noisy(
    kernel: jax.Array, noise: float, rngs: nnx.Rngs, dims: tuple[int, ...] = (-2, -1)
) -> jax.Array:
    """The kernel with normal noise, relative to the root mean square over `dims`."""
    if noise == 0:
        return kernel
    scale = noise * jnp.sqrt(jnp.mean(jnp.square(kernel), axis=dims, keepdims=True))
    return kernel + scale * jax.random.normal(rngs.params(), kernel.shape, kernel.dtype)


def _check_arrays(ffn: Mapping[str, jax.Array]) -> None:
    wanted = {"wi_MH", "wo_HM"} | ({"wg_MH"} & ffn.keys())
    if ffn.keys() & {"bi_H", "bg_H", "bo_M"}:
        wanted |= {"bi_H", "bo_M"} | ({"bg_H"} if "wg_MH" in ffn else set())
    if ffn.keys() != wanted:
        raise UserError(
            f"ffn must hold wi_MH and wo_HM, wg_MH if gated, and all biases or none: got "
            f"{sorted(ffn)}, not {sorted(wanted)}. Use zeros for a bias that there is not."
        )
    shape = jnp.shape(ffn["wi_MH"])
    sizes = dict(zip("MH", shape, strict=False))
    for name, array in ffn.items():
        expected = tuple(sizes.get(letter) for letter in name.rpartition("_")[2])
        if len(shape) != 2 or jnp.shape(array) != expected:
            raise UserError(
                f"{name} must have the dimensions of its name: got {jnp.shape(array)} with wi_MH of "
                f"{shape}. Transpose it, or reshape it to them."
            )


def _check_config(old: TransformerConfig, new: TransformerConfig) -> None:
    if old.num_experts:
        raise UserError(
            f"model must be dense: got num_experts={old.num_experts}. "
            "Use grow_experts for more experts."
        )
    if new.num_experts < 2:
        raise UserError(f"model.num_experts must be at least 2: got {new.num_experts}. Raise it.")
    if new.expert_width != 2 * old.expert_width:
        raise UserError(
            f"model.d_expert must be the width of the dense FFN, {2 * old.expert_width}: got "
            f"{new.expert_width}. Set it, or make the configuration with upcycle_config."
        )
    if new.beside != "none":
        raise UserError(
            f'model.beside must be "none" to compute what the dense model does: got {new.beside!r}. '
            "Leave it out."
        )
    for field in dataclasses.fields(TransformerConfig):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if field.name not in MAY_DIFFER | {"beside"} and before != now:
            raise UserError(
                f"model.{field.name} must be that of the dense model: got {now!r}, not {before!r}. "
                "Make the configuration with upcycle_config."
            )
