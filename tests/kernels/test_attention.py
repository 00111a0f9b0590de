"""``kernels.attention``: at once and in blocks, against NumPy in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax.kernels import attention as door
from maxjax.kernels import blocked_attention as blocks
from maxjax.kernels.attention import (
    NO_KEY,
    attention,
    attention_weights,
    causal_attention,
    weighted_values,
)
from maxjax.kernels.int8_rows import quantised, restored
from maxjax.models import Qwen2, Qwen2Config

B, T, S, H, K, D = 2, 37, 53, 4, 2, 8
RNG = np.random.default_rng(0)


@pytest.fixture
def small(monkeypatch):
    """Blocks of 16, whatever the number of scores."""
    monkeypatch.setattr(blocks, "QUERIES", 16)
    monkeypatch.setattr(blocks, "LEAST_KEYS", 8)
    monkeypatch.setattr(blocks, "KEYS", 16)
    monkeypatch.setattr(door, "MOST_SCORES", 100)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def operands(layers=1, queries=T, keys=S):
    q, cache = normal(B, queries, H, D), [normal(layers, B, K, keys, D) for _ in range(2)]
    starts = np.array([[0], [keys - queries]], np.int32)
    positions = starts + np.arange(queries, dtype=np.int32)
    return q, cache, positions, np.arange(keys, dtype=np.int32)[None]


def reference(
    q, keys, values, positions, key_positions, *, scale, window=None, cap=None, sinks=None,
    slopes=None,
):  # fmt: skip
    """``[B, T, H, D]`` in float64, a query at a time."""
    out = np.zeros(q.shape)
    key_positions = np.broadcast_to(key_positions, (B, keys.shape[2]))
    for b, t, h in np.ndindex(*q.shape[:3]):
        at, group = positions[b, t] if len(positions) > 1 else positions[0, t], H // K
        sees = key_positions[b] <= at
        if window is not None:
            sees &= key_positions[b] > at - window
        scores = keys[b, h // group, sees].astype(np.float64) @ q[b, t, h] * scale
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        if slopes is not None:
            scores = scores + slopes[h] * (key_positions[b, sees] - at).astype(np.float64)
        sink = -np.inf if sinks is None else sinks[h]
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        out[b, t, h] = weights / (weights.sum() + np.exp(sink - top)) @ values[b, h // group, sees]
    return out


SETTINGS = list(itertools.product([False, True], [None, 7], [None, 2.0]))


@pytest.mark.sampled
@pytest.mark.parametrize("strided, window, cap", SETTINGS)
def test_it_is_the_sum_over_the_keys_a_query_sees(small, strided, window, cap):
    q, cache, at, keys = operands(layers=3)
    found = jax.jit(
        lambda q, cache, layer: causal_attention(
            q,
            cache,
            layer,
            at,
            keys,
            scale=0.4,
            sliding_window=window,
            soft_cap=cap,
            strided=strided,
        )
    )(q, cache, 2)
    want = reference(q, cache[0][2], cache[1][2], at, keys, scale=0.4, window=window, cap=cap)
    np.testing.assert_allclose(found, want, rtol=0, atol=3e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("queries, keys", [(1, 1), (5, 40), (16, 16), (17, 33)])
def test_sizes_that_blocks_do_not_divide(small, queries, keys):
    q, cache, at, key_positions = operands(queries=queries, keys=keys)
    found = causal_attention(q, cache, 0, at, key_positions, scale=0.4)
    want = reference(q, cache[0][0], cache[1][0], at, key_positions, scale=0.4)
    np.testing.assert_allclose(found, want, rtol=0, atol=3e-6)


SINKS = np.array([20, -20, 0.5, -np.inf], np.float32)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_blocks", [False, True])
def test_sinks(request, in_blocks):
    """They take their part of the weight: with all scores at once, in blocks, and under a mask."""
    if in_blocks:
        request.getfixturevalue("small")
    q, cache, at, keys = operands()
    found = causal_attention(q, cache, 0, at, keys, scale=0.4, soft_cap=2.0, sinks=SINKS)
    want = reference(q, cache[0][0], cache[1][0], at, keys, scale=0.4, cap=2.0, sinks=SINKS)
    np.testing.assert_allclose(found, want, rtol=0, atol=3e-6)
    k, v = (a[0].swapaxes(1, 2) for a in cache)
    exists = np.arange(S)[None] < np.array([[S], [9]])
    found = attention(q, k, v, jnp.asarray(exists), scale=0.4, sinks=SINKS)
    everywhere, there = np.zeros((B, T), np.int32), np.where(exists, 0, 1).astype(np.int32)
    want = reference(q, cache[0][0], cache[1][0], everywhere, there, scale=0.4, sinks=SINKS)
    np.testing.assert_allclose(found, want, rtol=0, atol=3e-6)
    with pytest.raises(ValueError, match="a score for each query head, not"):
        attention(q, k, v, sinks=SINKS[:2])


SLOPES = np.array([0.5, 0.1, -0.05, 0], np.float32)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_slopes(request, in_blocks):
    """A bias of the distance: with all scores at once, and in blocks."""
    if in_blocks:
        request.getfixturevalue("small")
    q, cache, at, keys = operands(layers=3)
    options = {"scale": 0.4, "sinks": SINKS, "slopes": SLOPES}
    found = causal_attention(q, cache, 2, at, keys, soft_cap=2.0, sliding_window=21, **options)
    want = reference(q, cache[0][2], cache[1][2], at, keys, cap=2.0, window=21, **options)
    np.testing.assert_allclose(found, want, rtol=0, atol=5e-6)
    order = RNG.permutation(S)  # keys need not be in order, and some may be no keys
    there = np.where(order < S - 5, order, NO_KEY).astype(np.int32)[None]
    cache = [a[:, :, :, order] for a in cache]
    found = causal_attention(q, cache, 0, at, there, **options)
    want = reference(q, cache[0][0], cache[1][0], at, there, **options)
    np.testing.assert_allclose(found, want, rtol=0, atol=5e-6)
    with pytest.raises(ValueError, match="a number for each query head, not"):
        causal_attention(q, cache, 0, at, keys, slopes=SLOPES[:2])


@pytest.mark.parametrize("name", ["sinks", "slopes"])
def test_gradients_of_sinks_and_slopes(request, name):
    q, cache, at, keys = operands()
    given, weights = np.array([1, -1, 0.5, 2], np.float32), normal(*q.shape)
    if name == "slopes":
        given = SLOPES

    def loss(given, q):
        found = causal_attention(q, cache, 0, at, keys, soft_cap=9.0, **{name: given})
        return jnp.sum(found * weights)

    want = jax.jit(jax.grad(lambda *a: loss(*a), (0, 1)))(given, q)
    request.getfixturevalue("small")
    found = jax.jit(jax.grad(lambda *a: loss(*a), (0, 1)))(given, q)
    for a, b in zip(found, want, strict=True):
        # Distances are up to 53: derivatives by slopes are that much larger.
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 if name == "sinks" else 53 * 5e-6)
        assert np.abs(b).max() > 0.05


@pytest.mark.parametrize("strided, window, cap", [(False, None, 2.0), (True, 7, None)])
def test_gradients(small, monkeypatch, strided, window, cap):
    q, cache, at, keys = operands(layers=2)
    weights = normal(*q.shape)

    def loss(q, cache):
        y = causal_attention(
            q, cache, 1, at, keys, sliding_window=window, soft_cap=cap, strided=strided
        )
        return jnp.sum(y * weights)

    found = jax.jit(jax.grad(loss, (0, 1)))(q, cache)
    monkeypatch.undo()
    want = jax.jit(jax.grad(lambda *a: loss(*a), (0, 1)))(q, cache)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)
        assert np.abs(b).max() > 0.1


def test_keys_in_any_order_empty_ones_and_repeated_heads(small):
    q, cache, at, keys = operands()
    order = RNG.permutation(S)
    shuffled = [a[:, :, :, order] for a in cache]
    positions = np.where(keys % 5 == 1, NO_KEY, keys).astype(np.int32)
    run = jax.jit(lambda cache, keys: causal_attention(q, cache, 0, at, keys))
    want = run(cache, positions)
    found = run(shuffled, positions[:, order])
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-6)
    again = jax.jit(lambda cache: causal_attention(q, cache, 0, at, positions, repeats=H // K))
    repeated = again(cache)
    np.testing.assert_allclose(repeated, want, rtol=0, atol=2e-6)
    squares = lambda repeats: (
        lambda cache: jnp.sum(causal_attention(q, cache, 0, at, keys, repeats=repeats) ** 2)
    )
    grad = lambda repeats: jax.jit(jax.grad(squares(repeats)))(cache)
    for a, b in zip(grad(1), grad(H // K), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_nothing_is_read_that_nobody_sees(small):
    q, cache, at, keys = operands(queries=32)
    at = at - at[:, :1] + 8  # positions 8 to 39
    window = {"sliding_window": 4}
    want = causal_attention(q, cache, 0, at, keys, **window)
    after = keys[0] >= 48  # a block after the last position
    cache = [np.where(after[:, None], np.nan, a) for a in cache]
    found = causal_attention(q, cache, 0, at, keys, **window)
    np.testing.assert_array_equal(found, want)


def test_a_query_without_keys_is_finite(small):
    q, cache, at, _ = operands()
    nobody = np.full((1, S), NO_KEY, np.int32)
    assert np.isfinite(causal_attention(q, cache, 0, at, nobody)).all()


def test_int8(small):
    q, cache, at, keys = operands()
    (k8, ks), (v8, vs) = (quantised(jnp.asarray(a)) for a in cache)
    found = causal_attention(q, [k8, v8, ks, vs], 0, at, keys)
    floats = [restored(k8, ks, jnp.float32), restored(v8, vs, jnp.float32)]
    np.testing.assert_allclose(found, causal_attention(q, floats, 0, at, keys), rtol=0, atol=2e-6)
    with pytest.raises(NotImplementedError, match="int8 cache"):
        jax.grad(lambda q: causal_attention(q, [k8, v8, ks, vs], 0, at, keys).sum())(q)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype, atol", [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_sixteen_bits(small, dtype, atol):
    q, cache, at, keys = operands()
    narrow = jax.tree.map(lambda a: jnp.asarray(a, dtype), (q, cache))
    found = jax.jit(lambda q, cache: causal_attention(q, cache, 0, at, keys))(*narrow)
    assert found.dtype == dtype
    want = reference(q, cache[0][0], cache[1][0], at, keys, scale=D**-0.5)
    np.testing.assert_allclose(found.astype(jnp.float32), want, rtol=0, atol=atol)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mask", [None, "keys"])
def test_without_an_order_and_with_a_mask_of_keys(small, monkeypatch, mask):
    q, cache, _, _ = operands()
    k, v = (jnp.asarray(a[0].swapaxes(1, 2)) for a in cache)
    which = None if mask is None else jnp.asarray(RNG.random((B, S)) < 0.5).at[:, 0].set(True)
    value = lambda: jax.jit(lambda k: attention(q, k, v, which, soft_cap=3.0))(k)
    slope = lambda: jax.jit(jax.grad(lambda k: jnp.sum(attention(q, k, v, which) ** 2)))(k)
    found, gradient = value(), slope()
    monkeypatch.undo()
    np.testing.assert_allclose(found, value(), atol=2e-6)
    np.testing.assert_allclose(gradient, slope(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_the_weights_give_what_attention_gives(masked):
    q, k, v = normal(B, T, H, D), normal(B, S, K, D), normal(B, S, K, D)
    mask = RNG.random((B, 1, T, S)) < 0.8 if masked else None
    options = {"bias": 3 * normal(B, H, T, S), "soft_cap": 2.0, "sinks": normal(H)}
    weights = attention_weights(q, k, mask, **options)
    found = weighted_values(weights, jnp.asarray(v))
    np.testing.assert_allclose(found, attention(q, k, v, mask, **options), atol=1e-5)


def test_vmap_export_and_remat(small):
    q, cache, at, keys = operands()
    run = lambda q: causal_attention(q, cache, 0, at, keys)
    once = jax.jit(run)
    both = jax.jit(jax.vmap(run))(jnp.stack([q, 2 * q]))
    np.testing.assert_allclose(both[1], once(2 * q), rtol=0, atol=2e-6)
    exported = export.export(once)(jax.ShapeDtypeStruct(q.shape, q.dtype))
    np.testing.assert_allclose(exported.call(q), once(q), rtol=0, atol=2e-6)
    loss = lambda q: jnp.sum(run(q) ** 2)
    want, found = (jax.jit(jax.grad(one))(q) for one in (loss, jax.checkpoint(loss)))
    np.testing.assert_allclose(found, want, atol=2e-6)


@pytest.mark.parametrize("shape", ["b, t", "1, t", "b, 3"])
def test_export_of_sizes_that_are_not_known(shape):
    def run(q, k):
        at = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
        return causal_attention(q, [k.swapaxes(1, 2)[None]] * 2, 0, at, at, sliding_window=4)

    sizes = export.symbolic_shape(shape)
    kinds = [jax.ShapeDtypeStruct((*sizes, heads, D), jnp.float32) for heads in (H, K)]
    jitted = jax.jit(run)
    exported = export.export(jitted)(*kinds)
    for length in (1, 3, 300):
        q, k = normal(1, length, H, D), normal(1, length, K, D)
        if shape != "b, 3" or length == 3:
            np.testing.assert_allclose(exported.call(q, k), jitted(q, k), rtol=0, atol=2e-6)


def test_inside_of_shard_map(small):
    """Where texts differ between devices and the loops start with what does not."""
    q, cache, at, keys = operands()
    over, mesh = (
        jax.sharding.PartitionSpec("data"),
        maxjax.make_mesh(data=B, devices=jax.devices()[:B]),
    )

    def loss(q, cache, at):
        return jnp.sum(causal_attention(q, cache, 0, at, keys, sliding_window=7) ** 2)

    def mapped(q, cache, at):
        of_each = lambda *a: jax.lax.psum(loss(*a), "data")
        rows = jax.sharding.PartitionSpec(None, "data")
        run = jax.shard_map(
            of_each, mesh=mesh, in_specs=(over, [rows, rows], over), out_specs=jax.P()
        )
        return run(q, cache, at)

    found = jax.jit(jax.grad(mapped, (0, 1)))(q, cache, at)
    expected = jax.jit(jax.grad(loss, (0, 1)))(q, cache, at)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-6)


MESHES = {"rows": {"data": 2, "model": 2}, "heads": {"model": 4}, "tokens": {"seq": 2, "model": 2}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_decoder_on_a_mesh(request, kind, axes):
    """With four devices for two KV heads these are repeated."""
    config = Qwen2Config(50, 32, 48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                           sliding_window=9, layer_types=("full_attention", "sliding_attention"))  # fmt: skip
    model = maxjax.init(Qwen2(config), jax.random.key(0))
    ids = jnp.asarray(RNG.integers(0, 50, (2, 40)), jnp.int32)
    lengths = jnp.array([40, 33])

    def run(model, ids, cache):
        first, cache = model(ids[:, :24], cache)
        second, cache = model(ids[:, 24:], cache, lengths=lengths - 24)
        return model(ids), first, second, model(ids[:, :1], cache)[0]

    want = jax.jit(run)(model, ids, model.cache(2, 48))
    request.getfixturevalue("small")
    mesh = maxjax.make_mesh(**MESHES[axes], axis_types=getattr(AxisType, kind))
    model.to(mesh)
    rows = P("data") if axes == "rows" else P()
    ids = jax.device_put(ids, NamedSharding(mesh, rows))
    found = jax.jit(lambda *a: run(*a))(model, ids, model.cache(2, 48))
    for a, b in zip(found, want, strict=True):
        a, b = np.array(a), np.array(b)
        if a.shape[1] == 16:
            a[1, 9:] = b[1, 9:]  # these are padding
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5)
