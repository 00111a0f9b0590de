"""KVCache: made, grown, placed, donated, and refused where there is no room."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax.errors import UserInputError
from maxjax.kernels.int8_rows import quantised, restored
from maxjax.nn.kv_cache.cache import KVCache
from maxjax.nn.kv_cache.slots import Slots

SIZES = {"batch": 3, "num_kv_heads": 4, "capacity": 8, "head_dim": 5}


def filled(sharding=None):
    cache = KVCache.empty(2, **SIZES, sharding=sharding)
    values = np.random.default_rng(0).standard_normal(cache.keys.shape).astype(np.float32)
    keys = jax.device_put(values, sharding) if sharding is not None else jnp.asarray(values)
    return KVCache(Slots(keys, keys + 1), None, jnp.array([0, 3, 8], jnp.int32))


def test_an_empty_one():
    cache = KVCache.empty(2, **SIZES, dtype="bfloat16")
    assert cache.keys.shape == cache.values.shape == (2, 3, 4, 8, 5)
    assert (cache.num_layers, cache.batch, cache.capacity) == (2, 3, 8)
    assert cache.keys.dtype == cache.values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(cache.lengths, [0, 0, 0])
    assert not cache.keys.any() and cache.lengths.dtype == jnp.int32


def test_it_is_a_pytree_of_three_leaves():
    leaves, tree = jax.tree.flatten(filled())
    assert [leaf.ndim for leaf in leaves] == [5, 5, 1]
    assert isinstance(jax.tree.unflatten(tree, leaves), KVCache)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(filled())]
    assert paths == [".full.keys", ".full.values", ".lengths"]


def test_int8_comes_with_scales():
    sharding = NamedSharding(maxjax.make_mesh(data=1, model=4), P(None, "data", "model"))
    cache = KVCache.empty(2, **SIZES, dtype="int8", sharding=sharding)
    assert cache.keys.dtype == jnp.int8 and len(jax.tree.leaves(cache)) == 5
    for a in cache.full.arrays[2:]:
        assert a.shape == (2, 3, 4, 8) and a.dtype == jnp.float32
        assert a.addressable_shards[0].data.shape == (2, 3, 1, 8)
    grown = cache.grow(11)
    assert grown.full.key_scales.shape == (2, 3, 4, 11)
    assert grown.full.key_scales.sharding.is_equivalent_to(sharding, 4)


def test_layers_that_slide_have_the_slots_of_their_window():
    cache = KVCache.empty(1, **SIZES, sliding_layers=5, window=6)
    assert cache.full.keys.shape == (1, 3, 4, 8, 5) and cache.sliding.keys.shape == (5, 3, 4, 6, 5)
    assert (cache.num_layers, cache.capacity, cache.grow(99).sliding.size) == (6, 8, 6)
    cache = KVCache.empty(0, **SIZES, sliding_layers=2, window=10)
    assert cache.keys.shape == (2, 3, 4, 8, 5) and cache.full.keys.size == 0
    assert [cache.grow(n).sliding.size for n in (9, 10, 11)] == [9, 10, 10]
    assert [cache.grow(n).capacity for n in (9, 10, 11)] == [9, 10, 11]
    KVCache.empty(0, **SIZES, sliding_layers=2, window=3).check_room(8)  # positions, not slots


def test_what_is_written_is_read():
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 3, 4, 5)).astype(np.float32)
    place = jnp.array([[0, 5, 8], [7, 1, 9]], jnp.int32)  # 8 and more: nowhere
    for dtype, off in ((jnp.float32, 0.0), (jnp.bfloat16, 2**-7), (jnp.int8, 1 / 100)):
        slots = Slots.empty((3, 2, 4, 8, 5), dtype).written(1, k, v, place)
        for new, found in zip((k, v), slots.layer_slots(1).floats(jnp.float32), strict=True):
            found = found[0].swapaxes(1, 2)
            wanted = np.zeros((2, 8, 4, 5), np.float32)
            for row, t in ((0, 0), (0, 1), (1, 0), (1, 1)):
                wanted[row, place[row, t]] = new[row, t]
            limit = off * np.abs(new).max()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)
            rounded = slots.rounded(jnp.asarray(new))[0]
            np.testing.assert_array_equal(found[0, 5], rounded[0, 1])
        assert not np.asarray(slots.layer_slots(0).floats(jnp.float32)).any()


def test_no_number_in_int8_is_no_number_again():
    x = jnp.array([[1.0, np.nan], [np.inf, 2.0], [0.0, 0.0], [1e-45, 0.0], [-3e38, 3e38]])
    numbers, scale = quantised(x)
    back = np.asarray(restored(numbers, scale))
    assert np.isnan(back[:2]).any(1).all() and not back[2:4].any()
    np.testing.assert_allclose(back[4], x[4], rtol=1e-6)


def test_growing_keeps_what_is_there():
    cache = filled()
    grown = cache.grow(13)
    assert grown.capacity == 13
    np.testing.assert_array_equal(grown.keys[:, :, :, :8], cache.keys)
    np.testing.assert_array_equal(grown.values[:, :, :, :8], cache.values)
    assert not grown.keys[:, :, :, 8:].any()
    np.testing.assert_array_equal(grown.lengths, cache.lengths)
    assert cache.grow(8) is cache
    traced = jax.jit(lambda cache: cache.grow(13))(cache)
    np.testing.assert_array_equal(traced.keys, grown.keys)


def test_it_is_born_on_its_mesh_and_grows_there():
    sharding = NamedSharding(maxjax.make_mesh(data=1, model=4), P(None, "data", "model"))
    cache = KVCache.empty(2, **SIZES, sharding=sharding)
    assert cache.keys.sharding.is_equivalent_to(sharding, 5)
    assert cache.keys.addressable_shards[0].data.shape == (2, 3, 1, 8, 5)
    assert len(cache.lengths.sharding.device_set) == 4
    grown = filled(sharding).grow(12)
    assert grown.keys.sharding.is_equivalent_to(sharding, 5)
    assert grown.keys.addressable_shards[3].data.shape == (2, 3, 1, 12, 5)


def test_a_donated_one_is_changed_in_place():
    cache = filled()
    before = cache.keys.unsafe_buffer_pointer()
    add = lambda c: jax.tree.map(lambda a: a + jnp.ones((), a.dtype), c)
    after = jax.jit(add, donate_argnums=0)(cache)
    assert cache.keys.is_deleted() and after.keys.unsafe_buffer_pointer() == before


def test_room_is_checked_where_numbers_are_known():
    cache = filled()
    KVCache.empty(2, **SIZES).check_room(8)
    cache.check_room(jnp.array([8, 5, 0]))
    with pytest.raises(UserInputError, match=r"row 2 holds 8 tokens .* 1 more.*capacity is 8"):
        cache.check_room(1)
    with pytest.raises(UserInputError, match=r"row 1 holds 3 tokens .* 6 more"):
        cache.check_room(np.array([0, 6, 0]))

    def inside(cache):
        cache.check_room(3)  # the lengths are not known
        with pytest.raises(UserInputError, match="9 more"):
            cache.check_room(9)  # more than an empty one could hold
        return cache.lengths

    jax.jit(inside)(cache)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"batch": 0}, "batch"), ({"capacity": -1}, "capacity"), ({"head_dim": 2.0}, "head_dim"),
        ({"num_kv_heads": True}, "num_kv_heads"), ({"dtype": "int32"}, "int32"),
        ({"sliding_layers": 1}, "window"), ({"sliding_layers": -1, "window": 3}, "sliding_layers"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_named(changes, name):
    with pytest.raises(UserInputError, match=name):
        KVCache.empty(2, **{**SIZES, **changes})
    with pytest.raises(UserInputError, match="capacity"):
        filled().grow("9")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_abstract_one_is_what_the_real_one_is(dtype):
    mesh = maxjax.make_mesh(data=2, model=2)
    sizes = SIZES | {"batch": 2, "sliding_layers": 1, "window": 4, "dtype": dtype}
    where = NamedSharding(mesh, P(None, "data", "model", None, None))
    for sharding in (where, jax.devices()[1], None):
        real = KVCache.empty(2, **sizes, sharding=sharding)
        abstract = KVCache.empty(2, **sizes, sharding=sharding, abstract=True)
        assert jax.tree.structure(real) == jax.tree.structure(abstract)
        for array, one in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
            assert isinstance(one, jax.ShapeDtypeStruct)
            assert (one.shape, one.dtype) == (array.shape, array.dtype)
            assert one.sharding == (None if sharding is None else array.sharding)
