"""Jamba: Mamba 1 in most layers and attention without positions in the others; experts in every second layer.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        x = x + mamba(h)  or  x + self_attn(h)
        h = pre_ff_layernorm(x)
        x = x + feed_forward(h)
    logits = lm_head(final_layernorm(x))

    mamba(h):         u, z = in_proj(h); u = silu(conv1d(u))  a causal convolution of each channel
                      dt, b, c = x_proj(u), each with a norm of its own
                      dt = softplus(dt_proj(dt))              a time step for each channel
                      s ← exp(-exp(A_log) dt) s + dt u b      for each channel, token after token
                      out_proj((s · c + D u) · silu(z))
    self_attn(h):     o_proj(softmax(q kᵀ / √D) v)            for each head, over the tokens before
    feed_forward(h):  down_proj(silu(gate_proj(h)) · up_proj(h)), or in a layer with experts
                      Σ share · expert(h)                     over the k experts with the highest router(h);
                                                              the shares are of its softmax over all experts

Sources: arXiv:2403.19887, arXiv:2408.12570; transformers' ``modeling_jamba``.

Shapes: B sequences, T tokens, hidden size E. Attention has H query heads and K key-value heads of width D; Mamba 1
has I channels, N features of the state of each, and R features that time steps are computed from. X experts with F
inner features, k experts for each token. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.arrays import replicate_last_axis
from ..graph.placement.split import REPLICATED, ROWS
from ..graph.weight.weight import Weight
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from ..nn.ssm.convolution import CausalConv
from .family import Family
from .fused_experts import FusedExperts
from .gguf.config.read import Config, Shapes
from .gguf.metadata import Settings
from .gguf.names import expert_names
from .gguf.ssm import (
    SELECTIVE_KEYS,
    check_both_kinds,
    has_tensor,
    read_selective_sizes,
    selective_names,
    write_selective_sizes,
)
from .gguf.table import GGUFTable
from .names import ROPE_TABLES, Headless, Names
from .parts import (
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    attend,
    config_field,
    layers,
    merge_heads,
    replicate_over_mesh,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.mamba import read_time_step_rank, selective_states
from .parts.recurrent import automatic_axes, convolve, per_feature, selective_scan


@dataclass(frozen=True)
class JambaConfig(LanguageModelConfig):
    """The settings of a Jamba.

    Attributes:
        intermediate_size: F, also of the MLPs in layers without experts.
        num_experts, num_experts_per_tok: X and k; no layer has experts if X is 1.
        attn_layer_period, attn_layer_offset: layer i has attention if ``i % period == offset``, and Mamba 1 if not.
        expert_layer_period, expert_layer_offset: the same for experts in place of the MLP.
        mamba_d_state, mamba_d_conv, mamba_dt_rank: N, number of taps of the convolution, and R, which is
            ``hidden_size / 16`` by default, rounded up.
        mamba_expand: I / E.
        mamba_conv_bias, mamba_proj_bias: whether the convolution, and the input and output projections of Mamba 1
            have biases.
    """

    model_type = "jamba"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(262_144, minimum=1)
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_experts: int = size(16, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(2)
    attn_layer_period: int = config_field(8, minimum=1, maximum=1000)
    attn_layer_offset: int = config_field(4, maximum=1000)
    expert_layer_period: int = config_field(2, minimum=1, maximum=1000)
    expert_layer_offset: int = config_field(1, maximum=1000)
    mamba_d_state: int = size(16)
    mamba_d_conv: int = size(4, minimum=2)
    mamba_expand: int = config_field(2, minimum=1, maximum=1000)
    mamba_dt_rank: int = size(default=None)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def _fill_in(self) -> None:
        if self.mamba_dt_rank is None:
            self._set("mamba_dt_rank", -(-self.hidden_size // 16))
        super()._fill_in()

    def _check(self) -> None:
        for kind in ("attn", "expert"):
            period, offset = (
                getattr(self, f"{kind}_layer_{name}") for name in ("period", "offset")
            )
            if offset >= period:
                raise ValueError(
                    f"'{kind}_layer_offset' {offset} is not below '{kind}_layer_period' {period}"
                )
        super()._check()

    @property
    def inner_size(self) -> int:
        """I, the number of channels of Mamba 1."""
        return self.mamba_expand * self.hidden_size

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return layer % self.attn_layer_period == self.attn_layer_offset

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        chosen = layer % self.expert_layer_period == self.expert_layer_offset
        return chosen and self.num_experts > 1

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        return tuple((self.attends(i), self.is_sparse(i)) for i in range(self.num_hidden_layers))

    def states(self, layer: int) -> Mapping[str, Any]:
        """The last inputs of the convolution and the state of each channel, or the keys and values of attention."""
        if self.attends(layer):
            return super().states(layer)
        return selective_states(
            taps=self.mamba_d_conv, channels=self.inner_size, state_size=self.mamba_d_state
        )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which the rank of time steps may be "auto"."""
        raw = with_defaults(raw, {"num_key_value_heads": 8})
        rank = read_time_step_rank(raw, "mamba_dt_rank")
        return super().from_hf(raw.replaced({"mamba_dt_rank": rank}), **values)


class JambaMamba(Module):
    """The layer of Mamba 1 (arXiv:2312.00752), with norms of the time steps, b and c."""

    def __init__(self, config: JambaConfig, dtype: DType):
        super().__init__()
        E, inner, bias = config.hidden_size, config.inner_size, config.mamba_proj_bias
        N, R, eps = config.mamba_d_state, config.mamba_dt_rank, config.rms_norm_eps
        self.act, self.state_size, self.rank = config.hidden_act, N, R
        self.in_proj = Linear(E, 2 * inner, dtype, has_bias=bias)
        self.conv1d = CausalConv(inner, config.mamba_d_conv, dtype, config.mamba_conv_bias)
        self.x_proj = Linear(inner, R + 2 * N, dtype)
        self.dt_layernorm = RMSNorm(R, dtype, eps, multiply_before_cast=False)
        self.b_layernorm = RMSNorm(N, dtype, eps, multiply_before_cast=False)
        self.c_layernorm = RMSNorm(N, dtype, eps, multiply_before_cast=False)
        self.dt_proj = Linear(R, inner, dtype, has_bias=True)
        self.A_log = Weight("A_log", dtype, (inner, N), DeviceRef.CPU())
        self.D = Weight("D", dtype, (inner,), DeviceRef.CPU())
        self.out_proj = Linear(inner, E, dtype, has_bias=bias)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y = self.in_proj(x).astype(x.dtype)  # [B, T, 2 I]
        # On a mesh, shards of the projection do not end where its halves do.
        u, z = jnp.split(replicate_last_axis(y, self.in_proj.weight, 0), 2, axis=-1)
        u, cache = convolve(self.conv1d, u, cache, "mamba")  # [B, T, I]
        u = activation(self.act)(u)
        y = self.x_proj(u.astype(x.dtype)).astype(x.dtype)  # [B, T, R + 2 N]
        dt, b, c = jnp.split(y, (self.rank, self.rank + self.state_size), axis=-1)
        dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        dt = jax.nn.softplus(self.dt_proj(dt).astype(jnp.float32))  # [B, T, I]
        a = -jnp.exp(jnp.asarray(self.A_log).astype(jnp.float32))  # [I, N]
        y, cache = selective_scan(u, dt, a, b, c, cache, "mamba")  # [B, T, I]
        y = (y + u * per_feature(self.D, u)) * jax.nn.silu(z.astype(jnp.float32))
        return self.out_proj(y.astype(x.dtype)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the channels of the projections; ``in_proj``, which has two halves, along its rows."""
        return {
            "in_proj": ROWS,
            **split_features_over_mesh(["dt_proj"], ["x_proj", "out_proj"]),
            **dict.fromkeys(["A_log", "D"], REPLICATED),
        }


class JambaAttention(Module):
    """Attention without positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: JambaConfig, dtype: DType):
        super().__init__()
        E, D = config.hidden_size, config.head_dim
        H, K = config.num_attention_heads, config.num_key_value_heads
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, K * D, dtype)
        self.v_proj = Linear(E, K * D, dtype)
        self.o_proj = Linear(H * D, E, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class JambaMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: JambaConfig, dtype: DType):
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


class JambaSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k best experts."""

    def __init__(self, config: JambaConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_experts
        self.top_k = config.num_experts_per_tok
        self.router = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        chosen, shares = route(self.router(x), self.top_k, "softmax")  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("router")


class JambaBlock(Module):
    """One layer: Mamba 1 or attention, then the MLP or the experts, each added to the hidden states."""

    def __init__(self, config: JambaConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.attends = config.attends(layer)
        if self.attends:
            self.self_attn = JambaAttention(config, dtype)
        else:
            self.mamba = JambaMamba(config, dtype)
        mlp = JambaSparseMLP if config.is_sparse(layer) else JambaMLP
        self.feed_forward: Any = mlp(config, dtype)
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.pre_ff_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        mixer = self.self_attn if self.attends else self.mamba
        y, cache = mixer(self.input_layernorm(x), cache)
        x = x + y
        return x + self.feed_forward(self.pre_ff_layernorm(x)), cache


class JambaModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: JambaConfig, dtype: DType):
        super().__init__()
        self.dtype = dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers: Any = LayerList(
            JambaBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.final_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x, cache = run_layers(self.layers, x, cache)
        return self.final_layernorm(x), cache


class Jamba(LanguageModel):
    """A Jamba language model.

    Example:
        >>> config = JambaConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2, num_experts=4,
        ...     mamba_d_state=6, attn_layer_period=3, attn_layer_offset=1)
        >>> cache = Jamba(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, {name: a.shape for name, a in cache.more["mamba"].arrays.items()}
        (1, {'conv': (2, 1, 3, 16), 'ssm': (2, 1, 16, 6)})
    """

    def __init__(self, config: JambaConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = JambaModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ----------------------------------------------------------------------------------


def _period(given: Settings, flags: Sequence[bool], what: str) -> tuple[int, int]:
    """Return the (period, offset) of the layers that have something; a period of all layers if none has."""
    places = [i for i, flag in enumerate(flags) if flag]
    period = places[1] - places[0] if len(places) > 1 else len(flags) + 1
    offset = places[0] if places else len(flags)
    if [i % period == offset for i in range(len(flags))] != list(flags):
        raise given.unsupported(f"a Jamba whose layers with {what} are not every n-th")
    return period, offset


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """Return the sizes of Mamba 1 and of the experts, and which layers have attention and experts."""
    names = {
        "rank": "mamba_dt_rank", "state": "mamba_d_state", "taps": "mamba_d_conv",
        "expand": "mamba_expand",
    }  # fmt: skip
    found: dict[str, Any] = {
        **read_selective_sizes(given, names), "mamba_proj_bias": has_tensor("ssm_in.bias", tensors),
        "mamba_conv_bias": has_tensor("ssm_conv1d.bias", tensors),
    }  # fmt: skip
    for kind, name in (("attn", "attn_q"), ("expert", "ffn_gate_inp")):
        has = [f"blk.{i}.{name}.weight" in tensors for i in range(config["num_hidden_layers"])]
        period, offset = _period(given, has, "attention" if kind == "attn" else "experts")
        found |= {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}
    if not has_tensor("ffn_gate_inp.weight", tensors):
        found |= {"num_experts": 1, "num_experts_per_tok": 1}
    return found


def _write_gguf(config: JambaConfig) -> dict[str, Any]:
    """Return further metadata; the numbers of KV heads say which layers have attention."""
    attends = [config.attends(layer) for layer in range(config.num_hidden_layers)]
    check_both_kinds([not one for one in attends], attends)
    return {
        **write_selective_sizes(
            taps=config.mamba_d_conv, state_size=config.mamba_d_state, rank=config.mamba_dt_rank,
            inner=config.inner_size, hidden=config.hidden_size, conv_bias=config.mamba_conv_bias,
            act=config.hidden_act,
        ),
        "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
    }  # fmt: skip


JAMBA_GGUF = GGUFTable(
    "jamba",
    {
        "output_norm": "model.final_layernorm", ".ffn_norm": "pre_ff_layernorm",
        **{f".ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **expert_names("feed_forward", "router"), **selective_names("mamba"),
        **{f".ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    },
    keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
    constants={"hidden_act": "silu"}, read=_read_gguf, write=_write_gguf, has_rope=False,
    is_square=True, written=SELECTIVE_KEYS, biases=("ssm_conv1d", "ssm_dt"),
    computed=("attn_layer_period", "attn_layer_offset", "expert_layer_period", "expert_layer_offset"),
)  # fmt: skip

_EXPERTS = "feed_forward.experts"
JAMBA = Jamba.family = Family.of(
    Jamba,
    JambaConfig,
    names=Names(
        FusedExperts(
            f"{_EXPERTS}.#.*.weight",
            gate_up=(f"{_EXPERTS}.gate_up_proj",),
            down=(f"{_EXPERTS}.down_proj",),
        ),
        ROPE_TABLES,
        Headless("model.", ("embed_tokens.", "layers.", "final_layernorm.")),
    ),
    gguf=JAMBA_GGUF,
)
