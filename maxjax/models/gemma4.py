"""Gemma 4 (text): wider heads in layers with full attention, an input of its own for each layer, shared keys and
values, and in some sizes experts beside the MLP.

::

    x = √E · embed_tokens[ids]
    p = (norm(per_layer_model_projection(x) / √E) + √P · embed_tokens_per_layer[ids]) / √2       an input of each layer
    in each layer:
        x = x + post_attention_layernorm(attention(input_layernorm(x)))
        y = mlp(pre_feedforward_layernorm(x))
        with experts: y = post_feedforward_layernorm_1(y)
                        + post_feedforward_layernorm_2(moe(pre_feedforward_layernorm_2(x), scored by x))
        x = x + post_feedforward_layernorm(y)
        x = x + norm(per_layer_projection(gelu(per_layer_input_gate(x)) · p[layer]))
        x = layer_scalar · x
    logits = cap · tanh(lm_head(norm(x)) / cap)

Queries, keys and values are normalised, and scores are not scaled. The last layers attend to the keys and values of an
earlier one.

Source: transformers' ``modeling_gemma4``.

Shapes: B sequences with T tokens, hidden size E, H query heads, K key-value heads, head width D, F inner features,
L layers, P features of a layer's input, X experts of which a token chooses k. A decode step, with one token per
sequence, has no axis T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from ..nn.kv_cache.kinds import KeysValues
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gemma3n import (
    ENTRIES,
    KEYS,
    NAMES,
    check_for_llama_cpp,
    check_sharing,
    count_entries,
    cut_table,
    fill_table,
    shared_kv_tensors,
)
from .gguf.metadata import MAX_EXPERTS, Settings, unsupported
from .gguf.names import Rule, expert_names
from .gguf.table import GGUFTable
from .names import DECODER, Headless, Names, Rename
from .parts import (
    CAUSAL,
    FULL,
    SHARED,
    SLIDING,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Proportional,
    Rope,
    attend,
    config_field,
    kept_or_shared,
    layer_count,
    layers,
    merge_heads,
    rope,
    ropes_by_kind,
    ropes_to_hf,
    run_layers,
    size,
    sliding,
    soft_cap,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    unit_rms,
    with_defaults,
)

_GELU = "gelu_pytorch_tanh"
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# Keys of sizes of layers with full attention: in ``per_layer_config`` → at the top level of older files.
_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


@dataclass(frozen=True)
class Gemma4Config(LanguageModelConfig):
    """The settings of a Gemma 4's text model: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        num_key_value_heads, head_dim: K and D of layers with a sliding window.
        global_head_dim, num_global_key_value_heads: D of layers with full attention, and K if their keys are also
            their values; None: as in the others.
        attention_k_eq_v: whether the values of those layers are their keys before norm and RoPE.
        rope_parameters, local_rope_parameters: the rotary position embeddings of layers with full attention, and of
            those with a sliding window.
        layer_types: "full_attention" or "sliding_attention" for each layer; by default every sixth has full
            attention, and so has the last layer of a file in any case.
        num_kv_shared_layers: number of last layers that attend to the keys and values of another layer.
        use_double_wide_mlp: whether MLPs are twice as wide in those layers.
        hidden_size_per_layer_input: P, the width of the input of each layer; 0: there is none.
        vocab_size_per_layer_input: number of tokens that have an embedding for these; the others have that of token 0.
        enable_moe_block: whether there are experts beside each MLP.
        num_experts, top_k_experts, moe_intermediate_size: X, k, and the inner features of an expert.
    """

    model_type = "gemma4_text"
    # transformers scales no queries, caps no scores and has no pattern here, whatever published files say.
    unused: ClassVar[Sequence[str]] = (
        "attn_logit_softcapping", "query_pre_attn_scalar", "sliding_window_pattern",
    )  # fmt: skip

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=256)
    global_head_dim: int = size(default=512)
    num_global_key_value_heads: int | None = size(default=None)
    attention_k_eq_v: bool = False
    hidden_activation: str = _GELU
    max_position_embeddings: int = config_field(131_072, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(1_000_000.0, Proportional(0.25))
    local_rope_parameters: Rope = Rope(10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    sliding_window: int | None = config_field(512, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    final_logit_softcapping: float | None = config_field(None, minimum=1e-3)
    num_kv_shared_layers: int = config_field(0, bounded_by="layers")
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = size(default=256, minimum=0)
    vocab_size_per_layer_input: int = size(default=262_144)
    enable_moe_block: bool = False
    num_experts: int = size(default=0, minimum=0)
    top_k_experts: int = size(default=0, minimum=0)
    moe_intermediate_size: int = size(default=0, minimum=0)

    def __post_init__(self) -> None:
        if not self.layer_types:
            self._set("layer_types", _kinds(self.num_hidden_layers))
        if SLIDING not in self.layer_types:
            self._set("sliding_window", None)
        if not self.enable_moe_block:
            for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                self._set(name, 0)
        super().__post_init__()
        check_sharing(self.layer_types, self.num_kv_shared_layers)

    @property
    def num_experts_per_tok(self) -> int:
        """``top_k_experts``, as other models with experts name it."""
        return self.top_k_experts

    @property
    def rope_width(self) -> int:
        """The width of heads in layers with full attention."""
        return self.global_head_dim

    def rope_width_of(self, name: str) -> int:
        """Return the width of the heads that the Rope of a field rotates."""
        return self.head_dim if name == "local_rope_parameters" else self.global_head_dim

    def kv_heads(self, layer: int) -> int:
        """Return K of a layer."""
        is_full, heads = self.layer_types[layer] == FULL, self.num_global_key_value_heads
        return heads if is_full and self.attention_k_eq_v and heads else self.num_key_value_heads

    def head_width(self, layer: int) -> int:
        """Return D of a layer."""
        return self.global_head_dim if self.layer_types[layer] == FULL else self.head_dim

    def inner_features(self, layer: int) -> int:
        """Return F of a layer."""
        is_wide = self.use_double_wide_mlp and not self.has_kv(layer)
        return 2 * self.intermediate_size if is_wide else self.intermediate_size

    def has_kv(self, layer: int) -> bool:
        """Return whether a layer has keys and values of its own."""
        return layer < self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def layer_kinds(self) -> tuple[tuple[str, bool], ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        return tuple((kind, self.has_kv(i)) for i, kind in enumerate(self.layer_types))

    def states(self, layer: int) -> Mapping[str, Any]:
        """What the cache holds for a layer: its keys and values, or a reference to the layer whose it attends to."""
        kept = KeysValues(
            self.kv_heads(layer),
            self.head_width(layer),
            self.window(layer),
            self.num_attention_heads,
        )
        return kept_or_shared(self.layer_types, self.num_kv_shared_layers, layer, kept)

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sizes of a file, without a table that it does not have, with those of ``per_layer_config``."""
        found = {**raw, **_first_sizes(raw)}
        if raw.get("hidden_size_per_layer_input") == 0:
            found.pop("vocab_size_per_layer_input", None)
        return found

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, whose last layer has full attention, whatever ``layer_types`` says.

        Published multimodal files leave out many settings of the text model.
        """
        if raw.get("use_bidirectional_attention") == "all":
            raise UnsupportedModelError(
                "'use_bidirectional_attention' 'all' is not supported for gemma4_text"
            )
        raw = with_defaults(raw, {
            "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
        })  # fmt: skip
        kinds = cls.read_field(raw, "layer_types") or _kinds(layer_count(raw))
        values["layer_types"] = kinds = (*kinds[:-1], FULL)
        if raw.get("sliding_window", 0) is None:
            values["sliding_window"] = None
        context = cls.read_field(raw, "max_position_embeddings")
        given = raw.replaced({"rope_parameters": raw.get("rope_parameters") or _ROPES})
        by_kind = ropes_by_kind(given, context, {FULL: 1e6, SLIDING: 1e4})
        values |= {"rope_parameters": by_kind[FULL], "local_rope_parameters": by_kind[SLIDING]}
        return super().from_hf(raw.replaced(_sizes_of_full(raw, kinds)), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with a Rope for each kind of layer."""
        found = super().to_hf()
        found = {key: found[key] for key in found if key not in ("rope_theta", "rope_scaling")}
        return found | ropes_to_hf(
            {FULL: self.rope_parameters, SLIDING: self.local_rope_parameters}
        )


def _kinds(count: int) -> tuple[str, ...]:
    """Return the kinds of layers by default: every sixth and the last have full attention."""
    return tuple(SLIDING if (i + 1) % 6 and i + 1 < count else FULL for i in range(count))


def _first_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of layers with full attention; empty if ``per_layer_config`` is missing or invalid.

    It lists these layers, each with the same sizes. Sizes that it does not have are those of all layers.

    Example:
        >>> _first_sizes({"head_dim": 256, "per_layer_config": {"5": {"head_dim": 512}}})
        {'global_head_dim': 512}
    """
    given = raw.get("per_layer_config")
    if given is None:
        return {}
    found = {name: raw[key] for key, name in _OF_FULL.items() if raw.get(key) is not None}
    if isinstance(given, Mapping) and all(isinstance(one, Mapping) for one in given.values()):
        sizes = next(iter(given.values()), {})
        return found | {_OF_FULL[key]: value for key, value in sizes.items() if key in _OF_FULL}
    return {} if given else found


def _sizes_of_full(raw: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of layers with full attention, and check that ``per_layer_config`` lists these layers alone.

    Args:
        raw: content of the file.
        kinds: kind of each layer.

    Raises:
        ValueError: ``per_layer_config`` is not an object of objects.
        UnsupportedModelError: other layers are listed, or the listed layers differ.
    """
    given = raw.get("per_layer_config")
    if given:
        if not isinstance(given, Mapping) or not all(
            isinstance(v, Mapping) for v in given.values()
        ):
            raise ValueError("'per_layer_config' is not an object of objects")
        first = next(iter(given.values()))
        # transformers fills the numbers up with zeros: "05" beside "11".
        listed = sorted(int(key) if str(key).isdecimal() else -1 for key in given)
        full = [i for i, kind in enumerate(kinds) if kind == FULL]
        is_known = not set(first) - set(_OF_FULL) and all(one == first for one in given.values())
        if not is_known or listed != full:
            raise UnsupportedModelError(
                "'per_layer_config' is not supported for gemma4_text unless it has the same settings for each "
                "layer with full attention, and for these alone"
            )
    return _first_sizes(raw)


class Gemma4Attention(Module):
    """Attention with normalised queries, keys and values, which in some layers reads the keys of another layer."""

    def __init__(self, config: Gemma4Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.kv_heads(layer), config.head_width(layer)
        E, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim, self.eps = H, K, D, eps
        self.kind, window = config.layer_types[layer], config.window(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        self.group = SHARED if SHARED in config.states(layer) else None
        self.has_kv = config.has_kv(layer)
        self.has_values = self.has_kv and not (config.attention_k_eq_v and self.kind == FULL)
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.q_norm = RMSNorm(D, dtype, eps)
        if self.has_kv:
            self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
            self.k_norm = RMSNorm(D, dtype, eps)
        if self.has_values:
            self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Mapping[str, Angles]
    ) -> tuple[jax.Array, LayerCache]:
        names = ["q_proj", *["k_proj"] * self.has_kv, *["v_proj"] * self.has_values]
        found = linears([getattr(self, name) for name in names], x)
        q, *kv = (split_heads(a.astype(x.dtype), self.head_dim) for a in found)  # [B, T, H, D]
        q = rope(self.q_norm(q), angles[self.kind])
        k = v = None
        if self.has_kv:
            k = rope(self.k_norm(kv[0]), angles[self.kind])  # [B, T, K, D]
            v = unit_rms(kv[-1].astype(jnp.float32), self.eps).astype(x.dtype)  # [B, T, K, D]
        y, cache = attend(q, k, v, cache, self.mask, scale=1.0, group=self.group)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads}
        outputs |= {"k_proj": self.kv_heads} if self.has_kv else {}
        outputs |= {"v_proj": self.kv_heads} if self.has_values else {}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Gemma4MLP(Module):
    """The gated MLP, GeGLU (arXiv:2002.05202)."""

    def __init__(self, config: Gemma4Config, layer: int, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.inner_features(layer)
        self.act = config.hidden_activation
        self.gate_proj = Linear(E, F, dtype)
        self.up_proj = Linear(E, F, dtype)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class Gemma4Router(Module):
    """Scores of experts: a linear layer over normalised hidden states, whose features are multiplied by ``scale``."""

    def __init__(self, config: Gemma4Config, dtype: DType):
        super().__init__()
        E, X, cpu = config.hidden_size, config.num_experts, DeviceRef.CPU()
        self.eps = config.rms_norm_eps
        self.proj = Linear(E, X, dtype)
        self.scale = Weight("scale", dtype, (E,), cpu)
        self.per_expert_scale = Weight("per_expert_scale", dtype, (X,), cpu)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = jnp.asarray(self.scale).astype(x.dtype) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        h = unit_rms(x.astype(jnp.float32), self.eps).astype(x.dtype)  # [B, T, E]
        return self.proj(h * scale.reshape((1,) * (x.ndim - 1) + (-1,)))  # [B, T, X]


class Gemma4MoE(Module):
    """A mixture of experts, whose shares sum to 1 before each is multiplied by a factor of its expert."""

    def __init__(self, config: Gemma4Config, dtype: DType):
        super().__init__()
        self.top_k = config.top_k_experts
        self.router = Gemma4Router(config, dtype)
        self.experts = Experts(
            config.hidden_size, config.moe_intermediate_size, config.num_experts, dtype,
            act=config.hidden_activation,
        )  # fmt: skip

    def __call__(self, x: jax.Array, scored: jax.Array) -> jax.Array:
        scores, factors = self.router(scored), jnp.asarray(self.router.per_expert_scale)
        chosen, shares = route(scores, self.top_k, "softmax of chosen", factor=factors)  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]


class Gemma4Block(Module):
    """One layer: attention, MLP, experts beside it if there are any, and the layer's own input."""

    def __init__(self, config: Gemma4Config, layer: int, dtype: DType):
        super().__init__()
        E, P, eps = config.hidden_size, config.hidden_size_per_layer_input, config.rms_norm_eps
        self.act, self.has_input, self.has_experts = (
            config.hidden_activation,
            P > 0,
            config.enable_moe_block,
        )
        self.input_layernorm = RMSNorm(E, dtype, eps)
        self.self_attn = Gemma4Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps)
        self.pre_feedforward_layernorm = RMSNorm(E, dtype, eps)
        self.mlp = Gemma4MLP(config, layer, dtype)
        self.post_feedforward_layernorm = RMSNorm(E, dtype, eps)
        if self.has_experts:
            self.post_feedforward_layernorm_1 = RMSNorm(E, dtype, eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(E, dtype, eps)
            self.moe = Gemma4MoE(config, dtype)
            self.post_feedforward_layernorm_2 = RMSNorm(E, dtype, eps)
        if self.has_input:
            self.per_layer_input_gate = Linear(E, P, dtype)
            self.per_layer_projection = Linear(P, E, dtype)
            self.post_per_layer_input_norm = RMSNorm(E, dtype, eps)
        self.layer_scalar = Weight("layer_scalar", dtype, (1,), DeviceRef.CPU())

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Mapping[str, Angles], inputs: Any
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + self.post_attention_layernorm(y)  # [B, T, E]
        y = self.mlp(self.pre_feedforward_layernorm(x))
        if self.has_experts:
            z = self.moe(self.pre_feedforward_layernorm_2(x), x)
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(z)
        x = x + self.post_feedforward_layernorm(y)
        if self.has_input:
            p = jax.lax.dynamic_index_in_dim(inputs, cache.layer, keepdims=False)  # [B, T, P]
            gate = activation(self.act)(self.per_layer_input_gate(x).astype(x.dtype))  # [B, T, P]
            y = self.per_layer_projection(gate * p.astype(x.dtype)).astype(x.dtype)  # [B, T, E]
            x = x + self.post_per_layer_input_norm(y)
        return x * jnp.asarray(self.layer_scalar).astype(x.dtype)[0], cache


class Gemma4Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Gemma4Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        L, E, P = config.num_hidden_layers, config.hidden_size, config.hidden_size_per_layer_input
        self.embed_tokens = Embedding(config.vocab_size, E, dtype)
        if P:
            self.embed_tokens_per_layer = Embedding(config.vocab_size_per_layer_input, L * P, dtype)
            self.per_layer_model_projection = Linear(E, L * P, dtype)
            self.per_layer_projection_norm = RMSNorm(P, dtype, config.rms_norm_eps)
        self.layers = LayerList(Gemma4Block(config, layer, dtype) for layer in range(L))
        self.norm = RMSNorm(E, dtype, config.rms_norm_eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        config = self.config
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
        inputs = self.layer_inputs(ids, x) if config.hidden_size_per_layer_input else None
        angles = {
            FULL: config.rope_parameters.angles(cache, config.global_head_dim),
            SLIDING: config.local_rope_parameters.angles(cache, config.head_dim),
        }
        x, cache = run_layers(self.layers, x, cache, angles, inputs)
        return self.norm(x), cache

    def layer_inputs(self, ids: jax.Array, x: jax.Array) -> jax.Array:
        """Return the inputs ``[L, B, T, P]`` of all layers for ids ``[B, T]`` and their embeddings ``[B, T, E]``."""
        config = self.config
        shape = *ids.shape, config.num_hidden_layers, config.hidden_size_per_layer_input
        is_known = (ids >= 0) & (ids < config.vocab_size_per_layer_input)
        of_ids = self.embed_tokens_per_layer(jnp.where(is_known, ids, 0)).astype(x.dtype)
        of_ids = of_ids.reshape(shape) * jnp.asarray(shape[-1] ** 0.5, x.dtype)
        of_x = self.per_layer_model_projection(x).astype(x.dtype).reshape(shape)
        of_x = self.per_layer_projection_norm(of_x * jnp.asarray(x.shape[-1] ** -0.5, x.dtype))
        return jnp.moveaxis((of_x + of_ids) * jnp.asarray(2**-0.5, x.dtype), -2, 0)


class Gemma4(LanguageModel):
    """The text model of a Gemma 4.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.gemma.Gemma`.

    Example:
        >>> config = Gemma4Config(100, 8, 16, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=4, global_head_dim=6, hidden_size_per_layer_input=4, vocab_size_per_layer_input=100,
        ...     num_kv_shared_layers=2, layer_types=("sliding_attention", "full_attention") * 3, sliding_window=8)
        >>> cache = Gemma4(config).cache(batch=1, capacity=16)
        >>> [(name, one.keys.shape) for name, one in sorted(cache.states.items())]
        [('full', (2, 1, 1, 16, 6)), ('shared', (1, 1, 1, 16, 4)), ('sliding', (1, 1, 1, 8, 4))]
    """

    def __init__(self, config: Gemma4Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Gemma4Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        self.unused_tensors = shared_kv_tensors(
            config.num_hidden_layers, config.num_kv_shared_layers
        )
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` of hidden states ``[..., E]``, capped if the model has a cap."""
        return soft_cap(super().logits(x), self.config.final_logit_softcapping)


# --- GGUF files ---------------------------------------------------------------------------------
#
# Source: ``Gemma4Model`` of llama.cpp's converter, its ``src/models/gemma4.cpp``.

# A divisor that makes a frequency practically 0.
_STILL = 1e20


def _of_layers(given: Settings, key: str, layers: int, default: Any) -> list[int]:
    """Return the number for each layer; a file has one for all layers, or a list with one for each."""
    if not given.has(key) or not isinstance(given.any(key), list):
        return [given.count(key, default)] * layers
    return given.items(key, int, count=layers)


def _read(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widths, heads and RoPE of each kind of layer, and the sizes of MLPs."""
    given.count("attention.sliding_window")  # required: without it, all layers would be of one kind
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    shared = given.count("attention.shared_kv_layers", 0, minimum=0, maximum=layers - 1)
    near = given.count("attention.key_length_swa")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (other := given.count(key, near)) != near:
            raise given.unsupported(f"'{given.prefix}{key}' {other} of heads that are {near} wide")
    full = [i for i, kind in enumerate(kinds) if kind == FULL]
    values = [i for i in full if i < layers - shared]
    same = bool(values) and f"blk.{values[0]}.attn_v.weight" not in tensors
    inner = given.count("embedding_length_per_layer_input", minimum=0)
    found = {
        "global_head_dim": config["head_dim"], "head_dim": near, "num_kv_shared_layers": shared,
        "attention_k_eq_v": same, "hidden_size_per_layer_input": inner,
        # llama.cpp's default, which a file without a cap takes away.
        "final_logit_softcapping": given.number("final_logit_softcapping", 30.0, positive=False) or None,
        **_heads(given, kinds, config["num_attention_heads"], same),
        **_sizes(given, layers, shared),
        **_ropes(given, config),
    }  # fmt: skip
    if inner:
        found[ENTRIES] = count_entries(given, tensors)
    experts = given.count("expert_count", 0, minimum=0, maximum=MAX_EXPERTS)
    if experts:
        found |= {
            "enable_moe_block": True, "num_experts": experts,
            "top_k_experts": given.count("expert_used_count", maximum=experts),
            "moe_intermediate_size": given.count("expert_feed_forward_length"),
        }  # fmt: skip
    return found


def _heads(given: Settings, kinds: Sequence[str], heads: int, same: bool) -> dict[str, Any]:
    """Return the numbers of KV heads in both kinds of layers."""
    key = "attention.head_count_kv"
    counts = _of_layers(given, key, len(kinds), heads)
    near, full = (
        {count for count, kind in zip(counts, kinds, strict=True) if kind == one}
        for one in (SLIDING, FULL)
    )
    if len(near) > 1 or len(full) > 1 or (near and full and near != full and not same):
        raise given.unsupported(f"a model whose layers of a kind differ in '{given.prefix}{key}'")
    usual = next(iter(near or full))
    return {
        "num_key_value_heads": usual,
        "num_global_key_value_heads": next(iter(full), usual) if same else None,
    }


def _sizes(given: Settings, layers: int, shared: int) -> dict[str, Any]:
    """Return the inner size of the MLPs; if layers differ, it must be twice as large in layers that share keys."""
    key = "feed_forward_length"
    sizes = _of_layers(given, key, layers, ...)
    doubles = len(set(sizes)) > 1
    if sizes != [sizes[0] * (2 if doubles and i >= layers - shared else 1) for i in range(layers)]:
        raise given.unsupported(f"a model whose layers differ in '{given.prefix}{key}'")
    return {"intermediate_size": sizes[0], "use_double_wide_mlp": doubles}


def _ropes(given: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE of both kinds of layers; for full attention, files hold a list of divisors of frequencies."""
    scaling, half = config["rope_scaling"], config["head_dim"] // 2
    divisors = scaling.get("short_factor", ()) if scaling else [1.0] * half
    turned = sum(one < _STILL for one in divisors)
    if not turned or len(divisors) != half or len(set(divisors[:turned])) > 1:
        raise given.unsupported(
            "rope of other frequencies than the first in layers that see all tokens"
        )
    share = turned / half
    while int(share * config["head_dim"] // 2) < turned:  # the formula of ``Proportional``
        share = math.nextafter(share, 2)
    full = {
        "rope_type": "proportional",
        "partial_rotary_factor": share,
        "rope_theta": config["rope_theta"],
    }
    if divisors[0] != 1:
        full["factor"] = divisors[0]
    near = {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", 10_000.0)}
    return {"rope_scaling": None, "rope_parameters": {FULL: full, SLIDING: near}}


def _write(config: Gemma4Config) -> dict[str, Any]:
    """Return the metadata of the widths, heads and RoPE of each kind of layer, and of the sizes of MLPs."""
    check_for_llama_cpp(config)
    if not isinstance(config.rope_parameters.scaling, Proportional):
        raise unsupported(
            "rope of a type other than 'proportional' in layers that see all tokens of a GGUF file of "
            "'gemma4'"
        )
    if config.num_hidden_layers < 2:
        raise unsupported("'num_hidden_layers' 1 in a GGUF file of 'gemma4'")
    count, inner = config.num_hidden_layers, config.hidden_size_per_layer_input
    return {
        "feed_forward_length": _one([config.inner_features(i) for i in range(count)]),
        "attention.head_count_kv": _one([config.kv_heads(i) for i in range(count)]),
        "attention.key_length": config.global_head_dim,
        "attention.value_length": config.global_head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count": config.global_head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": config.local_rope_parameters.theta,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": inner,
        "final_logit_softcapping": config.final_logit_softcapping or 0.0,
        **({ENTRIES: config.vocab_size_per_layer_input} if inner else {}),
    }


def _one(values: list[int]) -> int | list[int]:
    """Return one number if all are equal, else the list."""
    return values if len(set(values)) > 1 else values[0]


GEMMA4_GGUF = GGUFTable(
    "gemma4",
    {
        **NAMES,
        **expert_names("moe"),
        ".ffn_gate_inp": (Rule("router.proj"), Rule("router.scale", only="scale")),
        ".ffn_down_exps": (
            expert_names("moe")[".ffn_down_exps"], Rule("router.per_expert_scale", only="scale")
        ),
        ".pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        ".post_ffw_norm_1": "post_feedforward_layernorm_1",
        ".post_ffw_norm_2": "post_feedforward_layernorm_2",
        ".layer_output_scale": Rule("layer_scalar", only="weight"),
    },
    constants={"hidden_activation": _GELU, "hidden_act": _GELU},
    read=_read, write=_write, split=fill_table, join=cut_table,
    biases=(), period=6, lists_windows=True, is_divided=True,
    listed=("feed_forward_length", "attention.head_count_kv"),
    written=(
        *KEYS, "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa",
        "expert_feed_forward_length",
    ),
    computed=(
        "intermediate_size", "global_head_dim", "num_global_key_value_heads",
        "layer_types", "rope_parameters",
    ),
)  # fmt: skip


# --- files of checkpoints -----------------------------------------------------------------------

# In files, the router and the experts are attributes of the layer itself.
_ROUTER = ("router.proj.weight", "router.scale", "router.per_expert_scale")


GEMMA4 = Gemma4.family = Family.of(
    Gemma4,
    Gemma4Config,
    "Gemma4ForCausalLM",
    "Gemma4TextModel",
    names=Names(
        FusedExperts(
            "moe.experts.#.*.weight",
            gate_up=("experts.gate_up_proj",),
            down=("experts.down_proj",),
            written=True,
        ),
        *DECODER,
        Headless(
            "model.",
            (
                "embed_tokens_per_layer.",
                "per_layer_model_projection.",
                "per_layer_projection_norm.",
            ),
        ),
        Rename({f".{name}": f".moe.{name}" for name in _ROUTER}, written=True),
    ),
    gguf=GEMMA4_GGUF,
)
