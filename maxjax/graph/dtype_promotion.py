"""Written for files of Modular MAX: promotion of numbers and arrays to the dtype of a tensor, at MAX's path.

maxjax itself does not import it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .operands import like, number
from .shape import StaticDim
from .value import TensorValue


def _promote_weak_dtypes(x: Any, y: Any) -> tuple[TensorValue, TensorValue]:
    """Both operands as tensors; a number or a NumPy array is cast to the dtype of the other operand.

    Two tensors keep their dtypes.

    Raises:
        TypeError: neither is a TensorValue or Weight, or one is no tensor, number or array.
        ValueError: the dtype does not hold the numbers.

    Example:
        >>> [one.dtype for one in _promote_weak_dtypes(TensorValue(jnp.ones(2, jnp.bfloat16)), 3)]
        [bfloat16, bfloat16]
    """
    strong = [one for one in (x, y) if isinstance(one, TensorValue)]
    if not strong:
        raise TypeError(
            f"one of a {type(x).__name__} and a {type(y).__name__} must be a TensorValue, which gives the dtype"
        )
    dtype = strong[0].dtype.np
    found = [one if isinstance(one, TensorValue) else _promoted(one, dtype) for one in (x, y)]
    return TensorValue(found[0]), TensorValue(found[1])


def _promoted(x: Any, dtype: Any) -> Any:
    if isinstance(x, StaticDim | np.integer):
        x = int(x)
    elif isinstance(x, np.floating):
        x = float(x)
    if isinstance(x, bool | int | float):
        return jnp.asarray(number(x, dtype), dtype)
    if not hasattr(x, "__array__") and not hasattr(x, "__dlpack__"):
        raise TypeError(f"a {type(x).__name__} is no tensor, number or array")
    return like(np.asarray(x), dtype)
