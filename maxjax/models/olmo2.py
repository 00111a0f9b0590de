"""OLMo 2 and 3: norms after attention and MLP, and norms of queries and keys over all heads together.

OLMo 3 adds a sliding window in three of every four layers; the RoPE of these may have its own settings.

Sources: arXiv:2501.00656; transformers' ``modeling_olmo2`` and ``modeling_olmo3``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.block import PostNormLayer
from .decoder.config import DecoderConfig, all_but_every, layers_of, own, slides_of, windowed
from .decoder.model import Decoder, DecoderFamily
from .gguf.architectures.olmo import OLMO2_GGUF
from .parts.rotary import Rope, both_ropes


@dataclass(frozen=True)
class Olmo2Config(DecoderConfig):
    """The settings of an OLMo 2."""

    model_type = "olmo2"
    fixed = {"mlp_bias": False, "sliding_window": None}

    rms_norm_eps: float = setting(default=1e-5)
    norm: str = own("wide_rms")
    qk_norm: bool | str = own("all")


@dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """The settings of an OLMo 3: all but every fourth layer have the sliding window."""

    model_type = "olmo3"

    unsaid: ClassVar[Mapping[str, Any]] = {"sliding_window": 4096}

    rope: Rope = own(Rope(5e5))
    local_rope: Rope | None = own(Rope(5e5))

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with the sliding window."""
        slides = slides_of(raw, all_but_every(4, layers_of(raw)))
        return windowed(slides, raw.get("sliding_window"))

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Rope]:
        """The RoPE of layers with full attention and that of sliding layers."""
        return both_ropes(raw, context, 5e5, 5e5)


class Olmo2(Decoder):
    """An OLMo 2 language model.

    Example:
        >>> config = Olmo2Config(100, 8, 16, num_hidden_layers=2, num_attention_heads=2)
        >>> Olmo2(config, stacked=False).model.layers[0].self_attn.q_norm.weight.shape
        [Dim(8)]
    """

    layer_class: ClassVar[Any] = PostNormLayer


class Olmo3(Olmo2):
    """An OLMo 3 language model."""


OLMO2 = Olmo2.family = DecoderFamily.of(Olmo2, Olmo2Config, gguf=OLMO2_GGUF)
OLMO3 = Olmo3.family = DecoderFamily.of(Olmo3, Olmo3Config)
