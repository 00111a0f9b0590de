"""What Gemma 3n and 4 have in common: per-layer embeddings, and last layers without own keys and values.

The last layers read the keys and values of the last layer of their kind (full or sliding) that has its
own. That sliding layer caches all tokens, since after a long prompt a rotating cache would no longer
hold the keys that the later layers need.

Source: transformers' ``modeling_gemma4``.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import CheckpointFormatError, UnsupportedModelError
from ..graph.device import DeviceRef
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import KeysValues, Shared, States
from ..nn.linear import Linear, linears
from .config import setting
from .decoder.attention import Cached, DecoderAttention, Step
from .decoder.block import DecoderLayer
from .decoder.config import DecoderConfig, all_but_every, own, slides_of
from .decoder.model import BARE, Decoder, DecoderModel
from .decoder.norm import norm, unit_rms
from .parts.rotary import Rope, both_ropes

_GELU = "gelu_pytorch_tanh"
# transformers' defaults for Gemma 3's base frequencies.
_THETA, _LOCAL_THETA = 1e6, 1e4


@dataclass(frozen=True)
class _GemmaConfig(DecoderConfig):
    """The settings of a Gemma, with Hugging Face's defaults for missing keys.

    ``embedding_scale`` is always computed from ``hidden_size``; a value that is passed is ignored.

    Raises:
        UnsupportedModelError: a file sets bidirectional attention, which only Gemma 3 has.
    """

    fixed = {"mlp_bias": False, "sliding_window": None}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 16}
    may_see_both_ways: ClassVar[bool] = False

    head_dim: int | None = setting(default=256, minimum=1, held="axis")
    max_position_embeddings: int = setting(default=8192, minimum=1)
    hidden_act: str = setting(default=_GELU)
    tie_word_embeddings: bool = setting(default=True)
    norm_offset: float = own(1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "embedding_scale", self.hidden_size**0.5)
        super().__post_init__()

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The activation function; files with bidirectional attention may be refused."""
        if raw.get("use_bidirectional_attention") and not cls.may_see_both_ways:
            raise UnsupportedModelError(
                "'use_bidirectional_attention': only causal attention is supported"
            )
        # The first releases say "gelu" and mean its tanh approximation.
        act = _GELU if raw.get("hidden_act") == "gelu" else raw.get("hidden_act")
        return {"hidden_act": act}


@dataclass(frozen=True)
class _Gemma2Config(_GemmaConfig):
    """The settings of a Gemma 2: every other layer has the sliding window, starting with the first.

    Attributes:
        query_pre_attn_scalar: number by whose square root queries are divided; ``query_scale`` is
            computed from it.

    Raises:
        ValueError: layers have a sliding window, and ``sliding_window`` is None.
    """

    fixed = {"mlp_bias": False}

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4}
    # Fields that null in a file sets to None; without the key they keep their defaults.
    taken_away: ClassVar[Mapping[str, str]] = {
        "attn_logit_softcapping": "attn_soft_cap",
        "final_logit_softcapping": "logit_soft_cap",
        "sliding_window": "sliding_window",
    }

    hidden_act: str = setting("hidden_activation", default=_GELU)
    sliding_window: int | None = setting(default=4096, minimum=1)
    attn_soft_cap: float | None = setting("attn_logit_softcapping", default=50.0, minimum=1e-3)
    logit_soft_cap: float | None = setting("final_logit_softcapping", default=30.0, minimum=1e-3)
    query_pre_attn_scalar: float = setting(default=256.0, minimum=1e-3)
    post_norms: bool = own(True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "query_scale", self.query_pre_attn_scalar**-0.5)
        if not self.slides:
            object.__setattr__(self, "slides", all_but_every(self.period, self.num_hidden_layers))
        if not any(self.slides):  # A window that no layer uses is dropped.
            object.__setattr__(self, "sliding_window", None)
        super().__post_init__()

    @property
    def period(self) -> int:
        """n, where every n-th layer has full attention, unless ``layer_types`` lists the layers."""
        return 2

    @classmethod
    def from_dict(
        cls, raw: Mapping[str, Any], *, path: str | os.PathLike[str] | None = None
    ) -> Self:
        """:meth:`DecoderConfig.from_dict`, in which null means no soft cap and no window."""
        found = super().from_dict(raw, path=path)
        taken = [field for key, field in cls.taken_away.items() if raw.get(key, 0) is None]
        try:
            return dataclasses.replace(found, **dict.fromkeys(taken))
        except ValueError as error:
            raise CheckpointFormatError(str(error), path=path) from None

    def spelled(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The scale of queries as an integer, which transformers requires if it is one."""
        scale = raw.get("query_pre_attn_scalar")
        return raw if scale is None else {**raw, "query_pre_attn_scalar": int(scale)}

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with a sliding window, if the file lists them."""
        super().derived(raw)  # it refuses some files
        return {"slides": slides_of(raw, ())}


@dataclass(frozen=True)
class _Gemma3Config(_Gemma2Config):
    """The settings of a Gemma 3's text model: all but every sixth layer have the sliding window.

    Attributes:
        sliding_window_pattern: n, where every n-th layer has full attention, unless ``layer_types``
            lists the layers.
        local_rope: RoPE of the layers with the sliding window.
        use_bidirectional_attention: whether tokens also attend to those after them, as in
            EmbeddingGemma (arXiv:2509.20354); half of the sliding window is then on each side.
    """

    # Published multimodal files leave out many settings of the text model.
    unsaid: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip

    may_see_both_ways: ClassVar[bool] = True

    max_position_embeddings: int = setting(default=131_072, minimum=1)
    sliding_window_pattern: int = setting(default=6, minimum=1, maximum=1000)
    use_bidirectional_attention: bool = setting(default=False)
    # transformers reads this key too, but never uses it.
    unused: ClassVar[Collection[str]] = ("attn_logit_softcapping",)
    attn_soft_cap: float | None = own(None)
    logit_soft_cap: float | None = setting("final_logit_softcapping", default=None, minimum=1e-3)
    qk_norm: bool = own(True)
    rope: Rope = own(Rope(_THETA))
    local_rope: Rope | None = own(Rope(_LOCAL_THETA))

    @property
    def period(self) -> int:
        """``sliding_window_pattern``."""
        return self.sliding_window_pattern

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """The RoPE of layers with full attention and that of sliding layers, in both spellings."""
        return both_ropes(raw, context, _THETA, _LOCAL_THETA, "rope_local_base_freq")


# The cache group of the sliding layer whose keys and values other layers read.
SHARED = "shared"
# Files of a model without its head leave out the prefix of these tensors too.
BARE_OF_LAYERS = (BARE[0], (
    *BARE[1], "embed_tokens_per_layer.", "per_layer_model_projection.", "per_layer_projection_norm.",
    "altup_projections.", "altup_unembed_projections.",
))  # fmt: skip


@dataclass(frozen=True)
class SharingConfig(_Gemma3Config):
    """The settings of a Gemma with embeddings of each layer and shared keys and values.

    Attributes:
        num_kv_shared_layers: number of last layers that read the keys and values of other layers.
        hidden_size_per_layer_input: P, the width of the per-layer embeddings; 0: there are none.
        vocab_size_per_layer_input: number of rows of the table of per-layer embeddings.
        shares: whether the layer reads another's keys and values; only in settings from :meth:`of_layer`.
    """

    # transformers scales no queries here, whatever published files say.
    unused: ClassVar[Collection[str]] = (*_Gemma3Config.unused, "query_pre_attn_scalar")
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
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """:meth:`ModelConfig.bounded_sizes`; without per-layer embeddings their number is not compared."""
        raw = super().bounded_sizes(raw)
        if raw.get("hidden_size_per_layer_input") == 0:
            return {key: raw[key] for key in raw if key != "vocab_size_per_layer_input"}
        return raw

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

    def __init__(self, config: Any, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype, stacked=stacked)
        self.unused_tensors = tuple(
            f"model.layers.{layer}.self_attn.{part}.*"
            for layer in range(config.first_sharing, config.num_hidden_layers)
            for part in ("k_proj", "v_proj", "k_norm", "v_norm")
        )
