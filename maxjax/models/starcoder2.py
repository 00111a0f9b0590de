"""StarCoder 2: LayerNorm, biases everywhere, a sliding window, and an MLP without a gate.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 over the last tokens, if there is a window
        x = x + c_proj(gelu(c_fc(post_attention_layernorm(x))))
    logits = lm_head(norm(x))

Source: arXiv:2402.19173; transformers' ``modeling_starcoder2``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

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
from .gguf.table import PLAIN_BIASES, GGUFTable
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


@dataclass(frozen=True)
class Starcoder2Config(LanguageModelConfig):
    """The settings of a StarCoder 2: all layers have the sliding window, if there is one.

    Attributes:
        use_bias: whether all linear layers have biases.
    """

    model_type = "starcoder2"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = config_field(4096, minimum=1)
    norm_epsilon: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0)
    use_bias: bool = True
    sliding_window: int | None = config_field(None, minimum=1)
    tie_word_embeddings: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file."""
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 2}), **values)


class Starcoder2Attention(Module):
    """Attention with rotary positions, to the last tokens if there is a window."""

    def __init__(self, config: Starcoder2Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.use_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
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
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Starcoder2MLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: Starcoder2Config, dtype: DType):
        super().__init__()
        E, F, bias = config.hidden_size, config.intermediate_size, config.use_bias
        self.act = config.hidden_act
        self.c_fc = Linear(E, F, dtype, has_bias=bias)
        self.c_proj = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = activation(self.act)(self.c_fc(x))  # [B, T, F]
        return self.c_proj(h).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["c_fc"], ["c_proj"])


class Starcoder2Block(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: Starcoder2Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.norm_epsilon
        self.input_layernorm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps)
        self.self_attn = Starcoder2Attention(config, layer, dtype)
        self.post_attention_layernorm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps)
        self.mlp = Starcoder2MLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Starcoder2Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Starcoder2Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Starcoder2Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.norm_epsilon
        self.norm = LayerNorm(E, [DeviceRef.CPU()], dtype, eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Starcoder2(LanguageModel):
    """A StarCoder 2 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = Starcoder2Config(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [n for n in Starcoder2(config).raw_state_dict() if "0.mlp" in n]
        ['model.layers.0.mlp.c_fc.weight', 'model.layers.0.mlp.c_fc.bias',
         'model.layers.0.mlp.c_proj.weight', 'model.layers.0.mlp.c_proj.bias']
    """

    def __init__(
        self, config: Starcoder2Config, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = Starcoder2Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


def _write(config: Any) -> dict[str, Any]:
    if not config.use_bias:
        raise unsupported("'use_bias' false in a GGUF file of 'starcoder2'")
    return {}


STARCODER2_GGUF = GGUFTable(
    "starcoder2",
    {".ffn_gate": None, ".ffn_up": "mlp.c_fc", ".ffn_down": "mlp.c_proj"},
    keys={"attention.sliding_window": "sliding_window"},
    constants={"hidden_act": "gelu_pytorch_tanh"},
    read=lambda given, tensors, config: {"use_bias": config["attention_bias"]},
    write=_write,
    biases=PLAIN_BIASES,
    epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
    unused=("attention.sliding_window",),
)

STARCODER2 = Starcoder2.family = Family.of(
    Starcoder2, Starcoder2Config, names=Names(*DECODER), gguf=STARCODER2_GGUF
)
