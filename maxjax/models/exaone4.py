"""EXAONE 4: norms after attention and MLP and of each head; if there are sliding layers, only they have RoPE.

::

    x = embed_tokens[ids]
    in each layer:
        q, k, v = q_norm(q_proj(x)), k_norm(k_proj(x)), v_proj(x)
        q, k = rope(q), rope(k)                              not in layers with full attention beside a window
        x = x + post_attention_layernorm(o_proj(softmax(q kᵀ / √D) v))
        x = x + post_feedforward_layernorm(down_proj(silu(gate_proj(x)) · up_proj(x)))
    logits = lm_head(norm(x))

Source: arXiv:2507.11407; transformers' ``modeling_exaone4``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features.
A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from ..dtype import DType
from ..errors import shown
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import RMSNorm
from .family import Family
from .gguf.metadata import unsupported
from .gguf.names import AFTER_NORMS, HEAD_NORMS
from .gguf.table import GGUFTable
from .names import DECODER, Names
from .parts import (
    CAUSAL,
    FULL,
    SLIDING,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    config_field,
    full_every,
    layer_count,
    layer_kinds,
    layers,
    merge_heads,
    rope,
    run_layers,
    size,
    sliding,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class Exaone4Config(LanguageModelConfig):
    """The settings of an EXAONE 4: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        sliding_window: number of tokens that a token attends to in sliding layers. If a model has a window,
            its other layers have no RoPE, also where no layer uses the window; None: all layers have RoPE.
    """

    model_type = "exaone4"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(2048, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=10_000.0)
    tie_word_embeddings: bool = False
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))

    def uses_rope(self, layer: int) -> bool:
        """Return whether a layer has RoPE."""
        return self.sliding_window is None or self.layer_types[layer] == SLIDING

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which null stands for no window."""
        defaults = {"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32}
        raw = with_defaults(raw, defaults)
        kinds = layer_kinds(raw, _kinds(raw.get("sliding_window_pattern"), layer_count(raw)))
        if raw.get("sliding_window") is None:
            kinds = [FULL] * len(kinds)
        return super().from_hf(raw.replaced({"layer_types": kinds}), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings; no window is null."""
        return {**super().to_hf(), "sliding_window": self.sliding_window}


def _kinds(pattern: Any, layers: int) -> list[str]:
    """The kinds of layers: all but every n-th slide, or by letters ("LLLG": three local layers, one global)."""
    if pattern is None or pattern == 0:
        return [FULL] * layers
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(layers)]
    if type(pattern) is not int or pattern < 1:
        raise ValueError(
            f"'sliding_window_pattern' is {shown(pattern)}, neither a number nor letters"
        )
    return list(full_every(pattern, layers))


class Exaone4Attention(Module):
    """Attention whose queries and keys are normalised in each head, with rotary positions in some layers."""

    def __init__(self, config: Exaone4Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, eps = config.hidden_size, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = H, K, D
        window = config.window(layer)
        self.uses_rope = config.uses_rope(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, K * D, dtype)
        self.v_proj = Linear(E, K * D, dtype)
        self.o_proj = Linear(H * D, E, dtype)
        self.q_norm = RMSNorm(D, dtype, eps, multiply_before_cast=False)
        self.k_norm = RMSNorm(D, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = self.q_norm(q), self.k_norm(k)
        if self.uses_rope:
            q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Exaone4MLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: Exaone4Config, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype)
        self.up_proj = Linear(E, F, dtype)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class Exaone4Block(Module):
    """One layer: attention, then the MLP, each normalised before it is added to the hidden states."""

    def __init__(self, config: Exaone4Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Exaone4Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = Exaone4MLP(config, dtype)
        self.post_feedforward_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(x, cache, angles)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(x)), cache


class Exaone4Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Exaone4Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Exaone4Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        config = self.config
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = config.rope_parameters.angles(cache, config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Exaone4(LanguageModel):
    """An EXAONE 4 language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = Exaone4Config(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [n for n in Exaone4(config).raw_state_dict() if "0.post" in n]
        ['model.layers.0.post_attention_layernorm.weight',
         'model.layers.0.post_feedforward_layernorm.weight']
    """

    def __init__(self, config: Exaone4Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Exaone4Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------

# llama.cpp uses the sliding window only in models with exactly this many layers.
_LAYERS = 64


def _write(config: Any) -> dict[str, Any]:
    is_plain = config.sliding_window is None
    is_deep = SLIDING in config.layer_types
    if not (is_deep if config.num_hidden_layers == _LAYERS else is_plain):
        raise unsupported(
            f"the sliding window, or none, of an EXAONE 4 of {config.num_hidden_layers} layers in a GGUF file"
        )
    return {}


EXAONE4_GGUF = GGUFTable(
    "exaone4",
    {**HEAD_NORMS, **AFTER_NORMS},
    constants={"hidden_act": "silu"},
    read=lambda given, tensors, config: {"sliding_window": config.get("sliding_window")},
    write=_write,
    biases=(),
    period=4,
    is_divided=True,
    is_square=True,
)

EXAONE4 = Exaone4.family = Family.of(
    Exaone4, Exaone4Config, names=Names(*DECODER), gguf=EXAONE4_GGUF
)
