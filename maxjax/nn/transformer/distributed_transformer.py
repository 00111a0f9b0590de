"""MAX's path of decoders whose hidden states are in lists, one for each device."""

from __future__ import annotations

from typing import Any, Protocol

from ...absent import absent as _absent
from ...graph.placement.strategy import Shardable
from .outputs import DistributedLogitsPostprocessMixin as DistributedLogitsPostprocessMixin
from .outputs import ReturnHiddenStates as ReturnHiddenStates
from .outputs import ReturnLogits as ReturnLogits
from .outputs import distributed_logits_postprocess as distributed_logits_postprocess
from .outputs import extract_hs as extract_hs
from .sequence import forward_sequential_layers as forward_sequential_layers
from .sequence import forward_sharded_layers as forward_sharded_layers


class ShardableCallable(Shardable, Protocol):
    """A layer of one tensor that can be sharded."""

    def __call__(self, x: Any) -> Any: ...


__getattr__ = _absent(__name__)
