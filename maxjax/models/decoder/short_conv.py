"""A short convolution between two gates, instead of attention (LFM2).

Source: arXiv:2511.23404; transformers' ``modeling_lfm2``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.strategy import Segment, ShardingStrategy
from ...nn.kv_cache.kinds import State, States
from ...nn.linear import Linear, linear_rules
from ...nn.ssm.convolution import CausalConv
from ...nn.stacked_linear import StackedLinear, split_projections, stacked_rules
from .mixer import RecurrentMixer


class ShortConv(RecurrentMixer):
    """``out_proj(after · conv(before · x))``, where ``in_proj`` computes both gates and x."""

    group: ClassVar[str] = "conv"

    def __init__(self, config: Any, dtype: DType):
        super().__init__(config)
        size, bias = config.hidden_size, config.conv_bias
        self.sizes = (size,) * 3
        self.in_proj: Any = StackedLinear(
            size, self.sizes, ["before", "after", "x"], dtype, stacked=True, has_bias=bias
        )
        self.conv = CausalConv(size, config.conv_taps, dtype, bias)
        self.out_proj = Linear(size, size, dtype, DeviceRef.CPU(), has_bias=bias)

    @classmethod
    def kept(cls, config: Any) -> States:
        """The last inputs of the convolution."""
        return States((State("conv", (config.conv_taps - 1, config.hidden_size), axis=1),))

    def sharding_rules(self) -> dict[str, Any]:
        """Splits the channels."""
        segments = [Segment.even(size) for size in self.sizes]
        columns = linear_rules("out_proj", ShardingStrategy.columnwise(1))
        return stacked_rules("in_proj", self.in_proj, segments) | columns

    def mix(
        self, x: jax.Array, states: dict[str, jax.Array] | None, counts: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As :meth:`RecurrentMixer.mix`; the state is "conv"."""
        before, after, y = (
            a.astype(x.dtype) for a in split_projections(self.in_proj, x, self.sizes)
        )
        y, conv = self.conv(before * y, None if states is None else states["conv"], counts)
        return self.out_proj(after * y.astype(x.dtype)), {"conv": conv}
