"""Helpers of the Pallas kernels for Triton: which GPUs they run on, matmuls, sizes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas import result

FLOATS = (np.dtype("float32"), np.dtype("float16"), np.dtype(jnp.bfloat16))
# XLA compiles Triton for GPUs from Ampere on.
OLDEST = 8.0
# This many warps fill a GPU: 32 for each of the 132 multiprocessors of an H100 or H200.
WARPS = 4096
# Triton multiplies matrices of 16 rows or more.
_LEAST = 16


def status() -> str:
    """The form of attention that the local GPUs run: "Triton", or "jnp" with the reason in brackets.

    Example:
        >>> status() == "Triton" or status().startswith("jnp (")
        True
    """
    try:
        first = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return "jnp (no NVIDIA GPU)"
    why = unavailable(jax.sharding.AbstractDevice(first.device_kind, None, first.platform))
    return f"jnp ({why})" if why else "Triton"


@functools.lru_cache
def unavailable(device: Any = None) -> str:
    """Why no Triton kernel can be compiled for a kind of GPU; "" if one can.

    Args:
        device: a ``jax.sharding.AbstractDevice``; None: the local GPU.
    """
    found = _capability(device)
    if found is not None and found < OLDEST:
        return f"Triton needs compute capability {OLDEST}, this GPU has {found}"
    # There is no function that says which GPUs Pallas knows, so a small kernel is lowered.
    try:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

        def copy(x: Any, y: Any) -> None:
            y[...] = x[...]

        array = jax.ShapeDtypeStruct((16,), jnp.float32)

        def call(x: Any) -> Any:
            out = result(x.shape, x)  # the first call may come from inside a shard_map
            return pl.pallas_call(copy, out_shape=out, compiler_params=triton.CompilerParams())(x)

        with jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((), (), abstract_device=device)
        ):
            jax.jit(call).trace(array).lower(lowering_platforms=("cuda",))
    except Exception as error:  # each version of JAX raises another error
        return f"this JAX compiles no Triton kernel: {' '.join(str(error).split())}"
    return ""


def _capability(device: Any) -> float | None:
    """The compute capability of a kind of GPU; None if no such GPU is here."""
    try:
        here = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    kinds = [d for d in here if device is None or d.device_kind == device.device_kind]
    return float(kinds[0].compute_capability) if kinds else None


def too_many(array: Any) -> str:
    """Why Pallas cannot read an array; "" if it can."""
    # Pallas computes addresses as signed 32-bit integers in arrays of at most 4 GiB.
    size = math.prod(array.shape)
    if size > 1 << 31 and size * array.dtype.itemsize <= 1 << 32:
        return f"an array has {size:,} numbers of 8 bits on one device, between 2 and 4 GiB"
    return ""


def as_stack(w: Any, layer: Any) -> tuple[Any, Any]:
    """A weight ``[out, ...]`` as a stack of one, with its index; a stack ``[n, out, ...]`` as it is."""
    return (w, layer) if w.ndim == 3 else (w[None], jnp.zeros_like(layer))


def power(n: int) -> int:
    """The least power of two that is at least n, and at least the 16 rows that Triton needs."""
    return max(_LEAST, 1 << (n - 1).bit_length())


def dot(a: Any, b: Any) -> Any:
    """The matmul of two matrices, summed in float32; float32 operands keep their full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
