"""Tokens written in place on a CPU, or row by row, as TPUs do it, are those that a scatter writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.kernels import explicit, native
from maxjax.kernels.cache_read import slots_of
from maxjax.kernels.cache_write import _row_by_row, _scattered, _Write, write_tokens

L, B, K, S, T, D = 2, 4, 2, 11, 5, 3
FIRST = np.array([0, 4, 8, S], np.int32)
COUNTS = np.array([T, 3, T, 0], np.int32)  # of the third row two do not fit


def given(width=(D,), seed=0):
    rng = np.random.default_rng(seed)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    token = np.arange(T, dtype=np.int32)
    place = np.where(token < COUNTS[:, None], FIRST[:, None] + token, S)
    return make(L, B, K, S, *width), make(B, T, K, *width), jnp.int32(1), jnp.asarray(place)


@pytest.mark.parametrize("width", [(D,), ()], ids=["keys", "scales"])
def test_row_by_row(width):
    operands = given(width)
    (found,) = _row_by_row(_Write(True, None), *operands)
    np.testing.assert_array_equal(found, _scattered(*operands))


@pytest.mark.parametrize("width", [(D,), ()], ids=["keys", "scales"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_in_place_on_a_cpu(width, dtype):
    array, new, layer, place = given(width)
    array, new = (10 * array).astype(dtype), (10 * new).astype(dtype)
    place = place.at[2, :2].set(place[2, 1::-1])  # in any order
    wanted = np.asarray(_scattered(array, new, layer, place))

    @jax.jit
    def run(array, new, layer, place, start):
        array = write_tokens(array, new, layer, place)
        return array, slots_of(array, layer, start, 4)

    for layer_, start in [(layer, 0), (layer, 5), (jnp.int32(0), S)]:
        found, slots = run(array, new, layer_, place, jnp.int32(start))
        start = min(start, S - 4)
        np.testing.assert_array_equal(slots, found[layer_, :, :, start : start + 4])
    found, _ = run(array, new, layer, place, jnp.int32(0))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(native.library() is None, reason="the kernels were not built")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loop_over_layers_converts_no_cache(dtype):
    shape = (4, 1, 2, 512, 32)

    def run(cache, new, place):
        def layer(i, state):
            cache, total = state
            cache = write_tokens(cache, new, i, place)
            return cache, total + slots_of(cache, i, place[0, 0], 8).astype(jnp.float32)

        return jax.lax.fori_loop(0, shape[0], layer, (cache, jnp.zeros((1, 2, 8, 32))))

    of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    operands = of(shape, dtype), of((1, 8, 2, 32), dtype), of((1, 8), jnp.int32)
    compiled = jax.jit(run, donate_argnums=0).trace(*operands).lower().compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 1 * 2 * 512 * 32


def test_the_derivative():
    array, new, layer, place = given()
    weights = jnp.arange(array.size, dtype=jnp.float32).reshape(array.shape)
    loss = lambda a, n, rows: jnp.sum(weights * write_tokens(a, n, layer, place, rows) ** 2)
    found, wanted = (jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(array, new, rows)
                     for rows in (True, False))  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    lines = lambda rows: jax.vmap(lambda a, n: write_tokens(a, n, layer, place, rows))
    stacks = jnp.stack([array, 2 * array]), jnp.stack([new, new])
    np.testing.assert_array_equal(lines(True)(*stacks), lines(False)(*stacks))


def lowered(mesh, division=None, length=T):
    """The program for TPUs on a mesh that splits the rows and the heads."""
    where = lambda *axes: None if mesh is None else jax.NamedSharding(mesh, jax.P(*axes))
    of = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where(*spec))
    place = jnp.zeros((B, length), jnp.int32)
    traced = jax.jit(lambda a, n: write_tokens(a, n, jnp.int32(0), place, True, division)).trace(
        of((None, "data", "model"), L, B, K, S, D), of(("data", None, "model"), B, length, K, D)
    )
    return traced.lower(lowering_platforms=("tpu",)).as_text()


def pages_lowered(mesh, division=None):
    """The program for TPUs that writes to pages on a mesh that splits the heads."""
    where = lambda *axes: None if mesh is None else jax.NamedSharding(mesh, jax.P(*axes))
    of = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where(*spec))
    place, table = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, 3), jnp.int32)

    def run(array, new):
        return write_tokens(array, new, jnp.int32(0), place, division=division, table=table)

    traced = jax.jit(run).trace(
        of((None, None, "model"), L, 8, K, 128, D), of((None, None, "model"), B, T, K, D)
    )
    return traced.lower(lowering_platforms=("tpu",)).as_text()


def test_programs_for_tpus_write_pages_on_each_device():
    update, kinds = "stablehlo.dynamic_update_slice", jax.sharding.AxisType
    assert update in pages_lowered(None)
    auto, typed = (
        jax.make_mesh((2,), ("model",), (kind,)) for kind in (kinds.Auto, kinds.Explicit)
    )
    division = explicit.Division.of(auto, [(), (), ("model",), (), ()])
    for text in (pages_lowered(typed), pages_lowered(auto, division)):
        # The tokens are last in memory.
        assert update in text and f"tensor<{L}x8x{K // 2}x{D}x128xbf16>" in text
    assert update not in pages_lowered(auto)


def test_what_programs_for_tpus_do():
    rows = "stablehlo.dynamic_update_slice"
    assert rows in lowered(None) and rows not in lowered(None, length=S + 1)
    kinds = jax.sharding.AxisType
    auto, typed = (
        jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2)
        for kind in (kinds.Auto, kinds.Explicit)
    )
    entries = [(), ("data",), ("model",), (), ()]
    # Each device's part, for which it must be known how the cache is divided.
    for text in (lowered(typed), lowered(auto, explicit.Division.of(auto, entries))):
        assert rows in text and f"tensor<{L}x{B // 2}x{K // 2}x{S}x{D}xbf16>" in text
    assert rows not in lowered(auto)
