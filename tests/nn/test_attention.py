"""attention() against float64 and torch; AttentionWithRope against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import nn
from maxjax.graph import DeviceRef, ShardingStrategy
from maxjax.nn.attention import AttentionMaskVariant, MHAMaskVariant, attention
from tests.nn.layers import call, filled, random
from tests.oracles.recorded import recorded, torch, transformers


def heads(seed, batch=2, queries=5, keys=7, num_heads=3, width=4):
    rng = np.random.default_rng(seed)
    shapes = [(batch, n, num_heads, width) for n in (queries, keys, keys)]
    return [rng.standard_normal(shape).astype(np.float32) * 2 for shape in shapes]


def in_float64(query, key, value, mask=None, scale=None):
    query, key, value = (a.astype(np.float64) for a in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = np.einsum("bthd,bshd->bhts", query, key) * scale
    if mask is not None:
        scores = np.where(np.broadcast_to(mask, scores.shape), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights, value)


@pytest.mark.sampled
@pytest.mark.parametrize("queries, keys", [(5, 7), (1, 7), (6, 6), (1, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_without_a_mask(queries, keys, scale):
    q, k, v = heads(0, queries=queries, keys=keys)
    found = attention(q, k, v, scale=scale)
    np.testing.assert_allclose(found, in_float64(q, k, v, scale=scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [(2, 7), (2, 5, 7), (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 1, 7), (1, 1, 1, 7)]
)
def test_true_means_attend(shape):
    q, k, v = heads(1)
    mask = np.random.default_rng(2).random(shape) < 0.6
    mask[..., 0] = True
    wide = {2: lambda m: m[:, None, None], 3: lambda m: m[:, None], 4: lambda m: m}[mask.ndim](mask)
    found = attention(q, k, v, jnp.asarray(mask))
    np.testing.assert_allclose(found, in_float64(q, k, v, wide), rtol=1e-5, atol=1e-5)


def test_as_torch_has_it():
    q, k, v = heads(3)
    mask = np.array([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]], bool)

    def theirs():
        found = torch.nn.functional.scaled_dot_product_attention(
            *(torch.tensor(a).transpose(1, 2) for a in (q, k, v)),
            attn_mask=torch.tensor(mask)[:, None, None],
        )
        return found.transpose(1, 2).numpy()

    expected = recorded(theirs)
    found = attention(q, k, v, jnp.asarray(mask))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_masked_keys_have_no_influence():
    q, k, v = heads(4)
    mask = jnp.asarray([[True] * 4 + [False] * 3] * 2)
    before = attention(q, k, v, mask)
    k[:, 4:], v[:, 4:] = 1e4, -1e4
    np.testing.assert_array_equal(attention(q, k, v, mask), before)


def test_a_query_with_nothing_to_see_is_finite():
    q, k, v = heads(5)
    found = attention(q, k, v, jnp.zeros((2, 7), bool))
    np.testing.assert_allclose(found, np.broadcast_to(v.mean(1)[:, None], found.shape), atol=1e-6)


def test_softmax_is_taken_in_float32():
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in heads(6, queries=64, keys=256, width=32))
    exact = in_float64(*(np.asarray(a, np.float64) for a in (q, k, v)))
    wide, narrow = attention(q, k, v), attention(q, k, v, softmax_dtype=jnp.bfloat16)
    assert wide.dtype == narrow.dtype == jnp.bfloat16
    error = [np.abs(np.asarray(a, np.float64) - exact).mean() for a in (wide, narrow)]
    assert error[0] < error[1] / 2


def test_under_jit_vmap_and_grad():
    q, k, v = heads(7)
    mask = jnp.asarray(np.array([[1, 1, 1, 0, 0, 0, 0]] * 2, bool))
    plain = attention(q, k, v, mask)
    np.testing.assert_allclose(jax.jit(attention)(q, k, v, mask), plain, atol=1e-6)
    mapped = jax.vmap(attention)(*(a[None] for a in (q, k, v)), mask[None])
    np.testing.assert_allclose(mapped[0], plain, atol=1e-6)
    gradient = jax.grad(lambda v: attention(q, k, v, mask).sum())(jnp.asarray(v))
    assert float(jnp.abs(gradient[:, 3:]).max()) == 0 < float(jnp.abs(gradient[:, :3]).max())


@pytest.mark.parametrize(
    "mask, error",
    [
        (np.ones((2, 7), np.int32), TypeError),
        (np.ones((2, 7), np.float32), TypeError),
        (np.ones((2, 6), bool), ValueError),
        (np.ones((3, 7), bool), ValueError),
        (np.ones((2, 5, 6), bool), ValueError),
        (np.ones((7,), bool), ValueError),
        (np.ones((2, 2, 5, 7), bool), ValueError),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, error):
    with pytest.raises(error, match="mask"):
        attention(*heads(8), mask)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = heads(9)
    for wrong in [
        (q[0], k, v),
        (q[..., :2], k, v),
        (q, k[:, :3], v),
        (q[:1], k, v),
        (q[:, :, :1], k, v),
    ]:
        with pytest.raises(ValueError, match=r"\[B, T, H, D\]"):
            attention(*wrong)


# --- heads of keys shared by several of queries ---------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_shared_heads_are_repeated_ones(kv_heads, masked):
    q, _, _ = heads(11, num_heads=6)
    _, k, v = heads(12, num_heads=kv_heads)
    mask = np.random.default_rng(13).random((2, 6, 5, 7)) < 0.6 if masked else None
    if mask is not None:
        mask[..., 0] = True
    wide = (np.repeat(a, 6 // kv_heads, axis=2) for a in (k, v))
    found = attention(q, k, v, None if mask is None else jnp.asarray(mask))
    np.testing.assert_allclose(found, in_float64(q, *wide, mask), rtol=1e-5, atol=1e-5)


def test_heads_that_cannot_be_shared():
    q, _, _ = heads(14, num_heads=6)
    for kv_heads in (4, 12):
        _, k, v = heads(14, num_heads=kv_heads)
        with pytest.raises(ValueError, match="multiple of K"):
            attention(q, k, v)


# --- AttentionWithRope ----------------------------------------------------------------------

ROPE = {"dim": 16, "n_heads": 4, "theta": 10000.0, "max_seq_len": 16}
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}


def layer_of(seed=0, interleaved=False, **options):
    rope = nn.RotaryEmbedding(**ROPE, interleaved=interleaved)
    return filled(nn.AttentionWithRope(rope=rope, **(SIZES | options)), seed)


def oracle(x, w, sees, heads=4, kv_heads=2, width=4, positions=None, scale=None):
    """In float64, one sequence ``[T, E]``; ``sees`` booleans ``[T, T]``."""

    def project(name, count):
        y = x.astype(np.float64) @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)
        return y.reshape(len(x), count, width)

    def turned(y):
        positions_ = np.arange(len(x)) if positions is None else positions
        angles = positions_[:, None] * 10000.0 ** (-np.arange(width // 2) / (width // 2))
        z = (y[..., : width // 2] + 1j * y[..., width // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    q, k = turned(project("q_proj", heads)), turned(project("k_proj", kv_heads))
    k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, project("v_proj", kv_heads)))
    y = in_float64(q[None], k[None], v[None], sees, scale).reshape(len(x), -1)
    return y @ w["o_proj.weight"].T


def causal(length):
    return np.tril(np.ones((length, length), bool))


def test_mask_and_variant_both_count():
    x, keys = random(2, 6, 16), np.array([[1, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 1]], bool)
    for variant, base in (("CAUSAL_MASK", causal(6)), ("NULL_MASK", np.ones((6, 6), bool))):
        layer, w = layer_of(mask_variant=MHAMaskVariant[variant])
        found = layer(jnp.asarray(x), jnp.asarray(keys))
        for i in range(2):
            expected = oracle(x[i], w, base & keys[i])
            np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-5)


def test_each_head_may_have_a_mask_of_its_own():
    layer, w = layer_of(num_attention_heads=8, hidden_size=32)  # 8 heads of 4 features
    x, mask = random(6, 32), np.random.default_rng(3).random((8, 6, 6)) < 0.7
    mask |= np.eye(6, dtype=bool)
    found = layer(jnp.asarray(x)[None], jnp.asarray(mask)[None])[0]
    expected = oracle(x, w, mask & causal(6), heads=8)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["CAUSAL_MASK", "SLIDING_WINDOW_CAUSAL_MASK"])
def test_sliding_window(variant):
    layer, w = layer_of(mask_variant=MHAMaskVariant[variant], sliding_window=2)
    x = random(6, 16)
    sees = causal(6) & ~np.tril(np.ones((6, 6), bool), -2)
    np.testing.assert_allclose(call(layer, x), oracle(x, w, sees), rtol=1e-4, atol=1e-5)


def test_positions_and_a_table_in_the_place_of_the_rope():
    layer, w = layer_of()
    x, positions = random(6, 16), np.array([3, 3, 4, 9, 0, 1])
    expected = oracle(x, w, causal(6), positions=positions)
    run = jax.jit(lambda layer, x, **options: layer(x, **options))
    for options in ({}, {"freqs_cis": layer.rope.freqs_cis}):
        found = run(layer, jnp.asarray(x), positions=jnp.asarray(positions), **options)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    still = jnp.tile(jnp.array([1.0, 0.0]), (6, 2))
    found = run(layer, jnp.asarray(x), freqs_cis=still)
    expected = oracle(x, w, causal(6), positions=np.zeros(6))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_scale_and_clip():
    layer, w = layer_of(scale=0.2, clip_qkv=0.3)
    x = random(6, 16)
    clipped = {n: np.clip(v, -0.3, 0.3) if n[0] in "qkv" else v for n, v in w.items()}
    expected = oracle(x, clipped, causal(6), scale=0.2)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-4, atol=1e-5)


def test_names_as_max_has_them():
    projections = [f"{n}.weight" for n in ("q_proj", "k_proj", "v_proj")]
    assert list(layer_of()[1]) == ["o_proj.weight", *projections]
    assert list(layer_of(use_qk_norm=True)[1]) == [
        "q_norm.weight", "k_norm.weight", "o_proj.weight", *projections,
    ]  # fmt: skip


@pytest.mark.parametrize("stacked", [False, True])
def test_attributes_as_max_has_them(stacked):
    layer, w = layer_of(stacked_qkv=stacked, has_bias=True, clip_qkv=0.3, rms_norm_eps=1e-5,
                        sharding_strategy=ShardingStrategy.tensor_parallel(2))  # fmt: skip
    assert (layer.stacked_qkv, layer.has_bias, layer.clip_qkv, layer.rms_norm_eps) == (
        stacked,
        True,
        0.3,
        1e-5,
    )
    assert layer.q_weight_dim == 16 and layer.sharding_strategy.is_tensor_parallel
    names = ["qkv_proj"] if stacked else ["q_proj", "k_proj", "v_proj"]
    weight, bias = (
        np.concatenate([w[f"{n}.{kind}"] for n in names]) for kind in ("weight", "bias")
    )
    np.testing.assert_allclose(layer.wqkv.to_numpy(), np.clip(weight, -0.3, 0.3), rtol=1e-6)
    np.testing.assert_array_equal(layer.wqkv_bias.to_numpy(), bias)
    assert [part.q_weight_dim for part in layer.shard([DeviceRef.CPU()] * 2)] == [8, 8]
    assert layer_of()[0].wqkv_bias is None and AttentionMaskVariant("causal").name == "CAUSAL_MASK"


def test_one_weight_for_three():
    layer, w = layer_of(stacked_qkv=True, has_bias=True)
    assert sorted(w) == ["o_proj.weight", "qkv_proj.bias", "qkv_proj.weight"]
    apart = {"o_proj.weight": w["o_proj.weight"]}
    for kind in ("weight", "bias"):
        parts = np.split(w[f"qkv_proj.{kind}"], [16, 24])
        names = ("q_proj", "k_proj", "v_proj")
        apart |= {f"{n}.{kind}": part for n, part in zip(names, parts, strict=True)}
    x = random(6, 16)
    expected = oracle(x, apart, causal(6))
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-4, atol=1e-5)


def test_no_token():
    assert layer_of()[0](jnp.zeros((2, 0, 16))).shape == (2, 0, 16)


def test_normalised_heads_as_qwen3_has_them():
    layer, w = layer_of(use_qk_norm=True)
    x = random(2, 6, 16)

    def in_transformers():
        qwen = transformers.models.qwen3.modeling_qwen3
        config = qwen.Qwen3Config(
            hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4, rope_theta=1e4,
            attention_dropout=0.0, attn_implementation="eager",
        )  # fmt: skip
        theirs = qwen.Qwen3Attention(config, 0).eval()
        theirs.load_state_dict({n: torch.tensor(v).float() for n, v in w.items()})
        positions = torch.arange(6)[None]
        table = qwen.Qwen3RotaryEmbedding(config)(torch.tensor(x), positions)
        bias = torch.where(torch.tensor(causal(6)), 0.0, -1e30)[None, None]
        with torch.no_grad():
            return theirs(torch.tensor(x), table, bias)[0].numpy()

    expected = recorded(in_transformers)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-4, atol=1e-5)


def test_what_the_layer_refuses():
    with pytest.raises(
        ValueError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"
    ):
        layer_of(num_key_value_heads=3)
    with pytest.raises(NotImplementedError, match="CHUNKED"):
        layer_of(mask_variant=MHAMaskVariant.CHUNKED_CAUSAL_MASK)
    with pytest.raises(ValueError, match="sliding_window"):
        layer_of(mask_variant=MHAMaskVariant.SLIDING_WINDOW_CAUSAL_MASK)
    with pytest.raises(ValueError, match="needs a sliding_window"):
        layer_of(mask_variant="4")
    with pytest.raises(ValueError, match=r"\[B, T, E\]"):
        layer_of()[0](jnp.ones((1, 1, 6, 16)))


def test_soft_cap():
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 4, 2, 8), np.float32) * 3 for _ in range(3))
    scores = np.einsum("bthd,bshd->bhts", q.astype(np.float64), k) / np.sqrt(8)
    capped = np.exp(2.0 * np.tanh(scores / 2.0))
    wanted = np.einsum("bhts,bshd->bthd", capped / capped.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(attention(q, k, v, soft_cap=2.0), wanted, atol=1e-5)
    assert np.abs(np.asarray(attention(q, k, v)) - wanted).max() > 1e-2
