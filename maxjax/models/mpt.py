"""MPT: attention with linear biases in place of positions (ALiBi), LayerNorm, and no biases.

::

    x = wte[ids]
    in each layer:
        q, k, v = clip(Wqkv(norm_1(x)))                      to ± clip_qkv, in some models
        x = x + out_proj(softmax(q kᵀ / √D - slope · distance) v)
        x = x + down_proj(gelu(up_proj(norm_2(x))))
    logits = lm_head(norm_f(x))

Source: MosaicML, "Introducing MPT-7B", 2023; transformers' ``modeling_mpt``; arXiv:2108.12409 (ALiBi).

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F = 4 E inner features. A decode step, with one token
per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.placement.split import Segment
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear
from ..nn.norm import LayerNorm
from ..nn.stacked_linear import StackedLinear, split_projections, stacked_rules
from .family import Family
from .gguf.metadata import Settings, unsupported
from .gguf.table import GGUFTable
from .names import Headless, Names
from .parts import (
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    alias,
    alibi_slopes,
    attend,
    config_field,
    constant,
    layers,
    merge_heads,
    refuse,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)
from .parts.rotary import object_of
from .unread import ReadTracker

# The settings of attention, which files have in an object of their own.
_OF_ATTENTION = ("clip_qkv", "softmax_scale", "alibi_bias_max")


@dataclass(frozen=True)
class MPTConfig(LanguageModelConfig):
    """The settings of an MPT: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        d_model: E.
        max_seq_len: length of the texts of its training; the model has no table of positions.
        clip_qkv: bound at which queries, keys and values are clipped; None: they are not.
        softmax_scale: factor of the scores; None: ``1/√D``.
        alibi_bias_max: M, where the slopes of 2ⁿ heads are ``2^(-M i / 2ⁿ)``. transformers does not look at it.
    """

    model_type = "mpt"
    hidden_size, max_position_embeddings = alias("d_model"), alias("max_seq_len")
    num_hidden_layers = alias("n_layers")
    num_attention_heads = num_key_value_heads = alias("n_heads")

    vocab_size: int = size(50_368)
    d_model: int = size(2048, aliases=("hidden_size",))
    intermediate_size: int = constant(None)
    n_layers: int = layers(24, aliases=("num_hidden_layers",))
    n_heads: int = size(16, aliases=("num_attention_heads",))
    head_dim: int = constant(None)
    max_seq_len: int = config_field(2048, minimum=1, aliases=("max_position_embeddings",))
    layer_norm_epsilon: float = 1e-5
    clip_qkv: float | None = None
    softmax_scale: float | None = None
    alibi: bool = constant(True)
    alibi_bias_max: int = config_field(8, minimum=1, maximum=1000)
    tie_word_embeddings: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file.

        Raises:
            UnsupportedModelError: the model has learned positions, norms of queries and keys, one KV head, biases,
                a factor of the logits, an MLP of another size, or attention that is not causal.
        """
        raw = ReadTracker.of(raw)
        of_attention = object_of(raw, "attn_config")
        norms = ("low_precision_layernorm", "layernorm")
        only = {"no_bias": True, "expansion_ratio": 4, "logit_scale": (None,), "norm_type": norms}
        refuse(raw, only, "MPT")
        only = {"alibi": True, "qk_ln": False, "qk_gn": False, "prefix_lm": False, "rope": False}
        refuse(of_attention, {**only, "attn_type": "multihead_attention"}, "MPT")
        refuse(of_attention, {"sliding_window_size": -1}, "MPT")
        given = {key: of_attention[key] for key in _OF_ATTENTION if key in of_attention}
        if not given.get("clip_qkv", True):  # 0 stands for no bound
            given["clip_qkv"] = None
        return super().from_hf(raw.replaced(given), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, those of attention in an object of their own."""
        found = super().to_hf()
        of_attention = {key: found.pop(key) for key in _OF_ATTENTION if key in found}
        return {**found, "attn_config": {"alibi": self.alibi, **of_attention}}


class MPTAttention(Module):
    """Attention with linear biases, and one linear layer for queries, keys and values."""

    def __init__(self, config: MPTConfig, dtype: DType):
        super().__init__()
        E, H, D = config.d_model, config.n_heads, config.head_dim
        self.heads, self.head_dim, self.sizes = H, D, (H * D, H * D, H * D)
        self.bound, self.steepness = config.clip_qkv, config.alibi_bias_max / 8
        self.scale = D**-0.5 if config.softmax_scale is None else config.softmax_scale
        self.Wqkv = StackedLinear(E, self.sizes, ["q", "k", "v"], dtype, stacked=True)
        self.out_proj = Linear(H * D, E, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, k, v = split_projections(self.Wqkv, x, self.sizes)  # [B, T, H D] each
        q, k, v = (a.astype(x.dtype) for a in (q, k, v))
        if self.bound is not None:
            q, k, v = (jnp.clip(a, -self.bound, self.bound) for a in (q, k, v))
        q, k, v = (split_heads(a, self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        slopes = alibi_slopes(self.heads) ** self.steepness  # [H]
        y, cache = attend(q, k, v, cache, scale=self.scale, slopes=slopes)  # [B, T, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        segments = [Segment.head_aware(self.heads, self.head_dim)] * 3
        rules = stacked_rules("Wqkv", self.Wqkv, segments)
        return rules | split_heads_over_mesh({}, {"out_proj": self.heads}, self.head_dim)


class MPTMLP(Module):
    """The MLP, without a gate: ``ffn`` in the files."""

    def __init__(self, config: MPTConfig, dtype: DType):
        super().__init__()
        E, F = config.d_model, config.intermediate_size
        self.up_proj = Linear(E, F, dtype)
        self.down_proj = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(activation("gelu")(self.up_proj(x))).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["up_proj"], ["down_proj"])


class MPTBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states."""

    mlp = alias("ffn")

    def __init__(self, config: MPTConfig, dtype: DType):
        super().__init__()
        E, eps = config.d_model, config.layer_norm_epsilon
        self.norm_1 = LayerNorm(E, dtype=dtype, eps=eps, use_bias=False)
        self.attn = MPTAttention(config, dtype)
        self.norm_2 = LayerNorm(E, dtype=dtype, eps=eps, use_bias=False)
        self.ffn = MPTMLP(config, dtype)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        y, cache = self.attn(self.norm_1(x), cache)
        x = x + y
        return x + self.ffn(self.norm_2(x)), cache


class MPTModel(Module):
    """The model without its head: ``transformer`` in the files."""

    embed_tokens, layers = alias("wte"), alias("blocks")

    def __init__(self, config: MPTConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.d_model, config.layer_norm_epsilon
        self.wte = Embedding(config.vocab_size, E, dtype)
        self.blocks = LayerList(MPTBlock(config, dtype) for _ in range(config.n_layers))
        self.norm_f = LayerNorm(E, dtype=dtype, eps=eps, use_bias=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.wte(ids).astype(self.dtype.np)  # [B, T, E]
        x, cache = run_layers(self.blocks, x, cache)
        return self.norm_f(x), cache


class MPT(LanguageModel):
    """An MPT language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> list(MPT(MPTConfig(100, 8, n_layers=1, n_heads=2)).raw_state_dict())[:2]
        ['transformer.wte.weight', 'transformer.norm_f.weight']
    """

    model = alias("transformer")

    def __init__(self, config: MPTConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.transformer = MPTModel(config, self.dtype)
        self.lm_head = self.make_head(config.d_model, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


def _read(given: Settings, tensors: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The settings of attention. Without a bias of the scores a file has learned positions."""
    most = given.number("attention.max_alibi_bias", 0.0, positive=False)
    if not most or most % 1:
        raise given.unsupported(f"'attention.max_alibi_bias' {most} of an MPT")
    bound = given.number("attention.clamp_kqv", 0.0, positive=False)
    found = {"alibi_bias_max": int(most)}
    return {"attn_config": {**found, "clip_qkv": bound} if bound else found}


def _write(config: MPTConfig) -> dict[str, Any]:
    if config.softmax_scale is not None and config.softmax_scale != config.head_dim**-0.5:
        raise unsupported("'softmax_scale' in a GGUF file of 'mpt'")
    bound = {} if config.clip_qkv is None else {"attention.clamp_kqv": config.clip_qkv}
    return {"attention.max_alibi_bias": float(config.alibi_bias_max), **bound}


MPT_GGUF = GGUFTable(
    "mpt",
    {
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        ".attn_norm": "norm_1",
        **dict.fromkeys((".attn_q", ".attn_k", ".attn_v", ".ffn_gate")),
        ".attn_qkv": "attn.Wqkv",
        ".attn_output": "attn.out_proj",
        ".ffn_norm": "norm_2",
        ".ffn_up": "ffn.up_proj",
        ".ffn_down": "ffn.down_proj",
    },
    layer="transformer.blocks.*.",
    read=_read,
    write=_write,
    written=("attention.max_alibi_bias", "attention.clamp_kqv"),
    computed=("attn_config",),
    has_rope=False,
    biases=(),
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
)

MPT_FAMILY = MPT.family = Family.of(
    MPT,
    MPTConfig,
    "MptForCausalLM",
    "MPTForCausalLM",  # MosaicML's name in its files
    "MptModel",
    names=Names(Headless("transformer.", ("wte.", "blocks.", "norm_f."))),
    tied=("lm_head.weight", "transformer.wte.weight"),
    gguf=MPT_GGUF,
)
