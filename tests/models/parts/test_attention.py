"""``attend`` with slopes, in every path under it, against NumPy in float64."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import maxjax
from maxjax.models import Qwen2
from maxjax.models.llama import LlamaAttention
from maxjax.models.parts import (
    CAUSAL,
    alibi_slopes,
    attend,
    bidirectional,
    chunked,
    merge_heads,
    no_cache,
    rope,
    sliding,
    split_heads,
)
from tests.models.parts.test_language_model import CONFIG, KINDS, close, ids_of, made

B, T, H, K, D = 2, 23, 4, 2, 8
SLOPES = np.array([0.5, 0.1, -0.05, 0], np.float32)


def reference(q, k, v, mask, slopes, soft_cap=None, sinks=None, real=None):
    """``[B, T, H, D]`` in float64, a query at a time."""
    out, at = np.zeros(q.shape), np.arange(q.shape[1])
    for b, t, h in np.ndindex(*q.shape[:3]):
        distance = t - at
        sees = distance >= 0 if mask.is_causal else np.ones(len(at), bool)
        if mask.window is not None:
            near = (
                at // mask.window == t // mask.window
                if mask.chunked
                else abs(distance) < mask.window
            )
            sees &= near if mask.is_causal else abs(distance) <= mask.window
        if real is not None:
            sees &= at < real[b]
        scores = k[b, sees, h // (H // K)].astype(np.float64) @ q[b, t, h] / np.sqrt(D)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores -= float(slopes[h]) * distance[sees]
        sink = -np.inf if sinks is None else float(sinks[h])
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        weights /= weights.sum() + np.exp(sink - top)
        out[b, t, h] = weights @ v[b, sees, h // (H // K)]
    return out


def operands():
    rng = np.random.default_rng(0)
    normal = lambda heads: rng.standard_normal((B, T, heads, D)).astype(np.float32)
    return normal(H), normal(K), normal(K)


MASKS = {
    "causal": CAUSAL,
    "window": sliding(5),
    "chunks": chunked(6),
    "both ways": bidirectional(),
    "near": bidirectional(4),
}


@pytest.mark.parametrize("which", MASKS)
def test_slopes_are_a_bias_of_the_distance(which):
    q, k, v = operands()
    sinks = None if "window" not in which else np.array([1, -1, 0, 3], np.float32)
    options = {"slopes": SLOPES, "soft_cap": 2.0, "sinks": sinks}
    found, _ = attend(q, k, v, no_cache(T), MASKS[which], **options)
    np.testing.assert_allclose(
        found, reference(q, k, v, MASKS[which], **options), rtol=0, atol=3e-6
    )
    none, _ = attend(q, k, v, no_cache(T), MASKS[which], soft_cap=2.0, sinks=sinks)
    zero, _ = attend(q, k, v, no_cache(T), MASKS[which], **{**options, "slopes": np.zeros(H)})
    np.testing.assert_allclose(zero, none, rtol=0, atol=3e-6)
    assert np.abs(found - none).max() > 0.01


def test_slopes_beside_padding():
    """Of texts of different lengths: tokens after the last one are not attended to, also both ways."""
    q, k, v = operands()
    counts = np.array([T, 9], np.int32)
    for mask in (CAUSAL, bidirectional()):
        cache = no_cache(T, counts=jnp.asarray(counts))
        found, _ = attend(q, k, v, cache, mask, slopes=SLOPES)
        real = None if mask.is_causal else counts
        expected = reference(q, k, v, mask, SLOPES, real=real)
        for row, count in enumerate(counts):
            np.testing.assert_allclose(found[row, :count], expected[row, :count], rtol=0, atol=3e-6)


def test_slopes_must_be_one_for_each_head():
    q, k, v = operands()
    with pytest.raises(ValueError, match="a number for each query head, not"):
        attend(q, k, v, no_cache(T), slopes=SLOPES[:2])


# The slopes that the code of arXiv:2108.12409 computes, as exponents of two.
EXPONENTS = {
    1: [8],
    2: [4, 8],
    3: [4, 8, 2],
    8: [1, 2, 3, 4, 5, 6, 7, 8],
    12: [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5],
    16: [0.5 * i for i in range(1, 17)],
    71: [0.125 * i for i in range(1, 65)] + [0.0625, 0.1875, 0.3125, 0.4375, 0.5625, 0.6875, 0.8125],
}  # fmt: skip


@pytest.mark.parametrize("heads", EXPONENTS)
def test_slopes_of_alibi(heads):
    found = alibi_slopes(heads)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 2.0 ** -np.array(EXPONENTS[heads]), rtol=1e-7)


# --- in a model, with a cache --------------------------------------------------------------------

WINDOW = 5
BASE = dataclasses.replace(CONFIG, num_attention_heads=8, head_dim=4)


def config_of(pattern="ff", kv_heads=4):
    """A Qwen 2 whose layers have full attention (f) or a window (s)."""
    kinds = tuple(KINDS[c] for c in pattern)
    return dataclasses.replace(
        BASE, num_hidden_layers=len(kinds), layer_types=kinds, num_key_value_heads=kv_heads,
        sliding_window=WINDOW if "s" in pattern else None,
    )  # fmt: skip


class BiasedAttention(LlamaAttention):
    """Attention of a Llama, whose heads have slopes."""

    def __call__(self, x, cache, angles):
        q, k, v = (
            split_heads(linear(x), self.head_dim)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        slopes = 2 * alibi_slopes(self.heads)
        y, cache = attend(rope(q, angles), rope(k, angles), v, cache, self.mask, slopes=slopes)
        return self.o_proj(merge_heads(y)), cache


class Biased(Qwen2):
    """A Qwen 2 whose heads have slopes."""

    def __init__(self, config, dtype="float32", *, stacked=True):
        super().__init__(config, dtype, stacked=False)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = BiasedAttention(config, i, self.dtype)
        if stacked:
            self.stack()


def biased(config, mesh=None):
    return made(config, mesh=mesh, model=Biased)


run = jax.jit(
    lambda model, ids, cache=None, lengths=None: model(ids, cache, lengths=lengths),
    donate_argnums=2,
)


def in_pieces(model, ids, cache, lengths):
    found, start = [], 0
    for length in lengths:
        logits, cache = run(model, ids[:, start : start + length], cache)
        found.append(np.asarray(logits))
        start += length
    return np.concatenate(found, 1), cache


@pytest.mark.parametrize("pattern", ["ff", "sf"])
def test_slopes_with_a_cache(pattern):
    """Prompts in chunks, longer and shorter than the window, and steps, are the text in one piece."""
    model, ids = biased(config_of(pattern)), ids_of(2, 30)
    whole = run(model, ids)
    found, _ = in_pieces(model, ids, model.cache(2, 32), (9, 1, 1, 9, 3, 1, 3, 3))
    close(found, whole)
    without = run(made(config_of(pattern), model=Qwen2), ids)
    assert np.abs(whole - without).max() > 0.1


def test_slopes_in_an_int8_cache():
    model, ids = biased(config_of("sf")), ids_of(2, 20)
    found, _ = in_pieces(model, ids, model.cache(2, 32, "int8"), (9, 1, 1, 6, 1, 1, 1))
    assert np.abs(found - run(model, ids)).max() < 0.1


@pytest.mark.parametrize("pattern", ["ff", "sf"])
def test_slopes_in_rows_of_their_own_length(pattern):
    model = biased(config_of(pattern))
    ids, lengths = ids_of(3, 7), np.array([7, 3, 0], np.int32)
    more, counts = ids_of(3, 9, seed=1), np.array([2, 9, 3], np.int32)
    cache = run(model, ids, model.cache(3, 24), lengths=lengths)[1]
    again, cache = run(model, more, cache, lengths=counts)
    one, _ = run(model, ids[:, :1], cache, lengths=np.array([1, 0, 1], np.int32))
    for row, (n, m) in enumerate(zip(lengths, counts, strict=True)):
        alone = run(model, np.concatenate([ids[row, :n], more[row, :m], ids[row, :1]])[None])[0]
        close(again[row, :m], alone[n : n + m])
        if row != 1:  # which had no token in the last call
            close(one[row, 0], alone[n + m])


def test_a_step_with_slopes_changes_the_cache_in_place():
    """On a CPU it goes through the kernel, which reads what is there, and copies nothing."""
    model = biased(config_of("ff"))
    for length in (4, 1):
        cache = model.cache(2, 64)
        places = {a.unsafe_buffer_pointer() for a in (cache.keys, cache.values)}
        program = run.lower(model, ids_of(2, length), cache).compile().as_text()
        assert ("maxjax_decode_attention" in program) == (length == 1)
        shape = ",".join(map(str, cache.keys.shape))
        assert not re.search(rf"f32\[{shape}\]\S* copy\(", program)
        _, after = run(model, ids_of(2, length), cache)
        assert {a.unsafe_buffer_pointer() for a in (after.keys, after.values)} == places


MESHES = {
    "heads": ({"model": 2}, 4, 2),
    "heads and sequences": ({"data": 2, "model": 4}, 4, 2),
    "query heads over replicated KV heads": ({"model": 8}, 1, 8),
    "slots": ({"model": 8}, 4, 3),
    "query heads that are not split": ({"model": 3}, 4, 2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("where", MESHES)
def test_slopes_on_meshes(where, types):
    """Also windows: in chunks and steps, where each device has some heads, some sequences or some slots."""
    sizes, kv_heads, batch = MESHES[where]
    config, ids = config_of("sf", kv_heads), ids_of(batch, 20)
    whole = run(biased(config), ids)
    model = biased(config, mesh=maxjax.make_mesh(axis_types=types, **sizes))
    close(run(model, ids), whole)
    found, _ = in_pieces(model, ids, model.cache(batch, 24), (8, 7, 1, 1, 2, 1))
    close(found, whole)


def test_weights_of_attention_with_slopes():
    """Those that a capture sees are those of the results, with and without a cache."""
    model, ids = biased(config_of("sf")), ids_of(2, 12)
    found = []
    for cache in ((), (model.cache(2, 12),)):
        with maxjax.capture(model, "layers.*.self_attn:weights") as seen:
            output = model(ids, *cache)
        close(output[0] if cache else output, run(model, ids))
        found.append([np.asarray(seen[f"layers.{i}.self_attn:weights"]) for i in range(2)])
    for without, with_cache in zip(*found, strict=True):
        close(with_cache, without)
