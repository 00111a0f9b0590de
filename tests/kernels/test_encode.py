"""The encoders in jnp, against those of storage.blocks, which are ggml's in every byte."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax.kernels import blocks, encode
from maxjax.kernels.encode import encode as encode_jnp
from maxjax.storage.blocks import ENCODERS, LAYOUTS, decode
from maxjax.storage.blocks import encode as encode_host
from tests.storage.blocks.rows import importance, rows

KINDS = [
    "bell",
    "uniform",
    "positive",
    "zero",
    "weights",
    "spikes",
    "mixed rows",
    "huge",
]
WEIGHTED = [name for name in ENCODERS if name not in ("Q8_0", "MXFP4")]


def lost(name, found, values, weights=1.0) -> np.ndarray:
    """The squared errors of each row."""
    errors = (decode(name, np.asarray(found)) - values).astype(np.float64)
    return (weights * errors**2).sum(axis=-1)


@pytest.mark.sampled
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_nearly_all_blocks_are_those_of_the_host(name, weighted):
    """Sums in another order may choose another scale of nearly the same error."""
    given = importance() if weighted else None
    run = jax.jit(lambda values: encode_jnp(name, values, given))
    for kind in KINDS:
        if kind == "spikes" and (weighted or name == "Q5_K"):
            continue  # which of two scales a spike gets is left to chance: the next test counts
        values = rows(kind)[:64]
        found, expected = np.asarray(run(values)), encode_host(name, values, importance=given)
        assert found.dtype == np.uint8 and found.shape == expected.shape
        different = (found != expected).reshape(-1, LAYOUTS[name].nbytes).any(1).mean()
        if kind in ("bell", "uniform", "positive", "weights"):
            assert different < 0.15, (kind, different)
        weights = given if weighted and name in WEIGHTED else 1.0
        ours, theirs = (lost(name, one, values, weights) for one in (found, expected))
        assert ours.sum() <= 1.05 * theirs.sum(), kind


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_as_many_rows_with_spikes_are_better_as_worse(name, weighted):
    """The last bit of a sum may choose a scale that rounds a spike better, or worse, by far."""
    given, values = importance() if weighted else None, rows("spikes", 1024)
    found = jax.jit(lambda values: encode_jnp(name, values, given))(values)
    expected = encode_host(name, values, importance=given)
    weights = given if weighted and name in WEIGHTED else 1.0
    ours, theirs = (lost(name, one, values, weights) for one in (found, expected))
    worse, better = (ours > 1.05 * theirs).sum(), (theirs > 1.05 * ours).sum()
    assert worse - better <= 4 * np.sqrt(worse + better), (worse, better)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats(dtype):
    values = jnp.asarray(rows("bell")[:8], dtype)
    found = encode_jnp("Q8_0", values)
    expected = encode_host("Q8_0", np.asarray(values).astype(np.float32))
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_in_chunks(size, monkeypatch):
    values = rows("bell")[:16]
    encoded = lambda: np.asarray(jax.jit(functools.partial(encode_jnp, "Q4_0"))(values))
    whole = encoded()
    monkeypatch.setattr(encode, "_CHUNK", 32 * 8 * size)
    np.testing.assert_array_equal(encoded(), whole)


def test_in_shard_map_and_vmap():
    mesh = maxjax.make_mesh(model=4)
    values = rows("bell")[:8]
    whole = encode_host("Q8_0", values)
    for spec in (P("model"), P(None, "model")):
        run = jax.shard_map(
            lambda a: encode_jnp("Q8_0", a), mesh=mesh, in_specs=spec, out_specs=spec
        )
        np.testing.assert_array_equal(np.asarray(jax.jit(run)(values)), whole)
    found = jax.vmap(lambda a: encode_jnp("Q8_0", a))(values)
    np.testing.assert_array_equal(np.asarray(found), whole)


def test_importance_of_experts():
    values = rows("bell")[:8].reshape(2, 4, 256)
    given = np.stack([importance(), importance()[::-1]])
    found = jax.jit(functools.partial(encode_jnp, "Q4_0"))(values, given[:, None])
    expected = encode_host("Q4_0", values, importance=given)
    assert (np.asarray(found) != expected).mean() < 0.02


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in blocks.DECODERS if not name.startswith("IQ")])
def test_what_it_made_is_decoded(name):
    values = rows("weights")[:4]
    found = jax.jit(lambda values: blocks.decode(name, encode_jnp(name, values)))(values)
    assert np.abs(found - values).max() < np.abs(values).max() / 3


@pytest.mark.parametrize("shape", [(0, 32), (3, 0, 64), (2, 0)])
def test_nothing_to_encode(shape):
    assert encode_jnp("Q8_0", jnp.ones(shape)).shape == (*shape[:-1], shape[-1] // 32 * 34)


@pytest.mark.parametrize("shape", [(), (40,), (3, 0, 33)])
def test_rows_that_are_no_whole_blocks(shape):
    with pytest.raises(
        ValueError, match="a multiple of 32, the number of values in a block of Q8_0"
    ):
        encode_jnp("Q8_0", jnp.zeros(shape))
    with pytest.raises(NotImplementedError, match="type 'IQ4_NL'; supported are Q4_0"):
        encode_jnp("IQ4_NL", jnp.zeros(32))
