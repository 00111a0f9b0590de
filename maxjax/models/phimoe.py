"""Phi-3.5-MoE and Phi-mini-MoE: a PhiMoE with LayerNorms and two experts per token, with shares by SparseMixer.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        x = x + Σ share · w2(silu(w1(h)) · w3(h))            over the two experts with the highest gate(h)
    logits = lm_head(norm(x))

The share of the best expert is its softmax among all scores near its own, and that of the second its softmax among
the scores near its own without the best. llama.cpp computes other norms and shares for its architecture of this name,
so maxjax has no GGUF files of this family.

Source: arXiv:2404.14219, for the shares arXiv:2409.12136; transformers' ``modeling_phimoe``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, X experts with F inner
features, k experts for each token, V tokens in the vocabulary. A decode step has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import LayerNorm
from ..nn.rope_scaling import LongRoPEScalingParams
from .family import Family
from .fused_experts import FusedExperts
from .gguf.metadata import Settings
from .gguf.names import expert_names
from .gguf.table import PLAIN_BIASES, GGUFTable
from .names import DECODER, Names, Rename
from .parts import (
    CAUSAL,
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    attend,
    config_field,
    layers,
    merge_heads,
    refuse,
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    sliding,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.rotary import rope_settings


@dataclass(frozen=True)
class PhiMoEConfig(LanguageModelConfig):
    """The settings of a Phi with experts: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: F, the inner features of an expert.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        attention_bias, lm_head_bias: whether the linear layers of attention, and the head, have biases.
        sliding_window: number of tokens that a token attends to, itself included; None: all before it.
        num_local_experts, num_experts_per_tok: X and k.
    """

    model_type = "phimoe"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=None)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(131_072, minimum=1)
    rms_norm_eps: float = 1e-5
    rope_parameters: Rope = Rope(theta=1e6)
    sliding_window: int | None = config_field(None, minimum=1)
    attention_bias: bool = False
    lm_head_bias: bool = False
    num_local_experts: int = size(default=16, minimum=2, aliases=("num_experts",))
    num_experts_per_tok: int = size(default=2)
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file; with LongRoPE, its magnitude is ``short_mscale``.

        Raises:
            UnsupportedModelError: a token has another number of experts than 2, the tolerance of near scores is
                not 1 %, or ``short_mscale`` and ``long_mscale`` differ.
        """
        raw = with_defaults(raw, {"num_key_value_heads": 8})
        refuse(raw, {"num_experts_per_tok": 2, "router_jitter_noise": 0.01}, "Phi-MoE")
        config, given = super().from_hf(raw, **values), rope_settings(raw)[1]
        if not isinstance(config.rope_parameters.scaling, LongRoPEScalingParams):
            return config
        short, long = given.get("short_mscale"), given.get("long_mscale")
        if not isinstance(short, (int, float)) or short != long:
            raise UnsupportedModelError(
                "'short_mscale' that differs from 'long_mscale' is not supported for phimoe"
            )
        rope_parameters = replace(config.rope_parameters, magnitude=float(short))
        return replace(config, rope_parameters=rope_parameters)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with the magnitude of LongRoPE under keys of this architecture."""
        found = super().to_hf()
        if isinstance(self.rope_parameters.scaling, LongRoPEScalingParams):
            factors = dict.fromkeys(("short_mscale", "long_mscale"), self.rope_parameters.magnitude)
            found["rope_scaling"] = {**found["rope_scaling"], **factors}
        return found


class PhiMoEAttention(Module):
    """Attention with rotary positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: PhiMoEConfig, layer: int, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias, window = config.hidden_size, config.attention_bias, config.window(layer)
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.mask = CAUSAL if window is None else sliding(window)
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, self.mask)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class PhiMoESparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the two experts with the highest scores."""

    def __init__(self, config: PhiMoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, ("w1", "w3", "w2"), config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x)  # [B, T, X]
        chosen, shares = route(scores, self.top_k, "softmax of near")  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class PhiMoEBlock(Module):
    """One layer: attention, then the mixture of experts, each added to the hidden states."""

    def __init__(self, config: PhiMoEConfig, layer: int, dtype: DType):
        super().__init__()
        self.input_layernorm = LayerNorm(config.hidden_size, [], dtype, config.rms_norm_eps)
        self.self_attn = PhiMoEAttention(config, layer, dtype)
        self.post_attention_layernorm = LayerNorm(
            config.hidden_size, [], dtype, config.rms_norm_eps
        )
        self.block_sparse_moe = PhiMoESparseMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.block_sparse_moe(self.post_attention_layernorm(x)), cache


class PhiMoEModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: PhiMoEConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            PhiMoEBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        self.norm = LayerNorm(config.hidden_size, [], dtype, config.rms_norm_eps)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class PhiMoE(LanguageModel):
    """A Phi language model with experts.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> model = PhiMoE(PhiMoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "1.block_sparse_moe.gate" in name]
        ['model.layers.1.block_sparse_moe.gate.weight']
    """

    def __init__(self, config: PhiMoEConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = PhiMoEModel(config, self.dtype)
        self.lm_head = self.make_head(
            config.hidden_size, tied=config.tie_word_embeddings, has_bias=config.lm_head_bias
        )
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


def _read_gguf(given: Settings, tensors: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return what a file's tensors say, and LongRoPE's magnitude under keys of this architecture."""
    found: dict[str, Any] = {"lm_head_bias": "output.bias" in tensors}
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "longrope":
        rest = {key: value for key, value in scaling.items() if key != "attention_factor"}
        factors = dict.fromkeys(("short_mscale", "long_mscale"), scaling["attention_factor"])
        found["rope_scaling"] = {**rest, **factors}
    return found


PHIMOE_GGUF = GGUFTable(
    "phimoe",
    expert_names("block_sparse_moe", maps=("w1", "w3", "w2")),
    keys={
        "attention.sliding_window": "sliding_window",
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    constants={"hidden_act": "silu"},
    unused=("attention.sliding_window",),
    read=_read_gguf,
    biases=PLAIN_BIASES,
    is_long=True,
    has_head=True,
)

PHIMOE = PhiMoE.family = Family.of(
    PhiMoE,
    PhiMoEConfig,
    "PhimoeForCausalLM",
    "PhiMoEForCausalLM",
    "PhimoeModel",
    names=Names(
        FusedExperts("block_sparse_moe.experts.#.*.weight", ("w1", "w3", "w2")),
        *DECODER,
        Rename({".mlp.router.weight": ".block_sparse_moe.gate.weight"}, in_modules=True),
    ),
    gguf=PHIMOE_GGUF,
)
