"""Latent attention over a paged cache: that of each sequence by itself, from keys and values of every head."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.engine import InferenceSession
from maxjax.graph import (
    BufferValue,
    DeviceRef,
    Graph,
    ShardingStrategy,
    TensorType,
    TensorValue,
    ops,
)
from maxjax.nn import (
    LatentAttentionWithRope,
    RotaryEmbedding,
    TensorParallelLatentAttentionWithRope,
)
from maxjax.nn.attention.multi_latent_attention import DataParallelLatentAttentionWithRope
from maxjax.nn.kv_cache import KVCacheInputsPerDevice, MLAKVCacheParams
from tests.nn.layers import filled

CPU, F = DeviceRef.CPU(), DType.float32
H, E, RANK, NOPE, ROPE, V, PAGE = 4, 12, 6, 8, 4, 5, 4
TABLE = RotaryEmbedding(ROPE * H, H, 100.0, 32, head_dim=ROPE)
PARAMS = MLAKVCacheParams(
    dtype=F, head_dim=RANK + ROPE, num_layers=2, devices=[CPU], num_q_heads=H, page_size=PAGE
)
SIZES = {
    "rope": TABLE, "num_attention_heads": H, "num_key_value_heads": H, "hidden_size": E, "kv_params": PARAMS,
    "dtype": F, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V,
}  # fmt: skip
RNG = np.random.default_rng(5)
TEXTS = [RNG.standard_normal((n, E)).astype(np.float32) for n in (7, 5)]
PAGES = np.array([[5, 1], [2, 7]], np.uint32)


def whole(weights, text):
    """The layer over one sequence at once, in NumPy, with the keys and values of every head."""
    count = len(text)
    table = np.asarray(TABLE.freqs_cis.value, np.float64)[:count].reshape(count, 1, ROPE // 2, 2)

    def normed(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def turned(x):
        a, b, cos, sin = x[..., ::2], x[..., 1::2], table[..., 0], table[..., 1]
        return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)

    if "q_proj.weight" in weights:
        q = text @ weights["q_proj.weight"].T
    else:
        q = normed(text @ weights["q_a_proj.weight"].T, weights["q_a_layernorm.weight"])
        q = q @ weights["q_b_proj.weight"].T
    q = q.reshape(count, H, NOPE + ROPE)
    both = text @ weights["kv_a_proj_with_mqa.weight"].T
    latents = normed(both[:, :RANK], weights["kv_a_layernorm.weight"])
    kv = (latents @ weights["kv_b_proj.weight"].T).reshape(count, H, NOPE + V)
    shared = np.broadcast_to(turned(both[:, None, RANK:]), (count, H, ROPE))
    k = np.concatenate([kv[..., :NOPE], shared], -1)
    q = np.concatenate([q[..., :NOPE], turned(q[..., NOPE:])], -1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(NOPE + ROPE)
    scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    found = np.einsum("hts,shd->thd", shares, kv[..., NOPE:]).reshape(count, H * V)
    return found @ weights["o_proj.weight"].T


@pytest.mark.parametrize("rank", [None, 3])
def test_prefill_and_steps_are_the_whole(rank):
    layer, weights = filled(LatentAttentionWithRope(**SIZES, q_lora_rank=rank))
    types = [TensorType(F, ("n", E), CPU), TensorType(DType.uint32, ("offsets",), CPU)]
    with Graph("layer", input_types=[*types, *PARAMS.flattened_kv_inputs()]) as graph:
        x, offsets, *rest = graph.inputs
        (cache,) = PARAMS.unflatten_kv_inputs(iter(rest))
        plan = layer.create_mla_prefill_metadata(offsets, cache)
        y = layer(ops.constant(1, DType.uint32, CPU), x, cache, TABLE.freqs_cis, offsets, plan)
        graph.output(y, plan.buffer_row_offsets, plan.buffer_lengths)
    model = InferenceSession().load(graph, weights_registry=layer.state_dict())
    pages = np.full((8, *PARAMS.shape_per_block), np.nan, np.float32)
    wanted, done = [whole(weights, text) for text in TEXTS], np.zeros(2, np.uint32)
    for counts in ([4, 2], [1, 1], [2, 2]):
        parts = [text[d : d + n] for text, d, n in zip(TEXTS, done, counts, strict=True)]
        one = np.array([1], np.uint32)
        got, starts, size, pages = model.execute(
            np.concatenate(parts),
            np.cumsum([0, *counts]).astype(np.uint32),
            pages,
            done,
            PAGES,
            one,
            one,
        )
        want = np.concatenate([w[d : d + n] for w, d, n in zip(wanted, done, counts, strict=True)])
        np.testing.assert_allclose(got.to_numpy(), want, atol=2e-5)
        done = done + np.array(counts, np.uint32)
        assert starts.to_numpy().tolist() == [[0, done[0], done.sum()]]
        assert size.to_numpy().tolist() == [done.sum()]


def cache():
    zero = TensorValue(jnp.zeros(2, jnp.uint32))
    pages = BufferValue(jnp.zeros((8, *PARAMS.shape_per_block)))
    return KVCacheInputsPerDevice(pages, zero, TensorValue(jnp.asarray(PAGES)), zero, zero)


def test_heads_on_devices_sum_to_the_layer():
    layer, weights = filled(LatentAttentionWithRope(**SIZES, q_lora_rank=3))
    x = jnp.concatenate([text[:4] for text in TEXTS])
    freqs, offsets, number = TABLE.freqs_cis, jnp.array([0, 4, 8], jnp.uint32), jnp.uint32(0)
    want = layer(number, x, cache(), freqs, offsets).to_numpy()
    both = [x, x], [BufferValue(jnp.zeros(1))] * 2, [cache(), cache()], [freqs] * 2, [offsets] * 2
    for skip in (False, True):
        split = TensorParallelLatentAttentionWithRope(
            **SIZES, q_lora_rank=3, devices=[CPU, CPU], skip_allreduce=skip
        )
        split.load_state_dict({name: np.float32(value) for name, value in weights.items()})
        assert [part.n_heads for part in split.list_of_attentions] == [2, 2]
        found = [one.to_numpy() for one in split(number, *both)]
        np.testing.assert_allclose(sum(found) if skip else found[1], want, atol=2e-5)
        np.testing.assert_allclose(
            split(number, x, cache(), freqs, offsets).to_numpy(), want, atol=2e-5
        )
    with pytest.raises(ValueError, match="1 entries for the 2 devices"):
        split(number, [x], [], [cache()], [freqs], [offsets])
    plans = split.create_mla_prefill_metadata([offsets] * 2, both[2])
    assert [plan.buffer_lengths.to_numpy().tolist() for plan in plans] == [[8], [8]]


def test_replicas_have_their_own_sequences():
    layer, weights = filled(DataParallelLatentAttentionWithRope(**SIZES, devices=[CPU, CPU]))
    freqs, offsets = TABLE.freqs_cis, jnp.array([0, 3], jnp.uint32)
    texts = [jnp.asarray(text[:3]) for text in TEXTS]
    found = layer(jnp.uint32(0), texts, [], [cache(), cache()], [freqs] * 2, [offsets] * 2)
    for got, text in zip(found, TEXTS, strict=True):
        np.testing.assert_allclose(got.to_numpy(), whole(weights, text[:3]), atol=2e-5)


def test_what_is_refused():
    with pytest.raises(NotImplementedError, match="o_proj_quant_config"):
        LatentAttentionWithRope(**SIZES, o_proj_quant_config=object())
    layer = LatentAttentionWithRope(**SIZES)
    with pytest.raises(ValueError, match="4 heads do not divide over 3 devices"):
        layer.sharding_strategy = ShardingStrategy.tensor_parallel(3)
    with pytest.raises(ValueError, match="tensor_parallel or replicate"):
        layer.sharding_strategy = ShardingStrategy.rowwise(2)
    with pytest.raises(ValueError, match="4 query heads do not divide over 3 devices"):
        MLAKVCacheParams(dtype=F, head_dim=8, num_layers=1, devices=[CPU] * 3, num_q_heads=4)


def test_settings_of_the_cache():
    two = MLAKVCacheParams(dtype=F, head_dim=8, num_layers=3, devices=[CPU] * 2, num_q_heads=4)
    assert two.replicates_kv_across_tp and not PARAMS.replicates_kv_across_tp
    assert two.num_q_heads_per_device == 2 and two.shape_per_block == [1, 3, 128, 1, 8]
