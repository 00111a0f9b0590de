"""The matmul of activations with weights in ggml's blocks as a JAX primitive.

CPUs have kernels in C++ (``cpu/packed.h``), with activations quantised to int8 or as floats; NVIDIA GPUs have
kernels in Triton, and TPUs for MXFP4 one in Mosaic; elsewhere some rows are dequantised at a time, on a mesh of
TPUs some of each device's part. The definition, which exported programs and derivatives use, dequantises the
whole weight and keeps the activations as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from ..dtype import DType
from . import explicit, product
from .blocks import decode, decoder_of
from .format_product import in_blocks
from .formats import QuantLayout, QuantTensor
from .gpu import packed_product as triton
from .gpu.triton import unavailable
from .operation import Operation, same_varying, types_of, varying_with
from .pallas import program_device, refused
from .stack_slice import layer_of
from .tpu import format_product as mosaic
from .tpu.mosaic import LANES
from .tpu.mosaic import unavailable as unavailable_on_tpu

# The most weights that are dequantised at a time where there is no kernel.
MOST_WEIGHTS = 1 << 20

_WHAT = "a matmul with a quantised weight on a GPU or a TPU"

# The formats of the C++ kernels, in the order of ``Format`` in cpu/kernels.h.
FORMATS = (
    "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS",
)  # fmt: skip

# How the kernels for CPUs take activations: rounded to int8 in groups of 32, or as they are.
ACTIVATIONS = ("int8", "float")


class PackedOperand(NamedTuple):
    """Static arguments of the primitive.

    Attributes:
        encodings: the encoding of each weight.
        dtypes: the dtype of each result.
        is_int8: whether kernels for CPUs quantise the activations.
        divisions: how a mesh divides each weight ``[out, in]``, if that is known.
    """

    encodings: tuple[str, ...]
    dtypes: tuple[np.dtype, ...]
    is_int8: bool = False
    divisions: tuple[explicit.Division | None, ...] = ()


def packed_products(
    x: jax.Array,
    weights: Sequence[jax.Array],
    layers: Sequence[Any],
    encodings: Sequence[str],
    dtypes: Sequence[Any],
    activations: str = "float",
    divisions: Sequence[explicit.Division | None] = (),
) -> list[jax.Array]:
    """``x @ w.T`` for each weight in blocks.

    Args:
        x: activations ``[..., in]``.
        weights: for each weight its blocks, uint8 ``[out, in / elements * bytes]`` (of one block), or
            a stack ``[n, out, ...]`` of such arrays.
        layers: for each weight its index in the stack, an int32 scalar; it is ignored without a stack.
        encodings: names of the encodings, as for ``blocks.decode``.
        dtypes: dtypes of the results, floats; weights are rounded to them as well where they are
            dequantised.
        activations: "int8" if kernels for CPUs may quantise the activations, otherwise "float".
        divisions: for each weight how a mesh divides it ``[out, in]``, if that is known: XLA for TPUs needs it
            to compute on each device's part.

    Returns:
        The results, ``[..., out]`` each, summed in float32.
    """
    names = tuple(np.dtype(dtype) for dtype in dtypes)
    divisions = tuple(divisions) or (None,) * len(names)
    static = PackedOperand(tuple(encodings), names, activations == "int8", divisions)
    return _OPERATION([x, *weights, *layers], static)


def _each(static: PackedOperand, operands: Sequence[Any], run: Any) -> list[jax.Array]:
    """``run(encoding, dtype, x, blocks, layer)`` for each weight."""
    x, weights, layers = product.split(operands)
    each = zip(static.encodings, static.dtypes, weights, layers, strict=True)
    return [run(encoding, dtype, x, blocks, layer) for encoding, dtype, blocks, layer in each]


def definition(static: PackedOperand, *operands: Any) -> list[jax.Array]:
    """The definition of the matmuls, in jnp: each weight is dequantised as a whole."""
    return _each(static, operands, _dequantised)


def _dequantised(encoding: str, dtype: np.dtype, x: Any, blocks: Any, layer: Any) -> jax.Array:
    if blocks.ndim == 3:
        blocks = layer_of(blocks, layer)
    return product.definition(x, [decode(encoding, blocks)], [dtype])[0]


def in_chunks(static: PackedOperand, *operands: Any, devices: int = 1) -> list[jax.Array]:
    """The matmuls in jnp, with at most ``MOST_WEIGHTS`` weights of a device dequantised at a time.

    Args:
        static, operands: the same as for :func:`definition`.
        devices: number of devices between which XLA may divide the operands.
    """

    def run(encoding: str, dtype: np.dtype, x: Any, blocks: Any, layer: Any) -> jax.Array:
        return _in_chunks(encoding, dtype, x, blocks, layer, devices)

    return _each(static, operands, run)


def _in_chunks(
    encoding: str, dtype: np.dtype, x: Any, blocks: Any, layer: Any, devices: int
) -> jax.Array:
    depth, rows = x.shape[-1], blocks.shape[-2]
    if rows % devices or not jnp.issubdtype(x.dtype, jnp.floating):
        return _dequantised(encoding, dtype, x, blocks, layer)
    # Each chunk has rows of each device's part, so that slices do not cross devices.
    parts = (devices,) if devices > 1 else ()
    own = rows // devices
    chunk = min(own, max(8, MOST_WEIGHTS // max(depth, 1) // 128 * 128))
    if blocks.ndim == 3:
        # For the loop below XLA for TPUs would change the layout of the whole stack; one layer is small.
        blocks = jax.lax.optimization_barrier(layer_of(blocks, layer))
    matrix = blocks.reshape(*parts, own, blocks.shape[-1])

    def part(start: Any) -> Any:
        some = jax.lax.dynamic_slice_in_dim(matrix, start, chunk, matrix.ndim - 2)
        weights = decode(encoding, some).astype(x.dtype)  # [devices, chunk, in]
        contraction = (((x.ndim - 1,), (weights.ndim - 1,)), ((), ()))
        wide = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
        y = jax.lax.dot_general(x, weights, contraction, preferred_element_type=wide)
        return y.astype(dtype)

    if chunk == own:
        return part(0).reshape(*x.shape[:-1], rows)

    def step(i: Any, y: Any) -> Any:
        # Where the last chunk would end outside, it begins earlier; its first rows are computed again.
        start = jnp.minimum(i * chunk, own - chunk)
        return jax.lax.dynamic_update_slice_in_dim(y, part(start), start, y.ndim - 1)

    empty = jnp.zeros((*x.shape[:-1], *parts, own), dtype)
    y, *_ = same_varying((empty, x, blocks))
    y = jax.lax.fori_loop(0, -(-own // chunk), step, y)
    return y.reshape(*x.shape[:-1], rows)


# -- as a JAX primitive


def _types(static: PackedOperand, *avals: Any) -> list[Any]:
    return product.types(static.dtypes, *avals)


def _on_cpu(static: PackedOperand, *operands: Any) -> Any:
    x = operands[0]
    if 0 in x.shape or any(dtype not in product.FLOATS for dtype in (x.dtype, *static.dtypes)):
        return definition(static, *operands)
    formats = np.array([FORMATS.index(name) for name in static.encodings], np.int64)
    call = jax.ffi.ffi_call("maxjax_packed_matmul", _types(static, *types_of(operands)))
    return call(*operands, formats=formats, is_int8=static.is_int8)


def _on_cuda(static: PackedOperand, *operands: Any) -> list[jax.Array]:
    def run(encoding: str, dtype: np.dtype, x: Any, blocks: Any, layer: Any) -> jax.Array:
        why = triton.lacks(dtype, x, math.prod(x.shape[:-1]), blocks)
        if refused(_WHAT, why or unavailable(program_device())):
            return _in_chunks(encoding, dtype, x, blocks, layer, 1)
        return triton.kernel(encoding, dtype, x, blocks, layer)

    return _each(static, operands, run)


def _on_tpu(static: PackedOperand, devices: int, *operands: Any) -> list[jax.Array]:
    x, weights, layers = product.split(operands)
    each = zip(static.encodings, static.dtypes, static.divisions, weights, layers, strict=True)
    return [
        _on_parts(encoding, dtype, division, devices, x, blocks, layer)
        for encoding, dtype, division, blocks, layer in each
    ]


def _on_parts(
    encoding: str, dtype: np.dtype, division: explicit.Division | None, devices: int,
    x: jax.Array, blocks: jax.Array, layer: Any,
) -> jax.Array:  # fmt: skip
    """One matmul, of which each TPU computes its part of the weight, if it is known how that is divided."""
    *lead, out, width = blocks.shape
    units = out, width // decoder_of(encoding).nbytes
    rows, columns = division.entries if division else ((), ())
    is_known = (
        division and division.mesh.size == devices and division.divides(units, (rows, columns))
    )
    if devices > 1 and not is_known:
        return _in_chunks(encoding, dtype, x, blocks, layer, devices)

    def local(x: Any, blocks: Any, layer: Any) -> jax.Array:
        layout = block_layout(encoding, blocks)
        if refused(_WHAT, _tpu_lacks(layout, x, blocks)):
            blocks = _as_it_lies(layer_of(blocks, layer) if blocks.ndim == 3 else blocks)
            y = _in_chunks(encoding, dtype, x, blocks, layer, 1)
        else:
            y = in_blocks(mosaic, layout, dtype, x, {"blocks": blocks}, layer)
        return jax.lax.psum(y, columns) if devices > 1 and columns else y

    over = (*rows, *columns)
    if division is None or devices == 1 or not over:
        return local(x, blocks, layer)
    # Over the other axes of the mesh, which may split the tokens, XLA divides the work.
    tokens = [()] * (x.ndim - 1)
    operands = [[*tokens, columns], [*([()] * len(lead)), rows, columns], []]
    return division.on_parts(local, operands, [*tokens, rows], over)(x, blocks, layer)


def block_layout(encoding: str, blocks: Any) -> QuantLayout:
    """The layout of a weight in blocks, or of a stack of them, for the kernel of TPUs."""
    *_, out, width = blocks.shape
    decoder = decoder_of(encoding)
    tensors = (QuantTensor("blocks", DType.uint8, (out, width), (0, 1)),)
    return QuantLayout(encoding, out, width // decoder.nbytes * decoder.elements, tensors)


def _tpu_lacks(layout: QuantLayout, x: Any, blocks: Any) -> str:
    """Why the kernel of TPUs cannot compute a matmul; "" if it can."""
    return mosaic.lacks(layout, x, {"blocks": blocks}) or unavailable_on_tpu(program_device())


def _as_it_lies(blocks: jax.Array) -> jax.Array:
    """The blocks of a weight, for a loop. XLA for TPUs would otherwise change their layout, or a whole stack's."""
    rows, width = blocks.shape
    # XLA lays out an array with the other axis last in memory if registers are then padded less.
    is_turned = _padded(width, rows) < _padded(rows, width)
    return with_layout_constraint(blocks, Layout((1, 0) if is_turned else (0, 1)))


def _padded(rows: int, width: int) -> int:
    """The number of bytes that a matrix of bytes takes on a TPU: in tiles of 8 rows and 128 columns."""
    return -(-rows // 8) * 8 * (-(-width // LANES) * LANES)


def _rule(ranks: Sequence[int]) -> Any:
    return product.rule(ranks, same_depth=False)


def _lengths(static: PackedOperand, shapes: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The shapes with summed axes counted in blocks, because these may only be split between blocks."""
    x, weights, layers = product.split(shapes)
    decoders = [decoder_of(encoding) for encoding in static.encodings]
    # Weights with blocks of several sizes are split between the largest ones.
    largest = max(decoder.elements for decoder in decoders)
    blocks = [
        [*rows, nbytes // decoder.nbytes // (largest // decoder.elements)]
        for (*rows, nbytes), decoder in zip(weights, decoders, strict=True)
    ]
    return [[*x[:-1], x[-1] // largest], *blocks, *layers]


def _summand(static: PackedOperand, platform: str) -> PackedOperand:
    """CPUs add up the devices' sums in float32, GPUs in the dtype of the result, as in other matmuls."""
    if platform != "cpu":
        return static
    return static._replace(dtypes=(np.dtype("float32"),) * len(static.dtypes))


_OPERATION = Operation(
    "maxjax_packed_matmul", _types, definition,
    {"cpu": _on_cpu, "cuda": _on_cuda, "rocm": in_chunks}, _rule, product.shardings, product.batch,
    summand=_summand,
    lengths=_lengths,
    # XLA for TPUs has no custom partitioning.
    forms={"tpu": _on_tpu},
)  # fmt: skip


# -- groups of tokens with several weights


def packed_block_matmul(
    x: jax.Array, blocks: jax.Array, owner: jax.Array, encoding: str
) -> jax.Array:
    """``x[i] @ w[owner[i]].T`` for a stack of weights in blocks: ``[groups, tokens, in]`` → ``[groups, tokens, out]``.

    Args:
        blocks: blocks of the weights, uint8 ``[n, out, bytes]``.
        owner: index of each group's weight, int32 ``[groups]``; where it is negative, results are undefined.
        encoding: name of the encoding.

    The results are summed in float32 and in the dtype of ``x``, a float.
    """
    static = PackedOperand((encoding,), (np.dtype(x.dtype),))
    return _GROUPS([x, blocks, owner.astype(jnp.int32)], static)[0]


def _group_types(static: PackedOperand, x: Any, blocks: Any, owner: Any) -> list[Any]:
    return [x.update(shape=(*x.shape[:-1], blocks.shape[1]), weak_type=False)]


def _one_by_one(run: Callable[..., jax.Array], x: Any, blocks: Any, owner: Any) -> list[jax.Array]:
    """``run(tokens, blocks, index)`` for each group that has a weight."""
    zeros = varying_with(jnp.zeros((x.shape[1], blocks.shape[1]), x.dtype), x, blocks, owner)

    def one(group: Any) -> jax.Array:
        tokens, number = group
        compute = lambda: run(tokens, blocks, number)
        return jax.lax.cond(number < 0, lambda: zeros, compute)

    return [jax.lax.map(one, (x, owner))]


def _group_definition(static: PackedOperand, *operands: Any) -> list[jax.Array]:
    (encoding,), (dtype,) = static.encodings, static.dtypes
    return _one_by_one(partial(_dequantised, encoding, dtype), *operands)


def _groups_on_cuda(static: PackedOperand, x: Any, blocks: Any, owner: Any) -> list[jax.Array]:
    (encoding,), (dtype,) = static.encodings, static.dtypes
    why = triton.lacks(dtype, x, x.shape[1], blocks) or unavailable(program_device())
    if refused(_WHAT, why):
        run = partial(_in_chunks, encoding, dtype, devices=1)
        return _one_by_one(run, x, blocks, owner)
    return [triton.group_kernel(encoding, dtype, x, blocks, owner)]


def _groups_on_tpu(static: PackedOperand, x: Any, blocks: Any, owner: Any) -> list[jax.Array]:
    (encoding,), (dtype,) = static.encodings, static.dtypes
    layout = block_layout(encoding, blocks)
    if refused(_WHAT, _tpu_lacks(layout, x, blocks)):
        run = partial(_in_chunks, encoding, dtype, devices=1)
        return _one_by_one(run, x, blocks, owner)
    return [mosaic.kernel(layout, dtype, x, {"blocks": blocks}, owner)]


_GROUPS = Operation(
    "maxjax_packed_block_matmul", _group_types, _group_definition,
    {"cuda": _groups_on_cuda, "tpu": _groups_on_tpu}, None, None,
)  # fmt: skip
