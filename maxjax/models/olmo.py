"""OLMo 1: a Llama whose LayerNorms have no weights, and whose queries, keys and values may be clipped.

Source: arXiv:2402.00838; transformers' ``modeling_olmo``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.block import DecoderLayer
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder
from .family import Family
from .gguf.architectures.olmo import OLMO_GGUF
from .names import DECODER, Names
from .olmoe import OLMoEAttention


@dataclass(frozen=True)
class OlmoConfig(DecoderConfig):
    """The settings of an OLMo; ``clip_qkv`` is the bound at which queries, keys and values are clipped."""

    model_type = "olmo"
    fixed = {"sliding_window": None, "mlp_bias": False}

    rms_norm_eps: float = own(1e-5)
    clip_qkv: float | None = setting(default=None)
    norm: str = own("layer_without_weights")


class OlmoLayer(DecoderLayer):
    """A layer of an OLMo."""

    attention_class: ClassVar[Any] = OLMoEAttention


class Olmo(Decoder):
    """An OLMo language model.

    Example:
        >>> model = Olmo(OlmoConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "norm" in name]
        []
    """

    layer_class: ClassVar[Any] = OlmoLayer


OLMO = Olmo.family = Family.of(Olmo, OlmoConfig, names=Names(*DECODER), gguf=OLMO_GGUF)
