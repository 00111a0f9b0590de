"""``DType``: the element types, and their names in other libraries and formats.

``.np`` of a member is its NumPy dtype (ml_dtypes' for types that NumPy lacks), ``.safetensors`` its
name in a safetensors header.
"""

from __future__ import annotations

import builtins
import re
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

from .errors import closest

# DType has members and properties called bool, np and dtype, so the signatures inside the
# class say builtins.bool and NumpyDType.
NumpyDType = np.dtype[Any]
# The kinds of objects by which NumPy and JAX name an element type.
_NAMES = (type, np.dtype, str)


class finfo:
    """Limits of a floating-point type, as Python floats.

    Attributes: ``bits``, ``eps`` (gap between 1 and the next value), ``max``, ``min``,
    ``tiny`` (smallest positive normal value; ``smallest_normal`` is the same), ``dtype``.
    An integer type or ``bool`` raises TypeError.

    Example:
        >>> finfo(DType.bfloat16).eps
        0.0078125
        >>> DType.finfo(DType.float8_e4m3fn).max
        448.0
    """

    def __init__(self, dtype: Any):
        dtype = DType.of(dtype)
        if not dtype.is_float():
            raise TypeError(f"finfo only supports floating-point types, got {dtype!r}")
        limits = ml_dtypes.finfo(dtype.np)
        self.bits = int(limits.bits)
        self.eps = float(limits.eps)
        self.max = float(limits.max)
        self.min = float(limits.min)
        self.tiny = float(limits.tiny)
        self.dtype = dtype

    @property
    def smallest_normal(self) -> float:
        return self.tiny

    def __repr__(self) -> str:
        limits = ", ".join(f"{k}={getattr(self, k)}" for k in ("eps", "max", "min", "tiny"))
        return f"finfo(dtype={self.dtype!r}, bits={self.bits}, {limits})"


class DType(Enum):
    """An element type.

    ``DType(value)`` also accepts the short name ("f32", "bf16", "si8", "f8e4m3fn"): unknown text
    raises KeyError, another unknown value ValueError. ``DType.of`` accepts other spellings.
    Iteration gives MAX's 21 types; ``int4``, ``uint4``, ``complex64`` and ``complex128``, which MAX
    does not have, are members too and listed in ``DType.__members__``.

    Example:
        >>> np.zeros(2, DType.bfloat16).dtype, DType.float8_e4m3fn.safetensors
        (dtype(bfloat16), 'F8_E4M3')
        >>> DType("f32"), str(DType.float32), DType.of(np.int8).is_integral()
        (float32, 'DType.float32', True)
    """

    bool = 1
    int8 = 135
    int16 = 137
    int32 = 139
    int64 = 141
    uint8 = 134
    uint16 = 136
    uint32 = 138
    uint64 = 140
    float16 = 79
    float32 = 81
    float64 = 82
    bfloat16 = 80
    float4_e2m1fn = 64
    float6_e2m3fn = 65
    float6_e3m2fn = 66
    float8_e8m0fnu = 73
    float8_e4m3fn = 75
    float8_e4m3fnuz = 76
    float8_e5m2 = 77
    float8_e5m2fnuz = 78
    # MAX's values for integers are 128 + 2·log2(bits) + signed; these two continue the series.
    int4 = 133
    uint4 = 132
    # JAX and checkpoint files have these, MAX does not; the values are maxjax's own.
    complex64 = 97
    complex128 = 98

    finfo = staticmethod(finfo)

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> builtins.bool:
        """Whether it is the same type, also as NumPy and JAX name it: ``w.dtype == jnp.float32`` works."""
        if self is other:  # nearly always, in the keys of programs
            return True
        return isinstance(other, _NAMES) and builtins.bool(self.np == other)

    __hash__ = Enum.__hash__

    @classmethod
    def _missing_(cls, value: object) -> DType | None:
        return _SHORT_NAMES[value] if isinstance(value, str) else None

    # --- names in other libraries ---

    @property
    def np(self) -> NumpyDType:
        """The NumPy dtype with the same meaning, not just one of the same size."""
        return _NUMPY[self]

    @property
    def dtype(self) -> NumpyDType:
        """The NumPy dtype; with this property, NumPy and jax.numpy accept a DType as a dtype."""
        return _NUMPY[self]

    @property
    def safetensors(self) -> str | None:
        """The name in a safetensors header, or None if the format has none."""
        return _SAFETENSORS.get(self)

    @classmethod
    def from_safetensors(cls, name: str) -> DType:
        """The type with this name in a safetensors header; KeyError if there is none.

        Example:
            >>> DType.from_safetensors("BF16")
            bfloat16
        """
        return _FROM_SAFETENSORS[name]

    def to_numpy(self) -> NumpyDType:
        """MAX's mapping to NumPy: float8 gives uint8, other types NumPy lacks raise ValueError.

        Prefer ``.np``, which has the right dtype for all of them.
        """
        if self.is_float8():
            return np.dtype(np.uint8)
        if self.np.type.__module__ != "numpy":
            raise ValueError(f"unsupported DType to convert to NumPy: {self}")
        return self.np

    @classmethod
    def from_numpy(cls, dtype: Any) -> DType:
        """The type of a NumPy dtype or scalar type (ml_dtypes too).

        Raises:
            ValueError: there is no such type; or it is complex, which MAX does not have: ``DType.of`` accepts that.
        """
        found = _of_numpy(dtype)
        if found is None or found.is_complex():
            raise ValueError(f"unsupported NumPy dtype: {dtype}")
        return found

    @classmethod
    def of(cls, dtype: Any) -> DType:
        """The type that ``dtype`` means, in any spelling.

        Args:
            dtype: a DType, a NumPy dtype or scalar type, a jax.numpy or torch dtype, an object
                with a ``dtype``, or text in either case: "bfloat16", "bf16", "torch.bfloat16", "fp16".

        Raises:
            ValueError: there is no such type.
            TypeError: ``dtype`` is not a dtype, or is Python's ``int`` or ``float``, which have no
                width.

        Example:
            >>> DType.of("bf16"), DType.of(ml_dtypes.float8_e5m2), DType.of(np.dtype("int8"))
            (bfloat16, float8_e5m2, int8)
        """
        if isinstance(dtype, cls):
            return dtype
        if isinstance(dtype, str):
            return _from_text(dtype)
        if type(dtype).__module__ == "torch":
            return _from_text(str(dtype))
        if dtype is None or dtype is int or dtype is float:
            raise TypeError(f"{dtype!r} is not an element type. Write, for example, DType.float32.")
        inner = getattr(dtype, "dtype", None)
        if isinstance(inner, cls | np.dtype) or type(inner).__module__ == "torch":
            return cls.of(inner)
        native = np.dtype(dtype)
        found = _of_numpy(native)
        if found is None:
            raise ValueError(f"unsupported NumPy dtype: {native}")
        return found

    # --- properties ---

    @property
    def size_in_bits(self) -> int:
        """Width of one element: 4 and 6 for the sub-byte types."""
        return _SUB_BYTE_BITS.get(self, 8 * self.np.itemsize)

    @property
    def size_in_bytes(self) -> int:
        """Bytes of one element in an array; an element of less than 8 bits takes one byte."""
        return self.np.itemsize

    @property
    def align(self) -> int:
        """Natural alignment in bytes."""
        return self.np.itemsize

    def is_integral(self) -> builtins.bool:
        """Whether it is an integer type, signed or not; ``bool`` is not one."""
        return self.name.startswith(("int", "uint"))

    def is_signed_integral(self) -> builtins.bool:
        return self.name.startswith("int")

    def is_unsigned_integral(self) -> builtins.bool:
        return self.name.startswith("uint")

    def is_float(self) -> builtins.bool:
        """Whether it is a floating-point type, including those of 4, 6 and 8 bits."""
        return "float" in self.name

    def is_complex(self) -> builtins.bool:
        """Whether it is complex64 or complex128."""
        return self.name.startswith("complex")

    def is_float8(self) -> builtins.bool:
        return self.name.startswith("float8")

    def is_half(self) -> builtins.bool:
        """Whether it is a 16-bit float: float16 or bfloat16."""
        return self in (DType.float16, DType.bfloat16)


# MAX programs iterate over DType and expect that each type has MAX's properties, so iteration
# leaves out types that MAX does not have. Lookup, pickle and identity are unchanged.
for _name in ("int4", "uint4", "complex64", "complex128"):
    DType._member_names_.remove(_name)

_ALL: tuple[DType, ...] = tuple(DType.__members__.values())
_NUMPY: dict[DType, NumpyDType] = {
    d: np.dtype(getattr(ml_dtypes, d.name, None) or d.name) for d in _ALL
}
_FROM_NUMPY = {n: d for d, n in _NUMPY.items()}
_FROM_SCALAR_TYPE = {n.type: d for d, n in _NUMPY.items()}
_SUB_BYTE_BITS = {
    DType.int4: 4,
    DType.uint4: 4,
    DType.float4_e2m1fn: 4,
    DType.float6_e2m3fn: 6,
    DType.float6_e3m2fn: 6,
}


def _short_name(dtype: DType) -> str:
    """MLIR's name: si8, ui8, f32, bf16, f8e4m3fn; ``bool`` is the 1-bit integer i1."""
    if dtype is DType.bool:
        return "i1"
    if dtype.is_float():
        return dtype.name.replace("float", "f").replace("_", "")
    return dtype.name.replace("int", "i" if dtype.name[0] == "u" else "si")


_SHORT_NAMES = {_short_name(d): d for d in _ALL}
_SAFETENSORS = {
    DType.bool: "BOOL",
    DType.int8: "I8",
    DType.int16: "I16",
    DType.int32: "I32",
    DType.int64: "I64",
    DType.uint8: "U8",
    DType.uint16: "U16",
    DType.uint32: "U32",
    DType.uint64: "U64",
    DType.float16: "F16",
    DType.float32: "F32",
    DType.float64: "F64",
    DType.bfloat16: "BF16",
    DType.float4_e2m1fn: "F4",
    DType.float6_e2m3fn: "F6_E2M3",
    DType.float6_e3m2fn: "F6_E3M2",
    DType.float8_e8m0fnu: "F8_E8M0",
    DType.float8_e4m3fn: "F8_E4M3",
    DType.float8_e4m3fnuz: "F8_E4M3FNUZ",
    DType.float8_e5m2: "F8_E5M2",
    DType.float8_e5m2fnuz: "F8_E5M2FNUZ",
    DType.complex64: "C64",
}
_FROM_SAFETENSORS = {name: d for d, name in _SAFETENSORS.items()}


def _of_numpy(dtype: Any) -> DType | None:
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        return _FROM_SCALAR_TYPE.get(dtype)
    return _FROM_NUMPY.get(dtype.newbyteorder("=")) if isinstance(dtype, np.dtype) else None


def _from_text(text: str) -> DType:
    name = text.removeprefix("torch.").removeprefix("DType.").lower()
    # PyTorch's tools call float16 "fp16" and "half".
    short = "f16" if name == "half" else re.sub(r"^fp(?=\d)", "f", name)
    found = DType.__members__.get(name) or _SHORT_NAMES.get(short)
    if found is None:
        near = closest(name, DType.__members__)
        hint = f" Did you mean '{near}'?" if near else ""
        raise ValueError(f"unknown dtype '{text}'.{hint}")
    return found


def native(array: Any) -> Any:
    """The array in this machine's byte order, the only one that JAX has; not copied if it is in that already.

    Example:
        >>> native(np.array([1, 2], ">i4")).dtype.str == np.dtype(np.int32).str
        True
    """
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def misfit(array: np.ndarray, dtype: NumpyDType) -> str | None:
    """The range of an array's numbers, as "integers from -1 to 300", if an integer dtype cannot hold them; else None.

    Example:
        >>> misfit(np.asarray([-1, 300]), np.dtype(np.uint8)), misfit(np.arange(3), np.dtype(np.uint8))
        ('integers from -1 to 300', None)
    """
    if not array.size or array.dtype == dtype or not DType.of(dtype).is_integral():
        return None
    limits, least, most = ml_dtypes.iinfo(dtype), int(array.min()), int(array.max())
    return f"integers from {least} to {most}" if least < limits.min or most > limits.max else None


def fitting(x: np.ndarray) -> np.ndarray:
    """The array itself, whose integers fit in JAX's type for them.

    Raises:
        ValueError: its integers do not fit, or it is a masked array.
    """
    import jax

    if isinstance(x, np.ma.MaskedArray):
        raise ValueError("a masked array does not have a value everywhere: use x.filled(number)")
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    if (found := misfit(x, dtype)) is not None:
        raise ValueError(
            f"unsafe cast: {found} do not fit in {dtype}; set jax_enable_x64 to use 64-bit types"
        )
    return x


def promote(a: Any, b: Any) -> DType:
    """The type of the result of an operation on ``a`` and ``b``; the order does not matter.

    ``bool`` with another type gives the other type. Two integers, or two floats, give the wider
    type if it holds both: float16 with bfloat16 gives float32, two different floats of less than
    16 bits give float16. An integer with a float gives the float only if that holds every value of
    the integer (int8 with float32). Every other pair raises ValueError: cast one of them.

    Example:
        >>> promote(DType.float32, DType.bfloat16), promote("f16", "bf16")
        (float32, float32)
        >>> promote(DType.int32, DType.float32)
        Traceback (most recent call last):
        ValueError: unsafe cast: int32 and float32 have no common type. Cast one of them first.
    """
    a, b = DType.of(a), DType.of(b)
    if a is b or b is DType.bool:
        return a
    if a is DType.bool:
        return b
    if a.is_float() and b.is_float():
        return _promote_floats(a, b)
    if a.is_complex() or b.is_complex():
        pass
    elif a.is_float() or b.is_float():
        integer, real = (b, a) if a.is_float() else (a, b)
        real = real if real.size_in_bits >= 16 else DType.float16
        digits = integer.size_in_bits - integer.is_signed_integral()
        if digits <= ml_dtypes.finfo(real.np).nmant + 1:
            return real
    else:
        narrow, wide = sorted((a, b), key=lambda d: d.size_in_bits)
        fits = wide.is_signed_integral() or narrow.is_unsigned_integral()
        if narrow.size_in_bits < wide.size_in_bits and fits:
            return wide
    raise ValueError(f"unsafe cast: {a!r} and {b!r} have no common type. Cast one of them first.")


def _promote_floats(a: DType, b: DType) -> DType:
    """The common type of two different floats."""
    narrow, wide = sorted((a, b), key=lambda d: d.size_in_bits)
    if wide.size_in_bits < 16:
        return DType.float16
    return wide if narrow.size_in_bits < wide.size_in_bits else DType.float32
