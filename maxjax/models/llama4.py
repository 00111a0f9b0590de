"""Llama 4, the text model: experts beside an MLP, and attention in chunks.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = q_proj(h), k_proj(h), v_proj(h)
        in three of four layers:     q, k = q' / rms(q'), k' / rms(k'), with q', k' = rope(q), rope(k)
        in every fourth layer:       q = q · (1 + attn_scale · log(1 + ⌊(position + 1) / floor_scale⌋))
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before (in the chunk)
        h = post_attention_layernorm(x)
        x = x + feed_forward(h)
    logits = lm_head(norm(x))

    feed_forward(h) = mlp(h), or in a layer with experts
    feed_forward(h) = shared_expert(h) + Σ expert(σ(score) · h)         over the k experts with the highest router(h)

Each expert is an MLP, ``down_proj(silu(gate_proj(h)) · up_proj(h))``.

Source: transformers' ``modeling_llama4``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
X experts, k experts for each token, V tokens in the vocabulary. A decode step has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.metadata import unsupported
from .gguf.names import expert_names
from .gguf.table import GGUFTable
from .names import DECODER, Names
from .parts import (
    CAUSAL,
    FULL,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    chunked,
    config_field,
    every_nth_is_0,
    layer_count,
    layer_kinds,
    layers,
    merge_heads,
    positive_integer,
    replicate_over_mesh,
    rope,
    rope_layers,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.rotary import QueryScaling

CHUNKED = "chunked_attention"


@dataclass(frozen=True)
class Llama4Config(LanguageModelConfig):
    """The settings of a Llama 4's text model: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size, intermediate_size_mlp: inner features of an expert, the shared one too, and of the MLP
            of a layer without experts.
        rope_parameters: the rotary position embedding, of neighbouring features.
        no_rope_layers: for each layer 1 if it has RoPE, else 0; every fourth has none by default.
        use_qk_norm: whether queries and keys of layers with RoPE are divided by their root mean square.
        attention_chunk_size: number of positions in a chunk; None: there are no chunks.
        layer_types: for each layer "chunked_attention" or "full_attention"; layers with RoPE have chunks by default.
        attn_temperature_tuning, attn_scale, floor_scale: whether queries of layers without RoPE grow with their
            position, and how.
        num_local_experts, num_experts_per_tok: X and k.
        moe_layers: the layers that have experts; all by default.
    """

    model_type = "llama4_text"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=128)
    intermediate_size_mlp: int = size(default=16_384)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(131_072, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=5e5, interleaved=True)
    no_rope_layers: tuple[int, ...] = config_field((), maximum=1)
    use_qk_norm: bool = True
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    attention_chunk_size: int | None = config_field(None, minimum=1)
    layer_types: tuple[str, ...] = config_field((), choices=(FULL, CHUNKED))
    attn_temperature_tuning: bool = True
    attn_scale: float = config_field(0.1, minimum=1e-30)
    floor_scale: int = config_field(8192, minimum=1)
    num_local_experts: int = size(default=16)
    num_experts_per_tok: int = size(default=1)
    moe_layers: tuple[int, ...] | None = config_field(None, maximum=1000)

    def __post_init__(self) -> None:
        if not self.no_rope_layers:
            self._set("no_rope_layers", every_nth_is_0(self.num_hidden_layers, 4))
        if len(self.no_rope_layers) != self.num_hidden_layers:
            raise ValueError(
                f"{len(self.no_rope_layers)} entries say which of {self.num_hidden_layers} layers have RoPE "
                "('no_rope_layers')"
            )
        if not self.layer_types:
            kinds = (CHUNKED if one else FULL for one in self.no_rope_layers)
            self._set("layer_types", tuple(kinds))
        if self.moe_layers is None:
            self._set("moe_layers", tuple(range(self.num_hidden_layers)))
        super().__post_init__()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which null stands for no chunks.

        Without ``moe_layers``, every ``interleave_moe_layer_step``-th layer has experts.
        """
        raw = with_defaults(raw, {"num_key_value_heads": 8, "attention_chunk_size": 8192})
        uses_rope, count = rope_layers(raw), layer_count(raw)
        kinds = layer_kinds(raw, [CHUNKED if one else FULL for one in uses_rope])
        raw.get("interleave_moe_layer_step")  # read in any case, so that no warning names it
        listed = raw.get("moe_layers")
        if listed is None:
            step = positive_integer(raw, "interleave_moe_layer_step", 1)
            listed = list(range(step - 1, count, step))
        if not isinstance(listed, list) or not all(type(i) is int for i in listed):
            raise ValueError("'moe_layers' is not a list of integers")
        raw = raw.replaced({"no_rope_layers": list(uses_rope), "layer_types": kinds})
        return super().from_hf(raw, moe_layers=tuple(listed), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with null for no chunks."""
        return {**super().to_hf(), "attention_chunk_size": self.attention_chunk_size}

    @property
    def sliding_window(self) -> int | None:
        """The number of positions in a chunk, for what treats it as a window."""
        return self.attention_chunk_size

    def window(self, layer: int) -> int | None:
        """The number of positions in a chunk of a layer; None: it has no chunks."""
        return self.attention_chunk_size if self.layer_types[layer] == CHUNKED else None

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return self.moe_layers is not None and layer in self.moe_layers


class Llama4Attention(Module):
    """Attention in chunks with rotary positions and normalised queries and keys, or with growing queries."""

    def __init__(self, config: Llama4Config, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, chunk = config.hidden_size, config.attention_bias, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.mask = CAUSAL if chunk is None else chunked(chunk)
        self.uses_rope = bool(config.no_rope_layers[layer])
        self.uses_norm, self.epsilon = config.use_qk_norm, config.rms_norm_eps
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles, growth: jax.Array | None
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        if self.uses_rope:
            q, k = rope(q, angles), rope(k, angles)
            if self.uses_norm:
                q, k = divided_by_rms(q, self.epsilon), divided_by_rms(k, self.epsilon)
        elif growth is not None:
            q = (q.astype(jnp.float32) * growth[..., None, None]).astype(q.dtype)
        y, cache = attend(q, k, v, cache, self.mask)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


def divided_by_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """Return ``x / √(mean(x²) + epsilon)`` over the last axis, computed in float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + epsilon)).astype(x.dtype)


class Llama4MLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202), with F inner features: of a layer, or the shared expert."""

    def __init__(self, config: Llama4Config, F: int, dtype: DType):
        super().__init__()
        E = config.hidden_size
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


class Llama4SparseMLP(Module):
    """The mixture of experts, whose inputs are multiplied by their shares, and the shared expert."""

    def __init__(self, config: Llama4Config, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.router = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        self.shared_expert = Llama4MLP(config, F, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.router(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, "sigmoid")  # [B, T, k]
        inputs = x[..., None, :] * shares[..., None].astype(x.dtype)  # [B, T, k, E]
        ones = jnp.ones_like(shares)[..., None]  # [B, T, k, 1]: each choice is a token of its own
        y = self.experts(inputs, chosen[..., None], ones)  # [B, T, k, E]
        return jnp.sum(y, axis=-2) + self.shared_expert(x)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("router")


class Llama4Block(Module):
    """One layer: attention, then the MLP or the mixture of experts, each added to the hidden states."""

    def __init__(self, config: Llama4Config, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = Llama4Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        if config.is_sparse(layer):
            self.feed_forward = Llama4SparseMLP(config, dtype)
        else:
            self.feed_forward = Llama4MLP(config, config.intermediate_size_mlp, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles, growth: jax.Array | None
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles, growth)
        x = x + y
        return x + self.feed_forward(self.post_attention_layernorm(x)), cache


class Llama4Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Llama4Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Llama4Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        config = self.config
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles, growth = config.rope_parameters.angles(cache, config.head_dim), None
        if config.attn_temperature_tuning:
            scaling = QueryScaling(config.attn_scale, config.floor_scale, 1.0)
            growth = scaling.factors(cache.positions)  # [B, T]
        x, cache = run_layers(self.layers, x, cache, angles, growth)
        return self.norm(x), cache


class Llama4(LanguageModel):
    """A Llama 4 language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = Llama4Config(100, 8, 16, num_hidden_layers=4, num_attention_heads=2, head_dim=4)
        >>> [name for name in Llama4(config).raw_state_dict() if "3.feed_forward.router" in name]
        ['model.layers.3.feed_forward.router.weight']
    """

    def __init__(self, config: Llama4Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = Llama4Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------

# n, where every n-th layer has full attention and no RoPE.
_PERIOD = 4


def _of_gguf(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widths, and settings that are fixed in llama.cpp's code."""
    if given.count("attention.sliding_window", 1, minimum=0) == 0:
        raise given.unsupported("a Llama 4 without chunks")
    uses_rope = every_nth_is_0(config["num_hidden_layers"], _PERIOD)
    return {
        "intermediate_size": given.count("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": given.count("interleave_moe_layer_step", 1),
        "use_qk_norm": given.count("expert_count") != 128,
        "sliding_window": None,
        "layer_types": [CHUNKED if one else FULL for one in uses_rope],
    }


def _to_gguf(config: Llama4Config) -> dict[str, Any]:
    """Return the widths, and which layers have experts."""
    count, sparse = config.num_hidden_layers, config.moe_layers
    if config.no_rope_layers != every_nth_is_0(count, _PERIOD):
        raise unsupported("other layers without RoPE than every fourth in a GGUF file")
    step = sparse[0] + 1 if sparse else 0
    if not step or sparse != tuple(range(step - 1, count, step)):
        raise unsupported("experts in other layers than every n-th in a GGUF file")
    return {
        "feed_forward_length": config.intermediate_size_mlp, "interleave_moe_layer_step": step,
        "expert_feed_forward_length": config.intermediate_size,
    }  # fmt: skip


LLAMA4_GGUF = GGUFTable(
    "llama4",
    {
        **{f".ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **expert_names("feed_forward", "router", shared="shared_expert"),
    },
    keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    constants={
        "hidden_act": "silu", "attention_chunk_size": 8192, "attn_temperature_tuning": True,
        "floor_scale": 8192, "attn_scale": 0.1,
    },
    read=_of_gguf, write=_to_gguf,
    written=("expert_feed_forward_length", "interleave_moe_layer_step"),
    biases=(), period=_PERIOD, is_divided=True,
)  # fmt: skip

LLAMA4 = Llama4.family = Family.of(
    Llama4,
    Llama4Config,
    "Llama4ForCausalLM",
    "Llama4TextModel",
    names=Names(
        FusedExperts(
            "feed_forward.experts.#.*.weight",
            gate_up=("feed_forward.experts.gate_up_proj",),
            down=("feed_forward.experts.down_proj",),
            transposed=True,
            written=True,
        ),
        *DECODER,
    ),
    gguf=LLAMA4_GGUF,
)
