"""The changes that llama.cpp's converter makes to tensors of recurrent layers and of convolutions.

Source: ``Mamba2Model`` and ``LFM2Model`` of llama.cpp's converter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import CheckpointFormatError
from .layouts import Layout, Shape


@dataclass(frozen=True)
class Logarithm(Layout):
    """``log(-x)`` of each value: GGUF files hold ``-exp(A_log)`` of recurrent layers.

    It is computed in float64 and rounded to the tensor's dtype once. Neither direction has an exact inverse:
    a round trip changes values by a few units in the last place.

    Attributes:
        inverse: whether the change is ``-exp(x)`` instead.

    Example:
        >>> Logarithm().apply(np.float32([-1, -2]))
        array([0.       , 0.6931472], dtype=float32)
    """

    inverse: bool = False
    keeps_values = False

    def change(self, values: np.ndarray) -> np.ndarray:
        """See :class:`Layout`."""
        wide = values.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            made = -np.exp(wide) if self.inverse else np.log(-wide)
            return made.astype(values.dtype)

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Logarithm(not self.inverse)


@dataclass(frozen=True)
class Taps(Layout):
    """The weight ``[C, 1, K]`` of a depthwise convolution, which files hold as ``[C, K]``.

    The converter drops the axis of size 1 (``LFM2Model``, ``Mamba2Model``).

    Example:
        >>> Taps().shape((6, 4)), Taps().back().shape((6, 1, 4))
        ((6, 1, 4), (6, 4))
    """

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        if len(in_file) != 2:
            raise CheckpointFormatError(
                "not the taps of channels", expected="2 axes", found=f"shape {list(in_file)}"
            )
        return (in_file[0], 1, in_file[1])

    def change(self, values: np.ndarray) -> np.ndarray:
        """See :class:`Layout`."""
        return values[:, None]

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return NoMiddle()


@dataclass(frozen=True)
class NoMiddle(Layout):
    """``[C, 1, K]`` as ``[C, K]``: the inverse of ``Taps``."""

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        if len(in_file) != 3 or in_file[1] != 1:
            raise CheckpointFormatError(
                "not a convolution of each channel", expected="[C, 1, K]", found=f"{list(in_file)}"
            )
        return (in_file[0], in_file[2])

    def change(self, values: np.ndarray) -> np.ndarray:
        """See :class:`Layout`."""
        return values.reshape(len(values), -1)

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Taps()


@dataclass(frozen=True)
class AxesOf1(Layout):
    """A tensor that has axes of size 1 in other places than the file's.

    The converter of Kimi Linear writes four axes (``KimiLinearModel``), of which programs that quantise drop those
    in front.

    Attributes:
        axes, in_file: 1 for each axis of size 1, and 0 for the others, of the tensor and of the one in the file.

    Example:
        >>> taps = AxesOf1((0, 1, 0), (1, 0, 1, 0))
        >>> taps.shape((1, 6, 1, 4)), taps.shape((6, 1, 4)), taps.back().shape((6, 1, 4))
        ((6, 1, 4), (6, 1, 4), (1, 6, 1, 4))
    """

    axes: tuple[int, ...]
    in_file: tuple[int, ...]
    by_rows = False

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        full = (*(1,) * (len(self.in_file) - len(in_file)), *in_file)
        if len(full) != len(self.in_file) or any(
            is_1 and n != 1 for n, is_1 in zip(full, self.in_file, strict=True)
        ):
            expected = ["1" if is_1 else "n" for is_1 in self.in_file]
            raise CheckpointFormatError(
                "not a tensor with such axes of size 1",
                expected=f"[{', '.join(expected)}]", found=f"shape {list(in_file)}",
            )  # fmt: skip
        others = iter(n for n, is_1 in zip(full, self.in_file, strict=True) if not is_1)
        return tuple(1 if is_1 else next(others) for is_1 in self.axes)

    def apply(self, in_file: np.ndarray) -> np.ndarray:
        """See :class:`Layout`. A view."""
        return in_file.reshape(self.shape(in_file.shape))

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return AxesOf1(self.in_file, self.axes)


@dataclass(frozen=True)
class Flat(Layout):
    """A vector that files hold as a matrix with ``rows_stored`` rows, or with one row for each value.

    The converter gives the norm of Mamba 2 a row for each group, and A and D one for each head
    (``Mamba2Model``).

    Attributes:
        rows_stored: number of rows in the file; 0: as many as values.

    Example:
        >>> Flat().apply(np.float32([[1], [2]]))
        array([1., 2.], dtype=float32)
        >>> Flat(2).back().shape((6,)), Flat().back().shape((6,))
        ((2, 3), (6, 1))
    """

    rows_stored: int = 0
    by_rows = False

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        if len(in_file) not in (1, 2):
            raise CheckpointFormatError(
                "not a vector in rows", expected="1 or 2 axes", found=f"shape {list(in_file)}"
            )
        return (math.prod(in_file),)

    def apply(self, in_file: np.ndarray) -> np.ndarray:
        """See :class:`Layout`. A view."""
        return in_file.reshape(self.shape(in_file.shape))

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return InRows(self.rows_stored)


@dataclass(frozen=True)
class InRows(Flat):
    """Makes a matrix of a vector: the inverse of ``Flat``."""

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        count = self.rows_stored or (in_file[0] if in_file else 0)
        if len(in_file) != 1 or not count or in_file[0] % count:
            raise CheckpointFormatError(
                "not a vector that divides into rows",
                expected=f"a multiple of {count}", found=f"shape {list(in_file)}",
            )  # fmt: skip
        return (count, in_file[0] // count)

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Flat(self.rows_stored)


@dataclass(frozen=True)
class Both(Layout):
    """Two changes of a complete tensor, one after the other.

    Attributes:
        first, second: the changes.

    Example:
        >>> Both(Flat(), Logarithm()).apply(np.float32([[-1], [-1]]))
        array([0., 0.], dtype=float32)
    """

    first: Layout
    second: Layout
    by_rows = False
    keeps_values = False

    def shape(self, in_file: Sequence[int]) -> Shape:
        """See :class:`Layout`."""
        return self.second.shape(self.first.shape(in_file))

    def apply(self, in_file: np.ndarray) -> np.ndarray:
        """See :class:`Layout`."""
        return self.second.apply(self.first.apply(in_file))

    def back(self) -> Layout:
        """See :class:`Layout`."""
        return Both(self.second.back(), self.first.back())
