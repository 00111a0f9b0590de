"""Identity: a layer that does nothing, where one is expected."""

from __future__ import annotations

from typing import Any

from .layer import Module


class Identity(Module):
    """Gives its argument back. No weights.

    Example:
        >>> Identity()(3)
        3
    """

    def __call__(self, x: Any) -> Any:
        """``x`` itself."""
        return x
