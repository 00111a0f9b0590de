"""Gemma 4 (text): wider heads where all tokens are seen, embeddings of each layer, and shared keys and values.

The last layers keep no keys and values: they read those of the last layer of their kind (full or
sliding) before them. That sliding layer keeps all tokens, since the tokens of a prompt that later layers
look at are more than the window.

Source: transformers' ``modeling_gemma4``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import KeysValues, Shared, States
from ..nn.linear import Linear, linears
from .config import setting
from .decoder.attention import Cached, DecoderAttention, Step
from .decoder.block import DecoderLayer
from .decoder.config import own
from .decoder.model import Decoder, DecoderFamily, DecoderModel, make
from .decoder.norm import norm
from .decoder.rope import ropes_by_kind
from .gemma import Gemma3Config
from .multimodal import SIGHT

_FULL, _SLIDING = "full_attention", "sliding_attention"
# The group of the cache that has the sliding layer whose keys and values others read.
SHARED = "shared"


@dataclass(frozen=True)
class SharingConfig(Gemma3Config):
    """The settings of a Gemma with embeddings of each layer and shared keys and values.

    Attributes:
        num_kv_shared_layers: number of last layers that read the keys and values of others.
        hidden_size_per_layer_input: P, the width of the embeddings that each layer gets; 0: none.
        vocab_size_per_layer_input: number of those embeddings.
        shares: whether the layer reads another's keys and values; in the settings of one layer.
    """

    num_kv_shared_layers: int = setting(default=0)
    hidden_size_per_layer_input: int = setting(default=256, held="axis")
    vocab_size_per_layer_input: int = setting(default=262_144, minimum=1, held="axis")
    norm: str = own("wide_rms")
    norm_offset: float = own(0.0)
    shares: bool = own(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "query_scale", 1.0)
        kinds = set(self.slides[: self.first_sharing])
        if not 0 <= self.num_kv_shared_layers < self.num_layers or kinds != set(self.slides):
            raise ValueError(
                f"'num_kv_shared_layers' {self.num_kv_shared_layers} of {self.num_layers} layers: one of "
                "each kind must have keys and values of its own"
            )

    @property
    def first_sharing(self) -> int:
        """The first layer that reads the keys and values of another."""
        return self.num_layers - self.num_kv_shared_layers

    @classmethod
    def counted(cls, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], frozenset[str]]:
        """Without embeddings of each layer their number is not used."""
        raw, unused = super().counted(raw)
        if raw.get("hidden_size_per_layer_input") == 0:
            unused |= {"vocab_size_per_layer_input"}
        return raw, unused

    def of_layer(self, number: int) -> Self:
        """The settings of a layer, which say whether it shares."""
        return dataclasses.replace(self, shares=number >= self.first_sharing)

    def states(self, number: int) -> Mapping[str, KeysValues | States | Shared]:
        """Keys and values, of the layer or of the last of its kind that has its own."""
        near, one = self.slides[number], self.of_layer(number)
        kinds = self.slides[: self.first_sharing]
        source = max(i for i, kind in enumerate(kinds) if kind is near)
        is_read = self.num_kv_shared_layers > 0 and number == source
        if number >= self.first_sharing:
            return {SHARED if near else "full": Shared(source)}
        if near and not is_read:
            return {"sliding": KeysValues(one.kv_heads, one.width, self.sliding_window)}
        return {SHARED if near else "full": KeysValues(one.kv_heads, one.width)}


@dataclass(frozen=True)
class Gemma4Config(SharingConfig):
    """The settings of a Gemma 4's text model.

    Attributes:
        global_head_dim, num_global_kv_heads: width and number of the KV heads of layers that see all
            tokens.
        attention_k_eq_v: whether the values of those layers are their keys before norm and RoPE.
        use_double_wide_mlp: whether the MLPs of layers that share are twice as wide.
    """

    model_type = "gemma4_text"

    global_head_dim: int = setting(default=512, minimum=1, held="axis")
    num_global_kv_heads: int | None = setting(
        "num_global_key_value_heads", default=None, minimum=1, held="axis"
    )
    attention_k_eq_v: bool = setting(default=False)
    use_double_wide_mlp: bool = setting(default=False)
    may_see_both_ways: ClassVar[bool] = True
    use_bidirectional_attention: bool = own(False)

    @property
    def rope_widths(self) -> tuple[int, int]:
        """The widths of heads that see all tokens, and of the others."""
        return self.global_head_dim, self.width

    def of_layer(self, number: int) -> Self:
        """The settings of a layer: its heads, and the inner size of its MLP."""
        one = super().of_layer(number)
        if one.shares and self.use_double_wide_mlp:
            one = dataclasses.replace(one, intermediate_size=2 * self.intermediate_size)
        if self.slides[number]:
            return one
        heads = self.num_global_kv_heads if self.attention_k_eq_v else None
        return dataclasses.replace(
            one, head_dim=self.global_head_dim, num_kv_heads=heads or self.kv_heads
        )

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """The RoPE of each kind of layer."""
        default = {
            _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        }
        raw = {**raw, "rope_parameters": raw.get("rope_parameters") or default}
        found = ropes_by_kind(raw, context, {_FULL: 1e6, _SLIDING: 1e4})
        return {"rope": found[_FULL], "local_rope": found[_SLIDING]}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The sizes of single layers, as transformers writes them; the last layer sees all tokens."""
        if raw.get("enable_moe_block"):
            raise UnsupportedModelError("'enable_moe_block' of a gemma4_text")
        if raw.get("use_bidirectional_attention") == "all":
            raise UnsupportedModelError("'use_bidirectional_attention' of a gemma4_text")
        found = super().derived(raw)
        layers, slides = raw.get("num_hidden_layers"), found.get("slides")
        if not slides and type(layers) is int and 0 < layers <= 1000:
            slides = tuple(bool((i + 1) % 6) for i in range(layers))
        if slides:
            found["slides"] = (*slides[:-1], False)
        given = raw.get("per_layer_config")
        if given:
            if not isinstance(given, Mapping) or not all(
                isinstance(v, Mapping) for v in given.values()
            ):
                raise ValueError("'per_layer_config' is not an object of objects")
            own_sizes = next(iter(given.values()))
            names = {
                "head_dim": "global_head_dim",
                "num_key_value_heads": "num_global_key_value_heads",
            }
            full = {str(i) for i, near in enumerate(found.get("slides") or ()) if not near}
            if (
                set(own_sizes) - set(names)
                or any(v != own_sizes for v in given.values())
                or set(given) != full
            ):
                raise UnsupportedModelError(
                    "'per_layer_config' of other layers than those that see all"
                )
            found |= {names[key]: value for key, value in own_sizes.items()}
        return found


class SharingAttention(DecoderAttention):
    """Attention with normalised values, in some layers to the keys and values of another layer."""

    def make_projections(self, config: Any, dtype: DType) -> None:
        """Makes the projections; those of keys and values where the layer has its own."""
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
        """Queries, keys and values; only queries where another layer's keys and values are read."""
        names = ["q_proj", *([] if self.shares else ["k_proj", "v_proj"])]
        layers = [layer for name in names if (layer := getattr(self, name, None)) is not None]
        q, *kv = (
            y.astype(x.dtype).reshape(*y.shape[:-1], -1, self.head_dim) for y in linears(layers, x)
        )
        assert self.q_norm is not None
        q = self.q_norm(q)
        if self.k_norm is None:
            return [q, None, None]
        v = kv[-1].astype(jnp.float32)
        v = v * jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + self.epsilon)
        return [q, self.k_norm(kv[0]), v.astype(x.dtype)]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the projections that there are between heads."""
        rules = super().sharding_rules()
        return {n: rule for n, rule in rules.items() if hasattr(self, n.partition(".")[0])}


class SharingLayer(DecoderLayer):
    """A layer of a Gemma with embeddings of its own."""

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
        """Makes the attention, which knows where its keys and values are."""
        super().make_mixer(config, number, dtype)
        group = next(iter(config.states(number)))
        self.self_attn.cache_group = group if group == SHARED else None

    def own_input(self, x: jax.Array, step: Step, layer: Any) -> jax.Array:
        """What the layer's embeddings add to hidden states ``[..., E]``."""
        inputs = jax.lax.dynamic_index_in_dim(step.inputs, layer, keepdims=False)
        gate = activation(self.hidden_act)(self.per_layer_input_gate(x).astype(x.dtype))
        y = self.per_layer_projection(gate * inputs.astype(x.dtype)).astype(x.dtype)
        return self.post_per_layer_input_norm(y)


class Gemma4Layer(SharingLayer):
    """A layer of a Gemma 4, whose hidden states are multiplied by a number at its end."""

    def __init__(self, config: Any, number: int, dtype: DType):
        super().__init__(config, number, dtype)
        self.layer_scalar = Weight("layer_scalar", dtype, (1,), DeviceRef.CPU())

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = super().__call__(carry, step._replace(inputs=None), layer)
        if self.has_input:
            x = x + self.own_input(x, step, layer)
        return x * jnp.asarray(self.layer_scalar).astype(x.dtype)[0], cached


class SharingModel(DecoderModel):
    """Embeddings, of which each layer has its own, layers and final norm."""

    def __init__(self, config: Any, dtype: DType, layer_class: Any):
        super().__init__(config, dtype, layer_class)
        self.count, self.own_size = config.num_layers, config.hidden_size_per_layer_input
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
        """What each layer gets of tokens ``[B, T]`` with embeddings ``[B, T, E]``: ``[L, B, T, P]``."""
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
    """A Gemma whose last layers read the keys and values of others."""

    layer_class: ClassVar[Any] = SharingLayer
    model_class: ClassVar[Any] = SharingModel

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor is one of the keys and values of layers that read those of others."""
        parts = name.split(".")
        if len(parts) < 5 or parts[:2] != ["model", "layers"] or not parts[2].isdecimal():
            return False
        is_kv = parts[3] == "self_attn" and parts[4] in ("k_proj", "v_proj", "k_norm", "v_norm")
        config: Any = self.config
        return is_kv and config.first_sharing <= int(parts[2]) < config.num_layers


class Gemma4(SharingDecoder):
    """The text model of a Gemma 4.

    Example:
        >>> config = Gemma4Config(100, 8, 16, num_layers=6, num_heads=2, num_kv_heads=1, head_dim=4,
        ...     global_head_dim=6, hidden_size_per_layer_input=4, vocab_size_per_layer_input=100,
        ...     num_kv_shared_layers=2, slides=(True, True, False) * 2, sliding_window=8)
        >>> cache = Gemma4(config).cache(batch=1, capacity=16)
        >>> [(name, one.keys.shape) for name, one in sorted(cache.states.items())]
        [('full', (1, 1, 1, 16, 6)), ('shared', (1, 1, 1, 16, 4)), ('sliding', (2, 1, 1, 8, 4))]
    """

    layer_class: ClassVar[Any] = Gemma4Layer


GEMMA4 = Gemma4.family = DecoderFamily(
    model_type=Gemma4Config.model_type,
    architectures=("Gemma4ForCausalLM", "Gemma4TextModel"),
    config=Gemma4Config,
    make=make(Gemma4),
    sight=SIGHT,
)
