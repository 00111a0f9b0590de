"""attention() against float64 in NumPy and against torch's scaled_dot_product_attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.nn.attention import attention


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
    torch = pytest.importorskip("torch")
    q, k, v = heads(3)
    mask = np.array([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]], bool)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.tensor(a).transpose(1, 2) for a in (q, k, v)),
        attn_mask=torch.tensor(mask)[:, None, None],
    ).transpose(1, 2)
    found = attention(q, k, v, jnp.asarray(mask))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)


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
