"""The matmul of activations with a weight in ggml's blocks as a JAX primitive.

Only CPUs dequantise a whole weight for it: that is a matrix in float32 or in the dtype of the
activations, written and read again for every product. GPUs have kernels in Triton; elsewhere some rows
are dequantised at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule

from . import product
from .blocks import decode, decoder_of
from .gpu import packed_product as triton
from .gpu.triton import program_device, unavailable
from .operation import Operation, same_varying

_LOG = logging.getLogger("maxjax")

# Weights that are dequantised at a time where there is no kernel.
MOST_WEIGHTS = 1 << 20


class Packed(NamedTuple):
    """Static arguments of the primitive: the encoding of the weights, and the dtype of the result."""

    encoding: str
    dtype: np.dtype


def packed_product(
    x: jax.Array, blocks: jax.Array, layer: Any, encoding: str, dtype: np.dtype
) -> jax.Array:
    """``x @ w.T`` for a weight in blocks.

    Args:
        x: activations ``[..., in]``.
        blocks: the blocks, uint8 ``[out, in / elements * bytes]``, or a stack ``[n, out, ...]`` of such.
        layer: index of the weight in the stack, an int32 scalar; it is ignored without a stack.
        encoding: name of the encoding, as for ``blocks.decode``.
        dtype: dtype of the result, a float; weights are rounded to it as well.

    Returns:
        ``[..., out]``, summed in float32.
    """
    static = Packed(encoding, np.dtype(dtype))
    return _OPERATION([x, blocks, layer], static)[0]


def definition(static: Packed, x: Any, blocks: Any, layer: Any) -> list[jax.Array]:
    """The product in jnp, which defines it: the whole weight is dequantised."""
    if blocks.ndim == 3:
        blocks = _layer_of(blocks, layer)
    return product.definition(x, [decode(static.encoding, blocks)], [static.dtype])


def _layer_of(stack: jax.Array, layer: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False, allow_negative_indices=False)


def in_chunks(static: Packed, x: Any, blocks: Any, layer: Any, devices: int = 1) -> list[jax.Array]:
    """The product in jnp, with at most ``MOST_WEIGHTS`` weights of a device dequantised at a time.

    Args:
        static: encoding and dtype.
        x, blocks, layer: as those of :func:`definition`.
        devices: number of devices between which XLA may divide the operands.
    """
    depth, rows = x.shape[-1], blocks.shape[-2]
    if rows % devices or not jnp.issubdtype(x.dtype, jnp.floating):
        return definition(static, x, blocks, layer)
    # Each chunk has rows of each device's part, so that slices do not cross devices.
    parts = (devices,) if devices > 1 else ()
    own = rows // devices
    chunk = min(own, max(8, MOST_WEIGHTS // max(depth, 1) // 128 * 128))
    if blocks.ndim == 3:
        # XLA for TPUs would lay out the whole stack anew for the loop below; a layer's blocks are few.
        blocks = jax.lax.optimization_barrier(_layer_of(blocks, layer))
    matrix = blocks.reshape(*parts, own, blocks.shape[-1])

    def part(start: Any) -> Any:
        some = jax.lax.dynamic_slice_in_dim(matrix, start, chunk, matrix.ndim - 2)
        weights = decode(static.encoding, some).astype(x.dtype)  # [devices, chunk, in]
        contraction = (((x.ndim - 1,), (weights.ndim - 1,)), ((), ()))
        wide = jnp.float32 if x.dtype.itemsize < 4 else x.dtype
        y = jax.lax.dot_general(x, weights, contraction, preferred_element_type=wide)
        return y.astype(static.dtype)

    if chunk == own:
        return [part(0).reshape(*x.shape[:-1], rows)]

    def step(i: Any, y: Any) -> Any:
        # Where the last chunk would end outside, it begins earlier; its first rows are computed again.
        start = jnp.minimum(i * chunk, own - chunk)
        return jax.lax.dynamic_update_slice_in_dim(y, part(start), start, y.ndim - 1)

    empty = jnp.zeros((*x.shape[:-1], *parts, own), static.dtype)
    y, *_ = same_varying((empty, x, blocks))
    y = jax.lax.fori_loop(0, -(-own // chunk), step, y)
    return [y.reshape(*x.shape[:-1], rows)]


# -- as a JAX primitive


def _types(static: Packed, x: Any, blocks: Any, layer: Any) -> list[Any]:
    shape = (*x.shape[:-1], blocks.shape[-2])
    return [x.update(shape=shape, dtype=static.dtype, weak_type=False)]


def _on_cuda(static: Packed, x: Any, blocks: Any, layer: Any) -> list[jax.Array]:
    why = triton.lacks(static.encoding, static.dtype, x, blocks) or unavailable(program_device())
    if not why:
        return [triton.kernel(static.encoding, static.dtype, x, blocks, layer)]
    _LOG.debug("maxjax: a packed product has no kernel for this on a GPU, jnp is used: %s", why)
    return in_chunks(static, x, blocks, layer)


def _on_tpu(static: Packed, devices: int, x: Any, blocks: Any, layer: Any) -> list[jax.Array]:
    return in_chunks(static, x, blocks, layer, devices)


def _batch(static: Packed, operands: Sequence[Any], dims: Sequence[Any], bind: Any) -> Any:
    """A batch of activations is more rows; a batch of weights is left to the definition."""
    if any(d is not None for d in dims[1:]):
        return None
    return bind(jnp.moveaxis(operands[0], dims[0], 0), *operands[1:])


def _rule(ranks: Sequence[int]) -> Any:
    tokens = [f"t{i}" for i in range(ranks[0] - 1)]
    blocks = ArrayMapping(*["l"][: ranks[1] - 2], "o", "b")
    operands = (ArrayMapping(*tokens, "k"), blocks, ArrayMapping())
    return SdyShardingRule(operands, (ArrayMapping(*tokens, "o"),))


def _lengths(static: Packed, shapes: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The axes that are summed over are divided between blocks."""
    (*tokens, depth), (*rows, nbytes), layer = shapes
    decoder = decoder_of(static.encoding)
    return [[*tokens, depth // decoder.elements], [*rows, nbytes // decoder.nbytes], layer]


_OPERATION = Operation(
    "maxjax_packed_matmul", _types, definition,
    {"cuda": _on_cuda, "rocm": in_chunks}, _rule, product.shardings, _batch,
    # GPUs add up sums in the dtype of the result, as those of other products.
    lengths=_lengths,
    # XLA for TPUs has no custom partitioning.
    forms={"tpu": _on_tpu},
)  # fmt: skip
