"""The matmul of activations with one or several weights as a JAX primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping

from . import explicit, native
from .gpu import matvec
from .gpu.triton import unavailable
from .operation import Operation, types_of
from .pallas import program_device
from .stack_slice import layer_of

# The dtypes that the kernels support for activations, weights and results.
FLOATS = (np.dtype("float32"), np.dtype("float16"), np.dtype(jnp.bfloat16))
# From _MANY_ROWS rows on, and for weights of at most _SMALL_WEIGHT elements, XLA's matmul is faster: by
# 1.0 to 1.4 times on a Zen 4, for the levels and dtypes of _FASTER_IN_XLA.
_MANY_ROWS, _SMALL_WEIGHT = 256, 1 << 22
# The least number of weight rows that XLA's matmuls for GPUs compute at a time; and the most tokens for which
# XLA merges matmuls without copying their weights: for more it calls cuBLAS, which needs one matrix.
_TILE, _FEW_TOKENS = 64, 32
_FASTER_IN_XLA = {
    "amx": ("float32",), "avx512bf16": ("float32", "bfloat16"), "avx512vnni": ("float32",),
    "avx512": ("float32",),
}  # fmt: skip


def definition(
    x: jax.Array,
    weights: Sequence[jax.Array],
    dtypes: Sequence[np.dtype],
    narrow_sums: bool = False,
) -> list[jax.Array]:
    """``x @ w.T`` for each weight, in jnp: the definition of the primitive.

    Args:
        x: activations ``[..., in]``.
        weights: weights ``[out, in]`` each.
        dtypes: dtypes of the results.
        narrow_sums: whether the sums over ``in`` that devices add up have the dtype of the results,
            instead of float32.
    """
    return [_one(x, w, dtype, narrow_sums) for w, dtype in zip(weights, dtypes, strict=True)]


def _one(x: jax.Array, w: jax.Array, dtype: np.dtype, narrow_sums: bool) -> jax.Array:
    common = dtype if x.dtype != w.dtype else x.dtype
    x, w = x.astype(common), w.astype(common)
    # On some backends a plain bf16 -> bf16 matmul rounds inside the sum.
    narrow = common.itemsize < 4 and jnp.issubdtype(common, jnp.floating)
    mesh = explicit.mesh_of(x, w)
    out = None
    if mesh is not None:
        out = explicit.sharding(mesh, explicit.entries(x)[:-1] + explicit.entries(w)[:1])
    contraction = (((x.ndim - 1,), (1,)), ((), ()))
    wide = jnp.float32 if narrow and not narrow_sums else common
    y = jax.lax.dot_general(x, w, contraction, preferred_element_type=wide, out_sharding=out)
    return y.astype(dtype)


def products(
    x: jax.Array, weights: Sequence[Any], layers: Sequence[Any], dtypes: Sequence[Any]
) -> list[jax.Array]:
    """``x @ w.T`` for each weight, in one pass over them.

    Args:
        x: activations ``[..., in]``, in one of :data:`FLOATS`, as are weights and results.
        weights: weights ``[out, in]``, or stacks ``[n, out, in]``; all of one dtype.
        layers: for each weight its index in the stack, an int32 scalar; it is ignored for a
            weight that is not a stack.
        dtypes: dtypes of the results.

    Returns:
        The results, ``[..., out]`` each, summed in float32.
    """
    return _OPERATION([x, *weights, *layers], tuple(dtypes))


def split(operands: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
    """The operands, or their shapes, as x, the list of weights and the list of their layer indices."""
    x, *rest = operands
    return x, rest[: len(rest) // 2], rest[len(rest) // 2 :]


def _in_jnp(dtypes: Any, *operands: Any, narrow_sums: bool = False) -> list[jax.Array]:
    x, weights, layers = split(operands)
    arrays = [w if w.ndim == 2 else layer_of(w, i) for w, i in zip(weights, layers, strict=True)]
    return definition(x, arrays, dtypes, narrow_sums)


def _on_cuda(dtypes: Any, devices: int, *operands: Any) -> list[jax.Array]:
    x, weights, layers = split(operands)
    each = list(zip(dtypes, weights, layers, strict=True))
    own = [
        i for i, (dtype, w, _) in enumerate(each) if devices == 1 and not matvec.lacks(dtype, x, w)
    ]
    others = [i for i in range(len(each)) if i not in own]
    found = {i: _MATVEC([x, weights[i], layers[i]], (dtypes[i],))[0] for i in own}
    if others:
        rest = [x, *(weights[i] for i in others), *(layers[i] for i in others)]
        ys = _on_gpu([dtypes[i] for i in others], devices, *rest)
        found |= zip(others, ys, strict=True)
    return [found[i] for i in range(len(each))]


def _matvec(dtypes: Any, x: Any, w: Any, layer: Any) -> list[jax.Array]:
    if unavailable(program_device()):
        return _on_gpu(dtypes, 1, x, w, layer)
    return [matvec.kernel(dtypes[0], x, w, layer)]


def _on_gpu(dtypes: Any, devices: int, *operands: Any) -> list[jax.Array]:
    # One GPU sums a 16-bit matmul in float32. Sums of several GPUs are rounded to 16 bits before XLA
    # adds them up, which halves the communication, only if the dot_general has a 16-bit result; on TPUs
    # they always are.
    x, weights, layers = split(operands)
    # XLA merges the matmuls that share an operand, and to do so copies their weights into one array. It does
    # not copy them if the tokens are few, each device has complete tiles of each weight, and the tiles are not
    # too many in all. Behind a barrier of its own the activation is another operand, so that at most the
    # weights of one call are merged.
    many = math.prod(x.shape[:-1]) > _FEW_TOKENS
    odd = [i for i, w in enumerate(weights) if many or w.shape[-2] % (_TILE * devices)]
    whole = [i for i in range(len(weights)) if i not in odd]
    found: dict[int, jax.Array] = {}
    for group in ([whole] if whole else []) + [[i] for i in odd]:
        own, *used = jax.lax.optimization_barrier((x, *(weights[i] for i in group)))
        numbers, results = (layers[i] for i in group), [dtypes[i] for i in group]
        ys = _in_jnp(results, own, *used, *numbers, narrow_sums=devices > 1)
        found |= zip(group, ys, strict=True)
    return [found[i] for i in range(len(weights))]


def types(dtypes: Any, *avals: Any) -> list[Any]:
    """The avals of the results."""
    x, weights, _ = split(avals)
    return [
        x.update(shape=(*x.shape[:-1], w.shape[-2]), dtype=dtype, weak_type=False)
        for w, dtype in zip(weights, dtypes, strict=True)
    ]


def _kernel(dtypes: Any, *operands: Any) -> Any:
    x, weights, _ = split(operands)
    if _is_faster_in_xla(dtypes, x, weights):
        return _in_jnp(dtypes, *operands)
    return jax.ffi.ffi_call("maxjax_matmul", types(dtypes, *types_of(operands)))(*operands)


def _is_faster_in_xla(dtypes: Any, x: Any, weights: Sequence[Any]) -> bool:
    """Whether XLA's own matmul is faster: for many rows, and small weights that are not in a stack."""
    many = math.prod(x.shape[:-1]) >= _MANY_ROWS
    alike = x.dtype.name in _FASTER_IN_XLA.get(native.status(), ()) and all(
        dtype == x.dtype == w.dtype for w, dtype in zip(weights, dtypes, strict=True)
    )
    return many and alike and all(w.ndim == 2 and w.size <= _SMALL_WEIGHT for w in weights)


def batch(dtypes: Any, operands: Sequence[Any], dims: Sequence[Any], bind: Any) -> Any:
    """The batching rule: batched activations are more rows; batched weights use the definition."""
    if any(d is not None for d in dims[1:]):
        return None
    return bind(jnp.moveaxis(operands[0], dims[0], 0), *operands[1:])


def rule(ranks: Sequence[int], same_depth: bool = True) -> Any:
    """Which axes of the operands and results are split alike.

    Args:
        ranks: ranks of the operands.
        same_depth: whether the last axes of activations and weights have the same length.
    """
    rank, *others = ranks
    count = len(others) // 2
    tokens = [f"t{i}" for i in range(rank - 1)]
    weights = [
        ArrayMapping(*[f"l{i}"][: others[i] - 2], f"o{i}", "k" if same_depth else f"b{i}")
        for i in range(count)
    ]
    results = tuple(ArrayMapping(*tokens, f"o{i}") for i in range(count))
    operands = (ArrayMapping(*tokens, "k"), *weights, *[ArrayMapping()] * count)
    return operands, results


def shardings(specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    """The shardings of operands and results: mesh axes go to the tokens first, then to the weights.

    A weight that is also split over a mesh axis of the tokens is gathered along it, as in fully
    sharded data parallelism; otherwise weights keep their sharding. If the activations' last axis
    is split over a further mesh axis along which a weight is replicated, the weight's last axis
    is split over it too, which needs no communication.
    """
    (*tokens, own_depth), weights, layers = split(specs)
    free = _without(tokens)
    depth = next((entry for entry in (free(spec[-1]) for spec in weights) if entry), ())
    rows = [_without([depth])(free(spec[-2])) for spec in weights]
    depth = depth or _without(rows)(free(own_depth))
    of_weights = [
        [*[()] * (len(spec) - 2), row, depth] for spec, row in zip(weights, rows, strict=True)
    ]
    operands = [[*tokens, depth], *of_weights, *[[] for _ in layers]]
    return operands, [[*tokens, row] for row in rows], depth


def _without(entries: Sequence[explicit.Entry]) -> Callable[[explicit.Entry], explicit.Entry]:
    used = {name for entry in entries for name in entry}
    return lambda entry: tuple(name for name in entry if name not in used)


_OPERATION = Operation(
    "maxjax_matmul", types, _in_jnp, {"cpu": _kernel}, rule, shardings, batch,
    # Summed in float32, as on one device.
    summand=lambda dtypes, _: (np.dtype("float32"),) * len(dtypes),
    forms={"cuda": _on_cuda, "rocm": _on_gpu},
)  # fmt: skip

# The matmul with one weight that `_on_cuda` uses; exported programs and other devices run XLA's matmul.
_MATVEC = Operation(
    "maxjax_matvec", types, lambda dtypes, *operands: _on_gpu(dtypes, 1, *operands), {"cuda": _matvec},
    rule, shardings, batch,
)  # fmt: skip
