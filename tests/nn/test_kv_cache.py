"""KVCache: made, grown, placed, donated, and refused where there is no room."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax.errors import UserInputError
from maxjax.nn.kv_cache import KVCache

SIZES = {"batch": 3, "num_kv_heads": 4, "capacity": 8, "head_dim": 5}


def filled(sharding=None):
    cache = KVCache.empty(2, **SIZES, sharding=sharding)
    values = np.random.default_rng(0).standard_normal(cache.keys.shape).astype(np.float32)
    keys = jax.device_put(values, sharding) if sharding is not None else jnp.asarray(values)
    return KVCache(keys, keys + 1, jnp.array([0, 3, 8], jnp.int32))


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
    assert paths == [".keys", ".values", ".lengths"]


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
        ({"num_kv_heads": True}, "num_kv_heads"), ({"dtype": "int8"}, "int8"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_named(changes, name):
    with pytest.raises(UserInputError, match=name):
        KVCache.empty(2, **{**SIZES, **changes})
    with pytest.raises(UserInputError, match="capacity"):
        filled().grow("9")
