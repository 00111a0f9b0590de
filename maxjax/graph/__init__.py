"""Floors 0 and 3. What a weight is and where it lives, under the names of ``max.graph``."""

from ..absent import absent as _absent
from . import ops as ops
from .device import DeviceKind as DeviceKind
from .device import DeviceRef as DeviceRef
from .graph import Graph as Graph
from .graph import Module as Module
from .program import Model as Model
from .shape import AlgebraicDim as AlgebraicDim
from .shape import Dim as Dim
from .shape import DimLike as DimLike
from .shape import Shape as Shape
from .shape import StaticDim as StaticDim
from .shape import SymbolicDim as SymbolicDim
from .shard import Shard as Shard
from .sharding import Segment as Segment
from .sharding import Shardable as Shardable
from .sharding import ShardingStrategy as ShardingStrategy
from .tensor_type import TensorType as TensorType
from .tensor_type import Type as Type
from .value import TensorValue as TensorValue
from .value import TensorValueLike as TensorValueLike
from .value import Value as Value
from .weight import Weight as Weight

__getattr__ = _absent(
    __name__,
    {
        "BufferValue BufferType BufferValueLike": (
            "arrays do not change here; give the new array as a result (jax.jit donates buffers)"
        ),
    },
)
