"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one LayerNorm, RoPE of a part of each head.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + dense(softmax(q kᵀ / √D) v) + fc2(gelu(fc1(h)))
    logits = lm_head(final_layernorm(x))

All linear layers have biases, the head too.

Source: arXiv:2309.05463; transformers' ``modeling_phi``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from ..dtype import DType
from ..graph.device import DeviceRef
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import LayerNorm
from .family import Family
from .gguf.metadata import unsupported
from .gguf.table import PLAIN_BIASES, GGUFTable, Tensors
from .names import ROPE_TABLES, Headless, Names
from .parts import (
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
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class PhiConfig(LanguageModelConfig):
    """The settings of a Phi-1, Phi-1.5 or Phi-2: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        qk_layernorm: whether each head of queries and keys is normalised.
    """

    model_type = "phi"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = config_field(2048, minimum=1)
    layer_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0, part=0.5)
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False


class PhiAttention(Module):
    """Attention with rotary positions of a part of each head."""

    def __init__(self, config: PhiConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, eps, cpu = config.hidden_size, config.layer_norm_eps, [DeviceRef.CPU()]
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=True)
        self.k_proj = Linear(E, K * D, dtype, has_bias=True)
        self.v_proj = Linear(E, K * D, dtype, has_bias=True)
        self.dense = Linear(H * D, E, dtype, has_bias=True)
        self.has_norms = config.qk_layernorm
        if self.has_norms:
            self.q_layernorm = LayerNorm(D, cpu, dtype, eps)
            self.k_layernorm = LayerNorm(D, cpu, dtype, eps)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        if self.has_norms:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.dense(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"dense": self.heads}, self.head_dim)


class PhiMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: PhiConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.fc1 = Linear(E, F, dtype, has_bias=True)
        self.fc2 = Linear(F, E, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(activation(self.act)(self.fc1(x))).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc1"], ["fc2"])


class PhiBlock(Module):
    """One layer: attention and MLP of the same normalised hidden states, both added to these."""

    def __init__(self, config: PhiConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.layer_norm_eps
        self.input_layernorm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps)
        self.self_attn = PhiAttention(config, dtype)
        self.mlp = PhiMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.input_layernorm(x)
        y, cache = self.self_attn(h, cache, angles)
        return x + y + self.mlp(h), cache


class PhiModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: PhiConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.layer_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, E, dtype)
        self.layers = LayerList(PhiBlock(config, dtype) for _ in range(config.num_hidden_layers))
        self.final_layernorm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.final_layernorm(x), cache


class Phi(LanguageModel):
    """A Phi-1, Phi-1.5 or Phi-2 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = Phi(PhiConfig(100, 32, 64, num_hidden_layers=1, num_attention_heads=4))
        >>> list(model.raw_state_dict())[:2]
        ['lm_head.weight', 'lm_head.bias']
    """

    def __init__(self, config: PhiConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = PhiModel(config, self.dtype)
        tied = config.tie_word_embeddings
        self.lm_head = self.make_head(config.hidden_size, tied=tied, has_bias=True)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


def _to_gguf(config: PhiConfig, tensors: Tensors) -> Tensors:
    """Return the tensors as they are; norms of heads are refused."""
    if config.qk_layernorm:
        raise unsupported("'qk_layernorm' in a GGUF file of 'phi2'")
    return tensors


PHI_GGUF = GGUFTable(
    "phi2",
    {
        "output_norm": "model.final_layernorm",
        ".attn_output": "self_attn.dense",
        ".ffn_norm": None,
        ".ffn_gate": None,
        ".ffn_up": "mlp.fc1",
        ".ffn_down": "mlp.fc2",
    },
    constants={"hidden_act": "gelu_new"},
    biases=(*PLAIN_BIASES, "output"),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
    is_partial=True,
    has_head=True,
    split=_to_gguf,
)

PHI = Phi.family = Family.of(
    Phi,
    PhiConfig,
    names=Names(ROPE_TABLES, Headless("model.", ("embed_tokens.", "layers.", "final_layernorm."))),
    gguf=PHI_GGUF,
)
