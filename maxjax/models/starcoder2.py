"""StarCoder 2: LayerNorm, biases everywhere, and an MLP without a gate.

Source: arXiv:2402.19173; transformers' ``modeling_starcoder2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.block import DecoderLayer
from .decoder.config import DecoderConfig, own
from .decoder.model import Decoder
from .family import Family
from .gguf.architectures.starcoder import STARCODER2_GGUF
from .names import DECODER, Names


@dataclass(frozen=True)
class Starcoder2Config(DecoderConfig):
    """The settings of a StarCoder 2: all layers have the sliding window, if there is one."""

    model_type = "starcoder2"

    unsaid: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2}

    max_position_embeddings: int = setting(default=4096, minimum=1)
    rms_norm_eps: float = setting("norm_epsilon", default=1e-5)
    hidden_act: str = setting(default="gelu_pytorch_tanh")
    tie_word_embeddings: bool = setting(default=True)
    attention_bias: bool = setting("use_bias", default=True)
    mlp_bias: bool = setting("use_bias", default=True)
    norm: str = own("layer")


class Starcoder2Layer(DecoderLayer):
    """A decoder layer whose MLP has no gate."""

    mlp_names: ClassVar[tuple[str, ...]] = ("c_fc", "c_proj")


class Starcoder2(Decoder):
    """A StarCoder 2 language model.

    Example:
        >>> config = Starcoder2Config(100, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> [n for n in Starcoder2(config).raw_state_dict() if "0.mlp" in n]
        ['model.layers.0.mlp.c_fc.weight', 'model.layers.0.mlp.c_fc.bias',
         'model.layers.0.mlp.c_proj.weight', 'model.layers.0.mlp.c_proj.bias']
    """

    layer_class: ClassVar[Any] = Starcoder2Layer


STARCODER2 = Starcoder2.family = Family.of(
    Starcoder2, Starcoder2Config, names=Names(*DECODER), gguf=STARCODER2_GGUF
)
