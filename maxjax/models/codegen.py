"""CodeGen: a GPT-J with one linear layer for queries, values and keys, in four parts (once one for each device).

Source: arXiv:2203.13474; transformers' ``modeling_codegen``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.placement.strategy import Segment, ShardingStrategy
from ..nn.linear import Linear, linear_rules
from .decoder.config import DecoderConfig
from .gptj import GPTJ, GPTJ_FAMILY, GPTJAttention, GPTJBlock, GPTJConfig

# Number of parts of ``qkv_proj``; each has the queries, values and keys of its heads.
_DEVICES = 4


@dataclass(frozen=True)
class CodeGenConfig(GPTJConfig):
    """The settings of a CodeGen."""

    model_type = "codegen"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % _DEVICES:
            raise ValueError(f"'n_head' {self.num_attention_heads} is not a multiple of {_DEVICES}")


class CodeGenAttention(GPTJAttention):
    """Attention with one linear layer for queries, values and keys.

    Attributes:
        qkv_proj: linear layer of weight ``[4 · 3 · H / 4 · D, E]``.
    """

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes ``qkv_proj`` and ``out_proj``."""
        size, cpu = config.hidden_size, DeviceRef.CPU()
        self.qkv_proj = Linear(size, 3 * size, dtype, cpu)
        self.out_proj = Linear(size, size, dtype, cpu)

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """``[..., E]`` → queries, keys and values ``[..., H, D]``."""
        y, lead = self.qkv_proj(x).astype(x.dtype), x.shape[:-1]
        y = y.reshape(*lead, _DEVICES, 3, -1)
        q, v, k = (y[..., i, :].reshape(*lead, self.num_heads, self.head_dim) for i in range(3))
        return q, k, v

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the rows between the parts of ``qkv_proj``, which have the same heads."""
        part = Segment.head_aware(_DEVICES, 3 * self.num_heads // _DEVICES * self.head_dim)
        rules = linear_rules("qkv_proj", ShardingStrategy.segmented(1, 0, [part]))
        return super().sharding_rules() | rules


class CodeGenBlock(GPTJBlock):
    """A :class:`GPTJBlock` with CodeGen's attention."""

    attention_class: ClassVar[Any] = CodeGenAttention


class CodeGen(GPTJ):
    """A CodeGen language model.

    Example:
        >>> model = CodeGen(CodeGenConfig(100, 16, num_hidden_layers=1, num_attention_heads=4))
        >>> model.raw_state_dict()["transformer.h.0.attn.qkv_proj.weight"].shape
        [Dim(48), Dim(16)]
    """

    layer_class: ClassVar[Any] = CodeGenBlock


CODEGEN = CodeGen.family = GPTJ_FAMILY.like(CodeGen, CodeGenConfig)
