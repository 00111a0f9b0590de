"""GPT-2. Attributes are named as in Hugging Face's checkpoints.

It has learned positions, LayerNorm, biases everywhere, and linear layers whose weights are stored
``[in, out]``.

Source: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

Shapes: B sequences, T tokens, H heads of width D, hidden size E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.placement.specs import Split, split_over
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..nn.activation import activation
from ..nn.layer import Module
from ..nn.transposed_linear import TransposedLinear
from .config import setting
from .decoder.attention import DecoderAttention, resharded
from .decoder.block import DecoderLayer
from .decoder.config import DecoderConfig, own
from .decoder.positions import PositionedConfig, PositionedDecoder, PositionedModel
from .family import Family
from .parts.aliases import alias


@dataclass(frozen=True)
class GPT2Config(PositionedConfig):
    """The settings of a GPT-2, with Hugging Face's defaults for missing keys.

    Attributes:
        intermediate_size: inner features of the MLP; ``4 · hidden_size`` by default.
        scale_attn_weights: whether scores are divided by ``√head_dim``.
        scale_attn_by_inverse_layer_idx: whether scores of layer i are also divided by i + 1.

    Example:
        >>> config = GPT2Config.from_dict({"n_embd": 8, "n_head": 2, "n_layer": 3})
        >>> config.intermediate_size, config.max_position_embeddings, config.tie_word_embeddings
        (32, 1024, True)
    """

    model_type = "gpt2"

    vocab_size: int = setting(default=50257, minimum=1, held="axis")
    hidden_size: int = setting("n_embd", default=768, minimum=1, held="axis", also=("hidden_size",))
    intermediate_size: int | None = setting("n_inner", default=None, minimum=1, held="axis")  # type: ignore[assignment]
    num_hidden_layers: int = setting(
        "n_layer", default=12, minimum=1, maximum=1000, held="layers", also=("num_hidden_layers",)
    )
    num_attention_heads: int = setting(
        "n_head", default=12, minimum=1, held="axis", also=("num_attention_heads",)
    )
    max_position_embeddings: int = setting(
        "n_positions", default=1024, minimum=1, held="axis", also=("max_position_embeddings",)
    )
    rms_norm_eps: float = setting("layer_norm_epsilon", default=1e-5)
    hidden_act: str = setting("activation_function", default="gelu_new")
    attention_bias: bool = own(True)
    mlp_bias: bool = own(True)
    scale_attn_weights: bool = setting(default=True)
    scale_attn_by_inverse_layer_idx: bool = setting(default=False)

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Checks the settings; no value is derived.

        Raises:
            UnsupportedModelError: the model has cross-attention to an encoder.
        """
        if raw.get("add_cross_attention"):
            raise UnsupportedModelError("'add_cross_attention' of a GPT-2 is not supported")
        return {}


class GPT2Attention(DecoderAttention):
    """Self-attention with one linear layer for queries, keys and values.

    Attributes:
        c_attn: linear layer of queries, keys and values side by side, weight ``[E, 3 H D]``.
        c_proj: output projection.
    """

    o_proj = alias("c_proj")

    def __init__(self, config: GPT2Config, number: int, dtype: DType):
        super().__init__(config, False, dtype)
        self.scale = config.width**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= number + 1

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes ``c_attn`` and ``c_proj``."""
        self.c_attn = TransposedLinear(config.hidden_size, 3 * config.hidden_size, dtype)
        self.c_proj = TransposedLinear(config.hidden_size, config.hidden_size, dtype)

    def head_axes(self) -> tuple[str, ...]:
        """:meth:`DecoderAttention.head_axes`, from the columns of ``c_attn``, which hold the heads."""
        return split_over(self.c_attn.weight, 1)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the weights between heads."""
        heads = Segment.head_aware(self.num_heads, self.head_dim)
        return {
            "c_attn.weight": Split(ShardingStrategy.segmented(1, 1, [heads] * 3), by_device=True),
            "c_attn.bias": Split(ShardingStrategy.segmented(1, 0, [heads] * 3), by_device=True),
            "c_proj.weight": Split(ShardingStrategy.segmented(1, 0, [heads])),
            "c_proj.bias": Split(ShardingStrategy.replicate(1)),
        }

    def project(self, x: jax.Array) -> list[jax.Array]:
        """``[..., E]`` → queries, keys and values ``[..., H, D]`` each."""
        weight = self.c_attn.weight
        parts = self.c_attn.apart(x, [self.num_heads * self.head_dim] * 3)
        return [
            resharded(a.reshape(*a.shape[:-1], self.num_heads, -1), -2, split_over(weight, 1))
            for a in parts
        ]


class GPT2MLP(Module):
    """``c_proj(activation(c_fc(x)))``."""

    def __init__(self, config: GPT2Config, dtype: DType):
        super().__init__()
        self.activation_function = config.hidden_act
        self.c_fc = TransposedLinear(config.hidden_size, config.inner_size, dtype)
        self.c_proj = TransposedLinear(config.inner_size, config.hidden_size, dtype)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        return {
            "c_fc.weight": Split(ShardingStrategy.columnwise(1)),
            "c_fc.bias": Split(ShardingStrategy.rowwise(1)),
            "c_proj.weight": Split(ShardingStrategy.rowwise(1)),
            "c_proj.bias": Split(ShardingStrategy.replicate(1)),
        }

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., E]`` → the same shape."""
        return self.c_proj(activation(self.activation_function)(self.c_fc(x)))


class GPT2Layer(DecoderLayer):
    """``h = x + attn(ln_1(x))``, then ``h + mlp(ln_2(h))``, with linear layers that store ``[out, in]``."""

    mlp_names: ClassVar[tuple[str, ...]] = ("c_fc", "c_proj")
    self_attn, input_layernorm = alias("attn"), alias("ln_1")
    post_attention_layernorm = alias("ln_2")


class GPT2Block(GPT2Layer):
    """A :class:`GPT2Layer` with linear layers that store ``[in, out]``."""

    def make_mixer(self, config: Any, number: int, dtype: DType) -> None:
        """Makes ``attn``."""
        self.attn = GPT2Attention(config, number, dtype)

    def make_mlp(self, config: Any, number: int, dtype: DType) -> GPT2MLP:
        """The layer's MLP."""
        return GPT2MLP(config, dtype)


class GPT2Transformer(PositionedModel):
    """Embeddings of tokens and positions, layers and final norm: ``transformer`` in Hugging Face's files.

    Attributes:
        wte, wpe: embedding tables of tokens and of positions.
        h: the layers.
        ln_f: the last norm.
    """

    embed_tokens, embed_positions = alias("wte"), alias("wpe")
    layers, norm = alias("h"), alias("ln_f")


class GPT2(PositionedDecoder):
    """A GPT-2 language model.

    ``model`` and ``model.layers``, the names that other decoders have, are aliases of ``transformer``
    and ``transformer.h``.

    Example:
        >>> model = GPT2(GPT2Config(100, 8, num_hidden_layers=2, num_attention_heads=2))
        >>> list(model.raw_state_dict())[:4]
        ['transformer.wte.weight', 'transformer.wpe.weight', 'transformer.ln_f.weight',
         'transformer.ln_f.bias']
    """

    layer_class: ClassVar[Any] = GPT2Block
    model_class: ClassVar[Any] = GPT2Transformer
    model = alias("transformer")


GPT2_FAMILY = GPT2.family = Family.of(
    GPT2, GPT2Config, "GPT2LMHeadModel", "GPT2Model",
    # Attention masks, which old files hold.
    ignored=("*.attn.bias", "*.attn.masked_bias"),
    bare=("transformer.", ("wte.", "wpe.", "h.", "ln_f.")),
    tied=("lm_head.weight", "transformer.wte.weight"),
)  # fmt: skip
