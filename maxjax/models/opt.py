"""OPT and Galactica: learned positions, LayerNorm before or after each part, embeddings that may be narrower.

::

    x = project_in(embed_tokens[ids]) + embed_positions[2 + positions]
    in each layer:
        h = self_attn_layer_norm(x)
        q, k, v = q_proj(h), k_proj(h), v_proj(h)
        x = x + out_proj(softmax(q kᵀ / √D) v)               for each head, over the tokens before
        x = x + fc2(relu(fc1(final_layer_norm(x))))
    logits = lm_head(project_out(final_layer_norm(x)))

In the 350M, norms come after the residual sums: ``x = self_attn_layer_norm(x + …)``, ``x = final_layer_norm(x + …)``.

Source: arXiv:2205.01068; transformers' ``modeling_opt``.

Shapes: B sequences, T tokens, H heads of width D, hidden size E, F inner features, embedding tables of width W. A
decode step, with one token per sequence, has no axis T.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..nn.activation import activation
from ..nn.embedding import Embedding
from ..nn.layer import LayerList, Module
from ..nn.linear import Linear, linears
from ..nn.norm import LayerNorm
from .family import Family
from .names import Headless, Names
from .parts import (
    LanguageModel,
    LanguageModelConfig,
    LayerCache,
    alias,
    attend,
    config_field,
    constant,
    layers,
    learned_rows,
    merge_heads,
    replicate_over_mesh,
    run_layers,
    size,
    split_features_over_mesh,
    split_heads,
    split_heads_over_mesh,
)

# The row of the table of positions for position 0: the rows before it are not used.
FIRST_ROW = 2


@dataclass(frozen=True)
class OPTConfig(LanguageModelConfig):
    """The settings of an OPT: the keys of its ``config.json``, with transformers' defaults.

    Attributes:
        max_position_embeddings: number of positions that have been learned.
        enable_bias: whether the linear layers of attention and MLP have biases.
        do_layer_norm_before: whether norms come before attention and MLP; in the 350M they come after
            the residual sums.
        remove_final_layer_norm: whether a model with norms before attention and MLP has no last norm.
        word_embed_proj_dim: W, width of the embedding table and the head; None: ``hidden_size``.
    """

    model_type = "opt"
    intermediate_size, num_key_value_heads = alias("ffn_dim"), alias("num_attention_heads")

    vocab_size: int = size()
    hidden_size: int = size()
    ffn_dim: int = size()
    num_hidden_layers: int = layers()
    num_attention_heads: int = size()
    head_dim: int = constant(None)
    max_position_embeddings: int = size(2048)
    layer_norm_eps: float = constant(1e-5)
    activation_function: str = "relu"
    enable_bias: bool = True
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = config_field(False, key="_remove_final_layer_norm")
    word_embed_proj_dim: int | None = size(None)
    tie_word_embeddings: bool = True

    @property
    def embedding_width(self) -> int:
        """W."""
        return self.word_embed_proj_dim or self.hidden_size

    @property
    def has_last_norm(self) -> bool:
        """Whether there is a norm after the last layer."""
        return self.do_layer_norm_before and not self.remove_final_layer_norm

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], **values: Any) -> Self:
        """Read the settings of a file.

        Raises:
            UnsupportedModelError: the norms have no weights.
        """
        if raw.get("layer_norm_elementwise_affine") is False:
            raise UnsupportedModelError(
                "'layer_norm_elementwise_affine' false is not supported for opt"
            )
        return super().from_hf(raw, **values)


class OPTAttention(Module):
    """Attention with one key and one value for each query head."""

    def __init__(self, config: OPTConfig, dtype: DType):
        super().__init__()
        E, H, D = config.hidden_size, config.num_attention_heads, config.head_dim
        bias = config.enable_bias
        self.heads, self.head_dim = H, D
        self.q_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.k_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.v_proj = Linear(E, H * D, dtype, has_bias=bias)
        self.out_proj = Linear(H * D, E, dtype, has_bias=bias)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, k, v = linears([self.q_proj, self.k_proj, self.v_proj], x)  # [B, T, H D]
        q, k, v = (split_heads(a.astype(x.dtype), self.head_dim) for a in (q, k, v))  # [B, T, H, D]
        y, cache = attend(q, k, v, cache, scale=self.head_dim**-0.5)  # [B, T, H, D]
        return self.out_proj(merge_heads(y)).astype(x.dtype), cache  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the linear layers between heads."""
        outputs = {"q_proj": self.heads, "k_proj": self.heads, "v_proj": self.heads}
        return split_heads_over_mesh(outputs, {"out_proj": self.heads}, self.head_dim)


class OPTBlock(Module):
    """One layer: attention, then the MLP, each added to the hidden states, with norms before them or after the sums."""

    def __init__(self, config: OPTConfig, dtype: DType):
        super().__init__()
        E, F, eps, bias = (
            config.hidden_size,
            config.ffn_dim,
            config.layer_norm_eps,
            config.enable_bias,
        )
        self.norms_first, self.act = config.do_layer_norm_before, config.activation_function
        self.self_attn = OPTAttention(config, dtype)
        self.self_attn_layer_norm = LayerNorm(E, dtype=dtype, eps=eps)
        self.fc1 = Linear(E, F, dtype, has_bias=bias)
        self.fc2 = Linear(F, E, dtype, has_bias=bias)
        self.final_layer_norm = LayerNorm(E, dtype=dtype, eps=eps)

    def __call__(self, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        if self.norms_first:
            y, cache = self.self_attn(self.self_attn_layer_norm(x), cache)
            x = x + y
            return x + self.mlp(self.final_layer_norm(x)), cache
        y, cache = self.self_attn(x, cache)
        x = self.self_attn_layer_norm(x + y)
        return self.final_layer_norm(x + self.mlp(x)), cache

    def mlp(self, x: jax.Array) -> jax.Array:
        """Return the result of the MLP for ``[B, T, E]``."""
        y = activation(self.act)(self.fc1(x))  # [B, T, F]
        return self.fc2(y).astype(x.dtype)  # [B, T, E]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return split_features_over_mesh(["fc1"], ["fc2"])


class OPTDecoder(Module):
    """The model without its head: ``model.decoder`` in the files."""

    def __init__(self, config: OPTConfig, dtype: DType):
        super().__init__()
        self.config, self.dtype = config, dtype
        E, W, eps = config.hidden_size, config.embedding_width, config.layer_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, W, dtype)
        self.embed_positions = Embedding(config.max_position_embeddings + FIRST_ROW, E, dtype)
        self.project_in = Linear(W, E, dtype) if W != E else None
        self.layers = LayerList(OPTBlock(config, dtype) for _ in range(config.num_hidden_layers))
        self.final_layer_norm = LayerNorm(E, dtype=dtype, eps=eps) if config.has_last_norm else None
        self.project_out = Linear(E, W, dtype) if W != E else None

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        x = self.embed_tokens(ids).astype(self.dtype.np)  # [B, T, W]
        if self.project_in is not None:
            x = self.project_in(x).astype(x.dtype)  # [B, T, E]
        rows = FIRST_ROW + learned_rows(cache, self.config.max_position_embeddings)
        x = x + self.embed_positions(rows).astype(x.dtype)  # [B, T, E]
        x, cache = run_layers(self.layers, x, cache)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        if self.project_out is not None:
            x = self.project_out(x).astype(x.dtype)  # [B, T, W]
        return x, cache

    def sharding_rules(self) -> dict[str, Any]:
        """Holds the table of positions completely on every device."""
        return replicate_over_mesh("embed_positions")


class OPTModel(Module):
    """The module ``model`` of the files, which holds only the module ``decoder``."""

    embed_tokens, layers = alias("decoder.embed_tokens"), alias("decoder.layers")

    def __init__(self, config: OPTConfig, dtype: DType):
        super().__init__()
        self.decoder = OPTDecoder(config, dtype)

    def __call__(self, ids: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        return self.decoder(ids, cache)


class OPT(LanguageModel):
    """An OPT language model.

    Args:
        config, dtype, stacked: as for :class:`~maxjax.models.llama.Llama`.

    Example:
        >>> config = OPTConfig(100, 32, 64, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=8)
        >>> [name for name in OPT(config).raw_state_dict() if "layers" not in name][1:]
        ['model.decoder.embed_positions.weight', 'model.decoder.project_in.weight',
         'model.decoder.final_layer_norm.weight', 'model.decoder.final_layer_norm.bias',
         'model.decoder.project_out.weight']
    """

    def __init__(self, config: OPTConfig, dtype: Any = DType.float32, *, stacked: bool = True):
        super().__init__(config, dtype)
        self.model = OPTModel(config, self.dtype)
        self.lm_head = self.make_head(config.embedding_width, tied=config.tie_word_embeddings)
        if stacked:
            self.stack()

    @property
    def position_limit(self) -> int:
        """The number of positions that the model has learned."""
        return self.config.max_position_embeddings


OPT_FAMILY = OPT.family = Family.of(
    OPT,
    OPTConfig,
    names=Names(Headless("model.", ("decoder.",))),
    tied=("lm_head.weight", "model.decoder.embed_tokens.weight"),
)
