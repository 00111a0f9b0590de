"""MultiHeadAttention against torch's, by its names: self, cross, masks, other sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxjax
from maxjax import nn
from tests.oracles.recorded import recorded, torch

E, HEADS, B, T, S = 8, 2, 2, 3, 5
MASK = np.array([[True] * S, [True, True, False, True, False]])
CASES = {
    "self": ({}, "self", None, False),
    "causal": ({"has_bias": False}, "self", None, True),
    "cross": ({}, "cross", MASK, False),
    "sizes": ({"kdim": 6, "vdim": 4}, "cross", np.tril(np.ones((B, T, S), bool), 1), False),
}


def of_torch(options, weights, arrays, mask, is_causal):
    options = {"bias" if k == "has_bias" else k: v for k, v in options.items()}
    layer = torch.nn.MultiheadAttention(E, HEADS, batch_first=True, **options)
    layer.load_state_dict({n: torch.tensor(v) for n, v in weights.items()})
    more = {}
    if is_causal:
        more["attn_mask"] = torch.tensor(~np.tril(np.ones((T, T), bool)))
    elif mask is not None and mask.ndim == 2:
        more["key_padding_mask"] = torch.tensor(~mask)
    elif mask is not None:
        more["attn_mask"] = torch.tensor(~np.repeat(mask, HEADS, 0))
    y, _ = layer(*(torch.tensor(a) for a in arrays), need_weights=False, **more)
    return y.detach().numpy()


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name):
    options, kind, mask, is_causal = CASES[name]
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(0, 0.7, shape).astype(np.float32)
    layer = nn.MultiHeadAttention(E, HEADS, **options)
    weights = {n: draw(*map(int, w.shape)) for n, w in layer.raw_state_dict().items()}
    layer.load_state_dict(weights)
    x = draw(B, T, E)
    arrays = [x] * 3 if kind == "self" else [
        x, draw(B, S, options.get("kdim", E)), draw(B, S, options.get("vdim", E))]  # fmt: skip
    expected = recorded(lambda: of_torch(options, weights, arrays, mask, is_causal))
    call = jax.jit(lambda m, *a: m(*a, is_causal=is_causal))
    found = call(layer, *arrays[:1] if kind == "self" else arrays, *[] if mask is None else [mask])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    if kind == "self":
        np.testing.assert_allclose(call(layer, *map(jnp.copy, arrays)), expected, atol=1e-5)


def test_a_causal_mask_and_another_both_count():
    layer = nn.MultiHeadAttention(E, HEADS)
    rng = np.random.default_rng(0)
    layer.load_state_dict(
        {
            n: rng.normal(0, 1, tuple(map(int, w.shape))).astype(np.float32)
            for n, w in layer.raw_state_dict().items()
        }
    )
    x, mask = jnp.asarray(rng.normal(size=(B, T, E)), jnp.float32), MASK[:, :T]
    both = np.tril(np.ones((T, T), bool)) & mask[:, None, :]
    np.testing.assert_allclose(layer(x, mask=mask, is_causal=True), layer(x, mask=both), atol=1e-6)
    with pytest.raises(TypeError, match="boolean"):
        layer(x, mask=jnp.ones((B, T)), is_causal=True)
    with pytest.raises(ValueError, match="does not fit scores"):
        layer(x, mask=np.ones((B, T + 1), bool), is_causal=True)
    with pytest.raises(ValueError, match="not a multiple"):
        nn.MultiHeadAttention(7, 2)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)])
def test_no_sequences_and_no_tokens(shape):
    layer = maxjax.init(nn.MultiHeadAttention(8, 2), jax.random.key(0))
    assert layer(jnp.ones(shape)).shape == shape
