"""Dropout: sets random elements to zero while a model is trained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..graph.kind import on_arrays
from ..rendering.rendered import guarded
from .layer import Module


class Dropout(Module):
    """Sets each element to 0 with probability ``p``, and divides it by ``1 - p`` otherwise.

    The random key is an argument. Without a key the layer is the identity, so a model needs no training mode.

    Args:
        p: probability that an element is dropped.

    Source: N. Srivastava et al., JMLR 15 (2014).

    Example:
        >>> dropout, x = Dropout(0.5), jnp.ones(4)
        >>> print(dropout(x))
        [1. 1. 1. 1.]
        >>> sorted(set(dropout(jnp.ones(99), jax.random.key(0)).tolist()))
        [0.0, 2.0]
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p is a probability from 0 to 1, not {p}")
        self.p = float(p)

    @on_arrays
    def __call__(self, x: Any, key: jax.Array | None = None) -> Any:
        """``x`` after dropout, in its shape and dtype.

        Args:
            key: random key; None keeps every element.

        Raises:
            ValueError: there is a key, and ``x`` holds integers.
        """
        if key is None or self.p == 0:
            return x
        array = jnp.asarray(x)
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise ValueError(
                f"Dropout takes floats, not {array.dtype}: cast the input to a float first"
            )
        kept = jax.random.bernoulli(key, 1 - self.p, array.shape)
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return jnp.where(kept, array * jnp.asarray(scale, array.dtype), jnp.zeros((), array.dtype))

    def __repr__(self) -> str:
        return guarded(self, lambda: f"Dropout({self.p})")
