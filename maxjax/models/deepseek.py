"""DeepSeek V2 to V3.2 and R1, Kimi K2, Moonlight and GLM-4.7-Flash: latent attention, and experts in most layers.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        qₙ, qᵣ = q_b_proj(norm(q_a_proj(h)))                 for each head: N features without RoPE, R with RoPE
        c, kᵣ = kv_a_proj_with_mqa(h); c = norm(c)           for all heads together; the cache holds c and rope(kᵣ)
        kₙ, v = kv_b_proj(c)                                 for each head
        x = x + o_proj(softmax((qₙ kₙᵀ + rope(qᵣ) rope(kᵣ)ᵀ) · scale) v)
        h = post_attention_layernorm(x)
        x = x + mlp(h)
    logits = lm_head(norm(x))

    mlp(h) = down_proj(silu(gate_proj(h)) · up_proj(h)) in the first layers; in the others
    mlp(h) = Σ share · expert(h) + shared_experts(h)         over k experts, chosen from the best groups of experts

    scale = m² / √(N + R), with YaRN's m = 0.1 · mscale_all_dim · log(factor) + 1, or 1 without it
    V2: shares = softmax(gate(h)) · routed_scaling_factor;   if groups are limited, a group's score is that of
        its best expert
    V3: shares = sigmoid(gate(h)), divided by their sum, · routed_scaling_factor;   experts are chosen by the
        sigmoid plus a bias that balances them, and a group's score is the sum of its two best; GLM-4.7-Flash alike

In V3.2 a token attends only to the index_topk tokens before it for which Σ weightⱼ · relu(qⱼ k) is highest, over the
small heads j of an indexer, which has one key for each token in the cache.

Attention never computes kₙ and v: ``kv_b_proj`` is absorbed into the query and into the result of attention, as
``maxjax/models/parts/latent.py`` explains. Files may have a layer of multi-token prediction, as
``maxjax/models/parts/mtp.py`` explains, which is loaded if it is asked for.

Sources: arXiv:2405.04434, arXiv:2412.19437, arXiv:2512.02556, arXiv:2508.06471; transformers'
``modeling_deepseek_v2``, ``_v3``, ``_v32`` and ``modeling_glm4_moe_lite``.

Shapes: B sequences, T tokens, H heads, hidden size E; a head's query has N + R features and its value V, C features
are the latent vector c; X experts with F inner features, k experts for each token. A decode step has no axis T.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import UnsupportedModelError, shown
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..kernels.explicit import concatenate
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import LatentVectors
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, check_experts, route
from ..nn.norm import LayerNorm, RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.latent import join_keys_and_values, mla_widths, split_keys_and_values
from .gguf.metadata import MAX_EXPERTS, Settings, unsupported
from .gguf.names import NEXT, ROUTED_DEFAULTS, ROUTED_KEYS, Rule, expert_names
from .gguf.table import GGUFTable
from .names import DECODER, PREDICTION, Names
from .parts import (
    DENSE,
    SPARSE,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    absorb_keys,
    attend,
    config_field,
    constant,
    dense_then_sparse,
    expand_values,
    layer_kinds,
    layers,
    merge_heads,
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    top_keys,
    with_defaults,
)
from .parts.rotary import read_rope, yarn_score_factor

INDEXED = "indexed_attention"
_LOG = logging.getLogger("maxjax")
# The epsilon of the norms of compressed vectors; the configuration's is for the other norms.
_EPSILON = 1e-6


@dataclass(frozen=True)
class DeepseekV2Config(LanguageModelConfig):
    """The settings of a DeepSeek V2: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size, moe_intermediate_size: inner features of the MLP in a layer without experts, and F.
        num_key_value_heads: always H; a file's value is ignored.
        kv_lora_rank: C.
        q_lora_rank: size of the compressed vector that queries are computed from; None: they are computed from
            the hidden states.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R and V.
        rope_parameters: the rotary position embedding.
        score_factor: m, by whose square YaRN multiplies the scores of attention.
        n_routed_experts, num_experts_per_tok: X and k.
        n_shared_experts: number of experts that every token goes through; together they are one MLP.
        first_k_dense_replace: number of first layers that have an MLP in place of experts.
        norm_topk_prob: whether the shares of the chosen experts are divided by their sum.
        routed_scaling_factor: factor of the shares.
        topk_method: "greedy", or "group_limited_greedy" for experts from the best groups.
        n_group, topk_group: number of groups of experts, and of those that a token chooses from.
        scoring_func: what turns the router's results into scores.
        best_of_group: number of a group's best experts whose scores are the score of the group.
        index_topk: number of keys that a token attends to, which the indexer chooses; None: all, and no indexer.
        index_n_heads, index_head_dim: number and width of the indexer's heads.
    """

    model_type = "deepseek_v2"
    unused = ("rope_interleave",)  # ignored: RoPE always rotates neighbouring features
    # The only supported values of keys that files may have.
    supported: ClassVar[Mapping[str, Any]] = {
        "scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False,
    }  # fmt: skip

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    max_position_embeddings: int = config_field(2048, minimum=1)
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    kv_lora_rank: int = size(default=512)
    q_lora_rank: int | None = size(default=None)
    qk_nope_head_dim: int = size(default=128)
    qk_rope_head_dim: int = size(default=64, minimum=2)
    v_head_dim: int = size(default=128)
    rope_parameters: Rope = Rope(interleaved=True)
    score_factor: float = constant(1.0)
    n_routed_experts: int = size(default=64, aliases=("num_local_experts", "num_experts"))
    num_experts_per_tok: int = size(default=6)
    moe_intermediate_size: int = size(default=1407)
    n_shared_experts: int = size(default=2, minimum=0)
    first_k_dense_replace: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    topk_method: str = config_field("greedy", choices=("greedy", "group_limited_greedy"))
    n_group: int = size(default=1)
    topk_group: int = size(default=1)
    scoring_func: str = constant("softmax")
    best_of_group: int = constant(1)
    index_topk: int | None = constant(None)
    index_n_heads: int = constant(0)
    index_head_dim: int = constant(0)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file; null for ``q_lora_rank`` means that queries are not compressed.

        Raises:
            UnsupportedModelError: experts are chosen in another way, or only in every n-th layer.
        """
        raw = with_defaults(raw, {"q_lora_rank": 1536})
        for key, value in cls.supported.items():
            if raw.get(key) not in (None, value):
                raise UnsupportedModelError(
                    f"'{key}' {shown(raw[key])} is not supported for {cls.model_type} "
                    f"(supported: {value!r})"
                )
        values.setdefault("score_factor", yarn_score_factor(raw))
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with YaRN's ``mscale_all_dim``."""
        found = {**super().to_hf(), "q_lora_rank": self.q_lora_rank}
        if self.score_factor != 1:
            factor = self.rope_parameters.scaling.factor
            all_dim = round((self.score_factor - 1) / (0.1 * math.log(factor)), 6)
            found["rope_scaling"] = {**found["rope_scaling"], "mscale_all_dim": all_dim}
        return found

    def _fill_in(self) -> None:
        self._set("num_key_value_heads", self.num_attention_heads)
        if self.topk_method == "greedy":
            self._set("n_group", 1)
            self._set("topk_group", 1)
        super()._fill_in()

    def _check(self) -> None:
        super()._check()
        if self.topk_method not in ("greedy", "group_limited_greedy", "noaux_tc"):
            raise ValueError(
                f"'topk_method' must be greedy or group_limited_greedy, not {shown(self.topk_method)}"
            )
        groups = self.n_group, self.topk_group, self.best_of_group
        try:
            check_experts(self.n_routed_experts, self.num_experts_per_tok, *groups)
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
        return layer >= self.first_k_dense_replace

    def states(self, layer: int) -> Mapping[str, LatentVectors]:
        """One vector ``[R + C]`` for each token, which all heads share."""
        width = self.qk_rope_head_dim + self.kv_lora_rank
        kept = {"full": LatentVectors(1, width, None, self.num_attention_heads)}
        if self.index_topk is not None:
            kept["index"] = LatentVectors(1, self.index_head_dim, None, 1)
        return kept


@dataclass(frozen=True)
class DeepseekV3Config(DeepseekV2Config):
    """The settings of a DeepSeek V3."""

    model_type = "deepseek_v3"
    unused = ()
    supported: ClassVar[Mapping[str, Any]] = {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1,
    }  # fmt: skip

    max_position_embeddings: int = config_field(4096, minimum=1)
    n_routed_experts: int = size(default=256, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(default=8)
    moe_intermediate_size: int = size(default=2048)
    n_shared_experts: int = size(default=1, minimum=0)
    first_k_dense_replace: int = 3
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    topk_method: str = constant("noaux_tc")
    n_group: int = size(default=8)
    topk_group: int = size(default=4)
    scoring_func: str = constant("sigmoid")
    best_of_group: int = constant(2)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which ``rope_interleave`` false pairs feature i with i + R/2 in RoPE.

        Raises:
            UnsupportedModelError: experts are chosen in another way, or only in every n-th layer.
        """
        context = cls.read_field(raw, "max_position_embeddings")
        interleaved = raw.get("rope_interleave") is not False
        values.setdefault("rope_parameters", read_rope(raw, context, interleaved=interleaved))
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the order of the features that RoPE rotates."""
        return {**super().to_hf(), "rope_interleave": self.rope_parameters.interleaved}


@dataclass(frozen=True)
class GLM4MoELiteConfig(DeepseekV3Config):
    """The settings of a GLM-4.7-Flash: those of a DeepSeek V3, but its files list the layers with experts.

    Attributes:
        mlp_layer_types: "dense" or "sparse" for each layer, which has experts if it is sparse; by default all
            layers but the first.
        first_k_dense_replace: number of first layers without experts, as ``mlp_layer_types`` says.
    """

    model_type = "glm4_moe_lite"
    supported: ClassVar[Mapping[str, Any]] = {}  # transformers' model does not read these keys

    max_position_embeddings: int = config_field(202_752, minimum=1)
    rms_norm_eps: float = 1e-5
    qk_nope_head_dim: int = size(default=192)
    v_head_dim: int = size(default=256)
    n_routed_experts: int = size(default=64, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(default=4)
    moe_intermediate_size: int = size(default=1536)
    first_k_dense_replace: int = constant(0)
    routed_scaling_factor: float = 1.8
    n_group: int = size(default=1)
    topk_group: int = size(default=1)
    mlp_layer_types: tuple[str, ...] = config_field((), choices=(DENSE, SPARSE))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file; one without ``mlp_layer_types`` may have ``first_k_dense_replace``."""
        raw = with_defaults(raw, {"q_lora_rank": 768, "first_k_dense_replace": 1})
        if kinds := dense_then_sparse(raw):
            values["mlp_layer_types"] = kinds
        return super().from_hf(raw, **values)

    def _fill_in(self) -> None:
        if not self.mlp_layer_types:
            kinds = (DENSE, *(SPARSE,) * (self.num_hidden_layers - 1))
            self._set("mlp_layer_types", kinds)
        dense = itertools.takewhile(DENSE.__eq__, self.mlp_layer_types)
        self._set("first_k_dense_replace", len(list(dense)))
        super()._fill_in()

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return self.mlp_layer_types[layer] == SPARSE


@dataclass(frozen=True)
class DeepseekV32Config(GLM4MoELiteConfig):
    """The settings of a DeepSeek V3.2: those of a DeepSeek V3, and of its indexer."""

    model_type = "deepseek_v32"
    unused = ("rope_interleave",)  # ignored: RoPE always rotates neighbouring features
    supported: ClassVar[Mapping[str, Any]] = DeepseekV3Config.supported

    max_position_embeddings: int = config_field(163_840, minimum=1)
    rms_norm_eps: float = 1e-6
    q_lora_rank: int | None = size(default=1536)
    qk_nope_head_dim: int = size(default=128)
    v_head_dim: int = size(default=128)
    n_routed_experts: int = size(default=256, aliases=("num_local_experts", "num_experts"))
    num_experts_per_tok: int = size(default=8)
    moe_intermediate_size: int = size(default=2048)
    routed_scaling_factor: float = 2.5
    n_group: int = size(default=8)
    topk_group: int = size(default=4)
    index_topk: int | None = config_field(2048, minimum=1)
    index_n_heads: int = size(default=64)
    index_head_dim: int = size(default=128)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file; the first three layers have no experts, unless it says otherwise.

        Raises:
            UnsupportedModelError: a layer has another kind of attention.
        """
        raw = with_defaults(raw, {"q_lora_rank": 1536, "first_k_dense_replace": 3})
        if raw.get("q_lora_rank") is None:
            raise ValueError(
                "'q_lora_rank' must be a number, not null: the indexer reads such vectors"
            )
        if other := set(layer_kinds(raw, [])) - {INDEXED}:
            raise UnsupportedModelError(
                f"'layer_types' with {shown(min(other))} is not supported for {cls.model_type} "
                f"(supported: {INDEXED!r})"
            )
        return super().from_hf(raw.replaced({"rope_interleave": None}), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, of which ``rope_interleave`` is none."""
        found = super().to_hf()
        del found["rope_interleave"]
        return found

    def _check(self) -> None:
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"'index_head_dim' {self.index_head_dim} must be at least 'qk_rope_head_dim' {self.qk_rope_head_dim}"
            )
        super()._check()


class DeepseekIndexer(Module):
    """The lightning indexer of V3.2: chooses the keys that a token attends to, by small heads (arXiv:2512.02556).

    It scores a key by ``Σ weights_proj(x) · relu(q · k)``. The model's authors round queries and keys to 8 bits.
    """

    def __init__(self, config: DeepseekV2Config, dtype: DType):
        super().__init__()
        H, D, Q = config.index_n_heads, config.index_head_dim, config.q_lora_rank
        assert Q is not None and config.index_topk is not None
        self.heads, self.head_dim, self.count = H, D, config.index_topk
        self.wq_b = Linear(Q, H * D, dtype)
        self.wk = Linear(config.hidden_size, D, dtype)
        self.k_norm = LayerNorm(D, [DeviceRef.CPU()], dtype, _EPSILON)
        self.weights_proj = Linear(config.hidden_size, H, dtype)

    def __call__(
        self, x: jax.Array, compressed: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array | None, LayerCache]:
        angles = dataclasses.replace(angles, interleaved=False)  # unlike those of attention
        q = split_heads(self.wq_b(compressed).astype(x.dtype), self.head_dim)  # [B, T, H, D]
        k = self.k_norm(self.wk(x).astype(x.dtype))[..., None, :]  # [B, T, 1, D]
        q, k = rope(q, angles), rope(k, angles)
        k, cache = cache.remember("index", k[..., 0, :])  # [B, S, D]
        weights = self.weights_proj(x.astype(jnp.float32)) * (self.heads * self.head_dim) ** -0.5
        return top_keys(q, k, weights, self.count, cache), cache  # [B, T, S]

    def sharding_rules(self) -> dict[str, Any]:
        """Holds the linear layers completely on every device."""
        return replicate_over_mesh("wq_b", "wk", "weights_proj")


class DeepseekAttention(Module):
    """Multi-head latent attention: keys and values of all heads are computed from one short vector for each token."""

    def __init__(self, config: DeepseekV2Config, dtype: DType):
        super().__init__()
        E, H, C, Q = (
            config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
        )  # fmt: skip
        N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        bias = config.attention_bias
        self.heads, self.nope_dim, self.rope_dim, self.value_dim = H, N, R, V
        self.scale = (N + R) ** -0.5 * config.score_factor**2
        self.compresses_queries = Q is not None
        self.indexer = None if config.index_topk is None else DeepseekIndexer(config, dtype)
        if Q is None:
            self.q_proj = Linear(E, H * (N + R), dtype)
        else:
            self.q_a_proj = Linear(E, Q, dtype, has_bias=bias)
            self.q_a_layernorm = RMSNorm(Q, dtype, _EPSILON, multiply_before_cast=False)
            self.q_b_proj = Linear(Q, H * (N + R), dtype)
        self.kv_a_proj_with_mqa = Linear(E, C + R, dtype, has_bias=bias)
        self.kv_a_layernorm = RMSNorm(C, dtype, _EPSILON, multiply_before_cast=False)
        self.kv_b_proj = Linear(C, H * (N + V), dtype)
        self.o_proj = Linear(H * V, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        N, R, V = self.nope_dim, self.rope_dim, self.value_dim
        chosen = None
        if self.compresses_queries:
            compressed = self.q_a_layernorm(self.q_a_proj(x).astype(x.dtype))  # [B, T, Q]
            q = self.q_b_proj(compressed)
            if self.indexer is not None:
                chosen, cache = self.indexer(x, compressed, cache, angles)
        else:
            q = self.q_proj(x)
        q = split_heads(q.astype(x.dtype), N + R)  # [B, T, H, N + R]
        kv = self.kv_a_proj_with_mqa(x).astype(x.dtype)  # [B, T, C + R]
        c = self.kv_a_layernorm(kv[..., :-R])  # [B, T, C]
        k = rope(kv[..., None, -R:], angles)  # [B, T, 1, R]
        q = concatenate([rope(q[..., N:], angles), absorb_keys(q[..., :N], self.kv_b_proj)], -1)
        k = concatenate([k, c[..., None, :]], -1)  # [B, T, 1, R + C]; it is key and value
        y, cache = attend(q, k, k, cache, scale=self.scale, chosen=chosen)  # [B, T, H, R + C]
        # The first R features are sums of RoPE's keys, which have no values.
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


class DeepseekMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: DeepseekV2Config, inner: int, dtype: DType):
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


class DeepseekRouter(Linear):
    """The router of V3, with a bias ``[X]`` that affects which experts are chosen, and not their shares."""

    def __init__(self, config: DeepseekV2Config, dtype: DType):
        super().__init__(config.hidden_size, config.n_routed_experts, dtype)
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", DType.float32, (config.n_routed_experts,), DeviceRef.CPU()
        )


class DeepseekSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k chosen experts, and an MLP for every token."""

    def __init__(self, config: DeepseekV2Config, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.top_k, self.scoring = config.num_experts_per_tok, config.scoring_func
        self.normalised, self.factor = config.norm_topk_prob, config.routed_scaling_factor
        self.groups, self.top_groups = config.n_group, config.topk_group
        self.best_of_group = config.best_of_group
        self.is_balanced = config.scoring_func == "sigmoid"
        self.gate: Any = DeepseekRouter(config, dtype) if self.is_balanced else Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        shared = F * config.n_shared_experts
        self.shared_experts = DeepseekMLP(config, shared, dtype) if shared else None

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x.astype(jnp.float32))  # [B, T, X]
        chosen, shares = route(
            scores, self.top_k, self.scoring, normalised=self.normalised, factor=self.factor,
            groups=self.groups, top_groups=self.top_groups, best_of_group=self.best_of_group,
            bias=self.gate.e_score_correction_bias if self.is_balanced else None,
        )  # [B, T, k]  # fmt: skip
        y = self.experts(x, chosen, shares)  # [B, T, E]
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class DeepseekBlock(Module):
    """One layer: attention, then the MLP or the mixture of experts, each added to the hidden states."""

    def __init__(self, config: DeepseekV2Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = DeepseekAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp: Any = (
            DeepseekSparseMLP(config, dtype)
            if config.is_sparse(layer)
            else DeepseekMLP(config, config.intermediate_size, dtype)
        )

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class DeepseekMTPHead(Module):
    """``shared_head`` in the files: the norm before the head, whose matrix is the model's."""

    def __init__(self, config: DeepseekV2Config, dtype: DType):
        super().__init__()
        self.norm = RMSNorm(
            config.hidden_size, dtype, config.rms_norm_eps, multiply_before_cast=False
        )


class DeepseekMTP(DeepseekBlock):
    """The layer of multi-token prediction (``parts/mtp.py``): a layer like the last, after a projection."""

    def __init__(self, config: DeepseekV2Config, dtype: DType):
        super().__init__(config, config.num_hidden_layers - 1, dtype)
        E, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.enorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.hnorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.eh_proj = Linear(2 * E, E, dtype)
        self.shared_head = DeepseekMTPHead(config, dtype)

    def __call__(  # type: ignore[override]
        self, h: jax.Array, embedded: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        x = concatenate([self.enorm(embedded), self.hnorm(h)], -1)  # [B, T, 2 E]
        angles = self.config.rope_parameters.angles(cache, self.config.qk_rope_head_dim)
        x, cache = super().__call__(self.eh_proj(x).astype(h.dtype), cache, angles)
        return self.shared_head.norm(x), cache

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the projection, whose results are hidden states."""
        return replicate_over_mesh("eh_proj")


class DeepseekModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: DeepseekV2Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            DeepseekBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.qk_rope_head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class DeepseekV2(LanguageModel):
    """A DeepSeek V2 language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.
    """

    def __init__(
        self, config: DeepseekV2Config, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = DeepseekModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


class DeepseekV3(DeepseekV2):
    """A DeepSeek V3 language model; also R1, Kimi K2 and Moonlight.

    Example:
        >>> config = DeepseekV3Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2, kv_lora_rank=6,
        ...     q_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, n_routed_experts=8,
        ...     num_experts_per_tok=2, moe_intermediate_size=4, n_group=1, topk_group=1)
        >>> cache = DeepseekV3(config).cache(batch=1, capacity=16)
        >>> cache.keys.shape, cache.values is cache.keys
        ((4, 1, 1, 16, 8), True)
    """

    mtp_class = DeepseekMTP


class DeepseekV32(DeepseekV3):
    """A DeepSeek V3.2 language model.

    Example:
        >>> config = DeepseekV32Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=6,
        ...     q_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, n_routed_experts=8,
        ...     num_experts_per_tok=2, n_group=1, topk_group=1, index_n_heads=3, index_head_dim=7)
        >>> cache = DeepseekV32(config).cache(batch=1, capacity=16)
        >>> cache.keys.shape, cache.more["index"].keys.shape
        ((2, 1, 1, 16, 8), (2, 1, 1, 16, 7))
    """


class GLM4MoELite(DeepseekV3):
    """A GLM-4.7-Flash language model.

    Example:
        >>> config = GLM4MoELiteConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, kv_lora_rank=6,
        ...     q_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, n_routed_experts=8)
        >>> [type(layer.mlp).__name__ for layer in GLM4MoELite(config, stacked=False).model.layers]
        ['DeepseekMLP', 'DeepseekSparseMLP']
    """


# --- GGUF files ---------------------------------------------------------------------------------

# llama.cpp's numbers of the functions that give scores to experts.
_SOFTMAX, _SIGMOID = 1, 2


def _of_gguf(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The family (V2 or V3), the widths of a head, and values that files leave out."""
    rotated, plain, value = mla_widths(given)
    gating = given.count("expert_gating_func", 0, minimum=0) or _SOFTMAX
    if gating not in (_SOFTMAX, _SIGMOID):
        raise given.unsupported(f"'{given.prefix}expert_gating_func' {gating}")
    # Layers of multi-token prediction, as of GLM-4.7-Flash.
    more = given.count("nextn_predict_layers", 0, minimum=0)
    found = {
        "num_hidden_layers": config["num_hidden_layers"] - more,
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": plain, "v_head_dim": value,
        "q_lora_rank": given.count("attention.q_lora_rank", None),
        "routed_scaling_factor": config["routed_scaling_factor"] or 1.0,
    }  # fmt: skip
    groups = given.count("expert_group_count", 1, maximum=MAX_EXPERTS)
    chosen = given.count("expert_group_used_count", groups, maximum=groups)
    if gating == _SIGMOID or groups > 1:
        found |= {"n_group": groups, "topk_group": chosen}
    if gating == _SOFTMAX:
        method = "group_limited_greedy" if groups > 1 else "greedy"
        kinds = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
        found |= {**kinds, "topk_method": method}
    return found


def _to_gguf(config: Any) -> dict[str, Any]:
    """The widths of a head, and how experts are chosen."""
    if not config.rope_parameters.interleaved:
        raise unsupported("'rope_interleave' False in a GGUF file")
    if not config.n_shared_experts:
        raise unsupported("'n_shared_experts' 0 in a GGUF file")
    softmax = config.scoring_func == "softmax"
    groups = {}
    if config.n_group > 1:
        groups = {
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
        if softmax:
            _LOG.warning(
                "llama.cpp chooses groups of experts by the two best scores, this model by the best: "
                "its results differ"
            )
    size, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    sparse = [config.is_sparse(layer) for layer in range(config.num_hidden_layers)]
    dense = sparse.index(True) if any(sparse) else config.num_hidden_layers
    if not all(sparse[dense:]):
        raise unsupported("layers without experts after one with experts in a GGUF file")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": size + rotated,
        "attention.value_length": size,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "leading_dense_block_count": dense,
        "expert_gating_func": _SOFTMAX if softmax else _SIGMOID,
        **groups,
    }


_EXTRA = ("q_a", "q_b", "kv_b", "k_b", "v_b")
DEEPSEEK_GGUF = GGUFTable(
    "deepseek2",
    {
        ".attn_k": None,
        ".attn_v": None,
        **{f".attn_{part}": f"self_attn.{part}_proj" for part in _EXTRA},
        ".attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        ".attn_q_a_norm": "self_attn.q_a_layernorm",
        ".attn_kv_a_norm": "self_attn.kv_a_layernorm",
        ".exp_probs_b": Rule("mlp.gate.e_score_correction_bias", only="bias"),
        **expert_names(shared="shared_experts"),
        **NEXT,
    },
    keys={
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        **ROUTED_KEYS,
    },
    constants={"hidden_act": "silu", "rope_interleave": True, **ROUTED_DEFAULTS},
    read=_of_gguf,
    write=_to_gguf,
    written=(
        "attention.key_length_mla", "expert_gating_func", "expert_group_count",
        "expert_group_used_count",
    ),
    biases=("exp_probs_b",),
    width="rope.dimension_count",
    log_multiplier=0.1,
    join=join_keys_and_values,
    split=split_keys_and_values,
)  # fmt: skip

DEEPSEEK_V2 = DeepseekV2.family = Family.of(
    DeepseekV2, DeepseekV2Config, names=Names(PREDICTION, FusedExperts(), *DECODER)
)
# Kimi K2.5 and later are multimodal, and their text model is a DeepSeek V3.
DEEPSEEK_V3 = DeepseekV3.family = Family.of(
    DeepseekV3,
    DeepseekV3Config,
    names=Names(PREDICTION, FusedExperts(), *DECODER),
    gguf=DEEPSEEK_GGUF,
)
DEEPSEEK_V32 = DeepseekV32.family = DEEPSEEK_V3.like(DeepseekV32, DeepseekV32Config, gguf=None)
# Kimi K2's files name DeepSeek's architecture, but a model type of their own.
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2", architectures=(), gguf=None)
# In GGUF files it is a DeepSeek V3: see ``registry.py``.
GLM4_MOE_LITE = GLM4MoELite.family = DEEPSEEK_V3.like(
    GLM4MoELite,
    GLM4MoELiteConfig,
    "Glm4MoeLiteForCausalLM",
    "Glm4MoeLiteModel",
)
