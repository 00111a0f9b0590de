"""OPT and Galactica: learned positions, LayerNorm before or after each part, embeddings that may be narrower.

Source: arXiv:2205.01068; transformers' ``modeling_opt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..errors import UnsupportedModelError
from ..graph.device import DeviceRef
from ..graph.placement.strategy import ShardingStrategy
from ..nn.activation import activation
from ..nn.layer import Module
from ..nn.linear import Linear, linear_rules
from .config import setting
from .decoder.attention import Cached, DecoderAttention, Step
from .decoder.config import own
from .decoder.model import DecoderModel
from .decoder.norm import norm
from .decoder.positions import PositionedConfig, PositionedDecoder, PositionedModel
from .family import Family
from .names import Headless, Names
from .parts.aliases import alias


@dataclass(frozen=True)
class OPTConfig(PositionedConfig):
    """The settings of an OPT.

    Attributes:
        do_layer_norm_before: whether norms come before attention and MLP; in the 350M they come after
            the residual sums.
        remove_final_layer_norm: whether a model with norms before attention and MLP has no last norm.
        word_embed_proj_dim: width of the embedding table and the head; ``hidden_size`` by default.
    """

    model_type = "opt"

    intermediate_size: int = setting("ffn_dim", minimum=1, held="axis")
    rms_norm_eps: float = own(1e-5)
    hidden_act: str = setting("activation_function", default="relu")
    attention_bias: bool = setting("enable_bias", default=True)
    mlp_bias: bool = setting("enable_bias", default=True)
    do_layer_norm_before: bool = setting(default=True)
    remove_final_layer_norm: bool = setting("_remove_final_layer_norm", default=False)
    word_embed_proj_dim: int | None = setting(default=None, minimum=1, held="axis")

    @property
    def embedding_size(self) -> int:
        """The width of the embedding table and the head."""
        return self.word_embed_proj_dim or self.hidden_size

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Checks the settings; no value is derived.

        Raises:
            UnsupportedModelError: the norms have no weights.
        """
        if raw.get("layer_norm_elementwise_affine") is False:
            raise UnsupportedModelError("'layer_norm_elementwise_affine' false of an OPT")
        return {}


class OPTAttention(DecoderAttention):
    """Attention whose output projection is ``out_proj``."""

    o_proj = alias("out_proj")


class OPTLayer(Module):
    """``h = x + attention(norm(x))``, then ``h + fc2(activation(fc1(norm(h))))``; or norms after the sums."""

    _mx_carries = True

    def __init__(self, config: OPTConfig, number: int, dtype: DType):
        super().__init__()
        size, inner, cpu = config.hidden_size, config.intermediate_size, DeviceRef.CPU()
        self.first, self.activation_function = config.do_layer_norm_before, config.hidden_act
        self.self_attn = OPTAttention(config, False, dtype)
        self.self_attn_layer_norm, self.final_layer_norm = (norm(config, dtype) for _ in range(2))
        self.fc1 = Linear(size, inner, dtype, cpu, config.mlp_bias)
        self.fc2 = Linear(inner, size, dtype, cpu, config.mlp_bias)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the inner features."""
        rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
        return linear_rules("fc1", rows) | linear_rules("fc2", columns)

    def fed(self, x: jax.Array) -> jax.Array:
        """The result of the MLP for hidden states ``[..., E]``."""
        return self.fc2(activation(self.activation_function)(self.fc1(x))).astype(x.dtype)

    def __call__(
        self, carry: tuple[jax.Array, Cached], step: Step, layer: Any
    ) -> tuple[jax.Array, Cached]:
        """(Hidden states ``[B, T, E]`` or ``[B, E]``, the cache) → the same."""
        x, cached = carry
        one, two = self.self_attn_layer_norm, self.final_layer_norm
        y, cached = self.self_attn(one(x) if self.first else x, step, cached, layer)
        if self.first:
            x = x + y
            return x + self.fed(two(x)), cached
        x = one(x + y)
        return two(x + self.fed(x)), cached


class OPTDecoder(PositionedModel):
    """Embeddings of tokens and positions, layers and, if there is one, the last norm.

    Attributes:
        project_in, project_out: linear layers from and to the width of the embedding table, or None.
    """

    norm = alias("final_layer_norm")
    first_row: ClassVar[int] = 2

    def __init__(self, config: OPTConfig, dtype: DType, layer_class: Any):
        super().__init__(config, dtype, layer_class)
        if config.remove_final_layer_norm or not config.do_layer_norm_before:
            self.final_layer_norm = None
        size, inner = config.embedding_size, config.hidden_size
        has = size != inner
        self.project_in = Linear(size, inner, dtype, DeviceRef.CPU()) if has else None
        self.project_out = Linear(inner, size, dtype, DeviceRef.CPU()) if has else None

    def embed(self, ids: jax.Array, step: Step) -> jax.Array:
        """The sums of token and position embeddings, ``[B, T, E]`` or ``[B, E]``."""
        x = DecoderModel.embed(self, ids, step)
        x = x if self.project_in is None else self.project_in(x).astype(x.dtype)
        return x + self.learned(ids, step)

    def output(self, x: jax.Array) -> jax.Array:
        """Hidden states after the last layer → inputs of the head, in the width of the embedding table."""
        x = x if self.final_layer_norm is None else self.final_layer_norm(x)
        return x if self.project_out is None else self.project_out(x).astype(x.dtype)


class OPTModel(Module):
    """The model without its head; all parts are in ``decoder``."""

    embed_tokens, layers = alias("decoder.embed_tokens"), alias("decoder.layers")
    _mx_carries = True

    def __init__(self, config: OPTConfig, dtype: DType, layer_class: Any):
        super().__init__()
        self.decoder = OPTDecoder(config, dtype, layer_class)

    def __call__(
        self, ids: jax.Array, step: Step, cached: Cached, at: jax.Array | None = None
    ) -> tuple[jax.Array, Cached]:
        """As :class:`PositionedModel`."""
        return self.decoder(ids, step, cached, at)


class OPT(PositionedDecoder):
    """An OPT language model.

    Example:
        >>> config = OPTConfig(100, 32, 64, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=8)
        >>> [name for name in OPT(config).raw_state_dict() if "layers" not in name][1:]
        ['model.decoder.embed_positions.weight', 'model.decoder.final_layer_norm.weight',
         'model.decoder.final_layer_norm.bias', 'model.decoder.project_in.weight',
         'model.decoder.project_out.weight']
    """

    layer_class: ClassVar[Any] = OPTLayer
    model_class: ClassVar[Any] = OPTModel


OPT_FAMILY = OPT.family = Family.of(
    OPT,
    OPTConfig,
    names=Names(Headless("model.", ("decoder.",))),
    tied=("lm_head.weight", "model.decoder.embed_tokens.weight"),
)
