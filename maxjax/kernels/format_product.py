"""The matmul of activations with a weight in one of Hugging Face's quantised formats as a JAX primitive.

On NVIDIA GPUs a Triton kernel dequantises tiles in registers, and on TPUs a Mosaic kernel. On CPUs, and where a
kernel refuses the operands, the whole weight is dequantised after the activations are computed, and not kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import product
from .formats import QuantLayout
from .gpu import format_product as triton
from .gpu.triton import unavailable
from .operation import Operation
from .pallas import program_device, refused
from .stack_slice import layer_of
from .tpu import format_product as mosaic
from .tpu.mosaic import unavailable as unavailable_on_tpu


class FormatOperand(NamedTuple):
    """Static arguments of the primitive.

    Attributes:
        layout: the format, and the tensors of one weight.
        dtype: dtype of the result, a float.
    """

    layout: QuantLayout
    dtype: np.dtype


def format_product(
    x: jax.Array, layout: QuantLayout, tensors: Mapping[str, Any], places: Any, dtype: Any
) -> jax.Array:
    """``x @ w.T`` for a quantised weight, in ``dtype``.

    Args:
        x: activations ``[..., in]``.
        tensors: tensors of the weight by name, or stacks of them with one leading axis each.
        places: index of each tensor in its stack, int32 ``[tensors]``; it is ignored for tensors that are not stacks.

    The whole weight is dequantised for derivatives, again in the backward pass.
    """
    operands = [x, *(tensors[one.name] for one in layout.tensors), places]
    return _OPERATION(operands, FormatOperand(layout, np.dtype(dtype)))[0]


def _named(layout: QuantLayout, tensors: Sequence[Any]) -> dict[str, Any]:
    return {one.name: array for one, array in zip(layout.tensors, tensors, strict=True)}


def _weight(static: FormatOperand, dtype: Any, tensors: Sequence[Any], places: Any) -> jax.Array:
    """The dequantised weight ``[out, in]``, rounded to a dtype."""
    own = [
        layer_of(a, places[i]) if a.ndim > len(one.axes) else a
        for i, (one, a) in enumerate(zip(static.layout.tensors, tensors, strict=True))
    ]
    found = jax.lax.stop_gradient(_named(static.layout, own))
    return static.layout.of_part(found).dequantise(found).astype(dtype)


def _float(x: jax.Array) -> Any:
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else np.dtype(np.float32)


# Rematerialised: the backward pass dequantises again, instead of keeping the dequantised weights of all layers.
@partial(jax.checkpoint, static_argnums=(0,))
def _definition(static: FormatOperand, x: jax.Array, *rest: Any) -> list[jax.Array]:
    *tensors, places = rest
    dtype = _float(x)
    weight = _weight(static, dtype, tensors, places)
    return product.products(x.astype(dtype), [weight], [jnp.int32(0)], [static.dtype])


def _on_cpu(static: FormatOperand, devices: int, x: jax.Array, *rest: Any) -> list[jax.Array]:
    first, *others = rest
    if devices == 1 and 0 not in x.shape and not jnp.issubdtype(first.dtype, jnp.floating):
        # XLA chooses the order of operations. If layers are not stacked, it would dequantise the weights of all
        # layers first and hold all of them in memory; ``lax.optimization_barrier`` does not prevent that.
        zero = jnp.signbit(x[(0,) * x.ndim]).astype(jnp.uint8) >> 1
        first = first | zero.astype(first.dtype)
    return _definition(static, x, first, *others)


def _by_kernel(platform: str, static: FormatOperand, x: jax.Array, *rest: Any) -> list[jax.Array]:
    *tensors, places = rest
    named, kernels = _named(static.layout, tensors), _KERNELS[platform]
    if refused("a matmul with a quantised weight", _why_not(platform, static, x, named)):
        dtype = _float(x)
        weight = _weight(static, dtype, tensors, places)
        return product.definition(x.astype(dtype), [weight], [static.dtype])
    return [in_blocks(kernels, static.layout, static.dtype, x, named, places)]


def in_blocks(
    kernels: Any, layout: QuantLayout, dtype: Any, x: jax.Array, tensors: Mapping[str, Any], places: Any,
    interpret: Any = False,
) -> jax.Array:  # fmt: skip
    """``x @ w.T`` in ``dtype`` by a platform's kernel, which takes blocks of rows.

    Args:
        kernels: module of the platform's kernel.
        places: index of each tensor that is a stack, int32 ``[tensors]``, or one index for all.
        interpret: whether to run the kernel's operations one by one, on any platform.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    blocks = -(-count // kernels.most_rows(layout))
    size = -(-count // blocks)
    rows = jnp.pad(rows, ((0, blocks * size - count), (0, 0))).reshape(blocks, size, -1)
    stacks, places = layout.stacks(tensors, places)
    y = kernels.kernel(layout, dtype, rows, stacks, jnp.zeros(1, jnp.int32), interpret, places)
    return y.reshape(blocks * size, -1)[:count].reshape(*x.shape[:-1], -1)


_KERNELS: dict[str, Any] = {"cuda": triton, "tpu": mosaic}


def _why_not(platform: str, static: FormatOperand, x: Any, tensors: Mapping[str, Any]) -> str:
    """Why a platform's kernel cannot compute a matmul; "" if it can."""
    why = _KERNELS[platform].lacks(static.layout, x, tensors)
    return why or (unavailable if platform == "cuda" else unavailable_on_tpu)(program_device())


def _types(static: FormatOperand, x: Any, *rest: Any) -> list[Any]:
    layout = static.layout.of_part(_named(static.layout, rest[: len(static.layout.tensors)]))
    shape = (*x.shape[:-1], layout.out_dim)
    return [x.update(shape=shape, dtype=static.dtype, weak_type=False)]


# Layers call it inside ``shard_map``, which says how the tensors of a weight are split together.
_OPERATION = Operation(
    "maxjax_format_matmul", _types, _definition,
    {platform: partial(_by_kernel, platform) for platform in _KERNELS}, None, None, product.batch,
    forms={"cpu": _on_cpu},
)  # fmt: skip


# -- blocks of rows with several weights


def format_block_matmul(
    x: jax.Array, layout: QuantLayout, tensors: Mapping[str, Any], places: Any, owner: jax.Array
) -> jax.Array:
    """``x[i] @ w[owner[i]].T`` for stacks of quantised weights: ``[blocks, rows, in]`` → ``[blocks, rows, out]``.

    Args:
        tensors: tensors of the weights by name, with one leading axis each.
        places: for each tensor the index in its stack of the weight with number 0, int32 ``[tensors]``.
        owner: number of each block's weight, int32 ``[blocks]``; where it is negative, results are undefined.
    """
    own = [tensors[one.name] for one in layout.tensors]
    operands = [x, *own, places.astype(jnp.int32), owner.astype(jnp.int32)]
    return _BLOCKS(operands, FormatOperand(layout, np.dtype(x.dtype)))[0]


def _block_definition(static: FormatOperand, x: jax.Array, *rest: Any) -> list[jax.Array]:
    *tensors, places, owner = rest

    def one(block: Any) -> jax.Array:
        rows, number = block
        return _definition(static, rows, *tensors, places + jnp.maximum(number, 0))[0]

    return [jax.lax.map(one, (x, owner))]


def _blocks_by_kernel(
    platform: str, static: FormatOperand, x: jax.Array, *rest: Any
) -> list[jax.Array]:
    *tensors, places, owner = rest
    named = _named(static.layout, tensors)
    if refused("a matmul of quantised experts", _why_not(platform, static, x, named)):
        return _block_definition(static, x, *rest)
    run = _KERNELS[platform].kernel
    return [run(static.layout, static.dtype, x, named, owner, places=places)]


_BLOCKS = Operation(
    "maxjax_format_block_matmul", _types, _block_definition,
    {platform: partial(_blocks_by_kernel, platform) for platform in _KERNELS}, None, None,
)  # fmt: skip
