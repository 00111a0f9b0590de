"""Command-R, Command-R+ (``cohere``), Command-A and R7B (``cohere2``): attention beside the MLP.

Both have one norm in a layer, a LayerNorm without bias, and RoPE that rotates neighbouring features.
In ``cohere2``, layers with full attention have no RoPE, and the others have a sliding window.

Sources: transformers' ``modeling_cohere`` and ``modeling_cohere2``; arXiv:2504.00698.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..dtype import DType
from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.block import ParallelLayer
from .decoder.config import (
    DecoderConfig,
    all_but_every,
    count_of,
    layers_of,
    own,
    slides_of,
    windowed,
)
from .decoder.model import Decoder, DecoderFamily
from .decoder.norm import HeadNorms
from .gguf.architectures.cohere import COHERE2_GGUF, COHERE_GGUF
from .parts.rotary import Rope


@dataclass(frozen=True)
class CohereConfig(DecoderConfig):
    """The settings of a Command-R."""

    model_type = "cohere"
    fixed = {"mlp_bias": False, "sliding_window": None}

    unsaid: ClassVar[Mapping[str, Any]] = {"rope_theta": 5e5}

    max_position_embeddings: int = setting(default=8192, minimum=1)
    rms_norm_eps: float = setting("layer_norm_eps", default=1e-5)
    tie_word_embeddings: bool = setting(default=True)
    logit_scale: float = setting(default=0.0625)
    qk_norm: bool | str = setting("use_qk_norm", default=False)
    norm: str = own("layer_without_bias")
    rope: Rope = own(Rope(5e5, interleaved=True))


@dataclass(frozen=True)
class Cohere2Config(CohereConfig):
    """The settings of a Command-A: all but every fourth layer have the sliding window and RoPE."""

    model_type = "cohere2"

    unsaid: ClassVar[Mapping[str, Any]] = {"sliding_window": 4096, "sliding_window_pattern": 4}

    qk_norm: bool | str = own(False)
    rope: Rope = own(Rope(interleaved=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rotates", () if all(self.slides) else self.slides)

    @classmethod
    def derived(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The layers with the sliding window, which are those with RoPE."""
        # The period is null where the kinds of the layers are listed.
        period = count_of(raw, "sliding_window_pattern", 4)
        slides = slides_of(raw, all_but_every(period, layers_of(raw)))
        found = windowed(slides, raw.get("sliding_window"))
        return {**found, "rotates": slides}


class CohereAttention(DecoderAttention):
    """Self-attention whose norms of queries and keys, if there are any, have separate weights for each head."""

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the projections and the norms of each head."""
        super().make_projections(config, dtype)
        if config.qk_norm:
            heads = (self.num_heads, self.num_kv_heads)
            self.q_norm, self.k_norm = (
                HeadNorms(count, self.head_dim, dtype, config.rms_norm_eps) for count in heads
            )


class CohereLayer(ParallelLayer):
    """A decoder layer with attention and MLP in parallel, after one norm."""

    attention_class: ClassVar[Any] = CohereAttention


class Cohere(Decoder):
    """A Command-R language model.

    Example:
        >>> config = CohereConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [n for n in Cohere(config).raw_state_dict() if "norm" in n]
        ['model.norm.weight', 'model.layers.0.input_layernorm.weight']
    """

    layer_class: ClassVar[Any] = CohereLayer


class Cohere2(Cohere):
    """A Command-A language model."""


COHERE = Cohere.family = DecoderFamily.of(Cohere, CohereConfig, gguf=COHERE_GGUF)
COHERE2 = Cohere2.family = DecoderFamily.of(Cohere2, Cohere2Config, gguf=COHERE2_GGUF)
