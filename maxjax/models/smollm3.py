"""SmolLM3: a Llama in which every fourth layer has no rotary position embedding.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = q_proj(h), k_proj(h), v_proj(h)
        q, k = rope(q), rope(k)                              in three of four layers
        x = x + o_proj(softmax(q kᵀ / √D) v)
        h = post_attention_layernorm(x)
        x = x + down_proj(silu(gate_proj(h)) · up_proj(h))
    logits = lm_head(norm(x))

Source: transformers' ``modeling_smollm3``; the idea is arXiv:2501.18795.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from ..dtype import DType
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from .family import Family
from .gguf.metadata import unsupported
from .gguf.table import PERMUTED, GGUFTable
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
    check_not_empty,
    config_field,
    every_nth_is_0,
    layer_kinds,
    layers,
    merge_heads,
    rope,
    rope_layers,
    run_layers,
    size,
    sliding,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class SmolLM3Config(LanguageModelConfig):
    """The settings of a SmolLM3: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        no_rope_layers: for each layer 1 if it has RoPE, else 0; every fourth has none by default.
        sliding_window: number of tokens that the layers without RoPE attend to; None: all.
    """

    model_type = "smollm3"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(32_768, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=2_000_000.0)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    no_rope_layers: tuple[int, ...] = config_field((), maximum=1)
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))

    def __post_init__(self) -> None:
        if not self.no_rope_layers:
            self._set("no_rope_layers", every_nth_is_0(self.num_hidden_layers, 4))
        super().__post_init__()
        if len(self.no_rope_layers) != self.num_hidden_layers:
            raise ValueError(
                f"{len(self.no_rope_layers)} entries say which of {self.num_hidden_layers} layers have RoPE "
                "('no_rope_layers')"
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, which may switch the window off."""
        raw = with_defaults(raw, {"num_key_value_heads": 4})
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        check_not_empty(raw, "no_rope_layers")
        uses_rope = rope_layers(raw)
        kinds = layer_kinds(raw, [FULL if one or window is None else SLIDING for one in uses_rope])
        raw = raw.replaced({
            "no_rope_layers": list(uses_rope), "layer_types": kinds,
            "sliding_window": window if SLIDING in kinds else None,
        })  # fmt: skip
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the switch of the window if a layer has it."""
        switch = {"use_sliding_window": True} if SLIDING in self.layer_types else {}
        return {**super().to_hf(), **switch}


class SmolLM3Attention(Module):
    """Attention with rotary positions in some layers, in which H/K query heads share a key-value head."""

    def __init__(self, config: SmolLM3Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.uses_rope = bool(config.no_rope_layers[layer])
        window = config.window(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        if self.uses_rope:
            q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class SmolLM3MLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: SmolLM3Config, dtype: DType):
        super().__init__()
        E, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype, has_bias=bias)
        self.up_proj = Linear(E, F, dtype, has_bias=bias)
        self.down_proj = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class SmolLM3Block(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: SmolLM3Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = SmolLM3Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = SmolLM3MLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class SmolLM3Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: SmolLM3Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            SmolLM3Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class SmolLM3(LanguageModel):
    """A SmolLM3 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = SmolLM3Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2)
        >>> [layer.self_attn.uses_rope for layer in SmolLM3(config, stacked=False).model.layers]
        [True, True, True, False]
    """

    def __init__(self, config: SmolLM3Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = SmolLM3Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


def _write(config: Any) -> dict[str, Any]:
    """Check the layers without RoPE: llama.cpp has only one pattern of these."""
    if config.no_rope_layers != every_nth_is_0(config.num_hidden_layers, 4):
        raise unsupported("'no_rope_layers' other than every fourth layer in a GGUF file")
    return {}


SMOLLM3_GGUF = GGUFTable(
    "smollm3",
    PERMUTED,
    constants={"hidden_act": "silu", "no_rope_layer_interval": 4, "use_sliding_window": False},
    write=_write,
    biases=(),
)

SMOLLM3 = SmolLM3.family = Family.of(
    SmolLM3, SmolLM3Config, names=Names(*DECODER), gguf=SMOLLM3_GGUF
)
