"""GPT-NeoX and Pythia: attention beside the MLP, RoPE of a quarter of each head, LayerNorm, biases.

Source: arXiv:2204.06745; transformers' ``modeling_gpt_neox``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..dtype import DType
from .config import setting
from .decoder.block import DecoderLayer, ParallelLayer
from .decoder.config import DecoderConfig, own
from .decoder.grouped import GroupedParts
from .decoder.model import Decoder, DecoderModel
from .family import Family
from .gguf.architectures.gpt_neox import GPT_NEOX_GGUF
from .names import ROPE_TABLES, Drop, Headless, Names, Rename
from .parts.aliases import alias
from .parts.rotary import Rope


@dataclass(frozen=True)
class GPTNeoXConfig(DecoderConfig):
    """The settings of a GPT-NeoX.

    Attributes:
        use_parallel_residual: whether attention and MLP are added to the same hidden states.
    """

    model_type = "gpt_neox"

    num_key_value_heads: int | None = own(None)
    head_dim: int | None = own(None)
    rms_norm_eps: float = setting("layer_norm_eps", default=1e-5)
    hidden_act: str = setting(default="gelu")
    attention_bias: bool = setting(default=True)
    mlp_bias: bool = own(True)
    sliding_window: int | None = own(None)
    use_parallel_residual: bool = setting(default=True)
    norm: str = own("layer")
    rope: Rope = own(Rope(part=0.25))

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Rope]:
        """The RoPE, which rotates the first part of each head; older files have other keys for its settings."""
        keys = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
        older = {key: raw[old] for key, old in keys.items() if raw.get(old) is not None}
        both = ChainMap(older, raw)  # type: ignore[arg-type]
        return super().ropes(both, context)


class _Parts(GroupedParts):
    """Mixin with the attribute name that both kinds of layers have in the files."""

    self_attn = alias("attention")


class GPTNeoXLayer(_Parts, DecoderLayer):
    """A layer with the MLP after attention."""


class GPTNeoXParallelLayer(_Parts, ParallelLayer):
    """A layer with the MLP beside attention, each after a norm of its own."""

    norms: ClassVar[int] = 2


def layer(config: GPTNeoXConfig, number: int, dtype: DType) -> DecoderLayer:
    """Makes a layer of the kind that the configuration has."""
    kind = GPTNeoXParallelLayer if config.use_parallel_residual else GPTNeoXLayer
    return kind(config, number, dtype)


class GPTNeoXModel(DecoderModel):
    """The model without its head."""

    embed_tokens, norm = alias("embed_in"), alias("final_layer_norm")


class GPTNeoX(Decoder):
    """A GPT-NeoX or Pythia language model.

    Example:
        >>> model = GPTNeoX(GPTNeoXConfig(100, 32, 64, num_hidden_layers=1, num_attention_heads=4))
        >>> [name for name in model.raw_state_dict() if "layers" not in name]
        ['embed_out.weight', 'gpt_neox.embed_in.weight', 'gpt_neox.final_layer_norm.weight',
         'gpt_neox.final_layer_norm.bias']
    """

    layer_class: ClassVar[Any] = staticmethod(layer)
    model_class: ClassVar[Any] = GPTNeoXModel
    model, lm_head = alias("gpt_neox"), alias("embed_out")


GPT_NEOX = GPTNeoX.family = Family.of(
    GPTNeoX,
    GPTNeoXConfig,
    names=Names(
        Drop("*.attention.bias", "*.attention.masked_bias"),
        ROPE_TABLES,
        Headless("gpt_neox.", ("embed_in.", "layers.", "final_layer_norm.")),
        Rename({"lm_head.weight": "embed_out.weight"}),
    ),
    tied=("embed_out.weight", "gpt_neox.embed_in.weight"),
    gguf=GPT_NEOX_GGUF,
)
