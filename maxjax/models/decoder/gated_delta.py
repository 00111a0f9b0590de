"""Linear attention by the gated delta rule, after a convolution (Qwen3-Next, Qwen 3.5).

Shapes: B sequences, T tokens, hidden size E, G heads of queries and keys, H heads of values (a multiple
of G), key width Dk, value width Dv, C = 2 G Dk + H Dv channels, K taps of the convolution.

Source: arXiv:2412.06464; transformers' ``Qwen3NextGatedDeltaNet``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...errors import UnsupportedModelError
from ...graph.device import DeviceRef
from ...graph.placement.arrays import replicate_last_axis
from ...graph.placement.specs import Split
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...graph.weight.weight import Weight
from ...kernels.delta_token import Delta, has_kernel, operation
from ...nn.activation import activation
from ...nn.kv_cache.kinds import KeysValues, Shared, State, States
from ...nn.kv_cache.recurrent import Recurrent
from ...nn.layer import hooks
from ...nn.linear import Linear, linear_rules
from ...nn.ssm.convolution import CausalConv, causal_conv
from ...nn.ssm.delta import delta_chunks, delta_step
from ..config import setting
from .attention import DecoderAttention
from .config import (
    DecoderConfig,
    all_but_every,
    check_kinds,
    count_of,
    kinds_of,
    layers_of,
    own,
)
from .mixer import GatedNorm, RecurrentMixer, gated_norm, recurrence

_KINDS = {"linear_attention": True, "full_attention": False}


@dataclass(frozen=True)
class GatedDeltaConfig(DecoderConfig):
    """The settings of a decoder with the gated delta rule in most layers.

    Attributes:
        linear_num_key_heads, linear_num_value_heads: G and H.
        linear_key_head_dim, linear_value_head_dim: Dk and Dv.
        linear_conv_kernel_dim: K.
        linear: whether each layer has the delta rule instead of attention; by default all but every
            fourth layer have.
    """

    linear_num_key_heads: int = setting(default=16, minimum=1, held="axis")
    linear_num_value_heads: int = setting(default=32, minimum=1, held="axis")
    linear_key_head_dim: int = setting(default=128, minimum=1, held="axis")
    linear_value_head_dim: int = setting(default=128, minimum=1, held="axis")
    linear_conv_kernel_dim: int = setting(default=4, minimum=2, held="axis")
    norm_offset: float = own(1.0)
    qk_norm: bool | str = own(True)
    linear: tuple = own(())

    def __post_init__(self) -> None:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"'linear_num_value_heads' {self.linear_num_value_heads} is not a multiple of "
                f"'linear_num_key_heads' {self.linear_num_key_heads}"
            )
        linear = tuple(self.linear) or all_but_every(4, self.num_hidden_layers)
        object.__setattr__(self, "linear", linear)
        check_kinds(linear, self.num_hidden_layers)
        super().__post_init__()

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        sparse = getattr(self, "sparse", ()) or (False,) * self.num_hidden_layers
        return tuple(zip(self.linear, sparse, strict=True))

    @property
    def channels(self) -> int:
        """C, the channels of the convolution."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """The state of the delta rule and the convolution's last inputs; or the keys and values of attention."""
        if not self.linear[number]:
            return super().states(number)
        return {GatedDelta.group: GatedDelta.kept(self)}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with the delta rule: as ``layer_types`` or ``full_attention_interval`` says.

        Raises:
            UnsupportedModelError: the attention of the model has no gate.
        """
        if raw.get("attn_output_gate") is False:
            raise UnsupportedModelError(f"'attn_output_gate' false of a {cls.model_type}")
        found = {**super().derived(raw), "sliding_window": None}
        default: tuple[bool, ...] = ()
        if raw.get("layer_types") is None:
            default = all_but_every(count_of(raw, "full_attention_interval", 4), layers_of(raw))
        return {**found, "linear": kinds_of(raw, _KINDS, default)}


class GatedAttention(DecoderAttention):
    """Attention whose heads' results are multiplied by a gate, which ``q_proj`` computes beside each query."""

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """:meth:`DecoderAttention.make_projections` with a ``q_proj`` twice as wide."""
        super().make_projections(config, dtype)
        width = 2 * self.num_heads * self.head_dim
        self.q_proj = Linear(
            config.hidden_size, width, dtype, DeviceRef.CPU(), has_bias=config.attention_bias
        )

    def heads(self, q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
        """``[..., heads · D]`` → queries, keys, values and gates ``[..., heads, D]``."""
        both = q.reshape(*q.shape[:-1], self.num_heads, 2, self.head_dim)
        flat = both[..., 0, :].reshape(*q.shape[:-1], -1)
        return [*super().heads(flat, k, v), both[..., 1, :]]

    def sharding_rules(self) -> dict[str, Any]:
        """:meth:`DecoderAttention.sharding_rules` with the gates beside the queries."""
        segment = Segment.head_aware(self.num_heads, 2 * self.head_dim)
        rule = linear_rules("q_proj", ShardingStrategy.segmented(1, 0, [segment]))
        return super().sharding_rules() | rule


class GatedDelta(RecurrentMixer):
    """The gated delta rule over convolved queries, keys and values, configured by a GatedDeltaConfig.

    A family defines :meth:`make_projections` and :meth:`project`, and the sharding rules of its
    projections.

    Attributes:
        conv1d: the convolution of queries, keys and values.
        A_log, dt_bias: Weights ``[H]`` from which the decay is computed.
        norm, out_proj: gated norm of each head, and output projection.
    """

    group: ClassVar[str] = "linear"

    def __init__(self, config: Any, dtype: DType):
        super().__init__(config)
        self.key_heads, self.value_heads = (
            config.linear_num_key_heads, config.linear_num_value_heads
        )  # fmt: skip
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.hidden_act = config.hidden_act
        self.make_projections(config.hidden_size, dtype)
        self.conv1d = CausalConv(config.channels, config.linear_conv_kernel_dim, dtype)
        self.A_log, self.dt_bias = (
            Weight(name, dtype, (self.value_heads,), DeviceRef.CPU())
            for name in ("A_log", "dt_bias")
        )
        self.norm = GatedNorm(self.value_dim, dtype, config.rms_norm_eps)
        self.out_proj = Linear(
            self.value_heads * self.value_dim, config.hidden_size, dtype, DeviceRef.CPU()
        )

    @classmethod
    def kept(cls, config: Any) -> States:
        """The state of the delta rule and the convolution's last inputs."""
        widths = config.linear_key_head_dim, config.linear_value_head_dim
        conv = State("conv", (config.linear_conv_kernel_dim - 1, config.channels), axis=1)
        return States((conv, State("delta", (config.linear_num_value_heads, *widths), axis=0)))

    def make_projections(self, size: int, dtype: DType) -> None:
        """Makes the linear layers that :meth:`project` uses."""
        raise NotImplementedError(f"{type(self).__name__} does not define make_projections")

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """``[B, T, E]`` → queries, keys and values ``[B, T, C]``, gate ``[B, T, H, Dv]``, and the logits
        of the share and of the decay, ``[B, T, H]``."""
        raise NotImplementedError(f"{type(self).__name__} does not define project")

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``out_proj`` between heads, and replicates the small weights."""
        rules: dict[str, Any] = linear_rules(
            "out_proj",
            ShardingStrategy.head_aware_columnwise(1, self.value_heads, self.value_dim),
        )
        whole = Split(ShardingStrategy.replicate(1))
        return rules | dict.fromkeys(("A_log", "dt_bias", "norm.weight"), whole)

    def mix(
        self, x: jax.Array, states: dict[str, jax.Array] | None, counts: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As :meth:`RecurrentMixer.mix`; the states are "conv" and "delta"."""
        mixed, *rest = self.project(x)
        # Shards of the projections do not end where queries, keys and values do.
        mixed = replicate_last_axis(mixed, self.out_proj.weight, 1)
        if states is None:
            heads = (x.shape[0], self.value_heads)
            delta = jnp.zeros((*heads, self.key_dim, self.value_dim), jnp.float32)
            states = {"delta": delta}
        parts = _LayerParts(self.conv1d, activation(self.hidden_act), self.norm, self.by_heads)
        rates = (jnp.asarray(self.A_log), jnp.asarray(self.dt_bias))
        y, new = _tokens(self.key_heads, [mixed, *rest], rates, states, counts, parts)
        return self.out_proj(y.reshape(*x.shape[:2], -1)), new

    def mix_in_place(
        self, x: jax.Array, states: Recurrent, number: Any, counts: jax.Array | None
    ) -> tuple[jax.Array, Recurrent] | None:
        """As :meth:`RecurrentMixer.mix_in_place`, without a mesh and without hooks, which need the separate steps."""
        names = ("conv", "delta")
        weights = (self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight)
        taps, *rest = map(jnp.asarray, weights)
        stacks = [states.arrays[name] for name in names]
        if (
            self._split(x.shape[0], self.value_heads)[0] is not None
            or self.hidden_act != "silu"
            or not hooks.is_plain()
            or not has_kernel([x, taps, *rest], stacks)
        ):
            return None
        projected = [a[:, 0] for a in self.project(x)]
        used = jnp.ones(x.shape[:1], jnp.int32) if counts is None else counts.astype(jnp.int32)
        operands = [*projected, taps[:, 0], *rest, *stacks, jnp.asarray(number, jnp.int32), used]
        y, *after = _OPERATION(operands, Delta(self.key_heads, self.norm.epsilon))
        y = self.out_proj(y.reshape(*x.shape[:2], -1))
        return y, Recurrent(dict(zip(names, after, strict=True)))


class _LayerParts(NamedTuple):
    """The operations of a layer between its projections.

    Attributes:
        conv: the convolution: inputs, last inputs and counts → results and last inputs.
        act: the activation function after it.
        norm: the norm: results and gates → results.
        by_heads: function that runs a recurrence, as :meth:`RecurrentMixer.by_heads`.
    """

    conv: Callable[..., Any]
    act: Callable[..., Any]
    norm: Callable[..., Any]
    by_heads: Callable[..., Any]


def _tokens(
    key_heads: int, projected: Sequence[jax.Array], rates: Sequence[jax.Array],
    states: Mapping[str, jax.Array], counts: jax.Array | None, parts: _LayerParts,
) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
    """Computes a layer between its projections: results ``[B, T, H, Dv]``, and the states after the tokens.

    Args:
        key_heads: G.
        projected: results of :meth:`GatedDelta.project`.
        rates: ``A_log`` and ``dt_bias``.
        states: "delta", and "conv" if there were tokens before.
        counts: as for :meth:`RecurrentMixer.mix`.
        parts: the operations between the projections.
    """
    mixed, gate, share, decay = projected
    batch, length, _ = mixed.shape
    dtype, delta = mixed.dtype, states["delta"]
    heads, key_dim = delta.shape[1:3]
    mixed, conv = parts.conv(mixed, states.get("conv"), counts)
    keys = key_heads * key_dim
    q, k, v = jnp.split(parts.act(mixed), (keys, 2 * keys), axis=-1)
    q, k = (a.reshape(batch, length, -1, key_dim) for a in (q, k))
    q, k = (jnp.repeat(_unit(a), heads // key_heads, axis=2) for a in (q, k))
    rate, offset = (w.astype(jnp.float32)[None, None] for w in rates)
    g = -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + offset)
    beta = jax.nn.sigmoid(share.astype(jnp.float32))
    if counts is not None:  # padding changes no state
        real = jnp.arange(length, dtype=jnp.int32)[None] < counts[:, None]
        g, beta = (jnp.where(real[..., None], a, 0) for a in (g, beta))
    operands = (q * key_dim**-0.5, k, v.reshape(batch, length, heads, -1), g, beta)
    y, delta = recurrence(parts.by_heads, delta_step, delta_chunks, operands, delta)
    return parts.norm(y, gate).astype(dtype), {"conv": conv, "delta": delta}


def _token(static: Delta, *operands: jax.Array) -> list[jax.Array]:
    """:func:`_tokens` for one token: the definition that the kernel in ``kernels/delta_token.py`` follows."""
    *projected, taps, rate, offset, weight, conv, delta, layer, used = operands
    states = Recurrent({"conv": conv, "delta": delta})
    parts = _LayerParts(
        lambda x, *rest: causal_conv(x, taps, None, *rest),
        jax.nn.silu,
        lambda y, gate: gated_norm(y, gate, weight, static.epsilon),
        lambda run, now, *_: run(*now),
    )
    y, new = _tokens(
        static.key_heads, [a[:, None] for a in projected], (rate, offset), states.at(layer), used, parts
    )  # fmt: skip
    y = jnp.where((used > 0)[:, None, None], y[:, 0], 0)
    return [y, *states.replaced(layer, new, used > 0).arrays.values()]


_OPERATION = operation(_token)


def _unit(x: jax.Array) -> jax.Array:
    """``x`` with its vectors along the last axis scaled to length 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
