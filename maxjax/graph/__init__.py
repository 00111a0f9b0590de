"""Floors 0 and 3. What a weight is and where it lives, under the names of ``max.graph``."""

from . import ops as ops
from .device import DeviceKind as DeviceKind
from .device import DeviceRef as DeviceRef
from .graph import Graph as Graph
from .program import Model as Model
from .shape import AlgebraicDim as AlgebraicDim
from .shape import Dim as Dim
from .shape import Shape as Shape
from .shape import StaticDim as StaticDim
from .shape import SymbolicDim as SymbolicDim
from .shard import Shard as Shard
from .sharding import Segment as Segment
from .sharding import Shardable as Shardable
from .sharding import ShardingStrategy as ShardingStrategy
from .tensor_type import TensorType as TensorType
from .value import TensorValue as TensorValue
from .weight import Weight as Weight
