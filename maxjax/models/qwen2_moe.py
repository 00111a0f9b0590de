"""Qwen 2 and 1.5 with experts: beside those that a token chooses, each token goes through a shared expert.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        chosen, shares = the k experts with the largest softmax(gate(h)), and these values
        x = x + Σ share · expert(h) + σ(shared_expert_gate(h)) · shared_expert(h)
    logits = lm_head(norm(x))

Each expert is an MLP, ``down_proj(silu(gate_proj(h)) · up_proj(h))``; some layers may have one MLP in their place.

Source: arXiv:2407.10671.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
X experts, k experts for each token, V tokens in the vocabulary. A decode step has no axis T.
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
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.config.read import read_qwen_experts
from .gguf.layouts import Matrix
from .gguf.names import Rule, expert_names
from .gguf.table import GGUFTable
from .names import DECODER, Names
from .parts import (
    CAUSAL,
    FULL,
    SLIDING,
    Angles,
    LanguageModel,
    LayerCache,
    Rope,
    StepwiseExpertsConfig,
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
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class Qwen2MoEConfig(StepwiseExpertsConfig):
    """The settings of a Qwen 2 with experts: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: inner features of the MLP in a layer without experts.
        moe_intermediate_size, shared_expert_intermediate_size: inner features of an expert, and of the shared one.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        qkv_bias: whether the projections of queries, keys and values have biases.
        sliding_window: number of tokens, itself included, that a token attends to in the layers that
            ``layer_types`` calls "sliding_attention".
        num_experts, num_experts_per_tok: X and k; no layer has experts if X is 0.
        norm_topk_prob: whether the shares of the chosen experts are normalised to sum to 1.
        decoder_sparse_step, mlp_only_layers: each layer whose number, from 1, is a multiple of the first has
            experts, unless the second lists its index.
    """

    model_type = "qwen2_moe"

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
    qkv_bias: bool = True
    tie_word_embeddings: bool = False
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    num_experts: int = size(default=60, minimum=0, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(default=4)
    moe_intermediate_size: int = size(default=1408)
    shared_expert_intermediate_size: int = size(default=5632)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = config_field(1, minimum=1, maximum=1000)
    mlp_only_layers: tuple[int, ...] = config_field((), maximum=1000)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, whose window counts only if ``use_sliding_window`` is true.

        Every second layer before ``max_window_layers`` has it, unless ``layer_types`` lists the layers.
        """
        defaults = {"num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28}
        raw = with_defaults(raw, defaults)
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        first, kinds = raw.get("max_window_layers"), layer_kinds(raw)
        if kinds is None and type(first) is int:
            slides = [
                window is not None and i % 2 == 0 and i < first for i in range(layer_count(raw))
            ]
            kinds = [SLIDING if one else FULL for one in slides]
        window = window if kinds is None or SLIDING in kinds else None
        return super().from_hf(
            raw.replaced({"layer_types": kinds, "sliding_window": window}), **values
        )

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the switch of the window if there is one."""
        found = super().to_hf()
        return {**found, "use_sliding_window": True} if SLIDING in self.layer_types else found


class Qwen2MoEAttention(Module):
    """Attention with rotary positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: Qwen2MoEConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, window = config.hidden_size, config.qkv_bias, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.mask = CAUSAL if window is None else sliding(window)
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
        y, cache = attend(q, k, v, cache, self.mask)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Qwen2MoEMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202), with F inner features: of a layer, or the shared expert."""

    def __init__(self, config: Qwen2MoEConfig, F: int, dtype: DType):
        super().__init__()
        E = config.hidden_size
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


class Qwen2MoESparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k best experts, and the gated shared expert."""

    def __init__(self, config: Qwen2MoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.top_k = config.num_experts_per_tok
        self.shares = "softmax of chosen" if config.norm_topk_prob else "softmax"
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        self.shared_expert = Qwen2MoEMLP(config, config.shared_expert_intermediate_size, dtype)
        self.shared_expert_gate = Linear(E, 1, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, self.shares)  # [B, T, k]
        y = self.experts(x, chosen, shares)  # [B, T, E]
        share = jax.nn.sigmoid(self.shared_expert_gate(x))  # [B, T, 1]
        return y + (share * self.shared_expert(x)).astype(x.dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class Qwen2MoEBlock(Module):
    """One layer: attention, then the MLP or the mixture of experts, each added to the hidden states."""

    def __init__(self, config: Qwen2MoEConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = Qwen2MoEAttention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        if config.is_sparse(layer):
            self.mlp: Any = Qwen2MoESparseMLP(config, dtype)
        else:
            self.mlp = Qwen2MoEMLP(config, config.intermediate_size, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Qwen2MoEModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Qwen2MoEConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Qwen2MoEBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Qwen2MoE(LanguageModel):
    """A Qwen 2 language model with experts.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=2, shared_expert_intermediate_size=8)
        >>> model = Qwen2MoE(Qwen2MoEConfig(100, 8, 16, **sizes))
        >>> [name for name in model.raw_state_dict() if "0.mlp.shared_expert_" in name]
        ['model.layers.0.mlp.shared_expert_gate.weight']
    """

    def __init__(self, config: Qwen2MoEConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Qwen2MoEModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


def _write_gguf(config: Qwen2MoEConfig) -> dict[str, Any]:
    """Return the width of the shared expert."""
    return {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size}


QWEN2_MOE_GGUF = GGUFTable(
    "qwen2moe",
    {
        **expert_names(shared="shared_expert"),
        ".ffn_gate_inp_shexp": Rule("mlp.shared_expert_gate", Matrix()),
    },
    constants={
        "hidden_act": "silu",
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Only llama.cpp's graphs show whether the shares of the chosen experts are normalised.
        "norm_topk_prob": False,
    },
    has_windows=False,
    required={"partial_rotary_factor": 1.0},
    read=read_qwen_experts,
    write=_write_gguf,
    written=("expert_feed_forward_length", "expert_shared_feed_forward_length"),
)

QWEN2_MOE = Qwen2MoE.family = Family.of(
    Qwen2MoE,
    Qwen2MoEConfig,
    "Qwen2MoeForCausalLM",
    "Qwen2MoeModel",
    names=Names(FusedExperts(), *DECODER),
    gguf=QWEN2_MOE_GGUF,
)
