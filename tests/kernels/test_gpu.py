"""On a GPU the jnp forms run: right, and with no copy of a layer's weight out of its stack."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import kernels
from maxjax.kernels import StackSlice

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_products_in_a_loop(tokens):
    stack = jax.random.normal(jax.random.key(0), (4, 512, 512), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (tokens, 512), jnp.bfloat16)

    def run(x, stack):
        body = lambda i, x: kernels.matmul(x, StackSlice(stack, i)) / jnp.bfloat16(16)
        return jax.lax.fori_loop(0, 4, body, x)

    program = jax.jit(run).lower(x, stack).compile()
    assert "maxjax_matmul" not in program.as_text()
    wanted = np.asarray(x, np.float64)
    for layer in np.asarray(stack, np.float64):
        wanted = wanted @ layer.T / 16
    got = np.asarray(program(x, stack), np.float64)
    assert np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()
    assert not re.search(r"= bf16\[1?,?512,512\]\S* (copy|dynamic-slice)\(", program.as_text())


def test_attention_of_one_token():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k, v, keys, values = (
        make(2, 4, 64),
        make(2, 2, 64),
        make(2, 2, 64),
        *[make(2, 2, 32, 64)] * 2,
    )
    y, keys, _ = kernels.decode_attention(q, k, v, keys, values, jnp.array([5, 31]))
    for b, n in enumerate((6, 32)):
        for h in range(4):
            seen, of = np.asarray(keys)[b, h // 2, :n], np.asarray(values)[b, h // 2, :n].copy()
            of[n - 1] = np.asarray(v)[b, h // 2]
            scores = np.exp(seen @ np.asarray(q)[b, h] / 8)
            assert np.abs(np.asarray(y)[b, h] - scores @ of / scores.sum()).max() < 1e-2
