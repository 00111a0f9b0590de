"""Written for files of Modular MAX: types, devices and layouts, re-exported at MAX's path.

maxjax itself does not import it.
"""

from .device import DeviceKind as DeviceKind
from .device import DeviceRef as DeviceRef
from .dim import AlgebraicDim as AlgebraicDim
from .dim import Dim as Dim
from .dim import DimLike as DimLike
from .dim import StaticDim as StaticDim
from .dim import SymbolicDim as SymbolicDim
from .ops.convolution import ConvInputLayout as ConvInputLayout
from .ops.convolution import FilterLayout as FilterLayout
from .shape import Shape as Shape
from .shape import ShapeLike as ShapeLike
from .tensor_type import BufferType as BufferType
from .tensor_type import TensorType as TensorType
from .tensor_type import Type as Type
from .tensor_type import Type as _TensorTypeBase  # noqa: F401  # MAX's name
