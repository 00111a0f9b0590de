"""Clamp: a tensor cut off at bounds."""

from __future__ import annotations

from typing import Any

from ..graph import ops


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Each element, or the bound it is beyond; None is no bound.

    Raises:
        ValueError: A bound does not fit in the tensor's dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> print(clamp(jnp.array([-2, 0, 5]), 0, 3))
        [0 0 3]
    """
    if min is not None:
        x = ops.max(x, min)
    return x if max is None else ops.min(x, max)
