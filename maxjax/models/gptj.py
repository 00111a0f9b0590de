"""GPT-J and CodeGen: attention beside the MLP after one LayerNorm, rotary positions of neighbouring features.

::

    x = wte[ids]
    in each layer:
        h = ln_1(x)
        q, k, v = rope(q_proj(h)), rope(k_proj(h)), v_proj(h)
        x = x + out_proj(softmax(q kᵀ / √D) v) + fc_out(gelu(fc_in(h)))
    logits = lm_head(ln_f(x))

Sources: transformers' ``modeling_gptj``; CodeGen arXiv:2203.13474 and ``modeling_codegen``.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features. A decode step, with one token per
sequence, has no axis T.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import LayerNorm
from .family import Family
from .gguf.table import GGUFTable
from .names import Drop, Headless, Names
from .parts import (
    Angles,
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    Rope,
    alias,
    attend,
    config_field,
    constant,
    layers,
    merge_heads,
    rope,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)


@dataclass(frozen=True)
class GPTJConfig(LanguageModelConfig):
    """The settings of a GPT-J: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        n_embd: E.
        n_inner: F; ``4 · n_embd`` by default.
        rotary_dim: number of features of each head that are rotated: the first ones.
    """

    model_type = "gptj"
    # No call reads the number of positions: models that differ in it are one kind of tree.
    _mx_unread: ClassVar[frozenset[str]] = frozenset({"n_positions", "tie_word_embeddings"})
    hidden_size, intermediate_size = alias("n_embd"), alias("n_inner")
    num_hidden_layers, max_position_embeddings = alias("n_layer"), alias("n_positions")
    num_attention_heads = num_key_value_heads = alias("n_head")

    vocab_size: int = size()
    n_embd: int = size(4096, aliases=("hidden_size",))
    n_inner: int = size(None)
    n_layer: int = layers(28, aliases=("num_hidden_layers",))
    n_head: int = size(16, aliases=("num_attention_heads",))
    head_dim: int = constant(None)
    n_positions: int = config_field(2048, minimum=1, aliases=("max_position_embeddings",))
    rotary_dim: int = size(64)
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = False

    def _check(self) -> None:
        super()._check()
        self.rope.check(self.head_dim)

    @property
    def rope(self) -> Rope:
        """The rotary position embedding of neighbouring features, in the first ``rotary_dim`` of each head."""
        return Rope(theta=10_000.0, part=self.rotary_dim / self.head_dim, interleaved=True)


class GPTJAttention(Module):
    """Attention with rotary positions in a part of each head."""

    def __init__(self, config: GPTJConfig, dtype: DType):
        super().__init__()
        E, H, D = config.n_embd, config.n_head, config.head_dim
        self.heads, self.head_dim = H, D
        self.q_proj = Linear(E, H * D, dtype)
        self.k_proj = Linear(E, H * D, dtype)
        self.v_proj = Linear(E, H * D, dtype)
        self.out_proj = Linear(H * D, E, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        q, k = rope(q, angles), rope(k, angles)
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.heads, "v_proj": self.heads}
        return split_heads_over_mesh(outputs, {"out_proj": self.heads}, self.head_dim)


class GPTJMLP(Module):
    """The MLP, without a gate."""

    def __init__(self, config: GPTJConfig, dtype: DType):
        super().__init__()
        self.act = config.activation_function
        self.fc_in = Linear(config.n_embd, config.n_inner, dtype, has_bias=True)
        self.fc_out = Linear(config.n_inner, config.n_embd, dtype, has_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = activation(self.act)(self.fc_in(x))  # [B, T, F]
        return self.fc_out(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc_in"], ["fc_out"])


class GPTJBlock(Module):
    """One layer: attention and the MLP beside it, both added to the hidden states."""

    def __init__(self, config: GPTJConfig, dtype: DType):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, dtype=dtype, eps=config.layer_norm_epsilon)
        is_codegen = isinstance(config, CodeGenConfig)
        self.attn = (CodeGenAttention if is_codegen else GPTJAttention)(config, dtype)
        self.mlp = GPTJMLP(config, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        h = self.ln_1(x)  # [B, T, E]
        y, cache = self.attn(h, cache, angles)
        return x + y + self.mlp(h), cache


class GPTJModel(Module):
    """The model without its head: ``transformer`` in the files."""

    embed_tokens, layers = alias("wte"), alias("h")

    def __init__(self, config: GPTJConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.wte = Embedding(config.vocab_size, config.n_embd, dtype)
        self.h = LayerList(GPTJBlock(config, dtype) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, dtype=dtype, eps=config.layer_norm_epsilon)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.wte(ids).astype(self.dtype.np)  # [B, T, E]
        angles = self.config.rope.angles(cache, self.config.head_dim)
        x, cache = run_layers(self.h, x, cache, angles)
        return self.ln_f(x), cache


class GPTJ(LanguageModel):
    """A GPT-J language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> model = GPTJ(GPTJConfig(100, 8, n_layer=1, n_head=2, rotary_dim=2))
        >>> [name for name in model.raw_state_dict() if "h.0" not in name][:3]
        ['lm_head.weight', 'lm_head.bias', 'transformer.wte.weight']
    """

    model = alias("transformer")

    def __init__(self, config: GPTJConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.transformer = GPTJModel(config, self.dtype)
        tied = config.tie_word_embeddings
        self.lm_head = self.make_head(config.n_embd, tied=tied, has_bias=True)
        if stacked:
            self.stack()


# llama.cpp names the architecture and its tensors, and does not run it yet.
GPTJ_GGUF = GGUFTable(
    "gptj",
    {
        "token_embd": "transformer.wte", "output_norm": "transformer.ln_f", ".attn_norm": "ln_1",
        ".attn_q": "attn.q_proj", ".attn_k": "attn.k_proj", ".attn_v": "attn.v_proj",
        ".attn_output": "attn.out_proj", ".ffn_norm": None, ".ffn_gate": None, ".ffn_up": "mlp.fc_in",
        ".ffn_down": "mlp.fc_out",
    },
    layer="transformer.h.*.",
    constants={"activation_function": "gelu_new"},
    keys={"rope.dimension_count": "rotary_dim"},
    read=lambda given, tensors, config: {"n_inner": config["intermediate_size"]},
    epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"),
    biases=("attn_norm", "ffn_up", "ffn_down", "output_norm", "output"),
    is_partial=True,
    is_square=True,
)  # fmt: skip

# Attention masks and RoPE tables, which old files hold.
NOT_NEEDED = Drop("*.attn.bias", "*.attn.masked_bias", "*.attn.causal_mask", "*.embed_positions")
GPTJ_FAMILY = GPTJ.family = Family.of(
    GPTJ,
    GPTJConfig,
    names=Names(NOT_NEEDED, Headless("transformer.", ("wte.", "h.", "ln_f."))),
    tied=("lm_head.weight", "transformer.wte.weight"),
    gguf=GPTJ_GGUF,
)


# --- CodeGen: one linear layer for queries, values and keys --------------------------------------

# Number of parts of ``qkv_proj``, once one for each device; each has the queries, values and keys of its heads.
PARTS = 4


@dataclass(frozen=True)
class CodeGenConfig(GPTJConfig):
    """The settings of a CodeGen."""

    model_type = "codegen"

    def _check(self) -> None:
        super()._check()
        if self.n_head % PARTS:
            raise ValueError(f"'n_head' {self.n_head} is not a multiple of {PARTS}")


class CodeGenAttention(Module):
    """Attention with rotary positions, and one linear layer for queries, values and keys."""

    def __init__(self, config: GPTJConfig, dtype: DType):
        super().__init__()
        self.heads, self.head_dim = config.n_head, config.head_dim
        self.qkv_proj = Linear(config.n_embd, 3 * config.n_embd, dtype)
        self.out_proj = Linear(config.n_embd, config.n_embd, dtype)

    def __call__(
        self, x: jax.Array, cache: LayerCache, angles: Angles
    ) -> tuple[jax.Array, LayerCache]:
        y = self.qkv_proj(x).astype(x.dtype)  # [B, T, 3 E]
        y = y.reshape(*x.shape[:-1], PARTS, 3, self.heads // PARTS, self.head_dim)
        q, v, k = (y[..., i, :, :].reshape(*x.shape[:-1], self.heads, -1) for i in range(3))
        q, k = rope(q, angles), rope(k, angles)  # [B, T, H, D]
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits ``qkv_proj`` between its parts, which have the same heads, and ``out_proj`` between heads."""
        part = 3 * self.heads // PARTS * self.head_dim
        rules = split_heads_over_mesh({"qkv_proj": PARTS}, {}, part)
        return rules | split_heads_over_mesh({}, {"out_proj": self.heads}, self.head_dim)


class CodeGen(GPTJ):
    """A CodeGen language model.

    Example:
        >>> model = CodeGen(CodeGenConfig(100, 16, n_layer=1, n_head=4, rotary_dim=2))
        >>> model.raw_state_dict()["transformer.h.0.attn.qkv_proj.weight"].shape
        [Dim(48), Dim(16)]
    """


CODEGEN = CodeGen.family = GPTJ_FAMILY.like(CodeGen, CodeGenConfig)
