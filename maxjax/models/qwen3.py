"""Qwen 3, with and without experts; also the text models of Qwen3-VL and Qwen3-Omni.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_norm(q_proj(h))), rope(k_norm(k_proj(h))), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        x = x + mlp(h)
    logits = lm_head(norm(x))

    mlp(h) = down_proj(silu(gate_proj(h)) · up_proj(h)), or in a layer with experts
    mlp(h) = Σ share · expert(h)        over the k experts with the largest softmax(gate(h)), which are the shares

``q_norm`` and ``k_norm`` normalise each head.

Source: arXiv:2505.09388.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
X experts, k experts for each token, V tokens in the vocabulary. A decode step has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax

from ..dtype import DType
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.config.read import read_classifier, read_qwen_experts
from .gguf.metadata import Settings
from .gguf.names import CLASSIFIER, HEAD_NORMS, expert_names
from .gguf.table import GGUFTable
from .llama import window_layers
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
    StepwiseExpertsConfig,
    attend,
    bidirectional,
    config_field,
    layers,
    merge_heads,
    replicate_over_mesh,
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
class Qwen3Config(LanguageModelConfig):
    """The settings of a Qwen 3: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        num_key_value_heads: K; ``num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        attention_bias: whether the linear layers of attention have biases.
        is_causal: whether a token attends only to those before it. Models that were fine-tuned to embed
            texts may attend in both directions.
        sliding_window: number of tokens, itself included, that a token attends to in the layers that
            ``layer_types`` calls "sliding_attention".
    """

    model_type = "qwen3"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=128)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(32_768, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    is_causal: bool = True
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with the window of :func:`~maxjax.models.llama.window_layers`."""
        raw = with_defaults(raw, {"num_key_value_heads": 32}).replaced(window_layers(raw))
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the switch of the window if there is one."""
        found = super().to_hf()
        return {**found, "use_sliding_window": True} if SLIDING in self.layer_types else found


@dataclass(frozen=True)
class Qwen3MoEConfig(StepwiseExpertsConfig):
    """The settings of a Qwen 3 with experts.

    Attributes:
        intermediate_size, moe_intermediate_size: inner features of the MLP in a layer without experts, and of
            an expert.
        sliding_window: number of tokens, itself included, that a token attends to; None: all before it.
        num_experts, num_experts_per_tok: X and k; no layer has experts if X is 0.
        norm_topk_prob: whether the shares of the chosen experts are normalised to sum to 1.
        decoder_sparse_step, mlp_only_layers: each layer whose number, from 1, is a multiple of the first has
            experts, unless the second lists its index.
    """

    model_type = "qwen3_moe"

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
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = config_field(None, minimum=1)
    num_experts: int = size(default=128, minimum=0, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(default=8)
    moe_intermediate_size: int = size(default=768)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = config_field(1, minimum=1, maximum=1000)
    mlp_only_layers: tuple[int, ...] = config_field((), maximum=1000)

    is_causal = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, whose window counts only if ``use_sliding_window`` is true."""
        raw = with_defaults(raw, {"num_key_value_heads": 4, "sliding_window": 4096})
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        return super().from_hf(raw.replaced({"sliding_window": window}), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the switch of the window if there is one."""
        found = super().to_hf()
        return {**found, "use_sliding_window": True} if self.sliding_window else found


class Qwen3Attention(Module):
    """Attention with rotary positions and normalised queries and keys; H/K query heads share a key-value head."""

    def __init__(self, config: Qwen3Config | Qwen3MoEConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, window = config.hidden_size, config.attention_bias, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.mask = CAUSAL if window is None else sliding(window)
        if not config.is_causal:
            self.mask = bidirectional(window)
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.q_norm = RMSNorm(D, dtype, config.rms_norm_eps, multiply_before_cast=False)
        self.k_norm = RMSNorm(D, dtype, config.rms_norm_eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(self.q_norm(q), angles), rope(self.k_norm(k), angles)
        y, cache = attend(q, k, v, cache, self.mask)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Qwen3MLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: Qwen3Config | Qwen3MoEConfig, dtype: DType):
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


class Qwen3SparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k experts with the highest scores."""

    def __init__(self, config: Qwen3MoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.top_k = config.num_experts_per_tok
        self.shares = "softmax of chosen" if config.norm_topk_prob else "softmax"
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, self.shares)  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class Qwen3Block(Module):
    """One layer: attention, then the MLP or the mixture of experts, each added to the hidden states."""

    def __init__(self, config: Qwen3Config | Qwen3MoEConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = Qwen3Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        if isinstance(config, Qwen3MoEConfig) and config.is_sparse(layer):
            self.mlp = Qwen3SparseMLP(config, dtype)
        else:
            self.mlp = Qwen3MLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Qwen3Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Qwen3Config | Qwen3MoEConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Qwen3Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Qwen3(LanguageModel):
    """A Qwen 3 language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = Qwen3Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, head_dim=4)
        >>> [name for name in Qwen3(config).raw_state_dict() if "1.self_attn.q_" in name]
        ['model.layers.1.self_attn.q_proj.weight', 'model.layers.1.self_attn.q_norm.weight']
    """

    def __init__(
        self,
        config: Qwen3Config | Qwen3MoEConfig,
        dtype: Any = DType.float32,
        *,
        stacked: bool = True,
    ):
        super().__init__(config, dtype)
        self.model = Qwen3Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


def _read_gguf(given: Settings, tensors: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the class of a reranker."""
    return read_classifier("Qwen3ForSequenceClassification", given, tensors)


_GGUF_FIXED = {"hidden_act": "silu", "use_sliding_window": False}
_QWEN3_GGUF = GGUFTable(
    "qwen3",
    {**HEAD_NORMS, CLASSIFIER: "score"},
    constants=_GGUF_FIXED,
    has_windows=False,
    required={"partial_rotary_factor": 1.0},
    read=_read_gguf,
    biases=(),
    written=("pooling_type",),
)
QWEN3_GGUF = replace(_QWEN3_GGUF, variants=(_QWEN3_GGUF.multimodal("qwen3vl"),))

QWEN3 = Qwen3.family = Family.of(Qwen3, Qwen3Config, names=Names(*DECODER), gguf=QWEN3_GGUF)


class Qwen3MoE(Qwen3):
    """A Qwen 3 language model with experts.

    Example:
        >>> config = Qwen3MoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, mlp_only_layers=(0,))
        >>> [type(layer.mlp).__name__ for layer in Qwen3MoE(config, stacked=False).model.layers]
        ['Qwen3MLP', 'Qwen3SparseMLP']
    """


_QWEN3_MOE_GGUF = GGUFTable(
    "qwen3moe",
    {**HEAD_NORMS, **expert_names()},
    constants={
        **_GGUF_FIXED,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Only llama.cpp's graphs show whether the shares of the chosen experts are normalised.
        "norm_topk_prob": True,
    },
    has_windows=False,
    required={"partial_rotary_factor": 1.0},
    read=read_qwen_experts,
    biases=(),
    written=("expert_feed_forward_length",),
)
QWEN3_MOE_GGUF = replace(_QWEN3_MOE_GGUF, variants=(_QWEN3_MOE_GGUF.multimodal("qwen3vlmoe"),))

QWEN3_MOE = Qwen3MoE.family = Family.of(
    Qwen3MoE,
    Qwen3MoEConfig,
    "Qwen3MoeForCausalLM",
    "Qwen3MoeModel",
    names=Names(FusedExperts(), *DECODER),
    gguf=QWEN3_MOE_GGUF,
)
