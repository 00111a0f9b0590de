"""The layer of Mamba 2: one input projection, a convolution, the recurrence, and a gated norm.

Source: arXiv:2405.21060; transformers' ``Mamba2Mixer``.

Shapes: B sequences, T tokens, hidden size E, H heads of P features (I = H P), G groups of heads, N features of
the state, K taps, C = I + 2 G N channels of the convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.arrays import replicate_last_axis
from ...graph.placement.specs import Split
from ...graph.placement.strategy import ShardingStrategy
from ...graph.weight.weight import Weight
from ...kernels.ssd_token import has_kernel, operation
from ...nn.activation import activation
from ...nn.kv_cache.kinds import State, States
from ...nn.kv_cache.recurrent import Recurrent
from ...nn.linear import Linear, linear_rules
from ...nn.ssm.convolution import CausalConv
from ...nn.ssm.ssd import ssd_chunks, ssd_step
from ..config import setting
from .config import DecoderConfig, own
from .mixer import GatedNorm, RecurrentMixer, recurrence


@dataclass(frozen=True)
class Mamba2Settings:
    """The settings of a :class:`Mamba2Mixer`, which it reads from ``config.mamba``.

    Attributes:
        heads, head_dim, groups, state_size, taps: H, P, G, N and K.
        bias, conv_bias: whether the projections, and the convolution, have biases.
        out_bias: whether the output projection has a bias; by default as ``bias``.
        limits: minimum and maximum length of a time step.
        act: name of the activation function after the convolution.
        epsilon: epsilon of the norm.
        norm: place of the norm: "after" the gate, "before" it, or "none" for no norm.

    Raises:
        ValueError: the groups do not divide the heads evenly, or the limits are not a range.

    Example:
        >>> Mamba2Settings(heads=4, head_dim=8, groups=2, state_size=16, taps=4).channels
        96
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    limits: tuple[float, float] = (0.0, math.inf)
    act: str = "silu"
    epsilon: float = 1e-5
    norm: str = "after"
    out_bias: bool | None = None

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(
                f"{self.heads} heads of Mamba 2 do not divide into {self.groups} groups"
            )
        if not 0 <= self.limits[0] <= self.limits[1]:
            raise ValueError(f"'time_step_limit' {self.limits} is no range")

    @property
    def inner(self) -> int:
        """I, the features of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """C, the channels of the convolution."""
        return self.inner + 2 * self.groups * self.state_size


@dataclass(frozen=True)
class Mamba2Parts(DecoderConfig):
    """The settings of a decoder with Mamba 2 in some layers, or beside attention (Granite 4, Falcon-H1).

    Attributes:
        mamba_n_heads, mamba_d_head, mamba_n_groups, mamba_d_state, mamba_d_conv: H, P, G, N and K.
        time_steps: minimum and maximum length of a time step.
        mamba: the settings of a :class:`Mamba2Mixer`, from :meth:`make_mamba`.
    """

    mamba_n_heads: int = setting(default=128, minimum=1, held="axis")
    mamba_d_head: int = setting(default=64, minimum=1, held="axis")
    mamba_n_groups: int = setting(default=1, minimum=1, held="axis")
    mamba_d_state: int = setting(default=256, minimum=1, held="axis")
    mamba_d_conv: int = setting(default=4, minimum=2, held="axis")
    mamba_conv_bias: bool = setting(default=True)
    mamba_proj_bias: bool = setting(default=False)
    time_steps: tuple = own((0.0, float("inf")))

    def __post_init__(self) -> None:
        object.__setattr__(self, "mamba", self.make_mamba())
        super().__post_init__()

    def make_mamba(self) -> Mamba2Settings:
        """The settings of a mixer."""
        return Mamba2Settings(
            self.mamba_n_heads, self.mamba_d_head, self.mamba_n_groups, self.mamba_d_state,
            self.mamba_d_conv, self.mamba_proj_bias, self.mamba_conv_bias, self.time_steps,
            self.hidden_act, self.rms_norm_eps,
        )  # fmt: skip


def head_dim_of(raw: Mapping[str, Any], heads: int, inner: int | None = None) -> int:
    """``mamba_d_head`` of a ``config.json``; computed if it is missing or "auto".

    Args:
        raw: content of the file.
        heads: H, for a file without ``mamba_n_heads``.
        inner: I; by default ``mamba_expand`` times the hidden size.

    Raises:
        ValueError: a number is not a positive integer, or the heads do not divide I evenly.

    Example:
        >>> head_dim_of({"hidden_size": 16, "mamba_n_heads": 4, "mamba_d_head": "auto"}, 128)
        8
    """
    given, expand = raw.get("mamba_d_head"), raw.get("mamba_expand")
    if given not in (None, "auto"):
        return given
    count, size = (raw.get(key) for key in ("mamba_n_heads", "hidden_size"))
    count, expand = heads if count is None else count, 2 if expand is None else expand
    for key, one in (("mamba_expand", expand), ("mamba_n_heads", count), ("hidden_size", size)):
        if type(one) is not int or one < 1:
            raise ValueError(f"{key!r} is not a positive integer")
    inner = int(expand) * int(size or 0) if inner is None else inner
    if inner % count:
        raise ValueError(f"'mamba_n_heads' {count} does not divide {inner} features")
    return inner // count


def limits_of(raw: Mapping[str, Any], key: str = "time_step_limit") -> tuple[float, float]:
    """The minimum and maximum length of a time step in a ``config.json``; 0 and infinity by default.

    Raises:
        ValueError: the value is not a list of two numbers.

    Example:
        >>> limits_of({"time_step_limit": [0.1, 2]}), limits_of({})
        ((0.1, 2.0), (0.0, inf))
    """
    given = raw.get(key)
    if given is None:
        return (0.0, math.inf)
    # JSON has no number for infinity: transformers writes {"__float__": "Infinity"}, others a string.
    most = ({"__float__": "Infinity"}, "inf", "Infinity")
    found = [math.inf if one in most else one for one in given] if isinstance(given, list) else []
    if len(found) != 2 or not all(type(one) in (int, float) for one in found):
        raise ValueError(f"{key!r} is not a list of two numbers")
    return (float(found[0]), float(found[1]))


class Mamba2Mixer(RecurrentMixer):
    """Mamba 2's layer, configured by ``config.mamba``, a :class:`Mamba2Settings`.

    Attributes:
        in_proj: linear layer of gates ``[I]``, inputs of the convolution ``[C]`` and time steps ``[H]``.
        conv1d: the convolution of inputs, b and c.
        A_log, D, dt_bias: Weights ``[H]`` for the decay, the skip connection and the time steps.
        norm, out_proj: the gated norm, if there is one, and the output projection.
    """

    group: ClassVar[str] = "mamba"

    def __init__(self, config: Any, dtype: DType):
        super().__init__(config)
        self.settings = of = config.mamba
        size, cpu = config.hidden_size, DeviceRef.CPU()
        rows = of.inner + of.channels + of.heads
        self.in_proj = Linear(size, rows, dtype, cpu, has_bias=of.bias)
        self.conv1d = CausalConv(of.channels, of.taps, dtype, of.conv_bias)
        self.A_log, self.D, self.dt_bias = (
            Weight(name, dtype, (of.heads,), cpu) for name in ("A_log", "D", "dt_bias")
        )
        if of.norm != "none":
            self.norm = GatedNorm(of.inner, dtype, of.epsilon, of.groups, of.norm == "after")
        out_bias = of.bias if of.out_bias is None else of.out_bias
        self.out_proj = Linear(of.inner, size, dtype, cpu, has_bias=out_bias)

    @classmethod
    def kept(cls, config: Any) -> States:
        """The state of the recurrence and the convolution's last inputs."""
        of = config.mamba
        conv = State("conv", (of.taps - 1, of.channels), axis=1)
        return States((conv, State("ssm", (of.heads, of.head_dim, of.state_size), axis=0)))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``in_proj`` along its rows, and ``out_proj`` between heads."""
        columns = ShardingStrategy.head_aware_columnwise(
            1, self.settings.heads, self.settings.head_dim
        )
        rules = linear_rules("in_proj", ShardingStrategy.rowwise(1))
        whole = Split(ShardingStrategy.replicate(1))
        names = ["A_log", "D", "dt_bias"] + ["norm.weight"] * (self.settings.norm != "none")
        return rules | linear_rules("out_proj", columns) | dict.fromkeys(names, whole)

    def project(self, x: jax.Array) -> jax.Array:
        """``[B, T, E]`` → gates, inputs of the convolution, and time steps, ``[B, T, I + C + H]``."""
        # Shards of the projection do not end where its parts do.
        return replicate_last_axis(self.in_proj(x).astype(x.dtype), self.in_proj.weight, 0)

    def mix(
        self, x: jax.Array, states: dict[str, jax.Array] | None, counts: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As :meth:`RecurrentMixer.mix`; the states are "conv" and "ssm"."""
        of = self.settings
        if states is None:
            ssm = jnp.zeros((len(x), of.heads, of.head_dim, of.state_size), jnp.float32)
        else:
            ssm = states["ssm"]

        def recur(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            return recurrence(self.by_heads, ssd_step, ssd_chunks, operands, ssm)

        y, conv, after = self._around(x, None if states is None else states["conv"], counts, recur)
        return y, {"conv": conv, "ssm": after}

    def mix_in_place(
        self, x: jax.Array, states: Recurrent, number: Any, counts: jax.Array | None
    ) -> tuple[jax.Array, Recurrent] | None:
        """As :meth:`RecurrentMixer.mix_in_place`; there is no such way on a mesh."""
        batch, ssm = x.shape[0], states.arrays["ssm"]
        if self._split(batch, self.settings.heads)[0] is not None or not has_kernel(ssm):
            return None
        used = jnp.ones(batch, jnp.int32) if counts is None else counts.astype(jnp.int32)

        def recur(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
            now = [a[:, 0].astype(jnp.float32) for a in operands]
            y, after = _OPERATION([*now, ssm, jnp.asarray(number, jnp.int32), used], None)
            return y[:, None], after

        kept = Recurrent({"conv": states.arrays["conv"]})
        y, conv, after = self._around(x, kept.at(number)["conv"], counts, recur)
        kept = kept.replaced(number, {"conv": conv}, None if counts is None else counts > 0)
        return y, Recurrent({**kept.arrays, "ssm": after})

    def _around(
        self, x: jax.Array, last: jax.Array | None, counts: jax.Array | None,
        recur: Callable[..., tuple[jax.Array, jax.Array]],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """The layer's result, the convolution's last inputs, and the states that ``recur`` gives.

        Args:
            x, counts: as for :meth:`mix`.
            last: last inputs of the convolution before these tokens.
            recur: function that runs the recurrence: inputs, decays, b and c → results and states.
        """
        of, (batch, length, _) = self.settings, x.shape
        gate, mixed, steps = jnp.split(self.project(x), (of.inner, of.inner + of.channels), axis=-1)
        mixed, conv = self.conv1d(mixed, last, counts)
        mixed = activation(of.act)(mixed)
        ends = (of.inner, of.inner + of.groups * of.state_size)
        inputs, b, c = jnp.split(mixed, ends, axis=-1)
        inputs = inputs.reshape(batch, length, of.heads, of.head_dim)
        b, c = (a.reshape(batch, length, of.groups, of.state_size) for a in (b, c))
        if of.groups % self.parts(batch, of.heads):  # a group is split between devices
            b, c = (jnp.repeat(a, of.heads // of.groups, axis=2) for a in (b, c))
        rate, offset, skip = (
            jnp.asarray(w).astype(jnp.float32)[None, None]
            for w in (self.A_log, self.dt_bias, self.D)
        )
        steps = jnp.clip(jax.nn.softplus(steps.astype(jnp.float32) + offset), *of.limits)
        if counts is not None:  # padding changes no state
            real = jnp.arange(length, dtype=jnp.int32)[None] < counts[:, None]
            steps = jnp.where(real[..., None], steps, 0)
        y, ssm = recur(inputs * steps[..., None], steps * -jnp.exp(rate), b, c)
        y = (y + inputs * skip[..., None]).reshape(batch, length, -1)
        return self.out_proj(self.gated(y, gate).astype(x.dtype)), conv, ssm

    def gated(self, y: jax.Array, gate: jax.Array) -> jax.Array:
        """The heads' results ``[B, T, I]`` after the gate and the norm, in float32."""
        if self.settings.norm == "none":
            return y * jax.nn.silu(gate.astype(jnp.float32))
        return self.norm(y, gate)


def _token(_: None, *operands: jax.Array) -> list[jax.Array]:
    """One token of the recurrence: the definition that the kernel in ``kernels/ssd_token.py`` follows."""
    x, g, b, c, ssm, layer, used = operands
    states = Recurrent({"ssm": ssm})
    y, after = ssd_step(x, g, b, c, states.at(layer)["ssm"])
    y = jnp.where((used > 0)[:, None, None], y, 0)
    return [y, states.replaced(layer, {"ssm": after}, used > 0).arrays["ssm"]]


_OPERATION = operation(_token)
