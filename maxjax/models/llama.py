"""Llama 1 to 3, and models with the same architecture: Mistral, Qwen 2 and 2.5, Seed-OSS, Yi and many more.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over tokens up to its own
        h = post_attention_layernorm(x)
        x = x + down_proj(silu(gate_proj(h)) · up_proj(h))
    logits = lm_head(norm(x))

Sources: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783; Mistral arXiv:2310.06825; Qwen 2 arXiv:2407.10671.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
V tokens in the vocabulary. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from .gguf.config.read import expert_counts
from .gguf.metadata import MAX_EXPERTS, Settings
from .gguf.names import expert_names
from .gguf.table import PERMUTED, GGUFTable
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
    bidirectional,
    config_field,
    constant,
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
class LlamaConfig(LanguageModelConfig):
    """The settings of a Llama: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        attention_bias, mlp_bias: whether the linear layers of attention and MLP have biases.
        attention_out_bias: whether the output projection of attention has one; as ``attention_bias`` by default.
        is_causal: whether a token attends only to itself and to those before it. Models that were fine-tuned to embed
            texts may attend in both directions (arXiv:2404.05961).
    """

    model_type = "llama"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(2048, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=10_000.0)
    attention_bias: bool = False
    attention_out_bias: bool | None = constant(None)
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    is_causal: bool = True


class LlamaAttention(Module):
    """Attention with rotary positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, out_bias = config.hidden_size, config.attention_bias, config.attention_out_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        # None in a Llama; Mistral and Qwen 2 below may have a window.
        window = config.window(layer)
        self.mask = CAUSAL if window is None else sliding(window)
        if not config.is_causal:
            self.mask = bidirectional(window)  # here the window is a radius, as in transformers
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias if out_bias is None else out_bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (
            split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v)
        )  # [B, T, H or K, D]
        q, k = rope(q, angles), rope(k, angles)
        # Stores k and v in the cache if there is one, and attends to the tokens that the mask allows.
        y, cache = attend(q, k, v, cache, self.mask, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Return the rules that split the linear layers between heads, over the mesh axis ``model``."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class LlamaMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig, dtype: DType):
        super().__init__()
        E, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.act = config.hidden_act
        self.gate_proj = Linear(E, F, dtype, has_bias=bias)
        self.up_proj = Linear(E, F, dtype, has_bias=bias)
        self.down_proj = Linear(F, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Return the rules that split F over the mesh axis ``model``."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class LlamaBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        # Rounds to the model's dtype before it multiplies by the weight, as transformers does.
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = LlamaAttention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp = LlamaMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class LlamaModel(Module):
    """The decoder without the head; its tensors are named ``model.*``. The cache is that of all its layers."""

    def __init__(self, config: LlamaConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            LlamaBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Llama(LanguageModel):
    """A Llama language model. ``LanguageModel`` has its call: ids → :class:`LlamaModel` → ``lm_head``.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> list(Llama(config).raw_state_dict())[:3]
        ['lm_head.weight', 'model.embed_tokens.weight', 'model.norm.weight']
    """

    def __init__(self, config: LlamaConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = LlamaModel(config, self.dtype)
        # If it is tied, its weight is embed_tokens.weight.
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


def _read_gguf(given: Settings, tensors: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return what marks a Mixtral (experts) or a Mistral (a window): they too name the architecture ``llama``."""
    window = given.count("attention.sliding_window", 0, minimum=0)
    if given.count("expert_count", 0, minimum=0, maximum=MAX_EXPERTS):
        counts = expert_counts(given)
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": counts["num_experts"],
            "num_experts_per_tok": counts["num_experts_per_tok"],
            "sliding_window": window or None,
        }
    if window:
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": window,
        }
    return {"mlp_bias": "blk.0.ffn_gate.bias" in tensors}


def _write_gguf(config: Any) -> dict[str, Any]:
    """Return the sliding window of a Mistral or Mixtral, which llama.cpp does not read."""
    window = config.window(0)
    return {} if window is None else {"attention.sliding_window": window}


# Llama 1 to 3, Mistral and Mixtral. The rows of their queries and keys are in another order than in Hugging Face's
# files, as llama.cpp rotates neighbouring features.
LLAMA_GGUF = GGUFTable(
    "llama",
    {**PERMUTED, **expert_names("block_sparse_moe", maps=("w1", "w3", "w2"))},
    constants={"hidden_act": "silu"},
    has_windows=False,
    required={"partial_rotary_factor": 1.0, "use_sliding_window": False},
    read=_read_gguf,
    write=_write_gguf,
    biases=("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    is_divided=True,
)

LLAMA = Llama.family = Family.of(Llama, LlamaConfig, names=Names(*DECODER), gguf=LLAMA_GGUF)

# --- Mistral: each token attends to a window of tokens ------------------------------------------


@dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    """The settings of a Mistral: all its layers have the sliding window, if there is one."""

    model_type = "mistral"

    num_key_value_heads: int = size(default=8)
    max_position_embeddings: int = config_field(131_072, minimum=1)
    attention_bias: bool = constant(False)
    mlp_bias: bool = constant(False)
    sliding_window: int | None = config_field(None, minimum=1)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file: null means no window, a missing key one of 4096."""
        return super().from_hf(with_defaults(raw, {"sliding_window": 4096}), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings; no window is null."""
        return {**super().to_hf(), "sliding_window": self.sliding_window}


class Mistral(Llama):
    """A Mistral language model.

    Example:
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=8, sliding_window=4)
        >>> Mistral(MistralConfig(100, 16, 32, **sizes)).cache(1, 64).sliding.size
        4
    """


# In GGUF files it is a Llama: see LLAMA_GGUF.
MISTRAL = Mistral.family = Family.of(Mistral, MistralConfig, names=Names(*DECODER))


# --- Qwen 2 and 2.5: queries, keys and values have biases ---------------------------------------


def window_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``layer_types`` and ``sliding_window`` of a Qwen.

    With ``use_sliding_window``, the layers from ``max_window_layers`` on have the window; ``layer_types``, if
    there is one, decides instead.

    Raises:
        ValueError: the window is used, and ``max_window_layers`` is not an integer.
    """
    raw = with_defaults(raw, {"sliding_window": 4096, "max_window_layers": 28})
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    kinds = layer_kinds(raw)
    if kinds is None:
        first = layer_count(raw) if window is None else raw.get("max_window_layers")
        if type(first) is not int:
            raise ValueError(f"'max_window_layers' must be an integer, not {shown(first)}")
        kinds = [SLIDING if i >= first else FULL for i in range(layer_count(raw))]
    return {"layer_types": kinds, "sliding_window": window if SLIDING in kinds else None}


@dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """The settings of a Qwen 2 or 2.5: only the projections of queries, keys and values have biases."""

    model_type = "qwen2"

    max_position_embeddings: int = config_field(32_768, minimum=1)
    attention_bias: bool = constant(True)
    attention_out_bias: bool | None = constant(False)
    mlp_bias: bool = constant(False)
    sliding_window: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, SLIDING))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, with the window of :func:`window_layers`."""
        raw = with_defaults(raw, {"num_key_value_heads": 32}).replaced(window_layers(raw))
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with ``use_sliding_window``."""
        return {**super().to_hf(), "use_sliding_window": SLIDING in self.layer_types}


class Qwen2(Llama):
    """A Qwen 2 or 2.5 language model, also the text model of Qwen2-VL and Qwen2.5-VL.

    Example:
        >>> config = Qwen2Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> [name for name in Qwen2(config).raw_state_dict() if "0.self_attn" in name][:2]
        ['model.layers.0.self_attn.q_proj.weight', 'model.layers.0.self_attn.q_proj.bias']
    """


_QWEN2_GGUF = GGUFTable(
    "qwen2",
    constants={"hidden_act": "silu", "use_sliding_window": False},
    has_windows=False,
    required={"partial_rotary_factor": 1.0},
    written=("pooling_type",),
)
QWEN2_GGUF = replace(_QWEN2_GGUF, variants=(_QWEN2_GGUF.multimodal("qwen2vl"),))

QWEN2 = Qwen2.family = Family.of(Qwen2, Qwen2Config, names=Names(*DECODER), gguf=QWEN2_GGUF)


# --- Seed-OSS: a setting of its own for the bias of the output --------------------------------------


@dataclass(frozen=True)
class SeedOSSConfig(LlamaConfig):
    """The settings of a Seed-OSS."""

    model_type = "seed_oss"

    max_position_embeddings: int = config_field(524_288, minimum=1)
    attention_bias: bool = True
    attention_out_bias: bool | None = False
    is_causal: bool = constant(True)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file."""
        defaults = {"num_key_value_heads": 8, "head_dim": 128}
        return super().from_hf(with_defaults(raw, defaults), **values)


class SeedOSS(Llama):
    """A Seed-OSS language model."""


SEED_OSS_GGUF = GGUFTable(
    "seed_oss",
    {".ffn_norm": None, ".post_attention_norm": "post_attention_layernorm"},
    constants={"hidden_act": "silu", "mlp_bias": False, "attention_out_bias": False},
)
SEED_OSS = SeedOSS.family = Family.of(
    SeedOSS,
    SeedOSSConfig,
    "SeedOssForCausalLM",
    "SeedOssModel",
    names=Names(*DECODER),
    gguf=SEED_OSS_GGUF,
)
