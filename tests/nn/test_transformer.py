"""TransformerBlock against transformers' LlamaDecoderLayer of the same weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax import nn
from maxjax.graph import TensorValue
from tests.nn.layers import CPU, filled, random, same_everywhere
from tests.oracles.recorded import recorded, torch, transformers

SIZES = {"num_attention_heads": 4, "hidden_size": 32}


def block(kv_heads=2, multiplier=1.0, dtype="float32"):
    rope = nn.RotaryEmbedding(32, 4, 10000.0, 64, interleaved=False)
    attention = nn.AttentionWithRope(
        rope=rope, num_key_value_heads=kv_heads, devices=[CPU], dtype=dtype, **SIZES
    )
    mlp = nn.MLP(dtype, None, 32, 48, [CPU])
    norms = (nn.RMSNorm(32, dtype, 1e-5, multiply_before_cast=False) for _ in range(2))
    return filled(nn.TransformerBlock(attention, mlp, *norms, multiplier), scale=0.2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_as_llama_has_it(kv_heads):
    layer, w = block(kv_heads)
    x = random(2, 7, 32)

    def in_transformers():
        llama = transformers.models.llama.modeling_llama
        config = llama.LlamaConfig(
            num_key_value_heads=kv_heads, intermediate_size=48, rms_norm_eps=1e-5,
            attn_implementation="eager", **SIZES,
        )  # fmt: skip
        theirs = llama.LlamaDecoderLayer(config, 0).eval()
        theirs.load_state_dict({n: torch.tensor(v).float() for n, v in w.items()})
        table = llama.LlamaRotaryEmbedding(config)(torch.tensor(x), torch.arange(7)[None])
        bias = torch.where(torch.ones(7, 7).tril().bool(), 0.0, -1e30)[None, None]
        with torch.no_grad():
            found = theirs(torch.tensor(x), attention_mask=bias, position_embeddings=table)
        return (found[0] if isinstance(found, tuple) else found).numpy()

    expected = recorded(in_transformers)
    found = same_everywhere(layer, x, rtol=1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_names_as_max_has_them():
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    assert list(block()[0].raw_state_dict()) == [
        *norms,
        "self_attn.o_proj.weight",
        *(f"mlp.{n}_proj.weight" for n in ("gate", "down", "up")),
        *(f"self_attn.{n}_proj.weight" for n in "qkv"),
    ]


def test_residual_multiplier():
    one, half, none = (block(multiplier=m)[0] for m in (1.0, 0.5, 0.0))
    x = jnp.asarray(random(2, 7, 32))
    np.testing.assert_array_equal(none(x), x)
    h = x + 0.5 * half.self_attn(half.input_layernorm(x))
    expected = h + 0.5 * half.mlp(half.post_attention_layernorm(h))
    np.testing.assert_allclose(half(x), expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(one(x), half(x))


def test_what_else_it_is_called_with_goes_to_the_attention():
    layer, _ = block()
    x, keys = jnp.asarray(random(1, 7, 32)), jnp.arange(7)[None] != 3
    h = x + layer.self_attn(layer.input_layernorm(x), keys, jnp.arange(7) + 2)
    expected = h + layer.mlp(layer.post_attention_layernorm(h))
    found = layer(x, keys, positions=jnp.arange(7) + 2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, layer(x))


def test_bfloat16():
    layer, w = block(dtype="bfloat16")
    wide, _ = block()
    wide.load_state_dict({n: v.astype(np.float32) for n, v in w.items()})
    x = random(2, 7, 32)
    found = layer(TensorValue(jnp.asarray(x, jnp.bfloat16)))
    assert type(found) is TensorValue and found.dtype.name == "bfloat16"
    np.testing.assert_allclose(
        np.asarray(found, np.float32), wide(jnp.asarray(x)), rtol=0.1, atol=0.1
    )
