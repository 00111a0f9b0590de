"""The matmul of activations with a weight in one of Hugging Face's quantised formats as a JAX primitive.

On NVIDIA GPUs a Triton kernel dequantises tiles in registers. Elsewhere the whole weight is dequantised,
after the activations are computed, and not kept after the matmul.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping

from . import explicit, product
from .formats import QuantLayout
from .gpu import format_product as triton
from .gpu.triton import unavailable
from .operation import Operation
from .pallas import program_device, refused
from .stack_slice import layer_of


class FormatOperand(NamedTuple):
    """Static arguments of the primitive.

    Attributes:
        layout: the format, and the tensors of one weight.
        dtype: dtype of the result, a float.
    """

    layout: QuantLayout
    dtype: np.dtype


def format_product(
    x: jax.Array, layout: QuantLayout, tensors: Mapping[str, Any], layer: Any, dtype: Any
) -> jax.Array:
    """``x @ w.T`` for a quantised weight, in ``dtype``.

    Args:
        x: activations ``[..., in]``.
        tensors: tensors of the weight by name, or stacks of them with one leading axis each.
        layer: index in the stacks, an int32 scalar; it is ignored without stacks.

    The whole weight is dequantised for derivatives, again in the backward pass.
    """
    operands = [x, *(tensors[one.name] for one in layout.tensors), layer]
    return _operation(layout)(operands, FormatOperand(layout, np.dtype(dtype)))[0]


def _named(layout: QuantLayout, tensors: Sequence[Any]) -> dict[str, Any]:
    return {one.name: array for one, array in zip(layout.tensors, tensors, strict=True)}


def _weight(static: FormatOperand, dtype: Any, tensors: Sequence[Any], layer: Any) -> jax.Array:
    """The dequantised weight ``[out, in]``, rounded to a dtype."""
    own = [
        layer_of(a, layer) if a.ndim > len(one.axes) else a
        for one, a in zip(static.layout.tensors, tensors, strict=True)
    ]
    found = jax.lax.stop_gradient(_named(static.layout, own))
    return static.layout.of_part(found).dequantise(found).astype(dtype)


def _float(x: jax.Array) -> Any:
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else np.dtype(np.float32)


# Rematerialised: the backward pass dequantises again, instead of keeping the dequantised weights of all layers.
@partial(jax.checkpoint, static_argnums=(0,))
def _definition(static: FormatOperand, x: jax.Array, *rest: Any) -> list[jax.Array]:
    *tensors, layer = rest
    dtype = _float(x)
    weight = _weight(static, dtype, tensors, layer)
    return product.products(x.astype(dtype), [weight], [jnp.int32(0)], [static.dtype])


def _on_cpu(static: FormatOperand, devices: int, x: jax.Array, *rest: Any) -> list[jax.Array]:
    first, *others = rest
    if devices == 1 and 0 not in x.shape and not jnp.issubdtype(first.dtype, jnp.floating):
        # XLA chooses the order of operations. If layers are not stacked, it would dequantise the weights of all
        # layers first and hold all of them in memory; ``lax.optimization_barrier`` does not prevent that.
        zero = jnp.signbit(x[(0,) * x.ndim]).astype(jnp.uint8) >> 1
        first = first | zero.astype(first.dtype)
    return _definition(static, x, first, *others)


def _on_cuda(static: FormatOperand, x: jax.Array, *rest: Any) -> list[jax.Array]:
    *tensors, layer = rest
    named = _named(static.layout, tensors)
    why = triton.lacks(static.layout, x, named) or unavailable(program_device())
    if refused("a matmul with a quantised weight on a GPU", why):
        dtype = _float(x)
        weight = _weight(static, dtype, tensors, layer)
        return product.definition(x.astype(dtype), [weight], [static.dtype])
    return [triton.matmul(static.layout, static.dtype, x, named, layer)]


def _types(static: FormatOperand, x: Any, *rest: Any) -> list[Any]:
    layout = static.layout.of_part(_named(static.layout, rest[:-1]))
    shape = (*x.shape[:-1], layout.out_dim)
    return [x.update(shape=shape, dtype=static.dtype, weak_type=False)]


def _along(layout: QuantLayout, along: int, tensors: Sequence[Sequence[Any]]) -> list[Any]:
    """The entries of the tensors' axes that run along an axis of the weight; those of leading axes are ignored."""
    return [
        entry
        for one, own in zip(layout.tensors, tensors, strict=True)
        for axis, entry in zip(one.axes, own[len(own) - len(one.axes) :], strict=True)
        if axis == along
    ]


def _as_weight(layout: QuantLayout, tensors: Sequence[Sequence[explicit.Entry]]) -> Any:
    """The mesh axes over which the tensors split the weight ``[out, in]``."""
    return [next(filter(None, _along(layout, along, tensors)), ()) for along in (0, 1)]


def _shardings(layout: QuantLayout, specs: Sequence[Sequence[explicit.Entry]]) -> Any:
    x, *tensors, _ = specs
    if not _along(layout, 1, tensors):  # blocks of flattened weights are in no axis
        x = [*x[:-1], ()]
    (x, weight, _), results, depth = product.shardings([x, _as_weight(layout, tensors), []])
    own = [
        [*[()] * (len(spec) - len(one.axes)), *(() if a is None else weight[a] for a in one.axes)]
        for one, spec in zip(layout.tensors, tensors, strict=True)
    ]
    return [x, *own, []], results, depth


def _lengths(
    layout: QuantLayout, static: Any, shapes: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """The shapes with the weight's axes counted in the largest units that no device may share: words, blocks."""
    x, *tensors, layer = shapes
    units = [math.gcd(*_along(layout, along, tensors)) for along in (0, 1)]
    own = [
        [*spec[: len(spec) - len(one.axes)], *(1 if a is None else units[a] for a in one.axes)]
        for one, spec in zip(layout.tensors, tensors, strict=True)
    ]
    return [[*x[:-1], math.gcd(x[-1], units[1])], *own, layer]


def _rule(layout: QuantLayout, ranks: Sequence[int]) -> Any:
    tokens = [f"t{i}" for i in range(ranks[0] - 1)]

    def name(i: int, axis: int, along: int | None, size: int) -> str:
        # Only axes of the same length may have the same name.
        named = {0: "o", 1: "k"}.get(-1 if along is None else along, "")
        return named if named and size == layout.shape[along or 0] else f"a{i}_{axis}"

    tensors = []
    for i, (one, rank) in enumerate(zip(layout.tensors, ranks[1:-1], strict=True)):
        lead = [f"l{i}"][: rank - len(one.axes)]
        each = enumerate(zip(one.axes, one.shape, strict=True))
        tensors.append(ArrayMapping(*lead, *(name(i, d, along, n) for d, (along, n) in each)))
    return (ArrayMapping(*tokens, "k"), *tensors, ArrayMapping()), (ArrayMapping(*tokens, "o"),)


@functools.cache
def _operation(layout: QuantLayout) -> Operation:
    return Operation(
        "maxjax_format_matmul", _types, _definition, {"cuda": _on_cuda},
        partial(_rule, layout), partial(_shardings, layout), product.batch,
        # Sums of several GPUs are rounded to the result's dtype before they are added up, as in other matmuls.
        lengths=partial(_lengths, layout),
        forms={"cpu": _on_cpu},
    )  # fmt: skip


# -- blocks of rows with several weights


def format_block_matmul(
    x: jax.Array, layout: QuantLayout, tensors: Mapping[str, Any], owner: jax.Array
) -> jax.Array:
    """``x[i] @ w[owner[i]].T`` for stacks of quantised weights: ``[blocks, rows, in]`` → ``[blocks, rows, out]``.

    Args:
        tensors: tensors of the weights by name, with one leading axis each.
        owner: index of each block's weight, int32 ``[blocks]``; where it is negative, results are undefined.
    """
    operands = [x, *(tensors[one.name] for one in layout.tensors), owner.astype(jnp.int32)]
    return _BLOCKS(operands, FormatOperand(layout, np.dtype(x.dtype)))[0]


def _block_definition(static: FormatOperand, x: jax.Array, *rest: Any) -> list[jax.Array]:
    *tensors, owner = rest

    def one(block: Any) -> jax.Array:
        rows, number = block
        return _definition(static, rows, *tensors, jnp.maximum(number, 0))[0]

    return [jax.lax.map(one, (x, owner))]


def _blocks_on_cuda(static: FormatOperand, x: jax.Array, *rest: Any) -> list[jax.Array]:
    *tensors, owner = rest
    named = _named(static.layout, tensors)
    why = triton.lacks(static.layout, x, named) or unavailable(program_device())
    if refused("a matmul of quantised experts on a GPU", why):
        return _block_definition(static, x, *rest)
    return [triton.kernel(static.layout, static.dtype, x, named, owner)]


# On a mesh it is called inside ``shard_map``: experts stay on their devices.
_BLOCKS = Operation(
    "maxjax_format_block_matmul", _types, _block_definition, {"cuda": _blocks_on_cuda}, None, None
)
