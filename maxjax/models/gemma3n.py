"""Gemma 3n (text): several hidden states, of which a layer computes one; and an input of its own for each layer.

::

    x = √E · embed_tokens[ids]
    p = (norm(per_layer_model_projection(x) / √E) + √P · embed_tokens_per_layer[ids]) / √2       an input of each layer
    states = x, and altup_projections(x) for each further state, rescaled to the size of x
    in each layer:
        predictions = altup(states)
        x = predictions[active]
        h = input_layernorm(x)
        x = x + post_attention_layernorm(attention(h))
        x = (x + h + norm(linear_right(linear_left(h)))) / √2                                    LAuReL
        x = x + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(x)))
        states = altup.correct(predictions, x)
        y = per_layer_projection(gelu(per_layer_input_gate(scale · states[active])) · p[layer])
        all states but the first += norm(y)
    x = mean of the states, each mapped back by altup_unembed_projections and rescaled
    logits = cap · tanh(lm_head(norm(x)) / cap)

The last layers attend to the keys and values of an earlier one. In some layers, the MLP keeps only the largest of its
inner features.

Sources: transformers' ``modeling_gemma3n``; AltUp arXiv:2301.13310, LAuReL arXiv:2411.07501.

Shapes: A hidden states of B sequences with T tokens and hidden size E, H query heads, K key-value heads, head width D,
F inner features, L layers, P features of a layer's input. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType
from ..errors import CheckpointFormatError
from ..graph.device import DeviceRef
from ..graph.placement.split import REPLICATED
from ..graph.weight.weight import Weight
from ..graph.weights import WeightData
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import KeysValues
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from ..nn.rope_scaling import LinearScalingParams
from .family import Family
from .gemma import refuse_bidirectional
from .gguf.config.read import rows_of
from .gguf.layouts import Expert
from .gguf.metadata import MAX_EXPERTS, Settings, unsupported
from .gguf.names import HEAD_NORMS, Rule, Source
from .gguf.pieces import computed, rows
from .gguf.sources import Relaid
from .gguf.table import GGUFTable
from .names import DECODER, Headless, Names
from .parts import (
    CAUSAL,
    FULL,
    SHARED,
    SLIDING,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    check_not_empty,
    config_field,
    kept_or_shared,
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
# Lower bound of the mean square by which a hidden state is rescaled.
_LEAST = 1e-5


@dataclass(frozen=True)
class Gemma3nConfig(LanguageModelConfig):
    """The settings of a Gemma 3n's text model: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: F of each layer; one number is for all.
        rope_parameters, local_rope_parameters: the rotary position embeddings of layers with full attention, and of
            those with a sliding window.
        layer_types: "full_attention" or "sliding_attention" for each layer; by default every fifth has full attention.
        num_kv_shared_layers: number of last layers that attend to the keys and values of another layer.
        hidden_size_per_layer_input: P, the width of the input of each layer.
        vocab_size_per_layer_input: number of tokens that have an embedding for these; the others have that of token 0.
        altup_num_inputs, altup_active_idx: A, and the index of the hidden state that layers compute.
        altup_correct_scale: whether that state is multiplied by weights before it gates the layer's input.
        laurel_rank: rank of the learned residual.
        activation_sparsity_pattern: share of the inner features of each layer's MLP that are set to zero; by default
            0.95 in the first ten layers of a model with more, and 0 elsewhere.
    """

    model_type = "gemma3n_text"
    # transformers scales no queries and caps no scores here, whatever published files say.
    unused: ClassVar[Sequence[str]] = ("attn_logit_softcapping", "query_pre_attn_scalar")

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int | tuple[int, ...] = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=256)
    hidden_activation: str = _GELU
    max_position_embeddings: int = config_field(32_768, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=1_000_000.0)
    local_rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    sliding_window: int | None = config_field(512, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))
    final_logit_softcapping: float | None = config_field(30.0, minimum=1e-3)
    num_kv_shared_layers: int = config_field(15, bounded_by="layers")
    hidden_size_per_layer_input: int = size(default=256)
    vocab_size_per_layer_input: int = size(default=262_144)
    altup_num_inputs: int = size(default=4)
    altup_active_idx: int = size(default=0, minimum=0)
    altup_correct_scale: bool = True
    laurel_rank: int = size(default=64)
    activation_sparsity_pattern: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = self.num_hidden_layers
        if not self.layer_types:
            kinds = (SLIDING if (i + 1) % 5 else FULL for i in range(count))
            self._set("layer_types", tuple(kinds))
        if SLIDING not in self.layer_types:
            self._set("sliding_window", None)
        if isinstance(self.intermediate_size, int):
            self._set("intermediate_size", (self.intermediate_size,) * count)
        if not self.activation_sparsity_pattern:
            sparse = 10 if count > 10 else 0
            self._set("activation_sparsity_pattern", (0.95,) * sparse + (0.0,) * (count - sparse))
        super().__post_init__()
        check_sharing(self.layer_types, self.num_kv_shared_layers)
        for key in ("intermediate_size", "activation_sparsity_pattern"):
            if (found := len(getattr(self, key))) != count:
                raise ValueError(f"{key!r} has {found} entries for {count} layers")
        if not all(0 <= share < 1 for share in self.activation_sparsity_pattern):
            raise ValueError("'activation_sparsity_pattern' is not a list of shares")
        if not 0 <= self.altup_active_idx < self.altup_num_inputs:
            raise ValueError(
                f"'altup_active_idx' {self.altup_active_idx} is none of {self.altup_num_inputs} states"
            )

    def inner_features(self, layer: int) -> int:
        """Return F of a layer."""
        sizes = self.intermediate_size
        return sizes[layer] if isinstance(sizes, tuple) else sizes

    @property
    def layer_kinds(self) -> tuple[tuple[str, bool], ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        return tuple((kind, i >= first) for i, kind in enumerate(self.layer_types))

    def states(self, layer: int) -> Mapping[str, Any]:
        """What the cache holds for a layer: its keys and values, or a reference to the layer whose it attends to."""
        kept = KeysValues(
            self.num_key_value_heads, self.head_dim, self.window(layer), self.num_attention_heads
        )
        return kept_or_shared(self.layer_types, self.num_kv_shared_layers, layer, kept)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which null stands for no cap and no window."""
        refuse_bidirectional(raw)
        check_not_empty(raw, "activation_sparsity_pattern")
        raw = with_defaults(raw, {"num_key_value_heads": 2})
        for key in ("final_logit_softcapping", "sliding_window"):
            if raw.get(key, 0) is None:
                values[key] = None
        context = cls.read_field(raw, "max_position_embeddings")
        thetas, older = {FULL: 1e6, SLIDING: 1e4}, {SLIDING: "rope_local_base_freq"}
        by_kind = ropes_by_kind(raw, context, thetas, older)
        values |= {"rope_parameters": by_kind[FULL], "local_rope_parameters": by_kind[SLIDING]}
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the base of the second RoPE, or with both Ropes if the second is scaled too."""
        found, local = super().to_hf(), self.local_rope_parameters
        if local.scaling is None:
            return {**found, "rope_local_base_freq": local.theta}
        return {**found, **ropes_to_hf({FULL: self.rope_parameters, SLIDING: local})}


def check_sharing(kinds: Sequence[str], shared: int) -> None:
    """Raise ValueError unless the layers before the ``shared`` last ones are of all kinds that the model has."""
    count = len(kinds)
    if not 0 <= shared < count or set(kinds[: count - shared]) != set(kinds):
        raise ValueError(
            f"'num_kv_shared_layers' {shared} of {count} layers: one of each kind must have keys and values of its own"
        )


class Gemma3nAttention(Module):
    """Attention with normalised queries, keys and values, which in some layers reads the keys of another layer."""

    def __init__(self, config: Gemma3nConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim, self.eps = H, K, D, eps
        self.kind, window = config.layer_types[layer], config.window(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        self.group = SHARED if SHARED in config.states(layer) else None
        self.has_kv = layer < config.num_hidden_layers - config.num_kv_shared_layers
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.q_norm = RMSNorm(D, dtype, eps)
        if self.has_kv:
            self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
            self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
            self.k_norm = RMSNorm(D, dtype, eps)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Mapping[str, Angles]
    ) -> tuple[jax.Array, LayerCache]:
        layers = [self.q_proj, self.k_proj, self.v_proj] if self.has_kv else [self.q_proj]
        q, *kv = (split_heads(a.astype(x.dtype), self.head_dim) for a in linears(layers, x))
        q = rope(self.q_norm(q), angles[self.kind])  # [B, T, H, D]
        k = v = None
        if self.has_kv:
            k = rope(self.k_norm(kv[0]), angles[self.kind])  # [B, T, K, D]
            v = unit_rms(kv[1].astype(jnp.float32), self.eps).astype(x.dtype)  # [B, T, K, D]
        y, cache = attend(q, k, v, cache, self.mask, scale=1.0, group=self.group)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads}
        if self.has_kv:
            outputs |= {"k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Gemma3nMLP(Module):
    """The gated MLP, GeGLU, which in some layers keeps only the largest inner features.

    About a given share of them is set to zero: the threshold is the quantile of that share in a normal distribution
    with the features' mean and deviation.
    """

    def __init__(self, config: Gemma3nConfig, layer: int, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.inner_features(layer)
        share = config.activation_sparsity_pattern[layer]
        self.act = config.hidden_activation
        # The threshold, in standard deviations above the mean; None: all features are kept.
        self.deviations = statistics.NormalDist().inv_cdf(share) if share else None
        self.gate_proj = Linear(E, F, dtype)
        self.up_proj = Linear(E, F, dtype)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        if self.deviations is not None:
            gate, up = gate.astype(x.dtype), up.astype(x.dtype)
            mean = jnp.mean(gate, axis=-1, keepdims=True)
            deviation = jnp.std(gate, axis=-1, keepdims=True)
            threshold = mean + deviation * jnp.asarray(self.deviations, gate.dtype)
            gate = jax.nn.relu(gate - threshold)
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class Gemma3nLaurel(Module):
    """LAuReL, a learned residual of low rank: ``x + norm(right(left(x)))``."""

    def __init__(self, config: Gemma3nConfig, dtype: DType):
        super().__init__()
        E, rank = config.hidden_size, config.laurel_rank
        self.linear_left = Linear(E, rank, dtype)
        self.linear_right = Linear(rank, E, dtype)
        self.post_laurel_norm = RMSNorm(E, dtype, config.rms_norm_eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear_right(self.linear_left(x).astype(x.dtype)).astype(x.dtype)  # [B, T, E]
        return x + self.post_laurel_norm(y)


class Gemma3nAltUp(Module):
    """AltUp, alternating updates: each hidden state is predicted from all of them, and then corrected by the
    difference between the one that the layer computes and its prediction."""

    def __init__(self, config: Gemma3nConfig, dtype: DType):
        super().__init__()
        E, A = config.hidden_size, config.altup_num_inputs
        self.count, self.active, self.scales = (
            A,
            config.altup_active_idx,
            config.altup_correct_scale,
        )
        self.correct_output_scale = Weight("correct_output_scale", dtype, (E,), DeviceRef.CPU())
        self.correction_coefs = Linear(A, A, dtype)
        self.prediction_coefs = Linear(A, A * A, dtype)
        self.modality_router = Linear(E, A, dtype)
        self.router_norm = RMSNorm(E, dtype, config.rms_norm_eps)

    def __call__(self, states: jax.Array) -> jax.Array:
        """Predict the states ``[A, B, T, E]`` from all of them."""
        mix = self.prediction_coefs(self.modalities(states[self.active])).astype(states.dtype)
        mix = mix.reshape(*mix.shape[:-1], self.count, self.count)  # [B, T, A, A]
        return states + jnp.einsum("i...e,...ji->j...e", states, mix).astype(states.dtype)

    def correct(self, predictions: jax.Array, x: jax.Array) -> jax.Array:
        """Correct predictions ``[A, B, T, E]`` by what the layer computes, ``[B, T, E]``."""
        change = x - predictions[self.active]
        shares = self.correction_coefs(self.modalities(x)).astype(x.dtype) + 1  # [B, T, A]
        return predictions + jnp.moveaxis(shares, -1, 0)[..., None] * change[None]

    def modalities(self, x: jax.Array) -> jax.Array:
        """Return numbers ``[B, T, A]`` that choose how states are combined for hidden states ``[B, T, E]``."""
        routed = self.modality_router(self.router_norm(x) * jnp.asarray(1 / x.shape[-1], x.dtype))
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)

    def scaled(self, x: jax.Array) -> jax.Array:
        """Multiply the state ``[B, T, E]`` by ``correct_output_scale``, if the configuration says so."""
        if not self.scales:
            return x
        weight = jnp.asarray(self.correct_output_scale).astype(x.dtype)
        return x * weight.reshape((1,) * (x.ndim - 1) + (-1,))

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the weights, which are small."""
        names = ("correction_coefs", "prediction_coefs", "modality_router")
        return dict.fromkeys(("correct_output_scale", *(f"{n}.weight" for n in names)), REPLICATED)


class Gemma3nBlock(Module):
    """One layer, which computes one of A hidden states, and predicts and corrects the others."""

    def __init__(self, config: Gemma3nConfig, layer: int, dtype: DType):
        super().__init__()
        E, P, eps = config.hidden_size, config.hidden_size_per_layer_input, config.rms_norm_eps
        self.act = config.hidden_activation
        self.altup = Gemma3nAltUp(config, dtype)
        self.input_layernorm = RMSNorm(E, dtype, eps)
        self.self_attn = Gemma3nAttention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps)
        self.laurel = Gemma3nLaurel(config, dtype)
        self.pre_feedforward_layernorm = RMSNorm(E, dtype, eps)
        self.mlp = Gemma3nMLP(config, layer, dtype)
        self.post_feedforward_layernorm = RMSNorm(E, dtype, eps)
        self.per_layer_input_gate = Linear(E, P, dtype)
        self.per_layer_projection = Linear(P, E, dtype)
        self.post_per_layer_input_norm = RMSNorm(E, dtype, eps)

    def __call__(
        self, states: jax.Array, cache: LayerCache, angles: Mapping[str, Angles], inputs: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        predictions = self.altup(states)  # [A, B, T, E]
        x = predictions[self.altup.active]  # [B, T, E]
        h = self.input_layernorm(x)
        y, cache = self.self_attn(h, cache, angles)
        x = x + self.post_attention_layernorm(y)
        x = (x + self.laurel(h)) * jnp.asarray(2**-0.5, x.dtype)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        states = self.altup.correct(predictions, x)  # [A, B, T, E]
        x = self.altup.scaled(states[self.altup.active])
        p = jax.lax.dynamic_index_in_dim(inputs, cache.layer, keepdims=False)  # [B, T, P]
        gate = activation(self.act)(self.per_layer_input_gate(x).astype(x.dtype))  # [B, T, P]
        y = self.per_layer_projection(gate * p.astype(x.dtype)).astype(x.dtype)  # [B, T, E]
        y = self.post_per_layer_input_norm(y)
        is_other = (jnp.arange(states.shape[0]) > 0).reshape(-1, *(1,) * (states.ndim - 1))
        return states + jnp.where(is_other, y[None], 0).astype(states.dtype), cache


class Gemma3nModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Gemma3nConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        L, E, P = config.num_hidden_layers, config.hidden_size, config.hidden_size_per_layer_input
        others = range(config.altup_num_inputs - 1)
        self.embed_tokens = Embedding(config.vocab_size, E, dtype)
        self.embed_tokens_per_layer = Embedding(config.vocab_size_per_layer_input, L * P, dtype)
        self.per_layer_model_projection = Linear(E, L * P, dtype)
        self.per_layer_projection_norm = RMSNorm(P, dtype, config.rms_norm_eps)
        self.altup_projections = LayerList(Linear(E, E, dtype) for _ in others)
        self.layers = LayerList(Gemma3nBlock(config, layer, dtype) for layer in range(L))
        self.altup_unembed_projections = LayerList(Linear(E, E, dtype) for _ in others)
        self.norm = RMSNorm(E, dtype, config.rms_norm_eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        config = self.config
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
        inputs = self.layer_inputs(ids, x)  # [L, B, T, P]
        angles = {
            FULL: config.rope_parameters.angles(cache, config.head_dim),
            SLIDING: config.local_rope_parameters.angles(cache, config.head_dim),
        }
        states = jnp.stack([x, *(rescaled(to_state(x), x) for to_state in self.altup_projections)])
        states, cache = run_layers(self.layers, states, cache, angles, inputs)  # [A, B, T, E]
        first, *others = states
        back = zip(self.altup_unembed_projections, others, strict=True)
        x = jnp.stack([first, *(rescaled(from_state(one), first) for from_state, one in back)])
        return self.norm(jnp.mean(x, axis=0)), cache  # [B, T, E]

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


def rescaled(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return vectors ``[..., E]`` with the root mean square of ``like``.

    Example:
        >>> rescaled(jnp.array([3.0, 3.0]), jnp.array([1.0, 1.0])).tolist()
        [1.0, 1.0]
    """
    x = x.astype(like.dtype)
    wanted = jnp.sqrt(jnp.mean(like**2, axis=-1, keepdims=True))
    return x * wanted / jnp.sqrt(jnp.maximum(jnp.mean(x**2, axis=-1, keepdims=True), _LEAST))


class Gemma3n(LanguageModel):
    """The text model of a Gemma 3n.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.gemma.Gemma`.

    Example:
        >>> config = Gemma3nConfig(100, 8, 16, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        ...     head_dim=4, hidden_size_per_layer_input=4, vocab_size_per_layer_input=100, laurel_rank=2,
        ...     num_kv_shared_layers=2, layer_types=("sliding_attention", "full_attention") * 3, sliding_window=8)
        >>> Gemma3n(config).cache(batch=1, capacity=16).more["shared"].layers
        1
    """

    def __init__(self, config: Gemma3nConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Gemma3nModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        self.unused_tensors = shared_kv_tensors(
            config.num_hidden_layers, config.num_kv_shared_layers
        )
        if stacked:
            self.stack()

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the capped logits ``[..., V]`` of hidden states ``[..., E]``."""
        return soft_cap(super().logits(x), self.config.final_logit_softcapping)


def shared_kv_tensors(count: int, shared: int) -> tuple[str, ...]:
    """Return patterns of the keys and values that files may hold for layers that do not use their own."""
    return tuple(
        f"model.layers.{layer}.self_attn.{part}.*"
        for layer in range(count - shared, count)
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


# --- GGUF files ---------------------------------------------------------------------------------
# llama.cpp has many numbers in its code, so a model with other numbers is refused. Its files have keys and values
# also in layers that read those of another layer; checkpoints may leave them out.
#
# Source: ``Gemma3NModel`` of llama.cpp's converter, its ``src/models/gemma3n.cpp``.

Tensors = Mapping[str, WeightData]

# Index of the first layer that reads another's keys and values, number of layers whose MLPs have a sparsity, and
# that sparsity.
_FIRST_SHARED, _SPARSE, _SPARSITY = 20, 10, 0.95
_TABLE, ENTRIES = "embed_tokens_per_layer.weight", "vocab_size_per_layer_input"
_STATES = re.compile(r"(.*\baltup_(?:unembed_)?projections)\.([0-9]{1,3})\.weight")
_KV = ("k_proj", "v_proj", "k_norm")
_OF_LAYER = re.compile(
    r"(.*\blayers\.)([0-9]{1,4})\.self_attn\.(k_proj|v_proj|k_norm|q_proj)\.weight"
)

NAMES: Mapping[str, str | Rule] = {
    ".ffn_norm": "pre_feedforward_layernorm",
    ".post_attention_norm": "post_attention_layernorm",
    ".post_ffw_norm": "post_feedforward_layernorm",
    **HEAD_NORMS,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    ".inp_gate": "per_layer_input_gate",
    ".proj": "per_layer_projection",
    ".post_norm": "post_per_layer_input_norm",
}
"""GGUF's names of tensors that Gemma 3n and 4 have."""
KEYS = (
    "attention.shared_kv_layers", "embedding_length_per_layer_input", "final_logit_softcapping",
    "rope.freq_base_swa",
)  # fmt: skip
"""Metadata keys that both have."""


def fill_table(config: Any, tensors: Tensors) -> dict[str, WeightData]:
    """Return the tensors with a per-layer embedding for every token; tokens without one get the first token's."""
    found = dict(tensors)
    for name, data in tensors.items():
        count = int(data.logical_shape[0]) if data.logical_shape else 0
        if name.endswith(_TABLE) and 0 < count < config.vocab_size:
            order = np.arange(config.vocab_size)
            # The first row of the second copy, so that no other row is read for it.
            order[count:] = count
            found[name] = rows(name, [data, data], order)
    return found


def cut_table(given: Settings, tensors: Tensors) -> dict[str, WeightData]:
    """Return the tensors without the per-layer embeddings that :func:`fill_table` added."""
    found = dict(tensors)
    for name, data in tensors.items():
        if name.endswith(_TABLE) and given.has(ENTRIES):
            count = given.count(ENTRIES)
            if count < int(data.logical_shape[0]):
                found[name] = rows(name, [data], np.arange(count))
    return found


def count_entries(given: Settings, tensors: Mapping[str, Sequence[int]]) -> int:
    """Return the number of per-layer embeddings; in files of other writers there is one for every token."""
    name = "per_layer_token_embd.weight"
    count = rows_of(name, tensors, given.path)
    return given.count(ENTRIES, count, maximum=count)


def check_for_llama_cpp(config: Any) -> None:
    """Raise UnsupportedModelError for layers that share keys, or a RoPE of sliding layers, other than llama.cpp's."""
    if config.local_rope_parameters.scaling is not None:
        raise unsupported("rope scaling in sliding-window layers of a GGUF file")
    if not config.num_kv_shared_layers:
        return
    kinds, first = config.layer_types, config.num_hidden_layers - config.num_kv_shared_layers
    # llama.cpp uses the last two layers before these, and does not check their kinds.
    for kind, source in ((FULL, first - 1), (SLIDING, first - 2)):
        if kind in kinds[first:] and (source < 0 or kinds[source] != kind):
            raise unsupported(
                f"'layer_types' whose layer {first - 1} does not see all tokens, or whose layer "
                f"{first - 2} has no sliding window, before 'num_kv_shared_layers' "
                f"{config.num_kv_shared_layers} others in a GGUF file"
            )


def _to_gguf(config: Gemma3nConfig, tensors: Tensors) -> dict[str, WeightData]:
    """Return the tensors with the AltUp projections joined to one tensor, and keys and values in all layers."""
    found, states = {}, {}
    for name, data in fill_table(config, tensors).items():
        if match := _STATES.fullmatch(name):
            states.setdefault(match[1] + ".weight", {})[int(match[2])] = data
        else:
            found[name] = data
    for name, each in states.items():
        parts = [each[i] for i in sorted(each)]
        shapes = {tuple(map(int, part.logical_shape)) for part in parts}
        if len(shapes) > 1 or sorted(each) != list(range(config.altup_num_inputs - 1)):
            raise CheckpointFormatError(
                "not one linear layer for each further hidden state", tensor=name,
                expected=f"{config.altup_num_inputs - 1} of one shape", found=f"{len(parts)}: {shapes}",
            )  # fmt: skip
        found[name] = computed(
            name, parts, lambda *arrays: np.stack(arrays), (len(parts), *shapes.pop())
        )
    K, D, E = config.num_key_value_heads, config.head_dim, config.hidden_size
    sizes = {"k_proj": (K * D, E), "v_proj": (K * D, E), "k_norm": (D,)}
    first = config.num_hidden_layers - config.num_kv_shared_layers
    for name, data in list(found.items()):
        match = _OF_LAYER.fullmatch(name)
        layer = int(match[2]) if match and match[3] == "q_proj" else -1
        if match and first <= layer < config.num_hidden_layers:
            dtype = DType.float32 if data.is_packed else data.dtype
            for kind in _KV:
                new = f"{match[1]}{match[2]}.self_attn.{kind}.weight"
                if new not in found:
                    found[new] = _zeros(new, sizes[kind], dtype)
    return found


def _zeros(name: str, shape: tuple[int, ...], dtype: DType) -> WeightData:
    """Return a tensor of zeros, which llama.cpp reads but does not use."""
    return computed(name, [], lambda: np.zeros(shape, dtype.np), shape, dtype)


def _from_gguf(given: Settings, tensors: Tensors) -> dict[str, WeightData]:
    """Return the tensors of a checkpoint: the inverse of :func:`_to_gguf`, without keys and values of no use."""
    first, found = _first_shared(given), {}
    for name, data in cut_table(given, tensors).items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        match = _OF_LAYER.fullmatch(name)
        if match and match[3] in _KV and int(match[2]) >= first:
            continue
        if kind not in ("altup_projections", "altup_unembed_projections"):
            found[name] = data
            continue
        shape = tuple(map(int, data.logical_shape))
        if len(shape) != 3 or shape[0] > MAX_EXPERTS:
            raise CheckpointFormatError(
                "not linear layers of hidden states", path=given.path, tensor=name,
                expected="[states, out, in]", found=shape,
            )  # fmt: skip
        parts = {f"{stem}.{kind}.{i}.weight": Expert(i, shape[0]) for i in range(shape[0])}
        source = Relaid({name: data}, {new: Source(name, layout) for new, layout in parts.items()})
        for new in parts:
            dtype, sizes = source.dtype_and_shape(new)
            found[new] = WeightData.lazy(
                source, new, DType.of(dtype), sizes, data.quantization_encoding
            )
    return found


def _first_shared(given: Settings) -> int:
    return min(given.count("block_count"), _FIRST_SHARED)


def _sparsities(count: int) -> list[float]:
    """Return the sparsity of each of ``count`` layers in llama.cpp's code."""
    return ([_SPARSITY] * _SPARSE + [0.0] * count)[:count]


def _read(given: Settings, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that llama.cpp derives from the number of layers, and check that the file agrees."""
    layers = config["num_hidden_layers"]
    normal, shares = statistics.NormalDist(), _sparsities(layers)
    key = "activation_sparsity_scale"
    listed = given.items(key, float, None)
    if listed is not None:
        if len(listed) != layers or any(map(math.isnan, listed)):
            raise given.wrong(key, f"{layers} numbers", listed[:8], "does not fit")
        if [round(normal.cdf(value), 6) for value in listed] != shares:
            raise given.unsupported(f"'{given.prefix}{key}' other than llama.cpp's")
    shared = layers - _first_shared(given)
    if given.count("attention.shared_kv_layers", shared, minimum=0) != shared:
        raise given.unsupported(f"'{given.prefix}attention.shared_kv_layers' other than {shared}")
    return {
        "num_kv_shared_layers": shared, "activation_sparsity_pattern": shares,
        ENTRIES: count_entries(given, tensors),
        "rope_local_base_freq": given.number("rope.freq_base_swa", 10_000.0),
    }  # fmt: skip


def _write(config: Gemma3nConfig) -> dict[str, Any]:
    """Return the metadata that the converter writes; models that differ from llama.cpp's code are refused."""
    check_for_llama_cpp(config)
    if config.final_logit_softcapping is None:
        raise unsupported("Gemma 3n without 'final_logit_softcapping' in a GGUF file")
    count, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if shared != max(count - _FIRST_SHARED, 0):
        raise unsupported(
            f"'num_kv_shared_layers' {shared} in a GGUF file of 'gemma3n' (llama.cpp's layers share "
            f"keys and values from layer {_FIRST_SHARED} on)"
        )
    if not isinstance(config.rope_parameters.scaling, (LinearScalingParams, type(None))):
        raise unsupported("rope scaling of a type other than 'linear' in a GGUF file of 'gemma3n'")
    if len({config.inner_features(i) for i in range(count)}) > 1:
        raise unsupported(
            "'intermediate_size' that differs between layers in a GGUF file of 'gemma3n'"
        )
    if list(config.activation_sparsity_pattern) != _sparsities(count):
        raise unsupported(
            f"'activation_sparsity_pattern' other than {_SPARSITY} in the first {_SPARSE} layers and 0 in "
            "the others in a GGUF file of 'gemma3n'"
        )
    normal = statistics.NormalDist()
    return {
        "feed_forward_length": config.inner_features(0),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base_swa": config.local_rope_parameters.theta,
        ENTRIES: config.vocab_size_per_layer_input,
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "activation_sparsity_scale": [
            normal.inv_cdf(s) if s else -math.inf for s in config.activation_sparsity_pattern
        ],
    }


GEMMA3N_GGUF = GGUFTable(
    "gemma3n",
    {
        **NAMES,
        "altup_proj": "model.altup_projections",
        "altup_unembd_proj": "model.altup_unembed_projections",
        ".altup_correct_coef": "altup.correction_coefs",
        ".altup_correct_scale": Rule("altup.correct_output_scale", only="weight"),
        ".altup_predict_coef": "altup.prediction_coefs",
        ".altup_router": "altup.modality_router",
        ".altup_router_norm": "altup.router_norm",
        ".laurel_l": "laurel.linear_left",
        ".laurel_r": "laurel.linear_right",
        ".laurel_post_norm": "laurel.post_laurel_norm",
    },
    constants={
        "hidden_activation": _GELU, "hidden_act": _GELU, "altup_num_inputs": 4, "altup_active_idx": 0,
        "altup_correct_scale": True, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
    },
    read=_read, write=_write, split=_to_gguf, join=_from_gguf,
    biases=(), period=5, lists_windows=True,
    written=(*KEYS, "altup.active_idx", "altup.num_inputs", "activation_sparsity_scale"),
    computed=("intermediate_size", "activation_sparsity_pattern"),
)  # fmt: skip


GEMMA3N = Gemma3n.family = Family.of(
    Gemma3n,
    Gemma3nConfig,
    "Gemma3nForCausalLM",
    "Gemma3nTextModel",
    names=Names(
        *DECODER,
        Headless(
            "model.",
            (
                "embed_tokens_per_layer.",
                "per_layer_model_projection.",
                "per_layer_projection_norm.",
                "altup_projections.",
                "altup_unembed_projections.",
            ),
        ),
    ),
    gguf=GEMMA3N_GGUF,
)
