"""Phi-3 and Phi-4: a Llama whose attention and MLP have fused projections, with LongRoPE for long contexts.

::

    x = embed_tokens[ids]
    in each layer:
        q, k, v = qkv_proj(input_layernorm(x))
        q, k = rope(q), rope(k)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 over the last tokens, if there is a window
        gate, up = gate_up_proj(post_attention_layernorm(x))
        x = x + down_proj(silu(gate) · up)
    logits = lm_head(norm(x))

Sources: arXiv:2404.14219, arXiv:2412.08905; LongRoPE arXiv:2402.13753.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from ..dtype import DType
from ..graph.placement.split import Segment
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from ..nn.norm import RMSNorm
from ..nn.stacked_linear import StackedLinear, split_projections, stacked_rules
from .family import Family
from .gguf.table import GATE_UP, GGUFTable
from .names import DECODER, Names
from .parts import (
    CAUSAL,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    config_field,
    layers,
    merge_heads,
    rope,
    run_layers,
    size,
    sliding,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.rotary import object_of, read_rope

# Names in the first files for LongRoPE, the only kind of RoPE scaling of these models.
_LONGROPE = ("su", "yarn")


@dataclass(frozen=True)
class Phi3Config(LanguageModelConfig):
    """The settings of a Phi-3 or Phi-4: all layers have the sliding window, if there is one."""

    model_type = "phi3"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(4096, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0)
    sliding_window: int | None = config_field(None, minimum=1)
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file. RoPE may rotate a part of each head, and every scaling is LongRoPE."""
        raw, changed = with_defaults(raw, {"original_max_position_embeddings": 4096}), {}
        for name in ("rope_scaling", "rope_parameters"):
            given = object_of(raw, name)
            for key in ("type", "rope_type"):
                if given.get(key) in _LONGROPE:
                    changed[name] = given = {**given, key: "longrope"}
        context = cls.read_field(raw, "max_position_embeddings")
        values["rope_parameters"] = read_rope(raw.replaced(changed), context, part=1.0)
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings; the context length of LongRoPE stands beside those of RoPE too."""
        found, key = super().to_hf(), "original_max_position_embeddings"
        scaling = found.get("rope_scaling")
        return found if scaling is None else {**found, key: scaling[key]}


class Phi3Attention(Module):
    """Attention with rotary positions, and one linear layer for queries, keys and values."""

    def __init__(self, config: Phi3Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E = config.hidden_size
        self.heads, self.kv_heads, self.head_dim = H, K, D
        window = config.window(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        self.sizes = (H * D, K * D, K * D)
        self.qkv_proj = StackedLinear(E, self.sizes, ["q", "k", "v"], dtype, stacked=True)
        self.o_proj = Linear(H * D, E, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = split_projections(self.qkv_proj, x, self.sizes)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        heads = (self.heads, self.kv_heads, self.kv_heads)
        segments = [Segment.head_aware(count, self.head_dim) for count in heads]
        rules = stacked_rules("qkv_proj", self.qkv_proj, segments)
        return rules | split_heads_over_mesh({}, {"o_proj": self.heads}, self.head_dim)


class Phi3MLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202), with one linear layer for gate and up."""

    def __init__(self, config: Phi3Config, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act, self.sizes = config.hidden_act, (F, F)
        self.gate_up_proj = StackedLinear(E, self.sizes, ["gate", "up"], dtype, stacked=True)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = split_projections(self.gate_up_proj, x, self.sizes)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        segments = [Segment.even(size) for size in self.sizes]
        rules = stacked_rules("gate_up_proj", self.gate_up_proj, segments)
        return rules | split_features_over_mesh([], ["down_proj"])


class Phi3Block(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: Phi3Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = Phi3Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = Phi3MLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Phi3Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Phi3Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Phi3Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Phi3(LanguageModel):
    """A Phi-3 or Phi-4 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = Phi3Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> [name for name in Phi3(config).raw_state_dict() if "layers.0.self_attn" in name]
        ['model.layers.0.self_attn.qkv_proj.weight', 'model.layers.0.self_attn.o_proj.weight']
    """

    def __init__(self, config: Phi3Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Phi3Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


PHI3_GGUF = GGUFTable(
    "phi3",
    {
        **GATE_UP,
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v")),
        ".attn_qkv": "self_attn.qkv_proj",
    },
    keys={
        "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    constants={"hidden_act": "silu"},
    unused=("attention.sliding_window",),
    biases=(),
    is_partial=True,
    is_long=True,
)

PHI3 = Phi3.family = Family.of(Phi3, Phi3Config, names=Names(*DECODER), gguf=PHI3_GGUF)
