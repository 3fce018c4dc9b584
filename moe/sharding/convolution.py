"""A convolution of which a spatial dimension is split: neighbours exchange the rows at their borders."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from moe.errors import UserError
from moe.sharding.annotations import split
from moe.sharding.rules import ANY


def split_convolution(
    x: jax.Array,
    kernel: jax.Array,
    dim: str,
    axis: str,
    *,
    strides: Sequence[int] = (1, 1),
    padding: str | Sequence[tuple[int, int]] = "SAME",
    dilation: Sequence[int] = (1, 1),
    dimension_numbers: tuple[str, str, str] = ("NHWC", "HWIO", "NHWC"),
) -> jax.Array:
    """`jax.lax.conv_general_dilated` with one dimension of x and of the result split over a mesh axis.

    A device holds so many rows of x as its rows of the result start at, and asks its neighbours for
    what the window reaches beyond, from several of them if need be. A size that does not divide is
    filled up with zeros, which are the convolution's own padding, and cut off the result.

    Args:
      x: images, or sequences with (1-D) `dimension_numbers` like ("NLC", "LIO", "NLC").
      kernel: as large as it is on every device.
      dim: the letter in `dimension_numbers` of the dimension that is split.
      axis: the mesh axis. Without a mesh, or with one device along it, nothing is exchanged.
      strides: of the window, for each spatial dimension.
      padding: "SAME", "VALID", or zeros before and after for each spatial dimension.
      dilation: of the kernel.
      dimension_numbers: of x, kernel and result.

    Raises:
      UserError: `dim` is no spatial dimension, the axis is none of the mesh's, or padding is negative.

    Source: Xu et al. 2021, GSPMD (arXiv:2105.04663), section 4.3, does this in the compiler, and so
    does `split` before `jax.lax.conv_general_dilated`: good where x and result divide. We do it by hand
    because else XLA's version may give wrong kernel gradients (up to jax 0.11.2, on CPU: 8 rows over
    8 devices with stride 2, so that some devices have no row of the result).
    """
    letters_x, letters_kernel, letters_y = dimension_numbers
    spatial = [letter for letter in letters_x if letter not in "NC"]
    if dim not in spatial:
        raise UserError(
            f"dim must be a spatial dimension: got {dim!r}, {dimension_numbers} has {spatial}. "
            "Name one of them."
        )
    at, place = spatial.index(dim), letters_x.index(dim)
    sizes = [x.shape[letters_x.index(letter)] for letter in spatial]
    window = [
        (kernel.shape[letters_kernel.index(letter)] - 1) * step + 1
        for letter, step in zip(spatial, dilation, strict=True)
    ]
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(sizes, window, strides, padding)
    pads = [(first, last) for first, last in padding]
    if min(pads[at]) < 0:
        raise UserError(f"padding must not be negative: got {pads[at]} for {dim!r}. Cut x instead.")

    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=tuple(strides),
        rhs_dilation=tuple(dilation),
        dimension_numbers=dimension_numbers,
    )
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return convolve(x, kernel, padding=pads)
    x = split(x, place, axis, others=ANY, pad=True)
    share = _Share.of(sizes[at], window[at], strides[at], pads[at], mesh.shape[axis])
    pads[at] = (0, 0)

    def on_one_device(x, kernel):
        x = _with_halo(x, place, axis, share)
        return convolve(x, kernel, padding=pads)

    missing = [(0, 0)] * x.ndim
    missing[place] = (0, share.num_devices * share.rows - sizes[at])
    spec_x, spec_y = (
        PartitionSpec(*(axis if letter == dim else None for letter in letters))
        for letters in (letters_x, letters_y)
    )
    y = jax.shard_map(
        on_one_device, in_specs=(spec_x, PartitionSpec()), out_specs=spec_y, axis_names={axis}
    )(jnp.pad(x, missing), kernel)
    return jax.lax.slice_in_dim(y, 0, share.num_results, axis=letters_y.index(dim))


class _Share(NamedTuple):
    """What a device holds of x, and what its rows of the result are computed of."""

    num_devices: int
    num_results: int  # on all devices
    rows: int  # of x on a device
    before: int  # rows needed before those
    needed: int  # rows in all

    @classmethod
    def of(
        cls, size: int, window: int, stride: int, pad: tuple[int, int], num_devices: int
    ) -> _Share:
        num_results = (size + sum(pad) - window) // stride + 1
        # Results a device makes: enough for all of them, and for its rows of x to hold all of x.
        each = max(-(-num_results // num_devices), -(-size // (num_devices * stride)))
        return cls(num_devices, num_results, each * stride, pad[0], (each - 1) * stride + window)


def _with_halo(x, place: int, axis: str, share: _Share) -> jax.Array:
    """x with what the window reaches of the devices before and after; zeros at the mesh's ends."""
    num_devices, rows = share.num_devices, share.rows

    def rows_of(distance: int, count: int) -> jax.Array:
        """The rows next to us of the device so far away: its last ones if it stands before us."""
        first = rows - count if distance < 0 else 0
        sent = jax.lax.slice_in_dim(x, first, first + count, axis=place)
        pairs = [
            (source, source - distance)
            for source in range(num_devices)
            if 0 <= source - distance < num_devices
        ]
        return jax.lax.ppermute(sent, axis, pairs)

    def hops(total: int) -> list[tuple[int, int]]:
        """(distance, rows) until `total` rows are there, the nearest device first."""
        return [(hop + 1, min(rows, total - hop * rows)) for hop in range(-(-total // rows))]

    after = max(share.needed - share.before - rows, 0)
    above = [rows_of(-distance, count) for distance, count in reversed(hops(share.before))]
    below = [rows_of(distance, count) for distance, count in hops(after)]
    x = jnp.concatenate([*above, x, *below], axis=place)
    return jax.lax.slice_in_dim(x, 0, share.needed, axis=place)
