"""The Mosaic kernel of attention of many queries, interpreted on a CPU, against NumPy in float64.

The cases are those of the Triton kernel; the fixture here makes them run this one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import attention as door
from maxjax.kernels import explicit
from maxjax.kernels.attention import causal_attention
from maxjax.kernels.int8_rows import quantised, restored
from maxjax.kernels.tpu import attention as tpu
from maxjax.kernels.tpu.mosaic import unavailable
from tests.kernels.gpu.test_attention import (  # noqa: F401
    ROUNDING,
    interpret,
    operands,
    reference,
    seen,
    test_an_encoder,
    test_an_int8_cache,
    test_causal,
    test_keys_in_any_order,
    test_sizes,
    test_the_derivative_uses_its_sums,
)


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch, tpu.kernel)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", [16, 128])
def test_chunks_of_an_int8_cache(width, interpreted):
    """Slots come last in a cache of narrow heads."""
    q, cache, positions, key_positions = operands(width=width)
    (keys, ks), (values, vs) = map(quantised, cache)
    got = causal_attention(
        q, [keys, values, ks, vs], 1, positions, key_positions, scale=0.1, sliding_window=64,
        chunked=True,
    )  # fmt: skip
    wide = restored(keys, ks)[1], restored(values, vs)[1]
    sees = seen(positions, key_positions)
    sees &= key_positions[:, None] // 64 == positions[:, :, None] // 64
    exact, size = reference(q, *wide, sees, 0.1)
    assert (np.abs(np.asarray(got) - exact) <= 4 * ROUNDING["float32"] * size).all()


def test_a_tile_that_sees_no_key(interpreted):
    """Its numbers are finite, and its sum counts for nothing."""
    q, cache, positions, key_positions = operands()
    late = key_positions + 1000
    out, sums = door.partial_attention(q, cache, 0, positions, late, scale=0.3)
    assert np.isfinite(out).all() and (np.asarray(sums) < -1e38).all()


# --- where it runs --------------------------------------------------------------------------------


def lowered(mesh, **options):
    """The program for TPUs of attention on a mesh of devices that are not TPUs."""
    where = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))
    of = lambda sharding, *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    at = np.arange(4096, dtype=np.int32)[None]
    run = lambda q, cache: causal_attention(q, [cache, cache], 0, at, at, **options)
    traced = jax.jit(run).trace(
        of(where(None, None, "model"), 1, 4096, 4, 64), of(where(None, None, "model"), 2, 1, 2, 4096, 64)
    )  # fmt: skip
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_each_device_runs_it_on_its_part(kind):
    mesh = jax.make_mesh((2,), ("model",), (getattr(jax.sharding.AxisType, kind),))
    if kind == "Auto":
        assert "tpu_custom_call" not in lowered(mesh)  # nobody says how the queries are divided
    entries = [(), (), ("model",), ()]
    text = lowered(mesh, division=explicit.Division.of(mesh, entries))
    assert text.count("tpu_custom_call") == 1 and "tensor<2x1x1x64x4096xbf16>" in text


def test_which_tpus():
    device = lambda kind: jax.sharding.AbstractDevice(kind, 1, "tpu")
    assert unavailable(device("TPU v5 lite")) == unavailable(device("TPU7x")) == unavailable() == ""
    assert unavailable(device("TPU v2")) == "Pallas needs a TPU v4 or newer, this is a TPU v2"
