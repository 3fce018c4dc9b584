"""The kernel for CPUs: sizes at which its tiles, panels and tasks end, and machines that cannot have it."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys

import jax
import numpy as np
import pytest

from moe.errors import UserError
from moe.routing import grouped_product, native

# (rows, M, H, group sizes). A tile has at most 14 x 32 numbers, 512 of the inner dimension are packed at a
# time, a task has at most 280 rows, and with up to 8 rows the matrix is read as it lies.
SIZES = {
    "a number": (1, 1, 1, [1]),
    "parts of vectors": (50, 37, 45, [7, 0, 20, 11]),
    "more rows than a task": (900, 512, 77, [300, 5, 595]),
    "more inner than a pack, in both directions": (30, 530, 1065, [1, 2, 3, 4, 8]),
    "few rows, whole vectors": (21, 64, 96, [8, 1, 7, 0, 4]),
    "gradients larger than caches": (29, 1030, 2900, [15, 0, 14]),  # 3 x 1030 x 2900 x 4 bytes
}


@pytest.mark.parametrize("name", SIZES)
def test_every_size_gives_the_product_and_its_gradients(name):
    num_rows, d_in, d_out, group_sizes = SIZES[name]
    rng = np.random.default_rng(num_rows)
    x_RM = rng.normal(size=(num_rows, d_in)).astype(np.float32)
    w_EMH = rng.normal(size=(len(group_sizes), d_in, d_out)).astype(np.float32)
    dy_RH = rng.normal(size=(num_rows, d_out)).astype(np.float32)
    sizes_E = np.array(group_sizes, np.int32)

    @jax.jit
    def ours(x_RM, w_EMH, dy_RH):
        product = lambda x, w: grouped_product(x, w, sizes_E, implementation="native")  # noqa: E731
        y_RH, back = jax.vjp(product, x_RM, w_EMH)
        return y_RH, *back(dy_RH)

    wanted = np.zeros((num_rows, d_out)), np.zeros((num_rows, d_in)), np.zeros(w_EMH.shape)
    ends = np.cumsum(sizes_E)
    for expert, (start, end) in enumerate(zip(ends - sizes_E, ends, strict=True)):
        x, w, dy = (
            a.astype(np.float64) for a in (x_RM[start:end], w_EMH[expert], dy_RH[start:end])
        )
        wanted[0][start:end], wanted[1][start:end], wanted[2][expert] = x @ w, dy @ w.T, x.T @ dy
    inner = d_in, d_out, max(group_sizes)
    for array, exact, length in zip(ours(x_RM, w_EMH, dy_RH), wanted, inner, strict=True):
        # n roundings of partial sums of up to sqrt(n) in size, of either sign, and of their result.
        np.testing.assert_allclose(array, exact, rtol=1e-6, atol=3e-7 * max(length, 10))


def test_one_after_another_under_vmap():
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in ((2, 7, 5), (2, 3, 5, 11)))
    sizes = np.array([[3, 0, 4], [1, 5, 0]], np.int32)
    product = lambda *arrays: grouped_product(*arrays, implementation="native")  # noqa: E731
    together = jax.jit(jax.vmap(product))(x, w, sizes)
    for i in range(2):
        np.testing.assert_array_equal(together[i], jax.jit(product)(x[i], w[i], sizes[i]))


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("CXX", "no-such-compiler", "No such file .*no-such-compiler"),
        ("CXX", "c++ -fno-such-option", "c\\+\\+ failed: .*no-such-option"),
        ("MOE_NATIVE", "0", "MOE_NATIVE is 0"),
    ],
)
def test_a_machine_that_cannot_have_it_tells_why(variable, value, told, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(native, "missing", native.missing.__wrapped__)  # asked anew
    arrays = np.ones((2, 3), np.float32), np.ones((1, 3, 5), np.float32), np.array([2], np.int32)
    silent = variable == "MOE_NATIVE"

    def warns():
        return contextlib.nullcontext() if silent else pytest.warns(RuntimeWarning, match=told)

    with warns(), pytest.raises(UserError, match=f"got 'native', for which (?s:.*){told}"):
        grouped_product(*arrays, implementation="native")
    with warns():
        np.testing.assert_array_equal(grouped_product(*arrays), np.full((2, 5), 3.0))
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for older x86 processors")
@pytest.mark.parametrize("processor", ["x86-64", "haswell"])
def test_the_tiles_of_older_processors_give_the_product_too(processor, tmp_path):
    flags = {"CXXFLAGS": f"-march={processor}", "XDG_CACHE_HOME": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        __file__,
        "-k",
        "every_size",
        "-p",
        "no:cacheprovider",
    ]
    subprocess.run(command, env=os.environ | flags, check=True)
    assert list(tmp_path.rglob("*.so"))
