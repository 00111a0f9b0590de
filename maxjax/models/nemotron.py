"""Nemotron 3 and 4 and Minitron, and Arcee's AFM: MLPs without a gate, with squared ReLU as activation function.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)
        x = x + down_proj(relu(up_proj(post_attention_layernorm(x)))²)
    logits = lm_head(norm(x))

In Nemotron the norms are LayerNorms that add 1 to their weights, and RoPE rotates half of each head. AFM has RMSNorms.

Sources: arXiv:2402.16819, arXiv:2407.14679; transformers' ``modeling_nemotron`` and ``modeling_arcee``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..dtype import DType
from ..graph.device import DeviceRef
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import LayerNorm, RMSNorm
from .family import Family
from .gguf.layouts import Plus
from .gguf.names import Rule
from .gguf.table import PERMUTED, PLAIN_BIASES, GGUFTable
from .names import DECODER, Names
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
class NemotronConfig(LanguageModelConfig):
    """The settings of a Nemotron: the keys of its ``config.json``, with transformers' defaults."""

    model_type = "nemotron"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "relu2"
    max_position_embeddings: int = config_field(4096, minimum=1)
    norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0, part=0.5)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def norm(self, dtype: DType) -> Any:
        """Make a norm of the hidden states."""
        cpu = [DeviceRef.CPU()]
        return LayerNorm(self.hidden_size, cpu, dtype, self.norm_eps, weight_offset=1.0)


@dataclass(frozen=True)
class ArceeConfig(LanguageModelConfig):
    """The settings of an AFM: the keys of its ``config.json``, with transformers' defaults."""

    model_type = "arcee"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "relu2"
    max_position_embeddings: int = config_field(4096, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def norm(self, dtype: DType) -> Any:
        """Make a norm of the hidden states."""
        return RMSNorm(self.hidden_size, dtype, self.rms_norm_eps, multiply_before_cast=False)


class NemotronAttention(Module):
    """Attention with rotary positions."""

    def __init__(self, config: NemotronConfig | ArceeConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class NemotronMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: NemotronConfig | ArceeConfig, dtype: DType):
        super().__init__()
        E, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.act = config.hidden_act
        self.up_proj = Linear(E, F, dtype, has_bias=bias)
        self.down_proj = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = activation(self.act)(self.up_proj(x))  # [B, T, F]
        return self.down_proj(h).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["up_proj"], ["down_proj"])


class NemotronBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: NemotronConfig | ArceeConfig, dtype: DType):
        super().__init__()
        self.input_layernorm = config.norm(dtype)
        self.self_attn = NemotronAttention(config, dtype)
        self.post_attention_layernorm = config.norm(dtype)
        self.mlp = NemotronMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class NemotronModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: NemotronConfig | ArceeConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            NemotronBlock(config, dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm = config.norm(dtype)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Nemotron(LanguageModel):
    """A Nemotron or Minitron language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = Nemotron(NemotronConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "0.mlp" in name]
        ['model.layers.0.mlp.up_proj.weight', 'model.layers.0.mlp.down_proj.weight']
    """

    def __init__(
        self,
        config: NemotronConfig | ArceeConfig,
        dtype: Any = DType.float32,
        *,
        stacked: bool = True,
    ):
        super().__init__(config, dtype)
        self.model = NemotronModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


class Arcee(Nemotron):
    """An AFM language model of Arcee."""


# --- GGUF files ---------------------------------------------------------------------------------

_ONE_ADDED = Plus(-1.0)


def _read(given: Any, tensors: Mapping[str, Any], config: Any) -> dict[str, Any]:
    return {"mlp_bias": "blk.0.ffn_up.bias" in tensors}


NEMOTRON_GGUF = GGUFTable(
    "nemotron",
    {
        "output_norm": Rule("model.norm", _ONE_ADDED),
        ".attn_norm": Rule("input_layernorm", _ONE_ADDED),
        ".ffn_norm": Rule("post_attention_layernorm", _ONE_ADDED),
        ".ffn_gate": None,
    },
    constants={"hidden_act": "relu2"},
    read=_read,
    biases=PLAIN_BIASES,
    epsilon=("attention.layer_norm_epsilon", "norm_eps"),
    is_partial=True,
    has_head=True,
    is_square=True,
)

ARCEE_GGUF = GGUFTable(
    "arcee",
    {**PERMUTED, ".ffn_gate": None},
    constants={"hidden_act": "relu2", "mlp_bias": False},
    biases=(),
    is_divided=True,
)

NEMOTRON = Nemotron.family = Family.of(
    Nemotron, NemotronConfig, names=Names(*DECODER), gguf=NEMOTRON_GGUF
)
ARCEE = Arcee.family = Family.of(Arcee, ArceeConfig, names=Names(*DECODER), gguf=ARCEE_GGUF)
