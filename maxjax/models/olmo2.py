"""OLMo 2 and 3: norms after attention and MLP, and norms of queries and keys over all heads together.

::

    x = embed_tokens[ids]
    in each layer:
        q, k, v = rope(q_norm(q_proj(x))), rope(k_norm(k_proj(x))), v_proj(x)
        x = x + post_attention_layernorm(o_proj(softmax(q kᵀ / √D) v))
        x = x + post_feedforward_layernorm(down_proj(silu(gate_proj(x)) · up_proj(x)))
    logits = lm_head(norm(x))

OLMo 3 adds a sliding window in three of every four layers, whose RoPE may have its own settings.

Sources: arXiv:2501.00656; transformers' ``modeling_olmo2`` and ``modeling_olmo3``.

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
from .gguf.metadata import Settings, unsupported
from .gguf.names import AFTER_NORMS, HEAD_NORMS
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
    layer_count,
    layer_kinds,
    layers,
    merge_heads,
    rope,
    ropes_by_kind,
    ropes_to_hf,
    run_layers,
    size,
    sliding,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class Olmo2Config(LanguageModelConfig):
    """The settings of an OLMo 2: the keys of its ``config.json``, with transformers' defaults."""

    model_type = "olmo2"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(2048, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def rope(self, kind: str) -> Rope:
        """Return the rotary position embedding of a kind of layers."""
        return self.rope_parameters


class Olmo2Attention(Module):
    """Attention with rotary positions, whose queries and keys are normalised over all heads together."""

    def __init__(self, config: Olmo2Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        window = config.window(layer)
        self.kind = FULL if window is None else SLIDING
        self.mask = CAUSAL if window is None else sliding(window)
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.q_norm = RMSNorm(H * D, dtype, eps)
        self.k_norm = RMSNorm(K * D, dtype, eps)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Mapping[str, Angles]
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = self.q_norm(q.astype(x.dtype)), self.k_norm(k.astype(x.dtype)), v.astype(x.dtype)
        q, k, v = (split_heads(a, self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles[self.kind]), rope(k, angles[self.kind])
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Olmo2MLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: Olmo2Config, dtype: DType):
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


class Olmo2Block(Module):
    """One layer: attention, then the MLP, each normalised before it is added to the hidden states."""

    def __init__(self, config: Olmo2Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Olmo2Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps)
        self.mlp = Olmo2MLP(config, dtype)
        self.post_feedforward_layernorm = RMSNorm(E, dtype, eps)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Mapping[str, Angles]
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(x, cache, angles)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(x)), cache


class Olmo2Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Olmo2Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Olmo2Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, dtype, config.rms_norm_eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        config = self.config
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = {
            kind: config.rope(kind).angles(cache, config.head_dim) for kind in (FULL, SLIDING)
        }
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Olmo2(LanguageModel):
    """An OLMo 2 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = Olmo2Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> Olmo2(config, stacked=False).model.layers[0].self_attn.q_norm.weight.shape
        [Dim(8)]
    """

    def __init__(self, config: Olmo2Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Olmo2Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- OLMo 3: a sliding window in all but every fourth layer -------------------------------------


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """The settings of an OLMo 3.

    Attributes:
        rope_parameters: the rotary position embedding of layers with full attention.
        local_rope_parameters: that of sliding layers.
    """

    model_type = "olmo3"

    rope_parameters: Rope = Rope(theta=5e5)
    local_rope_parameters: Rope = constant(Rope(theta=5e5))
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))

    def rope(self, kind: str) -> Rope:
        """Return the rotary position embedding of a kind of layers."""
        return self.rope_parameters if kind == FULL else self.local_rope_parameters

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with a Rope for each kind of layer."""
        raw = with_defaults(raw, {"sliding_window": 4096})
        every_fourth = [SLIDING if (i + 1) % 4 else FULL for i in range(layer_count(raw))]
        kinds = layer_kinds(raw, every_fourth)
        context = cls.read_field(raw, "max_position_embeddings")
        by_kind = ropes_by_kind(raw, context, {FULL: 5e5, SLIDING: 5e5})
        window = raw.get("sliding_window") if SLIDING in kinds else None
        raw = raw.replaced({"layer_types": kinds, "sliding_window": window})
        values |= {"rope_parameters": by_kind[FULL], "local_rope_parameters": by_kind[SLIDING]}
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with RoPE's for each kind of layer if these differ."""
        found, local = super().to_hf(), self.local_rope_parameters
        if local == Rope(self.rope_parameters.theta):
            return found
        return {**found, **ropes_to_hf({FULL: self.rope_parameters, SLIDING: local})}


class Olmo3(Olmo2):
    """An OLMo 3 language model."""


# --- GGUF files ---------------------------------------------------------------------------------


def _read(given: Settings, tensors: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return what a file with a sliding window is: an OLMo 3."""
    if not config.get("sliding_window"):
        return {}
    return {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}


def _write(config: Any) -> dict[str, Any]:
    """Check the RoPE of sliding layers: llama.cpp uses the base of the other layers, without scaling."""
    if config.rope(SLIDING) != Rope(config.rope_parameters.theta) and any(
        config.window(i) for i in range(config.num_hidden_layers)
    ):
        raise unsupported("rope settings of sliding layers alone in a GGUF file")
    return {}


OLMO2_GGUF = GGUFTable(
    "olmo2",
    {**HEAD_NORMS, **AFTER_NORMS},
    constants={"hidden_act": "silu"},
    read=_read,
    write=_write,
    biases=(),
    period=4,
    has_head=True,
)

OLMO2 = Olmo2.family = Family.of(Olmo2, Olmo2Config, names=Names(*DECODER), gguf=OLMO2_GGUF)
OLMO3 = Olmo3.family = Family.of(Olmo3, Olmo3Config, names=Names(*DECODER))
