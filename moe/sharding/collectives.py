"""Reading the communication out of a compiled program."""

from __future__ import annotations

import collections
import re

import jax

_COLLECTIVE = re.compile(
    r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)


def count_collectives(compiled: jax.stages.Compiled) -> collections.Counter[str]:
    """How many collectives of each kind a compiled program contains.

    Args:
      compiled: `jax.jit(f).lower(*args).compile()`.

    Returns:
      Counter by HLO name, such as {"all-to-all": 2}. One inside a loop counts once.
    """
    return collections.Counter(_COLLECTIVE.findall(compiled.as_text() or ""))
