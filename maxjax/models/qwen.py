"""Qwen 3. Attributes are named as in Hugging Face's checkpoints.

These models are also the text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Sources: arXiv:2407.10671, arXiv:2412.15115, arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import DecoderConfig, layers_of, own, slides_of, windowed
from .decoder.model import Decoder, DecoderFamily
from .multimodal import SIGHT

# Defaults of the settings of the sliding window, which is used only if ``use_sliding_window`` is true.
WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def window_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window, and the layers that have it: those from ``max_window_layers`` on, if it is used.

    Raises:
        ValueError: a value is of the wrong type.
        UnsupportedModelError: ``layer_types`` names an unknown kind of layer.
    """
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    first, layers = raw.get("max_window_layers"), layers_of(raw)
    if type(first) is not int or not layers:
        return {"sliding_window": window}
    slides = [window is not None and i >= first for i in range(layers)]
    return windowed(slides_of(raw, slides), window)


@dataclass(frozen=True)
class Qwen3Config(DecoderConfig):
    """The settings of a Qwen 3: each head of queries and keys is normalised."""

    model_type = "qwen3"

    causal_only: ClassVar[bool] = False

    unsaid: ClassVar[Mapping[str, Any]] = {**WINDOW, "num_key_value_heads": 32}

    max_position_embeddings: int = setting(default=32768, minimum=1)
    head_dim: int | None = setting(default=128, minimum=1, held="axis")
    qk_norm: bool = own(True)

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The sliding window; the MLP has no biases, whatever the file says."""
        return {"mlp_bias": False, **window_settings(raw)}


class Qwen3(Decoder):
    """A Qwen 3 language model."""


QWEN3 = Qwen3.family = DecoderFamily.of(Qwen3, Qwen3Config, sight=SIGHT)
