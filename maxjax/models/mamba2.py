"""Mamba 2 (also Codestral Mamba): layers with a recurrence, without attention and MLP.

::

    x = embeddings[ids]
    in each layer:
        h = norm(x)
        z, u, dt = in_proj(h)                                gate, inputs, time steps
        u, b, c = silu(conv1d(u))                            a causal convolution of each channel
        dt = clip(softplus(dt + dt_bias))
        S ← exp(-exp(A_log) dt) S + (dt u) ⊗ b               for each head, token after token
        y = S c + D u
        x = x + out_proj(norm(y · silu(z)))
    logits = lm_head(norm_f(x))

Source: arXiv:2405.21060; transformers' ``modeling_mamba2``.

Shapes: B sequences, T tokens, hidden size E, H heads of P features (I = H P), G groups of heads, N features of the
state, K taps, C = I + 2 G N channels of the convolution. A decode step, with one token per sequence, has no axis T.
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
from ..graph.placement.arrays import replicate_last_axis
from ..graph.placement.split import REPLICATED, ROWS
from ..graph.weight.weight import Weight
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import States
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from ..nn.norm import RMSNorm
from ..nn.ssm.convolution import CausalConv
from ..nn.ssm.gated_norm import GatedNorm
from .family import Family
from .gguf.config.read import Config, Shapes
from .gguf.metadata import Settings
from .gguf.ssm import SSM_KEYS, has_tensor, read_ssm_sizes, ssm_names, write_ssm_sizes
from .gguf.table import GGUFTable
from .mamba import new_names
from .names import ROPE_TABLES, Headless, Names, Rename
from .parts import (
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    config_field,
    layers,
    merge_heads,
    run_layers,
    size,
    split_heads,
    split_heads_over_mesh,
)
from .parts.aliases import alias
from .parts.mamba import check_mamba, mamba_states, read_time_step_limit, write_time_step_limit
from .parts.recurrent import automatic_axes, convolve, per_feature, ssd
from .unread import ReadTracker


@dataclass(frozen=True)
class Mamba2Config(LanguageModelConfig):
    """The settings of a Mamba 2. It has no positions: ``max_position_embeddings`` only bounds the length of a text.

    Attributes:
        num_heads, head_dim, n_groups, state_size, conv_kernel: H, P, G, N and K.
        time_step_limit: minimum and maximum length of a time step.
        residual_in_fp32: whether residual sums are float32 for every dtype of the model.
    """

    model_type = "mamba2"

    vocab_size: int = size(32768)
    hidden_size: int = size(4096)
    num_hidden_layers: int = layers(64)
    num_heads: int = size(128)
    head_dim: int = size(64)
    n_groups: int = size(8)
    state_size: int = size(128)
    conv_kernel: int = size(4, minimum=2)
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    time_step_limit: tuple[float, ...] = (0.0, math.inf)
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    max_position_embeddings: int = config_field(2**20, minimum=1)
    tie_word_embeddings: bool = False

    def _check(self) -> None:
        check_mamba(self.num_heads, self.n_groups, self.time_step_limit)
        super()._check()

    @property
    def inner_size(self) -> int:
        """I, the features of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """C, the channels of the convolution."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    def states(self, layer: int) -> Mapping[str, States]:
        """The last inputs of the convolution, and the state of each head."""
        return mamba_states(
            taps=self.conv_kernel, channels=self.channels, heads=self.num_heads,
            head_dim=self.head_dim, state_size=self.state_size,
        )  # fmt: skip

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which infinity as a limit of time steps has several spellings."""
        raw = ReadTracker.of(raw)
        return super().from_hf(raw, time_step_limit=read_time_step_limit(raw), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the features as a multiple of the hidden size, and the limits of time steps."""
        found = super().to_hf()
        del found["time_step_limit"]
        expand, rest = divmod(self.inner_size, self.hidden_size)
        found |= {} if rest else {"expand": expand}
        return {**found, **write_time_step_limit(self.time_step_limit)}


class Mamba2Mixer(Module):
    """The layer of Mamba 2: one input projection, a convolution, the recurrence, and a gated norm."""

    def __init__(self, config: Mamba2Config, dtype: DType):
        super().__init__()
        H, G = config.num_heads, config.n_groups
        self.heads, self.head_dim = H, config.head_dim
        self.groups, self.state_size = G, config.state_size
        E, inner, channels = config.hidden_size, config.inner_size, config.channels
        self.act, self.time_step_limit = config.hidden_act, config.time_step_limit
        self.in_proj = Linear(E, inner + channels + H, dtype, has_bias=config.use_bias)
        self.conv1d = CausalConv(channels, config.conv_kernel, dtype, config.use_conv_bias)
        self.A_log, self.D, self.dt_bias = (
            Weight(name, dtype, (H,), DeviceRef.CPU()) for name in ("A_log", "D", "dt_bias")
        )
        self.norm = GatedNorm(inner, dtype, config.layer_norm_epsilon, G, gate_first=True)
        self.out_proj = Linear(inner, E, dtype, has_bias=config.use_bias)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        inner, group = self.heads * self.head_dim, self.groups * self.state_size  # I, G N
        y = self.in_proj(x).astype(x.dtype)  # [B, T, I + C + H]
        # On a mesh, the borders between z, u and dt lie inside shards.
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
        """Return the rules that split ``in_proj`` along its rows, and ``out_proj`` between heads."""
        return {
            "in_proj": ROWS,
            **split_heads_over_mesh({}, {"out_proj": self.heads}, self.head_dim),
            **dict.fromkeys(["A_log", "D", "dt_bias", "norm.weight"], REPLICATED),
        }


class Mamba2Block(Module):
    """One layer: the norm, of the hidden states in the dtype of the weights, and the mixer."""

    def __init__(self, config: Mamba2Config, dtype: DType):
        super().__init__()
        self.dtype = dtype
        self.norm = RMSNorm(
            config.hidden_size, dtype, config.layer_norm_epsilon, multiply_before_cast=False
        )
        self.mixer = Mamba2Mixer(config, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y, cache = self.mixer(self.norm(x.astype(self.dtype.np)), cache)
        return x + y.astype(x.dtype), cache


class Mamba2Model(Module):
    """The model without the head; its tensors are named ``backbone.*``."""

    embed_tokens = alias("embeddings")  # the name by which LanguageModel knows it

    def __init__(self, config: Mamba2Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embeddings = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers: Any = LayerList(
            Mamba2Block(config, dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm_f = RMSNorm(
            config.hidden_size, dtype, config.layer_norm_epsilon, multiply_before_cast=False
        )

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embeddings(ids).astype(self.dtype.np)  # [B, T, E]
        if self.config.residual_in_fp32:
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x, cache = run_layers(self.layers, x, cache)
        return self.norm_f(x.astype(self.dtype.np)), cache


class Mamba2(LanguageModel):
    """A Mamba 2 language model.

    Example:
        >>> config = Mamba2Config(100, 8, num_hidden_layers=2, num_heads=4, head_dim=4, n_groups=2, state_size=6)
        >>> cache = Mamba2(config).cache(batch=1, capacity=16)
        >>> {name: a.shape for name, a in cache.more["mamba"].arrays.items()}
        {'conv': (2, 1, 3, 40), 'ssm': (2, 1, 4, 4, 6)}
    """

    model = alias("backbone")

    def __init__(self, config: Mamba2Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.backbone = Mamba2Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ----------------------------------------------------------------------------------


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """Return the sizes of Mamba 2 in a file, and which biases it has."""
    names = {
        "heads": "num_heads", "width": "head_dim", "groups": "n_groups", "state": "state_size",
        "taps": "conv_kernel", "expand": "expand",
    }  # fmt: skip
    return {
        **read_ssm_sizes(given, names), "use_bias": has_tensor("ssm_in.bias", tensors),
        "use_conv_bias": has_tensor("ssm_conv1d.bias", tensors),
    }  # fmt: skip


def _write_gguf(config: Mamba2Config) -> dict[str, Any]:
    return write_ssm_sizes(
        taps=config.conv_kernel, state_size=config.state_size, groups=config.n_groups,
        heads=config.num_heads, inner=config.inner_size, conv_bias=config.use_conv_bias,
        act=config.hidden_act, limit=config.time_step_limit,
    )  # fmt: skip


MAMBA2_GGUF = GGUFTable(
    "mamba2",
    {
        "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", ".attn_norm": "norm",
        **ssm_names("mixer"),
        **{f".attn_{part}": None for part in ("q", "k", "v", "output")},
        **{f".ffn_{part}": None for part in ("norm", "gate", "up", "down")},
    },
    constants={"hidden_act": "silu", "residual_in_fp32": True}, read=_read_gguf, write=_write_gguf,
    split=new_names, written=SSM_KEYS, biases=("ssm_conv1d", "ssm_dt"), layer="backbone.layers.*.",
    attends=False, has_rope=False, epsilon=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
)  # fmt: skip

MAMBA2 = Mamba2.family = Family.of(
    Mamba2,
    Mamba2Config,
    names=Names(
        ROPE_TABLES,
        Headless("backbone.", ("embeddings.", "layers.", "norm_f.")),
        Rename({"backbone.embedding.weight": "backbone.embeddings.weight"}),
    ),
    tied=("lm_head.weight", "backbone.embeddings.weight"),
    gguf=MAMBA2_GGUF,
)
