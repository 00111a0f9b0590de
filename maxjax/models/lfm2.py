"""LFM2, with and without experts: short convolutions between two gates in most layers, attention in the others.

::

    x = embed_tokens[ids]
    in each layer:
        h = operator_norm(x)
        x = x + conv(h)  or  x + self_attn(h)
        x = x + feed_forward(ffn_norm(x))
    logits = lm_head(embedding_norm(x))

    conv(h):          b, c, u = in_proj(h)
                      out_proj(c · conv(b · u))              a causal convolution of each channel
    self_attn(h):     q, k, v = rope(q_layernorm(q_proj(h))), rope(k_layernorm(k_proj(h))), v_proj(h)
                      out_proj(softmax(q kᵀ / √D) v)         for each head, over the tokens before
    feed_forward(h):  w2(silu(w1(h)) · w3(h)), or in a layer with experts
                      Σ share · expert(h)                    over the k experts with the largest
                                                             sigmoid(gate(h)) + expert_bias

The shares are sigmoid(gate(h)), normalised over the chosen experts.

Source: arXiv:2511.23404; transformers' ``modeling_lfm2`` and ``modeling_lfm2_moe``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
X experts, k experts for each token. A decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.split import COLUMNS, Segment
from ..graph.weight.weight import Weight
from ..nn.embedding import Embedding
from ..nn.kv_cache.kinds import State, States
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from ..nn.ssm.convolution import CausalConv
from ..nn.stacked_linear import StackedLinear, split_projections, stacked_rules
from .family import Family
from .fused_experts import FusedExperts
from .gguf.config.read import Config
from .gguf.metadata import Settings
from .gguf.names import Rule, expert_names
from .gguf.state_layouts import Taps
from .gguf.table import GGUFTable
from .names import ROPE_TABLES, Headless, Names
from .parts import (
    FULL,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    config_field,
    layer_count,
    layers,
    merge_heads,
    positive_integer,
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.recurrent import automatic_axes, convolve

CONV = "conv"
_NAMES = ("w1", "w3", "w2")  # of the gate, up and down projections


@dataclass(frozen=True)
class LFM2Config(LanguageModelConfig):
    """The settings of an LFM2.

    Attributes:
        intermediate_size: F, which files may give as a number that is adjusted (:func:`inner_size`).
        layer_types: kind of each layer: "conv" or "full_attention".
        conv_L_cache: number of tokens that a convolution spans.
    """

    model_type = "lfm2"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    layer_types: tuple[str, ...] = config_field((), choices=(CONV, FULL))
    max_position_embeddings: int = config_field(128_000, minimum=1)
    norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=1e6)
    conv_L_cache: int = size(3, minimum=2)
    conv_bias: bool = False
    tie_word_embeddings: bool = True

    @property
    def layer_kinds(self) -> tuple[Any, ...]:
        """A kind for each layer; layers of one kind have the same tensors."""
        return tuple((kind, self.is_sparse(i)) for i, kind in enumerate(self.layer_types))

    def states(self, layer: int) -> Mapping[str, Any]:
        """The last inputs of the convolution, or the keys and values of attention."""
        if self.layer_types[layer] == FULL:
            return super().states(layer)
        return {CONV: States((State("conv", (self.conv_L_cache - 1, self.hidden_size), axis=1),))}

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings to compare with the tensors: the size of the MLPs after the adjustment."""
        raw = super().bounded_sizes(raw)
        try:
            return {**raw, "intermediate_size": inner_size(raw)} if raw else raw
        except (ValueError, OverflowError):  # from_dict reports it
            return raw

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, also under their original keys."""
        raw = with_defaults(raw, {"num_key_value_heads": 8})
        found: dict[str, Any] = {"intermediate_size": inner_size(raw)}
        indices, tied = raw.get("full_attn_idxs"), raw.get("tie_embedding")
        if tied is not None:
            found["tie_word_embeddings"] = tied
        if indices is not None and raw.get("layer_types") is None:
            if not isinstance(indices, list):
                raise ValueError("'full_attn_idxs' is not a list of numbers")
            found["layer_types"] = [FULL if i in indices else CONV for i in range(layer_count(raw))]
        return super().from_hf(raw.replaced(found), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the size of the MLPs as it is."""
        return {**super().to_hf(), "block_auto_adjust_ff_dim": False}


def inner_size(raw: Mapping[str, Any]) -> Any:
    """Return F of a ``config.json``: its number, or if ``block_auto_adjust_ff_dim`` two thirds of it, rounded up.

    Raises:
        ValueError: a setting of the adjustment is not a positive number.

    Example:
        >>> inner_size({"intermediate_size": 6}), inner_size({"block_ff_dim": 900, "block_multiple_of": 64})
        (256, 640)
    """
    given = raw.get("block_ff_dim")
    given = raw.get("intermediate_size") if given is None else given
    given = 12288 if given is None else given
    adjusts, factor = raw.get("block_auto_adjust_ff_dim"), raw.get("block_ffn_dim_multiplier", 1.0)
    raw.get("block_multiple_of")  # read in any case, so that no warning names it
    if adjusts is False or type(given) is not int:
        return given
    multiple = positive_integer(raw, "block_multiple_of", 256)
    given = 2 * given // 3
    if factor is None:
        return given
    if type(factor) not in (int, float) or not 0 < factor < 1e6:
        raise ValueError("'block_ffn_dim_multiplier' is not a positive number")
    return multiple * -(-int(factor * given) // multiple)


@dataclass(frozen=True)
class LFM2MoEConfig(LFM2Config):
    """The settings of an LFM2 with experts.

    Attributes:
        intermediate_size, moe_intermediate_size: inner features of the MLP in a layer without experts, and of
            an expert.
        num_experts, num_experts_per_tok: X and k.
        num_dense_layers: number of layers before the first that has experts.
        norm_topk_prob: whether the shares of the chosen experts are normalised to sum to 1.
        use_expert_bias: whether there is a bias that balances how often experts are chosen.
        routed_scaling_factor: factor of the shares.
    """

    model_type = "lfm2_moe"

    num_experts: int = size(32, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(4)
    moe_intermediate_size: int = size(1792)
    num_dense_layers: int = config_field(2, maximum=1000)
    norm_topk_prob: bool = True
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return layer >= self.num_dense_layers

    @classmethod
    def bounded_sizes(cls, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings to compare with the tensors; the size of the MLPs is not adjusted."""
        return LanguageModelConfig.bounded_sizes(raw)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file; the size of the MLPs is not adjusted."""
        raw = with_defaults(raw, {"intermediate_size": 7168})
        return super().from_hf(raw.replaced({"block_auto_adjust_ff_dim": False}), **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings."""
        found = super().to_hf()
        del found["block_auto_adjust_ff_dim"]
        return found


class LFM2ShortConv(Module):
    """The short convolution between two gates."""

    def __init__(self, config: LFM2Config, dtype: DType):
        super().__init__()
        E, bias = config.hidden_size, config.conv_bias
        self.sizes = (E, E, E)
        self.in_proj: Any = StackedLinear(
            E, self.sizes, ["before", "after", "x"], dtype, stacked=True, has_bias=bias
        )
        self.conv = CausalConv(E, config.conv_L_cache, dtype, bias)
        self.out_proj = Linear(E, E, dtype, has_bias=bias)

    @automatic_axes
    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        b, c, u = (
            a.astype(x.dtype) for a in split_projections(self.in_proj, x, self.sizes)
        )  # [B, T, E]
        y, cache = convolve(self.conv, b * u, cache, CONV)
        return self.out_proj(c * y.astype(x.dtype)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the channels."""
        segments = [Segment.even(width) for width in self.sizes]
        columns = {"out_proj": COLUMNS}
        return stacked_rules("in_proj", self.in_proj, segments) | columns


class LFM2Attention(Module):
    """Attention with rotary positions and normalised queries and keys; H/K query heads share a key-value head."""

    def __init__(self, config: LFM2Config, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, eps = config.hidden_size, config.norm_eps
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, K * D, dtype)
        self.v_proj = Linear(E, K * D, dtype)
        self.out_proj = Linear(H * D, E, dtype)
        self.q_layernorm = RMSNorm(D, dtype, eps, multiply_before_cast=False)
        self.k_layernorm = RMSNorm(D, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(self.q_layernorm(q), angles), rope(self.k_layernorm(k), angles)
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"out_proj": self.heads}, self.head_dim)


class LFM2MLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: LFM2Config, dtype: DType):
        super().__init__()
        E, F = config.hidden_size, config.intermediate_size
        self.w1 = Linear(E, F, dtype)
        self.w3 = Linear(E, F, dtype)
        self.w2 = Linear(F, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.w1, self.w3], x)  # [B, T, F]
        return self.w2(jax.nn.silu(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["w1", "w3"], ["w2"])


class LFM2SparseMLP(Module):
    """The mixture of experts, which are chosen by sigmoids and a bias that balances how often each is."""

    def __init__(self, config: LFM2MoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.top_k, self.normalised = config.num_experts_per_tok, config.norm_topk_prob
        self.factor = config.routed_scaling_factor
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, _NAMES)
        self.expert_bias = None
        if config.use_expert_bias:
            self.expert_bias = Weight("expert_bias", DType.float32, (X,), DeviceRef.CPU())

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.expert_bias is None else jnp.asarray(self.expert_bias)
        chosen, shares = route(  # [B, T, k]
            self.gate(x), self.top_k, "sigmoid", bias=bias, normalised=self.normalised, more=1e-6,
            factor=self.factor,
        )  # fmt: skip
        return self.experts(x, chosen, shares)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class LFM2Block(Module):
    """One layer: a convolution or attention, then the MLP or the experts, each added to the hidden states."""

    def __init__(self, config: Any, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.norm_eps
        self.convolves = config.layer_types[layer] == CONV
        self.operator_norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        if self.convolves:
            self.conv = LFM2ShortConv(config, dtype)
        else:
            self.self_attn = LFM2Attention(config, dtype)
        self.ffn_norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        mlp = LFM2SparseMLP if config.is_sparse(layer) else LFM2MLP
        self.feed_forward: Any = mlp(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.operator_norm(x)
        y, cache = self.conv(h, cache) if self.convolves else self.self_attn(h, cache, angles)
        x = x + y
        return x + self.feed_forward(self.ffn_norm(x)), cache


class LFM2Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: LFM2Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, eps = config.hidden_size, config.norm_eps
        self.embed_tokens = Embedding(config.vocab_size, E, dtype)
        self.layers: Any = LayerList(
            LFM2Block(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.embedding_norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.embedding_norm(x), cache


class LFM2(LanguageModel):
    """An LFM2 language model.

    Example:
        >>> sizes = dict(num_hidden_layers=3, num_attention_heads=2)
        >>> config = LFM2Config(100, 8, 16, **sizes, layer_types=("conv", "full_attention", "conv"))
        >>> cache = LFM2(config).cache(batch=1, capacity=16)
        >>> cache.num_layers, cache.more["conv"].arrays["conv"].shape
        (1, (2, 1, 2, 8))
    """

    def __init__(self, config: LFM2Config, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = LFM2Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


class LFM2MoE(LFM2):
    """An LFM2 language model with experts (8B-A1B).

    Example:
        >>> config = LFM2MoEConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2, num_experts=8)
        >>> [name for name in LFM2MoE(config).raw_state_dict() if "feed_forward.expert_bias" in name]
        ['model.layers.2.feed_forward.expert_bias']
    """


# --- GGUF files, in which a layer with 0 KV heads has a convolution ------------------------------


def _read_gguf(given: Settings, tensors: Any, config: Config) -> Config:
    """Return the kinds of the layers, from their tensors."""
    count = range(config["num_hidden_layers"])
    convolves = [f"blk.{i}.shortconv.conv.weight" in tensors for i in count]
    return {
        "layer_types": [CONV if one else FULL for one in convolves],
        "conv_bias": "blk.0.shortconv.in_proj.bias" in tensors,
    }


def _write_gguf(config: LFM2Config) -> dict[str, Any]:
    """Return the number of KV heads of each layer."""
    heads = config.num_key_value_heads
    return {"attention.head_count_kv": [heads * (kind == FULL) for kind in config.layer_types]}


LFM2_GGUF = GGUFTable(
    "lfm2",
    {
        "output_norm": None, "token_embd_norm": "model.embedding_norm",
        ".attn_norm": "operator_norm", ".ffn_norm": "ffn_norm",
        ".attn_output": "self_attn.out_proj",
        ".attn_q_norm": "self_attn.q_layernorm", ".attn_k_norm": "self_attn.k_layernorm",
        ".ffn_gate": "feed_forward.w1", ".ffn_up": "feed_forward.w3",
        ".ffn_down": "feed_forward.w2", ".shortconv.conv": Rule("conv.conv", Taps()),
        ".shortconv.in_proj": "conv.in_proj", ".shortconv.out_proj": "conv.out_proj",
    },
    keys={"shortconv.l_cache": "conv_L_cache"},
    constants={"block_auto_adjust_ff_dim": False, "hidden_act": "silu"}, read=_read_gguf, write=_write_gguf,
    biases=(), computed=("intermediate_size", "block_auto_adjust_ff_dim"),
    epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"),
)  # fmt: skip

# How llama.cpp computes the shares of experts, whatever a file says.
_SHARES = {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True}

LFM2_MOE_GGUF = replace(
    LFM2_GGUF, architecture="lfm2moe",
    tensors={
        **LFM2_GGUF.tensors, **expert_names("feed_forward", maps=_NAMES),
        ".exp_probs_b": Rule("feed_forward.expert_bias", only="bias"),
    },
    keys={
        **LFM2_GGUF.keys, "leading_dense_block_count": "num_dense_layers",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    },
    constants={"hidden_act": "silu", **_SHARES},
    write=lambda config: {**_write_gguf(config), "expert_gating_func": 2},
    written=("expert_gating_func",), biases=("exp_probs_b",), computed=(),
)  # fmt: skip

_HEADLESS = Headless("model.", ("embed_tokens.", "layers.", "embedding_norm."))
LFM2_FAMILY = LFM2.family = Family.of(
    LFM2,
    LFM2Config,
    "Lfm2ForCausalLM",
    "Lfm2Model",
    names=Names(ROPE_TABLES, _HEADLESS),
    gguf=LFM2_GGUF,
)
LFM2_MOE = LFM2MoE.family = Family.of(
    LFM2MoE,
    LFM2MoEConfig,
    "Lfm2MoeForCausalLM",
    "Lfm2MoeModel",
    names=Names(
        FusedExperts(
            "feed_forward.experts.#.*.weight",
            _NAMES,
            gate_up=("feed_forward.experts.gate_up_proj",),
            down=("feed_forward.experts.down_proj",),
        ),
        ROPE_TABLES,
        _HEADLESS,
    ),
    gguf=LFM2_MOE_GGUF,
)
