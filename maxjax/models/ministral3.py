"""Ministral 3: a Mistral without a window, whose queries grow with their position beyond the trained length.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(growth · q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)
        h = post_attention_layernorm(x)
        x = x + down_proj(silu(gate_proj(h)) · up_proj(h))
    logits = lm_head(norm(x))

with growth = 1 + β · log(1 + ⌊position / trained length⌋). It is published as a part of multimodal models.

Source: transformers' ``modeling_ministral3``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from .family import Family
from .gguf.metadata import Settings, unsupported
from .gguf.table import PERMUTED, GGUFTable
from .names import DECODER, Names
from .parts import (
    CAUSAL,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    bidirectional,
    config_field,
    constant,
    layers,
    merge_heads,
    rope,
    run_layers,
    size,
    sliding,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)
from .parts.rotary import QueryScaling, read_rope, rope_or, rope_settings

_LENGTH = "original_max_position_embeddings"
# RoPE of files that do not describe it.
_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _LENGTH: 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Ministral3Config(LanguageModelConfig):
    """The settings of a Ministral 3: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        query_scaling: growth of the queries, which is among RoPE's settings in a file; None: they do not grow.
        is_causal: whether a token attends only to those before it.
    """

    model_type = "ministral3"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=8)
    head_dim: int = size(default=128)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(262_144, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0)
    query_scaling: QueryScaling | None = constant(None)
    sliding_window: int | None = config_field(None, minimum=1)
    tie_word_embeddings: bool = False
    is_causal: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with the growth of the queries."""
        raw_rope = rope_or(raw, _ROPE)
        values["rope_parameters"] = read_rope(
            raw_rope, cls.read_field(raw, "max_position_embeddings")
        )
        name, given = rope_settings(raw_rope)
        beta, length = given.get("llama_4_scaling_beta"), given.get(_LENGTH)
        if beta is not None:
            good = isinstance(beta, (int, float)) and beta >= 0
            if not (good and isinstance(length, (int, float)) and 0 < length < float("inf")):
                raise ValueError(
                    f"'llama_4_scaling_beta' in '{name}' needs two numbers, itself and '{_LENGTH}'"
                )
            values["query_scaling"] = QueryScaling(float(beta), float(length))
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the growth of the queries among RoPE's."""
        found, growth = super().to_hf(), self.query_scaling
        scaling = found.get("rope_scaling", {"rope_type": "default"})
        if growth is not None:
            scaling = {**scaling, "llama_4_scaling_beta": growth.beta, _LENGTH: int(growth.length)}
        return {**found, "rope_scaling": scaling}


class Ministral3Attention(Module):
    """Attention with rotary positions, whose queries grow with their position."""

    def __init__(self, config: Ministral3Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E = config.hidden_size
        self.heads, self.kv_heads, self.head_dim = H, K, D
        window = config.window(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        if not config.is_causal:
            self.mask = bidirectional(window)
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, K * D, dtype)
        self.v_proj = Linear(E, K * D, dtype)
        self.o_proj = Linear(H * D, E, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles, growth: jax.Array | None
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        if growth is not None:
            q = (q.astype(jnp.float32) * growth[..., None, None]).astype(q.dtype)
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Ministral3MLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: Ministral3Config, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype)
        self.up_proj = Linear(E, F, dtype)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class Ministral3Block(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: Ministral3Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = Ministral3Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = Ministral3MLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles, growth: jax.Array | None
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles, growth)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Ministral3Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Ministral3Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Ministral3Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        scaling = self.config.query_scaling
        growth = None if scaling is None else scaling.factors(cache.positions)  # [B, T]
        x, cache = run_layers(self.layers, x, cache, angles, growth)
        return self.norm(x), cache


class Ministral3(LanguageModel):
    """A Ministral 3 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.
    """

    def __init__(
        self, config: Ministral3Config, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = Ministral3Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


def _read(given: Settings, tensors: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE of a Ministral 3, with the growth of the queries."""
    rope = config["rope_scaling"] or {"rope_type": "default"}
    if (beta := given.number("attention.temperature_scale", None, positive=False)) is not None:
        rope = {**rope, "llama_4_scaling_beta": beta}
    return {"rope_scaling": rope}


def _write(config: Any) -> dict[str, Any]:
    """Return the growth of the queries, for which llama.cpp uses the original context length."""
    growth, scaling = config.query_scaling, config.rope_parameters.scaling
    if growth is None:
        return {}
    if growth.length != getattr(scaling, "original_max_position_embeddings", None):
        raise unsupported("'llama_4_scaling_beta' without yarn in a GGUF file")
    return {"attention.temperature_scale": growth.beta}


MINISTRAL3_GGUF = GGUFTable(
    "mistral3",
    PERMUTED,
    keys={"attention.sliding_window": "sliding_window"},
    constants={"hidden_act": "silu"},
    read=_read,
    write=_write,
    written=("attention.temperature_scale",),
    unused=("attention.sliding_window",),
    biases=(),
    log_multiplier=1.0,
)

MINISTRAL3 = Ministral3.family = Family.of(
    Ministral3, Ministral3Config, names=Names(*DECODER), gguf=MINISTRAL3_GGUF
)
