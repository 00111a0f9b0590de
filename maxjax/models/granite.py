"""Granite 3: a Llama with factors of the embeddings, attention scores, residual terms and logits.

Source: arXiv:2408.13359; transformers' ``modeling_granite``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import setting
from .decoder.config import DecoderConfig
from .decoder.model import Decoder, DecoderFamily
from .gguf.architectures.granite import GRANITE_GGUF


@dataclass(frozen=True)
class GraniteConfig(DecoderConfig):
    """The settings of a Granite.

    Attributes:
        logits_scaling: divisor of the logits; ``logit_scale`` is computed from it.
    """

    model_type = "granite"
    fixed = {"sliding_window": None}

    embedding_scale: float = setting("embedding_multiplier", default=1.0)
    query_scale: float | None = setting("attention_multiplier", default=1.0)
    residual_scale: float = setting("residual_multiplier", default=1.0)
    logits_scaling: float = setting(default=1.0, minimum=1e-9)

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_scale", 1 / self.logits_scaling)
        super().__post_init__()


class Granite(Decoder):
    """A Granite language model.

    Example:
        >>> Granite(GraniteConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)).config.query_scale
        1.0
    """


GRANITE = Granite.family = DecoderFamily.of(Granite, GraniteConfig, gguf=GRANITE_GGUF)
