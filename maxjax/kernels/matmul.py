"""Floor 2. The one door for a product with a weight: ``matmul(x, w) = x @ w.T``.

Weights lie as checkpoints have them, ``[out, in]``. ``x @ w.T`` spelled with a real
transpose makes XLA on a CPU 15 to 30 times slower than the same contraction without
it, so the contraction is written out here, once, for every layer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType, promote
from . import explicit


def matmul(x: Any, w: Any) -> jax.Array:
    """``x @ w.T`` for a weight ``w`` of shape ``[out, in]``.

    Args:
        x: Activations ``[..., in]``.
        w: A Weight or an array ``[out, in]``.

    Returns:
        ``[..., out]`` in the wider of the two float types. 16-bit and narrower floats
        are multiplied with float32 accumulation and rounded once at the end.

    Raises:
        ValueError: ``w`` is not a matrix, or its last axis is not as long as ``x``'s.

    Example:
        >>> import jax.numpy as jnp
        >>> matmul(jnp.ones((4, 3)), jnp.ones((2, 3))).shape
        (4, 2)
    """
    x, w = _array(x), _array(w)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"cannot multiply x of shape {x.shape} by the transpose of a weight of shape {w.shape}: "
            "a weight is [out, in], and x ends in an axis of length `in`"
        )
    dtype = x.dtype
    if dtype != w.dtype:
        dtype = _common_dtype(x, w)
        x, w = x.astype(dtype), w.astype(dtype)
    # A bare bf16 -> bf16 product rounds inside the sum on some backends.
    narrow = dtype.itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
    contraction = (((x.ndim - 1,), (1,)), ((), ()))
    mesh = explicit.mesh_of(x, w)
    out = None
    if mesh is not None:
        out = explicit.sharding(mesh, explicit.entries(x)[:-1] + explicit.entries(w)[:1])
    y = jax.lax.dot_general(
        x, w, contraction, preferred_element_type=jnp.float32 if narrow else dtype, out_sharding=out
    )
    return y.astype(dtype) if narrow else y


def _array(a: Any) -> jax.Array:
    # A Weight is of a floor above and known by this method, which tracers have as None.
    if isinstance(a, jax.Array):
        return a
    method = getattr(a, "__jax_array__", None)
    return jnp.asarray(a) if method is None else method()


def _common_dtype(x: jax.Array, w: jax.Array):
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating):
        return promote(DType.of(x.dtype), DType.of(w.dtype)).np
    return jnp.promote_types(x.dtype, w.dtype)
