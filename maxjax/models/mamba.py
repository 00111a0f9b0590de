"""Mamba 1 and FalconMamba: layers with a recurrence whose decays depend on the token, without attention and MLP.

::

    x = embeddings[ids]
    in each layer:
        h = norm(x)
        u, z = in_proj(h)                                    inputs, gate
        u = silu(conv1d(u))                                  a causal convolution of each channel
        dt, b, c = x_proj(u)
        dt = softplus(dt_proj(dt))                           a time step for each channel
        s ← exp(-exp(A_log) dt) s + dt u b                   for each channel, token after token
        y = s · c + D u
        x = x + out_proj(y · silu(z))
    logits = lm_head(norm_f(x))

FalconMamba divides dt (before dt_proj), b and c by their root mean square.

Sources: arXiv:2312.00752 (Mamba), arXiv:2410.05355 (FalconMamba); transformers' ``modeling_mamba`` and
``modeling_falcon_mamba``.

Shapes: B sequences, T tokens, hidden size E, I channels, N features of the state of a channel, R features that time
steps are computed from, K taps. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

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
from .family import Family
from .gguf.config.read import Config, Shapes
from .gguf.metadata import Settings
from .gguf.ssm import (
    SELECTIVE_KEYS,
    has_tensor,
    read_selective_sizes,
    selective_names,
    write_selective_sizes,
)
from .gguf.table import GGUFTable
from .names import ROPE_TABLES, Headless, Names, Rename
from .parts import (
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    config_field,
    constant,
    layers,
    positive_integer,
    run_layers,
    size,
    split_features_over_mesh,
    unit_rms,
)
from .parts.aliases import alias
from .parts.mamba import read_time_step_rank, selective_states
from .parts.recurrent import automatic_axes, convolve, per_feature, selective_scan
from .unread import ReadTracker


def inner_size(raw: Mapping[str, Any]) -> Any:
    """Return ``intermediate_size`` of a file; ``expand`` times the hidden size if it is missing.

    Raises:
        ValueError: ``expand`` is not a positive integer.

    Example:
        >>> inner_size({"hidden_size": 16, "expand": 3})
        48
    """
    raw.get("expand")  # read in any case, so that no warning names it
    given, hidden = raw.get("intermediate_size"), raw.get("hidden_size")
    if given is not None or type(hidden) is not int:
        return given
    return positive_integer(raw, "expand", 2) * hidden


@dataclass(frozen=True)
class MambaConfig(LanguageModelConfig):
    """The settings of a Mamba, which has no maximum length of a text.

    Attributes:
        state_size, conv_kernel, time_step_rank: N, K and R; R is ``hidden_size / 16`` by default, rounded up.
        intermediate_size: I; ``2 * hidden_size`` by default.
        residual_in_fp32: whether residual sums are float32 for every dtype of the model.
        mixer_rms_eps: number added to the mean squares of time steps, b and c; None: these are not normalised.
    """

    model_type = "mamba"

    vocab_size: int = size(50280)
    hidden_size: int = size(768)
    num_hidden_layers: int = layers(32)
    state_size: int = size(16)
    conv_kernel: int = size(4, minimum=2)
    intermediate_size: int = size(default=None)
    time_step_rank: int = size(default=None)
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: str = "silu"
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    mixer_rms_eps: float | None = constant(None)
    max_position_embeddings: int = config_field(2**20, minimum=1)
    tie_word_embeddings: bool = True

    def _fill_in(self) -> None:
        if self.time_step_rank is None:
            self._set("time_step_rank", -(-self.hidden_size // 16))
        if self.intermediate_size is None:
            self._set("intermediate_size", 2 * self.hidden_size)
        super()._fill_in()

    def states(self, layer: int) -> Mapping[str, States]:
        """The last inputs of the convolution, and the state of each channel."""
        return selective_states(
            taps=self.conv_kernel, channels=self.intermediate_size, state_size=self.state_size
        )

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings to compare with the tensors, with the number of channels that they imply."""
        try:
            return {**raw, "intermediate_size": inner_size(raw)}
        except ValueError:  # from_dict reports it
            return raw

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which the rank of time steps may be "auto"."""
        raw = ReadTracker.of(raw)
        rank, inner = read_time_step_rank(raw, "time_step_rank"), inner_size(raw)
        found = {"time_step_rank": rank, "intermediate_size": inner}
        return super().from_hf(raw.replaced(found), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the channels also as a multiple of the hidden size."""
        expand, rest = divmod(self.intermediate_size, self.hidden_size)
        return super().to_hf() | ({} if rest else {"expand": expand})


@dataclass(frozen=True)
class FalconMambaConfig(MambaConfig):
    """The settings of a FalconMamba."""

    model_type = "falcon_mamba"

    mixer_rms_eps: float | None = 1e-6


class MambaMixer(Module):
    """The layer of Mamba 1: a convolution, and the recurrence whose time steps, b and c depend on its results."""

    def __init__(self, config: MambaConfig, dtype: DType):
        super().__init__()
        E, inner, N, R = (
            config.hidden_size, config.intermediate_size, config.state_size, config.time_step_rank
        )  # fmt: skip
        self.state_size, self.rank = N, R
        self.act, self.epsilon = config.hidden_act, config.mixer_rms_eps
        self.in_proj = Linear(E, 2 * inner, dtype, has_bias=config.use_bias)
        self.conv1d = CausalConv(inner, config.conv_kernel, dtype, config.use_conv_bias)
        self.x_proj = Linear(inner, R + 2 * N, dtype)
        self.dt_proj = Linear(R, inner, dtype, has_bias=True)
        self.A_log = Weight("A_log", dtype, (inner, N), DeviceRef.CPU())
        self.D = Weight("D", dtype, (inner,), DeviceRef.CPU())
        self.out_proj = Linear(inner, E, dtype, has_bias=config.use_bias)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y = self.in_proj(x).astype(x.dtype)  # [B, T, 2 I]
        # On a mesh, shards of the projection do not end where its halves do.
        u, z = jnp.split(replicate_last_axis(y, self.in_proj.weight, 0), 2, axis=-1)
        u, cache = convolve(self.conv1d, u, cache, "mamba")  # [B, T, I]
        u = activation(self.act)(u)
        y = self.x_proj(u.astype(x.dtype)).astype(jnp.float32)  # [B, T, R + 2 N]
        dt, b, c = jnp.split(y, (self.rank, self.rank + self.state_size), axis=-1)
        if self.epsilon is not None:
            dt, b, c = (unit_rms(v, self.epsilon) for v in (dt, b, c))
        dt = jax.nn.softplus(self.dt_proj(dt.astype(x.dtype)).astype(jnp.float32))  # [B, T, I]
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


class MambaBlock(Module):
    """One layer: the norm, which is computed in the dtype of the weights, and the mixer."""

    def __init__(self, config: MambaConfig, dtype: DType):
        super().__init__()
        self.dtype = dtype
        E, eps = config.hidden_size, config.layer_norm_epsilon
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mixer = MambaMixer(config, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y, cache = self.mixer(self.norm(x.astype(self.dtype.np)), cache)
        return x + y.astype(x.dtype), cache


class MambaModel(Module):
    """The model without its head: ``backbone`` in the files."""

    embed_tokens = alias("embeddings")

    def __init__(self, config: MambaConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.layer_norm_epsilon
        self.embeddings = Embedding(config.vocab_size, E, dtype)
        self.layers: Any = LayerList(
            MambaBlock(config, dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm_f = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embeddings(ids).astype(self.dtype.np)  # [B, T, E]
        if self.config.residual_in_fp32:
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        x, cache = run_layers(self.layers, x, cache)
        return self.norm_f(x.astype(self.dtype.np)), cache


class Mamba(LanguageModel):
    """A Mamba language model.

    Example:
        >>> config = MambaConfig(100, 8, num_hidden_layers=2, state_size=6)
        >>> cache = Mamba(config).cache(batch=1, capacity=16)
        >>> {name: a.shape for name, a in cache.more["mamba"].arrays.items()}
        {'conv': (2, 1, 3, 16), 'ssm': (2, 1, 16, 6)}
    """

    model = alias("backbone")

    def __init__(self, config: MambaConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.backbone = MambaModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


class FalconMamba(Mamba):
    """A FalconMamba language model."""


# --- GGUF files ----------------------------------------------------------------------------------

# What FalconMamba adds to mean squares, which GGUF files do not hold: llama.cpp adds the norms' epsilon.
_EPSILON = 1e-6


def _read_gguf(given: Settings, tensors: Shapes, config: Config) -> Config:
    """Return the sizes of a Mamba, which is a FalconMamba if its time steps, b and c are normalised."""
    names = {
        "rank": "time_step_rank", "state": "state_size", "taps": "conv_kernel",
        "inner": "intermediate_size",
    }  # fmt: skip
    found = {
        **read_selective_sizes(given, names), "use_bias": has_tensor("ssm_in.bias", tensors),
        "use_conv_bias": has_tensor("ssm_conv1d.bias", tensors),
    }  # fmt: skip
    if given.flag("ssm.dt_b_c_rms", False):
        kind = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
        found |= {**kind, "mixer_rms_eps": _EPSILON}
    return found


def _write_gguf(config: MambaConfig) -> dict[str, Any]:
    sizes = write_selective_sizes(
        taps=config.conv_kernel, state_size=config.state_size, rank=config.time_step_rank,
        inner=config.intermediate_size, hidden=config.hidden_size, conv_bias=config.use_conv_bias,
        act=config.hidden_act,
    )  # fmt: skip
    return {**sizes, "ssm.dt_b_c_rms": config.mixer_rms_eps is not None}


def new_names(config: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors with the embedding table's name in newer files."""
    old, new = "backbone.embedding.", "backbone.embeddings."
    return {name.replace(old, new): data for name, data in tensors.items()}


MAMBA_GGUF = GGUFTable(
    "mamba",
    {
        "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", ".attn_norm": "norm",
        **selective_names("mixer"),
        **{f".attn_{part}": None for part in ("q", "k", "v", "output")},
        **{f".ffn_{part}": None for part in ("norm", "gate", "up", "down")},
    },
    constants={"hidden_act": "silu", "residual_in_fp32": True}, read=_read_gguf, write=_write_gguf,
    split=new_names, written=(*SELECTIVE_KEYS, "ssm.dt_b_c_rms"), biases=("ssm_conv1d", "ssm_dt"),
    layer="backbone.layers.*.", attends=False, has_rope=False,
    epsilon=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
)  # fmt: skip

MAMBA = Mamba.family = Family.of(
    Mamba,
    MambaConfig,
    names=Names(
        ROPE_TABLES,
        Headless("backbone.", ("embeddings.", "layers.", "norm_f.")),
        Rename({"backbone.embedding.weight": "backbone.embeddings.weight"}),
    ),
    tied=("lm_head.weight", "backbone.embeddings.weight"),
    gguf=MAMBA_GGUF,
)
# The GGUF table of Mamba reads these files, too.
FALCON_MAMBA = FalconMamba.family = MAMBA.like(FalconMamba, FalconMambaConfig)
