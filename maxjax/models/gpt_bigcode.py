"""StarCoder and SantaCoder (GPT-BigCode): a GPT-2 with one KV head (multi-query attention).

Source: arXiv:2305.06161; transformers' ``modeling_gpt_bigcode``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from .config import setting
from .decoder.config import own
from .decoder.grouped import GroupedAttention
from .gguf.architectures.starcoder import STARCODER_GGUF
from .gpt2 import GPT2, GPT2_FAMILY, GPT2Config, GPT2Layer
from .parts.aliases import alias


@dataclass(frozen=True)
class GPTBigCodeConfig(GPT2Config):
    """The settings of a GPT-BigCode.

    Attributes:
        multi_query: whether there is one KV head; otherwise there is one for each query head.
    """

    model_type = "gpt_bigcode"
    unused: ClassVar[Collection[str]] = ("num_key_value_heads",)

    hidden_act: str = setting("activation_function", default="gelu_pytorch_tanh")
    scale_attn_by_inverse_layer_idx: bool = own(False)
    multi_query: bool = setting(default=True)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "num_key_value_heads", 1 if self.multi_query else self.num_attention_heads
        )
        if not self.scale_attn_weights:
            object.__setattr__(self, "query_scale", 1.0)
        super().__post_init__()


class GPTBigCodeAttention(GroupedAttention):
    """Self-attention whose ``c_attn`` has the rows of all queries, one key and one value, or these for each head."""

    query_key_value, dense, o_proj = alias("c_attn"), alias("c_proj"), alias("c_proj")


class GPTBigCodeBlock(GPT2Layer):
    """A layer of a GPT-BigCode."""

    attention_class: ClassVar[Any] = GPTBigCodeAttention


class GPTBigCode(GPT2):
    """A StarCoder or SantaCoder language model.

    Example:
        >>> model = GPTBigCode(GPTBigCodeConfig(100, 8, num_hidden_layers=1, num_attention_heads=2))
        >>> model.raw_state_dict()["transformer.h.0.attn.c_attn.weight"].shape
        [Dim(16), Dim(8)]
    """

    layer_class: ClassVar[Any] = GPTBigCodeBlock


GPT_BIGCODE = GPTBigCode.family = GPT2_FAMILY.like(
    GPTBigCode, GPTBigCodeConfig, gguf=STARCODER_GGUF
)
