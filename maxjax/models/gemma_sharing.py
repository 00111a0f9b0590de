"""What Gemma 3n and 4 have in common: per-layer embeddings, and last layers without own keys and values.

The last layers read the keys and values of the last layer of their kind (full or sliding) that has its
own. That sliding layer caches all tokens, since after a long prompt a rotating cache would no longer
hold the keys that the later layers need.

Source: transformers' ``modeling_gemma4``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import KeysValues, Shared, States
from ..nn.linear import Linear, linears
from .config import setting
from .decoder.attention import Cached, DecoderAttention, Step
from .decoder.block import DecoderLayer
from .decoder.config import own
from .decoder.model import BARE, Decoder, DecoderModel
from .decoder.norm import norm, unit_rms
from .gemma import Gemma3Config

# The cache group of the sliding layer whose keys and values other layers read.
SHARED = "shared"
# Files of a model without its head leave out the prefix of these tensors too.
BARE_OF_LAYERS = (BARE[0], (
    *BARE[1], "embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm.",
    "altup_projections.", "altup_unembed_projections.",
))  # fmt: skip


@dataclass(frozen=True)
class SharingConfig(Gemma3Config):
    """The settings of a Gemma with embeddings of each layer and shared keys and values.

    Attributes:
        num_kv_shared_layers: number of last layers that read the keys and values of other layers.
        hidden_size_per_layer_input: P, the width of the per-layer embeddings; 0: there are none.
        vocab_size_per_layer_input: number of rows of the table of per-layer embeddings.
        shares: whether the layer reads another's keys and values; only in settings from :meth:`of_layer`.
    """

    # transformers scales no queries here, whatever published files say.
    unused: ClassVar[Collection[str]] = (*Gemma3Config.unused, "query_pre_attn_scalar")
    num_kv_shared_layers: int = setting(default=0, held="layers")
    hidden_size_per_layer_input: int = setting(default=256, held="axis")
    vocab_size_per_layer_input: int = setting(default=262_144, minimum=1, held="axis")
    query_pre_attn_scalar: float = own(256.0)
    norm: str = own("wide_rms")
    norm_offset: float = own(0.0)
    shares: bool = own(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "query_scale", 1.0)
        kinds = set(self.slides[: self.first_sharing])
        if not 0 <= self.num_kv_shared_layers < self.num_hidden_layers or kinds != set(self.slides):
            raise ValueError(
                f"'num_kv_shared_layers' {self.num_kv_shared_layers} of {self.num_hidden_layers} layers: one of "
                "each kind must have keys and values of its own"
            )

    @property
    def first_sharing(self) -> int:
        """The first layer that reads the keys and values of another."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def layer_kinds(self) -> tuple[tuple[bool, bool], ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        return tuple((near, i >= self.first_sharing) for i, near in enumerate(self.slides))

    @classmethod
    def counted(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """:meth:`DecoderConfig.counted`; without per-layer embeddings their number is not compared."""
        raw, unused = super().counted(raw)
        if raw.get("hidden_size_per_layer_input") == 0:
            unused |= {"vocab_size_per_layer_input"}
        return raw, unused

    def of_layer(self, number: int) -> Self:
        """The settings of layer ``number``, with ``shares`` set."""
        return dataclasses.replace(self, shares=number >= self.first_sharing)

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """The keys and values of the layer, or a reference to the layer whose keys and values it reads."""
        near, one = self.slides[number], self.of_layer(number)
        heads = one.num_attention_heads
        kinds = self.slides[: self.first_sharing]
        source = max(i for i, kind in enumerate(kinds) if kind is near)
        is_read = self.num_kv_shared_layers > 0 and number == source
        if number >= self.first_sharing:
            return {SHARED if near else "full": Shared(source)}
        if near and not is_read:
            return {"sliding": KeysValues(one.kv_heads, one.width, self.sliding_window, heads)}
        return {SHARED if near else "full": KeysValues(one.kv_heads, one.width, None, heads)}


class SharingAttention(DecoderAttention):
    """Attention with normalised values, which in some layers reads the keys and values of another layer."""

    def make_projections(self, config: Any, dtype: DType) -> None:
        """Makes the projections; of keys and values only if the layer has its own."""
        self.shares, self.epsilon = config.shares, config.rms_norm_eps
        self.values_are_keys = getattr(config, "attention_k_eq_v", False) and self.rope == "global"
        size, width, bias = config.hidden_size, config.width, config.attention_bias

        def linear(in_dim: int, out_dim: int) -> Linear:
            return Linear(in_dim, out_dim, dtype, DeviceRef.CPU(), has_bias=bias)

        self.q_proj = linear(size, self.num_heads * width)
        self.q_norm = norm(config, dtype, width)
        if not self.shares:
            self.k_norm = norm(config, dtype, width)
            self.k_proj = linear(size, self.num_kv_heads * width)
            if not self.values_are_keys:
                self.v_proj = linear(size, self.num_kv_heads * width)
        self.o_proj = linear(self.num_heads * width, size)

    def project(self, x: jax.Array) -> list[Any]:
        """Queries, keys and values; only queries (and None twice) if another layer's keys and values are read."""
        names = ["q_proj", *([] if self.shares else ["k_proj", "v_proj"])]
        layers = [layer for name in names if (layer := getattr(self, name, None)) is not None]
        q, *kv = (
            y.astype(x.dtype).reshape(*y.shape[:-1], -1, self.head_dim) for y in linears(layers, x)
        )
        assert self.q_norm is not None
        q = self.q_norm(q)
        if self.k_norm is None:
            return [q, None, None]
        v = unit_rms(kv[-1].astype(jnp.float32), self.epsilon)
        return [q, self.k_norm(kv[0]), v.astype(x.dtype)]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the layer's projections between heads."""
        rules = super().sharding_rules()
        return {n: rule for n, rule in rules.items() if hasattr(self, n.partition(".")[0])}


class SharingLayer(DecoderLayer):
    """A layer with per-layer embeddings."""

    attention_class: ClassVar[Any] = SharingAttention

    def __init__(self, config: Any, number: int, dtype: DType):
        super().__init__(config, number, dtype)
        size, own_size = config.hidden_size, config.hidden_size_per_layer_input
        self.hidden_act, self.has_input = config.hidden_act, bool(own_size)
        if own_size:
            self.per_layer_input_gate = Linear(size, own_size, dtype, DeviceRef.CPU())
            self.per_layer_projection = Linear(own_size, size, dtype, DeviceRef.CPU())
            self.post_per_layer_input_norm = norm(config, dtype)

    def make_mixer(self, config: Any, number: int, dtype: DType) -> None:
        """Makes the attention, and sets the cache group of its keys and values."""
        super().make_mixer(config, number, dtype)
        group = next(iter(config.states(number)))
        self.self_attn.cache_group = group if group == SHARED else None

    def own_input(self, x: jax.Array, step: Step, layer: Any) -> jax.Array:
        """The term that the layer's embeddings add to hidden states ``x``, ``[..., E]``."""
        inputs = jax.lax.dynamic_index_in_dim(step.inputs, layer, keepdims=False)
        gate = activation(self.hidden_act)(self.per_layer_input_gate(x).astype(x.dtype))
        y = self.per_layer_projection(gate * inputs.astype(x.dtype)).astype(x.dtype)
        return self.post_per_layer_input_norm(y)


class SharingModel(DecoderModel):
    """Token embeddings, per-layer embeddings, layers and final norm."""

    def __init__(self, config: Any, dtype: DType, layer_class: Any):
        super().__init__(config, dtype, layer_class)
        self.count, self.own_size = config.num_hidden_layers, config.hidden_size_per_layer_input
        self.size = config.hidden_size
        if self.own_size:
            every, cpu = self.count * self.own_size, DeviceRef.CPU()
            self.entries = entries = config.vocab_size_per_layer_input
            self.embed_tokens_per_layer = Embedding(entries, every, dtype, cpu)
            self.per_layer_model_projection = Linear(self.size, every, dtype, cpu)
            self.per_layer_projection_norm = norm(config, dtype, self.own_size)

    def __call__(
        self, ids: jax.Array, step: Step, cached: Cached, at: jax.Array | None = None
    ) -> tuple[jax.Array, Cached]:
        """:meth:`DecoderModel.__call__` with an input for each layer."""
        if self.own_size:
            step = step._replace(inputs=self.inputs(ids, self.embed(ids, step)))
        return super().__call__(ids, step, cached, at)

    def inputs(self, ids: jax.Array, x: jax.Array) -> jax.Array:
        """The inputs ``[L, B, T, P]`` of all layers, from token ids ``[B, T]`` and their embeddings ``[B, T, E]``."""
        apart = lambda y: y.astype(x.dtype).reshape(*ids.shape, self.count, self.own_size)
        known = (ids >= 0) & (ids < self.entries)
        own = apart(self.embed_tokens_per_layer(jnp.where(known, ids, 0)))
        own = own * jnp.asarray(self.own_size**0.5, x.dtype)
        projected = apart(self.per_layer_model_projection(x)) * jnp.asarray(
            self.size**-0.5, x.dtype
        )
        both = (self.per_layer_projection_norm(projected) + own) * jnp.asarray(2**-0.5, x.dtype)
        return jnp.moveaxis(both, -2, 0)


class SharingDecoder(Decoder):
    """A Gemma whose last layers read the keys and values of other layers."""

    layer_class: ClassVar[Any] = SharingLayer
    model_class: ClassVar[Any] = SharingModel

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor belongs to keys or values of a layer that reads those of another layer."""
        parts = name.split(".")
        if len(parts) < 5 or parts[:2] != ["model", "layers"] or not parts[2].isdecimal():
            return False
        is_kv = parts[3] == "self_attn" and parts[4] in ("k_proj", "v_proj", "k_norm", "v_norm")
        config: Any = self.config
        return is_kv and config.first_sharing <= int(parts[2]) < config.num_hidden_layers
