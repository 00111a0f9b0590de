"""The matmul of one token's activations with a large matrix on NVIDIA GPUs: a kernel in Pallas for Triton.

It reads the matrix once, in place, also in a stack of layers, at nearly the bandwidth of the memory.
XLA's own kernels for one token reach 60 to 90 % of that. A program multiplies
one row; each of its threads has some columns.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..pallas import result
from .triton import FLOATS, WARPS, as_stack, too_many

# The least number of weights for which the kernel is faster than XLA.
LEAST = 1 << 22
_NARROW = (np.dtype("float16"), np.dtype(jnp.bfloat16))
# The number of neighbouring columns that a thread loads at once: 16 bytes.
_COLUMNS = 8


def lacks(dtype: Any, x: Any, w: Any) -> str:
    """Why the kernel cannot compute this matmul, or is slower than XLA; "" if it can and is faster.

    Args:
        dtype: dtype of the result.
        x: activations ``[..., in]``.
        w: weight ``[out, in]``, or a stack ``[n, out, in]``.

    Example:
        >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
        >>> lacks(jnp.bfloat16, shape(1, 1, 4096), shape(14336, 4096))
        ''
        >>> lacks(jnp.bfloat16, shape(2, 1, 4096), shape(14336, 4096))
        'there are 2 tokens'
    """
    *tokens, depth = x.shape
    rows = w.shape[-2]
    if (count := math.prod(tokens)) != 1:
        return f"there are {count} tokens"
    if x.dtype != w.dtype or x.dtype not in _NARROW or np.dtype(dtype) not in FLOATS:
        return f"activations are {x.dtype}, weights {w.dtype}, and results {np.dtype(dtype)}"
    if depth % (32 * _COLUMNS) or rows * depth < LEAST:
        return f"the weight is {rows} x {depth}"
    return too_many(w)


def kernel(
    dtype: Any, x: jax.Array, w: jax.Array, layer: Any, interpret: bool = False
) -> jax.Array:
    """``x @ w.T`` of one token, summed in float32.

    Args:
        dtype: dtype of the result.
        x: activations ``[..., in]``.
        w: weight ``[out, in]``, or a stack ``[n, out, in]``.
        layer: index of the weight in a stack.
        interpret: whether to run the kernel's operations one by one, on any platform.
    """
    w, layer = as_stack(w, layer)
    call = _call(np.dtype(dtype), w.shape[1:], interpret)
    return call(layer.reshape(1), x.reshape(-1), w).reshape(*x.shape[:-1], w.shape[1])


@functools.lru_cache(maxsize=256)
def _call(dtype: np.dtype, shape: tuple[int, int], interpret: bool) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    rows, depth = shape
    # With one warp the sums need no barrier.
    warps = next(
        n
        for n in (4, 2, 1)
        if n == 1 or (n // 2 * rows < WARPS and depth % (32 * n * _COLUMNS) == 0)
    )
    groups = 32 * warps
    if warps > 1 and depth % (2 * groups * _COLUMNS) == 0:
        groups *= 2

    def call(layer: Any, x: Any, w: Any) -> Any:
        return pl.pallas_call(
            functools.partial(_program, depth, groups),
            grid=(rows,),
            out_shape=result((rows,), x, dtype),
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
            interpret=interpret,
            name="maxjax_matvec",
        )(layer, x, w)

    return call


def _program(depth: int, groups: int, layer: Any, x: Any, w: Any, out: Any) -> None:
    """One program: one row of the weight."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    row = pl.program_id(0)
    group = jnp.arange(groups, dtype=jnp.int32)
    column = jnp.arange(_COLUMNS, dtype=jnp.int32)

    def step(i: Any, total: Any) -> Any:
        place = ((i * groups + group) * _COLUMNS)[:, None] + column[None, :]
        numbers = triton.load(x.at[place]).astype(jnp.float32)
        weights = triton.load(w.at[layer[0], row, place]).astype(jnp.float32)
        return total + jnp.sum(weights * numbers, axis=1)

    total = jnp.zeros((groups,), jnp.float32)
    total = jax.lax.fori_loop(0, depth // (groups * _COLUMNS), step, total)
    triton.store(out.at[row], jnp.sum(total).astype(out.dtype))
