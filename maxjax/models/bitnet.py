"""BitNet b1.58: a Llama with a norm before the output projection of attention, and one before that of the MLP.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(attn_sub_norm(softmax(q kᵀ / √D) v))      for each head, over the tokens before
        h = post_attention_layernorm(x)
        x = x + down_proj(ffn_sub_norm(relu(gate_proj(h))² · up_proj(h)))
    logits = lm_head(norm(x))

In files with ``quantization_config`` the linear layers, all but ``lm_head``, have weights that are a factor times
-1, 0 or 1, and their inputs are rounded to 8 bits for each token: the method "bitnet" of ``models/quantized``.

Sources: arXiv:2402.17764, arXiv:2504.12285.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
V tokens in the vocabulary. A decode step has no axis T.
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
    with_defaults,
)


@dataclass(frozen=True)
class BitNetConfig(LanguageModelConfig):
    """The settings of a BitNet: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        num_key_value_heads: K; ``num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        attention_bias: whether the linear layers of attention have biases.
    """

    model_type = "bitnet"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    hidden_act: str = "relu2"
    max_position_embeddings: int = config_field(2048, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=500_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """D, the width of a head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which null stands for as many KV heads as query heads."""
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 5}), **values)

    def _check(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"'hidden_size' {self.hidden_size} is not a multiple of 'num_attention_heads' "
                f"{self.num_attention_heads}"
            )
        super()._check()


class BitNetAttention(Module):
    """Attention with rotary positions, whose results are normalised over all heads together."""

    def __init__(self, config: BitNetConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.attn_sub_norm = RMSNorm(E, dtype, config.rms_norm_eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        y = self.attn_sub_norm(merge_heads(y))  # [B, T, E]
        return self.o_proj(y).astype(x.dtype), cache

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class BitNetMLP(Module):
    """The gated MLP, with a squared ReLU and a norm before the last linear layer."""

    def __init__(self, config: BitNetConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype)
        self.up_proj = Linear(E, F, dtype)
        self.down_proj = Linear(F, E, dtype)
        self.ffn_sub_norm = RMSNorm(F, dtype, config.rms_norm_eps, multiply_before_cast=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (a.astype(x.dtype) for a in linears([self.gate_proj, self.up_proj], x))
        y = self.ffn_sub_norm(activation(self.act)(gate) * up)  # [B, T, F]
        return self.down_proj(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class BitNetBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: BitNetConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = BitNetAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = BitNetMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class BitNetModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: BitNetConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, E, dtype)
        self.layers = LayerList(BitNetBlock(config, dtype) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class BitNet(LanguageModel):
    """A BitNet language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = BitNetConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [name for name in BitNet(config).raw_state_dict() if "sub_norm" in name]
        ['model.layers.0.self_attn.attn_sub_norm.weight', 'model.layers.0.mlp.ffn_sub_norm.weight']
    """

    def __init__(self, config: BitNetConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = BitNetModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


BITNET = BitNet.family = Family.of(BitNet, BitNetConfig, names=Names(*DECODER))
