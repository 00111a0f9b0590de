"""Caches that go round and caches in int8, in the decoder: against texts in one piece, against a
cache of every token for every layer, and against transformers.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import maxjax
from maxjax.errors import UserInputError
from maxjax.models import Qwen2Config
from maxjax.nn import KVCache
from tests.models.decoders import generated, greedy, oracle, ours
from tests.models.parts.test_language_model import KINDS, VOCAB, call, close, ids_of, made, on

WINDOW = 5
BASE = Qwen2Config(VOCAB, 32, 40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
# Which layers slide: s; Gemma 2, Gemma 3, Qwen 2 with max_window_layers, and one that repeats not.
PATTERNS = {"all": "ss", "1:1": "sfsf", "5:1": "sssssfss", "last": "ffss", "listed": "sfssf"}
# Of int8, where logits have a standard deviation of 1.
MOST, MEAN = 0.15, 0.02


def config_of(pattern="1:1", window=WINDOW, **changes):
    kinds = tuple(KINDS[c] for c in PATTERNS.get(pattern, pattern))
    window = window if KINDS["s"] in kinds else None
    sizes = {"num_hidden_layers": len(kinds), "layer_types": kinds, "sliding_window": window}
    return dataclasses.replace(BASE, **sizes, **changes)


def full_cache(model, batch, capacity, dtype="float32"):
    """One in which also layers that slide keep every token."""
    config = model.config
    return KVCache.empty(
        config.num_hidden_layers, batch=batch, num_kv_heads=config.num_key_value_heads, capacity=capacity,
        head_dim=config.head_dim, dtype=dtype,
    )  # fmt: skip


def in_pieces(model, ids, cache, lengths, run=on):
    found, start = [], 0
    for length in lengths:
        logits, cache = run(model, ids[:, start : start + length], cache)
        found.append(np.asarray(logits))
        start += length
    return np.concatenate(found, 1), cache


# --- caches that go round ------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("pattern", "stacked"),
    [("all", True), ("5:1", True), ("1:1", False)]
    + [pytest.param(name, True, marks=pytest.mark.extra) for name in ("last", "listed")],
)
def test_it_keeps_what_the_layers_see(pattern, stacked):
    config = config_of(pattern)
    model, ids, sliding = (
        made(config, stacked=stacked),
        ids_of(2, 30),
        config.layer_types.count(KINDS["s"]),
    )
    cache = model.cache(2, 32)
    assert cache.sliding.keys.shape == (sliding, 2, 2, WINDOW, 8)
    assert cache.full.keys.shape == (config.num_hidden_layers - sliding, 2, 2, 32, 8)
    assert (cache.capacity, cache.num_layers, cache.batch) == (32, config.num_hidden_layers, 2)
    # Longer than the window, shorter, and of a token.
    found, cache = in_pieces(model, ids, cache, (9, 1, 1, 9, 3, 1, 3, 3))
    close(found, call(model, ids))
    np.testing.assert_array_equal(cache.lengths, [30, 30])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pattern", ["all", "1:1"])
def test_rows_of_their_own_length(pattern):
    """As with a cache of every token, whatever the padding is, also where rows have no token."""
    model = made(config_of(pattern))
    caches = [model.cache(4, 40), full_cache(model, 4, 40)]
    for seed, counts in enumerate(
        ([7, 0, 12, 3], [1, 1, 0, 1], [12, 4, 5, 0], [1, 1, 1, 1], [0, 6, 2, 11], [1, 0, 1, 1])
    ):
        counts = np.array(counts, np.int32)
        ids = ids_of(4, 1 if counts.max() == 1 else 12, seed)
        (found, expected), caches = zip(
            *(on(model, ids, cache, counts) for cache in caches), strict=True
        )
        real = np.arange(ids.shape[1]) < counts[:, None]
        close(np.asarray(found)[real], np.asarray(expected)[real])
    np.testing.assert_array_equal(caches[0].lengths, caches[1].lengths)


def test_padding_leaves_no_trace():
    model, ids = made(config_of("all")), ids_of(2, 12)
    lengths = np.array([3, 12], np.int32)
    cache = on(model, ids_of(2, 9, 1), model.cache(2, 32), np.array([9, 2], np.int32))[1]
    _, one = on(model, ids, cache, lengths)
    _, other = on(model, np.where(np.arange(12) < lengths[:, None], ids, 9), cache, lengths)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    _, none = on(model, ids, one, np.zeros(2, np.int32))
    jax.tree.map(np.testing.assert_array_equal, one, none)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Mistral", "Qwen2"])
def test_as_transformers_generates(tmp_path, kind):
    settings = {"sliding_window": WINDOW}
    if kind == "Qwen2":
        settings |= {"use_sliding_window": True, "max_window_layers": 1}
    model = oracle(kind, tmp_path, **settings)
    mine, rng = ours(tmp_path), np.random.default_rng(0)
    assert mine.cache(1, 64).sliding.size == WINDOW
    prompts = [rng.integers(1, 90, n).astype(np.int32) for n in (17, 3, 9)]
    expected = generated(model, prompts, 24)
    np.testing.assert_array_equal(greedy(mine, prompts, 24), expected)
    np.testing.assert_array_equal(greedy(mine, prompts, 24, chunk=4), expected)


@pytest.mark.extra
def test_a_capacity_within_the_window():
    model, ids = made(config_of("1:1", window=12)), ids_of(1, 24)
    cache = model.cache(1, 8)
    assert cache.sliding.size == cache.full.size == 8
    _, cache = on(model, ids[:, :8], cache)
    _, whole = on(model, ids[:, :8], full_cache(model, 1, 8))
    close(cache.sliding.keys[0], whole.keys[0])  # no slot but the token's own
    cache = cache.grow(10)
    assert cache.sliding.size == 10
    cache = cache.grow(16)
    assert (cache.sliding.size, cache.full.size) == (12, 16)
    found, cache = in_pieces(model, ids[:, 8:16], cache, (8,))
    close(found, call(model, ids)[:, 8:16])
    cache = cache.grow(30)  # it has gone round by now
    assert (cache.sliding.size, cache.full.size) == (12, 30)
    close(in_pieces(model, ids[:, 16:], cache, (8,))[0], call(model, ids)[:, 16:])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("pattern", ["all", "1:1"])
def test_what_has_no_room(pattern, length):
    """Refused, or NaN inside jit, and nothing is written over by it."""
    model, ids = made(config_of(pattern)), ids_of(2, 8)
    counts = np.array([8 - length + 1, 3], np.int32)
    _, cache = on(model, ids, model.cache(2, 8), counts)
    with pytest.raises(UserInputError, match="row 0 .* its capacity is 8"):
        model(ids_of(2, length), cache)
    logits, after = on(model, ids_of(2, length), cache)
    lost = np.isnan(np.asarray(logits)).any(-1)
    assert lost.tolist() == [[False] * (length - 1) + [True], [False] * length]
    text = np.concatenate([ids[1, :3], ids_of(2, length)[1]])[None]
    close(logits[1], call(model, text)[0, 3:])
    assert np.isfinite(np.concatenate([np.ravel(a) for a in jax.tree.leaves(after)])).all()
    if length == 1:  # of the row that had no room
        close(after.sliding.keys[:, 0], cache.sliding.keys[:, 0], atol=0)


def test_a_cache_of_another_model():
    with pytest.raises(UserInputError, match="layers"):
        made(config_of("sff"))(ids_of(1, 2), made(config_of("ssf")).cache(1, 8))
    with pytest.raises(UserInputError, match="2 layers"):
        made(config_of("fff"))(ids_of(1, 2), made(config_of("ff")).cache(1, 8))


def test_rewinding():
    model, ids = made(config_of("1:1")), ids_of(2, 12)
    counts = np.array([4, 9], np.int32)
    _, cache = on(model, ids, model.cache(2, 20), counts)
    assert cache.rewind([4, 7]) is None  # the token before the window is gone
    for lengths in ([2, 9], [4, 8], [0, 0], [3, 8]):
        again = cache.rewind(lengths)
        np.testing.assert_array_equal(again.lengths, lengths)
        found, _ = on(model, ids_of(2, 7, 1), again)
        for row, n in enumerate(lengths):
            text = np.concatenate([ids[row, :n], ids_of(2, 7, 1)[row], ids[row, n:]])[None]
            close(found[row], call(model, text)[0, n : n + 7])
    for wrong in ([5, 9], [4], [-1, 2], [0.5, 1]):
        with pytest.raises(UserInputError, match="cannot be rewound to"):
            cache.rewind(wrong)
    whole = dataclasses.replace(full_cache(model, 2, 20), lengths=cache.lengths)
    np.testing.assert_array_equal(whole.rewind([4, 1]).lengths, [4, 1])


def test_batches_by_vmap():
    model, ids = made(config_of("sf")), ids_of(3, 9)
    begin = lambda m, row: m(row[None, :7], m.cache(1, 12))[1]
    caches = jax.jit(jax.vmap(begin, (None, 0)))(model, ids)
    step = lambda m, row, cache: m(row[None, 7:8], cache)[0][0]
    found = jax.jit(jax.vmap(step, (None, 0, 0)))(model, ids, caches)
    close(found, call(model, ids)[:, 7:8])


# --- int8 ----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pattern", ["ffff", "5:1"])
def test_int8_is_about_the_same(pattern):
    model, ids = made(config_of(pattern, head_dim=16)), ids_of(4, 40)
    whole = np.asarray(call(model, ids))
    assert 0.7 < whole.std() < 1.3
    cache = model.cache(4, 40, "int8")
    assert all(a.dtype in (jnp.int8, jnp.float32, jnp.int32) for a in jax.tree.leaves(cache))
    found, cache = in_pieces(model, ids, cache, (19, 1, 1, 19))
    off = found - whole
    assert 1e-4 < np.abs(off).max() < MOST and off.std() < MEAN
    assert (found.argmax(-1) == whole.argmax(-1)).mean() > 0.95


def test_int8_in_pieces_is_int8_at_once():
    """Of one layer, whose keys and values come from the tokens alone: to the rounding of sums."""
    for pattern in ("f", "s"):
        model, ids = made(config_of(pattern)), ids_of(2, 17)
        expected, _ = on(model, ids, model.cache(2, 20, "int8"))
        found, _ = in_pieces(model, ids, model.cache(2, 20, "int8"), (8, 1, 8))
        close(found, expected, atol=2e-3)  # a key at the border between two numbers
        assert np.median(np.abs(found - np.asarray(expected))) < 1e-6


def test_int8_of_rows_that_go_round_is_int8_of_every_token():
    model, ids = made(config_of("s")), ids_of(2, 19)
    pieces = (9, 1, 9)
    found, _ = in_pieces(model, ids, model.cache(2, 20, "int8"), pieces)
    close(found, in_pieces(model, ids, full_cache(model, 2, 20, "int8"), pieces)[0])


def test_int8_takes_half_of_bfloat16():
    model = made(config_of("ff", head_dim=64), dtype="bfloat16")
    bytes_of = lambda cache: sum(a.nbytes for a in jax.tree.leaves(cache.full))
    wide, narrow = model.cache(2, 64), model.cache(2, 64, "int8")
    assert bytes_of(narrow) == bytes_of(wide) * (64 + 4) // 128
    ids = ids_of(2, 12)
    logits, narrow = on(model, ids, narrow)
    assert logits.dtype == jnp.float32 and narrow.keys.dtype == jnp.int8
    assert np.abs(np.asarray(logits) - np.asarray(call(model, ids))).max() < MOST
    assert narrow.grow(128).full.key_scales.shape == (2, 2, 2, 128)


# --- in place ------------------------------------------------------------------------------------


def copies(program, cache):
    """The copies of a part of the cache in a compiled program."""
    shapes = {str(list(a.shape)).replace(" ", "") for a in jax.tree.leaves(cache) if a.ndim > 1}
    found = re.findall(r"= \w+(\[[\d,]+\])\S* copy\(", program.as_text())
    return [shape for shape in found if shape in shapes and "[0," not in shape]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("pattern", ["all", "1:1"])
def test_a_donated_cache_is_changed_in_place(pattern, dtype):
    model = made(config_of(pattern))
    step = jax.jit(lambda m, ids, cache: m(ids, cache, last=True), donate_argnums=2)
    cache = model.cache(2, 8, dtype)
    program = step.lower(model, ids_of(2, 1), cache).compile()
    text = program.as_text()
    assert 'custom_call_target="maxjax_decode_attention"' in text
    assert not copies(program, cache)
    used = [a for a in jax.tree.leaves(cache) if a.size]
    places = {a.unsafe_buffer_pointer() for a in used}
    _, after = program(model, ids_of(2, 1), cache)
    assert all(a.is_deleted() for a in used)
    assert {a.unsafe_buffer_pointer() for a in jax.tree.leaves(after) if a.size} == places


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_several_steps_in_one_program_copy_nothing(dtype):
    """As the engine runs them: memory beside the cache is the same for any number of slots."""
    model, beside = made(config_of("sfsf")), []

    def several(model, ids, cache):
        def one(state):
            i, ids, cache = state
            logits, cache = model(ids, cache, last=True)
            return i + 1, jnp.argmax(logits, -1).astype(jnp.int32)[:, None], cache

        return jax.lax.while_loop(lambda state: state[0] < 4, one, (0, ids, cache))

    for capacity in (64, 8192):
        cache = model.cache(2, capacity, dtype)
        program = jax.jit(several, donate_argnums=2).lower(model, ids_of(2, 1), cache).compile()
        assert not copies(program, cache)
        beside.append(program.memory_analysis().temp_size_in_bytes)
    assert beside[0] == beside[1] < 1 << 14


def test_prefill_copies_no_cache_of_every_token():
    model = made(config_of("1:1"))
    cache = model.cache(1, 4096)
    step = jax.jit(lambda m, ids, cache: m(ids, cache, last=True), donate_argnums=2)
    shapes = copies(step.lower(model, ids_of(1, 4), cache).compile(), cache)
    assert not any(",4096," in shape for shape in shapes)


# --- meshes --------------------------------------------------------------------------------------

MESHES = {
    "2 auto": ({"model": 2}, AxisType.Auto, 4, "float32"),
    "2x2 explicit": ({"data": 2, "model": 2}, AxisType.Explicit, 4, "float32"),
    "4 explicit int8": ({"model": 4}, AxisType.Explicit, 4, "int8"),
    "2x2 auto int8": ({"data": 2, "model": 2}, AxisType.Auto, 4, "int8"),
    "4 explicit, one head": ({"model": 4}, AxisType.Explicit, 1, "float32"),
    "4 explicit, two heads, int8": ({"model": 4}, AxisType.Explicit, 2, "int8"),
    "4 auto, two heads, int8": ({"model": 4}, AxisType.Auto, 2, "int8"),
    "8 auto, two heads": ({"model": 8}, AxisType.Auto, 2, "float32"),
    "2x4 auto, two heads": ({"data": 2, "model": 4}, AxisType.Auto, 2, "float32"),
    "2 auto, one head": ({"model": 2}, AxisType.Auto, 1, "float32"),
    "4 auto, one head, int8": ({"model": 4}, AxisType.Auto, 1, "int8"),
}
# The parts of rows, heads and slots where the heads do not divide.
SPLIT = {
    "4 explicit, one head": (1, 1, 4),
    "4 explicit, two heads, int8": (2, 2, 1),
    "4 auto, two heads, int8": (2, 2, 1),
    "8 auto, two heads": (1, 2, 4),
    "2x4 auto, two heads": (2, 2, 2),
    "2 auto, one head": (2, 1, 1),
    "4 auto, one head, int8": (1, 1, 4),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("which", MESHES)
def test_on_meshes(which):
    sizes, types, kv_heads, dtype = MESHES[which]
    config = config_of("sfs", num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=4)
    mesh = maxjax.make_mesh(axis_types=types, **sizes)
    step = jax.jit(lambda m, ids, cache, counts: m(ids, cache, lengths=counts), donate_argnums=2)
    ids, found, caches = ids_of(2, 20), [], []
    for model in (made(config), made(config, mesh=mesh)):
        cache, parts, start = model.cache(2, 24, dtype), [], 0
        before = [a.sharding for a in jax.tree.leaves(cache)]
        for length, counts in ((8, [8, 5]), (8, [8, 8]), (1, [1, 1]), (1, [1, 0])):
            counts = np.array(counts, np.int32)
            logits, cache = step(model, ids[:, start : start + length], cache, counts)
            real = np.arange(length) < counts[:, None]
            parts.append(np.where(real[..., None], np.asarray(logits), 0))
            start += length
        for a, sharding in zip(jax.tree.leaves(cache), before, strict=True):
            assert a.sharding.is_equivalent_to(sharding, a.ndim)
        found.append(np.concatenate(parts, 1))
        caches.append(cache)
    off = np.abs(found[0] - found[1])
    assert off.max() < (MOST if dtype == "int8" else 2e-5) and np.median(off) < 1e-5
    rows, heads, slots = SPLIT.get(which, (sizes.get("data", 1), sizes["model"], 1))
    for slots_, size in ((caches[1].full, 24), (caches[1].sliding, WINDOW)):
        part = (2 // rows, kv_heads // heads, -(-size // slots))
        assert all(a.addressable_data(0).shape[1:4] == part for a in jax.tree.leaves(slots_))


DIVIDED = {
    # What the devices with the same KV heads divide: mesh, axis type, B, K, H.
    "rows": ({"model": 4}, AxisType.Auto, 4, 2, 8),
    "slots": ({"data": 2, "model": 4}, AxisType.Explicit, 1, 2, 8),
    "slots, whole queries": ({"model": 4}, AxisType.Auto, 1, 1, 3),
    "rows, whole queries": ({"model": 2}, AxisType.Explicit, 2, 1, 3),
}


@pytest.mark.extra
@pytest.mark.parametrize("which", DIVIDED)
def test_a_divided_cache_under_grad_and_vmap(which):
    sizes, types, batch, kv_heads, heads = DIVIDED[which]
    config = config_of("sf", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=4)
    mesh = maxjax.make_mesh(axis_types=types, **sizes)
    ids = ids_of(batch, 14)

    def logits(model, ids):
        cache, parts, start = model.cache(batch, 16), [], 0
        for length in (8, 1, 5):
            found, cache = model(ids[:, start : start + length], cache)
            parts.append(found)
            start += length
        return jnp.concatenate(parts, 1)

    def loss(model, ids):
        found = logits(model, ids)
        return jnp.mean(found**2), found

    run = jax.value_and_grad(loss, has_aux=True)
    both = jnp.stack([ids, ids[:, ::-1]])

    alone, there = made(config), made(config, mesh=mesh)
    whole, part = (m.cache(batch, 16).full.keys.addressable_data(0).nbytes for m in (alone, there))
    assert part * sizes["model"] == whole
    once = jax.jit(run)
    expected = (once(alone, ids), jnp.stack([once(alone, one)[0][1] for one in both]))
    found = jax.jit(lambda m: (run(m, ids), jax.vmap(logits, (None, 0))(m, both)))(there)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() < 2e-5 * max(1, np.abs(a).max())


def test_a_cache_that_is_made_within_shard_map():
    """And a model that is split over an axis that is not among those of the shard_map."""
    ids = jnp.asarray(ids_of(4, 6))
    spec = jax.sharding.PartitionSpec

    def last(model, ids):
        return model(ids, model.cache(len(ids), 8), last=True)[0]

    mesh = maxjax.make_mesh(data=2, model=2, devices=jax.devices()[:4])
    expected = np.asarray(jax.jit(last)(made(BASE), ids))
    for over, model in (({"data", "model"}, made(BASE)), ({"data"}, made(BASE, mesh=mesh))):
        f = jax.shard_map(
            last, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"),
            axis_names=over,
        )  # fmt: skip
        np.testing.assert_allclose(np.asarray(jax.jit(f)(model, ids)), expected, atol=1e-5)
