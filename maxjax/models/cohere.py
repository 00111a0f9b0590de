"""Command-R, Command-R+ (``cohere``), Command-A and R7B (``cohere2``): attention beside the MLP, after one norm.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_norm(q_proj(h))), rope(k_norm(k_proj(h))), v_proj(h)        (norms in Command-R+)
        x = x + o_proj(softmax(q kᵀ / √D) v) + down_proj(silu(gate_proj(h)) · up_proj(h))
    logits = logit_scale · lm_head(norm(x))

The norms are LayerNorms without bias, and RoPE rotates neighbouring features. In ``cohere2``, three of four layers
have a sliding window, and the others no RoPE.

Sources: transformers' ``modeling_cohere`` and ``modeling_cohere2``; arXiv:2504.00698.

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
from ..graph.device import DeviceRef
from ..graph.placement.split import REPLICATED
from ..graph.weight.weight import Weight
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import LayerNorm
from .family import Family
from .gguf.metadata import unsupported
from .gguf.names import HEAD_NORMS
from .gguf.table import GGUFTable
from .names import DECODER, Names
from .parts import (
    CAUSAL,
    FULL,
    SLIDING,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    config_field,
    constant,
    full_every,
    layer_count,
    layer_kinds,
    layers,
    merge_heads,
    positive_integer,
    rope,
    run_layers,
    size,
    sliding,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class CohereConfig(LanguageModelConfig):
    """The settings of a Command-R: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        use_qk_norm: whether each head of queries and keys is normalised, with weights of its own.
        logit_scale: factor of the logits.
    """

    model_type = "cohere"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(8192, minimum=1)
    layer_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=500_000.0, interleaved=True)
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    use_qk_norm: bool = False
    logit_scale: float = 0.0625

    def uses_rope(self, layer: int) -> bool:
        """Return whether a layer has RoPE."""
        return True


class CohereNorm(Module):
    """LayerNorm of each head, with a weight for each feature of each head."""

    def __init__(self, heads: int, head_dim: int, dtype: DType, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = Weight("weight", dtype, (heads, head_dim), DeviceRef.CPU())

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)  # [B, T, H, D]
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        weight = jnp.asarray(self.weight).astype(jnp.float32)
        weight = weight.reshape((1,) * (x.ndim - 2) + weight.shape)
        return (weight * centred * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the weight, which is small."""
        return {"weight": REPLICATED}

    def initializer(self, name: str) -> Any:
        """Initialises the weight to ones."""
        return jax.nn.initializers.ones


class CohereAttention(Module):
    """Attention with rotary positions of neighbouring features, and norms of queries and keys in some models."""

    def __init__(self, config: CohereConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, eps = config.hidden_size, config.attention_bias, config.layer_norm_eps
        self.heads, self.kv_heads, self.head_dim = H, K, D
        window = config.window(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        self.uses_rope = config.uses_rope(layer)
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.q_norm = self.k_norm = None
        if config.use_qk_norm:
            self.q_norm, self.k_norm = (CohereNorm(n, D, dtype, eps) for n in (H, K))

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.uses_rope:
            q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class CohereMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: CohereConfig, dtype: DType):
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


class CohereBlock(Module):
    """One layer: attention and MLP in parallel, after one norm."""

    def __init__(self, config: CohereConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.input_layernorm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps, use_bias=False)
        self.self_attn = CohereAttention(config, layer, dtype)
        self.mlp = CohereMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.input_layernorm(x)
        y, cache = self.self_attn(h, cache, angles)
        return x + y + self.mlp(h), cache


class CohereModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: CohereConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            CohereBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.layer_norm_eps
        self.norm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps, use_bias=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Cohere(LanguageModel):
    """A Command-R language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = CohereConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [n for n in Cohere(config).raw_state_dict() if "norm" in n]
        ['model.norm.weight', 'model.layers.0.input_layernorm.weight']
    """

    def __init__(self, config: CohereConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = CohereModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` of hidden states ``[..., E]``."""
        return super().logits(x) * self.config.logit_scale


# --- Command-A: windows and RoPE in three of four layers ----------------------------------------


@dataclass(frozen=True)
class Cohere2Config(CohereConfig):
    """The settings of a Command-A: all but every fourth layer have the sliding window and RoPE."""

    model_type = "cohere2"

    rope_parameters: Rope = Rope(theta=10_000.0, interleaved=True)
    use_qk_norm: bool = constant(False)
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))

    def uses_rope(self, layer: int) -> bool:
        """Return whether a layer has RoPE."""
        return self.layer_types[layer] == SLIDING

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file."""
        raw = with_defaults(raw, {"sliding_window": 4096, "sliding_window_pattern": 4})
        # The period is null where the kinds of the layers are listed.
        period = positive_integer(raw, "sliding_window_pattern", 4)
        kinds = layer_kinds(raw, full_every(period, layer_count(raw)))
        window = raw.get("sliding_window") if SLIDING in kinds else None
        return super().from_hf(
            raw.replaced({"layer_types": kinds, "sliding_window": window}), **values
        )


class Cohere2(Cohere):
    """A Command-A language model."""


# --- GGUF files ---------------------------------------------------------------------------------

# llama.cpp reads norms of queries and keys only in models with at least this many layers.
_DEEP = 64


def _write(config: Any) -> dict[str, Any]:
    if config.use_qk_norm is not (config.num_hidden_layers >= _DEEP):
        raise unsupported(f"'use_qk_norm' in a GGUF file of {config.num_hidden_layers} layers")
    return {}


COHERE_GGUF = GGUFTable(
    "command-r",
    {".ffn_norm": None, **HEAD_NORMS},
    keys={"logit_scale": "logit_scale"},
    constants={"hidden_act": "silu"},
    read=lambda given, tensors, config: {"use_qk_norm": "blk.0.attn_q_norm.weight" in tensors},
    write=_write,
    biases=(),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    is_tied=True,
)

COHERE2_GGUF = GGUFTable(
    "cohere2",
    {".ffn_norm": None},
    keys={"logit_scale": "logit_scale"},
    constants={"hidden_act": "silu"},
    biases=(),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    period=4,
    is_tied=True,
)

COHERE = Cohere.family = Family.of(Cohere, CohereConfig, names=Names(*DECODER), gguf=COHERE_GGUF)
COHERE2 = Cohere2.family = Family.of(
    Cohere2, Cohere2Config, names=Names(*DECODER), gguf=COHERE2_GGUF
)
