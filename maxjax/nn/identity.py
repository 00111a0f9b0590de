"""Identity: a layer that returns its input, for places where a layer is expected."""

from __future__ import annotations

from typing import Any

from .layer import Module


class Identity(Module):
    """Returns its argument; it has no weights.

    Example:
        >>> Identity()(3)
        3
    """

    def __call__(self, x: Any) -> Any:
        """``x`` itself."""
        return x
