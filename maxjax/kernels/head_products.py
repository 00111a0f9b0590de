"""A matmul for each head, with a part of the head's own matrix, as in multi-head latent attention.

For a few tokens a CPU kernel reads each matrix once and in place, also in a stack of layers. XLA for CPUs
first copies each head's part out of the matrix, which takes longer than the matmul.

Shapes: B tokens, H heads, P rows and C columns of a head's matrix, of which n rows are used, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping

from . import explicit
from .operation import Operation, has_static_shapes, types_of
from .product import FLOATS
from .stack_slice import StackSlice, layer_of

# The most tokens, and the most rows of a head's matrix, that the kernel supports.
_MOST_TOKENS, _MOST_ROWS = 16, 256


class HeadPart(NamedTuple):
    """The static arguments.

    Attributes:
        first, rows: index of the first row of each matrix that is used, and the number n of such rows.
        transposed: whether the matrices are multiplied transposed.
    """

    first: int
    rows: int
    transposed: bool


def head_products(x: jax.Array, w: Any, heads: int, first: int, rows: int, transposed: bool) -> Any:
    """``w_h x_h`` for each head h, or with ``transposed`` ``w_hᵀ x_h``, where ``w_h`` is a part of its rows.

    Args:
        x: activations ``[..., H, C]``; ``[..., H, n]`` with ``transposed``.
        w: matrices of all heads, one below the other, ``[H · P, C]``: an array or a StackSlice.
        heads: number of heads, H.
        first, rows: index of the first of a head's P rows that is used, and the number n of such rows.
        transposed: whether to multiply by the transpose of each matrix.

    Returns:
        The results ``[..., H, n]``, or ``[..., H, C]`` with ``transposed``, in the dtype of ``x``.

    Example:
        >>> w = jnp.arange(12.0).reshape(6, 2)  # of two heads
        >>> print(head_products(jnp.ones((2, 2)), w, 2, 1, 2, False))
        [[ 5.  9.]
         [17. 21.]]
        >>> print(head_products(jnp.ones((2, 2)), w, 2, 1, 2, True))
        [[ 6.  8.]
         [18. 20.]]
    """
    stack, layer = (w.flat, w.place) if type(w) is StackSlice else (jnp.asarray(w), 0)
    stack = stack.reshape(*stack.shape[:-2], heads, -1, stack.shape[-1])
    operands = [x, stack, jnp.asarray(layer, jnp.int32)]
    part = HeadPart(first, rows, transposed)
    run = lambda *a: _run(part, *a)
    wanted = [*explicit.entries(x)[:-1], ()]
    return explicit.automatic(run, explicit.mesh_of(x, stack), wanted)(*operands)


def _run(part: HeadPart, x: jax.Array, stack: jax.Array, layer: jax.Array) -> jax.Array:
    has_kernel = has_static_shapes(x, stack) and {x.dtype, stack.dtype} <= set(FLOATS)
    if not has_kernel or math.prod(x.shape[:-2]) > _MOST_TOKENS or part.rows > _MOST_ROWS:
        return definition(part, x, stack, layer)[0]
    y = _OPERATION([x.reshape(-1, *x.shape[-2:]), stack, layer], part)[0]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def definition(part: HeadPart, x: jax.Array, stack: jax.Array, layer: jax.Array) -> list[jax.Array]:
    """:func:`head_products` in jnp; ``stack`` is ``[H, P, C]`` or ``[L, H, P, C]``."""
    if stack.ndim == 4:
        stack = layer_of(stack, layer)
    used = stack[:, part.first : part.first + part.rows].astype(x.dtype)
    equation = "...hn,hnc->...hc" if part.transposed else "...hc,hnc->...hn"
    return [jnp.einsum(equation, x, used)]


def _on_gpu(part: HeadPart, _: int, x: Any, stack: Any, layer: Any) -> list[jax.Array]:
    # Multiplies by the complete matrices: XLA for GPUs would copy a part of them first, which takes longer
    # than reading the other rows too.
    height = stack.shape[-2]
    whole = part._replace(first=0, rows=height)
    if part.transposed:
        x = jnp.pad(x, ((0, 0), (0, 0), (part.first, height - part.first - part.rows)))
        return definition(whole, x, stack, layer)
    (y,) = definition(whole, x, stack, layer)
    return [y[..., part.first : part.first + part.rows]]


def _types(part: HeadPart, x: Any, stack: Any, _: Any) -> list[Any]:
    width = stack.shape[-1] if part.transposed else part.rows
    return [x.update(shape=(*x.shape[:-1], width), weak_type=False)]


def _kernel(part: HeadPart, x: Any, stack: Any, layer: Any) -> Any:
    call = jax.ffi.ffi_call("maxjax_heads", _types(part, *types_of((x, stack, layer))))
    first, rows = np.int64(part.first), np.int64(part.rows)
    return call(x, stack, layer, first=first, rows=rows, transposed=part.transposed)


def _rule(ranks: Sequence[int]) -> Any:
    """Tokens and heads may be split, alike in all operands."""
    stack = ArrayMapping(*["l"][: ranks[1] - 3], "h", "p", "c")
    return (ArrayMapping("b", "h", "n"), stack, ArrayMapping()), (ArrayMapping("b", "h", "m"),)


def _shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    """The heads of all operands are split as those of the matrices, which are much larger."""
    (tokens, *_), stack, _ = specs
    heads = stack[-3]
    tokens = tuple(name for name in tokens if name not in heads)
    where = [tokens, heads, ()]
    return [where, [*[()] * (len(stack) - 3), heads, (), ()], []], [where], ()


_OPERATION = Operation(
    "maxjax_heads", _types, definition, {"cpu": _kernel}, _rule, _shardings,
    forms={"cuda": _on_gpu, "rocm": _on_gpu},
)  # fmt: skip
