"""kernels.embed: rows by number, also in loops, transformed and differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import QuantArray, embed
from maxjax.storage.blocks import encode

DTYPES = ["float32", "float16", "bfloat16", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_by_number(dtype):
    table = jnp.asarray(np.arange(12).reshape(4, 3), dtype)
    rows = jnp.array([[0, 3], [-1, 2]])
    wanted = np.asarray(table, np.float64)[np.asarray(rows)]
    for f in (embed, jax.jit(embed), lambda t, r: jax.vmap(lambda row: embed(t, row))(r)):
        got = f(table, rows)
        assert got.dtype == table.dtype
        assert (np.asarray(got, np.float64) == wanted).all()


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_outside_is_nan(dtype):
    assert jnp.isnan(embed(jnp.ones((4, 3), dtype), jnp.array([4, -5]))).all()


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_gradient(dtype):
    table = jnp.ones((4, 3), dtype)
    grad = jax.grad(lambda t: embed(t, jnp.array([1, 1, 3])).sum())(table)
    assert (np.asarray(grad, np.float64)[:, 0] == [0, 2, 0, 1]).all()
    tangent = jax.jvp(lambda t: embed(t, jnp.array([2])), (table,), (table * 2,))[1]
    assert (np.asarray(tangent, np.float64) == 2).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loop_keeps_no_wide_copy_of_the_table(dtype):
    def run(table, row):
        step = lambda _, s: (s[0] + embed(table, s[1]).sum(), s[1] + 1)
        return jax.lax.fori_loop(0, 4, step, (jnp.zeros((), dtype), row))

    table = jnp.ones((1000, 64), dtype)
    program = jax.jit(run).lower(table, jnp.int32(0)).compile()
    assert program.memory_analysis().temp_size_in_bytes < table.nbytes
    assert float(program(table, jnp.int32(0))[0]) == 256


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int32"])
def test_numbers_of_any_type_in_a_quantised_table(dtype):
    values = np.random.default_rng(0).standard_normal((300, 32)).astype(np.float32)
    table = QuantArray(jnp.asarray(encode("Q8_0", values)), "Q8_0")
    rows = np.array([0, 3, 100], dtype)
    np.testing.assert_array_equal(embed(table, jnp.asarray(rows)), np.asarray(table)[[0, 3, 100]])
    if dtype == "uint32":
        assert jnp.isnan(embed(table, jnp.asarray([2**32 - 1, 300], jnp.uint32))).all()
    if dtype == "int8":
        np.testing.assert_array_equal(
            embed(table, jnp.asarray([-1], jnp.int8)), np.asarray(table)[-1:]
        )
