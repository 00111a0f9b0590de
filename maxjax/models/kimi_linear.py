"""Kimi Linear: a delta rule with a decay of each feature in three of four layers, latent attention in the others.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        x = x + self_attn(h)                                 delta attention, or latent attention without positions
        h = post_attention_layernorm(x)
        x = x + mlp(h)  or  x + block_sparse_moe(h)          the MLP in the first layer
    logits = lm_head(norm(x))

    delta attention:   q, k, v = silu(conv1d(q_proj(h), k_proj(h), v_proj(h)))   causal convolutions of each channel
                       q, k = q / |q| / √D, k / |k|           for each head
                       g = -exp(A_log) softplus(f_b_proj(f_a_proj(h)) + dt_bias)
                       S ← exp(g) S                           a decay of each feature of the keys
                       S ← S + k ⊗ sigmoid(b_proj(h)) (v - Sᵀ k)   for each head, token after token
                       o_proj(o_norm(Sᵀ q) · sigmoid(g_b_proj(g_a_proj(h))))
    latent attention:  q = q_proj(h)                          N + R features of each head
                       c, r = kv_a_proj_with_mqa(h); c = kv_a_layernorm(c)       for all heads together
                       k, v = kv_b_proj(c)                    for each head, whose key is k beside r
                       o_proj(softmax(q (k, r)ᵀ / √(N + R)) v)     over the tokens before
    mlp(h):            down_proj(silu(gate_proj(h)) · up_proj(h))
    block_sparse_moe:  Σ share · expert(h) + shared_experts(h);  shares = sigmoid(gate(h)), divided by their sum,
                       · factor, of the k experts with the highest sigmoid(gate(h)) + a bias that balances them

Latent attention never computes k and v: ``maxjax/models/parts/latent.py`` explains how it attends to c itself.

Sources: arXiv:2510.26692; DeepSeek-V3, arXiv:2412.19437; transformers' ``modeling_kimi_linear``.

Shapes: B sequences, T tokens, hidden size E. Delta attention has H heads of width D. In latent attention a head's
query has N + R features and its value V; C features are the latent vector c. X experts with F inner features, k
experts for each token. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.split import REPLICATED
from ..graph.weight.weight import Weight
from ..kernels.explicit import concatenate
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import LatentVectors, State, States
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, check_experts, route
from ..nn.norm import RMSNorm
from ..nn.ssm.convolution import CausalConv
from ..nn.ssm.delta import unit
from .family import Family
from .fused_experts import FusedExperts
from .gguf.config.read import Config, Shapes
from .gguf.latent import join_keys_and_values, mla_widths, split_keys_and_values
from .gguf.metadata import MAX_EXPERTS, Settings, unsupported
from .gguf.names import NO_SUFFIX, Rule, expert_names
from .gguf.state_layouts import AxesOf1, Both, Logarithm
from .gguf.table import GGUFTable
from .names import DECODER, Names, Rename
from .parts import (
    DENSE,
    FULL,
    SPARSE,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    absorb_keys,
    attend,
    config_field,
    dense_then_sparse,
    expand_values,
    layer_count,
    layer_kinds,
    layers,
    merge_heads,
    refuse,
    replicate_over_mesh,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)
from .parts.recurrent import automatic_axes, convolve, gated_delta, per_feature
from .split_layers import JoinedLayers
from .unread import ReadTracker

LINEAR = "linear_attention"
# The epsilon of the norms of compressed vectors; the configuration's is for the other norms.
_EPSILON = 1e-6


def _delta_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of delta attention, which files may have in an object, with layers counted from 1."""
    given = raw.get("linear_attn_config")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError("'linear_attn_config' is not an object")
    names = {
        "head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }  # fmt: skip
    found = {names[key]: given[key] for key in names if given.get(key) is not None}
    full = given.get("full_attn_layers")
    if raw.get("layer_types") is None and full is not None:
        if not isinstance(full, list):
            raise ValueError("'linear_attn_config' has 'full_attn_layers' that are not a list")
        count = layer_count(raw)
        found["layer_types"] = [FULL if i + 1 in full else LINEAR for i in range(count)]
    return found


@dataclass(frozen=True)
class KimiLinearConfig(LanguageModelConfig):
    """The settings of a Kimi Linear.

    Attributes:
        layer_types: kind of each layer: "linear_attention" (delta attention) or "full_attention"; by default the
            layers 4, 8, … have full attention.
        linear_num_heads, linear_head_dim, linear_conv_kernel_dim: H, D and number of taps of the convolutions.
        kv_lora_rank: C.
        q_lora_rank: size of the compressed vector that queries are computed from; None: they are computed from
            the hidden states.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: N, R and V.
        num_key_value_heads: number of heads of latent attention, whatever a file says.
        intermediate_size, moe_intermediate_size: inner features of the MLP in a layer without experts, and F.
        mlp_layer_types: "dense" or "sparse" for each layer, which has experts if it is sparse; by default all
            layers but the first.
        num_experts, num_experts_per_tok: X and k.
        n_shared_experts: number of experts that every token goes through; together they are one MLP.
        norm_topk_prob: whether the shares of the chosen experts are divided by their sum.
        routed_scaling_factor: factor of the shares.
        n_group, topk_group: number of groups of experts, and of those that a token chooses from.
    """

    model_type = "kimi_linear"
    unused = ("head_dim", "rope_theta", "rope_scaling")  # there are no positions

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    max_position_embeddings: int = config_field(
        1_048_576, minimum=1, key="model_max_length", aliases=("max_position_embeddings",)
    )
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    layer_types: tuple[str, ...] = config_field((), choices=(LINEAR, FULL))
    linear_num_heads: int = size(32)
    linear_head_dim: int = size(128)
    linear_conv_kernel_dim: int = size(4, minimum=2)
    kv_lora_rank: int = size(512)
    q_lora_rank: int | None = size(None)
    qk_nope_head_dim: int = size(128)
    qk_rope_head_dim: int = size(64)
    v_head_dim: int = size(128)
    mlp_layer_types: tuple[str, ...] = config_field((), choices=(DENSE, SPARSE))
    num_experts: int = size(256, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(
        8, key="num_experts_per_token", aliases=("num_experts_per_tok",)
    )
    moe_intermediate_size: int = size(1024)
    n_shared_experts: int = size(1, key="num_shared_experts", aliases=("n_shared_experts",))
    norm_topk_prob: bool = config_field(True, key="moe_renormalize", aliases=("norm_topk_prob",))
    routed_scaling_factor: float = 2.446
    n_group: int = size(1, key="num_expert_group", aliases=("n_group",))
    topk_group: int = size(1)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which those of delta attention may be an object.

        Raises:
            UnsupportedModelError: there are positions, or experts are chosen in another way or only in some layers.
        """
        raw = ReadTracker.of(raw)
        refuse(
            raw,
            {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1},
            cls.model_type,
        )
        found = _delta_settings(raw)
        if (kinds := layer_kinds(raw)) is not None:
            found["layer_types"] = kinds
        if kinds := dense_then_sparse(raw):
            found["mlp_layer_types"] = list(kinds)
        return super().from_hf(raw.replaced(found), **values)

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings to compare with the tensors, with those of delta attention."""
        try:
            return {**raw, **_delta_settings(raw)}
        except ValueError:  # from_dict reports it
            return raw

    def _fill_in(self) -> None:
        count = self.num_hidden_layers
        self._set("num_key_value_heads", self.num_attention_heads)
        if not self.layer_types:
            kinds = (FULL if i and i % 4 == 0 else LINEAR for i in range(count))
            self._set("layer_types", tuple(kinds))
        if not self.mlp_layer_types:
            self._set("mlp_layer_types", (DENSE, *(SPARSE,) * (count - 1)))
        super()._fill_in()

    def _check(self) -> None:
        super()._check()
        try:
            check_experts(self.num_experts, self.num_experts_per_tok, self.n_group, self.topk_group)
        except ValueError as error:
            names = ("num_experts", "num_experts_per_tok", "n_group", "topk_group")
            keys = ", ".join(f"'{self.key_of(name)}'" for name in names)
            raise ValueError(f"{keys} do not fit together: {error}") from None

    @property
    def head_dim(self) -> int:
        """R, the width of the part of a head whose keys all heads share."""
        return self.qk_rope_head_dim

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        return tuple(zip(self.layer_types, self.mlp_layer_types, strict=True))

    def states(self, layer: int) -> Mapping[str, Any]:
        """The last inputs of the convolutions and the state of each head, or one vector ``[R + C]`` for each token."""
        if self.layer_types[layer] == FULL:
            width = self.qk_rope_head_dim + self.kv_lora_rank
            return {"full": LatentVectors(1, width, None, self.num_attention_heads)}
        H, D = self.linear_num_heads, self.linear_head_dim
        conv = State("conv", (self.linear_conv_kernel_dim - 1, 3 * H * D), axis=1)
        return {"linear": States((conv, State("delta", (H, D, D), axis=0)))}


class KimiDeltaAttention(Module):
    """The delta rule whose decay is that of each feature of the keys (arXiv:2510.26692), with a gate behind it."""

    def __init__(self, config: KimiLinearConfig, dtype: DType):
        super().__init__()
        E, H, D = config.hidden_size, config.linear_num_heads, config.linear_head_dim
        self.heads, self.head_dim, self.act = H, D, config.hidden_act
        taps = config.linear_conv_kernel_dim
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, H * D, dtype)
        self.v_proj = Linear(E, H * D, dtype)
        self.q_conv1d = CausalConv(H * D, taps, dtype)
        self.k_conv1d = CausalConv(H * D, taps, dtype)
        self.v_conv1d = CausalConv(H * D, taps, dtype)
        self.f_a_proj = Linear(E, D, dtype)
        self.f_b_proj = Linear(D, H * D, dtype)
        self.A_log = Weight("A_log", dtype, (1, 1, H, 1), DeviceRef.CPU())
        self.dt_bias = Weight("dt_bias", DType.float32, (H * D,), DeviceRef.CPU())
        self.b_proj = Linear(E, H, dtype)
        self.g_a_proj = Linear(E, D, dtype)
        self.g_b_proj = Linear(D, H * D, dtype)
        self.o_norm = RMSNorm(D, dtype, config.rms_norm_eps)
        self.o_proj = Linear(H * D, E, dtype)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        D = self.head_dim
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D]
        q, k, v, f, z = (y.astype(x.dtype) for y in (q, k, v, self.f_a_proj(x), self.g_a_proj(x)))
        y = jnp.concatenate([q, k, v], axis=-1)  # [B, T, 3 H D]
        y, cache = convolve(self.convolutions, y, cache, "linear")
        y = split_heads(activation(self.act)(y), D)  # [B, T, 3 H, D]
        q, k, v = jnp.split(y, 3, axis=-2)  # [B, T, H, D]
        beta = jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))  # [B, T, H]
        g = self.f_b_proj(f).astype(jnp.float32) + per_feature(self.dt_bias, f)  # [B, T, H D]
        rate = jnp.exp(per_feature(self.A_log, beta))[..., None]  # [1, 1, H, 1]
        g = -rate * jax.nn.softplus(split_heads(g, D))  # [B, T, H, D]
        y, cache = gated_delta(unit(q) * D**-0.5, unit(k), v, g, beta, cache, "linear")
        z = split_heads(self.g_b_proj(z), D)  # [B, T, H, D]
        y = self.o_norm(y) * jax.nn.sigmoid(z.astype(jnp.float32))
        return self.o_proj(merge_heads(y).astype(x.dtype)).astype(x.dtype), cache  # [B, T, E]

    def convolutions(self, x: jax.Array, state: Any, counts: Any) -> tuple[jax.Array, jax.Array]:
        """Compute the three convolutions of queries, keys and values, which are side by side in ``x``."""
        convs = [self.q_conv1d, self.k_conv1d, self.v_conv1d]
        before = [None] * 3 if state is None else jnp.split(state, 3, axis=-1)
        found = [
            conv(part, one, counts)
            for conv, part, one in zip(convs, jnp.split(x, 3, axis=-1), before, strict=True)
        ]
        y, last = (jnp.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
        return y, last

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between heads; those to D features are replicated."""
        H, D = self.heads, self.head_dim
        wide = {f"{part}_proj": H for part in ("q", "k", "v", "f_b", "g_b")}
        return {
            **split_heads_over_mesh(wide, {"o_proj": H}, D),
            **split_heads_over_mesh({"b_proj": H}, {}, 1),
            **replicate_over_mesh("f_a_proj", "g_a_proj"),
            **dict.fromkeys(("A_log", "dt_bias"), REPLICATED),
        }


class KimiLatentAttention(Module):
    """Latent attention without positions: keys and values of all heads come from one short vector for each token."""

    def __init__(self, config: KimiLinearConfig, dtype: DType):
        super().__init__()
        E, H, C, Q = (
            config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
        )  # fmt: skip
        N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        bias = config.attention_bias
        self.heads, self.nope_dim, self.rope_dim, self.value_dim = H, N, R, V
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

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        N, R, V = self.nope_dim, self.rope_dim, self.value_dim
        if self.compresses_queries:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x).astype(x.dtype)))
        else:
            q = self.q_proj(x)
        q = split_heads(q.astype(x.dtype), N + R)  # [B, T, H, N + R]
        kv = self.kv_a_proj_with_mqa(x).astype(x.dtype)  # [B, T, C + R]
        c, r = self.kv_a_layernorm(kv[..., :-R]), kv[..., -R:]  # [B, T, C], [B, T, R]
        q = concatenate([q[..., N:], absorb_keys(q[..., :N], self.kv_b_proj)], -1)
        k = concatenate([r, c], -1)[..., None, :]  # [B, T, 1, R + C]; it is key and value
        y, cache = attend(q, k, k, cache, scale=(N + R) ** -0.5)  # [B, T, H, R + C]
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


class KimiLinearMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: KimiLinearConfig, inner: int, dtype: DType):
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


class KimiLinearRouter(Linear):
    """The router, with a bias ``[X]`` that affects which experts are chosen, and not their shares."""

    def __init__(self, config: KimiLinearConfig, dtype: DType):
        super().__init__(config.hidden_size, config.num_experts, dtype)
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", DType.float32, (config.num_experts,), DeviceRef.CPU()
        )


class KimiLinearSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k chosen experts, and an MLP for every token."""

    def __init__(self, config: KimiLinearConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.top_k, self.groups, self.top_groups = (
            config.num_experts_per_tok, config.n_group, config.topk_group
        )  # fmt: skip
        self.normalised, self.factor = config.norm_topk_prob, config.routed_scaling_factor
        self.gate = KimiLinearRouter(config, dtype)
        self.experts = Experts(E, F, X, dtype, ("w1", "w3", "w2"), config.hidden_act)
        self.shared_experts = KimiLinearMLP(config, F * config.n_shared_experts, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x.astype(jnp.float32))  # [B, T, X]
        bias = jnp.asarray(self.gate.e_score_correction_bias)
        chosen, shares = route(
            scores, self.top_k, "sigmoid", normalised=self.normalised, factor=self.factor,
            groups=self.groups, top_groups=self.top_groups, bias=bias,
        )  # [B, T, k]  # fmt: skip
        return self.experts(x, chosen, shares) + self.shared_experts(x)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class KimiLinearBlock(Module):
    """One layer: delta or latent attention, then the MLP or the experts, each added to the hidden states."""

    def __init__(self, config: KimiLinearConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.is_sparse = config.is_sparse(layer)
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        is_linear = config.layer_types[layer] == LINEAR
        attention = KimiDeltaAttention if is_linear else KimiLatentAttention
        self.self_attn: Any = attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        if self.is_sparse:
            self.block_sparse_moe = KimiLinearSparseMLP(config, dtype)
        else:
            self.mlp = KimiLinearMLP(config, config.intermediate_size, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache)
        x = x + y
        mlp = self.block_sparse_moe if self.is_sparse else self.mlp
        return x + mlp(self.post_attention_layernorm(x)), cache


class KimiLinearModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: KimiLinearConfig, dtype: DType):
        super().__init__()
        self.dtype = dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers: Any = LayerList(
            KimiLinearBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x, cache = run_layers(self.layers, x, cache)
        return self.norm(x), cache


class KimiLinear(LanguageModel):
    """A Kimi Linear language model.

    Example:
        >>> config = KimiLinearConfig(100, 8, 16, num_hidden_layers=5, num_attention_heads=2, kv_lora_rank=6,
        ...     qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5, linear_num_heads=2, linear_head_dim=4,
        ...     num_experts=8, num_experts_per_tok=2, moe_intermediate_size=4)
        >>> cache = KimiLinear(config).cache(batch=1, capacity=16)
        >>> cache.keys.shape, {name: a.shape for name, a in cache.more["linear"].arrays.items()}
        ((1, 1, 1, 16, 8), {'conv': (4, 1, 3, 24), 'delta': (4, 1, 2, 4, 4)})
    """

    def __init__(
        self, config: KimiLinearConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = KimiLinearModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ----------------------------------------------------------------------------------

# llama.cpp's number of the sigmoid, by which experts are chosen.
_SIGMOID = 2


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """Return the widths of heads, the kinds of the layers, and the groups of experts."""
    rotated, plain, value = mla_widths(given)
    heads, count = config["num_attention_heads"], config["num_hidden_layers"]
    groups = given.count("expert_group_count", 1, maximum=MAX_EXPERTS)
    kinds = [LINEAR if f"blk.{i}.ssm_f_a.weight" in tensors else FULL for i in range(count)]
    sparse = [f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(count)]
    found = {
        "num_key_value_heads": heads, "qk_rope_head_dim": rotated, "qk_nope_head_dim": plain,
        "v_head_dim": value, "q_lora_rank": given.count("attention.q_lora_rank", None),
        "layer_types": kinds, "mlp_layer_types": [SPARSE if one else DENSE for one in sparse],
        "linear_num_heads": heads, "linear_head_dim": given.count("kda.head_dim"),
        "linear_conv_kernel_dim": given.count("ssm.conv_kernel"), "num_expert_group": groups,
        "topk_group": given.count("expert_group_used_count", groups, maximum=groups),
    }  # fmt: skip
    if config["intermediate_size"] is None:  # every layer has experts
        found["intermediate_size"] = given.count("expert_feed_forward_length")
    return found


def _write_gguf(config: KimiLinearConfig) -> dict[str, Any]:
    """Return the widths of heads; the numbers of KV heads say which layers have latent attention."""
    if config.linear_num_heads != config.num_attention_heads:
        raise unsupported(
            f"'linear_num_heads' {config.linear_num_heads}, which is not 'num_attention_heads' "
            f"{config.num_attention_heads}, in a GGUF file"
        )
    full = [kind == FULL for kind in config.layer_types]
    if all(full) or not any(full):
        raise unsupported("layers of one kind of attention alone in a GGUF file")
    sparse = [config.is_sparse(layer) for layer in range(config.num_hidden_layers)]
    dense = sparse.index(True) if any(sparse) else config.num_hidden_layers
    if not all(sparse[dense:]):
        raise unsupported("layers without experts after one with experts in a GGUF file")
    groups = {
        "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group
    }  # fmt: skip
    return {
        "attention.head_count_kv": [int(one) for one in full],
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "leading_dense_block_count": dense,
        "expert_gating_func": _SIGMOID,
        **(groups if config.n_group > 1 else {}),
    }


_MOE, _PARTS = "block_sparse_moe", ("gate", "up", "down")
_TAPS = AxesOf1((0, 1, 0), (1, 0, 1, 0))
KIMI_LINEAR_GGUF = GGUFTable(
    "kimi-linear",
    {
        **{f".attn_{part}": f"self_attn.{part}_proj" for part in ("q_a", "q_b", "kv_b", "k_b", "v_b")},
        ".attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        ".attn_q_a_norm": "self_attn.q_a_layernorm",
        ".attn_kv_a_norm": "self_attn.kv_a_layernorm",
        **{f".ssm_conv1d_{part}": Rule(f"self_attn.{part}_conv1d", _TAPS) for part in "qkv"},
        **{f".ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
        ".ssm_beta": "self_attn.b_proj",
        ".ssm_a": Rule(
            "self_attn.A_log",
            Both(AxesOf1((1, 1, 0, 1), (1, 1, 0, 1)), Logarithm()),
            only=NO_SUFFIX,
        ),
        ".ssm_dt": Rule("self_attn.dt_bias", only="bias"),
        ".ssm_norm": "self_attn.o_norm",
        **expert_names(_MOE, maps=("w1", "w3", "w2")),
        **{f".ffn_{part}_shexp": f"{_MOE}.shared_experts.{part}_proj" for part in _PARTS},
        ".exp_probs_b": Rule(f"{_MOE}.gate.e_score_correction_bias", only="bias"),
    },
    keys={
        "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim", "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_token",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "num_shared_experts", "expert_weights_scale": "routed_scaling_factor",
    },
    constants={"hidden_act": "silu", "moe_renormalize": True, "routed_scaling_factor": 1.0},
    read=_read_gguf, write=_write_gguf, has_rope=False, width="rope.dimension_count",
    written=(
        "attention.key_length_mla", "rope.dimension_count", "kda.head_dim", "ssm.conv_kernel",
        "leading_dense_block_count", "expert_gating_func", "expert_group_count",
        "expert_group_used_count",
    ),
    biases=("ssm_dt", "exp_probs_b"), has_head=True, join=join_keys_and_values,
    split=split_keys_and_values,
)  # fmt: skip

_MIXTURE = (
    "gate.weight",
    "gate.e_score_correction_bias",
    *(f"shared_experts.{part}_proj.weight" for part in _PARTS),
)
_FORGET_GATE = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")

KIMI_LINEAR = KimiLinear.family = Family.of(
    KimiLinear,
    KimiLinearConfig,
    names=Names(
        FusedExperts(f"{_MOE}.experts.#.*.weight", ("w1", "w3", "w2")),
        *DECODER,
        # transformers writes the MLPs of layers without experts so, as if they had some.
        Rename({f"{_MOE}.{part}_proj.weight": f"mlp.{part}_proj.weight" for part in _PARTS}),
        # The names of transformers' modules.
        JoinedLayers({"self_attn.conv1d": tuple(f"self_attn.{part}_conv1d" for part in "qkv")}),
        Rename(
            {f".mlp.{name}": f".{_MOE}.{name}" for name in _MIXTURE}
            | {f".forget_gate.{name}": f".{name}" for name in _FORGET_GATE},
            in_modules=True,
        ),
    ),
    gguf=KIMI_LINEAR_GGUF,
)
