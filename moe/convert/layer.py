"""A layer of ours from tensors of a family, and back."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe.convert.checks import Sizes, checked_sizes
from moe.convert.families import Convention, Family, Rule, convention_of
from moe.convert.files import Tensors, below, dotted
from moe.convert.fused import fuse, unfuse
from moe.errors import UserError
from moe.layers import FeedForward, MoE, SharedExperts

Layer = MoE | SharedExperts


def read_layer(
    tensors: Tensors,
    *,
    family: Family,
    prefix: str = "",
    router: Rule | None = None,
    **settings: Any,
) -> Layer:
    """Makes a layer that computes what the peer's layer with these weights computes.

    Args:
      tensors: arrays by name, float32, float16 or bfloat16, kept in their type. Gated experts may
        come in one array each, as in published checkpoints (`experts.0.w1.weight`), or in two for
        all, as transformers 5 holds them (`experts.gate_up_proj`, `experts.down_proj`).
      family: whose names and conventions they follow:
        "switch": top-1, the gate is the probability; ReLU. `SwitchTransformersSparseMLP`.
        "nllb-moe": top-2, the gates of the kept choices divided by their sum; ReLU with biases.
          `NllbMoeSparseMLP`.
        "mixtral": top-2 divided by their sum, dropless; SwiGLU. `MixtralSparseMoeBlock`.
        "qwen2-moe": top-4 as they come from the softmax, dropless; SwiGLU; a shared expert behind
          a sigmoid gate. `Qwen2MoeSparseMoeBlock`.
        "qwen3-moe": top-8 divided by their sum, dropless; SwiGLU. `Qwen3MoeSparseMoeBlock`.
      prefix: of the layer's names in a larger checkpoint, whose other names are passed over.
      router: another rule than the family's: what `read_rule` makes of a configuration, or one with
        the capacity you train with. Evaluation is dropless unless the rule says otherwise.
      settings: of `MoE`: dispatch, group_size, dtype, causal, output_masking; and activation, where
        it is not the family's.

    Returns:
      `SharedExperts` for "qwen2-moe", else `MoE`.

    Raises:
      UserError: an unknown family, names that are missing or unknown, another shape than the
        router's and the first expert's imply, another type.
    """
    convention = convention_of(family)
    tensors = unfuse(below(prefix, tensors), convention)
    sizes = checked_sizes(tensors, convention)
    # Shapes without values: nothing is drawn at random for what is overwritten below.
    layer = nnx.eval_shape(lambda: _build(convention, sizes, router, settings))
    for ours, variable in _parameters(layer, convention).items():
        theirs = convention.names[ours]
        if "{e}" in theirs:
            names = [theirs.format(e=e) for e in range(sizes.num_experts)]
            variable.set_value(jnp.asarray(np.stack([tensors[name].T for name in names])))
        else:
            variable.set_value(jnp.asarray(tensors[theirs].T))
    return layer


def write_layer(
    layer: Layer, *, family: Family, prefix: str = "", fused: bool = False
) -> dict[str, np.ndarray]:
    """The layer's weights by the family's names: the inverse of `read_layer`, to the bit.

    Args:
      layer: of the family's form, read or trained here.
      family: whose names to use.
      prefix: put before every name.
      fused: gated experts in two arrays for all, not in one each; see `read_layer`.

    Returns:
      Arrays by name, in the parameters' types.

    Raises:
      UserError: an unknown family, one whose experts have no fused form, or a layer with other
        parameters than the family has names for.
    """
    convention = convention_of(family)
    if fused and not convention.gated:
        raise UserError(
            f"fused must be False where experts are not gated: got True for {family!r}. Leave it out."
        )
    tensors: Tensors = {}
    for ours, variable in _parameters(layer, convention).items():
        theirs, value = convention.names[ours], np.asarray(variable[...])
        if "{e}" in theirs:
            tensors |= {theirs.format(e=e): part.T for e, part in enumerate(value)}
        else:
            tensors[theirs] = value.T
    if fused:
        num_experts = len(tensors[convention.names["router.kernel_ME"]])
        tensors = fuse(tensors, convention, num_experts)
    return {dotted(prefix) + name: np.ascontiguousarray(v) for name, v in tensors.items()}


def _build(
    convention: Convention, sizes: Sizes, rule: Rule | None, settings: dict[str, Any]
) -> Layer:
    settings = {"activation": convention.activation} | settings
    rngs = nnx.Rngs(0)
    layer = MoE(
        sizes.d_model,
        sizes.d_hidden,
        sizes.num_experts,
        router=rule or convention.rule,
        gated=convention.gated,
        use_bias="experts.bi_EH" in convention.names,
        rngs=rngs,
        **settings,
    )
    if not sizes.d_shared:
        return layer
    ffn = FeedForward(
        sizes.d_model,
        sizes.d_shared,
        activation=settings["activation"],
        gated=True,
        dtype=settings.get("dtype"),
        rngs=rngs,
    )
    return SharedExperts(layer, ffn, gated=True, rngs=rngs)


def _parameters(layer: Layer, convention: Convention) -> dict[str, nnx.Variable]:
    """The layer's parameters by our names; an error unless they are those of the family."""
    found = {
        ".".join(map(str, path)).removeprefix("moe."): node
        for path, node in nnx.iter_graph(layer)
        if isinstance(node, nnx.Variable)
    }
    if found.keys() != convention.names.keys():
        extra, missing = found.keys() - convention.names, convention.names.keys() - found.keys()
        raise UserError(
            f"layer must have the parameters of its family: got {sorted(extra)} too many, "
            f"{sorted(missing)} missing. Choose the family and the rule that it was made for."
        )
    return found
