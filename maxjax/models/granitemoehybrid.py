"""Granite 4: Mamba 2 in most layers, attention in the others, and experts beside a shared MLP.

::

    x = embedding_multiplier · embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        x = x + residual_multiplier · mamba(h)  or  x + residual_multiplier · attention(h)
        h = post_attention_layernorm(x)
        x = x + residual_multiplier · (shared_mlp(h) + Σ share · expert(h))     over the k chosen experts
    logits = lm_head(norm(x)) / logits_scaling

    mamba(h):       z, u, dt = in_proj(h)                    gate, inputs, time steps
                    u, b, c = silu(conv1d(u))                a causal convolution of each channel
                    dt = clip(softplus(dt + dt_bias))
                    S ← exp(-exp(A_log) dt) S + (dt u) ⊗ b   for each head, token after token
                    y = S c + D u
                    out_proj(norm(y · silu(z)))
    attention(h):   o_proj(softmax(attention_multiplier · q kᵀ) v)              with RoPE in some models
    shared_mlp(h):  gate, up = input_linear(h);  output_linear(silu(gate) · up)
    expert(h):      down_proj(silu(gate_proj(h)) · up_proj(h))

The chosen experts are those with the highest router(h), and the shares the softmax over these k scores. A model
without experts has the shared MLP alone. Files hold the gate and up projections of all experts of a layer as one
tensor, ``input_linear``, and the down projections as another, ``output_linear``.

Source: transformers' ``modeling_granitemoehybrid``.

Shapes: B sequences, T tokens, hidden size E, X experts with F inner features. Attention has H query heads and K
key-value heads of width D; Mamba 2 has H heads of P features (I = H P), G groups of heads, N features of the state,
and C = I + 2 G N channels of the convolution. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.arrays import replicate_last_axis
from ..graph.placement.split import COLUMNS, REPLICATED, ROWS, Segment
from ..graph.weight.weight import Weight
from ..graph.weights import WeightData
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from ..nn.ssm.convolution import CausalConv
from ..nn.ssm.gated_norm import GatedNorm
from ..nn.stacked_linear import StackedLinear, split_projections, stacked_rules
from .family import Family
from .fused_experts import FusedExperts
from .gguf.config.read import Config, Shapes
from .gguf.metadata import MAX_EXPERTS, Settings, unsupported
from .gguf.names import expert_names
from .gguf.pieces import check_rows, rows
from .gguf.ssm import (
    SSM_KEYS,
    check_both_kinds,
    has_tensor,
    read_ssm_sizes,
    ssm_names,
    write_ssm_sizes,
)
from .gguf.table import PERMUTED, GGUFTable
from .granite import GRANITE_GGUF, attention_scale
from .names import DECODER, Names, Rename
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
    split_heads,
    split_heads_over_mesh,
)
from .parts.mamba import (
    check_mamba,
    mamba_states,
    read_mamba_head_dim,
    read_time_step_limit,
    write_time_step_limit,
)
from .parts.recurrent import automatic_axes, convolve, per_feature, ssd
from .unread import ReadTracker

# Second names of the kinds of layers.
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


@dataclass(frozen=True)
class GraniteHybridConfig(LanguageModelConfig):
    """The settings of a Granite 4.

    Attributes:
        intermediate_size, shared_intermediate_size: inner features of an expert, and of the MLP that all tokens
            go through.
        layer_types: kind of each layer: "mamba" or "attention"; by default all are "mamba".
        position_embedding_type: "rope" if attention has rotary positions, "nope" if it has none.
        num_local_experts, num_experts_per_tok: X and k; there are no experts if X is 0.
        embedding_multiplier, attention_multiplier, residual_multiplier: factors of the embeddings, of the
            attention scores, and of what a layer adds to the hidden states.
        logits_scaling: divisor of the logits.
        mamba_n_heads, mamba_d_head, mamba_n_groups, mamba_d_state, mamba_d_conv: sizes of Mamba 2.
        time_step_limit: minimum and maximum length of a time step.
    """

    model_type = "granitemoehybrid"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(2048, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] = config_field((), choices=("mamba", "attention"))
    position_embedding_type: str = config_field("nope", choices=("rope", "nope"))
    num_local_experts: int = size(8, minimum=0, aliases=("num_experts",))
    num_experts_per_tok: int = size(2)
    shared_intermediate_size: int = size(1024)
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = config_field(1.0, minimum=1e-9)
    mamba_n_heads: int = size(128)
    mamba_d_head: int = size(64)
    mamba_n_groups: int = size(1)
    mamba_d_state: int = size(256)
    mamba_d_conv: int = size(4, minimum=2)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, ...] = (0.0, math.inf)

    def _fill_in(self) -> None:
        if not self.layer_types:
            self._set("layer_types", ("mamba",) * self.num_hidden_layers)
        super()._fill_in()

    def _check(self) -> None:
        check_mamba(self.mamba_n_heads, self.mamba_n_groups, self.time_step_limit)
        super()._check()

    @property
    def inner_size(self) -> int:
        """I, the features of all heads of Mamba 2."""
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def channels(self) -> int:
        """C, the channels of the convolution."""
        return self.inner_size + 2 * self.mamba_n_groups * self.mamba_d_state

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        return self.layer_types

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts beside its MLP."""
        return self.num_local_experts > 0

    def states(self, layer: int) -> Mapping[str, Any]:
        """The states of Mamba 2, or the keys and values of attention."""
        if self.layer_types[layer] == "attention":
            return super().states(layer)
        return mamba_states(
            taps=self.mamba_d_conv, channels=self.channels, heads=self.mamba_n_heads,
            head_dim=self.mamba_d_head, state_size=self.mamba_d_state,
        )  # fmt: skip

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which the width of Mamba 2's heads may follow from their number."""
        raw = ReadTracker.of(raw)
        key = "layers_block_type" if raw.get("layer_types") is None else "layer_types"
        kinds = raw.get(key)
        if kinds is not None:
            if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
                raise ValueError(f"{key!r} is not a list of strings")
            kinds = [_KINDS.get(kind, kind) for kind in kinds]
        found = {"layer_types": kinds, "mamba_d_head": read_mamba_head_dim(raw, 128)}
        if raw.get("num_local_experts") == 0:  # the other numbers of experts are not used
            found |= {"num_experts_per_tok": 1, "num_experts": None}
        limit = read_time_step_limit(raw)
        return super().from_hf(raw.replaced(found), time_step_limit=limit, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the features of Mamba 2 as a multiple of the hidden size."""
        found = super().to_hf()
        del found["time_step_limit"]
        expand, rest = divmod(self.inner_size, self.hidden_size)
        found |= {} if rest else {"mamba_expand": expand}
        return found | write_time_step_limit(self.time_step_limit)


class GraniteHybridMamba(Module):
    """Mamba 2: one input projection, a convolution, the recurrence, and a gated norm."""

    def __init__(self, config: GraniteHybridConfig, dtype: DType):
        super().__init__()
        H, G, N = config.mamba_n_heads, config.mamba_n_groups, config.mamba_d_state
        self.heads, self.head_dim, self.groups, self.state_size = H, config.mamba_d_head, G, N
        self.act, self.time_step_limit = config.hidden_act, config.time_step_limit
        E, inner, channels = config.hidden_size, config.inner_size, config.channels
        bias = config.mamba_proj_bias
        self.in_proj = Linear(E, inner + channels + H, dtype, has_bias=bias)
        self.conv1d = CausalConv(channels, config.mamba_d_conv, dtype, config.mamba_conv_bias)
        self.A_log, self.D, self.dt_bias = (
            Weight(name, dtype, (H,), DeviceRef.CPU()) for name in ("A_log", "D", "dt_bias")
        )
        self.norm = GatedNorm(inner, dtype, config.rms_norm_eps, G, gate_first=True)
        self.out_proj = Linear(inner, E, dtype, has_bias=bias)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        inner, group = self.heads * self.head_dim, self.groups * self.state_size  # I, G N
        y = self.in_proj(x).astype(x.dtype)  # [B, T, I + C + H]
        # On a mesh, shards of the projection do not end where its parts do.
        y = replicate_last_axis(y, self.in_proj.weight, 0)
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
        return self.out_proj(self.norm(y, z).astype(x.dtype)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``in_proj`` along its rows, and ``out_proj`` between heads."""
        return {
            "in_proj": ROWS,
            **split_heads_over_mesh({}, {"out_proj": self.heads}, self.head_dim),
            **dict.fromkeys(["A_log", "D", "dt_bias", "norm.weight"], REPLICATED),
        }


class GraniteHybridAttention(Module):
    """Attention with or without rotary positions, whose scores have a factor of the configuration."""

    def __init__(self, config: GraniteHybridConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.scale = config.attention_multiplier
        self.uses_rope = config.position_embedding_type == "rope"
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
        y, cache = attend(q, k, v, cache, scale=self.scale)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class GraniteHybridMLP(Module):
    """The gated MLP that all tokens go through; one linear layer computes gate and up."""

    def __init__(self, config: GraniteHybridConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.shared_intermediate_size
        self.act, self.sizes = config.hidden_act, (F, F)
        self.input_linear: Any = StackedLinear(E, self.sizes, ["gate", "up"], dtype, stacked=True)
        self.output_linear = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = split_projections(self.input_linear, x, self.sizes)  # [B, T, F]
        return self.output_linear(activation(self.act)(gate) * up)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features of gate, up and down."""
        segments = [Segment.even(width) for width in self.sizes]
        columns = {"output_linear": COLUMNS}
        return stacked_rules("input_linear", self.input_linear, segments) | columns


class GraniteHybridRouter(Module):
    """The scores of the experts, by a linear layer without a bias."""

    def __init__(self, config: GraniteHybridConfig, dtype: DType):
        super().__init__()
        self.layer = Linear(config.hidden_size, config.num_local_experts, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x)  # [B, T, X]


class GraniteHybridSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k experts with the highest scores."""

    def __init__(self, config: GraniteHybridConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.router = GraniteHybridRouter(config, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.router(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, "softmax of chosen")  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]


class GraniteHybridBlock(Module):
    """One layer: Mamba 2 or attention, then the shared MLP and the experts, each added with a factor."""

    def __init__(self, config: GraniteHybridConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.residual, self.has_experts = config.residual_multiplier, config.is_sparse(layer)
        self.attends = config.layer_types[layer] == "attention"
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        if self.attends:
            self.self_attn = GraniteHybridAttention(config, dtype)
        else:
            self.mamba = GraniteHybridMamba(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.shared_mlp = GraniteHybridMLP(config, dtype)
        if self.has_experts:
            self.block_sparse_moe = GraniteHybridSparseMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.input_layernorm(x)
        y, cache = self.self_attn(h, cache, angles) if self.attends else self.mamba(h, cache)
        x = x + self.residual * y
        h = self.post_attention_layernorm(x)
        y = self.shared_mlp(h)
        y = y + self.block_sparse_moe(h) if self.has_experts else y
        return x + self.residual * y.astype(x.dtype), cache


class GraniteHybridModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: GraniteHybridConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers: Any = LayerList(
            GraniteHybridBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x = x * jnp.asarray(self.config.embedding_multiplier, x.dtype)
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class GraniteHybrid(LanguageModel):
    """A Granite 4 language model.

    Example:
        >>> sizes = dict(num_hidden_layers=3, num_attention_heads=2, num_local_experts=0, mamba_n_heads=4)
        >>> config = GraniteHybridConfig(100, 8, 16, **sizes, mamba_d_head=4, mamba_d_state=6,
        ...     layer_types=("mamba", "attention", "mamba"))
        >>> cache = GraniteHybrid(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, {name: a.shape for name, a in cache.more["mamba"].arrays.items()}
        (1, {'conv': (2, 1, 3, 28), 'ssm': (2, 1, 4, 4, 6)})
    """

    def __init__(
        self, config: GraniteHybridConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = GraniteHybridModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` of hidden states ``[..., E]``."""
        return super().logits(x) * (1 / self.config.logits_scaling)


# --- GGUF files, which hold gate and up of the shared MLP as two tensors -------------------------

Tensors = Mapping[str, WeightData]
# Prefixes of the shared MLP's projections after the split, in models without experts and with them.
_DENSE, _SHARED = "mlp.", "mlp.shared_mlp."
_BOTH, _DOWN = (f"shared_mlp.{name}_linear.weight" for name in ("input", "output"))


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """Return the sizes of Mamba 2, of the experts and of the shared MLP, and the kinds of the layers."""
    experts = given.count("expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    inner = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    has_mamba = [f"blk.{i}.ssm_in.weight" in tensors for i in range(config["num_hidden_layers"])]
    names = {
        "heads": "mamba_n_heads", "width": "mamba_d_head", "groups": "mamba_n_groups",
        "state": "mamba_d_state", "taps": "mamba_d_conv", "expand": "mamba_expand",
    }  # fmt: skip
    return {
        **attention_scale(given, tensors, config), **read_ssm_sizes(given, names),
        "mamba_conv_bias": has_tensor("ssm_conv1d.bias", tensors) or not any(has_mamba),
        "mamba_proj_bias": has_tensor("ssm_in.bias", tensors),
        "layer_types": ["mamba" if one else "attention" for one in has_mamba],
        "position_embedding_type": "rope" if given.flag("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": given.count("expert_used_count", maximum=experts) if experts else 0,
        "shared_intermediate_size": given.count(inner),
    }  # fmt: skip


def _as_granite(config: GraniteHybridConfig) -> tuple[str, dict[str, Any]] | None:
    """Return how a model without Mamba 2 is written, as a Granite 3; None for any other."""
    if "mamba" in config.layer_types:
        return None
    if config.num_local_experts or config.position_embedding_type == "nope":
        what = "experts" if config.num_local_experts else "layers without RoPE"
        raise unsupported(f"a Granite 4 without Mamba 2 and with {what} in a GGUF file")
    return "granite", {"intermediate_size": config.shared_intermediate_size}


def _write_gguf(config: GraniteHybridConfig) -> dict[str, Any]:
    """Return further metadata; without experts, the shared MLP is written as the layer's MLP."""
    if config.inner_size != 2 * config.hidden_size:
        raise unsupported(
            f"a Granite 4 with {config.inner_size} features of Mamba 2, which are not two for each of "
            f"{config.hidden_size} hidden ones, in a GGUF file"
        )
    attends = [kind == "attention" for kind in config.layer_types]
    check_both_kinds([not one for one in attends], attends)
    inner = "expert_shared_feed_forward_length"
    return {
        **write_ssm_sizes(
            taps=config.mamba_d_conv, state_size=config.mamba_d_state, groups=config.mamba_n_groups,
            heads=config.mamba_n_heads, inner=config.inner_size, conv_bias=config.mamba_conv_bias,
            act=config.hidden_act, limit=config.time_step_limit,
        ),
        inner if config.num_local_experts else "feed_forward_length": config.shared_intermediate_size,
        "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }  # fmt: skip


def _split_gate_and_up(config: GraniteHybridConfig, tensors: Tensors) -> Tensors:
    """Split the shared MLP's tensor of gate and up in two, and rename its projections."""
    to = _SHARED if config.num_local_experts else _DENSE
    found = {}
    for name, data in tensors.items():
        if name.endswith(_BOTH):
            check_rows(name, data, 2 * config.shared_intermediate_size)
            halves = np.split(np.arange(2 * config.shared_intermediate_size), 2)
            for part, half in zip(("gate", "up"), halves, strict=True):
                new = f"{name.removesuffix(_BOTH)}{to}{part}_proj.weight"
                found[new] = rows(new, [data], half)
        else:
            found[name.replace(_DOWN, f"{to}down_proj.weight")] = data
    return found


def _join_gate_and_up(given: Settings, tensors: Tensors) -> Tensors:
    """Join gate and up of the shared MLP: the inverse of :func:`_split_gate_and_up`."""
    of = _SHARED if given.count("expert_count", 0, minimum=0) else _DENSE
    found: dict[str, WeightData] = {}
    for name, data in tensors.items():
        front = name.removesuffix(f"{of}gate_proj.weight")
        if front != name:
            up = f"{front}{of}up_proj.weight"
            pair = [data, *([tensors[up]] if up in tensors else [])]
            count = sum(int(one.shape[0]) for one in pair)
            found[front + _BOTH] = rows(front + _BOTH, pair, np.arange(count))
        elif not name.endswith(f"{of}up_proj.weight"):
            found[name.replace(f"{of}down_proj.weight", _DOWN)] = data
    return found


GRANITE_HYBRID_GGUF = GGUFTable(
    "granitehybrid",
    {
        **PERMUTED, **ssm_names("mamba"), **expert_names("block_sparse_moe", "router.layer"),
        **{f".ffn_{part}_shexp": f"{_SHARED}{part}_proj" for part in ("gate", "up", "down")},
    },
    keys=GRANITE_GGUF.keys, constants={"hidden_act": "silu"}, read=_read_gguf, write=_write_gguf,
    join=_join_gate_and_up, split=_split_gate_and_up,
    biases=("attn_q", "attn_k", "attn_v", "attn_output", "ssm_conv1d", "ssm_dt"),
    written=(*SSM_KEYS, "expert_shared_feed_forward_length", "rope.scaling.finetuned"),
    computed=("layer_types", "intermediate_size", "mamba_d_head"), instead=_as_granite,
)  # fmt: skip

_SPARSE = "block_sparse_moe"
GRANITE_HYBRID = GraniteHybrid.family = Family.of(
    GraniteHybrid,
    GraniteHybridConfig,
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeHybridModel",
    names=Names(
        FusedExperts(
            f"{_SPARSE}.experts.#.*.weight",
            gate_up=(f"{_SPARSE}.input_linear", f"{_SPARSE}.experts.gate_up_proj"),
            down=(f"{_SPARSE}.output_linear", f"{_SPARSE}.experts.down_proj"),
            suffix=".weight",
            written=True,
        ),
        *DECODER,
        Rename({f"{_SPARSE}.router.weight": f"{_SPARSE}.router.layer.weight"}, in_modules=True),
    ),
    gguf=GRANITE_HYBRID_GGUF,
)
