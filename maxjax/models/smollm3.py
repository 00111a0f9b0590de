"""SmolLM3: a Llama in which every fourth layer has no rotary position embedding.

Source: transformers' ``modeling_smollm3``; the idea is arXiv:2501.18795.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import DecoderConfig, own, rotates_of, slides_of, windowed
from .decoder.model import Decoder, DecoderFamily
from .gguf.architectures.smollm3 import SMOLLM3_GGUF
from .parts.rotary import Rope


@dataclass(frozen=True)
class SmolLM3Config(DecoderConfig):
    """The settings of a SmolLM3; if a sliding window is used, the layers without RoPE have it."""

    model_type = "smollm3"

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4, "rope_theta": 2e6}

    max_position_embeddings: int = setting(default=32768, minimum=1)
    tie_word_embeddings: bool = setting(default=True)
    rope: Rope = own(Rope(2e6))

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with RoPE and those with the sliding window."""
        window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
        rotates = rotates_of(raw)
        slides = slides_of(raw, [window is not None and not one for one in rotates])
        return {"rotates": rotates, **windowed(slides, window)}


class SmolLM3(Decoder):
    """A SmolLM3 language model.

    Example:
        >>> config = SmolLM3Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, rotates=(True, False))
        >>> [layer.self_attn.rope for layer in SmolLM3(config, stacked=False).model.layers]
        ['global', 'none']
    """


SMOLLM3 = SmolLM3.family = DecoderFamily.of(SmolLM3, SmolLM3Config, gguf=SMOLLM3_GGUF)
