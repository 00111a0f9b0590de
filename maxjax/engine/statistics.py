"""Statistics: what an array's values are like, computed where they lie in one compiled program.

What comes back from the devices is some numbers, a histogram and an image of at most 96 × 96: a weight
of any size is looked at without copying it.
"""

from __future__ import annotations

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

    Where a stack is looked at, each is an array with an entry for each layer.

    Attributes:
        size: number of values (of one layer).
        min, max, mean, std: of the finite values; NaN if there are none.
        nan, inf, zeros: how many values are NaN, infinite (of either sign), and zero.
        counts: number of finite values in each of 32 equal intervals from ``min`` to ``max``.
        image: the values as an image, at most 96 × 96; None for stacks and scalars. Each pixel of a larger
            array is the mean magnitude of a block, and NaN if the block holds something not finite.
        signed: whether the image has the values themselves.
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
    """Starts to compute the statistics of an array; :func:`fetched` waits for them.

    Args:
        array: an array, a QuantArray or a StackSlice.
        lead: number of leading axes that count layers.

    Raises:
        UserInputError: the elements are no numbers.
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
    return _program(mesh, explicit.mesh_of(held), lead)(array)


def fetched(pending: Any, shape: tuple[int, ...], lead: int = 0) -> Statistics:
    """The statistics that :func:`measured` started to compute of an array of that shape."""
    found = {name: np.asarray(value) for name, value in jax.device_get(pending).items()}
    image = found.pop("image", None)
    below = found.pop("below").astype(np.int64)
    finite = found.pop("finite").astype(np.int64)
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
    """The compiled program for arrays on a mesh, whose results every device has.

    Args:
        typed: the abstract mesh of an array whose type has a sharding, or None.
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
    wide = jnp.dtype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)
    # Converted anew for each sum, so that no copy in the wider type is made of the whole array.
    values = lambda: array.astype(wide)
    finite = lambda: jnp.isfinite(values())
    infinity = jnp.asarray(jnp.inf, wide)
    low = jnp.min(jnp.where(finite(), values(), infinity), initial=jnp.inf)
    high = jnp.max(jnp.where(finite(), values(), -infinity), initial=-jnp.inf)
    count = _count(finite())
    known = jnp.maximum(count, 1).astype(wide)
    mean = _sum(jnp.where(finite(), values(), 0)) / known
    spread = _sum(jnp.where(finite(), jnp.square(values() - mean), 0)) / known
    none = count == 0
    or_nan = lambda value: jnp.where(none, jnp.asarray(jnp.nan, wide), value)
    found = {
        "min": or_nan(low), "max": or_nan(high), "mean": or_nan(mean), "std": or_nan(jnp.sqrt(spread)),
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
    return jnp.sum(true, dtype=jnp.uint32)


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
        return matrix.astype(jnp.float32)
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
    return jnp.where(bad, jnp.nan, mean).astype(jnp.float32)
