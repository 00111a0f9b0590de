"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one LayerNorm, RoPE of a part of each head.

Source: arXiv:2309.05463; transformers' ``modeling_phi``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.attention import DecoderAttention
from .decoder.block import ParallelLayer
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder, DecoderModel
from .family import Family
from .gguf.architectures.phi import PHI_GGUF
from .names import ROPE_TABLES, Headless, Names
from .parts.aliases import alias
from .parts.rotary import Rope


@dataclass(frozen=True)
class PhiConfig(DecoderConfig):
    """The settings of a Phi-1, Phi-1.5 or Phi-2; all linear layers have biases."""

    model_type = "phi"

    rms_norm_eps: float = setting("layer_norm_eps", default=1e-5)
    hidden_act: str = setting(default="gelu_new")
    attention_bias: bool = own(True)
    mlp_bias: bool = own(True)
    head_bias: bool = own(True)
    sliding_window: int | None = own(None)
    qk_norm: bool = setting("qk_layernorm", default=False)
    norm: str = own("layer")
    rope: Rope = own(Rope(part=0.5))


class PhiAttention(DecoderAttention):
    """Attention with the attribute names of Phi's files."""

    o_proj, q_norm, k_norm = alias("dense"), alias("q_layernorm"), alias("k_layernorm")


class PhiLayer(ParallelLayer):
    """A layer with attention and an MLP without a gate in parallel."""

    attention_class: ClassVar[Any] = PhiAttention
    mlp_names: ClassVar[tuple[str, ...]] = ("fc1", "fc2")


class PhiModel(DecoderModel):
    """The model without its head."""

    norm = alias("final_layernorm")


class Phi(Decoder):
    """A Phi-1, Phi-1.5 or Phi-2 language model.

    Example:
        >>> model = Phi(PhiConfig(100, 32, 64, num_hidden_layers=1, num_attention_heads=4))
        >>> list(model.raw_state_dict())[:2]
        ['lm_head.weight', 'lm_head.bias']
    """

    layer_class: ClassVar[Any] = PhiLayer
    model_class: ClassVar[Any] = PhiModel


PHI = Phi.family = Family.of(
    Phi,
    PhiConfig,
    names=Names(ROPE_TABLES, Headless("model.", ("embed_tokens.", "layers.", "final_layernorm."))),
    gguf=PHI_GGUF,
)
