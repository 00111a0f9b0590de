"""Mistral (https://arxiv.org/abs/2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import DecoderConfig
from .decoder.model import Decoder, make
from .family import Family
from .llama import BARE, KNOWN


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """The settings of a Mistral: a Llama whose layers all look back through a window, if any."""

    unsaid: ClassVar[Mapping[str, Any]] = {"sliding_window": 4096}

    max_position_embeddings: int = setting(default=131072, minimum=1)
    num_kv_heads: int | None = setting("num_key_value_heads", default=8, minimum=1, held="axis")

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """There are no biases, whatever its file says."""
        return {"attention_bias": False, "mlp_bias": False}


class Mistral(Decoder):
    """A Mistral."""


MISTRAL = Mistral.family = Family(
    model_type="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    config=MistralConfig,
    make=make(Mistral),
    bare=BARE,
    ignored=KNOWN,
)
