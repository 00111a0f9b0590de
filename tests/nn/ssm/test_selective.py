"""The recurrence of Mamba 1: its steps against a loop in float64, and its chunks against its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.nn.ssm.selective import CHUNK, selective_chunks, selective_step

BATCH, CHANNELS, FEATURES = 2, 5, 3


def operands(length, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    x, dt = normal(BATCH, length, CHANNELS), np.abs(normal(BATCH, length, CHANNELS))
    a = np.broadcast_to(-np.exp(normal(CHANNELS, FEATURES)), (BATCH, CHANNELS, FEATURES))
    b, c = normal(BATCH, length, FEATURES), normal(BATCH, length, FEATURES)
    return x, dt, a, b, c, normal(BATCH, CHANNELS, FEATURES)


def in_float64(x, dt, a, b, c, state):
    x, dt, a, b, c, state = (v.astype(np.float64) for v in (x, dt, a, b, c, state))
    found = []
    for t in range(x.shape[1]):
        state = np.exp(dt[:, t, :, None] * a) * state
        state = state + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        found.append((state * c[:, t, None]).sum(-1))
    return np.stack(found, 1), state


@pytest.mark.parametrize("length", [1, CHUNK - 1, 2 * CHUNK, 3 * CHUNK + 5])
def test_chunks_are_the_loop(length):
    given = operands(length)
    for found, expected in zip(jax.jit(selective_chunks)(*given), in_float64(*given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_steps_are_the_loop():
    x, dt, a, b, c, state = operands(9)
    expected, last = in_float64(x, dt, a, b, c, state)
    for t in range(9):
        y, state = selective_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], state)
        np.testing.assert_allclose(y, expected[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_a_long_time_step_forgets_everything_before():
    """Also where the product of the decays is below the smallest float."""
    x, dt, a, b, c, state = operands(CHUNK + 3)
    dt = dt.copy()
    dt[:, 4] = 1e4
    y, _ = selective_chunks(x, dt, a, b, c, 1e6 * state)
    expected, _ = in_float64(x, dt, a, b, c, 0 * state)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y[:, 4:], expected[:, 4:], rtol=1e-5, atol=1e-5)


def test_tokens_without_a_time_step_change_nothing():
    x, dt, a, b, c, state = operands(2 * CHUNK)
    real = np.arange(2 * CHUNK) < 7
    _, found = selective_chunks(x, np.where(real[:, None], dt, 0), a, b, c, state)
    _, expected = selective_chunks(x[:, :7], dt[:, :7], a, b[:, :7], c[:, :7], state)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_the_gradient_is_that_of_the_steps():
    given = operands(CHUNK + 2)

    def by_steps(x):
        _, dt, a, b, c, state = given
        total = 0.0
        for t in range(x.shape[1]):
            y, state = selective_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], state)
            total = total + jnp.sum(y**2)
        return total

    by_chunks = lambda x: jnp.sum(selective_chunks(x, *given[1:])[0] ** 2)
    found, expected = jax.grad(by_chunks)(given[0]), jax.jit(jax.grad(by_steps))(given[0])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
