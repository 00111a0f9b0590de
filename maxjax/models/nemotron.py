"""Nemotron 3 and 4 and Minitron, and Arcee's AFM: MLPs without a gate, with squared ReLU as activation function.

In Nemotron, LayerNorms add 1 to their weights, and RoPE rotates half of each head.

Sources: arXiv:2402.16819, arXiv:2407.14679; transformers' ``modeling_nemotron`` and ``modeling_arcee``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.block import DecoderLayer
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder
from .family import Family
from .gguf.architectures.nemotron import ARCEE_GGUF, NEMOTRON_GGUF
from .names import DECODER, Names
from .parts.rotary import Rope


@dataclass(frozen=True)
class ArceeConfig(DecoderConfig):
    """The settings of an AFM."""

    model_type = "arcee"
    fixed = {"sliding_window": None}

    rms_norm_eps: float = setting(default=1e-5)
    hidden_act: str = setting(default="relu2")
    max_position_embeddings: int = setting(default=4096, minimum=1)


@dataclass(frozen=True)
class NemotronConfig(ArceeConfig):
    """The settings of a Nemotron."""

    model_type = "nemotron"

    rms_norm_eps: float = setting("norm_eps", default=1e-5)
    norm: str = own("layer")
    norm_offset: float = own(1.0)
    rope: Rope = own(Rope(part=0.5))


class NemotronLayer(DecoderLayer):
    """A layer whose MLP has no gate."""

    mlp_names: ClassVar[tuple[str, ...]] = ("up_proj", "down_proj")


class Nemotron(Decoder):
    """A Nemotron or Minitron language model.

    Example:
        >>> model = Nemotron(NemotronConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=2))
        >>> [name for name in model.raw_state_dict() if "0.mlp" in name]
        ['model.layers.0.mlp.up_proj.weight', 'model.layers.0.mlp.down_proj.weight']
    """

    layer_class: ClassVar[Any] = NemotronLayer


class Arcee(Nemotron):
    """An AFM language model of Arcee."""


NEMOTRON = Nemotron.family = Family.of(
    Nemotron, NemotronConfig, names=Names(*DECODER), gguf=NEMOTRON_GGUF
)
ARCEE = Arcee.family = Family.of(Arcee, ArceeConfig, names=Names(*DECODER), gguf=ARCEE_GGUF)
