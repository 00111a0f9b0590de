"""ERNIE 4.5 (dense): a Llama whose RoPE rotates neighbouring features.

Source: transformers' ``modeling_ernie4_5``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder
from .family import Family
from .gguf.architectures.ernie4_5 import ERNIE45_GGUF
from .names import DECODER, Names
from .parts.rotary import Rope


@dataclass(frozen=True)
class Ernie45Config(DecoderConfig):
    """The settings of an ERNIE 4.5: either all linear layers of a layer have biases, or none."""

    model_type = "ernie4_5"
    fixed = {"sliding_window": None}

    unsaid: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2, "rope_theta": 5e5, "head_dim": 128,
    }  # fmt: skip

    max_position_embeddings: int = setting(default=131_072, minimum=1)
    rms_norm_eps: float = setting(default=1e-5)
    tie_word_embeddings: bool = setting(default=True)
    attention_bias: bool = setting("use_bias", default=False)
    mlp_bias: bool = setting("use_bias", default=False)
    rope: Rope = own(Rope(5e5, interleaved=True))


class Ernie45(Decoder):
    """An ERNIE 4.5 language model.

    Example:
        >>> config = Ernie45Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2, head_dim=8)
        >>> config.rope.interleaved
        True
    """


ERNIE45 = Ernie45.family = Family.of(
    Ernie45,
    Ernie45Config,
    "Ernie4_5ForCausalLM",
    "Ernie4_5Model",
    names=Names(*DECODER),
    gguf=ERNIE45_GGUF,
)
