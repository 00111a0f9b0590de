"""Checks of the operands of an operation: dtypes, Python numbers, shapes and indices.

MAX rejects some operands that JAX accepts: numbers that would wrap or be rounded, and indices past the
end, which JAX clamps. They are checked when an operation is called, as compiled code cannot raise errors.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType, promote
from ..dtype import fitting as fitting
from .shape import StaticDim

# Integers up to this one are exact in every float of 16 bits or more.
_EXACT = 256
# JAX refuses larger Python integers, also next to floats, unless jax_enable_x64 is set.
_INT32 = 2**31 - 1


def promoted(a: Any, b: Any) -> tuple[Any, Any]:
    """Two arrays, or an array and a number, promoted to one dtype and rank by MAX's rules.

    Raises:
        ValueError: one is an integer tensor and the other a float, there is no common dtype, or the
            number does not fit in the other's dtype.
    """
    if not hasattr(a, "dtype"):
        return (a, b) if not hasattr(b, "dtype") else (number(a, b.dtype), b)
    if not hasattr(b, "dtype"):
        return a, number(b, a.dtype)
    return same_rank(*same_dtype(a, b))


def same_dtype(a: Any, b: Any) -> tuple[Any, Any]:
    """Two arrays in the dtype that they have in common as operands of an operation.

    Raises:
        ValueError: there is none.
    """
    if a.dtype == b.dtype:
        return a, b
    dtype = common(a.dtype, b.dtype).np
    return a.astype(dtype), b.astype(dtype)


def common(a: Any, b: Any) -> DType:
    """The dtype of an operation on tensors of two dtypes.

    The rules are those of :func:`maxjax.dtype.promote`, which layers use, with one exception: as in MAX, float16 and
    bfloat16 have no common dtype here. Layers promote the pair, because a checkpoint may contain both.

    Raises:
        ValueError: there is no common dtype.
    """
    a, b = DType.of(a), DType.of(b)
    if a.is_half() and b.is_half() and a is not b:
        raise ValueError(
            f"unsafe cast: neither of {a!r} and {b!r} holds the other. Cast one of them first."
        )
    return promote(a, b)


def refuse_integers(x: Any, weight: Any) -> None:
    """Refuses a TensorValue of integers as an operand beside a weight of floats, which JAX would promote.

    Raises:
        ValueError: ``x`` is a TensorValue of integers, and the weight holds floats.
    """
    if wraps(x) and not x.dtype.is_float():
        common(x.dtype, weight.dtype)


def dividends(a: Any, b: Any) -> tuple[Any, Any]:
    """The operands of a true division: two integers of any width become float64, as in MAX.

    Without ``jax_enable_x64`` they become float32.

    Raises:
        ValueError: a number does not fit in the dtype of the other operand.
    """
    tensors = [x for x in (a, b) if hasattr(x, "dtype")]
    if not tensors or not (_is_integer(a) and _is_integer(b)):
        return a, b
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    of = tensors[0].dtype
    a, b = (x.astype(dtype) if hasattr(x, "dtype") else float(number(x, of)) for x in (a, b))
    return a, b


def divides_integers(function: Any, a: Any, b: Any) -> bool:
    """Whether two tensors of integers are divided: JAX gives float32 for narrow ones also with jax_enable_x64."""
    return function is operator.truediv and all(
        hasattr(x, "dtype") and x.dtype.kind in ("i", "u") for x in (a, b)
    )


def _is_integer(x: Any) -> bool:
    if not hasattr(x, "dtype"):
        return isinstance(x, int)
    return DType.of(x.dtype).np.kind in "iu"


def number(x: Any, dtype: Any) -> Any:
    """A Python number as the operand of a tensor with the given dtype.

    JAX gives it the dtype of the tensor, but it would wrap numbers that are too large, round integers
    that the float cannot hold, and convert booleans to integers.

    Raises:
        ValueError: the dtype cannot hold the number.
    """
    boolean = dtype == jnp.bool_
    if isinstance(x, bool) and not boolean:
        x = int(x)
    if is_float(dtype):
        small = dtype.itemsize > 1 and -_EXACT <= x <= _EXACT if isinstance(x, int) else True
        if small or dtype.kind == "c" or _holds(dtype, x):
            return float(x) if isinstance(x, int) and abs(x) > _INT32 else x
        raise ValueError(
            f"unsafe cast: {x} would be rounded in {dtype}; write {x}.0 to allow that, or cast the tensor "
            "first"
        )
    if not isinstance(x, int):
        raise ValueError(
            f"unsafe cast: the Python {type(x).__name__} {x} with a tensor of {dtype}; cast the tensor first"
        )
    low, high = (0, 1) if boolean else bounds(dtype)
    if not low <= x <= high:
        raise ValueError(
            f"unsafe cast: {x!r} does not fit in {dtype}, which holds {low} to {high}; cast the tensor first"
        )
    return jnp.asarray(bool(x)) if boolean else x


def like(x: np.ndarray, dtype: Any) -> jax.Array:
    """A NumPy array as an operand beside a tensor: it is cast to the tensor's dtype, as a number is.

    Raises:
        ValueError: the array holds floats and the tensor integers, or the dtype does not hold its integers.
    """
    if is_float(x.dtype) and not is_float(dtype):
        raise ValueError(
            f"unsafe cast: an array of {x.dtype} with a tensor of {dtype}; cast one of them first"
        )
    new = x.astype(dtype)
    if not is_float(x.dtype) and not np.array_equal(new.astype(x.dtype), x):
        raise ValueError(
            f"unsafe cast: the array has numbers that {dtype} does not hold; cast the tensor first"
        )
    return jnp.asarray(new)


def wraps(*operands: Any) -> bool:
    """Whether an operation on these returns a TensorValue: one is a TensorValue, or a Weight if ``kind.py`` says so."""
    return any(getattr(x, "_wraps", False) for x in operands)


def alike(a: Any, b: Any) -> tuple[Any, Any]:
    """The two operands; a NumPy array beside a TensorValue is cast to the TensorValue's dtype, as in MAX.

    Raises:
        ValueError: the dtype does not hold the array's numbers.
    """
    if isinstance(a, np.ndarray) and wraps(b):
        a = like(a, DType.of(b.dtype).np)
    elif isinstance(b, np.ndarray) and wraps(a):
        b = like(b, DType.of(a.dtype).np)
    return a, b


def wide(x: jax.Array) -> jax.Array:
    """16-bit and narrower floats as float32, so that a result of several steps is rounded once."""
    return x.astype(jnp.float32) if narrow(x.dtype) else x


def narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of 16 bits or less."""
    return dtype.itemsize < 4 and is_float(dtype)


def rounded(y: jax.Array, dtype: Any) -> jax.Array:
    """A result cast to a dtype. A result that already has it is returned as it is, which is faster in eager code."""
    return y if y.dtype == dtype else y.astype(dtype)


def widely(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of an array that computes with 16-bit and narrower floats in float32, and rounds its result once."""

    @functools.wraps(function)
    def computed(x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        found = function(wide(x), *args, **options)
        return rounded(found, x.dtype) if narrow(x.dtype) else found

    return computed


def mean(x: jax.Array, axis: int, keepdims: bool = True) -> jax.Array:
    """The mean along an axis; of integers it is rounded toward zero, as in MAX.

    Raises:
        ValueError: the axis of a tensor of integers is empty.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return widely(jnp.mean)(x, axis, keepdims=keepdims)
    count = x.shape[axis]
    if same(count, 0):
        raise ValueError(
            f"integers have no mean along axis {axis} of shape {x.shape}, which is empty"
        )
    # Sums of narrow integers do not fit into their own type.
    words = x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    if isinstance(count, int) and count << 8 * x.dtype.itemsize > 2**31:
        found = _wide_mean(words, axis, count)
        return (jnp.expand_dims(found, axis) if keepdims else found).astype(x.dtype)
    total = jnp.sum(words, axis, keepdims=keepdims, dtype=words.dtype)
    return jax.lax.div(total, jnp.full_like(total, count)).astype(x.dtype)


def normalised(x: jax.Array, axes: int | tuple[int, ...], epsilon: float) -> jax.Array:
    """Return ``x`` with mean 0 and variance 1 (up to epsilon) over ``axes``; two passes avoid cancellation."""
    centred = x - jnp.mean(x, axis=axes, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=axes, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon)


def _wide_mean(x: jax.Array, axis: int, count: int) -> jax.Array:
    """The mean of integers whose sum may not fit into their dtype, along an axis that is removed.

    A partial sum is ``quotient · count + remainder``, with the remainder from 0 to ``count - 1``. Quotients may
    wrap, as the last one fits.
    """
    n = np.asarray(count, x.dtype)

    def add(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
        over = a[1] >= n - b[1]
        return a[0] + b[0] + over.astype(x.dtype), jnp.where(over, a[1] - (n - b[1]), a[1] + b[1])

    zero = np.zeros((), x.dtype)
    quotient, remainder = jax.lax.reduce((x // n, x % n), (zero, zero), add, (axis % x.ndim,))
    return quotient + ((quotient < 0) & (remainder > 0)).astype(x.dtype)


def bounds(dtype: Any) -> tuple[int, int]:
    """The least and the greatest number of an integer dtype."""
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def ends(dtype: Any) -> tuple[Any, Any]:
    """The lowest and the highest value of a dtype, as scalars of it: the infinities if it has them."""
    if dtype == jnp.bool_:
        low, high = False, True
    elif not is_float(dtype):
        low, high = bounds(dtype)
    elif np.isinf(np.asarray(np.inf).astype(dtype)):
        low, high = -np.inf, np.inf
    else:
        low, high = jnp.finfo(dtype).min, jnp.finfo(dtype).max
    return np.asarray(low, dtype), np.asarray(high, dtype)


def from_numpy(x: np.ndarray) -> jax.Array:
    """A NumPy array as a jax.Array: with 32 bits, unless ``jax_enable_x64`` is set.

    Raises:
        ValueError: its integers do not fit.
    """
    return jnp.asarray(fitting(x))


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether a dtype is a floating-point or complex one."""
    return jnp.issubdtype(dtype, jnp.inexact)


def _holds(dtype: Any, x: int) -> bool:
    """Whether an integer is exact in a float dtype."""
    try:
        with np.errstate(over="ignore"):
            return int(np.asarray(x, object).astype(np.float64).astype(dtype)) == x
    except (OverflowError, ValueError):
        return False


def same_rank(*arrays: Any) -> tuple[Any, ...]:
    """Arrays with leading axes of length 1 added, so that all have the same rank.

    Only if JAX is configured not to do this itself, as it is a separate operation in eager code.
    """
    if jax.config.jax_numpy_rank_promotion == "allow":  # type: ignore[attr-defined]
        return arrays
    rank = max(a.ndim for a in arrays)
    return tuple(
        a if a.ndim == rank else a.reshape((1,) * (rank - a.ndim) + a.shape) for a in arrays
    )


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal; symbolic ones may be undecided."""
    return bool(a == b)


def check_broadcast(*shapes: tuple[Any, ...]) -> None:
    """Checks that shapes broadcast, with leading axes of length 1 added to the shorter ones.

    Raises:
        ValueError: they do not; the message names them.
    """
    if len(set(shapes)) < 2:
        return
    backwards = (tuple(reversed(shape)) for shape in shapes)
    for sizes in itertools.zip_longest(*backwards, fillvalue=1):
        if len({size for size in sizes if not same(size, 1)}) > 1:
            names = " and ".join(map(str, shapes))
            raise ValueError(
                f"shapes {names} do not broadcast: sizes must be equal, or one of them 1"
            )


def check_product(a: Sequence[Any], b: Sequence[Any]) -> None:
    """Checks that the shapes fit a matmul.

    Raises:
        ValueError: they do not fit; the message names both.
    """
    a, b = (tuple(int(n) if isinstance(n, StaticDim) else n for n in shape) for shape in (a, b))
    if not (a and b and same(a[-1], b[-min(len(b), 2)])):
        raise ValueError(
            f"matmul: shapes {a} and {b} do not fit: the last axis on the left "
            "must be as long as the last but one on the right"
        )
    if len(a) > 2 or len(b) > 2:
        check_broadcast(a[:-2], b[:-2])


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` in the dtype that they have in common; of 16-bit and narrower floats with sums in float32.

    Raises:
        ValueError: the shapes do not fit, or there is no common dtype.
    """
    check_product(a.shape, b.shape)
    a, b = same_dtype(a, b)
    if min(a.ndim, b.ndim) >= 2:
        a, b = same_rank(a, b)
    sums = jnp.float32 if narrow(a.dtype) else None
    return rounded(jnp.matmul(a, b, preferred_element_type=sums), a.dtype)


def check_not_empty(y: jax.Array, x: jax.Array, w: jax.Array, image: str) -> None:
    """Checks that the filters ``w`` fit into the input ``x`` at least once: JAX gives an empty result ``y`` otherwise.

    Raises:
        ValueError: they do not.
    """
    spatial = [i for i, letter in enumerate(image) if letter not in "NC"]
    if any(same(y.shape[i], 0) and not same(x.shape[i], 0) for i in spatial):
        raise ValueError(
            f"convolution: the filters {w.shape} are larger than the input {x.shape} with its padding"
        )


def check_indices(parts: Iterable[Any], shape: Sequence[Any]) -> None:
    """Checks that the known numbers of an index are in range. Slices follow NumPy's rules.

    Raises:
        ValueError: a number is out of range, there are more indices than axes, or ``...`` occurs twice.
    """
    parts = [part for part in parts if part is not None]
    counts = [_axes(part) for part in parts]
    used, gaps = sum(counts), sum(part is Ellipsis for part in parts)
    if gaps > 1:
        raise ValueError(f"... occurs twice in the index of a tensor of shape {tuple(shape)}")
    if used > len(shape):
        raise ValueError(
            f"{used} indices for the {len(shape)} axes of a tensor of shape {tuple(shape)}"
        )
    axis = 0
    for part, count in zip(parts, counts, strict=True):
        if part is Ellipsis:
            axis += len(shape) - used
        elif count == 1 and not isinstance(part, slice):
            check_inside(part, shape, axis)
        axis += count


def check_inside(index: Any, shape: Sequence[Any], axis: int, op: str = "") -> None:
    """Checks that an index, or a list or NumPy array of them, is in range if the size of the axis is known.

    Raises:
        ValueError: it is out of range.
    """
    size = shape[axis]
    if not isinstance(size, int):
        return
    if isinstance(index, list) and all(type(i) is int for i in index):
        index = np.asarray(index, np.int64)
    if isinstance(index, np.ndarray):
        if not index.size or index.dtype.kind not in "iu":
            return
        low, high = int(index.min()), int(index.max())
        index = low if low < -size else high
    elif not isinstance(index, (int, np.integer)) or isinstance(index, bool):
        return
    if not -size <= index < size:
        raise ValueError(
            f"{op and op + ': '}index {index} is outside axis {axis} of a tensor of shape {tuple(shape)}, "
            f"which is {size} long"
        )


def _axes(part: Any) -> int:
    """The number of axes that a part of an index consumes."""
    if part is Ellipsis or isinstance(part, (bool, np.bool_)):
        return 0
    if getattr(part, "dtype", None) == np.bool_:
        return part.ndim
    return 1
