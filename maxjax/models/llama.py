"""Llama 1 to 3: the decoder of ``decoder/`` unchanged. Attributes are named as in its checkpoints.

Sources: arXiv:2302.13971, arXiv:2307.09288, arXiv:2407.21783.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .decoder.config import DecoderConfig
from .decoder.model import Decoder, DecoderFamily
from .multimodal import SIGHT


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """The settings of a Llama, with Hugging Face's defaults for missing keys."""

    model_type = "llama"
    fixed = {"sliding_window": None}

    causal_only: ClassVar[bool] = False


class Llama(Decoder):
    """A Llama language model.

    Example:
        >>> model = Llama(LlamaConfig(100, 8, 16, num_hidden_layers=2, num_attention_heads=2))
        >>> list(model.raw_state_dict())[:3]
        ['lm_head.weight', 'model.embed_tokens.weight', 'model.norm.weight']
    """


LLAMA = Llama.family = DecoderFamily.of(Llama, LlamaConfig, sight=SIGHT)
