"""MiniMax M2: experts that are chosen by sigmoids plus a balancing bias, and norms over all heads together.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_norm(q_proj(h))), rope(k_norm(k_proj(h))), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        chosen = the k experts with the largest σ(gate(h)) + e_score_correction_bias
        x = x + Σ share · w2(silu(w1(h)) · w3(h))            over the chosen experts, by σ(gate(h)) divided by their sum
    logits = lm_head(norm(x))

Source: transformers' ``modeling_minimax_m2``; the balancing bias arXiv:2412.19437.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, X experts with F inner
features, k experts for each token, V tokens in the vocabulary. A decode step has no axis T.
"""

from __future__ import annotations

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
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.names import HEAD_NORMS, Rule, expert_names
from .gguf.table import GGUFTable
from .names import DECODER, Names, Rename
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
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)
from .parts.rotary import read_rope


@dataclass(frozen=True)
class MiniMaxM2Config(LanguageModelConfig):
    """The settings of a MiniMax M2: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size: F, the inner features of an expert.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        rope_parameters: the rotary position embedding, of the first ``rotary_dim`` features in published files.
        num_local_experts, num_experts_per_tok: X and k.
    """

    model_type = "minimax_m2"

    vocab_size: int = size()
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    num_key_value_heads: int = size(default=None)
    head_dim: int = size(default=128)
    hidden_act: str = "silu"
    max_position_embeddings: int = config_field(196_608, minimum=1)
    rms_norm_eps: float = 1e-6
    rope_parameters: Rope = Rope(theta=5e6)
    num_local_experts: int = size(default=256, aliases=("num_experts",))
    num_experts_per_tok: int = size(default=8)
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which ``rotary_dim`` may say how much of a head RoPE rotates.

        Raises:
            ValueError: ``rotary_dim`` is not a part of ``head_dim``.
            UnsupportedModelError: queries and keys are normalised, or experts are chosen, in another way.
        """
        raw = with_defaults(raw, {"num_key_value_heads": 8})
        if raw.get("qk_norm_type") not in (None, "per_layer") or raw.get("use_qk_norm") is False:
            raise UnsupportedModelError(
                "'use_qk_norm' false, or a 'qk_norm_type' that is not 'per_layer', is not supported for minimax_m2"
            )
        if raw.get("scoring_func") not in (None, "sigmoid"):
            raise UnsupportedModelError(
                f"'scoring_func' {shown(raw['scoring_func'])} is not supported for minimax_m2 "
                "(supported: 'sigmoid')"
            )
        width, head = raw.get("rotary_dim"), cls.read_field(raw, "head_dim")
        part = 1.0
        if width is not None:
            if type(width) is not int or width < 1:
                raise ValueError(f"'rotary_dim' is {shown(width)}, not a part of 'head_dim'")
            part = width / head
        context = cls.read_field(raw, "max_position_embeddings")
        values["rope_parameters"] = read_rope(raw, context, 5e6, part=part)
        return super().from_hf(raw, **values)

    def to_hf(self) -> dict[str, Any]:
        """Write the settings, with ``rotary_dim`` in place of the share of each head."""
        found = super().to_hf()
        found.pop("partial_rotary_factor", None)
        return {**found, "rotary_dim": self.rope_parameters.rotated(self.head_dim)}


class MiniMaxM2Attention(Module):
    """Attention with rotary positions, whose queries and keys are normalised over all heads together."""

    def __init__(self, config: MiniMaxM2Config, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, eps = config.hidden_size, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, K * D, dtype)
        self.v_proj = Linear(E, K * D, dtype)
        self.o_proj = Linear(H * D, E, dtype)
        self.q_norm = RMSNorm(H * D, dtype, eps, multiply_before_cast=False)
        self.k_norm = RMSNorm(K * D, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k = self.q_norm(q.astype(x.dtype)), self.k_norm(k.astype(x.dtype))
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class MiniMaxM2SparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k experts with the highest scores."""

    def __init__(self, config: MiniMaxM2Config, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_local_experts
        self.top_k = config.num_experts_per_tok
        self.gate = Linear(E, X, dtype)
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", dtype, (X,), DeviceRef.CPU()
        )
        self.experts = Experts(E, F, X, dtype, ("w1", "w3", "w2"), config.hidden_act)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x)  # [B, T, X]
        bias = jnp.asarray(self.e_score_correction_bias)  # [X]
        chosen, shares = route(
            scores, self.top_k, "sigmoid", normalised=True, bias=bias
        )  # [B, T, k]
        return self.experts(x, chosen, shares)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class MiniMaxM2Block(Module):
    """One layer: attention, then the mixture of experts, each added to the hidden states."""

    def __init__(self, config: MiniMaxM2Config, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = MiniMaxM2Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.block_sparse_moe = MiniMaxM2SparseMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.block_sparse_moe(self.post_attention_layernorm(x)), cache


class MiniMaxM2Model(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: MiniMaxM2Config, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            MiniMaxM2Block(config, dtype) for _ in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class MiniMaxM2(LanguageModel):
    """A MiniMax M2 language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=2, num_local_experts=8, head_dim=4)
        >>> model = MiniMaxM2(MiniMaxM2Config(100, 8, 16, **sizes))
        >>> [n for n in model.raw_state_dict() if "layers.1" in n and "_bias" in n]
        ['model.layers.1.block_sparse_moe.e_score_correction_bias']
    """

    def __init__(
        self, config: MiniMaxM2Config, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = MiniMaxM2Model(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


MINIMAX_M2_GGUF = GGUFTable(
    "minimax-m2",
    {
        **HEAD_NORMS,
        ".exp_probs_b": Rule("block_sparse_moe.e_score_correction_bias", only="bias"),
        **expert_names("block_sparse_moe", maps=("w1", "w3", "w2")),
    },
    keys={
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    constants={"hidden_act": "silu"},
    read=lambda given, tensors, config: {
        "rotary_dim": given.count("rope.dimension_count", config["head_dim"])
    },
    write=lambda config: {"expert_gating_func": 2},
    written=("expert_gating_func",),
    biases=("exp_probs_b",),
    is_partial=True,
    has_head=True,
)

MINIMAX_M2 = MiniMaxM2.family = Family.of(
    MiniMaxM2,
    MiniMaxM2Config,
    names=Names(
        FusedExperts("block_sparse_moe.experts.#.*.weight", ("w1", "w3", "w2")),
        *DECODER,
        Rename(
            {
                ".mlp.gate.weight": ".block_sparse_moe.gate.weight",
                ".mlp.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
            },
            in_modules=True,
        ),
    ),
    gguf=MINIMAX_M2_GGUF,
)
