"""Self-attention in which one linear layer computes queries, keys and values, in groups (GPT-NeoX, Falcon).

Shapes: H query heads and K KV heads of width D, hidden size E.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...nn.linear import Linear, linear_rules
from ..parts.aliases import alias
from .attention import DecoderAttention
from .config import DecoderConfig

# The linear layers of MLPs beside such attention.
MLP_NAMES = ("dense_h_to_4h", "dense_4h_to_h")


class GroupedAttention(DecoderAttention):
    """Self-attention whose linear layer has a group of outputs for each KV head: its queries, key and value.

    Attributes:
        query_key_value: linear layer of weight ``[K (H / K + 2) D, E]``.
        dense: output projection.

    Example:
        >>> config = DecoderConfig(100, 8, 16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
        >>> GroupedAttention(config, False, DType.float32).query_key_value.weight.shape
        [Dim(16), Dim(8)]
    """

    o_proj = alias("dense")

    def make_projections(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes ``query_key_value`` and ``dense``."""
        self.group_size = self.num_heads // self.num_kv_heads + 2
        outputs = self.num_kv_heads * self.group_size * self.head_dim
        size, cpu = config.hidden_size, DeviceRef.CPU()
        self.query_key_value = Linear(size, outputs, dtype, cpu, config.attention_bias)
        heads = self.num_heads * self.head_dim
        self.dense = Linear(heads, size, dtype, cpu, bool(config.output_bias))

    def project(self, x: jax.Array) -> Sequence[jax.Array]:
        """``[..., E]`` → queries ``[..., H, D]``, keys and values ``[..., K, D]``."""
        y = self.query_key_value(x).astype(x.dtype)
        lead, width = y.shape[:-1], self.head_dim
        y = y.reshape(*lead, self.num_kv_heads, self.group_size, width)
        q = y[..., :-2, :].reshape(*lead, self.num_heads, width)
        return [q, y[..., -2, :], y[..., -1, :]]

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the weights between groups, and the columns of ``dense`` between query heads."""
        group = Segment.head_aware(self.num_kv_heads, self.group_size * self.head_dim)
        strategy = ShardingStrategy.segmented(1, 0, [group])
        return super().sharding_rules() | linear_rules("query_key_value", strategy)


class GroupedParts:
    """Mixin with the attention and the MLP names of these families' layers, for any order of attention and MLP."""

    attention_class: ClassVar[Any] = GroupedAttention
    mlp_names: ClassVar[tuple[str, ...]] = MLP_NAMES
