"""``Shape``: a list of Dims."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from .dim import AlgebraicDim as AlgebraicDim
from .dim import Dim as Dim
from .dim import DimLike as DimLike
from .dim import StaticDim as StaticDim
from .dim import SymbolicDim as SymbolicDim


class Shape(list[Dim]):
    """The sizes of an array as a list of Dims, made from integers, names and Dims.

    As a list it is mutable and unhashable, and a slice is a plain list. It equals a list or a tuple of
    the same sizes. NumPy and JAX accept a static Shape.

    Example:
        >>> s = Shape((2, "seq", 3))
        >>> s, s.rank, s.static_dims, Shape.is_static(s)
        ([Dim(2), Dim('seq'), Dim(3)], 3, [2, 3], False)
        >>> Shape((2, 3)) == [2, 3], Shape((2, 3)) == (2, 3), (2, 4) != Shape((2, 3))
        (True, True, True)
    """

    def __init__(self, dims: Iterable[DimLike] = ()):
        super().__init__(Dim(dim) for dim in dims)

    def __eq__(self, other: object) -> bool:
        # Shapes of other libraries are tuples, whose == defers to this one.
        return super().__eq__(list(other) if isinstance(other, tuple) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self)

    @property
    def static_dims(self) -> list[int]:
        """The known sizes, in order; the others are left out."""
        return [dim.dim for dim in self if isinstance(dim, StaticDim)]

    @property
    def parameters(self) -> Iterable[SymbolicDim]:
        """The symbolic dims of all sizes, in order, with repetitions."""
        return [name for dim in self for name in dim.parameters]

    @staticmethod
    def is_static(shape: Iterable[Dim]) -> TypeGuard[Iterable[StaticDim]]:
        """Whether every size is known and not negative."""
        return all(isinstance(dim, StaticDim) and dim.dim >= 0 for dim in shape)


ShapeLike = Iterable[DimLike]
"""Type of an argument that is converted to a Shape: sizes, names and Dims in order."""
