"""Weights, graphs and placement, under the names of ``max.graph``.

``dim``, ``shape``, ``device`` and ``quantization`` are the vocabulary. A :class:`Weight` (``weight/``) is a
named value, abstract until it is loaded; ``weights/`` opens checkpoints as trees of names and reads
them; ``placement/`` decides the sharding of weights. ``value`` and ``ops/`` are MAX's
TensorValue and its operations on JAX arrays; ``graph`` and ``program`` build and run programs;
``subgraph`` and ``reroll`` compile equal layers once.

Names are imported on first use.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..absent import absent as _absent
from ..lazy import attributes as _attributes

if _TYPE_CHECKING:
    from . import ops as ops
    from .buffer import BufferValue as BufferValue
    from .buffer import BufferValueLike as BufferValueLike
    from .device import DeviceKind as DeviceKind
    from .device import DeviceRef as DeviceRef
    from .graph import Graph as Graph
    from .graph import Module as Module
    from .graph import ProfileScopeColor as ProfileScopeColor
    from .placement.split import Segment as Segment
    from .placement.strategy import Shardable as Shardable
    from .placement.strategy import ShardingStrategy as ShardingStrategy
    from .program import Model as Model
    from .shape import AlgebraicDim as AlgebraicDim
    from .shape import Dim as Dim
    from .shape import DimLike as DimLike
    from .shape import Shape as Shape
    from .shape import ShapeLike as ShapeLike
    from .shape import StaticDim as StaticDim
    from .shape import SymbolicDim as SymbolicDim
    from .tensor_type import BufferType as BufferType
    from .tensor_type import TensorType as TensorType
    from .tensor_type import Type as Type
    from .value import TensorValue as TensorValue
    from .value import TensorValueLike as TensorValueLike
    from .value import Value as Value
    from .weight import Shard as Shard
    from .weight import Weight as Weight

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "": "ops",
        "buffer": "BufferValue BufferValueLike",
        "device": "DeviceKind DeviceRef",
        "graph": "Graph Module ProfileScopeColor",
        "placement.split": "Segment",
        "placement.strategy": "Shardable ShardingStrategy",
        "program": "Model",
        "shape": "AlgebraicDim Dim DimLike Shape ShapeLike StaticDim SymbolicDim",
        "tensor_type": "BufferType TensorType Type",
        "value": "TensorValue TensorValueLike Value",
        "weight": "Shard Weight",
    },
    _absent(__name__),
)
