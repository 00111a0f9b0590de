"""Apertus: an MLP without a gate, with the learned activation function xIELU; norms of queries and keys.

::

    x = embed_tokens[ids]
    in each layer:
        h = attention_layernorm(x)
        q, k, v = rope(q_norm(q_proj(h))), rope(k_norm(k_proj(h))), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)
        x = x + down_proj(xielu(up_proj(feedforward_layernorm(x))))
    logits = lm_head(norm(x))

    xielu(x) = β x + α₊ x² where x is positive, β x + α₋ (exp(min(x, ε)) - 1 - x) elsewhere
    α₊ = softplus(alpha_p), α₋ = β + softplus(alpha_n)

Sources: arXiv:2509.14233, for xIELU arXiv:2411.13010; transformers' ``modeling_apertus``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import UnsupportedModelError, shown
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from .family import Family
from .gguf.names import HEAD_NORMS
from .gguf.table import GGUFTable
from .names import DECODER, Names
from .parts import (
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    config_field,
    layers,
    merge_heads,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)
from .unread import ReadTracker

# RoPE's settings, for files that have no object with such settings.
_ROPE = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
# The learned numbers of xIELU: shapes and initial values.
_NUMBERS = {
    "alpha_p": ((1,), math.log(math.expm1(0.8))), "alpha_n": ((1,), math.log(math.expm1(0.3))),
    "beta": ((), 0.5), "eps": ((), -1e-6),
}  # fmt: skip


@dataclass(frozen=True)
class ApertusConfig(LanguageModelConfig):
    """The settings of an Apertus: the keys of its ``config.json``, with transformers' defaults."""

    model_type = "apertus"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    max_position_embeddings: int = config_field(65_536, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=12e6)
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, whose RoPE is scaled unless it says otherwise.

        Raises:
            UnsupportedModelError: the activation function is not xIELU, or the norms are elsewhere.
        """
        raw = ReadTracker.of(raw)
        if raw.get("qk_norm") is False or raw.get("post_norm"):
            raise UnsupportedModelError(
                "'qk_norm' false, or 'post_norm' true, is not supported for apertus"
            )
        if (given := raw.get("hidden_act", "xielu")) != "xielu":
            raise UnsupportedModelError(
                f"'hidden_act' {shown(given)} is not supported for apertus (supported: 'xielu')"
            )
        if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
            raw = raw.replaced({"rope_parameters": _ROPE})
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, also those of a RoPE that is not scaled."""
        return {"rope_scaling": {"rope_type": "default"}, **super().to_hf()}


class ApertusAttention(Module):
    """Attention with rotary positions and norms of queries and keys."""

    def __init__(self, config: ApertusConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.q_norm = RMSNorm(D, dtype, eps, multiply_before_cast=False)
        self.k_norm = RMSNorm(D, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(self.q_norm(q), angles), rope(self.k_norm(k), angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class XIELU(Module):
    """The activation function xIELU.

    Attributes:
        alpha_p, alpha_n: Weights ``[1]``.
        beta, eps: Weights ``[]``.

    Example:
        >>> act = XIELU(DType.float32)
        >>> values = {"alpha_p": [1.0], "alpha_n": [0.0], "beta": 0.5, "eps": -1e-6}
        >>> _ = act.load_state_dict({name: jnp.asarray(value) for name, value in values.items()})
        >>> print(act(jnp.array([-1.0, 2.0])))
        [-0.06106567  6.253047  ]
    """

    def __init__(self, dtype: DType):
        super().__init__()
        for name, (shape, _) in _NUMBERS.items():
            setattr(self, name, Weight(name, dtype, shape, DeviceRef.CPU()))

    def initializer(self, name: str) -> Any:
        """Initialises a number to its value in a new model."""
        return jax.nn.initializers.constant(_NUMBERS[name][1])

    def __call__(self, x: jax.Array) -> jax.Array:
        """An array of any shape → the same shape and dtype; computed in float32."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        each = (jnp.asarray(getattr(self, name)).reshape(()) for name in _NUMBERS)
        p, n, beta, eps = (number.astype(wide.dtype) for number in each)
        above = jax.nn.softplus(p) * wide * wide
        below = (jnp.expm1(jnp.minimum(wide, eps)) - wide) * (beta + jax.nn.softplus(n))
        return (jnp.where(wide > 0, above, below) + beta * wide).astype(x.dtype)


class ApertusMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: ApertusConfig, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.up_proj = Linear(E, F, dtype)
        self.act_fn = XIELU(dtype)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.act_fn(self.up_proj(x))).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["up_proj"], ["down_proj"])


class ApertusBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: ApertusConfig, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = ApertusAttention(config, dtype)
        self.feedforward_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = ApertusMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.attention_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.feedforward_layernorm(x)), cache


class ApertusModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: ApertusConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, E, dtype)
        self.layers = LayerList(
            ApertusBlock(config, dtype) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Apertus(LanguageModel):
    """An Apertus language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = Apertus(ApertusConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "act_fn" in name][:2]
        ['model.layers.0.mlp.act_fn.alpha_p', 'model.layers.0.mlp.act_fn.alpha_n']
    """

    def __init__(self, config: ApertusConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = ApertusModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files: the numbers of xIELU are metadata, not tensors ----------------------------------


def _read(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE: a file without divisors of the frequencies has a plain one, which an Apertus must say."""
    return {"rope_scaling": config["rope_scaling"] or {"rope_type": "default"}}


APERTUS_GGUF = GGUFTable(
    "apertus",
    {
        ".attn_norm": "attention_layernorm",
        ".ffn_norm": "feedforward_layernorm",
        **HEAD_NORMS,
        ".ffn_gate": None,
    },
    constants={"hidden_act": "xielu"},
    read=_read,
    biases=("attn_q", "attn_k", "attn_v", "attn_output"),
    is_divided=True,
    has_head=True,
    numbers={
        f"xielu.{name}": (f"mlp.act_fn.{name}", shape) for name, (shape, _) in _NUMBERS.items()
    },
)

APERTUS = Apertus.family = Family.of(
    Apertus, ApertusConfig, names=Names(*DECODER), gguf=APERTUS_GGUF
)
