"""The gated delta rule: in chunks as step by step and as in float64, and padding that changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import maxjax
from maxjax.nn.ssm.delta import CHUNK, delta_chunks, delta_step

B, H, DK, DV = 2, 3, 5, 4


def inputs(length, seed=0):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, length, H, DK))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(B, length, H, DV))
    g = -rng.exponential(0.3, (B, length, H))
    beta = rng.uniform(0, 1, (B, length, H))
    return [a.astype(np.float32) for a in (q, k, v, g, beta, rng.normal(size=(B, H, DK, DV)))]


def in_float64(q, k, v, g, beta, state):
    """The rule as its paper has it, one token after the other."""
    q, k, v, g, beta, state = (np.asarray(a, np.float64) for a in (q, k, v, g, beta, state))
    found = []
    for t in range(q.shape[1]):
        kept = np.exp(g[:, t])
        state = state * (kept[..., None] if kept.ndim == 3 else kept[..., None, None])
        known = np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - known))
        found.append(np.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return np.stack(found, 1), state


def by_feature(given, seed=9):
    """The same with a decay of each feature of the keys."""
    q, k, v, g, beta, state = given
    each = np.random.default_rng(seed).exponential(1.0, (*g.shape, DK))
    return [q, k, v, (g[..., None] * each).astype(np.float32), beta, state]


RULES = pytest.mark.parametrize("rule", [list, by_feature], ids=["by head", "by feature"])


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@RULES
@pytest.mark.parametrize("length", [1, 7, CHUNK, 2 * CHUNK + 9])
def test_chunks_and_steps_are_the_rule(length, rule):
    given = rule(inputs(length))
    expected = in_float64(*given)
    close(jax.jit(delta_chunks)(*given), expected)
    *tokens, state = given
    y, after = delta_step(*(a[:, 0] for a in tokens), state)
    close((y[:, None], after), in_float64(*(a[:, :1] for a in tokens), state))


@RULES
def test_a_strong_decay_neither_overflows_nor_loses_what_is_new(rule):
    *tokens, g, beta, state = rule(inputs(70))
    given = (*tokens, g * 300, beta, state)
    close(jax.jit(delta_chunks)(*given), in_float64(*given))


def test_tokens_without_decay_and_share_change_nothing():
    q, k, v, g, beta, state = inputs(20)
    real = np.arange(20)[None, :, None] < np.array([13, 0])[:, None, None]
    _, found = jax.jit(delta_chunks)(q, k, v, g * real, beta * real, state)
    _, expected = in_float64(q[:, :13], k[:, :13], v[:, :13], g[:, :13], beta[:, :13], state)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(found[1], state[1])


def test_a_first_state_that_is_the_same_within_shard_map():
    *tokens, state = inputs(CHUNK)
    mesh = maxjax.make_mesh(data=B, devices=jax.devices()[:B])
    over = jax.sharding.PartitionSpec("data")
    run = jax.shard_map(
        lambda *a: delta_chunks(*a, jax.numpy.zeros_like(state[:1]))[0],
        mesh=mesh, in_specs=(over,) * 5, out_specs=over,
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(run)(*tokens), in_float64(*tokens, 0 * state)[0], atol=2e-5)


def test_no_tokens_and_no_sequences():
    for batch, length in ((1, 0), (0, 3)):
        k, v = (np.zeros((batch, length, 2, n), np.float32) for n in (4, 3))
        start = np.ones((batch, 2, 4, 3), np.float32)
        y, state = jax.jit(delta_chunks)(k, k, v, k[..., 0], k[..., 0], start)
        assert y.shape == v.shape and (np.asarray(state) == start).all()


def test_export_for_any_length():
    batch, length = export.symbolic_shape("b, t")
    kinds = [jax.ShapeDtypeStruct((batch, length, *a.shape[2:]), a.dtype) for a in inputs(1)[:-1]]
    kinds.append(jax.ShapeDtypeStruct((batch, *inputs(1)[-1].shape[1:]), jnp.float32))
    exported = export.export(jax.jit(delta_chunks))(*kinds)
    for n in (1, 7, CHUNK + 1):
        close(exported.call(*inputs(n)), in_float64(*inputs(n)))
