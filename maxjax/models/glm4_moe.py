"""GLM-4.5 to 4.7: experts that are chosen by sigmoids plus a balancing bias, in all but the first layers.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = rope(q_norm(q_proj(h))), rope(k_norm(k_proj(h))), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        x = x + mlp(h)
    logits = lm_head(norm(x))

    mlp(h) = down_proj(silu(gate_proj(h)) · up_proj(h)) in the first layers; in the others
    mlp(h) = Σ share · expert(h) + shared_experts(h)

The k experts are those with the largest sigmoid(gate(h)) plus a bias that balances them; their shares are these
sigmoids without the bias, divided by their sum, times a factor. ``rope`` rotates the first half of each head's
features; some models have no ``q_norm`` and ``k_norm``. The layer of multi-token prediction (``parts/mtp.py``) is
loaded if it is asked for.

Source: arXiv:2508.06471; transformers' ``modeling_glm4_moe``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, X experts with F inner
features, k experts for each token. A decode step has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.weight.weight import Weight
from ..kernels.explicit import concatenate
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, check_experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.names import HEAD_NORMS, NEXT, ROUTED_DEFAULTS, ROUTED_KEYS, Rule, expert_names
from .gguf.table import GGUFTable
from .names import DECODER, PREDICTION, Names
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
class GLM4MoEConfig(LanguageModelConfig):
    """The settings of a GLM-4.5: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        intermediate_size, moe_intermediate_size: inner features of the MLP in a layer without experts, and F.
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        attention_bias: whether the projections of queries, keys and values have biases.
        use_qk_norm: whether each head of queries and keys is normalised.
        n_routed_experts, num_experts_per_tok: X and k.
        n_shared_experts: number of experts that every token goes through; together they are one MLP.
        first_k_dense_replace: number of first layers that have an MLP in place of experts.
        norm_topk_prob: whether the shares of the chosen experts are divided by their sum.
        routed_scaling_factor: factor of the shares.
        n_group, topk_group: number of groups of experts, and of those that a token chooses from: those whose
            two best experts are the best.
    """

    model_type = "glm4_moe"

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
    rope_parameters: Rope = Rope(part=0.5)
    attention_bias: bool = False
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    n_routed_experts: int = size(default=128, aliases=("num_local_experts",))
    num_experts_per_tok: int = size(default=8)
    moe_intermediate_size: int = size(default=1408)
    n_shared_experts: int = size(default=1, minimum=0)
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = size(default=1)
    topk_group: int = size(default=1)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in which null stands for as many KV heads as query heads."""
        return super().from_hf(with_defaults(raw, {"num_key_value_heads": 8}), **values)

    def _check(self) -> None:
        super()._check()
        try:
            check_experts(
                self.n_routed_experts, self.num_experts_per_tok, self.n_group, self.topk_group
            )
        except ValueError as error:
            raise ValueError(
                "'n_routed_experts', 'num_experts_per_tok', 'n_group' and 'topk_group' do not fit together: "
                f"{error}"
            ) from None

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return layer >= self.first_k_dense_replace


class GLM4MoEAttention(Module):
    """Attention with rotary positions, in which H/K query heads share a key-value head (arXiv:2305.13245)."""

    def __init__(self, config: GLM4MoEConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype)
        self.q_norm = self.k_norm = None
        if config.use_qk_norm:
            self.q_norm = RMSNorm(D, dtype, eps, multiply_before_cast=False)
            self.k_norm = RMSNorm(D, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class GLM4MoEMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: GLM4MoEConfig, inner: int, dtype: DType):
        super().__init__()
        self.act = config.hidden_act
        self.gate_proj = Linear(config.hidden_size, inner, dtype)
        self.up_proj = Linear(config.hidden_size, inner, dtype)
        self.down_proj = Linear(inner, config.hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class GLM4MoERouter(Linear):
    """The router, with a bias ``[X]`` that affects which experts are chosen, and not their shares."""

    def __init__(self, config: GLM4MoEConfig, dtype: DType):
        super().__init__(config.hidden_size, config.n_routed_experts, dtype)
        self.e_score_correction_bias = Weight(
            "e_score_correction_bias", DType.float32, (config.n_routed_experts,), DeviceRef.CPU()
        )


class GLM4MoESparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k chosen experts, and an MLP for every token."""

    def __init__(self, config: GLM4MoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.top_k, self.groups, self.top_groups = (
            config.num_experts_per_tok, config.n_group, config.topk_group
        )  # fmt: skip
        self.normalised, self.factor = config.norm_topk_prob, config.routed_scaling_factor
        self.gate: Any = GLM4MoERouter(config, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        shared = F * config.n_shared_experts
        self.shared_experts = GLM4MoEMLP(config, shared, dtype) if shared else None

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x.astype(jnp.float32))  # [B, T, X]
        chosen, shares = route(
            scores, self.top_k, "sigmoid", normalised=self.normalised, factor=self.factor,
            groups=self.groups, top_groups=self.top_groups, bias=self.gate.e_score_correction_bias,
        )  # [B, T, k]  # fmt: skip
        y = self.experts(x, chosen, shares)  # [B, T, E]
        return y if self.shared_experts is None else y + self.shared_experts(x)

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("gate")


class GLM4MoEBlock(Module):
    """One layer: attention, then the MLP or the mixture of experts, each added to the hidden states."""

    def __init__(self, config: GLM4MoEConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = GLM4MoEAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp: Any = (
            GLM4MoESparseMLP(config, dtype)
            if config.is_sparse(layer)
            else GLM4MoEMLP(config, config.intermediate_size, dtype)
        )

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class GLM4MoEMTPHead(Module):
    """``shared_head`` in the files: the norm before the head, whose matrix is the model's."""

    def __init__(self, config: GLM4MoEConfig, dtype: DType):
        super().__init__()
        self.norm = RMSNorm(
            config.hidden_size, dtype, config.rms_norm_eps, multiply_before_cast=False
        )


class GLM4MoEMTP(GLM4MoEBlock):
    """The layer of multi-token prediction (``parts/mtp.py``): a layer like the last, after a projection."""

    def __init__(self, config: GLM4MoEConfig, dtype: DType):
        super().__init__(config, config.num_hidden_layers - 1, dtype)
        E, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.enorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.hnorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.eh_proj = Linear(2 * E, E, dtype)
        self.shared_head = GLM4MoEMTPHead(config, dtype)

    def __call__(  # type: ignore[override]
        self, h: jax.Array, embedded: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        x = concatenate([self.enorm(embedded), self.hnorm(h)], -1)  # [B, T, 2 E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = super().__call__(self.eh_proj(x).astype(h.dtype), cache, angles)
        return self.shared_head.norm(x), cache

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the projection, whose results are hidden states."""
        return replicate_over_mesh("eh_proj")


class GLM4MoEModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: GLM4MoEConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            GLM4MoEBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class GLM4MoE(LanguageModel):
    """A GLM-4.5 language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = GLM4MoEConfig(100, 8, 16, num_hidden_layers=3, num_attention_heads=2)
        >>> [type(layer.mlp).__name__ for layer in GLM4MoE(config, stacked=False).model.layers]
        ['GLM4MoEMLP', 'GLM4MoESparseMLP', 'GLM4MoESparseMLP']
    """

    mtp_class = GLM4MoEMTP

    def __init__(self, config: GLM4MoEConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = GLM4MoEModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


# --- GGUF files, which may have layers of multi-token prediction --------------------------------


def _of_gguf(given: Any, tensors: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that depend on the tensors; layers of multi-token prediction are not counted."""
    more = given.count("nextn_predict_layers", 0, minimum=0)
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "num_hidden_layers": config["num_hidden_layers"] - more,
    }


GLM4_MOE_GGUF = GGUFTable(
    "glm4moe",
    {
        ".ffn_norm": None,
        ".post_attention_norm": "post_attention_layernorm",
        **HEAD_NORMS,
        ".exp_probs_b": Rule("mlp.gate.e_score_correction_bias", only="bias"),
        **expert_names(shared="shared_experts"),
        **NEXT,
    },
    keys=ROUTED_KEYS,
    constants={"hidden_act": "silu", "n_group": 1, "topk_group": 1, **ROUTED_DEFAULTS},
    read=_of_gguf,
    write=lambda config: {"expert_gating_func": 2},
    written=("expert_gating_func",),
    biases=("attn_q", "attn_k", "attn_v", "exp_probs_b"),
    is_partial=True,
)

GLM4_MOE = GLM4MoE.family = Family.of(
    GLM4MoE,
    GLM4MoEConfig,
    "Glm4MoeForCausalLM",
    "Glm4MoeModel",
    names=Names(PREDICTION, FusedExperts(), *DECODER),
    gguf=GLM4_MOE_GGUF,
)
