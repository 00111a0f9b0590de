"""Command-A with experts: a Command-A in which the MLPs of most layers are mixtures of experts.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = q_proj(h), k_proj(h), v_proj(h);  q, k = rope(q), rope(k) in layers with a window
        x = x + o_proj(softmax(q kᵀ / √D) v) + mlp(h)
    logits = logit_scale · lm_head(norm(x))

    mlp(h) = down_proj(silu(gate_proj(h)) · up_proj(h)) in the first layers; in the others, over the k experts with
    the highest gate(h), the shares are the softmax or the sigmoid of these scores, and
    mlp(h) = Σ share · expert(h), or the mean or the sum of that and shared_experts(h)

The norms are LayerNorms without bias, or RMSNorms; RoPE rotates neighbouring features. Three of four layers have
a sliding window. The layers without experts may all attend to every token, and have RoPE nevertheless.

Source: transformers' ``modeling_cohere2_moe``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
X experts, k experts for each token. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError, shown
from ..graph.device import DeviceRef
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import LayerNorm, RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .names import DECODER, Names
from .parts import (
    CAUSAL,
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
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
    positive_integer,
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
class Cohere2MoEConfig(LanguageModelConfig):
    """The settings of a Command-A with experts: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: F, the inner features of an expert.
        prefix_dense_intermediate_size: inner features of the MLP in a layer without experts; F by default.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        rms_norm_eps: epsilon of RMSNorms; None: the norms are LayerNorms, with ``layer_norm_eps``.
        rope_parameters: the rotary position embedding.
        logit_scale: factor of the logits.
        sliding_window: number of tokens, itself included, that a token attends to in the layers that
            ``layer_types`` calls "sliding_attention".
        mlp_layer_types: "dense" or "sparse" for each layer, which has experts if it is sparse.
        prefix_dense_sliding_window_pattern: of the first layers without experts, one in so many has no window;
            if it is 1, all layers without experts have RoPE.
        num_experts, num_experts_per_tok: X and k.
        num_shared_experts: number of experts that every token goes through; together they are one MLP.
        shared_expert_combination_strategy: "average" or "sum" of the result of these and that of the others.
        expert_selection_fn: what turns the scores of the chosen experts into shares, "softmax" or "sigmoid".
        norm_topk_prob: whether sigmoids are divided by their sum.
    """

    model_type = "cohere2_moe"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=128)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(8192, minimum=1)
    layer_norm_eps: float = 1e-5
    rms_norm_eps: float | None = None
    rope_parameters: Rope = Rope(theta=10_000.0, interleaved=True)
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    mlp_layer_types: tuple[str, ...] = config_field((), choices=(DENSE, SPARSE))
    prefix_dense_sliding_window_pattern: int = config_field(1, minimum=1, maximum=1000)
    prefix_dense_intermediate_size: int | None = size(default=None)
    num_experts: int = size(default=8, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(default=2)
    num_shared_experts: int = size(default=0, minimum=0)
    shared_expert_combination_strategy: str = config_field("average", choices=("average", "sum"))
    expert_selection_fn: str = config_field("softmax", choices=("softmax", "sigmoid"))
    norm_topk_prob: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, which may say how many of the first layers have no experts.

        Unless ``layer_types`` lists the layers, one in ``sliding_window_pattern`` of those with experts has no
        window, and one in ``prefix_dense_sliding_window_pattern`` of the first.

        Raises:
            UnsupportedModelError: there is ``rope_scaling``, which transformers ignores.
        """
        if raw.get("rope_scaling"):
            raise UnsupportedModelError(
                "'rope_scaling' is not supported for cohere2_moe (supported: 'rope_parameters')"
            )
        defaults = {"sliding_window": 4096, "sliding_window_pattern": 4, "first_k_dense_replace": 0}
        raw = with_defaults(raw, defaults)
        count = layer_count(raw)
        dense = raw.get("first_k_dense_replace")
        if type(dense) is not int or not 0 <= dense <= max(count, 1):
            raise ValueError(f"'first_k_dense_replace' is {shown(dense)}, not a number of layers")
        period = positive_integer(raw, "sliding_window_pattern")
        of_dense = cls.read_field(raw, "prefix_dense_sliding_window_pattern")
        periods = [(i, of_dense) for i in range(dense)]
        periods += [(i, period) for i in range(count - dense)]
        kinds = layer_kinds(raw, [SLIDING if (i + 1) % n else FULL for i, n in periods])
        window = raw.get("sliding_window") if SLIDING in kinds else None
        raw = raw.replaced({"layer_types": kinds, "sliding_window": window})
        if raw.get("mlp_layer_types") is None:
            values["mlp_layer_types"] = tuple([DENSE] * dense + [SPARSE] * (count - dense))
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with those of RoPE under the key that transformers reads."""
        found = super().to_hf()
        if scaling := found.pop("rope_scaling", None):
            found["rope_parameters"] = {**scaling, "rope_theta": found.pop("rope_theta")}
        return found

    def _fill_in(self) -> None:
        if not self.mlp_layer_types:
            self._set("mlp_layer_types", (SPARSE,) * self.num_hidden_layers)
        super()._fill_in()

    def uses_rope(self, layer: int) -> bool:
        """Return whether a layer has RoPE."""
        forced = not self.is_sparse(layer) and self.prefix_dense_sliding_window_pattern == 1
        return self.window(layer) is not None or forced


def _norm(config: Cohere2MoEConfig, dtype: DType) -> Module:
    """Return the norm of a layer, or the last norm."""
    if config.rms_norm_eps is None:
        eps = config.layer_norm_eps
        return LayerNorm(config.hidden_size, [DeviceRef.CPU()], dtype, eps, use_bias=False)
    return RMSNorm(config.hidden_size, dtype, config.rms_norm_eps, multiply_before_cast=False)


class Cohere2MoEAttention(Module):
    """Attention with rotary positions of neighbouring features in some layers; H/K query heads share a KV head."""

    def __init__(self, config: Cohere2MoEConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, window = config.hidden_size, config.attention_bias, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.mask = CAUSAL if window is None else sliding(window)
        self.uses_rope = config.uses_rope(layer)
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
        y, cache = attend(q, k, v, cache, self.mask)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Cohere2MoEMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202), with F inner features: of a layer, or of the shared experts."""

    def __init__(self, config: Cohere2MoEConfig, F: int, dtype: DType):
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


class Cohere2MoESparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k best experts, and the shared experts."""

    def __init__(self, config: Cohere2MoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_experts
        self.top_k, self.shared = config.num_experts_per_tok, config.num_shared_experts
        self.is_mean = config.shared_expert_combination_strategy == "average"
        is_softmax = config.expert_selection_fn == "softmax"
        self.shares = "softmax of chosen" if is_softmax else "sigmoid"
        self.normalised = config.norm_topk_prob and not is_softmax
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        if self.shared:
            self.shared_experts = Cohere2MoEMLP(config, F * self.shared, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, self.shares, normalised=self.normalised)
        y = self.experts(x, chosen, shares)  # [B, T, E]
        if self.shared:
            y = y + self.shared_experts(x)
            y = y / 2 if self.is_mean else y
        return y

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class Cohere2MoEBlock(Module):
    """One layer: attention in parallel to the MLP or to the mixture of experts, after one norm."""

    def __init__(self, config: Cohere2MoEConfig, layer: int, dtype: DType):
        super().__init__()
        self.input_layernorm = _norm(config, dtype)
        self.self_attn = Cohere2MoEAttention(config, layer, dtype)
        if config.is_sparse(layer):
            self.mlp: Any = Cohere2MoESparseMLP(config, dtype)
        else:
            F = config.prefix_dense_intermediate_size or config.intermediate_size
            self.mlp = Cohere2MoEMLP(config, F, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.input_layernorm(x)
        y, cache = self.self_attn(h, cache, angles)
        return x + y + self.mlp(h), cache


class Cohere2MoEModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Cohere2MoEConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Cohere2MoEBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = _norm(config, dtype)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Cohere2MoE(LanguageModel):
    """A Command-A language model with experts.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=2, mlp_layer_types=("dense", "sparse"))
        >>> model = Cohere2MoE(Cohere2MoEConfig(100, 8, 16, **sizes))
        >>> [name for name in model.raw_state_dict() if ".mlp.gate" in name]
        ['model.layers.0.mlp.gate_proj.weight', 'model.layers.1.mlp.gate.weight']
    """

    def __init__(
        self, config: Cohere2MoEConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = Cohere2MoEModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` of hidden states ``[..., E]``."""
        return super().logits(x) * self.config.logit_scale


COHERE2_MOE = Cohere2MoE.family = Family.of(
    Cohere2MoE,
    Cohere2MoEConfig,
    "Cohere2MoeForCausalLM",
    "Cohere2MoeModel",
    names=Names(FusedExperts(), *DECODER),
)
