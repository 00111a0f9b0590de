"""The FileForms of quantised weights: they convert or check what a file holds when a weight is loaded or saved."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from ...dtype import DType
from ...errors import shown


@dataclass(frozen=True)
class Bits:
    """The FileForm of 8-bit floats, which a Weight holds as their bits, uint8.

    XLA for CPUs has no operations for 8-bit floats: it would convert a whole stack of them to float16 first.

    Attributes:
        dtype: element type in files.
    """

    dtype: DType

    elementwise: ClassVar[bool] = True
    shape: ClassVar[None] = None

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a file has the expected dtype."""
        return dtype is self.dtype

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The bits of the floats, uint8."""
        return array.view(np.uint8)

    def to_file(self, array: Any) -> Any:
        """The floats from their bits, as an array of NumPy or JAX like the given one."""
        if isinstance(array, jax.Array):
            return jax.lax.bitcast_convert_type(array, self.dtype.np)
        return np.asarray(array).view(self.dtype.np)


@dataclass(frozen=True)
class Reshaped:
    """The FileForm of a tensor that a Weight holds in another shape, with the same elements in the same order.

    Attributes:
        shape: shape in files.

    Example:
        >>> form = Reshaped((6, 1))
        >>> form.fits(DType.uint8, (6, 1)), form.fits(DType.uint8, (2, 3))
        (True, False)
    """

    shape: tuple[int, ...]

    elementwise: ClassVar[bool] = True

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a file has the expected shape."""
        return shape == self.shape

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The elements themselves."""
        return array

    def to_file(self, array: Any) -> Any:
        """The elements themselves."""
        return array


class _Checked:
    """A FileForm that checks a tensor and stores it as it is."""

    elementwise: ClassVar[bool] = False
    shape: ClassVar[None] = None

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array


@dataclass(frozen=True)
class Exactly(_Checked):
    """The FileForm of a tensor whose values are known in advance, such as the shape of the weight.

    Attributes:
        values: expected values.
    """

    values: tuple[int, ...]

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a file has integers, as many as are expected."""
        return dtype.is_integral() and math.prod(shape) == len(self.values)

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The array itself.

        Raises:
            ValueError: the array has other values.
        """
        found = tuple(int(n) for n in array.reshape(-1))
        if found != self.values:
            raise ValueError(f"'{name}' must be {list(self.values)}, not {list(found)}")
        return array


@dataclass(frozen=True)
class Groups(_Checked):
    """The FileForm of ``g_idx``, the group of each column of a weight.

    Attributes:
        count: number of columns.
        group: number of columns in a group.
        ordered: whether columns were quantised in another order; otherwise groups are consecutive columns.

    Example:
        >>> Groups(4, 2).to_stored("g_idx", np.array([0, 1, 0, 1]))
        Traceback (most recent call last):
            ...
        ValueError: 'g_idx' has groups of columns that are not consecutive, but desc_act is not set
        >>> Groups(4, 2, ordered=True).to_stored("g_idx", np.array([0, 1, 0, 2]))
        Traceback (most recent call last):
            ...
        ValueError: 'g_idx' has the group 2 for a column, but there are the groups 0 to 1
    """

    count: int
    group: int
    ordered: bool = False

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a file has an integer for each column."""
        return dtype.is_integral() and shape == (self.count,)

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The array itself. If not ``ordered``, it may be all zeros, which some writers leave in an unused ``g_idx``.

        Raises:
            ValueError: the array has other groups.
        """
        found = np.asarray(array)
        if self.ordered:
            last = -(-self.count // self.group) - 1
            wrong = found[(found < 0) | (found > last)]
            if wrong.size:
                raise ValueError(
                    f"'{name}' has the group {wrong[0]} for a column, but there are the groups 0 to {last}"
                )
        elif found.any() and not np.array_equal(found, np.arange(self.count) // self.group):
            raise ValueError(
                f"'{name}' has groups of columns that are not consecutive, but desc_act is not set"
            )
        return array


@dataclass(frozen=True)
class QuantState:
    """The FileForm of the settings of a 4-bit weight of bitsandbytes, which are JSON as bytes.

    A Weight holds the number ``nested_offset``, which dequantisation needs, as four bytes of float32, and after it
    the JSON text, padded with zeros: texts of layers differ in length, but stacked layers need equal shapes.

    Attributes:
        expected: settings of the layout, as (key, value), which the text must have too.

    Example:
        >>> form = QuantState((("quant_type", "nf4"), ("shape", (2, 64))))
        >>> text = b'{"quant_type": "nf4", "shape": [2, 64], "nested_offset": 0.5}'
        >>> stored = form.to_stored("state", np.frombuffer(text, np.uint8))
        >>> stored.shape, stored[:4].view(np.float32)[0], form.to_file(stored).tobytes() == text
        ((256,), np.float32(0.5), True)
    """

    expected: tuple[tuple[str, Any], ...]

    elementwise: ClassVar[bool] = False
    shape: ClassVar[None] = None
    # The number of bytes of a stored value; texts have about 170.
    SIZE: ClassVar[int] = 256

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of a file has the dtype and a possible length of such a text."""
        return dtype is DType.uint8 and len(shape) == 1 and 0 < shape[0] <= self.SIZE - 4

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The bytes of ``nested_offset``, followed by the padded text.

        Raises:
            ValueError: the text is not a JSON object, or its settings are not the expected ones.
        """
        text = np.ascontiguousarray(array).tobytes()
        try:
            state = json.loads(text.decode())
        except (ValueError, RecursionError):
            state = None
        if not isinstance(state, dict) or b"\0" in text:
            raise ValueError(f"'{name}' is not a JSON object")
        for key, value in self.expected:
            found = state.get(key)
            found = tuple(found) if isinstance(found, list) else found
            if found != value or type(found) is not type(value):
                raise ValueError(f"'{name}' must have {key} {value!r}, not {shown(found)}")
        offset = state.get("nested_offset", 0.0)
        if type(offset) not in (int, float) or not abs(offset) < 1e30:
            raise ValueError(f"'{name}' has the nested_offset {shown(offset)}, not a number")
        stored = np.zeros(self.SIZE, np.uint8)
        stored[:4] = np.array([offset], np.float32).view(np.uint8)
        stored[4 : 4 + len(text)] = np.frombuffer(text, np.uint8)
        return stored

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The text without its padding, as bytes."""
        text = array[4:].tobytes().rstrip(b"\0")
        return np.frombuffer(text, np.uint8).copy()
