"""GLM-4.7-Flash: the latent attention of a DeepSeek V3, and the experts of a GLM-4.5.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        qₙ, qᵣ = q_b_proj(norm(q_a_proj(h)))                 for each head: N features without RoPE, R with RoPE
        c, kᵣ = kv_a_proj_with_mqa(h); c = norm(c)           for all heads together; the cache holds c and rope(kᵣ)
        kₙ, v = kv_b_proj(c)                                 for each head
        x = x + o_proj(softmax((qₙ kₙᵀ + rope(qᵣ) rope(kᵣ)ᵀ) · m² / √(N + R)) v)
        h = post_attention_layernorm(x)
        x = x + mlp(h)
    logits = lm_head(norm(x))

    mlp(h) = down_proj(silu(gate_proj(h)) · up_proj(h)), or in a layer with experts
    mlp(h) = Σ share · expert(h) + shared_experts(h)

The k experts are those with the largest sigmoid(gate(h)) plus a bias that balances them; their shares are these
sigmoids without the bias, divided by their sum, times a factor. ``kv_b_proj`` is absorbed into the query and into the
result of attention, as ``maxjax/models/parts/latent.py`` explains. m is 1 without YaRN. Layers of multi-token
prediction are left out.

Source: arXiv:2508.06471; transformers' ``modeling_glm4_moe_lite``.

Shapes: B sequences, T tokens, H heads, hidden size E; a head's query has N + R features and its value V, C features
are the latent vector c; X experts with F inner features, k experts for each token. A decode step has no axis T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..kernels.explicit import concatenate
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import LatentVectors
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, check_experts, route
from ..nn.norm import RMSNorm
from .deepseek import DEEPSEEK_V3
from .parts import (
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    absorb_keys,
    attend,
    config_field,
    constant,
    expand_values,
    layer_count,
    layers,
    merge_heads,
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.rotary import read_rope, yarn_score_factor

DENSE, SPARSE = "dense", "sparse"
# The epsilon of the norms of compressed vectors; the configuration's is for the other norms.
_EPSILON = 1e-6


@dataclass(frozen=True)
class GLM4MoELiteConfig(LanguageModelConfig):
    """The settings of a GLM-4.7-Flash: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size, moe_intermediate_size: inner features of the MLP in a layer without experts, and F.
        num_key_value_heads: H, whatever a file says.
        kv_lora_rank: C.
        q_lora_rank: size of the compressed vector that queries are computed from; None: they are computed from
            the hidden states.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R and V.
        rope_parameters: the rotary position embedding.
        score_factor: m, by whose square YaRN multiplies the scores of attention.
        n_routed_experts, num_experts_per_tok: X and k.
        n_shared_experts: number of experts that every token goes through; together they are one MLP.
        norm_topk_prob: whether the shares of the chosen experts are divided by their sum.
        routed_scaling_factor: factor of the shares.
        n_group, topk_group: number of groups of experts, and of those that a token chooses from: those whose
            two best experts are the best.
        mlp_layer_types: "dense" or "sparse" for each layer, which has experts if it is sparse; by default all
            layers but the first.
        scoring_func: what turns the router's results into scores.
    """

    model_type = "glm4_moe_lite"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    max_position_embeddings: int = config_field(202_752, minimum=1)
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    kv_lora_rank: int = size(default=512)
    q_lora_rank: int | None = size(default=None)
    qk_nope_head_dim: int = size(default=192)
    qk_rope_head_dim: int = size(default=64, minimum=2)
    v_head_dim: int = size(default=256)
    rope_parameters: Rope = Rope(interleaved=True)
    score_factor: float = constant(1.0)
    n_routed_experts: int = size(default=64, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(default=4)
    moe_intermediate_size: int = size(default=1536)
    n_shared_experts: int = size(default=1, minimum=0)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.8
    n_group: int = size(default=1)
    topk_group: int = size(default=1)
    mlp_layer_types: tuple[str, ...] = config_field((), choices=(DENSE, SPARSE))
    scoring_func: str = constant("sigmoid")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file.

        Null for ``q_lora_rank`` means that queries are not compressed, and ``rope_interleave`` false that RoPE's
        pairs are two halves. Files without ``mlp_layer_types`` may have ``first_k_dense_replace``.
        """
        raw = with_defaults(raw, {"q_lora_rank": 768, "first_k_dense_replace": 1})
        dense = raw.get("first_k_dense_replace")
        if raw.get("mlp_layer_types") is None and dense is not None:
            if type(dense) is not int or dense < 0:
                raise ValueError(
                    f"'first_k_dense_replace' is {str(dense)[:60]}, not a number of layers"
                )
            kinds = [DENSE if i < dense else SPARSE for i in range(layer_count(raw))]
            values["mlp_layer_types"] = tuple(kinds)
        interleaved = raw.get("rope_interleave") is not False
        context = cls.read_field(raw, "max_position_embeddings")
        values["rope_parameters"] = read_rope(raw, context, interleaved=interleaved)
        values["score_factor"] = yarn_score_factor(raw)
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with YaRN's ``mscale_all_dim`` and the order of the features that RoPE rotates."""
        found = {**super().to_hf(), "q_lora_rank": self.q_lora_rank}
        if self.score_factor != 1:
            factor = self.rope_parameters.scaling.factor
            all_dim = round((self.score_factor - 1) / (0.1 * math.log(factor)), 6)
            found["rope_scaling"] = {**found["rope_scaling"], "mscale_all_dim": all_dim}
        return {**found, "rope_interleave": self.rope_parameters.interleaved}

    def _fill_in(self) -> None:
        self._set("num_key_value_heads", self.num_attention_heads)
        if not self.mlp_layer_types:
            kinds = (DENSE, *(SPARSE,) * (self.num_hidden_layers - 1))
            self._set("mlp_layer_types", kinds)
        super()._fill_in()

    def _check(self) -> None:
        if len(self.mlp_layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"'mlp_layer_types' has {len(self.mlp_layer_types)} entries for {self.num_hidden_layers} layers"
            )
        super()._check()
        try:
            check_experts(
                self.n_routed_experts, self.num_experts_per_tok, self.n_group, self.topk_group
            )
        except ValueError as error:
            raise ValueError(
                "'n_routed_experts', 'num_experts_per_tok', 'n_group' and 'topk_group' do not fit together: "
                f"{error}"
            ) from None

    @property
    def head_dim(self) -> int:
        """R, the width of the part of a head that RoPE rotates."""
        return self.qk_rope_head_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return self.mlp_layer_types[layer] == SPARSE

    def states(self, layer: int) -> Mapping[str, LatentVectors]:
        """One vector ``[R + C]`` for each token, which all heads share."""
        width = self.qk_rope_head_dim + self.kv_lora_rank
        return {"full": LatentVectors(1, width, None, self.num_attention_heads)}


class GLM4MoELiteAttention(Module):
    """Multi-head latent attention: keys and values of all heads are computed from one short vector for each token."""

    def __init__(self, config: GLM4MoELiteConfig, dtype: DType):
        super().__init__()
        E, H, C, Q = (
            config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
        )  # fmt: skip
        N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        bias = config.attention_bias
        self.heads, self.nope_dim, self.rope_dim, self.value_dim = H, N, R, V
        self.scale = (N + R) ** -0.5 * config.score_factor**2
        self.compresses_queries = Q is not None
        if Q is None:
            self.q_proj = Linear(E, H * (N + R), dtype)
        else:
            self.q_a_proj = Linear(E, Q, dtype, has_bias=bias)
            self.q_a_layernorm = RMSNorm(Q, dtype, _EPSILON)
            self.q_b_proj = Linear(Q, H * (N + R), dtype)
        self.kv_a_proj_with_mqa = Linear(E, C + R, dtype, has_bias=bias)
        self.kv_a_layernorm = RMSNorm(C, dtype, _EPSILON)
        self.kv_b_proj = Linear(C, H * (N + V), dtype)
        self.o_proj = Linear(H * V, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        N, R, V = self.nope_dim, self.rope_dim, self.value_dim
        if self.compresses_queries:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x).astype(x.dtype)))
        else:
            q = self.q_proj(x)
        q = split_heads(q.astype(x.dtype), N + R)  # [B, T, H, N + R]
        kv = self.kv_a_proj_with_mqa(x).astype(x.dtype)  # [B, T, C + R]
        c = self.kv_a_layernorm(kv[..., :-R])  # [B, T, C]
        k = rope(kv[..., None, -R:], angles)  # [B, T, 1, R]
        q = concatenate([rope(q[..., N:], angles), absorb_keys(q[..., :N], self.kv_b_proj)], -1)
        k = concatenate([k, c[..., None, :]], -1)  # [B, T, 1, R + C]; it is key and value
        y, cache = attend(q, k, k, cache, scale=self.scale)  # [B, T, H, R + C]
        y = expand_values(y[..., R:], self.kv_b_proj, V)  # [B, T, H, V]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits queries, keys, values and the output projection between heads; compressed vectors are replicated."""
        N, R, V, queries = self.nope_dim, self.rope_dim, self.value_dim, "q_proj"
        compressing = ["kv_a_proj_with_mqa"]
        if self.compresses_queries:
            queries = "q_b_proj"
            compressing.append("q_a_proj")
        return {
            **split_heads_over_mesh({queries: self.heads}, {}, N + R),
            **split_heads_over_mesh({"kv_b_proj": self.heads}, {}, N + V),
            **split_heads_over_mesh({}, {"o_proj": self.heads}, V),
            **replicate_over_mesh(*compressing),
        }


class GLM4MoELiteMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: GLM4MoELiteConfig, inner: int, dtype: DType):
        super().__init__()
        self.act = config.hidden_act
        self.gate_proj = Linear(config.hidden_size, inner, dtype)
        self.up_proj = Linear(config.hidden_size, inner, dtype)
        self.down_proj = Linear(inner, config.hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class GLM4MoELiteRouter(Linear):
    """The router, with a bias ``[X]`` that affects which experts are chosen, and not their shares."""

    def __init__(self, config: GLM4MoELiteConfig, dtype: DType):
        super().__init__(config.hidden_size, config.n_routed_experts, dtype)
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", DType.float32, (config.n_routed_experts,), DeviceRef.CPU()
        )


class GLM4MoELiteSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k chosen experts, and an MLP for every token."""

    def __init__(self, config: GLM4MoELiteConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.top_k, self.groups, self.top_groups = (
            config.num_experts_per_tok, config.n_group, config.topk_group
        )  # fmt: skip
        self.normalised, self.factor = config.norm_topk_prob, config.routed_scaling_factor
        self.gate: Any = GLM4MoELiteRouter(config, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        shared = F * config.n_shared_experts
        self.shared_experts = GLM4MoELiteMLP(config, shared, dtype) if shared else None

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x.astype(jnp.float32))  # [B, T, X]
        chosen, shares = route(
            scores, self.top_k, "sigmoid", normalised=self.normalised, factor=self.factor,
            groups=self.groups, top_groups=self.top_groups, bias=self.gate.e_score_correction_bias,
        )  # [B, T, k]  # fmt: skip
        y = self.experts(x, chosen, shares)  # [B, T, E]
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class GLM4MoELiteBlock(Module):
    """One layer: attention, then the MLP or the mixture of experts, each added to the hidden states."""

    def __init__(self, config: GLM4MoELiteConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = GLM4MoELiteAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp: Any = (
            GLM4MoELiteSparseMLP(config, dtype)
            if config.is_sparse(layer)
            else GLM4MoELiteMLP(config, config.intermediate_size, dtype)
        )

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class GLM4MoELiteModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: GLM4MoELiteConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            GLM4MoELiteBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.qk_rope_head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class GLM4MoELite(LanguageModel):
    """A GLM-4.7-Flash language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = GLM4MoELiteConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=6,
        ...     q_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, n_routed_experts=8)
        >>> [type(layer.mlp).__name__ for layer in GLM4MoELite(config, stacked=False).model.layers]
        ['GLM4MoELiteMLP', 'GLM4MoELiteSparseMLP']
    """

    def __init__(
        self, config: GLM4MoELiteConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = GLM4MoELiteModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# llama.cpp reads such a model as a DeepSeek V3, so DeepSeek's GGUF table lists this model type too.
GLM4_MOE_LITE = GLM4MoELite.family = DEEPSEEK_V3.like(
    GLM4MoELite,
    GLM4MoELiteConfig,
    "Glm4MoeLiteForCausalLM",
    "Glm4MoeLiteModel",
    gguf=None,
)
