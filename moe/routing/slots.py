"""Ragged groups in slots on a CPU: the first rows of every expert as one batched product.

With tens of rows for each expert, copying weights out of their stack and gradients into it takes a third
of the time of blocks (`moe.routing.blocks`); a batched product does neither. Rows without a slot remain
for blocks. A slot holds a row as a column, x_EMC: XLA multiplies such operands fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from moe.routing import blocks

MANY_ROWS = 128  # of an expert: from here the copies that slots save are few beside the products

Result = TypeVar("Result")


def worth_slots(num_rows: int, num_experts: int, num_flops: float) -> bool:
    """Whether slots are the faster form; there are then exactly as many slots as rows."""
    if 0 in (num_rows, num_experts) or num_rows % num_experts or num_flops < blocks.LARGE_FLOPS:
        return False
    return blocks.FEW_ROWS < num_rows // num_experts <= MANY_ROWS


class Slots:
    """The place of the first rows of every group, each in its own slot.

    Where less than half of the slots would be taken (a load far from balanced, or few rows of many that
    there could be), none is: then `number`, the slots that each expert uses, is 0.
    """

    def __init__(self, group_sizes_E: jax.Array, num_rows: int):
        self.size = num_rows // len(group_sizes_E)
        num_taken = jnp.sum(jnp.minimum(group_sizes_E, self.size))
        self.used = 2 * num_taken >= self.size * len(group_sizes_E)
        self.number = jnp.where(self.used, self.size, 0)
        ends_E = jnp.cumsum(group_sizes_E)
        nth_C = jnp.arange(self.size)
        row_EC = (ends_E - group_sizes_E)[:, None] + nth_C
        self.row_EC = jnp.where(nth_C < group_sizes_E[:, None], row_EC, num_rows)
        row_R = jnp.arange(num_rows)
        expert_R = jnp.searchsorted(ends_E, row_R, side="right")
        nth_R = row_R - jnp.append(0, ends_E)[expert_R]
        num_slots = self.row_EC.size
        slotted_R = (nth_R < self.size) & (expert_R < len(group_sizes_E))
        self.slot_R = jnp.where(slotted_R, expert_R * self.size + nth_R, num_slots)

    def compute(self, function: Callable[[], Result]) -> Result:
        """What the function returns, or zeros if the slots are not used."""

        def zeros():
            shapes = jax.eval_shape(function)
            return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

        return lax.cond(self.used, function, zeros)

    def take(self, x_RM: jax.Array) -> jax.Array:
        """x_EMC; zero where an expert has fewer rows than slots."""
        x_ECM = x_RM.at[self.row_EC].get(mode="fill", fill_value=0)
        # The barrier keeps XLA from undoing the transposition.
        return lax.optimization_barrier(x_ECM.swapaxes(1, 2))

    def rows(self, y_EMC: jax.Array) -> jax.Array:
        """y_RM; zero for rows without a slot."""
        y_QM = y_EMC.swapaxes(1, 2).reshape(-1, y_EMC.shape[1])
        return y_QM.at[self.slot_R].get(mode="fill", fill_value=0)


@jax.custom_vjp
def product(x_EMC: jax.Array, w_EMH: jax.Array) -> jax.Array:
    """y_EHC = every expert's columns by its matrix, in the orders that XLA on CPU computes fastest."""
    y_ECH = lax.optimization_barrier(lax.dot_general(x_EMC, w_EMH, (((1,), (1,)), ((0,), (0,)))))
    return lax.optimization_barrier(y_ECH.swapaxes(1, 2))


def _product_backward(residuals, dy_EHC):
    x_EMC, w_EMH = residuals
    dx_EMC = lax.optimization_barrier(lax.dot_general(w_EMH, dy_EHC, (((2,), (1,)), ((0,), (0,)))))
    dw_EMH = lax.dot_general(x_EMC, dy_EHC, (((2,), (2,)), ((0,), (0,))))
    return dx_EMC, dw_EMH


product.defvjp(lambda x_EMC, w_EMH: (product(x_EMC, w_EMH), (x_EMC, w_EMH)), _product_backward)
