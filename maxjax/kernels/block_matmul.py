"""Matmuls of blocks of rows, each with one matrix of a stack, which is chosen by its index.

If the index is computed in the program, XLA for GPUs copies the matrix out of the stack before
cuBLAS multiplies by it. A kernel in Pallas for Triton reads the matrix in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping

from . import explicit
from .gpu.triton import dot, unavailable
from .operation import Operation
from .pallas import program_device, refused, result

# The widest tiles of outputs and of inputs that a program of the kernel takes; Triton multiplies
# matrices of 16 rows or more.
_TILES, _LEAST = (128, 64), 16


def block_matmul(x: jax.Array, w: jax.Array, owner: jax.Array) -> jax.Array:
    """``x[i] @ w[owner[i]].T``: ``[blocks, rows, in]`` and ``[n, out, in]`` → ``[blocks, rows, out]``.

    Args:
        owner: index of each block's matrix, int32 ``[blocks]``; where it is negative, results are undefined.

    Returns:
        The results, summed in float32, in the dtype of ``x``, which must be that of ``w`` too.

    On NVIDIA GPUs a Triton kernel computes 16-bit blocks whose number of rows is a power of two and at
    least 16; otherwise ``jax.numpy`` multiplies one block after the other.

    Example:
        >>> x, w = jnp.ones((2, 1, 3)), jnp.stack([jnp.ones((1, 3)), 2 * jnp.ones((1, 3))])
        >>> block_matmul(x, w, jnp.array([1, 0], jnp.int32)).ravel().tolist()
        [6.0, 3.0]
    """
    (y,) = _OPERATION([x, w, owner.astype(jnp.int32)], ())
    return y


def _types(static: Any, x: Any, w: Any, owner: Any) -> list[Any]:
    return [x.update(shape=(*x.shape[:2], w.shape[1]), weak_type=False)]


def _definition(static: Any, x: jax.Array, w: jax.Array, owner: jax.Array) -> list[jax.Array]:
    def one(block: Any) -> jax.Array:
        rows, number = block
        matrix = jax.lax.dynamic_index_in_dim(w, jnp.maximum(number, 0), keepdims=False)
        wide = jnp.float32 if x.dtype.itemsize < 4 else None
        y = jax.lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=wide)
        return y.astype(x.dtype)

    return [jax.lax.map(one, (x, owner))]


def lacks(x: Any, w: Any) -> str:
    """Why a GPU cannot run the kernel on these operands; "" if it can.

    Example:
        >>> shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
        >>> lacks(shape(2, 16, 96), shape(4, 128, 96)), lacks(shape(2, 8, 96), shape(4, 128, 96))
        ('', 'blocks have 8 rows')
    """
    rows, (out, depth) = x.shape[1], w.shape[1:]
    if x.dtype != w.dtype or x.dtype not in (np.dtype(jnp.bfloat16), np.dtype("float16")):
        return f"rows are {x.dtype} and the weights {w.dtype}"
    if rows < _LEAST or rows & (rows - 1):
        return f"blocks have {rows} rows"
    if min(_tile(out, 0), _tile(depth, 1)) < _LEAST:
        return f"matrices are {out} x {depth}"
    return ""


def _tile(size: int, axis: int) -> int:
    """The largest power of two that divides a size, at most the size of a tile."""
    return math.gcd(size, _TILES[axis])


def kernel(x: jax.Array, w: jax.Array, owner: jax.Array, interpret: bool = False) -> jax.Array:
    """:func:`block_matmul` computed by the kernel, for operands on one device.

    Args:
        interpret: whether to run the kernel's operations one by one, on any platform.
    """
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    (blocks, rows, depth), out = x.shape, w.shape[1]
    wide, deep = _tile(out, 0), _tile(depth, 1)
    return pl.pallas_call(
        functools.partial(_program, wide=wide, deep=deep),
        grid=(blocks, out // wide),
        out_shape=result((blocks, rows, out), x, x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="maxjax_block_matmul",
    )(owner, x, w)


def _program(owner: Any, x: Any, w: Any, y: Any, *, wide: int, deep: int) -> None:
    """One program: ``wide`` columns of the result of one block."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    block, first = pl.program_id(0), pl.program_id(1) * wide
    _, rows, depth = x.shape
    number = owner[block]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    column = first + jnp.arange(wide, dtype=jnp.int32)[:, None]

    def step(i: Any, total: Any) -> Any:
        inner = i * deep + jnp.arange(deep, dtype=jnp.int32)[None, :]
        some = triton.load(x.at[block, row, inner])  # [rows, deep]
        matrix = triton.load(w.at[number, column, inner])  # [wide, deep]
        return total + dot(some, matrix.T)

    # For an unused block nothing is read.
    turns = jnp.where(number < 0, jnp.int32(0), jnp.int32(depth // deep))
    total = jax.lax.fori_loop(0, turns, step, jnp.zeros((rows, wide), jnp.float32))
    place = first + jnp.arange(wide, dtype=jnp.int32)[None, :]
    triton.store(y.at[block, row, place], total.astype(y.dtype))


def _on_cuda(static: Any, x: jax.Array, w: jax.Array, owner: jax.Array) -> list[jax.Array]:
    why = lacks(x, w) or unavailable(program_device())
    if refused("a matmul of experts on a GPU", why):
        return _definition(static, x, w, owner)
    return [kernel(x, w, owner)]


def _rule(ranks: Sequence[int]) -> Any:
    """The axis of blocks may be split, and the rows of the matrices."""
    x, w = ArrayMapping("b", "r", "k"), ArrayMapping("n", "o", "k")
    return (x, w, ArrayMapping("b")), (ArrayMapping("b", "r", "o"),)


def _shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    blocks, rows = specs[0][0], specs[1][1]
    rows = tuple(name for name in rows if name not in blocks)
    operands = [[blocks, (), ()], [(), rows, ()], [blocks]]
    return operands, [[blocks, (), rows]], ()


_OPERATION = Operation(
    "maxjax_block_matmul", _types, _definition, {"cuda": _on_cuda}, _rule, _shardings
)
