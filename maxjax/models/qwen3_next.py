"""Qwen3-Next and Qwen 3.5: a gated DeltaNet in three of every four layers, gated attention in the fourth.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        x = x + linear_attn(h)  or  x + self_attn(h)
        h = post_attention_layernorm(x)
        x = x + mlp(h)
    logits = lm_head(norm(x))

    linear_attn(h):  q, k, v, z, b, a = the projections of h
                     q, k, v = silu(conv1d(q, k, v))         a causal convolution of each channel
                     q, k = q / |q| / √Dk, k / |k|           for each head
                     S ← exp(-exp(A_log) softplus(a + dt_bias)) S
                     S ← S + k ⊗ sigmoid(b) (v - Sᵀ k)       for each head, token after token
                     out_proj(norm(Sᵀ q) · silu(z))
    self_attn(h):    q, gate = q_proj(h)
                     q, k, v = rope(q_norm(q)), rope(k_norm(k_proj(h))), v_proj(h)
                     o_proj(softmax(q kᵀ / √D) v · sigmoid(gate))               over the tokens before
    mlp(h):          down_proj(silu(gate_proj(h)) · up_proj(h)), or in a layer with experts
                     Σ share · expert(h) + sigmoid(shared_expert_gate(h)) · shared_expert(h)

RoPE rotates a part of each head; the norms but the DeltaNet's own multiply by one plus their weight. The chosen
experts are those with the highest gate(h), and the shares their softmax. Qwen 3.5 differs in the linear layers of
the DeltaNet, and has models without experts.

Sources: arXiv:2412.06464 (gated DeltaNet), arXiv:2505.09388 (Qwen 3); transformers' ``modeling_qwen3_next``,
``modeling_qwen3_5`` and ``modeling_qwen3_5_moe``.

Shapes: B sequences, T tokens, hidden size E. Attention has H query heads and K key-value heads of width D; the
DeltaNet has G heads of queries and keys of width Dk, and H heads of values of width Dv, H/G for each key head;
C = 2 G Dk + H Dv channels of the convolution. X experts with F inner features, k experts for each token. A decode
step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..graph.placement.arrays import replicate_last_axis
from ..graph.placement.split import REPLICATED, ROWS
from ..graph.weight.weight import Weight
from ..graph.weights import WeightData
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import State, States
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from ..nn.ssm.convolution import CausalConv
from ..nn.ssm.delta import unit
from ..nn.ssm.gated_norm import GatedNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.layouts import Matrix, Plus
from .gguf.metadata import Settings, unsupported
from .gguf.names import NEXT, NO_SUFFIX, Rule, expert_names
from .gguf.pieces import check_rows, columns, rows
from .gguf.state_layouts import Logarithm, Taps
from .gguf.table import GGUFTable
from .names import DECODER, Drop, Names
from .parts import (
    FULL,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    StepwiseExpertsConfig,
    attend,
    config_field,
    constant,
    full_every,
    layer_count,
    layer_kinds,
    layers,
    merge_heads,
    positive_integer,
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.recurrent import automatic_axes, convolve, delta_net_step, gated_delta, per_feature

LINEAR = "linear_attention"


@dataclass(frozen=True)
class Qwen35Config(LanguageModelConfig):
    """The settings of a Qwen 3.5 without experts.

    Attributes:
        layer_types: kind of each layer: "linear_attention" (a DeltaNet) or "full_attention"; every fourth by default.
        linear_num_key_heads, linear_num_value_heads: G and H of the DeltaNet.
        linear_key_head_dim, linear_value_head_dim: Dk and Dv.
        linear_conv_kernel_dim: number of taps of the convolution.
        fused_projections: whether the DeltaNet has two projections and not four.
    """

    model_type = "qwen3_5_text"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(256)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(32_768, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=10_000.0, part=0.25)
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] = config_field((), choices=(LINEAR, FULL))
    linear_num_key_heads: int = size(16)
    linear_num_value_heads: int = size(32)
    linear_key_head_dim: int = size(128)
    linear_value_head_dim: int = size(128)
    linear_conv_kernel_dim: int = size(4, minimum=2)
    fused_projections: bool = constant(False)

    def _fill_in(self) -> None:
        if not self.layer_types:
            self._set("layer_types", full_every(4, self.num_hidden_layers, LINEAR))
        super()._fill_in()

    def _check(self) -> None:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"'linear_num_value_heads' {self.linear_num_value_heads} is not a multiple of "
                f"'linear_num_key_heads' {self.linear_num_key_heads}"
            )
        super()._check()

    @property
    def channels(self) -> int:
        """C, the channels of the convolution."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        return tuple((kind, self.is_sparse(i)) for i, kind in enumerate(self.layer_types))

    def states(self, layer: int) -> Mapping[str, Any]:
        """The last inputs of the convolution and the state of each head, or the keys and values of attention."""
        if self.layer_types[layer] == FULL:
            return super().states(layer)
        heads, widths = (
            self.linear_num_value_heads, (self.linear_key_head_dim, self.linear_value_head_dim)
        )  # fmt: skip
        conv = State("conv", (self.linear_conv_kernel_dim - 1, self.channels), axis=1)
        return {"linear": States((conv, State("delta", (heads, *widths), axis=0)))}

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, whose layers are those of ``layer_types`` or ``full_attention_interval``."""
        raw = with_defaults(raw, {"num_key_value_heads": 4})
        if raw.get("attn_output_gate") is False:
            raise UnsupportedModelError(
                f"'attn_output_gate' false is not supported for {cls.model_type}"
            )
        raw.get("full_attention_interval")  # read in any case, so that no warning names it
        kinds = layer_kinds(raw)
        if kinds is None:
            every = positive_integer(raw, "full_attention_interval", 4)
            kinds = full_every(every, layer_count(raw), LINEAR)
        return super().from_hf(raw.replaced({"layer_types": kinds}), **values)


@dataclass(frozen=True)
class Qwen3NextConfig(StepwiseExpertsConfig, Qwen35Config):
    """The settings of a Qwen3-Next.

    Attributes:
        intermediate_size: inner features of the MLP in a layer without experts.
        moe_intermediate_size, shared_expert_intermediate_size: inner features of an expert, and of the shared one.
        num_experts, num_experts_per_tok: X and k; no layer has experts if X is 0.
        norm_topk_prob: whether the shares of the chosen experts are normalised to sum to 1.
        decoder_sparse_step, mlp_only_layers: each layer whose number, from 1, is a multiple of the first has
            experts, unless the second lists its index.
    """

    model_type = "qwen3_next"

    num_experts: int = size(512, minimum=0, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(10)
    moe_intermediate_size: int = size(512)
    shared_expert_intermediate_size: int = size(512)
    norm_topk_prob: bool = True
    decoder_sparse_step: int = config_field(1, minimum=1, maximum=1000)
    mlp_only_layers: tuple[int, ...] = config_field((), maximum=1000)
    fused_projections: bool = constant(True)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file."""
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 2}), **values)


@dataclass(frozen=True)
class Qwen35MoEConfig(Qwen3NextConfig):
    """The settings of a Qwen 3.5 with experts in all layers, of which none has an MLP of ``intermediate_size``."""

    model_type = "qwen3_5_moe_text"

    num_experts: int = size(256, minimum=0, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(8)
    norm_topk_prob: bool = constant(True)
    decoder_sparse_step: int = constant(1)
    mlp_only_layers: tuple[int, ...] = constant(())
    fused_projections: bool = constant(False)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, which may leave out the size of the MLPs that no layer has."""
        return super().from_hf(with_defaults(raw, {"intermediate_size": 1}), **values)


class Qwen3NextDeltaNet(Module):
    """The gated DeltaNet (arXiv:2412.06464); each key head's queries, keys, values and gates are rows of one layer."""

    def __init__(self, config: Qwen35Config, dtype: DType):
        super().__init__()
        self.key_heads = config.linear_num_key_heads
        self.value_heads = H = config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.act = config.hidden_act
        self._make_projections(config.hidden_size, dtype)
        self.conv1d = CausalConv(config.channels, config.linear_conv_kernel_dim, dtype)
        self.A_log, self.dt_bias = (
            Weight(name, dtype, (H,), DeviceRef.CPU()) for name in ("A_log", "dt_bias")
        )
        self.norm = GatedNorm(self.value_dim, dtype, config.rms_norm_eps)
        self.out_proj = Linear(H * self.value_dim, config.hidden_size, dtype)

    def _make_projections(self, E: int, dtype: DType) -> None:
        G, H = self.key_heads, self.value_heads
        self.in_proj_qkvz = Linear(E, 2 * G * self.key_dim + 2 * H * self.value_dim, dtype)
        self.in_proj_ba = Linear(E, 2 * H, dtype)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """``[B, T, E]`` → queries, keys and values ``[B, T, C]``, gates ``[B, T, H, Dv]``, b and a ``[B, T, H]``."""
        lead, G, H, Dk = x.shape[:-1], self.key_heads, self.value_heads, self.key_dim
        qkvz, ba = (
            y.astype(x.dtype).reshape(*lead, G, -1)
            for y in linears([self.in_proj_qkvz, self.in_proj_ba], x)
        )
        ends = (Dk, 2 * Dk, 2 * Dk + H // G * self.value_dim)
        q, k, v, z = jnp.split(qkvz, ends, axis=-1)  # of each key head
        b, a = jnp.split(ba, 2, axis=-1)
        qkv = jnp.concatenate([y.reshape(*lead, -1) for y in (q, k, v)], axis=-1)
        z = z.reshape(*lead, H, self.value_dim)
        return qkv, z, b.reshape(*lead, H), a.reshape(*lead, H)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        qkv, z, b, a = self.project(x)
        # On a mesh, shards of the projections do not end where queries, keys and values do.
        qkv = replicate_last_axis(qkv, self.out_proj.weight, 1)  # [B, T, C]
        found = None
        if self.act == "silu":  # for one token there is a kernel that computes delta_net
            found = delta_net_step(
                [qkv, z, b, a], self.conv1d, self.A_log, self.dt_bias, self.norm, self.key_heads,
                cache, "linear",
            )  # fmt: skip
        y, cache = self.delta_net(qkv, z, b, a, cache) if found is None else found
        return self.out_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def delta_net(
        self, qkv: jax.Array, z: jax.Array, b: jax.Array, a: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        """Compute the layer between its projections: the results ``[B, T, H, Dv]``, and the cache."""
        keys, each = self.key_heads * self.key_dim, self.value_heads // self.key_heads
        y, cache = convolve(self.conv1d, qkv, cache, "linear")
        q, k, v = jnp.split(activation(self.act)(y), (keys, 2 * keys), axis=-1)
        q, k = (unit(split_heads(y, self.key_dim)) for y in (q, k))  # [B, T, G, Dk]
        q, k = (jnp.repeat(y, each, axis=-2) for y in (q, k))  # [B, T, H, Dk]
        v = split_heads(v, self.value_dim)  # [B, T, H, Dv]
        decay = jax.nn.softplus(a.astype(jnp.float32) + per_feature(self.dt_bias, a))
        g = -jnp.exp(per_feature(self.A_log, a)) * decay  # [B, T, H]
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        y, cache = gated_delta(q * self.key_dim**-0.5, k, v, g, beta, cache, "linear")
        return self.norm(y, z).astype(qkv.dtype), cache

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections between key heads, and ``out_proj`` between value heads."""
        G, each = self.key_heads, self.value_heads // self.key_heads
        width = 2 * self.key_dim + 2 * each * self.value_dim
        return {
            **self._shared_rules(),
            **split_heads_over_mesh({"in_proj_qkvz": G}, {}, width),
            **split_heads_over_mesh({"in_proj_ba": G}, {}, 2 * each),
        }

    def _shared_rules(self) -> dict[str, Any]:
        return {
            **split_heads_over_mesh({}, {"out_proj": self.value_heads}, self.value_dim),
            **dict.fromkeys(("A_log", "dt_bias", "norm.weight"), REPLICATED),
        }


class Qwen35DeltaNet(Qwen3NextDeltaNet):
    """The gated DeltaNet with four projections: of queries, keys and values; of gates; of shares; and of decays."""

    def _make_projections(self, E: int, dtype: DType) -> None:
        H, keys = self.value_heads, self.key_heads * self.key_dim
        values = H * self.value_dim
        self.in_proj_qkv = Linear(E, 2 * keys + values, dtype)
        self.in_proj_z = Linear(E, values, dtype)
        self.in_proj_b = Linear(E, H, dtype)
        self.in_proj_a = Linear(E, H, dtype)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """As :meth:`Qwen3NextDeltaNet.project`."""
        each = [self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a]
        qkv, z, b, a = (y.astype(x.dtype) for y in linears(each, x))
        return qkv, split_heads(z, self.value_dim), b, a

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``in_proj_qkv`` along its rows, and the other projections between value heads."""
        H = self.value_heads
        return {
            **self._shared_rules(),
            "in_proj_qkv": ROWS,
            **split_heads_over_mesh({"in_proj_z": H}, {}, self.value_dim),
            **split_heads_over_mesh({"in_proj_b": H, "in_proj_a": H}, {}, 1),
        }


class Qwen3NextAttention(Module):
    """Attention whose results are multiplied by a gate, which ``q_proj`` computes beside each query."""

    def __init__(self, config: Qwen35Config, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, 2 * H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.q_norm = RMSNorm(D, dtype, eps, weight_offset=1.0)
        self.k_norm = RMSNorm(D, dtype, eps, weight_offset=1.0)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        D = self.head_dim
        both, k, v = linears(
            [self.q_proj, self.k_proj, self.v_proj], x
        )  # [B, T, 2 H D], [B, T, K D]
        both = split_heads(both.astype(x.dtype), 2 * D)  # [B, T, H, 2 D]
        q, gate = both[..., :D], both[..., D:]
        k, v = split_heads(k.astype(x.dtype), D), split_heads(v.astype(x.dtype), D)
        q, k = rope(self.q_norm(q), angles), rope(self.k_norm(k), angles)
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        y = y * jax.nn.sigmoid(gate).astype(y.dtype)
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs, D = {"k_proj": self.kv_heads, "v_proj": self.kv_heads}, self.head_dim
        queries = split_heads_over_mesh({"q_proj": self.heads}, {}, 2 * D)
        return queries | split_heads_over_mesh(outputs, {"o_proj": self.heads}, D)


class Qwen3NextMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202), with F inner features: of a layer, or the shared expert."""

    def __init__(self, config: Qwen35Config, F: int, dtype: DType):
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


class Qwen3NextSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k best experts, and the gated shared expert."""

    def __init__(self, config: Qwen3NextConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.top_k = config.num_experts_per_tok
        self.shares = "softmax of chosen" if config.norm_topk_prob else "softmax"
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        self.shared_expert = Qwen3NextMLP(config, config.shared_expert_intermediate_size, dtype)
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


class Qwen3NextBlock(Module):
    """One layer: the DeltaNet or attention, then the MLP or the experts, each added to the hidden states."""

    def __init__(self, config: Any, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear = config.layer_types[layer] == LINEAR
        self.input_layernorm = RMSNorm(E, dtype, eps, weight_offset=1.0)
        if self.is_linear:
            net = Qwen3NextDeltaNet if config.fused_projections else Qwen35DeltaNet
            self.linear_attn = net(config, dtype)
        else:
            self.self_attn = Qwen3NextAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, weight_offset=1.0)
        if config.is_sparse(layer):
            self.mlp: Any = Qwen3NextSparseMLP(config, dtype)
        else:
            self.mlp = Qwen3NextMLP(config, config.intermediate_size, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.input_layernorm(x)
        y, cache = (
            self.linear_attn(h, cache) if self.is_linear else self.self_attn(h, cache, angles)
        )
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Qwen3NextModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Qwen35Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers: Any = LayerList(
            Qwen3NextBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, dtype, config.rms_norm_eps, weight_offset=1.0)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Qwen3Next(LanguageModel):
    """A Qwen3-Next language model.

    Example:
        >>> config = Qwen3NextConfig(100, 8, 16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=8, num_experts=4, num_experts_per_tok=2, linear_num_key_heads=1, linear_num_value_heads=2,
        ...     linear_key_head_dim=4, linear_value_head_dim=6)
        >>> cache = Qwen3Next(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, {name: a.shape for name, a in cache.more["linear"].arrays.items()}
        (1, {'conv': (3, 1, 3, 20), 'delta': (3, 1, 2, 4, 6)})
    """

    def __init__(self, config: Qwen35Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Qwen3NextModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


class Qwen35(Qwen3Next):
    """A Qwen 3.5 language model without experts.

    Example:
        >>> config = Qwen35Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=8)
        >>> config.layer_types[2:], Qwen35(config).cache(1, 16).num_layers
        (('linear_attention', 'full_attention'), 1)
    """


class Qwen35MoE(Qwen3Next):
    """A Qwen 3.5 language model with experts."""


# --- GGUF files ----------------------------------------------------------------------------------
#
# There are several value heads for each key head. In Hugging Face's checkpoints, the value heads of one key head
# are consecutive; in llama.cpp's Qwen 3.5, the first value head of every key head comes first, then the second of
# every key head. Qwen3-Next's files hold ``in_proj_qkvz`` as two tensors; files from 2025 hold it as one.
#
# Source: ``Qwen3NextModel`` and ``_LinearAttentionVReorderBase`` of llama.cpp's converter.

# (G, Dk, H, Dv): G key heads of width Dk, H value heads of width Dv.
Sizes = tuple[int, int, int, int]
_MIXED, _GATE, _BOTH = (f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "qkvz"))


def _sizes(config: Any) -> Sizes:
    return (
        config.linear_num_key_heads, config.linear_key_head_dim,
        config.linear_num_value_heads, config.linear_value_head_dim,
    )  # fmt: skip


def _sizes_of(given: Settings) -> Sizes:
    heads, inner = given.count("ssm.time_step_rank"), given.count("ssm.inner_size")
    groups = given.count("ssm.group_count")
    for key, count, by in (("inner_size", inner, heads), ("time_step_rank", heads, groups)):
        if count % by:
            raise given.wrong(f"ssm.{key}", f"a multiple of {by}", count, "does not fit")
    return groups, given.count("ssm.state_size"), heads, inner // heads


def _named(part: str, tensors: Mapping[str, WeightData], sizes: Sizes) -> list[str]:
    """The names of the tensors ``part`` of all layers; checks that they have the rows that the sizes give."""
    groups, width, heads, values = sizes
    count = 2 * groups * width + heads * values * (2 if part == _BOTH else 1)
    names = [name for name in tensors if name.endswith(part)]
    for name in names:
        check_rows(name, tensors[name], count)
    return names


# --- Qwen3-Next: queries, keys, values and gates of each key head are consecutive ----------------


def _order(sizes: Sizes) -> np.ndarray:
    """For each row of ``in_proj_qkvz``, its index in the rows of ``in_proj_qkv`` followed by ``in_proj_z``."""
    groups, width, heads, values = sizes
    ends = np.cumsum([groups * width, groups * width, heads * values, heads * values])
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    return np.concatenate([part.reshape(groups, -1) for part in parts], 1).reshape(-1)


def _join(given: Settings, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Joins ``in_proj_qkvz`` from its two parts."""
    found, sizes = dict(tensors), _sizes_of(given)
    names = _named(_MIXED, tensors, sizes)
    if not names:
        return found
    order = _order(sizes)
    for name in names:
        front = name.removesuffix(_MIXED)
        if front + _GATE in found:
            pair = [found.pop(name), found.pop(front + _GATE)]
            found[front + _BOTH] = rows(front + _BOTH, pair, order)
    return found


def _split(config: Any, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Splits ``in_proj_qkvz`` into its two parts."""
    sizes = _sizes(config)
    if not _named(_BOTH, tensors, sizes):
        return dict(tensors)
    where = np.argsort(_order(sizes))
    found = {}
    for name, data in tensors.items():
        if name.endswith(_BOTH):
            front, gates = name.removesuffix(_BOTH), sizes[2] * sizes[3]
            found[front + _MIXED] = rows(front + _MIXED, [data], where[:-gates])
            found[front + _GATE] = rows(front + _GATE, [data], where[-gates:])
        else:
            found[name] = data
    return found


# --- Qwen 3.5: value heads in another order ------------------------------------------------------


def _reordered(
    sizes: Sizes, tensors: Mapping[str, WeightData], *, back: bool
) -> dict[str, WeightData]:
    if not _named(_MIXED, tensors, sizes):
        return dict(tensors)
    groups, width, heads, values = sizes
    order = np.arange(heads).reshape(groups, -1).T.reshape(-1)  # the first of each, the second, …
    order = np.argsort(order) if back else order
    wide = (order[:, None] * values + np.arange(values)).reshape(-1)
    keys = 2 * groups * width
    mixed = np.concatenate([np.arange(keys), keys + wide])
    by_rows = {
        "in_proj_qkv.weight": mixed, "conv1d.weight": mixed, "in_proj_z.weight": wide,
        "in_proj_a.weight": order, "in_proj_b.weight": order, "A_log": order, "dt_bias": order,
    }  # fmt: skip
    found = {}
    for name, data in tensors.items():
        part = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
        if part in by_rows:
            data = rows(name, [data], by_rows[part])
        elif part == "out_proj.weight":
            data = columns(name, data, order, values)
        found[name] = data
    return found


def _own_layers(
    given: Settings, tensors: Mapping[str, WeightData]
) -> Iterable[tuple[str, WeightData]]:
    """The tensors without those of layers of multi-token prediction."""
    layers = given.count("block_count")
    first = layers - given.count("nextn_predict_layers", 0, minimum=0, maximum=layers - 1)
    left = tuple(f"model.layers.{i}." for i in range(first, layers))
    return ((name, data) for name, data in tensors.items() if not name.startswith(left))


def _restored(given: Settings, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    return _reordered(_sizes_of(given), dict(_own_layers(given, tensors)), back=True)


def _tiled(config: Any, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    return _reordered(_sizes(config), tensors, back=False)


# --- settings ------------------------------------------------------------------------------------


def _of_gguf(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of the delta rule, and which layers have it."""
    groups, width, heads, values = _sizes_of(given)
    layers = config["num_hidden_layers"]
    layers -= given.count("nextn_predict_layers", 0, minimum=0, maximum=layers - 1)
    found = {
        "num_hidden_layers": layers, "linear_num_key_heads": groups, "linear_key_head_dim": width,
        "linear_num_value_heads": heads, "linear_value_head_dim": values,
        "linear_conv_kernel_dim": given.count("ssm.conv_kernel"),
    }  # fmt: skip
    if config["intermediate_size"] is None:
        found["intermediate_size"] = given.count("expert_feed_forward_length")
    if given.has("attention.recurrent_layers"):
        kinds = given.items("attention.recurrent_layers", bool)
        if len(kinds) < layers:
            raise given.wrong("attention.recurrent_layers", f"{layers} values", kinds, "is short")
        names = {True: LINEAR, False: FULL}
        return found | {"layer_types": [names[kind] for kind in kinds[:layers]]}
    return found | {"full_attention_interval": given.count("full_attention_interval", 4)}


def _to_gguf(config: Any, *, sections: bool) -> dict[str, Any]:
    """These settings as metadata."""
    groups, width, heads, values = _sizes(config)
    if width != values:
        raise unsupported(
            f"'linear_value_head_dim' {values}, which is not 'linear_key_head_dim' {width}, in a "
            "GGUF file"
        )
    kinds = list(config.layer_types)
    every = 1 + (kinds.index(FULL) if FULL in kinds else len(kinds))
    if config.layer_types != full_every(every, len(kinds), LINEAR):
        raise unsupported("'layer_types' whose attention is not every n-th in a GGUF file")
    # llama.cpp requires the sections of RoPE for images. Text has the same position in all sections.
    pairs = config.rope_parameters.rotated(config.head_dim) // 2
    parts = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim, "ssm.state_size": width,
        "ssm.group_count": groups, "ssm.time_step_rank": heads, "ssm.inner_size": heads * values,
        "full_attention_interval": every,
        **({"rope.dimension_sections": parts} if sections else {}),
    }  # fmt: skip


_ONE_ADDED = Plus(-1.0)
_NAMES = {
    "output_norm": Rule("model.norm", _ONE_ADDED),
    ".attn_norm": Rule("input_layernorm", _ONE_ADDED),
    ".ffn_norm": None,
    ".post_attention_norm": Rule("post_attention_layernorm", _ONE_ADDED),
    ".attn_q_norm": Rule("self_attn.q_norm", _ONE_ADDED),
    ".attn_k_norm": Rule("self_attn.k_norm", _ONE_ADDED),
    ".attn_qkv": "linear_attn.in_proj_qkv",
    ".attn_gate": "linear_attn.in_proj_z",
    ".ssm_conv1d": Rule("linear_attn.conv1d", Taps()),
    ".ssm_dt": Rule("linear_attn.dt_bias", only="bias"),
    ".ssm_a": Rule("linear_attn.A_log", Logarithm(), only=NO_SUFFIX),
    ".ssm_norm": "linear_attn.norm",
    ".ssm_out": "linear_attn.out_proj",
}
_PROJECTIONS = {".ssm_beta": "linear_attn.in_proj_b", ".ssm_alpha": "linear_attn.in_proj_a", **NEXT}
_EXPERTS = {
    **expert_names(shared="shared_expert"),
    ".ffn_gate_inp_shexp": Rule("mlp.shared_expert_gate", Matrix()),
}
_COUNTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_WRITTEN = (
    *(f"ssm.{n}" for n in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")),
    "full_attention_interval",
)  # fmt: skip
_table = partial(GGUFTable, read=_of_gguf, biases=("ssm_dt",), is_partial=True)
_SPARSE = {"hidden_act": "silu", "norm_topk_prob": True}

QWEN3_NEXT_GGUF = _table(
    "qwen3next",
    {
        **_NAMES, **_EXPERTS,
        ".ssm_in": "linear_attn.in_proj_qkvz", ".ssm_ba": "linear_attn.in_proj_ba",
    },
    keys=_COUNTS, constants={**_SPARSE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    write=partial(_to_gguf, sections=False), written=_WRITTEN, join=_join, split=_split,
)  # fmt: skip
_3_5 = partial(
    _table, write=partial(_to_gguf, sections=True), written=(*_WRITTEN, "rope.dimension_sections"),
    join=_restored, split=_tiled,
)  # fmt: skip
QWEN3_5_GGUF = _3_5("qwen35", {**_NAMES, **_PROJECTIONS}, constants={"hidden_act": "silu"})
QWEN3_5_MOE_GGUF = _3_5(
    "qwen35moe", {**_NAMES, **_PROJECTIONS, **_EXPERTS}, keys=_COUNTS, constants=_SPARSE
)

# Tensors of the layer of multi-token prediction are dropped.
_PREDICTION = Drop("mtp.*", kept=True)
QWEN3_NEXT = Qwen3Next.family = Family.of(
    Qwen3Next,
    Qwen3NextConfig,
    names=Names(FusedExperts(), _PREDICTION, *DECODER),
    gguf=QWEN3_NEXT_GGUF,
)
QWEN3_5 = Qwen35.family = Family.of(
    Qwen35,
    Qwen35Config,
    "Qwen3_5ForCausalLM",
    "Qwen3_5TextModel",
    names=Names(FusedExperts(), _PREDICTION, *DECODER),
    gguf=QWEN3_5_GGUF,
)
QWEN3_5_MOE = Qwen35MoE.family = Family.of(
    Qwen35MoE,
    Qwen35MoEConfig,
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeTextModel",
    names=Names(FusedExperts(), _PREDICTION, *DECODER),
    gguf=QWEN3_5_MOE_GGUF,
)
