"""What every case of a section computes on: the same tokens, the same router, the same sizes."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import numpy as np

TOP_K = 2  # experts of a token, in every case that is not Switch


class Arrays(NamedTuple):
    """Float32 arrays that every case starts from."""

    x_NM: np.ndarray
    kernel_ME: np.ndarray
    cotangent_NM: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One section of the benchmark: the sizes, and where they run."""

    tokens: int
    """N."""
    d_model: int
    """M."""
    d_hidden: int
    """H of one expert; the dense layer has 2 H, the same active FLOPs."""
    num_experts: int
    """E."""
    dtype: Literal["float32", "bfloat16"]
    """Type of tokens and expert weights; routing is float32."""
    device: Literal["cpu", "gpu"]
    """Where it runs."""
    threads: int
    """Cores that the process may use; means nothing on a GPU."""
    training: bool
    """Forward and forward + backward as in training, or the forward pass of decoding."""
    skew: float
    """Spread over the experts of what all tokens add to their logits, in units of a token's own."""
    capacity_factor: float
    """Of the back-ends that have a capacity in training."""
    group_size: int
    """S of the same back-ends."""
    seed: int = 0
    """Of tokens and weights."""

    def describe(self) -> str:
        """The section in a few words."""
        where = "GPU" if self.device == "gpu" else f"{self.threads} thread(s)"
        mode = "training" if self.training else "decoding"
        return f"{mode}, {self.tokens} tokens, {self.num_experts} experts, {where}"

    def arrays(self) -> Arrays:
        """Tokens, router kernel and the gradient of the output.

        With a skew the tokens share a mean. It moves the logits of all of them alike, so a few experts
        are popular, as in text, where most tokens have something in common.
        """
        rng = np.random.default_rng(self.seed)
        shape = (self.tokens, self.d_model)
        x_NM = rng.standard_normal(shape, np.float32)
        x_NM += self.skew * rng.standard_normal(self.d_model, np.float32)
        kernel_ME = rng.standard_normal((self.d_model, self.num_experts), np.float32)
        cotangent_NM = rng.standard_normal(shape, np.float32)
        return Arrays(x_NM, kernel_ME / np.float32(np.sqrt(self.d_model)), cotangent_NM)

    def busiest(self) -> float:
        """Assignments of the busiest expert over the mean: 1 when balanced, E / 2 when collapsed."""
        arrays = self.arrays()
        expert_NK = np.argsort(arrays.x_NM @ arrays.kernel_ME, axis=1)[:, -TOP_K:]
        load_E = np.bincount(expert_NK.ravel(), minlength=self.num_experts)
        return float(load_E.max() / load_E.mean())

    def forward_flops(self, gated: bool) -> float:
        """Multiplications and additions of the matrix products with the experts of each token."""
        products = 3 if gated else 2
        return 2.0 * products * self.tokens * self.d_model * TOP_K * self.d_hidden
