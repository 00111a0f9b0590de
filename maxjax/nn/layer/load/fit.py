"""Decides which values can be loaded into a Weight, and converts them.

A value is a WeightData or any array that supports DLPack. The shape of an array must be exactly that of the weight;
for WeightData there are MAX's exceptions (quantised bytes, shape () for (1,)). :func:`fit` decides from shapes and
dtypes alone; once all values fit, :func:`read_values` reads, converts and copies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ....driver import DLPackArray
from ....dtype import DType, misfit
from ....errors import differs
from ....graph.placement.arrays import put, sharding_of
from ....graph.placement.stacking import without_leading
from ....graph.quantization import QuantizationEncoding
from ....graph.shape import Dim, Shape, StaticDim
from ....graph.weight.weight import Weight
from ....graph.weights import WeightData, read_all
from ....graph.weights.device_reads import (
    Destination,
    Source,
    boxes,
    is_spread,
    read_destinations,
)
from ....graph.weights.given import dtype_of, host_or_jax, shape_of, unreadable
from ....graph.weights.reshaped import reshaped
from ....graph.weights.weight_data import cast_array, is_torch
from ....storage.boxes import count, whole


@dataclasses.dataclass
class Fit:
    """A value that fits its weight, and the declaration that the weight has after it is stored."""

    name: str
    weight: Weight
    value: Any
    dtype: DType
    dims: tuple[Dim, ...]
    encoding: QuantizationEncoding | None
    align: int | None
    original: tuple[DType, Shape] | None = None
    loaded_shape: tuple[int, ...] | None = None
    as_bytes: bool = False


def fit(
    name: str, weight: Weight, value: Any, *, override: bool, alignment: int | None, cast: bool
) -> Fit | str:
    """Checks ``value`` against ``weight``: returns a Fit, or a description of the problem."""
    is_loaded = isinstance(value, WeightData) and value.is_loaded
    if problem := unreadable(value.data if is_loaded else value):
        return f"The value of weight '{name}' is {problem}"
    if isinstance(value, WeightData):
        found = _fit_data(name, weight, value, override)
    else:
        found = _fit_array(name, weight, value)
    if isinstance(found, str):
        return found
    found.align = alignment or weight.align
    problem = _dtype_problem(found, cast) or _alignment_problem(found)
    return problem or found


def _new(name: str, weight: Weight, value: Any, dims: Sequence[Any]) -> Fit:
    return Fit(
        name,
        weight,
        value,
        weight.spec.dtype,
        tuple(dims),
        weight.quantization_encoding,
        weight.align,
    )


def _fit_data(name: str, weight: Weight, data: WeightData, override: bool) -> Fit | str:
    fitted = _new(name, weight, data, weight.spec.dims)
    shape, declared = tuple(data.shape), weight.spec.dims
    if weight.quantization_encoding is QuantizationEncoding.GPTQ and data.dtype is not DType.uint8:
        if not shape:
            return differs(name, f"shape rank (expected={len(declared)}, actual=0).")
        fitted.original = (data.dtype, Shape(shape))
        shape = (*shape[:-1], Dim(int(shape[-1]) * data.dtype.size_in_bytes))
        fitted.as_bytes = True
        if weight.spec.dtype is not DType.uint8:
            return differs(name, _dtypes(DType.uint8, weight.spec.dtype))
    packed = data.dtype is DType.uint8 and weight.spec.dtype is DType.uint8
    form = weight.spec.form
    if _is_remade(form, data.dtype, tuple(map(int, shape))):
        fitted.loaded_shape = tuple(map(int, shape))
    elif weight.quantization_encoding is not None or packed and form is None:
        fitted.dims = tuple(Shape(shape))
    elif list(held := _held(data, shape)) != list(declared) and _loose(held) == _loose(declared):
        fitted.loaded_shape = tuple(int(d) for d in held)
    elif problem := _shape_problem(shape, weight):
        return differs(name, f"{problem}.")
    if problem := _content_problem(name, data):
        return problem
    if override and data.quantization_encoding is not None:
        fitted.encoding = data.quantization_encoding
    return fitted


def _held(data: WeightData, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shape of the array, if it is in memory: an earlier load may have made that of the metadata another."""
    return tuple(getattr(data.data, "shape", shape)) if data.is_loaded else shape


def _content_problem(name: str, data: WeightData) -> str | None:
    """The problem if data in memory cannot have the shape that its metadata says; otherwise None."""
    if not data.is_loaded or isinstance(data.data, jax.ShapeDtypeStruct):
        return None
    expected = tuple(map(int, data.shape))
    if _held(data, ()) == expected:
        return None
    array = data.typed()
    if tuple(array.shape) == expected:
        return None
    return (
        f"The WeightData of weight '{name}' says {data.dtype!r} and shape {expected}, but its data is "
        f"{array.dtype} of shape {tuple(array.shape)}"
    )


def _fit_array(name: str, weight: Weight, value: Any) -> Fit | str:
    if not isinstance(value, (DLPackArray, np.generic)):
        return (
            f"The value of weight '{name}' must be an array that supports DLPack (NumPy, JAX, torch) or a "
            f"WeightData, not {type(value).__name__}"
        )
    try:
        dtype = dtype_of(value)
    except (TypeError, ValueError, KeyError):
        return f"The value of weight '{name}' has the dtype {getattr(value, 'dtype', '')}, which maxjax does not have"
    form, shape = weight.spec.form, tuple(shape_of(value))
    if _is_remade(form, dtype, shape):
        fitted = _new(name, weight, value, weight.spec.dims)
        fitted.loaded_shape = shape
        return fitted
    problem = _shape_problem(shape, weight)
    if problem and dtype is not weight.spec.dtype:
        problem += f" and {_dtypes(weight.spec.dtype, dtype)}"
    if problem:
        return differs(name, f"{problem}.")
    return _new(name, weight, value, weight.spec.dims)


def _is_remade(form: Any, dtype: DType, shape: tuple[int, ...]) -> bool:
    """Whether a FileForm makes the weight from the value, so that their shapes may differ."""
    if form is None or form.elementwise and form.shape is None:
        return False
    return form.fits(dtype, shape)


def _loose(shape: Sequence[Any]) -> list[Any]:
    """The shape, with () for (1,): both have one element."""
    return [] if len(shape) == 1 and shape[0] == 1 else list(shape)


def _shape_problem(shape: Sequence[Any], weight: Weight) -> str | None:
    declared, form = weight.spec.dims, weight.spec.form
    if all(isinstance(d, StaticDim) for d in declared):
        expected, actual = tuple(int(d) for d in declared), tuple(int(d) for d in shape)
        if expected == actual:
            return None
        in_files = None if form is None else form.shape
        return f"shape (expected={in_files or expected}, actual={actual})"
    if len(shape) != len(declared):
        return f"shape rank (expected={len(declared)}, actual={len(shape)})"
    wrong = [f"dim[{i}]: expected {d}, got {n}" for i, (d, n) in enumerate(zip(declared, shape, strict=True))
             if isinstance(d, StaticDim) and int(d) != int(n)]  # fmt: skip
    return f"shape ({', '.join(wrong)})" if wrong else None


def _dtypes(expected: DType, actual: DType) -> str:
    return f"dtype (expected={expected}, actual={actual})"


def _dtype_problem(fitted: Fit, cast: bool) -> str | None:
    """The problem if dtypes differ without ``cast``, or if JAX would silently narrow a dtype; otherwise None."""
    actual = DType.uint8 if fitted.as_bytes else dtype_of(fitted.value)
    expected, form = fitted.dtype, fitted.weight.spec.form
    if form is not None and form.elementwise:
        filed = DType.of(form.to_file(np.zeros(0, expected.np)).dtype)
        return None if actual is filed else differs(fitted.name, _dtypes(filed, actual))
    narrow = DType.of(jax.dtypes.canonicalize_dtype(expected.np))
    # A state dict has integers of 64 bits as JAX holds them, in 32.
    if actual is not expected and not (actual is narrow and expected.is_integral()):
        same_kind = any(
            of(actual) and of(expected)
            for of in (DType.is_float, DType.is_integral, DType.is_complex)
        )
        if not (cast and same_kind):
            hint = "; cast=True converts it" if same_kind and not cast else ""
            return differs(fitted.name, _dtypes(expected, actual)) + hint
    if narrow is not expected and not expected.is_integral() and not cast:
        return (
            f"weight '{fitted.name}' is {expected}, and JAX runs in 32 bits: pass cast=True to load it as "
            f"{narrow.name}, or set jax_enable_x64"
        )
    return None


def _alignment_problem(fitted: Fit) -> str | None:
    align = fitted.align or dtype_of(fitted.value).align
    address = _address(fitted.value)
    if address is None or address % align == 0:
        return None
    return (
        f"Found unaligned weight '{fitted.name}' (expected alignment={align}). Copy the array to align it, or "
        "pass `weight_alignment=1` to `Module.load_state_dict()`."
    )


def _address(value: Any) -> int | None:
    """The address of the bytes of a host array; None if it is not known or not relevant."""
    if isinstance(value, WeightData):
        if not value.is_loaded:
            return None  # it will be read into newly allocated memory
        value = value.data
    if is_torch(value):
        return value.data_ptr() if value.device.type == "cpu" and value.numel() else None
    if not isinstance(value, (jax.Array, np.generic)):
        value = host_or_jax(value)
    return value.ctypes.data if isinstance(value, np.ndarray) and value.size else None


# -- the arrays themselves


def is_lazy(one: Fit) -> bool:
    """Whether the bytes of the value are still on disk."""
    return isinstance(one.value, WeightData) and not one.value.is_loaded


def is_on_device(one: Fit) -> bool:
    """Whether the value is a JAX array, and not on disk or in a NumPy array."""
    return not is_lazy(one) and isinstance(host_or_jax(one.value), jax.Array)


def final_shape(one: Fit) -> tuple[int, ...]:
    """The shape after loading; symbolic sizes are taken from the value."""
    known = all(isinstance(dim, StaticDim) for dim in one.dims)
    return tuple(int(d) for d in (one.dims if known else shape_of(one.value)))


def sharding_for(one: Fit) -> Any:
    """The Sharding of the value in logical order; None lets JAX choose.

    It is the Sharding of the Weight. If the Weight has none, it is that to which its current value is
    committed, for example by ``jax.device_put(model, sharding)``.
    """
    weight = one.weight
    if weight.sharding is not None or weight.shape != list(final_shape(one)):
        return weight.sharding
    if weight.home is None:
        return sharding_of(weight.leaf)
    stack = weight.home[0]
    return without_leading(sharding_of(stack.leaf), len(stack.spec.lead))


def source(one: Fit) -> Source:
    """The Source of the value for a Destination: slices read from disk, or the whole array."""
    form = one.weight.spec.form
    if is_lazy(one) and not one.as_bytes and one.value.is_as_stored:
        if one.loaded_shape is None:
            return one.value
        if form is not None and form.shape is not None:
            return reshaped(one.value, final_shape(one))
    return lambda: np.asarray(_arranged(one, host_or_jax(one.value)))


def bytes_to_read(fits: Sequence[Fit]) -> int:
    """The number of bytes that this process reads from files for these values."""
    total = 0
    for one in fits:
        if isinstance(one.value, WeightData) and (nbytes := one.value.unread_bytes):
            total += int(nbytes * _share(one))
    return total


def _share(one: Fit) -> float:
    """The fraction of a value that the devices of this process hold."""
    sharding = sharding_for(one)
    if sharding is None or sharding.is_fully_addressable:
        return 1.0
    shape = final_shape(one)
    return sum(map(count, boxes(sharding, shape))) / max(count(whole(shape)), 1)


def destination(one: Fit, otherwise: Any = None) -> Destination:
    """The description of the stored array that the value becomes.

    Args:
        otherwise: sharding that is used if the weight has none.
    """
    spec, shape = one.weight.spec, final_shape(one)
    return Destination(
        one.name,
        shape if spec.layout is None else spec.layout.shape(shape),
        jax.dtypes.canonicalize_dtype(one.dtype.np),
        [source(one)],
        spec.leaf_sharding or sharding_for(one) or otherwise,
        spec.layout,
        convert=lambda _, array: convert(one, array),
        elementwise=True,
    )


def read_values(fits: Sequence[Fit]) -> list[Any]:
    """Reads and converts all values, and copies them to their devices; no Module is changed.

    Raises:
        ValueError: an integer does not fit into the 32 bits that JAX uses by default.
        CheckpointError: a file cannot be read.
    """
    by_device = [
        is_spread(sharding_for(one)) and not is_on_device(one) or _is_cast(one) for one in fits
    ]
    both = list(zip(fits, by_device, strict=True))
    read = read_all([one.value for one, split in both if is_lazy(one) and not split])
    arrays = read_destinations(destination(one) for one, split in both if split)
    return [
        next(arrays) if split else _put(one, read.pop(id(one.value), None)) for one, split in both
    ]


def _is_cast(one: Fit) -> bool:
    """Whether values on disk are converted to another dtype while they are read."""
    data = source(one)
    if not isinstance(data, WeightData):
        return False
    return data.decodes is None and data.stored_dtype != jax.dtypes.canonicalize_dtype(one.dtype.np)


def _arranged(one: Fit, array: Any) -> Any:
    """A whole value as the weight stores it, on the device where it is."""
    array, form = convert(one, array), one.weight.spec.form
    if one.loaded_shape is not None and (form is None or form.shape is not None):
        array = array.reshape(tuple(int(d) for d in one.dims))
    return one.weight.spec.arranged(array)


def convert(one: Fit, array: Any) -> Any:
    """``array``, a whole value or elements of it, converted to the dtype of the weight, on the device where it is."""
    if one.as_bytes:
        return np.ascontiguousarray(array).view(np.uint8)
    if (form := one.weight.spec.form) is not None:
        array = form.to_stored(one.name, np.asarray(array))
    target = jax.dtypes.canonicalize_dtype(one.dtype.np)
    if array.dtype == target:
        return array
    if one.dtype.is_integral():
        host = np.asarray(array)
        if (found := misfit(host, target)) is not None:
            raise ValueError(
                f"weight '{one.name}' holds {found}, which do not fit {target} (JAX runs in 32 bits unless "
                "jax_enable_x64 is set)"
            )
        return host.astype(target)
    if isinstance(array, np.ndarray):
        return cast_array(array, DType.of(target))
    return array.astype(target)


def _put(one: Fit, read: np.ndarray | None) -> jax.Array:
    """Copies a value to the devices of the weight's sharding, or to JAX's default device.

    On a CPU, JAX uses aligned NumPy memory without a copy. That is correct for memory without another
    reference (``read``), but not for a caller's array, which the caller may change later.
    """
    array = host_or_jax(one.value) if read is None else one.value.cast(read)
    array = _arranged(one, array)
    if isinstance(array, np.ndarray) and read is None:
        array = np.array(array, copy=True, order="C")
    return put(array, one.weight.spec.leaf_sharding or sharding_for(one), one.name)
