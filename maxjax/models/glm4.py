"""GLM-4 (``glm``) and GLM-4-0414 (``glm4``): RoPE rotates half of each head, in pairs of neighbouring features.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)
        gate, up = gate_up_proj(post_attention_layernorm(x))
        x = x + down_proj(silu(gate) · up)
    logits = lm_head(norm(x))

In GLM-4-0414, what attention and MLP add is normalised too: post_self_attn_layernorm and post_mlp_layernorm.

Sources: arXiv:2406.12793; transformers' ``modeling_glm`` and ``modeling_glm4``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from ..dtype import DType
from ..graph.placement.split import Segment
from ..graph.weights import WeightData
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from ..nn.stacked_linear import StackedLinear, split_projections, stacked_rules
from .family import Family
from .gguf.metadata import Settings
from .gguf.pieces import check_rows, rows
from .gguf.table import GATE_UP, GGUFTable
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
class GLMConfig(LanguageModelConfig):
    """The settings of a GLM-4: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        attention_bias: whether the projections of queries, keys and values have biases.
    """

    model_type = "glm"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=128)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(131_072, minimum=1)
    rms_norm_eps: float = 1.5625e-7
    rope_parameters: Rope = Rope(theta=10_000.0, part=0.5, interleaved=True)
    attention_bias: bool = True
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file."""
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 2}), **values)


@dataclass(frozen=True)
class GLM4Config(GLMConfig):
    """The settings of a GLM-4-0414."""

    model_type = "glm4"


class GLMAttention(Module):
    """Attention with rotary positions of half of each head, in which H/K query heads share a key-value head."""

    def __init__(self, config: GLMConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype)

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


class GLMMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202), with one linear layer for gate and up."""

    def __init__(self, config: GLMConfig, dtype: DType):
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


class GLMBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: GLMConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = GLMAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = GLMMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class GLM4Block(Module):
    """One layer of a GLM-4-0414: attention, then the MLP, with norms before and after each."""

    def __init__(self, config: GLMConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = GLMAttention(config, dtype)
        self.post_self_attn_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = GLMMLP(config, dtype)
        self.post_mlp_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + self.post_self_attn_layernorm(y)
        y = self.mlp(self.post_attention_layernorm(x))
        return x + self.post_mlp_layernorm(y), cache


class GLMModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: GLMConfig, dtype: DType, block: type[GLMBlock | GLM4Block]):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(block(config, dtype) for _ in range(config.num_hidden_layers))
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class GLM(LanguageModel):
    """A GLM-4 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = GLMConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, head_dim=4)
        >>> [n for n in GLM(config).raw_state_dict() if "layers.0.mlp" in n]
        ['model.layers.0.mlp.gate_up_proj.weight', 'model.layers.0.mlp.down_proj.weight']
    """

    def __init__(self, config: GLMConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = GLMModel(config, self.dtype, GLMBlock)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


class GLM4(LanguageModel):
    """A GLM-4-0414 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.
    """

    def __init__(self, config: GLM4Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = GLMModel(config, self.dtype, GLM4Block)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------

GLM_GGUF = GGUFTable(
    "chatglm", GATE_UP, constants={"hidden_act": "silu"}, is_partial=True, is_square=True
)


def _join(given: Settings, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Put the rotated rows of queries and keys into the order of neighbouring pairs.

    Text models of GLM-4.1V and GLM-4.6V (those with ``rope.dimension_sections``) have them in two halves, because
    llama.cpp's multimodal RoPE rotates halves (``Glm4Model.normal_to_neox`` of its converter).
    """
    found = dict(tensors)
    if not any(given.items("rope.dimension_sections", int, [])):
        return found
    heads = given.count("attention.head_count")
    width = given.count("attention.key_length", given.count("embedding_length") // heads)
    half = given.count("rope.dimension_count", width, maximum=width) // 2
    counts = {"q_proj": heads, "k_proj": given.count("attention.head_count_kv", heads)}
    for name, data in tensors.items():
        count = counts.get(name.rpartition(".")[0].rpartition(".")[2])
        if count is not None:
            check_rows(name, data, count * width)
            order = np.arange(count * width).reshape(count, width)
            halves = order[:, : 2 * half].reshape(count, 2, half)
            order[:, : 2 * half] = halves.swapaxes(1, 2).reshape(count, -1)
            found[name] = rows(name, [data], order.reshape(-1))
    return found


GLM4_GGUF = GGUFTable(
    "glm4",
    {
        **GATE_UP,
        ".post_attention_norm": "post_self_attn_layernorm",
        ".post_ffw_norm": "post_mlp_layernorm",
    },
    constants={"hidden_act": "silu"},
    is_partial=True,
    join=_join,
)

GLM_FAMILY = GLM.family = Family.of(
    GLM, GLMConfig, "GlmForCausalLM", "GlmModel", names=Names(*DECODER), gguf=GLM_GGUF
)
GLM4_FAMILY = GLM4.family = Family.of(
    GLM4,
    GLM4Config,
    "Glm4ForCausalLM",
    "Glm4Model",
    names=Names(*DECODER),
    gguf=GLM4_GGUF,
)
