"""``clamp``: limits the elements of a tensor to a range."""

from __future__ import annotations

from typing import Any


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """``x`` with each element limited to ``[min, max]``; None means no bound.

    Raises:
        ValueError: a bound does not fit in the tensor's dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> print(clamp(jnp.array([-2, 0, 5]), 0, 3))
        [0 0 3]
    """
    from ..graph import ops

    if min is not None:
        x = ops.max(x, min)
    return x if max is None else ops.min(x, max)
