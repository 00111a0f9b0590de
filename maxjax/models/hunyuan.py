"""Hunyuan, with and without experts: a Llama with norms of queries and keys after RoPE.

::

    x = embed_tokens[ids]
    in each layer:
        h = input_layernorm(x)
        q, k, v = query_layernorm(rope(q_proj(h))), key_layernorm(rope(k_proj(h))), v_proj(h)
        x = x + o_proj(softmax(q kᵀ / √D) v)                 for each head, over the tokens before
        h = post_attention_layernorm(x)
        x = x + mlp(h)
    logits = lm_head(norm(x))

    mlp(h) = down_proj(silu(gate_proj(h)) · up_proj(h)), or in a Hunyuan with experts
    mlp(h) = Σ share · expert(h) + shared_mlp(h)             over the k experts with the highest scores, whose
                                                             softmax are the shares

``query_layernorm`` and ``key_layernorm`` normalise each head by its root mean square.

Source: transformers' ``modeling_hunyuan_v1_dense`` and ``modeling_hunyuan_v1_moe``.

Shapes: B sequences, T tokens, H query heads, K key-value heads, head width D, hidden size E, F inner features,
X experts, k experts for each token. A decode step has no axis T.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..errors import UnsupportedModelError, shown
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.moe import Experts, route
from ..nn.norm import RMSNorm
from .family import Family
from .fused_experts import FusedExperts
from .gguf.names import expert_names
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
    replicate_over_mesh,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)
from .parts.rotary import read_rope, rope_settings
from .unread import ReadTracker


@dataclass(frozen=True)
class HunyuanConfig(LanguageModelConfig):
    """The settings of a Hunyuan: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        num_key_value_heads: K; ``num_attention_heads`` by default.
        head_dim: D; ``hidden_size / num_attention_heads`` by default.
        rope_parameters: the rotary position embedding.
        attention_bias: whether the linear layers of attention have biases.
    """

    model_type = "hunyuan_v1_dense"
    unused = ("use_qk_norm",)  # the norms are there whatever it says

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
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, in whose RoPE of type "dynamic" ``alpha`` is a larger base for all lengths.

        Raises:
            ValueError: ``alpha`` is not a positive number, or heads are too narrow for it.
        """
        name, given = rope_settings(raw)
        alpha, width = given.get("alpha"), cls.read_field(raw, "head_dim")
        if given.get("rope_type", given.get("type")) == "dynamic" and alpha:
            if width is None:
                heads = cls.read_field(raw, "num_attention_heads")
                width = cls.read_field(raw, "hidden_size") // heads
            if width < 4:
                raise ValueError(
                    f"'head_dim' is {width}, and must be at least 4 for 'alpha' in '{name}'"
                )
            if type(alpha) not in (int, float) or not 0 < alpha < 1e30:
                raise ValueError(f"'alpha' in '{name}' is {shown(alpha)}, not a positive number")
            plain = {key: given[key] for key in ("rope_theta",) if key in given}
            rope = read_rope(plain, cls.read_field(raw, "max_position_embeddings"))
            theta = rope.theta * alpha ** (width / (width - 2))
            values["rope_parameters"] = dataclasses.replace(rope, theta=theta)
        return super().from_hf(raw, **values)


@dataclass(frozen=True)
class HunyuanMoEConfig(HunyuanConfig):
    """The settings of a Hunyuan with experts.

    Attributes:
        intermediate_size: F, the inner features of an expert and of the MLP that every token goes through.
        num_experts, moe_topk: X and k.
    """

    model_type = "hunyuan_v1_moe"

    num_experts: int = size(default=1, aliases=("num_local_experts",))
    moe_topk: int = size(default=1, aliases=("num_experts_per_tok",))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file, which may list the numbers of experts for each layer.

        Raises:
            UnsupportedModelError: layers differ or share keys and values, or the experts' shares are scaled.
        """
        raw = ReadTracker.of(raw)
        for key in ("num_experts", "moe_topk", "num_experts_per_tok"):
            value = raw.get(key)
            if isinstance(value, list) and value:
                if any(one != value[0] for one in value):
                    raise UnsupportedModelError(
                        f"{key!r} that differs between layers is not supported"
                    )
                raw = raw.replaced({key: value[0]})
        if raw.get("routed_scaling_factor") not in (None, False, 1):
            raise UnsupportedModelError(
                "'routed_scaling_factor' is not supported for hunyuan_v1_moe"
            )
        if raw.get("use_cla"):
            raise UnsupportedModelError(
                "'use_cla', layers that share keys and values, is not supported"
            )
        return super().from_hf(raw, **values)

    @property
    def num_experts_per_tok(self) -> int:
        """k."""
        return self.moe_topk


class HunyuanAttention(Module):
    """Attention with norms of queries and keys after RoPE; H/K query heads share a key-value head."""

    def __init__(self, config: HunyuanConfig, dtype: DType):
        super().__init__()
        H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        E, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = H, K, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, K * D, dtype, has_bias=bias)
        self.o_proj = Linear(H * D, E, dtype, has_bias=bias)
        self.query_layernorm = RMSNorm(D, dtype, eps, multiply_before_cast=False)
        self.key_layernorm = RMSNorm(D, dtype, eps, multiply_before_cast=False)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D], [B, T, K D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = self.query_layernorm(rope(q, angles)), self.key_layernorm(rope(k, angles))
        y, cache = attend(q, k, v, cache)  # [B, T, H, D]
        return self.o_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        return split_heads_over_mesh(outputs, {"o_proj": self.heads}, self.head_dim)


class HunyuanMLP(Module):
    """The gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: HunyuanConfig, inner: int, dtype: DType):
        super().__init__()
        E = config.hidden_size
        self.act = config.hidden_act
        self.gate_proj = Linear(E, inner, dtype)
        self.up_proj = Linear(E, inner, dtype)
        self.down_proj = Linear(inner, E, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = linears([self.gate_proj, self.up_proj], x)  # [B, T, F]
        return self.down_proj(activation(self.act)(gate) * up).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["gate_proj", "up_proj"], ["down_proj"])


class HunyuanRouter(Module):
    """The linear layer that gives each expert a score: a part of a module in the files."""

    def __init__(self, config: HunyuanMoEConfig, dtype: DType):
        super().__init__()
        self.wg = Linear(config.hidden_size, config.num_experts, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wg(x)  # [B, T, X]

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the router."""
        return replicate_over_mesh("wg")


class HunyuanSparseMLP(Module):
    """The mixture of experts: ``Σ share · expert(x)`` over the k chosen experts, and an MLP for every token."""

    def __init__(self, config: HunyuanMoEConfig, dtype: DType):
        super().__init__()
        E, F, X = config.hidden_size, config.intermediate_size, config.num_experts
        self.top_k = config.moe_topk
        self.gate = HunyuanRouter(config, dtype)
        self.experts = Experts(E, F, X, dtype, act=config.hidden_act)
        self.shared_mlp = HunyuanMLP(config, F, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = self.gate(x.astype(jnp.float32))  # [B, T, X]
        chosen, shares = route(scores, self.top_k, "softmax of chosen")  # [B, T, k]
        return self.experts(x, chosen, shares) + self.shared_mlp(x)  # [B, T, E]


class HunyuanBlock(Module):
    """One layer: attention, then the MLP or the mixture of experts, each added to the hidden states."""

    def __init__(self, config: HunyuanConfig, layer: int, dtype: DType):
        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.self_attn = HunyuanAttention(config, dtype)
        self.post_attention_layernorm = RMSNorm(E, dtype, eps, multiply_before_cast=False)
        self.mlp: Any = (
            HunyuanSparseMLP(config, dtype)
            if isinstance(config, HunyuanMoEConfig)
            else HunyuanMLP(config, config.intermediate_size, dtype)
        )

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, angles)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class HunyuanModel(Module):
    """The model without its head: ``model`` in the files."""

    def __init__(self, config: HunyuanConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = LayerList(
            HunyuanBlock(config, layer, dtype) for layer in range(config.num_hidden_layers)
        )
        E, eps = config.hidden_size, config.rms_norm_eps
        self.norm = RMSNorm(E, dtype, eps, multiply_before_cast=False)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope_parameters.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.layers, x, cache, angles)
        return self.norm(x), cache


class Hunyuan(LanguageModel):
    """A Hunyuan language model.

    Args:
        config: settings of the model.
        dtype: dtype of the weights and of the activations between layers. Norms, softmax and sums
            are computed in float32 for every dtype.
        stacked: whether the layers are held as a LayerStack, whose body is compiled once.

    Example:
        >>> config = HunyuanConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [name for name in Hunyuan(config).raw_state_dict() if "query" in name]
        ['model.layers.0.self_attn.query_layernorm.weight']
    """

    def __init__(self, config: HunyuanConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = HunyuanModel(config, self.dtype)
        self.lm_head = self.make_head(config.hidden_size, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()


class HunyuanMoE(Hunyuan):
    """A Hunyuan language model with experts.

    Example:
        >>> config = HunyuanMoEConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, num_experts=4)
        >>> [name for name in HunyuanMoE(config).raw_state_dict() if "0.mlp.gate" in name]
        ['model.layers.0.mlp.gate.wg.weight']
    """


# --- GGUF files ---------------------------------------------------------------------------------

# The norms of queries and keys: GGUF's names → the checkpoint's.
_HEAD_NORMS = {
    ".attn_q_norm": "self_attn.query_layernorm",
    ".attn_k_norm": "self_attn.key_layernorm",
}

HUNYUAN_GGUF = GGUFTable("hunyuan-dense", _HEAD_NORMS, constants={"hidden_act": "silu"}, biases=())

HUNYUAN_MOE_GGUF = GGUFTable(
    "hunyuan-moe",
    {
        **_HEAD_NORMS,
        **expert_names(router="gate.wg", shared="shared_mlp"),
    },
    keys={
        "expert_count": "num_experts",
        "expert_used_count": "moe_topk",
        "expert_feed_forward_length": "intermediate_size",
        "expert_shared_feed_forward_length": "intermediate_size",
    },
    constants={"hidden_act": "silu"},
    biases=(),
)

HUNYUAN = Hunyuan.family = Family.of(
    Hunyuan,
    HunyuanConfig,
    "HunYuanDenseV1ForCausalLM",
    "HunYuanDenseV1Model",
    names=Names(*DECODER),
    gguf=HUNYUAN_GGUF,
)
HUNYUAN_MOE = HunyuanMoE.family = Family.of(
    HunyuanMoE,
    HunyuanMoEConfig,
    "HunYuanMoEV1ForCausalLM",
    "HunYuanMoEV1Model",
    names=Names(FusedExperts(), *DECODER),
    gguf=HUNYUAN_MOE_GGUF,
)
