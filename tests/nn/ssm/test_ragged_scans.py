"""MAX's kernels over pools of states: ragged batches are what the functions of ``maxjax.nn.ssm`` give for each text."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import BufferType, BufferValue, DeviceRef, Graph, TensorType, TensorValue
from maxjax.nn.ssm.convolution import causal_conv
from maxjax.nn.ssm.delta import delta_chunks
from maxjax.nn.ssm.ssd import ssd_chunks
from maxjax.nn.state_space import (
    causal_conv1d_varlen_fwd,
    gated_delta_conv1d_fwd,
    gated_delta_recurrence_fwd,
    mamba2_ssd_chunk_scan_varlen_fwd_inplace,
)

CPU = DeviceRef.CPU()
LENGTHS, SLOTS, ROWS = (5, 1, 2), (3, 0, 2), 4
OFFSETS = np.cumsum([0, *LENGTHS]).astype(np.uint32)
N = sum(LENGTHS)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def texts(x):
    """The tokens of each sequence, with an axis for the batch."""
    return [x[a:b][None] for a, b in zip(OFFSETS[:-1], OFFSETS[1:], strict=True)]


@pytest.mark.parametrize("taps", [4, 2, 1])
def test_convolutions_continue_the_inputs_in_the_pool(taps):
    x, weight, states = draw(N, 6), draw(6, taps, seed=1), draw(ROWS, 6, taps - 1, seed=2)
    pool = BufferValue(states)
    y = gated_delta_conv1d_fwd(x, weight, pool, np.array(SLOTS), OFFSETS, write_state=False)
    np.testing.assert_array_equal(pool.value, states)
    y = gated_delta_conv1d_fwd(x, weight, pool, np.array(SLOTS), OFFSETS)
    want = [
        causal_conv(text, weight, None, states[slot].T[None])
        for text, slot in zip(texts(x), SLOTS, strict=True)
    ]
    np.testing.assert_allclose(y.value, np.concatenate([one[0][0] for one in want]), atol=1e-6)
    for slot, (_, state) in zip(SLOTS, want, strict=True):
        np.testing.assert_array_equal(pool.value[slot], state[0].T)
    np.testing.assert_array_equal(pool.value[1], states[1])  # nobody's


def test_options_of_a_convolution():
    x, weight, states = draw(N, 6), draw(6, 3, seed=1), draw(ROWS, 6, 2, seed=2)
    bias, fresh = draw(6, seed=3), np.array([True, False, True])
    pool = BufferValue(states)
    first = (weight, bias, pool, OFFSETS, np.array([SLOTS]), fresh)
    y = causal_conv1d_varlen_fwd(x.T, *first, "none", use_residual=True, update_state=~fresh)
    want = np.concatenate([
        causal_conv(text, weight, bias, states[slot].T[None] * float(keeps))[0][0]
        for text, slot, keeps in zip(texts(x), SLOTS, fresh, strict=True)
    ])  # fmt: skip
    np.testing.assert_allclose(y.value.T, want + np.asarray(x), atol=1e-6)
    np.testing.assert_array_equal(pool.value[np.array([3, 2])], states[np.array([3, 2])])
    np.testing.assert_array_equal(pool.value[0], jnp.stack([jnp.zeros(6), texts(x)[1][0, 0]], -1))
    silu = causal_conv1d_varlen_fwd(x, *first, channels_last=True)
    assert silu.shape == y.value.T.shape and float(jnp.min(silu.value)) > -0.3
    with pytest.raises(ValueError, match="activation must be"):
        causal_conv1d_varlen_fwd(x, *first, "relu", channels_last=True)
    with pytest.raises(ValueError, match="there are 2 flags for 3 sequences"):
        causal_conv1d_varlen_fwd(x, *first[:-1], np.array([True, False]), channels_last=True)


def test_delta_rule():
    groups, heads, width, values = 2, 4, 8, 3
    qkv = draw(N, 2 * groups * width + heads * values)
    decay, beta = (0.5 + jnp.abs(draw(N, heads, seed=i)) / 9 for i in (1, 2))
    states = draw(ROWS, heads, width, values, seed=3)
    pool = BufferValue(states)
    y = gated_delta_recurrence_fwd(qkv, decay, beta, pool, np.array(SLOTS, np.uint32), OFFSETS)

    def unit(x):
        x = x.reshape(1, -1, groups, width)
        return jnp.repeat(x / jnp.linalg.norm(x, axis=-1, keepdims=True), heads // groups, axis=2)

    cuts = groups * width, 2 * groups * width
    found = texts(y.value)
    for text, d, b, got, slot in zip(*map(texts, (qkv, decay, beta)), found, SLOTS, strict=True):
        q, k, v = jnp.split(text, cuts, axis=-1)
        v = v.reshape(1, -1, heads, values)
        want, state = delta_chunks(
            unit(q) / width**0.5, unit(k), v, jnp.log(d), b, states[slot][None]
        )
        np.testing.assert_allclose(got.reshape(want.shape), want, atol=2e-5)
        np.testing.assert_allclose(pool.value[slot], state[0], atol=2e-5)


@pytest.mark.parametrize("plain", [False, True])
def test_state_space_model(plain):
    heads, width, groups, size = 4, 3, 2, 5
    x, dt, b, c = (
        draw(N, *s, seed=i)
        for i, s in enumerate([(heads, width), (heads,), (groups, size), (groups, size)])
    )
    rates, skip, bias = -jnp.abs(draw(heads, seed=5)), draw(heads, seed=6), draw(heads, seed=7)
    if plain:
        dt, skip, bias = jnp.abs(dt), jnp.zeros(0), jnp.zeros(0)
    states = draw(ROWS, heads, width, size, seed=8)
    pool, flags = BufferValue(states), np.zeros(0, bool) if plain else np.array([True, False, True])
    y = mamba2_ssd_chunk_scan_varlen_fwd_inplace(
        x, dt, rates, b, c, skip, bias, pool, OFFSETS, flags, np.array(SLOTS)
    )
    steps = dt if plain else jnp.logaddexp(dt + bias[None], 0)
    keeps, each = [True] * 3 if plain else flags, [texts(one) for one in (x, steps, b, c, y.value)]
    for one, dt, b, c, got, slot, keep in zip(*each, SLOTS, keeps, strict=True):
        want, state = ssd_chunks(
            one * dt[..., None], dt * rates[None, None], b, c, states[slot][None] * float(keep)
        )
        want = want if plain else want + one * skip[None, None, :, None]
        np.testing.assert_allclose(got, want, atol=2e-5)
        np.testing.assert_allclose(pool.value[slot], state[0], atol=2e-5)


def test_in_a_graph_with_named_sizes():
    f, i = DType.float32, DType.uint32
    types = [TensorType(f, ("n", 6), CPU), TensorType(i, ("b",), CPU), TensorType(i, ("offsets",), CPU),
             TensorType(DType.bool, ("flags",), CPU), BufferType(f, ("rows", 6, 2), CPU)]  # fmt: skip
    weight = draw(6, 3, seed=1)

    def forward(x, slots, offsets, flags, pool):
        bias = TensorValue(jnp.zeros(0))
        return causal_conv1d_varlen_fwd(
            x, TensorValue(weight), bias, pool, offsets, slots, flags, "none", channels_last=True
        )

    model = InferenceSession().load(Graph("convolution", forward, types))
    x, states = draw(N, 6), draw(ROWS, 6, 2, seed=2)
    given = [np.asarray(x), np.array(SLOTS, np.uint32), OFFSETS, np.ones(3, bool)]
    y, pool = model.execute(*given, np.asarray(states))
    same = BufferValue(states)
    want = gated_delta_conv1d_fwd(x, weight, same, np.array(SLOTS), OFFSETS)
    np.testing.assert_allclose(y.to_numpy(), want.value, atol=1e-6)
    np.testing.assert_allclose(np.asarray(pool), same.value, atol=1e-6)
    with pytest.raises(ValueError, match="flags"):
        model.execute(*given[:-1], np.ones(2, bool), np.asarray(states))
