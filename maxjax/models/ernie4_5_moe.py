"""ERNIE 4.5 with experts in some layers; a bias balances how often experts are chosen.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        x = x + mlp(h)
    logits = lm_head(norm(x))

    mlp(h) = down_proj(silu(gate_proj(h)) · up_proj(h)), or in a layer with experts
    mlp(h) = Σ share · expert(h) + shared_experts(h)

The k experts are those with the largest softmax(gate(h)) plus a bias that balances them; their shares are these numbers
of the softmax without the bias, divided by their sum. ``rope`` rotates pairs of neighbouring features.

Source: ERNIE 4.5 Technical Report; transformers' ``modeling_ernie4_5_moe``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, X experts with F inner
features, k experts for each token. A decode step has no axis T.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.layouts import Matrix
from .gguf.metadata import unsupported
from .gguf.names import Rule, expert_names
from .gguf.table import GGUFTable
from .names import DECODER, Drop, Names, Rename
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
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
    with_defaults,
)


@dataclass(frozen=True)
class Ernie45MoEConfig(LanguageModelConfig):
    """The settings of an ERNIE 4.5 with experts: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size, moe_intermediate_size: inner features of the MLP in a layer without experts, and F.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        use_bias: whether all linear layers but those of experts have biases.
        moe_num_experts, moe_k: X and k.
        moe_num_shared_experts: number of experts that every token goes through; together they are one MLP.
        moe_norm_min: lower bound of the sum that shares are divided by.
        moe_layer_start_index, moe_layer_end_index, moe_layer_interval: indices of the first and the last layer
            that may have experts (-1 becomes that of the last layer), and n, where every n-th of these has.
    """

    model_type = "ernie4_5_moe"

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
    rope_parameters: Rope = Rope(theta=500_000.0, interleaved=True)
    use_bias: bool = False
    tie_word_embeddings: bool = True
    moe_num_experts: int = size(default=64, aliases=("num_experts",))
    moe_k: int = size(default=6, aliases=("num_experts_per_tok",))
    moe_intermediate_size: int = size(default=1536)
    moe_num_shared_experts: int = size(default=2, minimum=0)
    moe_norm_min: float = 1e-12
    moe_layer_start_index: int = 1
    moe_layer_end_index: int = config_field(-1, minimum=-1)
    moe_layer_interval: int = config_field(1, minimum=1)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which null stands for as many KV heads as query heads."""
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 4}), **values)

    @property
    def num_experts(self) -> int:
        """X."""
        return self.moe_num_experts

    @property
    def num_experts_per_tok(self) -> int:
        """k."""
        return self.moe_k

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.moe_layer_end_index == -1:
            self._set("moe_layer_end_index", self.num_hidden_layers - 1)

    def _check_experts(self) -> None:
        if self.moe_k > self.moe_num_experts and any(
            map(self.is_sparse, range(self.num_hidden_layers))
        ):
            raise ValueError(
                f"'moe_k' {self.moe_k} is more than 'moe_num_experts' {self.moe_num_experts}"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        is_between = self.moe_layer_start_index <= layer <= self.moe_layer_end_index
        return is_between and (layer + 1) % self.moe_layer_interval == 0


class Ernie45MoEAttention(Module):
    """Attention with rotary positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: Ernie45MoEConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, bias = config.hidden_size, config.use_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
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
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class Ernie45MoEMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: Ernie45MoEConfig, inner: int, dtype: DType):
        super().__init__()
        E = config.hidden_size
        self.act = config.hidden_act
        self.gate_proj = Linear(E, inner, dtype, has_bias=config.use_bias)
        self.up_proj = Linear(E, inner, dtype, has_bias=config.use_bias)
        self.down_proj = Linear(inner, E, dtype, has_bias=config.use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class Ernie45MoEStatics(Module):
    """The bias that balances how often experts are chosen, ``[1, X]``: a module of its own in the files."""

    def __init__(self, experts: int):
        super().__init__()
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", DType.float32, (1, experts), DeviceRef.CPU()
        )

    def __call__(self) -> jax.Array:
        return jnp.asarray(self.e_score_correction_bias)[0]  # [X]


class Ernie45MoESparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k chosen experts, and an MLP for every token."""

    def __init__(self, config: Ernie45MoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.moe_num_experts
        self.top_k, self.least = config.moe_k, config.moe_norm_min
        self.gate = Linear(E, X, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        shared = F * config.moe_num_shared_experts
        self.shared_experts = Ernie45MoEMLP(config, shared, dtype) if shared else None
        self.moe_statics = Ernie45MoEStatics(X)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x.astype(jnp.float32))  # [B, T, X]
        chosen, shares = route(
            scores,
            self.top_k,
            "softmax",
            normalised=True,
            least=self.least,
            bias=self.moe_statics(),
        )  # [B, T, k]
        y = self.experts(x, chosen, shares)  # [B, T, E]
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class Ernie45MoEBlock(Module):
    """One layer: attention, then the MLP or the mixture of experts, each added to the hidden states."""

    def __init__(self, config: Ernie45MoEConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = Ernie45MoEAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp: Any = (
            Ernie45MoESparseMLP(config, dtype)
            if config.is_sparse(layer)
            else Ernie45MoEMLP(config, config.intermediate_size, dtype)
        )

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Ernie45MoEModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: Ernie45MoEConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            Ernie45MoEBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Ernie45MoE(LanguageModel):
    """An ERNIE 4.5 language model with experts.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = Ernie45MoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, moe_num_experts=8)
        >>> [n for n in Ernie45MoE(config).raw_state_dict() if "1.mlp.moe_statics" in n]
        ['model.layers.1.mlp.moe_statics.e_score_correction_bias']
    """

    def __init__(
        self, config: Ernie45MoEConfig, dtype: Any = DType.float32, *, stacked: bool = True
    ):
        super().__init__(config, dtype)
        self.model = Ernie45MoEModel(config, self.dtype)
        self.lm_head = self.make_head(
            config.hidden_size, tied=config.tie_word_embeddings, has_bias=config.use_bias
        )
        if stacked:
            self.stack()


# --- GGUF files ---------------------------------------------------------------------------------


def _to_gguf(config: Ernie45MoEConfig) -> dict[str, Any]:
    """Metadata that only this architecture has."""
    without_end = dataclasses.replace(config, moe_layer_end_index=-1)
    numbers = range(config.num_hidden_layers)
    if any(config.is_sparse(i) != without_end.is_sparse(i) for i in numbers):
        raise unsupported("'moe_layer_end_index' before the last layer in a GGUF file")
    shared = config.moe_num_shared_experts * config.moe_intermediate_size
    return {"expert_shared_feed_forward_length": shared}


ERNIE4_5_MOE_GGUF = GGUFTable(
    "ernie4_5-moe",
    {
        ".exp_probs_b": Rule("mlp.moe_statics.e_score_correction_bias", Matrix(), "bias"),
        **expert_names(shared="shared_experts"),
    },
    keys={
        "expert_count": "moe_num_experts",
        "expert_used_count": "moe_k",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "moe_num_shared_experts",
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
    },
    constants={"hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12},
    write=_to_gguf,
    written=("expert_shared_feed_forward_length",),
    biases=("exp_probs_b",),
)

ERNIE4_5_MOE = Ernie45MoE.family = Family.of(
    Ernie45MoE,
    Ernie45MoEConfig,
    "Ernie4_5_MoeForCausalLM",
    "Ernie4_5_MoeModel",
    names=Names(
        FusedExperts(),
        Drop("*.mtp_*", "mtp_*", kept=True),
        *DECODER,
        Rename(
            {"gate.moe_statics.e_score_correction_bias": "moe_statics.e_score_correction_bias"},
            in_modules=True,
        ),
    ),
    gguf=ERNIE4_5_MOE_GGUF,
)
