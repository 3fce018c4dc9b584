"""The token-choice routers behind one signature, compiled once for each shape and set of options."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from moe.routing.noisy_top_k import noisy_top_k
from moe.routing.sigmoid_top_k import sigmoid_top_k
from moe.routing.top1 import top1
from moe.routing.top_k import top_k


def _top1(logits_GSE, **options):
    return top1(logits_GSE, **_without(options, "bias_E", "num_choices", "key"))


def _top_k(gates, logits_GSE, **options):
    return top_k(logits_GSE, gates=gates, **_without(options, "bias_E", "key"))


def _noisy(logits_GSE, *, key, **options):
    # The noise is softplus(-40) = 4e-18 of a standard normal number: it changes no float32.
    noise_logits_GSE = jax.numpy.full(logits_GSE.shape, -40.0)
    return noisy_top_k(logits_GSE, noise_logits_GSE, key=key, **_without(options, "bias_E"))


def _sigmoid(logits_GSE, *, bias_E, **options):
    return sigmoid_top_k(logits_GSE, bias_E, scale=2.5, **_without(options, "key"))


def _without(options: dict, *names: str) -> dict:
    return {name: value for name, value in options.items() if name not in names}


_FUNCTIONS = {
    "top1": _top1,
    "probabilities": partial(_top_k, "softmax_then_top_k"),
    "renormalized": partial(_top_k, "renormalized"),
    "over_selected": partial(_top_k, "softmax_over_selected"),
    "noisy": _noisy,
    "sigmoid": _sigmoid,
}
_COMPILED = {
    name: jax.jit(
        function,
        static_argnames=(
            "num_choices",
            "capacity",
            "slot_rule",
            "batch_priority",
            "renormalize_after_drop",
        ),
    )
    for name, function in _FUNCTIONS.items()
}
METHODS = tuple(_FUNCTIONS)


def route(method: str, logits_GSE, *, num_choices: int = 3, bias_E=None, **options):
    """The plan by one of METHODS; `bias_E` is read by "sigmoid" alone."""
    if bias_E is None:
        bias_E = np.zeros(logits_GSE.shape[-1], np.float32)
    options |= {"num_choices": num_choices, "bias_E": bias_E, "key": jax.random.key(0)}
    return _COMPILED[method](logits_GSE, **options)
