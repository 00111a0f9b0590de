"""Falcon-H1: attention and Mamba 2 beside each other in every layer, with factors throughout.

::

    x = embedding_multiplier · embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        x = x + ssm_out_multiplier · mamba(h) + attention_out_multiplier · attention(attention_in_multiplier · h)
        h = pre_ff_layernorm(x)
        x = x + m₂ · down_proj(silu(m₁ · gate_proj(h)) · up_proj(h))            m: mlp_multipliers
    logits = lm_head_multiplier · lm_head(final_layernorm(x))

    attention(h):  q, k, v = rope(q_proj(h)), rope(key_multiplier · k_proj(h)), v_proj(h)
                   o_proj(softmax(q kᵀ / √D) v)              for each head, over the tokens before
    mamba(h):      z, u, b, c, dt = ssm_multipliers · in_proj(ssm_in_multiplier · h)
                   u, b, c = silu(conv1d(u, b, c))           a causal convolution of each channel
                   dt = clip(softplus(dt + dt_bias))
                   S ← exp(-exp(A_log) dt) S + (dt u) ⊗ b    for each head, token after token
                   y = S c + D u
                   out_proj(norm(y) · silu(z))               with the norm before the gate, after it, or without one

Source: arXiv:2507.22448; transformers' ``modeling_falcon_h1``.

Shapes: B sequences, T tokens, hidden size E, F inner features of the MLP. Attention has H query heads and K key-value
heads of width D; Mamba 2 has H heads of P features (I = H P), G groups of heads, N features of the state, and
C = I + 2 G N channels of the convolution. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.arrays import replicate_last_axis
from ..graph.placement.split import REPLICATED, ROWS
from ..graph.weight.weight import Weight
from ..graph.weights import WeightData
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from ..nn.ssm.convolution import CausalConv
from ..nn.ssm.gated_norm import GatedNorm
from .family import Family
from .gguf.config.read import Config, Shapes
from .gguf.metadata import Settings
from .gguf.names import NO_SUFFIX, Rule
from .gguf.pieces import check_rows, computed
from .gguf.ssm import SSM_KEYS, has_tensor, read_ssm_sizes, ssm_names, write_ssm_sizes
from .gguf.table import GGUFTable
from .names import ROPE_TABLES, Headless, Names
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
    positive_integer,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.mamba import (
    check_mamba,
    mamba_states,
    read_mamba_head_dim,
    read_time_step_limit,
    write_time_step_limit,
)
from .parts.recurrent import automatic_axes, convolve, per_feature, ssd


@dataclass(frozen=True)
class FalconH1Config(LanguageModelConfig):
    """The settings of a Falcon-H1.

    Attributes:
        embedding_multiplier, lm_head_multiplier: factors of the embeddings and of the logits.
        key_multiplier, attention_in_multiplier, attention_out_multiplier: factors of the keys, and of
            the inputs and results of attention.
        ssm_in_multiplier, ssm_out_multiplier: factors of the inputs and results of Mamba 2.
        ssm_multipliers: factors of Mamba 2's gates, inputs, b, c and time steps.
        mlp_multipliers: factors of the MLP's gates and results.
        mamba_n_heads, mamba_d_head, mamba_n_groups, mamba_d_state, mamba_d_conv: sizes of Mamba 2.
        mamba_rms_norm, mamba_norm_before_gate: whether Mamba 2 has a norm, and whether it is before the gate.
        projectors_bias: whether the output projection of Mamba 2 has a bias.
        time_step_limit: minimum and maximum length of a time step.
    """

    model_type = "falcon_h1"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(8192, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope()
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = config_field((1.0,) * 5, minimum=-math.inf)
    mlp_multipliers: tuple[float, ...] = config_field((1.0,) * 2, minimum=-math.inf)
    mamba_n_heads: int = size(128)
    mamba_d_head: int = size(8)
    mamba_n_groups: int = size(1)
    mamba_d_state: int = size(256)
    mamba_d_conv: int = size(4, minimum=2)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    time_step_limit: tuple[float, ...] = (0.0, math.inf)
    tie_word_embeddings: bool = False

    def _check(self) -> None:
        check_mamba(self.mamba_n_heads, self.mamba_n_groups, self.time_step_limit)
        for key, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
            if len(getattr(self, key)) != count:
                raise ValueError(f"{key!r} is not a list of {count} numbers")
        super()._check()

    @property
    def inner_size(self) -> int:
        """I, the features of all heads of Mamba 2: ``mamba_d_ssm``."""
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def channels(self) -> int:
        """C, the channels of the convolution."""
        return self.inner_size + 2 * self.mamba_n_groups * self.mamba_d_state

    def states(self, layer: int) -> Mapping[str, Any]:
        """The keys and values of attention, and the states of Mamba 2."""
        mamba = mamba_states(
            taps=self.mamba_d_conv, channels=self.channels, heads=self.mamba_n_heads,
            head_dim=self.mamba_d_head, state_size=self.mamba_d_state,
        )  # fmt: skip
        return {**super().states(layer), **mamba}

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which the width of Mamba 2's heads may follow from their number."""
        raw = with_defaults(raw, {"num_key_value_heads": 8, "mamba_d_ssm": 1024})
        inner = raw.get("mamba_d_ssm")
        inner = None if inner is None else positive_integer(raw, "mamba_d_ssm")
        limit, width = read_time_step_limit(raw), read_mamba_head_dim(raw, 128, inner)
        raw = raw.replaced({"mamba_d_head": width})
        return super().from_hf(raw, time_step_limit=limit, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the features of Mamba 2 and their multiple of the hidden size."""
        found = super().to_hf()
        del found["time_step_limit"]
        expand, rest = divmod(self.inner_size, self.hidden_size)
        found |= {"mamba_d_ssm": self.inner_size} | ({} if rest else {"mamba_expand": expand})
        return found | write_time_step_limit(self.time_step_limit)


class FalconH1Mamba(Module):
    """Mamba 2, with a factor for each part of the input projection's result."""

    def __init__(self, config: FalconH1Config, dtype: DType):
        super().__init__()
        H, G, N = config.mamba_n_heads, config.mamba_n_groups, config.mamba_d_state
        self.heads, self.head_dim, self.groups, self.state_size = H, config.mamba_d_head, G, N
        self.act, self.time_step_limit = config.hidden_act, config.time_step_limit
        self.in_multiplier, self.multipliers = config.ssm_in_multiplier, config.ssm_multipliers
        self.has_norm, before_gate = config.mamba_rms_norm, config.mamba_norm_before_gate
        E, inner, channels = config.hidden_size, config.inner_size, config.channels
        bias, out_bias, conv_bias = (
            config.mamba_proj_bias, config.projectors_bias, config.mamba_conv_bias
        )  # fmt: skip
        self.in_proj = Linear(E, inner + channels + H, dtype, has_bias=bias)
        self.conv1d = CausalConv(channels, config.mamba_d_conv, dtype, conv_bias)
        self.A_log, self.D, self.dt_bias = (
            Weight(name, dtype, (H,), DeviceRef.CPU()) for name in ("A_log", "D", "dt_bias")
        )
        if self.has_norm:
            self.norm = GatedNorm(inner, dtype, config.rms_norm_eps, G, gate_first=not before_gate)
        self.out_proj = Linear(inner, E, dtype, has_bias=out_bias)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        inner, group = self.heads * self.head_dim, self.groups * self.state_size  # I, G N
        y = self.in_proj(x * jnp.asarray(self.in_multiplier, x.dtype)).astype(x.dtype)
        # On a mesh, shards of the projection do not end where its parts do.
        y = replicate_last_axis(y, self.in_proj.weight, 0)  # [B, T, I + C + H]
        sizes = (inner, inner, group, group, self.heads)
        factors = np.repeat(np.array(self.multipliers, np.float32), sizes)
        y = y * per_feature(factors, y, y.dtype)
        z, u, dt = jnp.split(y, (inner, 2 * inner + 2 * group), axis=-1)
        u, cache = convolve(self.conv1d, u, cache, "mamba")  # [B, T, C]
        u, b, c = jnp.split(activation(self.act)(u), (inner, inner + group), axis=-1)
        u = split_heads(u, self.head_dim)  # [B, T, H, P]
        b, c = split_heads(b, self.state_size), split_heads(c, self.state_size)  # [B, T, G, N]
        dt = jax.nn.softplus(dt.astype(jnp.float32) + per_feature(self.dt_bias, dt))
        dt = jnp.clip(dt, *self.time_step_limit)  # [B, T, H]
        decay = dt * -jnp.exp(per_feature(self.A_log, dt))
        y, cache = ssd(u * dt[..., None], decay, b, c, cache, "mamba")  # [B, T, H, P]
        y = merge_heads(y + u * per_feature(self.D, dt)[..., None])
        y = self.norm(y, z) if self.has_norm else y * jax.nn.silu(z.astype(jnp.float32))
        return self.out_proj(y.astype(x.dtype)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``in_proj`` along its rows, and ``out_proj`` between heads."""
        small = ["A_log", "D", "dt_bias", *(["norm.weight"] if self.has_norm else [])]
        return {
            "in_proj": ROWS,
            **split_heads_over_mesh({}, {"out_proj": self.heads}, self.head_dim),
            **dict.fromkeys(small, REPLICATED),
        }


class FalconH1Attention(Module):
    """Attention with rotary positions, whose keys are multiplied by a factor."""

    def __init__(self, config: FalconH1Config, dtype: DType):
        super().__init__()
        E, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.key_multiplier = config.key_multiplier
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        k = k * jnp.asarray(self.key_multiplier, k.dtype)
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class FalconH1MLP(Module):
    """The gated MLP (arXiv:2002.05202), whose gates and results are multiplied by factors."""

    def __init__(self, config: FalconH1Config, dtype: DType):
        super().__init__()
        E, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.act, self.multipliers = config.hidden_act, config.mlp_multipliers
        self.gate_proj = Linear(E, F, dtype, has_bias=bias)
        self.up_proj = Linear(E, F, dtype, has_bias=bias)
        self.down_proj = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        of_gate, of_result = self.multipliers
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        h = activation(self.act)(gate * of_gate) * up
        return (self.down_proj(h) * of_result).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class FalconH1Block(Module):
    """One layer: attention and Mamba 2 beside each other, then the MLP, each added to the hidden states."""

    def __init__(self, config: FalconH1Config, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.attention_in = config.attention_in_multiplier
        self.attention_out = config.attention_out_multiplier
        self.ssm_out = config.ssm_out_multiplier
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mamba = FalconH1Mamba(config, dtype)
        self.self_attn = FalconH1Attention(config, dtype)
        self.pre_ff_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.feed_forward = FalconH1MLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.input_layernorm(x)
        y, cache = self.mamba(h, cache)
        z, cache = self.self_attn(h * jnp.asarray(self.attention_in, h.dtype), cache, angles)
        ssm_out, attention_out = (
            jnp.asarray(one, x.dtype) for one in (self.ssm_out, self.attention_out)
        )
        x = x + (y * ssm_out + z * attention_out)
        return x + self.feed_forward(self.pre_ff_layernorm(x)), cache


class FalconH1Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: FalconH1Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, E, dtype)
        self.layers: Any = LayerList(
            FalconH1Block(config, dtype) for _ in range(config.num_hidden_layers)
        )
        self.final_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x = x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.final_layernorm(x), cache


class FalconH1(LanguageModel):
    """A Falcon-H1 language model.

    Example:
        >>> config = FalconH1Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, mamba_n_heads=4,
        ...     mamba_d_head=4, mamba_d_state=6)
        >>> cache = FalconH1(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, cache.more["mamba"].arrays["ssm"].shape
        (2, (2, 1, 4, 4, 6))
    """

    def __init__(self, config: FalconH1Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = FalconH1Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """:meth:`LanguageModel.logits`, times the factor of the configuration."""
        return super().logits(x) * self.config.lm_head_multiplier


# --- GGUF files, which hold the tensors multiplied by the model's factors ------------------------


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """Return the sizes of Mamba 2, and the biases and norms that the file has."""
    names = {
        "heads": "mamba_n_heads", "width": "mamba_d_head", "groups": "mamba_n_groups",
        "state": "mamba_d_state", "taps": "mamba_d_conv", "inner": "mamba_d_ssm",
    }  # fmt: skip
    return {
        **read_ssm_sizes(given, names), "mamba_conv_bias": has_tensor("ssm_conv1d.bias", tensors),
        "mamba_proj_bias": has_tensor("ssm_in.bias", tensors),
        "projectors_bias": has_tensor("ssm_out.bias", tensors),
        "mlp_bias": has_tensor("ffn_gate.bias", tensors),
        "mamba_rms_norm": has_tensor("ssm_norm.weight", tensors), "mamba_norm_before_gate": False,
    }  # fmt: skip


def _write_gguf(config: FalconH1Config) -> dict[str, Any]:
    return write_ssm_sizes(
        taps=config.mamba_d_conv, state_size=config.mamba_d_state, groups=config.mamba_n_groups,
        heads=config.mamba_n_heads, inner=config.inner_size, conv_bias=config.mamba_conv_bias,
        act=config.hidden_act, limit=config.time_step_limit,
        norm_before_gate=config.mamba_rms_norm and config.mamba_norm_before_gate,
    )  # fmt: skip


def _factors(config: FalconH1Config) -> dict[str, Sequence[Any]]:
    """Return the factors of tensors, by suffixes of their names, in the converter's order.

    A bias is not multiplied by the factors of its layer's inputs.
    """
    inner, group = config.inner_size, config.mamba_n_groups * config.mamba_d_state
    sizes = (inner, inner, group, group, config.mamba_n_heads)
    parts = np.repeat(config.ssm_multipliers, sizes)
    before, keys, inputs = (
        config.attention_in_multiplier, config.key_multiplier, config.ssm_in_multiplier,
    )  # fmt: skip
    found: dict[str, Sequence[Any]] = {
        "embed_tokens.weight": [config.embedding_multiplier],
        "lm_head.weight": [config.lm_head_multiplier],
        ".q_proj.weight": [before], ".v_proj.weight": [before],
        ".k_proj.weight": [keys, before], ".k_proj.bias": [keys],
        ".in_proj.weight": [inputs, parts[:, None]], ".in_proj.bias": [parts],
    }  # fmt: skip
    gate, down = config.mlp_multipliers
    results = {
        "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "gate_proj": gate, "down_proj": down,
    }  # fmt: skip
    each = ("weight", "bias")
    return found | {f".{name}.{one}": [by] for name, by in results.items() for one in each}


def _multiplied(name: str, data: WeightData, factors: Sequence[Any]) -> WeightData:
    """Return a tensor multiplied by several factors, one after the other, in float32."""
    if all(np.all(np.equal(factor, 1)) for factor in factors):
        return data
    for factor in factors:
        if np.ndim(factor):
            check_rows(name, data, len(factor))

    def change(values: np.ndarray) -> np.ndarray:
        found = values.astype(np.float32)
        for factor in factors:
            found = found * np.float32(factor)
        return found.astype(values.dtype)

    return computed(name, [data], change, tuple(map(int, data.logical_shape)))


def _with_factors(
    config: FalconH1Config, tensors: Mapping[str, WeightData]
) -> dict[str, WeightData]:
    """Return the tensors multiplied by the model's factors, which GGUF files do not hold separately.

    If a tied head and the embedding table have different factors, the file holds both.
    """
    found, factors, head = dict(tensors), _factors(config), "lm_head.weight"
    if config.tie_word_embeddings and config.embedding_multiplier != config.lm_head_multiplier:
        table = next((n for n in tensors if n.endswith("embed_tokens.weight")), "")
        for name, other in ((head, table), ("model.embed_tokens.weight", head)):
            if other in tensors and (name == head or not table):
                found.setdefault(name, tensors[other])
    by_name = {
        name: next((f for end, f in factors.items() if name.endswith(end)), ()) for name in found
    }
    return {name: _multiplied(name, data, by_name[name]) for name, data in found.items()}


FALCON_H1_GGUF = GGUFTable(
    "falcon-h1",
    {
        "output_norm": "model.final_layernorm", **ssm_names("mamba"),
        ".ffn_norm": Rule("pre_ff_layernorm.weight", only=NO_SUFFIX),
        **{f".ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    },
    constants={"hidden_act": "silu"}, read=_read_gguf, write=_write_gguf, split=_with_factors,
    written=SSM_KEYS,
    biases=("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down", "ssm_conv1d", "ssm_dt"),
    computed=("mamba_d_head", "mamba_d_ssm", "mamba_norm_before_gate", "tie_word_embeddings"),
)  # fmt: skip

FALCON_H1 = FalconH1.family = Family.of(
    FalconH1,
    FalconH1Config,
    names=Names(ROPE_TABLES, Headless("model.", ("embed_tokens.", "layers.", "final_layernorm."))),
    gguf=FALCON_H1_GGUF,
)
