"""Paged caches: a program takes pages and gives the next ones back; attention is that of each sequence by itself."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import init
from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import BufferValue, DeviceRef, Graph, TensorType, TensorValue, ops
from maxjax.nn import AttentionWithRope, Linear, Module, RMSNorm, RotaryEmbedding, kernels
from maxjax.nn.kernels import MHAMaskVariant as Mask
from maxjax.nn.kv_cache import (
    KVCacheInputsPerDevice,
    KVCacheQuantizationConfig,
    MHAKVCacheParams,
    MultiKVCacheParams,
    PagedCacheValues,
    spec_decode_cache_slack,
)  # fmt: skip
from tests.nn.layers import call, filled
from tests.nn.test_kernels import plain, seen_by

CPU = DeviceRef.CPU()
F = DType.float32
H, K, D, E, LAYERS, PAGE = 4, 2, 8, 12, 2, 4
PARAMS = MHAKVCacheParams(
    dtype=F, head_dim=D, num_layers=LAYERS, devices=[CPU], n_kv_heads=K, page_size=PAGE
)
RNG = np.random.default_rng(3)
W = {i: RNG.standard_normal(((H + 2 * K) * D, E)).astype(np.float32) / 3 for i in range(LAYERS)}
OUT = {i: RNG.standard_normal((E, H * D)).astype(np.float32) / 5 for i in range(LAYERS)}
GAMMA = RNG.standard_normal(D).astype(np.float32) + 1
ROPE = RotaryEmbedding(H * D, H, 100.0, 32, interleaved=False)
# Three sequences of 7, 5 and 2 tokens; pages in any order, page 0 is nobody's.
TEXTS = [RNG.standard_normal((n, E)).astype(np.float32) for n in (7, 5, 2)]
TABLE = np.array([[5, 1], [2, 7], [4, 99]], np.uint32)


def layer(x, offsets, cache, i, form):
    """A layer of attention in the style of MAX's files, in either of its two ways."""
    number = ops.constant(i, DType.uint32, CPU)
    freqs = ROPE.freqs_cis
    if form == "fused":
        q = kernels.fused_qkv_ragged_matmul(PARAMS, x, offsets, TensorValue(W[i]), cache, number, H)
        q = ops.rms_norm(q.reshape((-1, H, D)), TensorValue(GAMMA), 1e-6)
        kernels.rms_norm_key_cache(PARAMS, cache, GAMMA, 1e-6, number, x.shape[0], offsets, 0.0)
        q = kernels.fused_qk_ragged_rope(
            PARAMS, q, offsets, cache, freqs, number, interleaved=False
        )
    else:
        qkv = x @ TensorValue(W[i]).T
        q = kernels.rope_split_store_ragged(
            PARAMS, qkv, offsets, freqs, cache, number, H, interleaved=False,
            q_norm_weight=GAMMA, k_norm_weight=GAMMA, rms_norm_eps=1e-6,
        ).reshape((-1, H, D))  # fmt: skip
    y = kernels.flash_attention_ragged(PARAMS, q, offsets, cache, number, Mask.CAUSAL_MASK, 0.3)
    return x + y.reshape((-1, H * D)) @ TensorValue(OUT[i]).T


def whole(text):
    """The same layers over one sequence at once, in NumPy."""
    x = text
    table = np.asarray(ROPE.freqs_cis.value)[: len(x)].reshape(len(x), 1, D // 2, 2)

    def prepared(y):
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * GAMMA
        a, b = np.split(y, 2, axis=-1)
        cos, sin = table[..., 0], table[..., 1]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    for i in range(LAYERS):
        y = (x @ W[i].T).reshape(len(x), H + 2 * K, D)
        q, k, v = prepared(y[:, :H]), prepared(y[:, H : H + K]), y[:, H + K :]
        out = plain(q, k, v, seen_by(Mask.CAUSAL_MASK, len(x), len(x)), 0.3)
        x = x + out.reshape(len(x), -1) @ OUT[i].T
    return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["fused", "split"])
def test_prefill_and_steps_are_the_whole(form):
    types = [TensorType(F, ("n", E), CPU), TensorType(DType.uint32, ("offsets",), CPU)]
    with Graph("layers", input_types=[*types, *PARAMS.flattened_kv_inputs()]) as graph:
        x, offsets, *rest = graph.inputs
        (cache,) = PARAMS.unflatten_kv_inputs(iter(rest))
        for i in range(LAYERS):
            x = layer(x, offsets, cache, i, form)
        graph.output(x)
    model = InferenceSession().load(graph)
    pages = np.full(
        (8, *PARAMS.shape_per_block), np.nan, np.float32
    )  # what is in a page before is never used
    pages[:, 1] = 0
    wanted, done = [whole(text) for text in TEXTS], np.zeros(3, np.uint32)
    for counts in ([3, 3, 1], [1, 1, 1], [2, 1, 0]):  # two programs: of 7 and of 3 tokens
        parts = [text[d : d + n] for text, d, n in zip(TEXTS, done, counts, strict=True)]
        offsets = np.cumsum([0, *counts]).astype(np.uint32)
        most = np.array([max(counts)], np.uint32)
        got, pages = model.execute(
            np.concatenate(parts),
            offsets,
            pages,
            done,
            TABLE,
            most,
            np.array([done.max()], np.uint32),
        )
        want = np.concatenate([w[d : d + n] for w, d, n in zip(wanted, done, counts, strict=True)])
        np.testing.assert_allclose(got.to_numpy(), want, atol=2e-5)
        done = done + np.array(counts, np.uint32)


def eager(length=3):
    blocks = BufferValue(jnp.zeros((8, *PARAMS.shape_per_block)))
    one = TensorValue(jnp.array([3], jnp.uint32))
    return PagedCacheValues(
        blocks,
        TensorValue(jnp.array([length], jnp.uint32)),
        TensorValue(jnp.array(TABLE[:1])),
        one,
        one,
    )


def test_stores_go_to_the_pages_of_their_sequence():
    cache, x = eager(), jnp.arange(2 * K * D, dtype=jnp.float32).reshape(2, K, D)
    offsets, number = jnp.array([0, 2], jnp.uint32), jnp.array([1], jnp.uint32)
    kernels.store_k_cache_ragged(cache, x, offsets, number)
    kernels.store_v_cache_ragged(cache, TensorValue(x + 1), offsets, number)
    pages = cache.kv_blocks.load().to_numpy()
    np.testing.assert_array_equal(
        pages[5, :, 1, 3], [x[0], x[0] + 1]
    )  # position 3 is the last of page 5
    np.testing.assert_array_equal(pages[1, :, 1, 0], [x[1], x[1] + 1])
    assert np.count_nonzero(pages) == np.count_nonzero(x) + x.size
    weight = RNG.standard_normal((2 * K * D, E)).astype(np.float32)
    h = jnp.asarray(RNG.standard_normal((2, E)), jnp.float32)
    kernels.matmul_kv_cache_ragged(PARAMS, h, offsets, jnp.asarray(weight), cache, number)
    got = cache.kv_blocks.value[5, :, 1, 3].reshape(-1)
    np.testing.assert_allclose(got, (h @ weight.T)[0], atol=1e-5)


@pytest.mark.parametrize("variant", [Mask.SLIDING_WINDOW_CAUSAL_MASK, Mask.CHUNKED_CAUSAL_MASK])
def test_windows_and_sinks(variant):
    cache = eager(0)
    q, k, v = (jnp.asarray(RNG.standard_normal((6, n, D)), jnp.float32) for n in (H, K, K))
    offsets, number = jnp.array([0, 6], jnp.uint32), jnp.uint32(0)
    kernels.store_k_cache_ragged(cache, k, offsets, number)
    kernels.store_v_cache_ragged(cache, v, offsets, number)
    none = jnp.full(H, -jnp.inf)
    got = kernels.flash_attention_ragged(
        PARAMS,
        q,
        offsets,
        cache,
        number,
        variant,
        0.3,
        2,
        sink_weights=none,
        output_dtype=DType.bfloat16,
    )
    want = plain(*map(np.asarray, (q, k, v)), seen_by(variant, 6, 6), 0.3)
    np.testing.assert_allclose(got.cast(F).to_numpy(), want, atol=2e-2)
    with pytest.raises(ValueError, match="needs a local_window_size"):
        kernels.flash_attention_ragged(PARAMS, q, offsets, cache, number, variant, 0.3)
    with pytest.raises(NotImplementedError, match="rel_logits"):
        kernels.flash_attention_ragged(
            PARAMS, q, offsets, cache, number, variant, 0.3, 2, rel_logits=q
        )
    with pytest.raises(NotImplementedError, match="a norm of 3 of the 8 elements"):
        kernels.rms_norm_key_cache(PARAMS, cache, jnp.ones(3), 1e-6, number, 6, offsets, 0.0)


def test_positions_along_axes():
    offsets, number, freqs = jnp.array([0, 6], jnp.uint32), jnp.uint32(0), ROPE.freqs_cis
    q, k = (jnp.asarray(RNG.standard_normal((6, n, D)), jnp.float32) for n in (H, K))
    positions = np.random.default_rng(3).integers(0, 16, (3, 6)).astype(np.uint32)

    def rotated(positions, **sections):
        cache = eager(0)
        kernels.store_k_cache_ragged(cache, k, offsets, number)
        turned = kernels.fused_qk_ragged_rope(
            PARAMS, q, offsets, cache, freqs, number, False, positions, **sections
        )
        return turned.value, cache.kv_blocks.value

    found = rotated(positions, mrope_section=[2, 1, 1])
    each = [rotated(one) for one in positions]
    axes = np.tile([0, 0, 1, 2], 2)  # of each feature: element i is paired with i + D / 2
    for got, *parts in zip(found, *each, strict=True):
        np.testing.assert_array_equal(got, np.stack(parts, -1)[..., np.arange(D), axes])
    with pytest.raises(ValueError, match=r"mrope_section \[1\] takes position_ids \[1, tokens\]"):
        rotated(None, mrope_section=[1])


def test_values_of_a_cache_have_the_metadata_that_files_of_max_check_for():
    kinds, values = PARAMS.get_symbolic_inputs()[0], eager()
    assert kinds.attention_dispatch_metadata is None
    assert values.attention_dispatch_metadata.shape == [4]


def test_settings_of_caches():
    assert PARAMS.shape_per_block == [2, LAYERS, PAGE, K, D] and PARAMS.n_devices == 1
    assert not (PARAMS.is_fp8_kv_dtype or PARAMS.is_nvfp4_kv_cache or PARAMS.quantized_kv_cache)
    assert PARAMS.bytes_per_block == 4 * 2 * LAYERS * PAGE * K * D
    two = MHAKVCacheParams(
        dtype=F, head_dim=D, num_layers=1, devices=[CPU, DeviceRef.CPU(1)], n_kv_heads=K
    )
    assert two.n_kv_heads_per_device == 1 and len(two.get_symbolic_inputs()) == 2
    both = MultiKVCacheParams.from_params({"local": PARAMS, "global": PARAMS})
    types = both.flattened_kv_inputs()
    assert [str(kind.shape[0]) for kind in types[::5]] == [
        "local_total_num_pages",
        "global_total_num_pages",
    ]
    tree = both.unflatten_kv_inputs(iter(range(10)))
    assert (tree["local"][0].kv_blocks, tree["global"][0].lookup_table) == (0, 7)
    assert both.child("local", MHAKVCacheParams) is PARAMS and both.page_size == PAGE
    drafts = MHAKVCacheParams(
        dtype=F, head_dim=D, num_layers=1, devices=[CPU], n_kv_heads=K, num_draft_tokens=4
    )
    assert (spec_decode_cache_slack(PARAMS), spec_decode_cache_slack(drafts)) == (0, 13)
    for method, per_step, slack in (("eagle", 1, 13), ("dflash", 4, 14)):  # recorded on MAX
        one = replace(drafts, speculative_method=method)
        for params in (one, MultiKVCacheParams.from_params({"a": one})):
            assert params.num_draft_tokens_per_step == per_step, method
            assert (spec_decode_cache_slack(params), params.num_draft_tokens) == (slack, 4), method
    assert (PARAMS.num_draft_tokens_per_step, PARAMS.kv_dim, PARAMS.row_bytes) == (0, 2, 4 * K * D)
    assert both.bytes_per_block == 2 * PARAMS.bytes_per_block and both.tensor_parallel_degree == 1
    with pytest.raises(ValueError, match="must be one of"):
        _ = replace(drafts, speculative_method="x").num_draft_tokens_per_step
    assert not replace(PARAMS, dtype=DType.float8_e5m2).is_fp8_kv_dtype
    assert KVCacheInputsPerDevice[TensorType, BufferValue] is not None


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"n_kv_heads": 3, "devices": [CPU] * 2}, ValueError, "3 KV heads do not divide over 2 devices"),
        ({"page_size": 0}, ValueError, "page_size must be positive"),
        ({"slots_per_page": 0}, ValueError, "must divide the 128 tokens"),
        ({"slots_per_page": 100}, ValueError, "must divide the 128 tokens"),
        ({"devices": [CPU] * 3, "data_parallel_degree": 2}, ValueError, "3 devices do not divide into 2"),
        ({"kvcache_quant_config": KVCacheQuantizationConfig()}, NotImplementedError, "kvcache_quant_config"),
        ({"per_layer_buffers": True}, NotImplementedError, "per_layer_buffers"),
    ],
)  # fmt: skip
def test_settings_that_are_refused(change, error, says):
    given = {"dtype": F, "head_dim": D, "num_layers": 1, "devices": [CPU], "n_kv_heads": K}
    with pytest.raises(error, match=says):
        MHAKVCacheParams(**given | change)
    with pytest.raises(ValueError, match="at least one cache"):
        MultiKVCacheParams.from_params({})
    with pytest.raises(TypeError, match="has MHAKVCacheParams, not int"):
        MultiKVCacheParams.from_params({"a": PARAMS}).child("a", int)
    for other in ({"page_size": 2 * PAGE}, {"num_draft_tokens": 1}):
        with pytest.raises(ValueError, match=f"must have one {next(iter(other))}"):
            MultiKVCacheParams.from_params({"a": PARAMS, "b": replace(PARAMS, **other)})


class Attention(Module):
    """What MAX's files make of it: a Module with a cache as an argument."""

    def __init__(self):
        super().__init__()
        self.qkv = Linear(E, (H + 2 * K) * D, F, CPU)
        self.norm = RMSNorm(E, F)

    def __call__(self, x, offsets, cache):
        q = kernels.fused_qkv_ragged_matmul(
            PARAMS, self.norm(x), offsets, self.qkv.weight, cache, jnp.uint32(0), H
        )
        return kernels.flash_attention_ragged(
            PARAMS, q.reshape((-1, H, D)), offsets, cache, jnp.uint32(0), Mask.CAUSAL_MASK, 0.3
        )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("variant", [Mask.CAUSAL_MASK, Mask.SLIDING_WINDOW_CAUSAL_MASK])
def test_a_window_is_the_same_with_and_without_pages(variant, window):
    layer = partial(AttentionWithRope, rope=ROPE, num_attention_heads=H, num_key_value_heads=K, hidden_size=E,
                    kv_params=PARAMS, devices=[CPU], sliding_window=window)  # fmt: skip
    if variant is Mask.SLIDING_WINDOW_CAUSAL_MASK and window is None:
        with pytest.raises(ValueError, match="needs a sliding_window"):
            layer(mask_variant=variant)
        return
    model, _ = filled(layer(mask_variant=variant), scale=0.3)
    alone = call(model, TEXTS[0])
    over_pages = model(
        jnp.uint32(0),
        TensorValue(TEXTS[0]),
        eager(0),
        ROPE.freqs_cis,
        jnp.array([0, 7], jnp.uint32),
    )
    np.testing.assert_allclose(over_pages.to_numpy(), alone, atol=2e-5)


def test_what_pages_do_not_have():
    layer = AttentionWithRope(
        rope=ROPE, num_attention_heads=H, num_key_value_heads=K, hidden_size=E, kv_params=PARAMS, devices=[CPU],
        mask_variant=Mask.NULL_MASK, sliding_window=2,
    )  # fmt: skip
    model = init(layer, jax.random.key(0))
    offsets = jnp.array([0, 7], jnp.uint32)
    with pytest.raises(NotImplementedError, match="sliding_window with NULL_MASK"):
        model(jnp.uint32(0), TensorValue(TEXTS[0]), eager(0), ROPE.freqs_cis, offsets)
    with pytest.raises(ValueError, match="q_norm_weight.*k_norm_weight"):
        kernels.rope_split_store_ragged(
            PARAMS, jnp.asarray(TEXTS[0]) @ W[0].T, offsets, ROPE.freqs_cis, eager(0), jnp.uint32(0), H,
            interleaved=False, q_norm_weight=GAMMA,
        )  # fmt: skip


def test_a_module_with_a_cache():
    model = Attention()
    model.load_state_dict({"qkv.weight": W[0], "norm.weight": np.ones(E, np.float32)})
    got = model(TensorValue(TEXTS[2]), jnp.array([0, 2], jnp.uint32), eager(0))
    assert isinstance(got, TensorValue) and got.shape == (2, H, D)


def test_padding_and_tokens_without_a_page_are_stored_nowhere():
    offsets, number = jnp.array([0, 2], jnp.uint32), jnp.uint32(0)
    keys = jnp.arange(1.0, 5.0)[:, None, None] * jnp.ones((4, K, D))
    cache = eager(0)
    kernels.store_k_cache_ragged(cache, keys, offsets, number)  # of four rows two are padding
    held = np.asarray(cache.kv_blocks.value)[:, 0, 0, :, 0, 0]
    assert held[TABLE[0, 0]].tolist() == [1, 2, 0, 0] and held.sum() == 3
    cache = eager(2 * PAGE)  # its pages are full
    kernels.store_k_cache_ragged(cache, keys[:1], jnp.array([0, 1], jnp.uint32), number)
    assert np.asarray(cache.kv_blocks.value).sum() == 0


def test_trees_of_inputs_keep_fields_that_are_none():
    from maxjax.nn.kv_cache import RecurrentLeafInputs

    one = RecurrentLeafInputs(None, 3)
    children, names = one.__tree_flatten__()
    assert (children, names) == ((3,), ("live_row_ids",))
    assert RecurrentLeafInputs.__tree_unflatten__(names, children) == one
