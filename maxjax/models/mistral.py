"""Mistral 7B: a Llama with sliding-window attention and fewer KV heads than query heads.

Source: arXiv:2310.06825.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import DecoderConfig
from .decoder.model import Decoder, DecoderFamily, make


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """The settings of a Mistral: all its layers have the sliding window, if there is one."""

    model_type = "mistral"

    unsaid: ClassVar[Mapping[str, Any]] = {"sliding_window": 4096}

    max_position_embeddings: int = setting(default=131072, minimum=1)
    num_kv_heads: int | None = setting("num_key_value_heads", default=8, minimum=1, held="axis")

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """A Mistral has no biases, whatever its file says."""
        return {"attention_bias": False, "mlp_bias": False}


class Mistral(Decoder):
    """A Mistral language model.

    Example:
        >>> config = MistralConfig(100, 16, 32, num_layers=2, num_heads=8, sliding_window=4)
        >>> config.slides, Mistral(config).cache(1, 64).sliding.size
        ((True, True), 4)
    """


MISTRAL = Mistral.family = DecoderFamily(
    model_type=MistralConfig.model_type,
    architectures=("MistralForCausalLM", "MistralModel"),
    config=MistralConfig,
    make=make(Mistral),
)
