"""The matmul of all layers: ``matmul(x, w) = x @ w.T``.

Weights are ``[out, in]``, as in checkpoints. Written with an actual transpose, ``x @ w.T`` is 15
to 30 times slower with XLA on a CPU than the same contraction without it, and a bf16 weight is
repacked there at every call; hence every layer calls this function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..dtype import promote
from . import explicit
from .format_product import format_product
from .operation import has_static_shapes
from .packed_product import packed_products
from .product import FLOATS, definition, products
from .quant_array import QuantArray
from .quant_tensors import QuantTensors
from .stack_slice import StackSlice, places_of, stack_of

# The layer index of a weight that is not in a stack.
_FIRST = np.zeros((), np.int32)


def matmul(x: Any, w: Any) -> Any:
    """``x @ w.T`` for a weight ``w`` of shape ``[out, in]``, or for several of them.

    Args:
        x: activations ``[..., in]``.
        w: a Weight, an array, a :class:`StackSlice`, a :class:`QuantArray` or a :class:`QuantTensors`
            ``[out, in]``; or a list or tuple of these, which are read in one pass.

    Returns:
        The result ``[..., out]`` in the wider of the two float dtypes, or with a quantised weight in that of
        ``x``; for a list or tuple of weights a tuple of results. Floats of 32 bits and less are summed
        in float32 and rounded once at the end.

    Raises:
        ValueError: a weight is not a matrix, or its last axis is not as long as ``x``'s.

    On a CPU a C++ kernel computes it if the dtypes are float32, float16 or bfloat16; for many rows and
    small weights XLA does. For other dtypes, in exported programs and under differentiation
    ``jax.lax.dot_general`` does. Quantised weights are dequantised in registers or chunks
    (``packed_product.py``, ``format_product.py``).

    Example:
        >>> import jax.numpy as jnp
        >>> matmul(jnp.ones((4, 3)), jnp.ones((2, 3))).shape
        (4, 2)
        >>> [y.shape for y in matmul(jnp.ones(3), [jnp.ones((2, 3)), jnp.ones((5, 3))])]
        [(2,), (5,)]
    """
    is_sequence = isinstance(w, (list, tuple))
    x = to_jax(x)
    weights = [kernel_operand(a) for a in (w if is_sequence else [w])]
    for weight in weights:
        if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"cannot multiply x of shape {x.shape} by the transpose of a weight of shape "
                f"{weight.shape}: a weight is [out, in], and x ends in an axis of length `in`"
            )
    results = _matmul(x, weights)
    return tuple(results) if is_sequence else results[0]


def _matmul(x: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
    if len(weights) > 1 and any(isinstance(w, QuantTensors) for w in weights):
        return [_matmul(x, [w])[0] for w in weights]
    if weights and isinstance(weights[0], QuantTensors):
        return [format_matmul(x, weights[0])]
    if any(isinstance(w, QuantArray) for w in weights):
        return _in_groups(x, weights)
    dtypes = [_common_dtype(x, w) for w in weights]
    if not all(_has_kernel(x, w) for w in weights):
        return definition(x, [to_jax(w) for w in weights], dtypes)
    if len({w.dtype for w in weights}) > 1:
        return [_matmul(x, [w])[0] for w in weights]
    weights = [_flattened(w) for w in weights]
    plain = not any(isinstance(a, (Tracer, StackSlice)) for a in (x, *weights))
    if plain and explicit.mesh_of(x, *weights) is None:
        return _eager_products(tuple(dtypes))(x, *weights)

    def multiply(x: Any, stacks: Sequence[Any], layers: Sequence[Any]) -> list[jax.Array]:
        return products(x, stacks, layers, dtypes)

    return _where_they_lie(x, weights, multiply)


def _where_they_lie(x: jax.Array, weights: Sequence[Any], multiply: Any) -> list[jax.Array]:
    """``multiply(x, stacks, layers)`` for arrays and slices of stacks, on an Explicit mesh as well."""
    count = len(weights)
    stacks = [to_jax(w.stack if isinstance(w, StackSlice) else w) for w in weights]
    layers = [
        jnp.asarray(w.place, jnp.int32) if isinstance(w, StackSlice) else _FIRST for w in weights
    ]

    def run(x: Any, *operands: Any) -> list[jax.Array]:
        return multiply(x, operands[:count], operands[count:])

    tokens = explicit.entries(x)[:-1]
    wanted = [[*tokens, explicit.entries(stack)[-2]] for stack in stacks]
    run = explicit.automatic(run, explicit.mesh_of(x, *stacks), wanted)
    return run(x, *stacks, *layers)


def _flattened(w: Any) -> Any:
    """A slice of a stack of stacks as a slice of one stack; outside a trace, where that copies, as an array."""
    if not isinstance(w, StackSlice) or len(w.indices) == 1:
        return w
    return StackSlice(w.flat, w.place) if isinstance(w.stack, Tracer) else w.__jax_array__()


@functools.cache
def _eager_products(dtypes: tuple[Any, ...]) -> Any:
    """The matmuls of plain arrays as one jitted function, the fastest form for eager calls."""

    def matmul(x: Any, *weights: Any) -> list[jax.Array]:
        return products(x, weights, [_FIRST] * len(weights), dtypes)

    return jax.jit(matmul)


def _in_groups(x: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
    """The matmuls with weights of which some are quantised: one operation for each kind of weight."""
    kinds = [w.activations if isinstance(w, QuantArray) else "" for w in weights]
    results: list[Any] = [None] * len(weights)
    for kind in dict.fromkeys(kinds):
        places = [i for i, own in enumerate(kinds) if own == kind]
        chosen = [weights[i] for i in places]
        found = _quantised(x, chosen, kind) if kind else _matmul(x, chosen)
        for i, result in zip(places, found, strict=True):
            results[i] = result
    return results


def _quantised(x: jax.Array, weights: Sequence[QuantArray], activations: str) -> list[jax.Array]:
    """The matmuls with quantised weights, in the dtype of ``x`` if that is a float."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else weights[0].dtype
    encodings, dtypes = [w.encoding for w in weights], [dtype] * len(weights)

    def multiply(x: Any, stacks: Sequence[Any], layers: Sequence[Any]) -> list[jax.Array]:
        return packed_products(x, stacks, layers, encodings, dtypes, activations, divisions)

    blocks, divisions = [_flattened(w.blocks) for w in weights], [w.division for w in weights]
    if (mesh := explicit.mesh_of(*(to_jax(stack_of(a)) for a in blocks))) is not None:
        split = (explicit.entries(to_jax(stack_of(a)))[-2:] for a in blocks)
        divisions = [explicit.Division.of(mesh, entries) for entries in split]
    return _where_they_lie(x, blocks, multiply)


def format_matmul(x: jax.Array, w: QuantTensors, dtype: Any = None) -> jax.Array:
    """The matmul with a weight of several tensors, on one device.

    Args:
        dtype: dtype of the result; by default that of ``x`` if it is a float, otherwise float32.
    """
    if dtype is None:
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else w.dtype
    tensors = {one.name: _flattened(w.tensors[one.name]) for one in w.layout.tensors}
    arrays = {name: to_jax(stack_of(a)) for name, a in tensors.items()}
    places = [a.place if isinstance(a, StackSlice) else 0 for a in tensors.values()]
    return format_product(x, w.layout, arrays, places_of(places), dtype)


def _has_kernel(x: Any, w: Any) -> bool:
    """Whether the kernels support these dtypes and shapes."""
    return x.dtype in FLOATS and w.dtype in FLOATS and has_static_shapes(x, w)


def to_jax(a: Any) -> jax.Array:
    """``a`` as a JAX array; a Weight gives its value."""
    # This package does not import Weight: a Weight has this method, while tracers have None here.
    if isinstance(a, jax.Array):
        return a
    method = getattr(a, "__jax_array__", None)
    return jnp.asarray(a) if method is None else method()


def kernel_operand(a: Any) -> Any:
    """The array, StackSlice, QuantArray or QuantTensors that ``a`` is or, if it is a Weight, holds."""
    if isinstance(a, (jax.Array, StackSlice, QuantArray, QuantTensors)):
        return a
    method = getattr(a, "__kernel_operand__", None)
    return to_jax(a) if method is None else method()


def _common_dtype(x: Any, w: Any) -> np.dtype:
    if x.dtype == w.dtype:
        return x.dtype
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating):
        return promote(x.dtype, w.dtype).np
    return jnp.promote_types(x.dtype, w.dtype)
