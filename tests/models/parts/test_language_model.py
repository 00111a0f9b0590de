"""Language models: the cache, lengths and placement that they share, and what they refuse.

Whether the numbers are right is asked in the tests of the families; here a call in one piece,
of one row, without a cache, is what others are compared with.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import maxjax
from maxjax.errors import UnsupportedModelError, UserInputError
from maxjax.models import (
    Gemma3,
    Gemma3Config,
    Llama,
    Qwen2,
    Qwen2Config,
    find_family,
    register,
    registry,
)
from maxjax.models.llama import LlamaBlock
from maxjax.models.names import Names
from maxjax.models.parts.layer_loop import pattern
from maxjax.models.parts.rotary import Rope, read_rope
from maxjax.nn import LayerList, LayerStack
from maxjax.nn.layer import add_layer_hook

VOCAB = 48
KINDS = {"s": "sliding_attention", "f": "full_attention"}
CONFIG = Qwen2Config(
    VOCAB, 16, 24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)
call = jax.jit(lambda model, ids: model(ids))
on = jax.jit(lambda model, ids, cache, lengths=None: model(ids, cache, lengths=lengths))
end = jax.jit(lambda m, ids, cache, lengths=None: m(ids, cache, lengths=lengths, last=True))


def made(config=CONFIG, dtype="float32", mesh=None, model=Qwen2, **options):
    """A decoder of random weights; the same for the same settings."""
    model = model(config, dtype, **options)
    if mesh is not None:
        model.to(mesh)
    rng, values = np.random.default_rng(0), {}
    for name, weight in sorted(model.raw_state_dict().items()):
        shape = tuple(map(int, weight.shape))
        size = 0.3 if len(shape) == 1 or "embed" in name else shape[1] ** -0.5
        normal = rng.standard_normal(shape) * size + ("norm.weight" in name)
        values[name] = normal.astype(np.float32).astype(model.dtype.np)
    model.load_state_dict(values)
    return model


def ids_of(batch, length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length)).astype(np.int32)


def close(found, expected, atol=2e-5):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=atol)


# --- calls ---------------------------------------------------------------------------------------


@pytest.mark.extra
def test_pieces_of_a_text_are_the_text():
    model, ids = made(), ids_of(2, 12)
    whole = call(model, ids)
    assert whole.shape == (2, 12, VOCAB) and whole.dtype == jnp.float32
    cache, start = model.cache(2, 16), 0
    for length in (5, 4, 1, 2):
        logits, cache = on(model, ids[:, start : start + length], cache)
        close(logits, whole[:, start : start + length])
        start += length
        np.testing.assert_array_equal(cache.lengths, [start, start])


@pytest.mark.extra
def test_rows_of_their_own_length():
    model = made()
    ids, lengths = ids_of(3, 7), np.array([7, 3, 0], np.int32)
    more, counts = ids_of(3, 4, seed=1), np.array([2, 4, 3], np.int32)
    logits, cache = end(model, ids, model.cache(3, 12), lengths)
    assert logits.shape == (3, VOCAB)
    again, cache = on(model, more, cache, counts)
    np.testing.assert_array_equal(cache.lengths, lengths + counts)
    one, cache = end(model, ids[:, :1], cache, np.array([1, 0, 1], np.int32))
    for row, (n, m) in enumerate(zip(lengths, counts, strict=True)):
        text = np.concatenate([ids[row, :n], more[row, :m], ids[row, :1]])[None]
        alone = call(model, text)[0]
        if n:
            close(logits[row], alone[n - 1])
        close(again[row, :m], alone[n : n + m])
        if row != 1:  # which had no token in the last call
            close(one[row], alone[n + m])


def test_padding_leaves_no_trace():
    model, ids = made(), ids_of(2, 6)
    lengths = np.array([2, 6], np.int32)
    _, one = on(model, ids, model.cache(2, 8), lengths)
    _, other = on(
        model, np.where(np.arange(6) < lengths[:, None], ids, 9), model.cache(2, 8), lengths
    )
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(one.keys)[:, 0, :, 2:].any()


def test_last_without_a_cache():
    model, ids = made(), ids_of(2, 6)
    whole = call(model, ids)
    last = jax.jit(lambda model, ids, lengths=None: model(ids, lengths=lengths, last=True))
    close(last(model, ids), whole[:, -1])
    close(last(model, ids, np.array([2, 6])), np.asarray(whole)[[0, 1], [1, 5]])


def test_prefill_for_the_last_token_makes_no_logits_of_the_others():
    model = made()
    text = end.lower(model, ids_of(2, 6), model.cache(2, 8)).as_text()
    assert f"2x6x{VOCAB}" not in text and f"2x{VOCAB}xf32" in text


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "unstacked"])
def test_a_decode_step_goes_through_the_kernel(stacked):
    model = made(stacked=stacked)
    cache = model.cache(2, 8)
    text = end.lower(model, ids_of(2, 1), cache).as_text()
    assert text.count("@maxjax_decode_attention") == (1 if stacked else 3)
    assert "@maxjax_decode_attention" not in end.lower(model, ids_of(2, 2), cache).as_text()


def test_a_donated_cache_is_changed_in_place():
    model = made()
    step = jax.jit(lambda m, ids, cache: m(ids, cache, last=True), donate_argnums=2)
    for length in (4, 1):
        cache = model.cache(2, 8)
        places = {a.unsafe_buffer_pointer() for a in (cache.keys, cache.values)}
        _, after = step(model, ids_of(2, length), cache)
        assert cache.keys.is_deleted()
        assert {a.unsafe_buffer_pointer() for a in (after.keys, after.values)} == places


def test_a_cache_grows_in_the_middle_of_a_text():
    model, ids = made(), ids_of(1, 20)
    _, cache = on(model, ids[:, :7], model.cache(1, 8))
    logits, cache = on(model, ids[:, 7:], cache.grow(24))
    close(logits, call(model, ids)[:, 7:])


def test_a_long_prompt_into_a_much_larger_cache():
    # Prefill looks at T, 4 T, 16 T slots or all, by how many are filled.
    model, ids = made(), ids_of(1, 70)
    cache, found = model.cache(1, 80), []
    for start in range(0, 70, 2):
        logits, cache = on(model, ids[:, start : start + 2], cache)
        found.append(logits)
    close(jnp.concatenate(found, 1), call(model, ids))


def test_stacked_and_unstacked_and_hooked():
    model, ids = made(), ids_of(2, 6)
    expected = call(model, ids)
    assert isinstance(model.model.layers, LayerStack)
    seen = []
    add_layer_hook(lambda layer, args, kwargs, outputs: seen.append(layer))
    close(model(ids), expected)
    assert sum(isinstance(layer, LlamaBlock) for layer in seen) == 3
    assert sum(layer is model.lm_head for layer in seen) == 1
    maxjax.nn.layer.clear_hooks()
    assert type(model.unstack().model.layers) is LayerList and model.unstack() is model
    close(call(model, ids), expected)


def test_derivatives():
    model, ids = made(), ids_of(3, 5)

    def loss(model, ids):
        return -jnp.mean(jax.nn.log_softmax(model(ids))[:, :-1, 0])

    value = jax.jit(loss)
    grads = jax.jit(jax.grad(loss))(model, ids)
    weight = model.model.layers[1].mlp.up_proj.weight
    slope = grads.model.layers[1].mlp.up_proj.weight.value[3, 4]
    values = weight.value
    numbers = []
    for change in (1e-2, -1e-2):
        weight.value = values.at[3, 4].add(change)
        numbers.append(float(value(model, ids)))
    weight.value = values
    assert slope == pytest.approx((numbers[0] - numbers[1]) / 2e-2, rel=0.02, abs=1e-5)


def test_batches_by_vmap():
    model, ids = made(), ids_of(3, 5)
    mapped = lambda function: jax.jit(jax.vmap(function, (None, 0)))
    stacked = mapped(lambda m, row: m(row[None])[0])(model, ids)
    close(stacked, call(model, ids))
    caches = mapped(lambda m, row: m(row[None], m.cache(1, 8))[1])(model, ids)
    step = jax.jit(jax.vmap(lambda m, row, cache: m(row[None, :1], cache)[0][0], (None, 0, 0)))
    stepped = step(model, ids, caches)
    close(stepped, call(model, np.concatenate([ids, ids[:, :1]], 1))[:, -1:])


def test_bfloat16_is_about_the_same():
    ids = ids_of(2, 6)
    narrow = made(dtype="bfloat16")
    logits = call(narrow, ids)
    assert logits.dtype == jnp.float32 and narrow.cache(1, 2).keys.dtype == jnp.bfloat16
    wide = Qwen2(CONFIG)
    wide.load_state_dict(narrow.state_dict(), cast=True)
    close(logits, call(wide, ids), atol=0.1)
    _, cache = on(narrow, ids[:, :5], narrow.cache(2, 8, "float32"))
    close(on(narrow, ids[:, 5:], cache)[0], logits[:, 5:], atol=0.1)


# --- settings that families to come have ---------------------------------------------------------


def test_layers_of_several_kinds():
    config = Gemma3Config(
        VOCAB, 16, 24, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        layer_types=tuple(KINDS[c] for c in "ssfssfs"), sliding_window=3,
        local_rope_parameters=Rope(100.0), query_pre_attn_scalar=11, final_logit_softcapping=2.0,
    )  # fmt: skip
    model, ids = made(config, model=Gemma3), ids_of(2, 9)
    assert str(model.model.layers._layout) == "7 layers: 2 times 3 and 1 more"
    whole = call(model, ids)
    assert float(jnp.abs(whole).max()) < 2
    cache = model.cache(2, 12)
    for start, length in ((0, 6), (6, 1), (7, 1), (8, 1)):
        logits, cache = on(model, ids[:, start : start + length], cache)
        close(logits, whole[:, start : start + length])
    changed = np.array(ids)
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    assert not np.allclose(call(model, changed)[:, -1], whole[:, -1])  # one layer sees it
    close(call(model.unstack(), ids), whole)


def test_a_window_hides_what_is_behind_it():
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=1, layer_types=(KINDS["s"],), sliding_window=3
    )
    model, ids = made(config), ids_of(1, 9)
    changed = np.array(ids)
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB
    differs = np.abs(np.asarray(call(model, ids) - call(model, changed))).max(-1)[0] > 1e-6
    assert differs.tolist() == [i in (5, 6, 7) for i in range(9)]


@pytest.mark.parametrize(
    ("slides", "expected"),
    [("f", (0, 1)), ("ffff", (0, 1)), ("fsfs", (0, 2)), ("fffss", (3, 1)), ("sssssfsssssfss", (0, 6)),
     ("sfssf", (4, 1)), ("fs", (1, 1))],
)  # fmt: skip
def test_patterns(slides, expected):
    assert pattern(slides) == expected
    kinds = tuple(KINDS[c] for c in slides)
    config = dataclasses.replace(
        CONFIG, num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=4
    )
    layers = Qwen2(config).model.layers
    assert isinstance(layers, LayerStack)
    assert (layers._layout.first, layers._layout.period) == expected


def test_a_family_of_ones_own():
    family = dataclasses.replace(Llama.family, model_type="mine", architectures=("Mine",))
    before = dict(registry.ENTRIES)
    try:
        register(family)
        assert find_family({"architectures": ["Mine"]}) is family
        again = dataclasses.replace(family, names=Names())
        assert find_family({"model_type": "mine"}) is family
        assert find_family({"model_type": "mine"}) is not register(again)
        assert find_family({"model_type": "mine"}) is again
        with pytest.raises(UserInputError, match="LlamaForCausalLM"):
            register(dataclasses.replace(family, architectures=("LlamaForCausalLM",)))
        register(ours := dataclasses.replace(Llama.family, names=Names()))
        assert find_family({"architectures": ["LlamaForCausalLM"]}) is ours
    finally:
        registry.ENTRIES.clear()
        registry.ENTRIES.update(before)
    with pytest.raises(UnsupportedModelError, match=r"'Mine'.*maxjax\.models\.register"):
        find_family({"architectures": ["Mine"]})


# --- meshes --------------------------------------------------------------------------------------


def placed_run(mesh, config=CONFIG):
    """The logits of a prefill and two steps on a mesh, where the cache was, and the shape of a device's part."""
    model, ids = made(config, mesh=mesh), ids_of(2, 8)
    step = jax.jit(lambda m, ids, cache: m(ids, cache), donate_argnums=2)
    cache, found, places = model.cache(2, 8), [], []
    for start, length in ((0, 6), (6, 1), (7, 1)):
        places.append(cache.keys.sharding)
        logits, cache = step(model, ids[:, start : start + length], cache)
        found.append(np.asarray(logits))
    places.append(cache.keys.sharding)
    assert step._cache_size() == 2  # one for the prompt, one for a token
    short, _ = end(model, ids[:, :6], model.cache(2, 8), np.array([2, 6], np.int32))
    close(np.asarray(short), found[0][[0, 1], [1, 5]])
    return np.concatenate(found, 1), places, places[0].shard_shape(cache.keys.shape)


MESHES = {"2x4": {"data": 2, "model": 4}, "2": {"model": 2}, "4": {"model": 4}, "8": {"model": 8}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kv_heads", [4, 1, 8])
def test_on_meshes(mesh, types, kv_heads):
    config = dataclasses.replace(
        CONFIG, num_attention_heads=8, head_dim=4, num_key_value_heads=kv_heads
    )
    sizes = MESHES[mesh]
    logits, places, shape = placed_run(maxjax.make_mesh(axis_types=types, **sizes), config)
    close(logits, call(made(config), ids_of(2, 8)))
    assert all(place.is_equivalent_to(places[0], 5) for place in places)
    assert shape[2] == max(1, kv_heads // sizes["model"])  # more devices than heads share them


def test_rows_lie_over_the_axis_that_weights_are_gathered_over():
    logits, places, _ = placed_run(maxjax.make_mesh(fsdp=2))
    close(logits, call(made(), ids_of(2, 8)))
    assert tuple(places[0].spec) == (None, "fsdp", None, None, None)
    assert all(place.is_equivalent_to(places[0], 5) for place in places)


def test_on_one_device_of_eight():
    model = made()
    model.to(jax.devices()[3])
    assert model.cache(1, 4).keys.devices() == {jax.devices()[3]}
    ids = jax.device_put(ids_of(1, 4), jax.devices()[3])
    close(on(model, ids, model.cache(1, 4))[0], call(made(), ids_of(1, 4)))


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1, 2], r"of shape \(2,\): put one"), ([[1.0]], "float"), ([[]], r"\(1, 0\)"),
        ([[VOCAB]], f"{VOCAB} is outside the vocabulary"),
        ([[-1]], "-1 is outside the vocabulary of 48"),
    ],
)  # fmt: skip
def test_token_ids_that_are_none(ids, found):
    model = Qwen2(CONFIG)
    with pytest.raises(UserInputError, match=found):
        model(np.array(ids))
    with pytest.raises(UserInputError, match=found):
        model(jnp.array(ids))


def test_a_cache_that_does_not_fit():
    model = Qwen2(CONFIG)
    with pytest.raises(UserInputError, match="cache of 3"):
        model(ids_of(2, 2), model.cache(3, 8))
    with pytest.raises(UserInputError, match=r"lengths must be \[2\]"):
        model(ids_of(2, 2), lengths=[1])
    with pytest.raises(UserInputError, match="no room for 9"):
        model(ids_of(2, 9), model.cache(2, 8))
    cache = dataclasses.replace(model.cache(2, 8), lengths=jnp.array([7, 4], jnp.int32))
    with pytest.raises(UserInputError, match=r"row 0 holds 7 .* cache\.grow\(9\)"):
        model(ids_of(2, 2), cache)
    made()(ids_of(2, 2), cache, lengths=[1, 2])  # the padding needs no room


@pytest.mark.parametrize("length", [1, 2])
def test_inside_jit_what_has_no_room_is_nan(length):
    model = made()
    _, cache = on(model, ids_of(2, 8), model.cache(2, 8), np.array([8 - length + 1, 5], np.int32))
    logits, after = on(model, ids_of(2, length), cache)
    found = np.isnan(np.asarray(logits)).any(-1)
    assert found.tolist() == [[False] * (length - 1) + [True], [False] * length]
    assert np.isfinite(np.asarray(after.keys)).all()


@pytest.mark.parametrize("batch, capacity", [(0, 4), (1, 0), (1.5, 4)])
def test_a_cache_of_no_size(batch, capacity):
    with pytest.raises(UserInputError, match="must be an integer of at least 1"):
        Qwen2(CONFIG).cache(batch, capacity)


@pytest.mark.parametrize("theta", [0, 0.0, -1, "x", True])
def test_a_base_of_the_rotation_that_is_none_is_refused(theta):
    with pytest.raises(ValueError, match="'rope_theta' in .* not a positive number"):
        read_rope({"rope_theta": theta}, 64)
