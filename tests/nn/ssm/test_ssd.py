"""Mamba 2's recurrence: in chunks as step by step and as in float64, and padding that changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import maxjax
from maxjax.nn.ssm.ssd import CHUNK, ssd_chunks, ssd_step

B, H, P, G, N = 2, 4, 3, 2, 5


def inputs(length, groups=G, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, length, H, P))
    g = -rng.exponential(0.3, (B, length, H))
    b, c = rng.normal(size=(2, B, length, groups, N))
    return [a.astype(np.float32) for a in (x, g, b, c, rng.normal(size=(B, H, P, N)))]


def in_float64(x, g, b, c, state):
    """The recurrence as its paper has it, one token after the other."""
    x, g, b, c, state = (np.asarray(a, np.float64) for a in (x, g, b, c, state))
    b, c = (np.repeat(a, H // b.shape[2], axis=2) for a in (b, c))
    found = []
    for t in range(x.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None]
        state = state + np.einsum("bhp,bhn->bhpn", x[:, t], b[:, t])
        found.append(np.einsum("bhpn,bhn->bhp", state, c[:, t]))
    return np.stack(found, 1), state


def close(found, expected, atol=5e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize(("length", "groups"), [(1, 1), (7, 2), (CHUNK, 4), (2 * CHUNK + 9, 2)])
def test_chunks_and_steps_are_the_recurrence(length, groups):
    given = inputs(length, groups)
    close(jax.jit(ssd_chunks)(*given), in_float64(*given))
    *tokens, state = given
    y, after = ssd_step(*(a[:, 0] for a in tokens), state)
    close((y[:, None], after), in_float64(*(a[:, :1] for a in tokens), state))


def test_a_strong_decay_neither_overflows_nor_loses_what_is_new():
    x, g, b, c, state = inputs(70)
    given = (x, g * 300, b, c, state)
    close(jax.jit(ssd_chunks)(*given), in_float64(*given))


def test_tokens_of_zeros_change_nothing():
    x, g, b, c, state = inputs(20)
    real = np.arange(20)[None, :, None] < np.array([13, 0])[:, None, None]
    _, found = jax.jit(ssd_chunks)(x * real[..., None], g * real, b, c, state)
    _, expected = in_float64(x[:, :13], g[:, :13], b[:, :13], c[:, :13], state)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=5e-5)
    np.testing.assert_array_equal(found[1], state[1])


def test_the_state_of_one_part_is_where_the_next_begins():
    *tokens, state = inputs(90)
    expected = in_float64(*tokens, state)
    first, middle = jax.jit(ssd_chunks)(*(a[:, :31] for a in tokens), state)
    rest, last = jax.jit(ssd_chunks)(*(a[:, 31:] for a in tokens), middle)
    close((np.concatenate([first, rest], 1), last), expected)


def test_a_first_state_that_is_the_same_within_shard_map():
    x, g, b, c, state = inputs(7)
    mesh = maxjax.make_mesh(data=B, devices=jax.devices()[:B])
    over = jax.sharding.PartitionSpec("data")
    run = jax.shard_map(
        lambda *a: ssd_chunks(*a, jax.numpy.zeros((1, H, P, N)))[0],
        mesh=mesh, in_specs=(over,) * 4, out_specs=over,
    )  # fmt: skip
    found = jax.jit(run)(x, g, b, c)
    np.testing.assert_allclose(found, in_float64(x, g, b, c, 0 * state)[0], rtol=1e-4, atol=1e-5)


def test_no_tokens_and_no_sequences():
    for batch, length in ((1, 0), (0, 3)):
        x, b = (np.zeros((batch, length, *n), np.float32) for n in ((4, 3), (2, 6)))
        start = np.ones((batch, 4, 3, 6), np.float32)
        y, state = jax.jit(ssd_chunks)(x, x[..., 0], b, b, start)
        assert y.shape == x.shape and (np.asarray(state) == start).all()


def test_export_for_any_length():
    batch, length = export.symbolic_shape("b, t")
    kinds = [jax.ShapeDtypeStruct((batch, length, *a.shape[2:]), a.dtype) for a in inputs(1)[:-1]]
    kinds.append(jax.ShapeDtypeStruct((batch, *inputs(1)[-1].shape[1:]), jnp.float32))
    exported = export.export(jax.jit(ssd_chunks))(*kinds)
    for n in (1, 7, CHUNK + 1):
        close(exported.call(*inputs(n)), in_float64(*inputs(n)))
