"""gpt-oss: experts with biases and a clamped gate, attention sinks, and a window in every second layer.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D, sinks) v)          for each head, over the tokens before or in the window
        h = post_attention_layernorm(x)
        chosen, shares = the k experts with the highest router(h), and the softmax over these k scores
        x = x + Σ share · expert(h)                          over the chosen experts
    logits = lm_head(norm(x))

    expert(h) = down_proj((up + 1) · gate · σ(α gate)), gate = min(gate_proj(h), limit), up = clip(up_proj(h), ± limit)

A head's sink is a score that takes part in the softmax and has no value. Files hold all experts of a layer in one
tensor, in MXFP4, and they stay quantised in memory.

Source: arXiv:2508.10925; transformers' ``modeling_gpt_oss``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, X experts with F inner
features, k experts for each token, V tokens in the vocabulary. A decode step has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.split import Segment, Split
from ..graph.weight.weight import Weight
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.names import Rule, expert_names
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
    layer_count,
    layer_kinds,
    layers,
    merge_heads,
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    sliding,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class GptOssConfig(LanguageModelConfig):
    """The settings of a gpt-oss: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: F, the inner features of an expert.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        attention_bias: whether the linear layers of attention have biases.
        sliding_window: number of tokens, itself included, that a token attends to in the layers that
            ``layer_types`` calls "sliding_attention".
        swiglu_alpha, swiglu_limit: α and limit.
        num_local_experts, num_experts_per_tok: X and k.
    """

    model_type = "gpt_oss"
    unused = ("hidden_act",)

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    max_position_embeddings: int = config_field(131_072, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=150_000.0)
    attention_bias: bool = True
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    num_local_experts: int = size(default=128, aliases=("num_experts",))
    num_experts_per_tok: int = size(default=4)
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file: by default every second layer has the window, and RoPE is YaRN's."""
        defaults = {"num_key_value_heads": 8, "sliding_window": 128, "head_dim": 64}
        raw = with_defaults(raw, defaults)
        every_second = [SLIDING if i % 2 == 0 else FULL for i in range(layer_count(raw))]
        changed: dict[str, Any] = {"layer_types": layer_kinds(raw, every_second)}
        if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
            changed["rope_parameters"] = {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 4096,
            }  # fmt: skip
        return super().from_hf(raw.replaced(changed), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with those of RoPE and of the window even if there are none."""
        return {"rope_scaling": {"rope_type": "default"}, "sliding_window": None, **super().to_hf()}


@dataclass(frozen=True)
class ClampedSwiGLU:
    """``(up + 1) · gate · σ(alpha · gate)``, where gate and up are clamped to ``limit``."""

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Gate and up, of one shape → the same shape."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class GptOssAttention(Module):
    """Attention with rotary positions and a sink for each query head; H/K query heads share a key-value head."""

    def __init__(self, config: GptOssConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, window = config.hidden_size, config.attention_bias, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.mask = CAUSAL if window is None else sliding(window)
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.sinks = Weight("sinks", dtype, (H,), DeviceRef.CPU())

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask, sinks=jnp.asarray(self.sinks))  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads, and the sinks between query heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        rules = split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)
        return {**rules, "sinks": Split(0, (Segment.head_aware(self.heads, 1),))}


class GptOssSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k experts with the highest scores."""

    def __init__(self, config: GptOssConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.top_k = config.num_experts_per_tok
        act = ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)
        self.router = Linear(E, X, dtype, has_bias=True)
        self.experts = Experts(E, F, X, dtype, act=act, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.router(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, "softmax of chosen")  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("router")


class GptOssBlock(Module):
    """One layer: attention, then the mixture of experts, each added to the hidden states."""

    def __init__(self, config: GptOssConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = GptOssAttention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = GptOssSparseMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class GptOssModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: GptOssConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            GptOssBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class GptOss(LanguageModel):
    """A gpt-oss language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = GptOssConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, sliding_window=4)
        >>> [name for name in GptOss(config).raw_state_dict() if "layers.1.self_attn.s" in name]
        ['model.layers.1.self_attn.sinks']
    """

    def __init__(self, config: GptOssConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = GptOssModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


def _of_gguf(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The RoPE as in gpt-oss's own files: YaRN with ``truncate`` false, for which GGUF has no key."""
    rope = config["rope_scaling"]
    if rope is None:
        return {"rope_scaling": {"rope_type": "default"}}
    return {"rope_scaling": {**rope, "truncate": False}}


GPT_OSS_GGUF = GGUFTable(
    "gpt-oss",
    {
        ".ffn_norm": None, ".post_attention_norm": "post_attention_layernorm",
        ".attn_sinks": Rule("self_attn.sinks", only="weight"), **expert_names(router="router"),
    },
    keys={
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    constants={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    read=_of_gguf,
    biases=(
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
        "ffn_down_exps",
    ),
    period=2, truncates=False,
)  # fmt: skip

GPT_OSS = GptOss.family = Family.of(
    GptOss,
    GptOssConfig,
    names=Names(
        FusedExperts(
            gate_up=("mlp.experts.gate_up_proj",),
            down=("mlp.experts.down_proj",),
            transposed=True,
            interleaved=True,
            written=True,
        ),
        *DECODER,
    ),
    gguf=GPT_OSS_GGUF,
)
