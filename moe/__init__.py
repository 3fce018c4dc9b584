"""Sparsely-gated Mixture-of-Experts on JAX and Flax, after GShard (arXiv:2006.16668).

The rooms, from the ground up: `moe.routing` (pure functions), `moe.sharding` (annotations),
`moe.layers` and `moe.models` (Flax NNX), `moe.data`, `moe.training`, `moe.decoding`,
`moe.evaluation`, `moe.analysis`, and the command `moe`. Importing this package imports none of them.
"""

from __future__ import annotations

__version__ = "0.1.0"
