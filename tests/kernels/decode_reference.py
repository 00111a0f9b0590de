"""What decode attention is, in NumPy in float64, and operands for it; for the tests of all its forms."""

import itertools
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from maxjax.kernels.int8_rows import quantised

TYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
UNIT = 2.0**-23
NAMES = ("q", "k", "v", "keys", "values", "lengths")


def operands(
    lengths=(5, 0), heads=4, kv_heads=2, width=16, slots=9, q="float32", cache="float32",
    pairs=None, seed=0, k=None, sinks=False, slopes=False,
):  # fmt: skip
    """What ``decode_attention`` takes; the whole cache is full of numbers. Of the sinks one counts for most
    of the weight, one for nothing, and one for nothing at all."""
    rng, batch = np.random.default_rng(seed), len(lengths)
    normal = lambda shape, dtype: rng.standard_normal(shape).astype(np.float32).astype(TYPES[dtype])
    found = {
        "q": normal((batch, heads, width), q),
        "k": normal((batch, kv_heads, width), k or q),
        "v": normal((batch, kv_heads, width), k or q),
        "keys": normal((batch, kv_heads, slots, width), cache),
        "values": normal((batch, kv_heads, slots, width), cache),
        "lengths": np.array(lengths, np.int32),
    }
    if pairs is not None:
        angles = rng.uniform(0, 2 * np.pi, (batch, pairs))
        found["rope"] = tuple(f(angles).astype(np.float32) for f in (np.cos, np.sin))
    if sinks:
        found["sinks"] = rng.standard_normal(heads).astype(np.float32)
        found["sinks"][:3] = 30, -30, -np.inf
    if slopes:
        found["slopes"] = rng.uniform(-0.2, 1, heads).astype(np.float32)
    return found


def by_head(given):
    """Sinks and slopes as the operation takes them: ``[K, G]`` each, or ``[K, 0]`` without them."""
    kv_heads = given["k"].shape[1]
    none = jnp.zeros((kv_heads, 0))
    each = (given.get("sinks"), given.get("slopes"))
    return [none if a is None else jnp.asarray(a).reshape(kv_heads, -1) for a in each]


# --- what is right ------------------------------------------------------------------------------


def turned(x, rope, interleaved):
    """``[B, N, D]`` in float64, every pair turned by its angle."""
    x = x.astype(np.float64)
    if rope is None:
        return x
    cos, sin = (a.astype(np.float64)[:, None] for a in rope)
    pairs = cos.shape[-1]
    first = np.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def slots_of(length, slots, window, rotating):
    """Where the tokens are that one at this position sees, or None if it has no place."""
    if length < 0 or (length >= slots and not rotating):
        return None
    seen = min(length + 1, slots, window or slots)
    return [position % slots for position in range(length - seen + 1, length + 1)]


def one_result(q, keys, values, scale, cap, rounding=0.0, sink=-np.inf, slope=0.0):
    """Of one head ``[D]`` over ``[N, D]``, and how far float32 may be from it.

    Args:
        rounding: how far queries and weights are rounded before they are multiplied.
        sink: score that has no value.
        slope: what a score has more for each token that its key is nearer. The last key is the query's own.
    """
    q, keys, values = (np.asarray(a, np.float64) for a in (q, keys, values))
    scores = keys @ q * scale
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = scores + slope * np.arange(1 - len(keys), 1)
    top = max(scores.max(), sink)
    weights = np.exp(scores - top)
    weights /= weights.sum() + np.exp(np.float64(sink) - top)
    # A score is off by some units of its sum of absolute products, a weight by as much of
    # itself, and the sum by some more.
    size = (np.abs(keys) @ np.abs(q)).max() * abs(scale)
    size_of_bias = abs(float(slope)) * len(keys)
    allowed = UNIT * (16 + 8 * size + 8 * (cap or 0) + 4 * size_of_bias) + rounding * (2 + 2 * size)
    return weights @ values, allowed * (weights @ np.abs(values))


def half_unit(y, dtype):
    """Half of the last place of a narrow number."""
    if dtype == np.float32:
        return 0.0
    digits, least = (10, -14) if dtype == np.float16 else (7, -126)
    return np.ldexp(0.5, np.maximum(np.frexp(y)[1] - 1, least) - digits)


def check(given, got, *, rope=None, scale=None, sliding_window=None, soft_cap=None,
          interleaved=False, rotating=False, rounding=0.0):  # fmt: skip
    """That a result and two caches are right; ``rounding`` as for ``one_result``."""
    out, *caches = map(np.asarray, got)
    q, lengths, slots = given["q"], given["lengths"].tolist(), given["keys"].shape[2]
    rope = given.get("rope")
    news = turned(given["k"], rope, interleaved), given["v"].astype(np.float64)
    for cache, name, new in zip(caches, ("keys", "values"), news, strict=True):
        before = given[name]
        assert cache.dtype == before.dtype and cache.shape == before.shape
        wanted = before.copy()
        for b, length in enumerate(lengths):
            if slots_of(length, slots, None, rotating) is None:
                continue
            written = cache[b, :, length % slots].astype(np.float64)
            allowed = half_unit(written, cache.dtype) + 4 * UNIT * np.abs(new[b]).max()
            if name == "values" or rope is None:
                exact = new[b].astype(np.float32).astype(cache.dtype)
                np.testing.assert_array_equal(written, exact.astype(np.float64))
            assert (np.abs(written - new[b]) <= allowed).all()
            wanted[b, :, length % slots] = cache[b, :, length % slots]
        assert cache.tobytes() == wanted.tobytes()  # nothing else
    assert out.dtype == q.dtype and out.shape == q.shape
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    group = q.shape[1] // given["k"].shape[1]
    queries = turned(q, rope, interleaved)
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        seen, y = (
            slots_of(lengths[b], slots, sliding_window, rotating),
            out[b, h].astype(np.float64),
        )
        if seen is None:
            np.testing.assert_array_equal(y, np.full_like(y, 0 if lengths[b] < 0 else np.nan))
            continue
        keys, values = (cache[b, h // group][seen] for cache in caches)
        sink = given["sinks"][h] if "sinks" in given else -np.inf
        slope = given["slopes"][h] if "slopes" in given else 0.0
        exact, allowed = one_result(
            queries[b, h], keys, values, scale, soft_cap, rounding, sink, slope
        )
        assert (np.abs(y - exact) <= allowed + half_unit(y, out.dtype)).all(), (b, h)


def narrowed(given):
    """The same with a cache in int8, of two layers of which the second is that; and its floats."""
    found = dict(given)
    stack = lambda a: np.stack([np.zeros_like(a), a])
    wide, scales = {}, []
    for name in ("keys", "values"):
        numbers, scale = (np.asarray(a) for a in quantised(jnp.asarray(given[name])))
        wide[name] = numbers.astype(np.float32) * scale[..., None]
        found[name] = stack(numbers)
        scales.append(stack(scale))
    return found | {"scales": tuple(scales), "layer": 1}, given | wide


def check_int8(given, floats, got, rotating=False, **options):
    """As ``check``, of the numbers that the cache stands for; and of those that were written."""
    out, *caches = map(np.asarray, got)
    before = (given["keys"], given["values"], *given["scales"])
    for new, old in zip(caches, before, strict=True):
        assert new.dtype == old.dtype and new.shape == old.shape and not new[0].any()
    numbers, scales = caches[:2], caches[2:]
    wide = [n[1] * s[1][..., None] for n, s in zip(numbers, scales, strict=True)]
    news = turned(floats["k"], floats.get("rope"), False), floats["v"].astype(np.float64)
    slots = floats["keys"].shape[2]
    written = {name: floats[name].astype(np.float32) for name in ("k", "v")}
    for (name, cache), new, old in zip(
        zip(("k", "v"), wide, strict=True), news, (floats["keys"], floats["values"]), strict=True
    ):
        for b, length in enumerate(floats["lengths"].tolist()):
            gone = slots_of(length, slots, None, rotating) is None
            at = [] if gone else [length % slots]
            np.testing.assert_array_equal(np.delete(cache[b], at, 1), np.delete(old[b], at, 1))
            if not gone:  # half of a step, which is a 127th of the largest
                off = np.abs(cache[b, :, at[0]] - new[b]).max(-1)
                assert (off <= np.abs(new[b]).max(-1) / 127 * 0.5001).all()
                written[name][b] = cache[b, :, at[0]]
    # The result is that of floats, had the token been what was written.
    there = {"keys": wide[0], "values": wide[1], **written}
    queries = turned(floats["q"], floats.get("rope"), False).astype(np.float32)
    exact = {**floats, **there, "q": queries.astype(floats["q"].dtype), "rope": None}
    if exact["q"].dtype == np.float32 or floats.get("rope") is None:
        check(exact, (out, *wide), rotating=rotating, **options)


OPTIONS = {
    "window of one": (None, {"sliding_window": 1}),
    "window": (None, {"sliding_window": 4}),
    "window longer than the cache": (None, {"sliding_window": 1000}),
    "rotating window": (None, {"sliding_window": 4, "rotating": True}),
    "cap": (None, {"soft_cap": 2.0}),
    "wide cap": (None, {"soft_cap": 50.0}),
    "scale": (None, {"scale": 0.7}),
    "scale of 0": (None, {"scale": 0.0}),
    "negative scale": (None, {"scale": -0.3}),
    "rope": (10, {}),
    "rope of a part": (3, {}),
    "rope of nothing": (0, {}),
    "interleaved": (10, {"interleaved": True}),
    "interleaved part": (3, {"interleaved": True}),
    "all": (4, {"interleaved": True, "rotating": True, "sliding_window": 7, "soft_cap": 5.0, "scale": 0.4}),
}  # fmt: skip
