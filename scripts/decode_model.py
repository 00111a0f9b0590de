"""A Llama for the benchmarks, of maxjax's layers: prefill of prompts, one token of every sequence.

The layers are a LayerStack, so each step is one loop; the cache is one array for all layers that
goes through it, donated from step to step. ``models`` will have the real families.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import maxjax
from maxjax import nn
from maxjax.graph import DeviceRef, Weight
from maxjax.kernels import decode_attention, matmul
from maxjax.nn.attention import attention
from maxjax.nn.rotary_embedding import rotate


class Cache(NamedTuple):
    """keys, values ``[L, B, K, S, D]``; lengths ``[B]``: how many tokens of each sequence are in."""

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array


class Attention(nn.Module):
    """Attention with a cache, over rotated queries and keys."""

    def __init__(self, config: dict, dtype: str):
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = config["head_dim"]
        size, device = config["hidden_size"], DeviceRef.CPU()
        self.qkv_proj = nn.StackedLinear(
            size, [n * self.width for n in (self.heads, self.kv_heads, self.kv_heads)],
            ["q_proj", "k_proj", "v_proj"], dtype, device,
        )  # fmt: skip
        self.o_proj = nn.Linear(self.heads * self.width, size, dtype, device)

    def __call__(self, x, cache, layer, cos_sin):
        """``[B, T, E]``, the prompts, or ``[B, E]``, one token of each sequence."""
        q, k, v = (
            y.reshape(*y.shape[:-1], y.shape[-1] // self.width, self.width)
            for y in self.qkv_proj.apart(x)
        )
        if x.ndim == 2:
            y, keys, values = decode_attention(q, k, v, *cache, layer=layer, rope=cos_sin)
        else:
            q, k = (rotate(a, *cos_sin, interleaved=False) for a in (q, k))
            mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
            y = attention(q, k, v, mask)
            keys, values = (
                jax.lax.dynamic_update_slice(
                    whole, new.swapaxes(1, 2)[None].astype(whole.dtype), (layer, 0, 0, 0, 0)
                )
                for whole, new in zip(cache, (k, v), strict=False)
            )
        return self.o_proj(y.reshape(*x.shape[:-1], -1)), Cache(keys, values, cache.lengths)


class Block(nn.Module):
    """Attention and MLP, each with its norm and shortcut."""

    def __init__(self, config: dict, dtype: str):
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        norm = functools.partial(nn.RMSNorm, size, dtype, eps, multiply_before_cast=False)
        self.self_attn = Attention(config, dtype)
        self.mlp = nn.MLP(dtype, None, size, config["intermediate_size"], [DeviceRef.CPU()])
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()

    def __call__(self, carry, layer, cos_sin):
        x, cache = carry
        y, cache = self.self_attn(self.input_layernorm(x), cache, layer, cos_sin)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nn.Module):
    """Embedding, layers, norm: what Hugging Face calls ``model``."""

    def __init__(self, config: dict, dtype: str, stacked: bool):
        super().__init__()
        size = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], size, dtype, DeviceRef.CPU())
        layers = nn.LayerList(Block(config, dtype) for _ in range(config["num_hidden_layers"]))
        self.layers = layers.stack() if stacked else layers
        self.norm = nn.RMSNorm(size, dtype, config["rms_norm_eps"], multiply_before_cast=False)

    def __call__(self, tokens, cache, cos_sin):
        x = self.embed_tokens(tokens)
        if isinstance(self.layers, nn.LayerStack):
            x, cache = self.layers.scan((x, cache), index="layer", cos_sin=cos_sin)
        else:
            for i, block in enumerate(self.layers):
                x, cache = block((x, cache), jnp.int32(i), cos_sin)
        return self.norm(x if tokens.ndim == 1 else x[:, -1]), cache


class Llama(nn.Module):
    """``model(tokens, cache)`` → logits of the last tokens in float32 ``[B, V]``, and the cache."""

    def __init__(self, config: dict, dtype: str, stacked: bool = True):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.rope = nn.RotaryEmbedding(
            config["hidden_size"], config["num_attention_heads"], config["rope_theta"],
            config["max_position_embeddings"], config["head_dim"], interleaved=False,
        )  # fmt: skip
        self.model = Decoder(config, dtype, stacked)
        self.lm_head: Weight | None = None
        if not config["tie_word_embeddings"]:
            self.lm_head = nn.Linear(
                config["hidden_size"], config["vocab_size"], dtype, DeviceRef.CPU()
            )

    def cache(self, batch: int, slots: int, dtype: str) -> Cache:
        """An empty cache."""
        config = self.config
        shape = (config["num_hidden_layers"], batch, config["num_key_value_heads"], slots,
                 config["head_dim"])  # fmt: skip
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    def __call__(self, tokens, cache):
        """Tokens ``[B, T]``, the prompts, or ``[B]``, one of each sequence."""
        positions = cache.lengths if tokens.ndim == 1 else jnp.arange(tokens.shape[1])
        x, cache = self.model(tokens, cache, self.rope.cos_sin(positions))
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = matmul(x, head.weight).astype(jnp.float32)
        return logits, cache._replace(lengths=cache.lengths + (tokens.size // tokens.shape[0]))


def load(directory: str | Path, stacked: bool = True) -> Llama:
    """The model of a directory of ``random_llama.py``, in the dtype of its weights."""
    config = json.loads((Path(directory) / "config.json").read_text())
    model = Llama(config, config["torch_dtype" if "torch_dtype" in config else "dtype"], stacked)
    model.load_state_dict(maxjax.load_weights(str(directory)))
    return model


@functools.partial(jax.jit, donate_argnums=2)
def step(model: Llama, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """One call of the model, the cache in place."""
    return model(tokens, cache)
