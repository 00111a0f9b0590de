"""The formats of quantised weights: from their tensors to the weight in float32.

A format is a function of the tensors by name and of the weight's shape ``[out, in]``, and what else it
needs to know; ``FORMATS`` is the table of them. All of it is ``jax.numpy``. A QuantLayout is the tensors of one
weight, and how to compute the weight from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...dtype import DType
from ...graph.placement.specs import PartOf
from .forms import Consecutive, Exactly, QuantState

Tensors = Mapping[str, jax.Array]
Shape = tuple[int, int]


def spread(blocks: jax.Array, shape: Shape, sizes: Shape | None = None) -> jax.Array:
    """One value for each block of a weight → one for each of its elements, or such that it broadcasts.

    Args:
        blocks: ``[]`` or ``[1]`` for the whole weight, ``[out]`` for its rows, or a matrix.
        shape: shape of the weight.
        sizes: shape of a block; by default as many rows and columns as there are of ``blocks``. The
            last blocks of an axis may be cut off.

    Example:
        >>> spread(jnp.array([[1.0, 2.0]]), (2, 4)).tolist()
        [[1.0, 1.0, 2.0, 2.0]]
        >>> spread(jnp.array([[1.0], [2.0]]), (3, 4), (2, 4)).tolist()
        [[1.0], [1.0], [2.0]]
    """
    if blocks.size == 1:
        return blocks.reshape(1, 1)
    if blocks.ndim == 1:
        blocks = blocks[:, None]
    for axis, (count, length) in enumerate(zip(blocks.shape, shape, strict=True)):
        size = -(-length // count) if sizes is None else sizes[axis]
        if count > 1 and size > 1:
            blocks = jnp.repeat(blocks, size, axis=axis)
            blocks = jax.lax.slice_in_dim(blocks, 0, length, axis=axis)
    return blocks


def floats(values: jax.Array) -> jax.Array:
    """Numbers as float32; those of 8 bits on CPUs by way of their bits, as XLA computes each bit there.

    Example:
        >>> floats(jnp.array([1.5, -0.001953125], jnp.float8_e4m3fn)).tolist()
        [1.5, -0.001953125]
    """
    by_bits = {jnp.dtype(jnp.float8_e4m3fn): _e4m3, jnp.dtype(jnp.float8_e5m2): _e5m2}
    convert = by_bits.get(values.dtype)
    if convert is None:
        return values.astype(jnp.float32)
    return jax.lax.platform_dependent(
        values, cpu=convert, default=lambda values: values.astype(jnp.float32)
    )


def _e5m2(values: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    # They are the first byte of a float16.
    return jax.lax.bitcast_convert_type(bits << 8, jnp.float16).astype(jnp.float32)


def _e4m3(values: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    # A float16 has as many exponents again below, so that subnormal numbers are right too.
    half = jax.lax.bitcast_convert_type((bits & 128) << 8 | (bits & 127) << 7, jnp.float16)
    nan = jnp.float32(jnp.nan)
    return jnp.where((bits & 127) == 127, nan, half.astype(jnp.float32) * jnp.float32(256))


def scaled(
    tensors: Tensors, shape: Shape, scale: str = "weight_scale", block: Shape | None = None
) -> jax.Array:
    """``weight · scale``: floats of 8 bits or int8, with a scale for each block.

    Args:
        tensors: ``weight`` ``[out, in]``, the scales under the name ``scale``, and, if the format
            is not symmetric, ``weight_zero_point``, which is subtracted first.
        scale: name of the scales: one, one for each row, or one for each block.
        block: shape of a block, where there is a matrix of scales.
    """
    values = floats(tensors["weight"])
    if (zero := tensors.get("weight_zero_point")) is not None:
        values = values - spread(zero.astype(jnp.float32), shape, block)
    return values * spread(tensors[scale].astype(jnp.float32), shape, block)


def unpacked(
    words: jax.Array, bits: int, axis: int, count: int, order: Sequence[int] | None = None
) -> jax.Array:
    """The numbers in words of 32 bits, along an axis; the lowest bits of a word are the first.

    Args:
        words: int32.
        bits: bits of a number; a word holds as many whole ones as it can.
        axis: axis along which a word holds consecutive numbers.
        count: how many numbers there are along it; the last word may hold fewer.
        order: which of a word's numbers is in each position, where they are not in order.

    Returns:
        float32, unsigned.

    Example:
        >>> unpacked(jnp.array([[0x76543210]]), 4, 1, 6).tolist()
        [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    """
    positions = np.arange(32 // bits, dtype=np.uint32)
    if order is not None:
        positions = np.argsort(np.asarray(order)).astype(np.uint32)
    shifts = positions * np.uint32(bits)
    axis %= words.ndim
    unsigned = jax.lax.bitcast_convert_type(words, jnp.uint32)
    shape = [1] * (words.ndim + 1)
    shape[axis + 1] = len(shifts)
    parts = jnp.expand_dims(unsigned, axis + 1) >> shifts.reshape(shape) & np.uint32(2**bits - 1)
    merged = list(words.shape)
    merged[axis] *= len(shifts)
    values = parts.astype(jnp.float32).reshape(merged)
    return jax.lax.slice_in_dim(values, 0, count, axis=axis)


def grouped(
    q: jax.Array, zero: Any, scale: jax.Array, group: int, g_idx: jax.Array | None
) -> jax.Array:
    """``(q - zero) · scale`` for groups of columns.

    Args:
        q: numbers ``[out, in]``.
        zero: zero points ``[out, groups]``, or one number for all.
        scale: scales ``[out, groups]``.
        group: columns of a group.
        g_idx: the group of each column ``[in]``; None if groups are consecutive columns.
    """

    def each(a: jax.Array) -> jax.Array:
        if g_idx is not None:
            return jnp.take(a, g_idx, axis=1, mode="clip")
        return spread(a, (q.shape[0], q.shape[1]), (1, group))

    zero = each(zero) if isinstance(zero, jax.Array) else jnp.float32(zero)
    return (q - zero) * each(scale.astype(jnp.float32))


def pack_quantized(tensors: Tensors, shape: Shape, bits: int, group: int) -> jax.Array:
    """``pack-quantized`` of compressed-tensors: words along the columns, numbers offset by half their range.

    Args:
        tensors: ``weight_packed`` int32 ``[out, in · bits / 32]``, ``weight_scale`` ``[out, groups]``,
            and where they are used ``weight_zero_point`` int32 ``[out · bits / 32, groups]`` and
            ``weight_g_idx`` int32 ``[in]``.
    """
    half = 2 ** (bits - 1)
    q = unpacked(tensors["weight_packed"], bits, 1, shape[1])
    zero: Any = half
    if (words := tensors.get("weight_zero_point")) is not None:
        zero = unpacked(words, bits, 0, shape[0])
    return grouped(q, zero, tensors["weight_scale"], group, tensors.get("weight_g_idx"))


def gptq(
    tensors: Tensors, shape: Shape, bits: int, group: int, offset: int, ordered: bool
) -> jax.Array:
    """GPTQ: words along the columns of the transposed weight.

    Args:
        tensors: ``qweight`` int32 ``[in · bits / 32, out]``, ``qzeros`` int32
            ``[groups, out · bits / 32]``, ``scales`` ``[groups, out]``, ``g_idx`` int32 ``[in]``.
        offset: number added to the stored zero points: 1 in the first version of the format. The
            sum has as many bits as they have.
        ordered: whether ``g_idx`` is used, because columns were quantised in another order.

    Source: arXiv:2210.17323; ``qlinear`` of https://github.com/AutoGPTQ/AutoGPTQ.
    """
    # Words are transposed, which are fewer than the numbers in them.
    q = unpacked(tensors["qweight"].T, bits, 1, shape[1])
    zero = unpacked(tensors["qzeros"].T, bits, 0, shape[0])
    if offset:
        # AutoGPTQ's kernels differ in whether 2^bits is 0 then; it writes neither.
        zero = jnp.mod(zero + jnp.float32(offset), jnp.float32(2**bits))
    return grouped(q, zero, tensors["scales"].T, group, tensors["g_idx"] if ordered else None)


# Which column of eight each position of a word holds.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(tensors: Tensors, shape: Shape, group: int) -> jax.Array:
    """AWQ, ``gemm``: words of 8 numbers along the rows of the weight, in the order that its kernel wants.

    Args:
        tensors: ``qweight`` int32 ``[in, out / 8]``, ``qzeros`` int32 ``[groups, out / 8]``,
            ``scales`` ``[groups, out]``.

    Source: arXiv:2306.00978; https://github.com/casper-hansen/AutoAWQ.
    """
    q = unpacked(tensors["qweight"].T, 4, 0, shape[0], AWQ_ORDER)
    zero: Any = 8
    if (words := tensors.get("qzeros")) is not None:
        zero = unpacked(words.T, 4, 0, shape[0], AWQ_ORDER)
    return grouped(q, zero, tensors["scales"].T, group, None)


def bitsandbytes4(tensors: Tensors, shape: Shape, kind: str, size: int, nested: int) -> jax.Array:
    """``nf4`` and ``fp4`` of bitsandbytes: the weight as one row of numbers, in blocks.

    Args:
        tensors: ``weight`` uint8 ``[out · in / 2, 1]``, a byte being two numbers, the first in the
            high bits; ``weight.quant_map`` ``[16]``, their values; ``weight.absmax`` ``[blocks]``,
            the scales. These are numbers of 8 bits themselves if ``nested``: then
            ``weight.nested_quant_map`` ``[256]`` are their values, ``weight.nested_absmax`` their
            scales, and the settings begin with the number that is added.
        kind: "nf4" or "fp4".
        size: numbers of a block.
        nested: scales of a block of scales; 0: scales are floats.

    Source: arXiv:2305.14314; https://github.com/bitsandbytes-foundation/bitsandbytes.
    """
    count = shape[0] * shape[1]
    codes = tensors["weight"].reshape(-1)
    codes = jnp.stack([codes >> 4, codes & 15], -1).reshape(-1)
    values = jnp.take(
        tensors["weight.quant_map"].astype(jnp.float32),
        codes.astype(jnp.int32),
        axis=0,
        mode="clip",
    )
    scale = tensors["weight.absmax"]
    if nested:
        state = tensors[f"weight.quant_state.bitsandbytes__{kind}"]
        offset = jax.lax.bitcast_convert_type(state[:4], jnp.float32)
        levels = tensors["weight.nested_quant_map"].astype(jnp.float32)
        scale = jnp.take(levels, scale.astype(jnp.int32), axis=0, mode="clip") * _each(
            tensors["weight.nested_absmax"].astype(jnp.float32), nested, scale.shape[0]
        )
        scale = scale + offset
    return (values * _each(scale.astype(jnp.float32), size, count)).reshape(shape)


def _each(blocks: jax.Array, size: int, count: int) -> jax.Array:
    """One value for each of ``count`` elements in blocks of ``size``."""
    return jax.lax.slice_in_dim(jnp.repeat(blocks, size), 0, count)


def bitsandbytes8(tensors: Tensors, shape: Shape) -> jax.Array:
    """LLM.int8 of bitsandbytes: ``weight`` int8 ``[out, in]`` and ``SCB`` ``[out]``, the largest of a row.

    Source: arXiv:2208.07339.
    """
    scale = tensors["SCB"].astype(jnp.float32) / jnp.float32(127)
    return tensors["weight"].astype(jnp.float32) * scale[:, None]


def mxfp4(tensors: Tensors, shape: Shape) -> jax.Array:
    """MXFP4 as in gpt-oss: blocks of 32 columns, E2M1 numbers with an E8M0 scale.

    Args:
        tensors: ``blocks`` uint8 ``[..., out, in / 32, 16]``, a byte being two neighbours, the
            first in the low bits; ``scales`` uint8 ``[..., out, in / 32]``, exponents + 127.

    Source: OCP Microscaling Formats 1.0.
    """
    blocks = tensors["blocks"]
    q = jnp.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    values = jnp.take(jnp.asarray(E2M1), q.astype(jnp.int32), axis=0, mode="clip")
    # 2^(e - 127) as two factors that are normal numbers for every byte.
    e = tensors["scales"][..., None].astype(jnp.int32)
    values = values * _power((e >> 1) - 64) * _power(e - (e >> 1) - 63)
    return values.reshape(*blocks.shape[:-3], *shape)


def _power(e: jax.Array) -> jax.Array:
    """2^e for the exponents of normal numbers, made from the bits of a float32."""
    return jax.lax.bitcast_convert_type((e + 127) << 23, jnp.float32)


# The values of E2M1, by their four bits.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

FORMATS: dict[str, Callable[..., Any]] = {
    "scaled": scaled,
    "pack_quantized": pack_quantized,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes4": bitsandbytes4,
    "bitsandbytes8": bitsandbytes8,
    "mxfp4": mxfp4,
}


@dataclasses.dataclass(frozen=True)
class QuantTensor:
    """One of the tensors of a quantised weight.

    Attributes:
        name: name in the file, after the name of the layer.
        dtype: element type in the file.
        shape: shape in the file.
        axes: for each axis, the axis of the weight ``[out, in]`` that it runs along; None for an
            axis that a mesh does not split.
        form: what a file holds in its place; None: the tensor itself.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    form: Consecutive | Exactly | QuantState | None = None

    @property
    def has_bits(self) -> bool:
        """Whether its elements are floats of 8 bits."""
        return self.dtype.is_float() and self.dtype.size_in_bits == 8

    @property
    def attribute(self) -> str:
        """The attribute of a QuantizedLinear that holds it; ``weight`` is the dequantised one.

        Example:
            >>> QuantTensor("weight.absmax", DType.uint8, (4,), (0,)).attribute
            'weight_absmax'
        """
        return "codes" if self.name == "weight" else self.name.replace(".", "_")


@dataclasses.dataclass(frozen=True)
class QuantLayout:
    """The layout of a quantised weight ``[out_dim, in_dim]``.

    Attributes:
        format: name of the format, a key of ``formats.FORMATS``.
        out_dim, in_dim: shape of the weight.
        tensors: the tensors that it is stored as; the first has the numbers, integers or floats of
            8 bits.
        options: settings of the format that are not seen in the tensors, as (name, value).

    Example:
        >>> import jax.numpy as jnp
        >>> tensors = (QuantTensor("weight", DType.int8, (2, 3), (0, 1)),
        ...            QuantTensor("weight_scale", DType.float32, (2, 1), (0, None)))
        >>> layout = QuantLayout("scaled", 2, 3, tensors)
        >>> layout.dequantise({"weight": jnp.ones((2, 3), jnp.int8), "weight_scale": jnp.full((2, 1), 0.5)})[0]
        Array([0.5, 0.5, 0.5], dtype=float32)
    """

    format: str
    out_dim: int
    in_dim: int
    tensors: tuple[QuantTensor, ...]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight."""
        return self.out_dim, self.in_dim

    def dequantise(self, tensors: Mapping[str, jax.Array]) -> jax.Array:
        """The weight in float32 ``[out_dim, in_dim]``, from its tensors by name.

        Args:
            tensors: the tensors; floats of 8 bits may also be their bits, uint8.
        """
        found = dict(tensors)
        for one in self.tensors:
            if one.has_bits and found[one.name].dtype == jnp.uint8:
                found[one.name] = jax.lax.bitcast_convert_type(found[one.name], one.dtype.np)
        return FORMATS[self.format](found, self.shape, **dict(self.options))

    def split(self, axis: int, entries: Mapping[str, Sequence[tuple[str, ...]]]) -> tuple[str, ...]:
        """The mesh axes that an axis of the weight is split over.

        Args:
            entries: for each tensor, the mesh axes that each of its axes is split over.
        """
        for one in self.tensors:
            for along, names in zip(one.axes, entries[one.name], strict=False):
                if along == axis and names:
                    return names
        return ()

    def rules(self) -> dict[str, PartOf]:
        """The sharding rule of each tensor, by the attribute that holds it."""
        return {one.attribute: PartOf("weight", self.shape, one.axes) for one in self.tensors}
