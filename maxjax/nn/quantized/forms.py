"""What files say about a quantised weight besides its numbers, checked when it is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from ...dtype import DType


@dataclass(frozen=True)
class Bits:
    """The FileForm of floats of 8 bits, which a Weight holds as uint8.

    XLA for CPUs has no operations for such floats: of a stack of them it would make float16 first.

    Attributes:
        dtype: element type in files.
    """

    dtype: DType

    elementwise: ClassVar[bool] = True

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether it has this element type."""
        return dtype is self.dtype

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The bits."""
        return array.view(np.uint8)

    def to_file(self, array: Any) -> Any:
        """The floats, of an array of NumPy or JAX."""
        if isinstance(array, jax.Array):
            return jax.lax.bitcast_convert_type(array, self.dtype.np)
        return np.asarray(array).view(self.dtype.np)


@dataclass(frozen=True)
class Exactly:
    """The FileForm of a tensor whose values are known, such as the shape of the weight.

    Attributes:
        values: the values.
    """

    values: tuple[int, ...]

    elementwise: ClassVar[bool] = False

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether it is a tensor of as many integers."""
        return dtype.is_integral() and math.prod(shape) == len(self.values)

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The array itself.

        Raises:
            ValueError: it has other values.
        """
        found = tuple(int(n) for n in array.reshape(-1))
        if found != self.values:
            raise ValueError(f"'{name}' must be {list(self.values)}, not {list(found)}")
        return array

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array


@dataclass(frozen=True)
class Consecutive:
    """The FileForm of the group of each column, of a weight whose groups are consecutive columns.

    Attributes:
        count: number of columns.
        group: columns of a group.

    Example:
        >>> Consecutive(4, 2).to_stored("g_idx", np.array([0, 1, 0, 1]))
        Traceback (most recent call last):
            ...
        ValueError: 'g_idx' has groups of columns that are not consecutive, but desc_act is not set
    """

    count: int
    group: int

    elementwise: ClassVar[bool] = False

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether it has an integer for each column."""
        return dtype.is_integral() and shape == (self.count,)

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The array itself, which may also be zeros: some writers leave it so where nothing reads it.

        Raises:
            ValueError: it has other groups.
        """
        found = np.asarray(array)
        if found.any() and not np.array_equal(found, np.arange(self.count) // self.group):
            raise ValueError(
                f"'{name}' has groups of columns that are not consecutive, but desc_act is not set"
            )
        return array

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array


@dataclass(frozen=True)
class QuantState:
    """The FileForm of the settings of a weight in 4 bits of bitsandbytes, which are JSON as bytes.

    A Weight holds the number ``nested_offset``, which products need, as four bytes, and after it the
    text, filled up with zeros: texts of layers differ in length, and layers of a stack must not.

    Attributes:
        expected: the settings of the layout, as (key, value); the text must have the same.

    Example:
        >>> form = QuantState((("quant_type", "nf4"), ("shape", (2, 64))))
        >>> text = b'{"quant_type": "nf4", "shape": [2, 64], "nested_offset": 0.5}'
        >>> stored = form.to_stored("state", np.frombuffer(text, np.uint8))
        >>> stored.shape, stored[:4].view(np.float32)[0], form.to_file(stored).tobytes() == text
        ((256,), np.float32(0.5), True)
    """

    expected: tuple[tuple[str, Any], ...]

    elementwise: ClassVar[bool] = False
    # Bytes of a stored value. Texts have about 170.
    SIZE: ClassVar[int] = 256

    def fits(self, dtype: DType, shape: tuple[int, ...]) -> bool:
        """Whether it can be such a text."""
        return dtype is DType.uint8 and len(shape) == 1 and 0 < shape[0] <= self.SIZE - 4

    def to_stored(self, name: str, array: np.ndarray) -> np.ndarray:
        """The number ``nested_offset`` and the text.

        Raises:
            ValueError: it is not JSON, or says something else than what is expected.
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
                raise ValueError(f"'{name}' must have {key} {value!r}, not {str(found)[:80]!r}")
        offset = state.get("nested_offset", 0.0)
        if type(offset) not in (int, float) or not abs(offset) < 1e30:
            raise ValueError(f"'{name}' has the nested_offset {str(offset)[:80]!r}, not a number")
        stored = np.zeros(self.SIZE, np.uint8)
        stored[:4] = np.array([offset], np.float32).view(np.uint8)
        stored[4 : 4 + len(text)] = np.frombuffer(text, np.uint8)
        return stored

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The text."""
        text = array[4:].tobytes().rstrip(b"\0")
        return np.frombuffer(text, np.uint8).copy()
