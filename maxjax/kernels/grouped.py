"""Products of rows with the matrix of their group, where rows are sorted by group.

``jax.lax.ragged_dot_general`` with the rule for ``vmap`` that it lacks, so that derivatives of a
mixture of experts can be batched. The product, and what its two derivatives are, are one primitive.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..dtype import DType, promote
from .operation import same_varying

# Operands of each kind, for M rows, G groups: what is computed, and which kinds, of the cotangent
# and the other operand, give the cotangents of the first and the second operand.
_ROWS = "rows"  # [M, in], [G, out, in] → [M, out]
_BACK = "back"  # [M, out], [G, out, in] → [M, in]
_OUTER = "outer"  # [M, out], [M, in] → [G, out, in]


def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """``x[rows of group i] @ w[i].T``: ``[M, in]`` and ``[G, out, in]`` → ``[M, out]``.

    Args:
        sizes: number of rows of each group ``[G]``, int32. What rows after those of all groups get
            is not defined.

    Returns:
        Sums in float32 (of wider types, in these), in the wider dtype of the two.

    Example:
        >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.ones((1, 2)), 2 * jnp.ones((1, 2))])
        >>> print(grouped_matmul(x, w, jnp.array([1, 2], jnp.int32)).T)
        [[2. 4. 4.]]
    """
    dtype = promote(DType.of(x.dtype), DType.of(w.dtype)).np
    return _bind(_ROWS, x.astype(dtype), w.astype(dtype), sizes)


def _bind(kind: str, a: Any, b: Any, sizes: Any) -> jax.Array:
    return _primitive().bind(*same_varying([a, b, sizes]), kind=kind)


def _definition(a: Any, b: Any, sizes: Any, *, kind: str) -> jax.Array:
    contracted = {_ROWS: ((1,), (2,)), _BACK: ((1,), (1,)), _OUTER: ((0,), (0,))}[kind]
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[] if kind == _OUTER else [0],
    )
    wide = jnp.float32 if a.dtype.itemsize < 4 else a.dtype
    y = jax.lax.ragged_dot_general(a, b, sizes, dimensions, preferred_element_type=wide)
    return y.astype(a.dtype)


@functools.cache
def _primitive() -> Any:
    from jax.extend.core import Primitive  # slow to import: it imports Pallas

    primitive = Primitive("maxjax_grouped_matmul")
    primitive.def_abstract_eval(_type)
    primitive.def_impl(lambda *operands, kind: _eager(kind)(*operands))
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, mlir.lower_fun(_definition, multiple_results=False))
    return primitive


@functools.cache
def _eager(kind: str) -> Any:
    return jax.jit(functools.partial(_definition, kind=kind))


def _type(a: Any, b: Any, sizes: Any, *, kind: str) -> Any:
    shape = {
        _ROWS: lambda: (a.shape[0], b.shape[1]),
        _BACK: lambda: (a.shape[0], b.shape[2]),
        _OUTER: lambda: (sizes.shape[0], a.shape[1], b.shape[1]),
    }[kind]()
    return a.update(shape=shape, weak_type=False)


def _jvp(primals: Any, tangents: Any, *, kind: str) -> Any:
    (a, b, sizes), (da, db, _) = primals, tangents
    parts = []
    if type(da) is not ad.Zero:
        parts.append(_bind(kind, da, b, sizes))
    if type(db) is not ad.Zero:
        parts.append(_bind(kind, a, db, sizes))
    y = _bind(kind, a, b, sizes)
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)


def _transpose(ct: Any, a: Any, b: Any, sizes: Any, *, kind: str) -> Any:
    if type(ct) is ad.Zero:
        return None, None, None
    of_a = of_b = None
    if ad.is_undefined_primal(a):
        of_a = {
            _ROWS: lambda: _bind(_BACK, ct, b, sizes),
            _BACK: lambda: _bind(_ROWS, ct, b, sizes),
            _OUTER: lambda: _bind(_ROWS, b, ct, sizes),
        }[kind]()
    if ad.is_undefined_primal(b):
        of_b = {
            _ROWS: lambda: _bind(_OUTER, ct, a, sizes),
            _BACK: lambda: _bind(_OUTER, a, ct, sizes),
            _OUTER: lambda: _bind(_BACK, a, ct, sizes),
        }[kind]()
    return of_a, of_b, None


def _batch(operands: Any, dims: Any, *, kind: str) -> Any:
    """One after the other."""
    moved = [jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims, strict=True) if d is not None]

    def one(mine: Any) -> jax.Array:
        mine = iter(mine)
        given = [a if d is None else next(mine) for a, d in zip(operands, dims, strict=True)]
        return _bind(kind, *given)

    return jax.lax.map(one, moved), 0
