"""Statistics: a summary of an array's values, computed by one compiled program on the array's devices.

Only some numbers, a histogram and an image of at most 96 × 96 are copied to the host, so that a weight
of any size can be inspected.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import UserInputError
from ..kernels import explicit
from ..kernels.stack_slice import stack_of

BINS, SIDE = 32, 96


@dataclass(frozen=True)
class Statistics:
    """Numbers about the values of an array, or of each layer of a stack.

    For a stack, each statistic is an array with an entry for each layer.

    Attributes:
        size: number of values (of one layer).
        min, max, mean, std: statistics of the finite values; NaN if there are none.
        nan, inf, zeros: number of values that are NaN, infinite (of either sign), and zero.
        counts: number of finite values in each of 32 equal intervals from ``min`` to ``max``.
        image: the values as an image, at most 96 × 96; None for stacks and scalars. Each pixel of a larger
            array is the mean magnitude of a block, and NaN if the block has a value that is not finite.
        signed: whether the pixels are the values themselves, and not mean magnitudes.
    """

    size: int
    min: Any
    max: Any
    mean: Any
    std: Any
    nan: Any
    inf: Any
    zeros: Any
    counts: np.ndarray
    image: np.ndarray | None = None
    signed: bool = False


def measured(array: Any, lead: int = 0) -> Any:
    """Dispatches the program that computes an array's statistics; :func:`fetched` waits for them.

    Args:
        array: an array, a QuantArray or a StackSlice.
        lead: number of leading axes that count layers.

    Raises:
        UserInputError: the array does not hold numbers.
    """
    held = getattr(array, "blocks", array)
    held = stack_of(held)
    dtype = np.dtype(np.float32) if hasattr(array, "blocks") else held.dtype
    if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
        raise UserInputError(f"an array of {dtype} has no statistics")
    sharding: Any = getattr(held, "sharding", None)
    if getattr(sharding, "memory_kind", None) == "pinned_host" and held is array:
        array = jax.device_put(array, sharding.with_memory_kind("device"))
    mesh = (
        sharding.mesh if isinstance(sharding, NamedSharding) and sharding.num_devices > 1 else None
    )
    # An array of NumPy may be wider than those of this process.
    is_wide = isinstance(array, np.ndarray) and array.dtype.itemsize > 4
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        return _program(mesh, explicit.mesh_of(held), lead)(array)


def fetched(pending: Any, shape: tuple[int, ...], lead: int = 0) -> Statistics:
    """The statistics that :func:`measured` dispatched for an array of this shape."""
    found = {name: np.asarray(value) for name, value in jax.device_get(pending).items()}
    image = found.pop("image", None)
    found |= {name: from_bytes(found[name]) for name in ("nan", "inf", "zeros", "finite", "below")}
    below, finite = found.pop("below"), found.pop("finite")
    edges = np.concatenate([np.zeros_like(below[..., :1]), below, finite[..., None]], -1)
    sizes = shape[lead:]
    if not lead:
        found = {name: value.item() for name, value in found.items()}
    return Statistics(
        math.prod(sizes), **found, counts=np.diff(edges, axis=-1), image=image,
        signed=image is not None and _is_small(_matrix(sizes)),
    )  # fmt: skip


@functools.lru_cache(64)
def _program(mesh: Any, typed: Any, lead: int) -> Any:
    """The jitted program for arrays on a mesh; its results are replicated.

    Args:
        typed: the abstract mesh of an array under explicit sharding, or None.
    """

    def run(array: Any) -> dict[str, jax.Array]:
        array = jnp.asarray(array)
        one = functools.partial(_one, with_image=not lead)
        for _ in range(lead):
            one = jax.vmap(one)
        if typed is None:
            return one(array)
        shapes = jax.eval_shape(one, jax.ShapeDtypeStruct(array.shape, array.dtype))
        names, kinds = list(shapes), list(shapes.values())
        wanted = [[()] * kind.ndim for kind in kinds]

        def listed(given: jax.Array) -> list[jax.Array]:
            found = one(given)
            return [found[name] for name in names]

        return dict(zip(names, explicit.automatic(listed, typed, wanted)(array), strict=True))

    if mesh is None or typed is not None:
        return jax.jit(run)
    return jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _one(array: jax.Array, with_image: bool) -> dict[str, jax.Array]:
    """The statistics of one array."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.abs(array)
    wide = jnp.dtype(jnp.float64 if array.dtype.itemsize == 8 else jnp.float32)
    # Converted anew for each sum, so that no copy in the wider type is made of the whole array.
    values = lambda: array.astype(wide)
    finite = lambda: jnp.isfinite(values())
    infinity = jnp.asarray(jnp.inf, wide)
    low = jnp.min(jnp.where(finite(), values(), infinity), initial=jnp.inf)
    high = jnp.max(jnp.where(finite(), values(), -infinity), initial=-jnp.inf)
    count = _count(finite())
    scales = jnp.asarray([1, 1 << 8, 1 << 16, 1 << 24], wide)
    known = jnp.maximum(jnp.sum(count.astype(wide) * scales), 1)
    none = ~count.any()
    # Divided by a power of two near the largest, squares and sums neither overflow nor vanish.
    _, exponent = jnp.frexp(jnp.where(none, 0, jnp.maximum(jnp.abs(low), jnp.abs(high))))
    unit = jnp.ldexp(jnp.ones((), wide), jnp.maximum(exponent - 1, int(jnp.finfo(wide).minexp)))
    scaled = lambda: values() / unit
    middle = _sum(jnp.where(finite(), scaled(), 0)) / known
    mean = middle * unit
    spread = _sum(jnp.where(finite(), jnp.square(scaled() - middle), 0)) / known
    or_nan = lambda value: jnp.where(none, jnp.asarray(jnp.nan, wide), value)
    found = {
        "min": or_nan(low), "max": or_nan(high), "mean": or_nan(mean), "std": or_nan(jnp.sqrt(spread) * unit),
        "nan": _count(jnp.isnan(values())), "inf": _count(jnp.isinf(values())),
        "zeros": _count(values() == 0), "finite": count,
    }  # fmt: skip
    # Halved first: the difference of the ends may be more than the type holds.
    half = jnp.where(none, 0, high / 2 - low / 2)
    steps = jnp.arange(1, BINS).astype(wide) / BINS
    edges = jnp.where(none, 0, low) + 2 * half * steps
    found["below"] = jax.lax.map(lambda edge: _count(finite() & (values() < edge)), edges)
    if with_image and array.ndim:
        found["image"] = _image(values())
    return found


def _count(true: jax.Array) -> jax.Array:
    """How many elements are True, as :func:`summed_bytes`."""
    rows = jnp.sum(true, -1, dtype=jnp.uint32) if true.ndim else true.astype(jnp.uint32)
    return summed_bytes(rows)


def summed_bytes(rows: jax.Array) -> jax.Array:
    """The sum of uint32 numbers as four sums, one for each of their bytes; :func:`from_bytes` adds them.

    A stack of layers may have more elements than 32 bits can count, and JAX has no wider integers by default.
    """
    each = [
        jnp.sum((rows >> jnp.uint32(8 * i)) & jnp.uint32(255), dtype=jnp.uint32) for i in range(4)
    ]
    return jnp.stack(each)


def from_bytes(sums: np.ndarray) -> np.ndarray:
    """The numbers, int64 ``[...]``, that sums of bytes ``[..., 4]`` stand for."""
    return (sums.astype(np.int64) << np.arange(0, 32, 8)).sum(-1)


def _sum(values: jax.Array) -> jax.Array:
    """The sum, row by row, which loses fewer digits than one long sum."""
    return jnp.sum(jnp.sum(values, -1)) if values.ndim else values


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns as which an array is drawn."""
    return (1, shape[0]) if len(shape) == 1 else (shape[0], math.prod(shape[1:]))


def _is_small(shape: tuple[int, int]) -> bool:
    return max(shape) <= SIDE


def _image(values: jax.Array) -> jax.Array:
    matrix = values.reshape(_matrix(values.shape))
    if _is_small(matrix.shape):  # type: ignore[arg-type]
        return matrix
    rows, columns = matrix.shape
    # A block need not be square, and those at the end are smaller.
    block = tuple(max(1, -(-size // SIDE)) for size in matrix.shape)
    padding = [(0, -rows % block[0]), (0, -columns % block[1])]
    zero = jnp.zeros((), matrix.dtype)
    pooled = lambda a: jax.lax.reduce_window(a, zero, jax.lax.add, block, block, padding)
    held = [
        jnp.minimum(step, size - jnp.arange(-(-size // step)) * step).astype(matrix.dtype)
        for size, step in zip(matrix.shape, block, strict=True)
    ]
    finite = jnp.isfinite(matrix)
    mean = pooled(jnp.where(finite, jnp.abs(matrix), 0)) / (held[0][:, None] * held[1][None, :])
    bad = pooled(jnp.where(finite, 0, 1).astype(matrix.dtype)) > 0
    return jnp.where(bad, jnp.nan, mean)
