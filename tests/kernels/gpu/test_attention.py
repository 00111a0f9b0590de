"""The Triton kernel of attention of many queries, interpreted on a CPU, against NumPy in float64."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import attention as door
from maxjax.kernels import blocked_attention as blocks
from maxjax.kernels.attention import NO_KEY, attention, causal_attention
from maxjax.kernels.gpu import attention as gpu
from maxjax.kernels.int8_rows import quantised, restored

B, T, S, H, K, D = 2, 150, 200, 4, 2, 20
# How far a number of a type may be from what it stands for, in units of its size.
ROUNDING = {"float32": 2.0**-20, "bfloat16": 2.0**-7}
needs_triton = pytest.mark.skipif(
    jax.__version__ >= "0.11", reason="it lowers Triton only for devices it knows"
)


def interpret(monkeypatch, kernel):
    """Attention in blocks runs a kernel, interpreted, whatever the number of scores."""

    def run(operands, attending):
        return blocks._by_kernel(kernel, attending, *operands, interpret=True)

    monkeypatch.setattr(blocks, "_OPERATION", run)
    monkeypatch.setattr(door, "MOST_SCORES", 100)


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch, gpu.kernel)


def operands(dtype="float32", width=D, heads=H, seed=0):
    """Queries after 0 and after 50 tokens of a cache of two layers, the positions of both."""
    rng = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    cache = [make(2, B, K, S, width) for _ in range(2)]
    positions = np.array([[0], [50]], np.int32) + np.arange(T, dtype=np.int32)
    return make(B, T, heads, width), cache, positions, np.arange(S, dtype=np.int32)[None]


def reference(q, keys, values, sees, scale, cap=None):
    """``[B, T, H, D]`` in float64, and the mean of the sizes of what was added; ``sees`` is ``[B, T, S]``."""
    q, keys, values = (np.asarray(a, np.float64) for a in (q, keys, values))
    group = q.shape[2] // keys.shape[1]
    keys, values = (np.repeat(a, group, axis=1) for a in (keys, values))
    scores = np.einsum("bthd,bhsd->bhts", q, keys) * scale
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = np.where(sees[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = lambda v: np.einsum("bhts,bhsd->bthd", weights, v)
    return mixed(values), mixed(np.abs(values))


def seen(positions, key_positions, window=None):
    distance = positions[:, :, None].astype(np.int64) - key_positions[:, None]
    return (distance >= 0) & (distance < (window or 2**40))


CASES = {
    "plain": {},
    "window": {"sliding_window": 70},
    "window of one": {"sliding_window": 1},
    "cap": {"soft_cap": 2.0},
    "both": {"sliding_window": 33, "soft_cap": 20.0},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("which", CASES)
def test_causal(which, dtype, interpreted):
    options = CASES[which]
    q, cache, positions, key_positions = operands(dtype)
    got = causal_attention(q, cache, 1, positions, key_positions, scale=0.3, **options)
    sees = seen(positions, key_positions, options.get("sliding_window"))
    exact, size = reference(q, *(a[1] for a in cache), sees, 0.3, options.get("soft_cap"))
    assert got.dtype == q.dtype
    assert (np.abs(np.asarray(got, np.float64) - exact) <= 4 * ROUNDING[dtype] * size).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "heads"), [(64, 2), (80, 16), (128, 4), (192, 2), (256, 4)])
def test_sizes(width, heads, interpreted):
    q, cache, positions, key_positions = operands("bfloat16", width, heads)
    scale = 1 / np.sqrt(width)
    got = causal_attention(q, cache, 0, positions, key_positions)
    exact, size = reference(q, *(a[0] for a in cache), seen(positions, key_positions), scale)
    assert (np.abs(np.asarray(got, np.float64) - exact) <= 4 * ROUNDING["bfloat16"] * size).all()


def test_keys_in_any_order(interpreted):
    """As in a rotating cache, after the new tokens; some slots are empty, and hold large numbers."""
    q, cache, positions, _ = operands()
    rng = np.random.default_rng(1)
    key_positions = np.stack([rng.permutation(S) for _ in range(B)]).astype(np.int32)
    key_positions[:, 7:20] = NO_KEY
    key_positions[:, 0] = 0  # every query sees a key
    cache = [a.at[:, :, :, 7:20].set(1e30) for a in cache]
    got = causal_attention(q, cache, 1, positions, key_positions, scale=0.3, sliding_window=190)
    sees = seen(positions, key_positions, 190)
    exact, size = reference(q, *(a[1] for a in cache), sees, 0.3)
    alone = sees.any(-1)
    off = np.abs(np.asarray(got) - exact) <= 4 * ROUNDING["float32"] * size
    assert alone.mean() > 0.9 and off[alone].all()


def test_an_int8_cache(interpreted):
    q, cache, positions, key_positions = operands()
    (keys, ks), (values, vs) = map(quantised, cache)
    got = causal_attention(
        q, [keys, values, ks, vs], 1, positions, key_positions, scale=0.3, sliding_window=40
    )
    wide = restored(keys, ks)[1], restored(values, vs)[1]
    exact, size = reference(q, *wide, seen(positions, key_positions, 40), 0.3)
    assert (np.abs(np.asarray(got) - exact) <= 4 * ROUNDING["float32"] * size).all()


def test_an_encoder(interpreted):
    """Every token sees every one that is there."""
    q, cache, *_ = operands()
    keys, values = (a[0].swapaxes(1, 2) for a in cache)
    mask = np.arange(S)[None] < np.array([[S], [77]])
    got = jax.jit(lambda *arrays: attention(*arrays, scale=0.3))(q, keys, values, mask)
    sees = np.broadcast_to(mask[:, None], (B, T, S))
    exact, size = reference(q, *(a[0] for a in cache), sees, 0.3)
    assert (np.abs(np.asarray(got) - exact) <= 4 * ROUNDING["float32"] * size).all()


def test_the_derivative_uses_its_sums(interpreted):
    q, cache, positions, key_positions = operands()

    def loss(q, cache):
        y = causal_attention(q, cache, 1, positions, key_positions, scale=0.3, soft_cap=5.0)
        return jnp.sum(jnp.sin(y))

    slope = lambda: jax.jit(jax.grad(lambda *a: loss(*a), (0, 1)))(q, cache)
    got = slope()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door, "MOST_SCORES", 1 << 30)
        patch.setattr(door, "FEW_KEYS", 1 << 30)
        wanted = slope()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


# --- where it runs --------------------------------------------------------------------------------


def lowered(dtype="bfloat16", width=64, derivative=False, **options):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    at = np.arange(4096, dtype=np.int32)[None]

    def run(q, cache):
        return causal_attention(q, [cache, cache], 0, at, at, **options)

    total = jax.grad(lambda q, cache: jnp.sum(run(q, cache), dtype=jnp.float32))
    traced = jax.jit(total if derivative else run).trace(
        of(1, 4096, 4, width), of(2, 1, 2, 4096, width)
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_triton
@pytest.mark.parametrize("derivative", [False, True])
def test_it_is_what_programs_for_nvidia_gpus_call(derivative):
    assert lowered(derivative=derivative, sliding_window=9).count("xla.gpu.triton") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"width": 320}, "heads are 320 wide, at most 256"),
        ({"dtype": "float32", "softmax_dtype": "bfloat16"}, "scores are in bfloat16"),
    ],
    ids=["wide", "scores"],
)
def test_what_it_lacks_is_logged_and_runs_in_jnp(options, reason, caplog):
    with caplog.at_level(logging.DEBUG, "maxjax"):
        assert "triton" not in lowered(**options)
    assert reason in caplog.text
