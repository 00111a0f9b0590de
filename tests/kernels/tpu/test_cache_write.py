"""The Mosaic kernel that writes single tokens, interpreted on a CPU, against a scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import cache_write, explicit
from maxjax.kernels.decode import step
from maxjax.kernels.tpu.cache_write import write_token

L, B, K = 2, 6, 2


def given(dtype, slots, width=5):
    """Keys, values and scales, a token of each, and its slots: two rows have none."""
    rng = np.random.default_rng(0)
    make = lambda dtype, *shape: jnp.asarray(rng.integers(-99, 99, shape), dtype)
    places = jnp.array([0, slots - 1, slots, 127 % slots, slots + 500, 130 % slots], jnp.int32)
    kinds = [(dtype, width), (dtype, width), ("float32",), ("float32",)]
    arrays = [make(name, L, B, K, slots, *tail) for name, *tail in kinds]
    return arrays, [make(name, B, K, *tail) for name, *tail in kinds], jnp.int32(1), places


@pytest.mark.parametrize("dtype, slots", [("int8", 200), ("bfloat16", 256), ("float32", 7)])
def test_it_writes_what_a_scatter_writes(dtype, slots):
    operands = given(dtype, slots)
    for got, wanted in zip(
        write_token(*operands, interpret=True), step.write_token(*operands), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)


# Rows of the tokens: none of the second and last is written, also not by programs of the tokens that have no slot.
ROWS = np.array([4, 4, 4, 0, 0, 3], np.int32)
NO, FULL = 300, 256


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize(
    "places",
    [(7, 8, 9, 140, 141, 0), (NO, 127, NO, NO, 5, 130), (3, NO, 200, 0, 1, NO), (NO,) * 6],
    ids=str,
)
def test_tokens_of_any_rows(dtype, places):
    """Several tokens of a row, and tokens without a slot, whose rows others have."""
    arrays, new, layer, _ = given(dtype, FULL)
    slot = np.array(places, np.int32)
    # Nothing is known of the row of a token that is not written.
    rows = np.where(slot < FULL, ROWS, [0, -1, 3, 4, 0, 4]).astype(np.int32)
    found = write_token(arrays, new, layer, jnp.asarray(slot), jnp.asarray(rows), interpret=True)
    for got, array, one in zip(found, arrays, new, strict=True):
        wanted = np.array(array)
        for n in np.flatnonzero(slot < FULL):
            wanted[1, rows[n], :, slot[n]] = one[n]
        np.testing.assert_array_equal(got, wanted)


def lowered(width=64, mesh=None, known=False, layered=True):
    """The program for TPUs of an int8 cache on a mesh that splits the rows and the heads."""
    where = lambda *axes: None if mesh is None else jax.NamedSharding(mesh, jax.P(*axes))
    of = lambda dtype, spec, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=where(*spec))
    axes, lead = ("data", "model"), (None,) * layered
    cache = (L, B, K, 256)[not layered :]
    keys, scales = of("int8", (*lead, *axes), *cache, width), of("float32", (*lead, *axes), *cache)
    new = [of("int8", axes, B, K, width), of("float32", axes, B, K)]
    entries = [*((),) * layered, ("data",), ("model",), (), ()]
    division = explicit.Division.of(mesh, entries) if known else None

    def run(keys, scales, new, slot):
        return cache_write.write_token([keys, scales], new, jnp.int32(1), slot, division)

    traced = jax.jit(run).trace(keys, scales, new, of("int32", ("data",), B))
    return traced.lower(lowering_platforms=("tpu",)).as_text()


def test_where_it_is_used():
    call, scatter = "tpu_custom_call", '"stablehlo.scatter"'
    text = lowered()
    assert text.count("@" + call) == 1 and scatter not in text
    text = lowered(layered=False)
    assert text.count("@" + call) == 1 and scatter not in text
    text = lowered(width=128)  # the scales alone
    assert text.count("@" + call) == 1 and text.count(scatter) == 1
    mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    assert call not in lowered(mesh=mesh)
    for layered in (True, False):
        text = lowered(mesh=mesh, known=True, layered=layered)
        assert call in text and scatter not in text and f"x{B // 2}x{K // 2}x64x256xi8" in text
    text = lowered(128, mesh, known=True)
    assert call in text and text.count(scatter) == 1
