"""Grouped matmul: each row is multiplied by the matrix of its group; rows are sorted by group.

It is ``jax.lax.ragged_dot_general`` with the rule for ``vmap`` that JAX lacks, so that derivatives of
a mixture of experts can be batched. The matmul and its two derivatives are kinds of one primitive.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ..dtype import promote
from .operation import matmul_precision, same_varying, with_precision

# The kinds of matmul, with the shapes of operands and result for M rows and G groups. The cotangents
# of each kind are matmuls of the other kinds (`_transpose`).
_ROWS = "rows"  # [M, in], [G, out, in] → [M, out]
_BACK = "back"  # [M, out], [G, out, in] → [M, in]
_OUTER = "outer"  # [M, out], [M, in] → [G, out, in]


def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """``x[rows of group i] @ w[i].T``: ``[M, in]`` and ``[G, out, in]`` → ``[M, out]``.

    Args:
        sizes: number of rows of each group ``[G]``, int32. Rows after the last group have
            undefined results.

    Returns:
        The results in the wider dtype of the two, summed in float32 or in this dtype if it is wider.

    Example:
        >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.ones((1, 2)), 2 * jnp.ones((1, 2))])
        >>> print(grouped_matmul(x, w, jnp.array([1, 2], jnp.int32)).T)
        [[2. 4. 4.]]
    """
    dtype = promote(x.dtype, w.dtype).np
    how = _How(_ROWS, matmul_precision())
    return _bind(how, x.astype(dtype), w.astype(dtype), sizes)


class _How(NamedTuple):
    """The kind of matmul, and the ``jax.default_matmul_precision`` that was set where it was called."""

    kind: str
    precision: Any

    def of(self, kind: str) -> _How:
        return self._replace(kind=kind)


def _bind(how: _How, a: Any, b: Any, sizes: Any) -> jax.Array:
    return _primitive().bind(*same_varying([a, b, sizes]), how=how)


def _definition(a: Any, b: Any, sizes: Any, *, how: _How) -> jax.Array:
    return with_precision(how.precision, functools.partial(_product, how.kind))(a, b, sizes)


def _product(kind: str, a: Any, b: Any, sizes: Any) -> jax.Array:
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
    primitive.def_impl(lambda *operands, how: _eager(how)(*operands))
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, mlir.lower_fun(_definition, multiple_results=False))
    return primitive


@functools.cache
def _eager(how: _How) -> Any:
    return jax.jit(functools.partial(_definition, how=how))


def _type(a: Any, b: Any, sizes: Any, *, how: _How) -> Any:
    shape = {
        _ROWS: lambda: (a.shape[0], b.shape[1]),
        _BACK: lambda: (a.shape[0], b.shape[2]),
        _OUTER: lambda: (sizes.shape[0], a.shape[1], b.shape[1]),
    }[how.kind]()
    return a.update(shape=shape, weak_type=False)


def _jvp(primals: Any, tangents: Any, *, how: _How) -> Any:
    (a, b, sizes), (da, db, _) = primals, tangents
    parts = []
    if type(da) is not ad.Zero:
        parts.append(_bind(how, da, b, sizes))
    if type(db) is not ad.Zero:
        parts.append(_bind(how, a, db, sizes))
    y = _bind(how, a, b, sizes)
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)


def _transpose(ct: Any, a: Any, b: Any, sizes: Any, *, how: _How) -> Any:
    if type(ct) is ad.Zero:
        return None, None, None
    of_a = of_b = None
    if ad.is_undefined_primal(a):
        of_a = {
            _ROWS: lambda: _bind(how.of(_BACK), ct, b, sizes),
            _BACK: lambda: _bind(how.of(_ROWS), ct, b, sizes),
            _OUTER: lambda: _bind(how.of(_ROWS), b, ct, sizes),
        }[how.kind]()
    if ad.is_undefined_primal(b):
        of_b = {
            _ROWS: lambda: _bind(how.of(_OUTER), ct, a, sizes),
            _BACK: lambda: _bind(how.of(_OUTER), a, ct, sizes),
            _OUTER: lambda: _bind(how.of(_BACK), a, ct, sizes),
        }[how.kind]()
    return of_a, of_b, None


def _batch(operands: Any, dims: Any, *, how: _How) -> Any:
    """The batching rule: the members of a batch are computed one after the other."""
    moved = [jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims, strict=True) if d is not None]

    def one(mine: Any) -> jax.Array:
        mine = iter(mine)
        given = [a if d is None else next(mine) for a, d in zip(operands, dims, strict=True)]
        return _bind(how, *given)

    return jax.lax.map(one, moved), 0
