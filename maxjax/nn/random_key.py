"""Checks a random key that a caller gave."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UserInputError


def checked_key(key: Any) -> jax.Array:
    """The random key that a caller gave.

    Raises:
        UserInputError: it is not one key of ``jax.random``.

    Example:
        >>> checked_key(0)
        Traceback (most recent call last):
        maxjax.errors.UserInputError: key is one key of jax.random, such as jax.random.key(0), not int
    """
    if not isinstance(key, (jax.Array, np.ndarray)):
        found = type(key).__name__
    elif jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        found = "" if key.ndim == 0 else f"{key.dtype}{list(key.shape)}"
    else:
        is_raw = key.dtype == np.uint32 and key.shape in ((2,), (4,))
        found = "" if is_raw else f"{key.dtype}{list(key.shape)}"
    if found:
        raise UserInputError(
            f"key is one key of jax.random, such as jax.random.key(0), not {found}"
        )
    return jnp.asarray(key)
