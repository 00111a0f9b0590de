"""The formats of quantised weights: each computes a weight in float32 from the tensors that store it.

A format is a function of the tensors by name, of the weight's shape ``[out, in]`` and of further settings;
``FORMATS`` is the table of these functions. They use ``jax.numpy`` only. A QuantLayout lists the tensors of one
weight, and has the format and settings to compute the weight from them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dtype import DType

Tensors = Mapping[str, jax.Array]
Shape = tuple[int, int]


def spread(blocks: jax.Array, shape: Shape, sizes: Shape | None = None) -> jax.Array:
    """Repeats the values of a weight's blocks, so that the result has or broadcasts to the weight's shape.

    Args:
        blocks: values ``[]`` or ``[1]`` for the whole weight, ``[out]`` for its rows, or a matrix of values.
        shape: shape of the weight.
        sizes: shape of a block; by default the weight's shape divided by that of ``blocks``, rounded up. The
            last blocks of an axis may be incomplete.

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
    """Converts numbers to float32. For 8-bit floats on CPUs it uses their bits: XLA emulates this cast there.

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
    # A float8_e5m2 is the high byte of a float16.
    return jax.lax.bitcast_convert_type(bits << 8, jnp.float16).astype(jnp.float32)


def _e4m3(values: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    # The exponents of e4m3 fit into those of a float16, where its subnormal numbers are subnormal too.
    half = jax.lax.bitcast_convert_type((bits & 128) << 8 | (bits & 127) << 7, jnp.float16)
    nan = jnp.float32(jnp.nan)
    return jnp.where((bits & 127) == 127, nan, half.astype(jnp.float32) * jnp.float32(256))


def scaled(
    tensors: Tensors, shape: Shape, scale: str = "weight_scale", block: Shape | None = None
) -> jax.Array:
    """``weight · scale``: 8-bit floats or int8, with scales.

    Args:
        tensors: ``weight`` ``[out, in]``, the scales under the name ``scale``, and, if the format
            is not symmetric, ``weight_zero_point``, which is subtracted first.
        scale: name of the tensor of scales: one for the weight, one for each row, or one for each block.
        block: shape of a block, if there is a scale for each block.
    """
    values = floats(tensors["weight"])
    if (zero := tensors.get("weight_zero_point")) is not None:
        values = values - spread(zero.astype(jnp.float32), shape, block)
    return values * spread(tensors[scale].astype(jnp.float32), shape, block)


def unpacked(
    words: jax.Array, bits: int, axis: int, count: int, order: Sequence[int] | None = None
) -> jax.Array:
    """Unpacks the numbers in 32-bit words along an axis; the lowest bits of a word hold the first number.

    Args:
        words: array of int32.
        bits: number of bits of a number; a word holds as many complete numbers as fit.
        axis: axis along which a word holds consecutive numbers.
        count: number of numbers along the axis; the last word may hold fewer.
        order: for each position in a word, the index of the number that it holds; None means 0, 1, 2, ….

    Returns:
        The unsigned numbers in float32, with ``count`` along the axis.

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
        q: unpacked numbers ``[out, in]``.
        zero: zero points ``[out, groups]``, or one number for all groups.
        scale: scales ``[out, groups]``.
        group: number of columns in a group.
        g_idx: index of the group of each column ``[in]``; None if groups are consecutive columns.
    """

    def each(a: jax.Array) -> jax.Array:
        if g_idx is not None:
            return jnp.take(a, g_idx, axis=1, mode="clip")
        return spread(a, (q.shape[0], q.shape[1]), (1, group))

    zero = each(zero) if isinstance(zero, jax.Array) else jnp.float32(zero)
    return (q - zero) * each(scale.astype(jnp.float32))


def pack_quantized(tensors: Tensors, shape: Shape, bits: int, group: int) -> jax.Array:
    """``pack-quantized`` of compressed-tensors: words hold consecutive columns, and the zero point is 2^(bits - 1).

    Args:
        tensors: ``weight_packed`` int32 ``[out, in · bits / 32]``, ``weight_scale`` ``[out, groups]``,
            and optionally ``weight_zero_point`` int32 ``[out · bits / 32, groups]``, which replaces the zero
            point, and ``weight_g_idx`` int32 ``[in]``.
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
    """GPTQ: the weight is stored transposed, and words hold consecutive inputs.

    Args:
        tensors: ``qweight`` int32 ``[in · bits / 32, out]``, ``qzeros`` int32
            ``[groups, out · bits / 32]``, ``scales`` ``[groups, out]``, ``g_idx`` int32 ``[in]``.
        offset: number added to the stored zero points, modulo 2^bits: 1 in the first version of
            the format.
        ordered: whether ``g_idx`` is used, because columns were quantised in another order.

    Source: arXiv:2210.17323; ``qlinear`` of https://github.com/AutoGPTQ/AutoGPTQ.
    """
    # The words are transposed, not the numbers, because there are fewer words.
    q = unpacked(tensors["qweight"].T, bits, 1, shape[1])
    zero = unpacked(tensors["qzeros"].T, bits, 0, shape[0])
    if offset:
        # AutoGPTQ's kernels disagree on whether a sum of 2^bits is 0; AutoGPTQ never writes such zero points.
        zero = jnp.mod(zero + jnp.float32(offset), jnp.float32(2**bits))
    return grouped(q, zero, tensors["scales"].T, group, tensors["g_idx"] if ordered else None)


# For each position in a word, the index of the number that it holds.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(tensors: Tensors, shape: Shape, group: int) -> jax.Array:
    """AWQ, ``gemm``: the weight is stored transposed, and a word holds 8 outputs in the order of AWQ's kernel.

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


def mlx(tensors: Tensors, shape: Shape, bits: int, group: int) -> jax.Array:
    """``affine`` of MLX: ``q · scale + bias`` for groups of columns.

    Args:
        tensors: ``weight`` uint32 ``[out, in · bits / 32]``, whose words hold consecutive columns, and
            ``scales`` and ``biases`` ``[out, in / group]``.

    Source: ``mlx.core.quantize`` in MLX's documentation.
    """
    q = unpacked(tensors["weight"], bits, 1, shape[1])
    scale, bias = (
        spread(tensors[name].astype(jnp.float32), shape, (1, group))
        for name in ("scales", "biases")
    )
    return q * scale + bias


def bitsandbytes4(tensors: Tensors, shape: Shape, kind: str, size: int, nested: int) -> jax.Array:
    """``nf4`` and ``fp4`` of bitsandbytes: the weight is flattened and quantised in blocks.

    Args:
        tensors: ``weight`` uint8 ``[out · in / 2, 1]``, two numbers in a byte, the first in the
            high bits; ``weight.quant_map`` ``[16]``, the values of the 16 codes; ``weight.absmax``
            ``[blocks]``, the scales; or, if no block is in two rows, ``weight`` ``[out, in / 2]`` and
            ``weight.absmax`` ``[out, in / size]``. If ``nested``, the scales are 8-bit codes too:
            ``weight.nested_quant_map`` ``[256]`` has their values, ``weight.nested_absmax`` their
            scales, and the first four bytes of the settings the float32 that is added to them.
        kind: "nf4" or "fp4".
        size: number of weights in a block.
        nested: number of scales in a block of scales; 0 if scales are floats.

    Source: arXiv:2305.14314; https://github.com/bitsandbytes-foundation/bitsandbytes.
    """
    count = shape[0] * shape[1]
    codes, scale = tensors["weight"], tensors["weight.absmax"]
    codes = jnp.stack([codes >> 4, codes & 15], -1)
    values = _looked_up(tensors["weight.quant_map"], codes)
    if nested:
        state = tensors[f"weight.quant_state.bitsandbytes__{kind}"]
        offset = jax.lax.bitcast_convert_type(state[:4], jnp.float32)
        of_scales = tensors["weight.nested_absmax"].astype(jnp.float32)
        levels = _looked_up(tensors["weight.nested_quant_map"], scale)
        scale = levels * _each(of_scales, nested, scale.size).reshape(scale.shape) + offset
    scale = scale.astype(jnp.float32)
    if scale.ndim == 2:
        return values.reshape(shape) * spread(scale, shape, (1, size))
    return (values.reshape(-1) * _each(scale, size, count)).reshape(shape)


def _looked_up(levels: Any, codes: jax.Array) -> jax.Array:
    """The values of codes in float32; a code beyond the table means its last value."""
    table = jnp.asarray(levels).astype(jnp.float32)
    return jnp.take(table, codes.astype(jnp.int32), axis=0, mode="clip")


def _each(blocks: jax.Array, size: int, count: int) -> jax.Array:
    """Repeats the values of blocks of ``size`` elements, so that there is one for each of ``count`` elements."""
    return jax.lax.slice_in_dim(jnp.repeat(blocks, size), 0, count)


def bitsandbytes8(tensors: Tensors, shape: Shape) -> jax.Array:
    """LLM.int8 of bitsandbytes: ``weight`` int8 ``[out, in]``, and ``SCB`` ``[out]``, the largest magnitude of a row.

    Source: arXiv:2208.07339.
    """
    scale = tensors["SCB"].astype(jnp.float32) / jnp.float32(127)
    return tensors["weight"].astype(jnp.float32) * scale[:, None]


def mxfp4(tensors: Tensors, shape: Shape) -> jax.Array:
    """MXFP4 as in gpt-oss: blocks of 32 columns, E2M1 numbers with an E8M0 scale.

    Args:
        tensors: ``blocks`` uint8 ``[..., out, in / 32, 16]``, two neighbouring numbers in a byte, the
            first in the low bits; ``scales`` uint8 ``[..., out, in / 32]``, exponents + 127.

    Source: OCP Microscaling Formats 1.0.
    """
    blocks = tensors["blocks"]
    q = jnp.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    values = _looked_up(E2M1, q)
    # 2^(e - 127) as the product of two factors that are normal numbers for every e.
    e = tensors["scales"][..., None].astype(jnp.int32)
    values = values * _power((e >> 1) - 64) * _power(e - (e >> 1) - 63)
    return values.reshape(*blocks.shape[:-3], *shape)


def nvfp4(tensors: Tensors, shape: Shape, weight: str, second: str, divides: bool) -> jax.Array:
    """NVFP4: blocks of 16 columns, E2M1 numbers with an e4m3 scale, and one more scale for all blocks.

    Args:
        tensors: ``weight`` uint8 ``[out, in / 2]``, two neighbouring numbers in a byte, the first in the low
            bits; ``weight_scale`` float8_e4m3fn ``[out, in / 16]``; ``second``, a float32.
        weight, second: names of the numbers and of the scale of all blocks.
        divides: whether blocks' scales are divided by ``second``, and not multiplied by it.

    Source: https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference.
    """
    codes = tensors[weight]
    codes = jnp.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    values = jax.lax.slice_in_dim(_looked_up(E2M1, codes), 0, shape[1], axis=1)
    scale, whole = floats(tensors["weight_scale"]), tensors[second].astype(jnp.float32).reshape(())
    scale = scale / whole if divides else scale * whole
    return values * spread(scale, shape, (1, 16))


def bitnet(tensors: Tensors, shape: Shape, divides: bool) -> jax.Array:
    """BitNet b1.58: -1, 0 and 1, with one scale for the weight.

    Args:
        tensors: ``weight`` uint8 ``[out / 4, in]``, whose bits 2i and 2i + 1 hold the i-th quarter of the rows,
            as numbers from 0 to 2; or the numbers from -1 to 1 themselves, floats ``[out, in]``.
            ``weight_scale`` ``[1]``.
        divides: whether the numbers are divided by the scale, and not multiplied by it.

    Source: arXiv:2402.17764; ``integrations/bitnet.py`` of transformers.
    """
    values, scale = tensors["weight"], tensors["weight_scale"].astype(jnp.float32).reshape(1, 1)
    if values.dtype == jnp.uint8:
        values = jnp.concatenate([(values >> shift) & 3 for shift in (0, 2, 4, 6)])
        values = values.astype(jnp.float32) - 1
    values = values.astype(jnp.float32)
    return values / scale if divides else values * scale


def ternary(tensors: Tensors, shape: Shape) -> jax.Array:
    """Round a weight of floats to -1, 0 and 1 times the mean of its magnitudes, as BitNet b1.58 is trained.

    Args:
        tensors: ``weight`` ``[out, in]``.

    Source: arXiv:2402.17764, section 2; ``integrations/bitnet.py`` of transformers.
    """
    values = tensors["weight"].astype(jnp.float32)
    scale = 1 / jnp.maximum(jnp.mean(jnp.abs(values)), 1e-5)
    rounded = jnp.clip(jnp.round(values * scale), -1, 1) / scale
    return rounded.astype(tensors["weight"].dtype).astype(jnp.float32)


def _power(e: jax.Array) -> jax.Array:
    """2^e in float32 for exponents of normal numbers, made by setting the exponent's bits."""
    return jax.lax.bitcast_convert_type((e + 127) << 23, jnp.float32)


# The values of E2M1, indexed by their four bits.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

FORMATS: dict[str, Callable[..., Any]] = {
    "scaled": scaled,
    "pack_quantized": pack_quantized,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes4": bitsandbytes4,
    "bitsandbytes8": bitsandbytes8,
    "mxfp4": mxfp4,
    "mlx": mlx,
    "nvfp4": nvfp4,
    "bitnet": bitnet,
    "ternary": ternary,
}


@jax.custom_jvp
def rounded_tokens(x: jax.Array) -> jax.Array:
    """Round the features of each token to 255 multiples of 1/127 of the largest magnitude, and at least 1e-5.

    The gradient passes through unchanged.

    Args:
        x: floats ``[..., features]``.

    Source: arXiv:2402.17764, section 2; ``ActQuant`` in ``integrations/bitnet.py`` of transformers.

    Example:
        >>> rounded_tokens(jnp.array([[127.0, 2.4, -0.6]])).tolist()
        [[127.0, 2.0, -1.0]]
    """
    wide = x.astype(jnp.float32)
    scale = 127 / jnp.maximum(jnp.max(jnp.abs(wide), axis=-1, keepdims=True), 1e-5)
    return (jnp.clip(jnp.round(wide * scale), -128, 127) / scale).astype(x.dtype)


@rounded_tokens.defjvp
def _straight_through(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return rounded_tokens(*primals), tangents[0]


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"int8 of each token": rounded_tokens}


@dataclasses.dataclass(frozen=True)
class QuantTensor:
    """One of the tensors of a quantised weight.

    Attributes:
        name: name in the file, without the prefix of the layer's name.
        dtype: element type in the file.
        shape: shape in the file, or that which a form makes of it.
        axes: for each axis, the axis of the weight ``[out, in]`` that it runs along; None for an
            axis that a mesh does not split.
        form: FileForm that checks or converts what a file holds; None if the file holds the tensor itself.
        is_whole: whether each device holds all of it, and uses the part that the axes say.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    form: Any = None
    is_whole: bool = False

    @property
    def has_bits(self) -> bool:
        """Whether the elements are 8-bit floats, which a Weight holds as their bits (uint8)."""
        return self.dtype.is_float() and self.dtype.size_in_bits == 8

    @property
    def attribute(self) -> str:
        """The attribute of a QuantizedLinear that holds the tensor; ``weight`` is the dequantised weight.

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
        tensors: the tensors that store the weight; the first has the quantised numbers: integers, 8-bit
            floats, or floats that are rounded in each call.
        options: settings of the format that do not follow from the tensors, as (name, value).
        activations: how the layer rounds its input, a key of ``formats.ACTIVATIONS``; None: not at all.

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
    activations: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight."""
        return self.out_dim, self.in_dim

    @property
    def is_ordered(self) -> bool:
        """Whether ``g_idx`` says which columns are in a group; otherwise groups are consecutive columns."""
        names = [one.name for one in self.tensors]
        return bool(dict(self.options).get("ordered")) or "weight_g_idx" in names

    def of_part(self, tensors: Mapping[str, Any]) -> QuantLayout:
        """The layout of the part of the weight that one device holds.

        Args:
            tensors: the device's part of each tensor, by name; leading axes are those of stacked weights.

        Example:
            >>> tensors = (QuantTensor("weight", DType.int8, (4, 3), (0, 1)),)
            >>> layout = QuantLayout("scaled", 4, 3, tensors)
            >>> layout.of_part({"weight": jax.ShapeDtypeStruct((8, 2, 3), jnp.int8)}).shape
            (2, 3)
        """
        sizes, parts = list(self.shape), []
        for one in self.tensors:
            shape = tensors[one.name].shape
            own = tuple(shape[len(shape) - len(one.axes) :])
            for along, whole, part in zip(one.axes, one.shape, own, strict=True):
                if along is not None and part != whole:
                    sizes[along] = self.shape[along] * part // whole
            parts.append(dataclasses.replace(one, shape=own))
        out, inner = sizes
        return dataclasses.replace(self, out_dim=out, in_dim=inner, tensors=tuple(parts))

    def stacks(self, tensors: Mapping[str, jax.Array], places: Any) -> tuple[dict[str, Any], Any]:
        """The tensors, each with one leading axis, and the index of each in it.

        Args:
            tensors: the tensors by name, some with a leading axis.
            places: index of each tensor that has one, int32 ``[tensors]``, or one index for all.
        """
        known = [tensors[one.name].ndim > len(one.axes) for one in self.tensors]
        found = {
            one.name: tensors[one.name] if is_stack else tensors[one.name][None]
            for one, is_stack in zip(self.tensors, known, strict=True)
        }
        return found, jnp.where(jnp.array(known), jnp.asarray(places, jnp.int32), 0)

    def divides(self, along: int, parts: int) -> bool:
        """Whether equal parts along an axis can be dequantised by themselves, perhaps with finer blocks.

        Example:
            >>> layout = QuantLayout("scaled", 256, 192, (), (("block", (128, 128)),))
            >>> layout.divides(1, 2), layout.divides(1, 5)
            (True, False)
        """
        size, unit = self.shape[along], self.unit(along)
        if parts == 1:
            return True
        return size % parts == 0 and math.gcd(self.block(along), size // parts) % unit == 0

    def unit(self, along: int) -> int:
        """The least number of neighbouring rows (or columns) that can be dequantised by themselves; perhaps all."""
        options: dict[str, Any] = dict(self.options)
        words, size = 32 // options.get("bits", 4), self.shape[along]
        if self.format in ("ternary", "mxfp4"):
            return size
        if self.format == "bitsandbytes4":
            block = options["size"] * max(1, options["nested"])
            if not options["nested"] and self.in_dim % block == 0:
                return (1, block)[along]
            return size if along else block // math.gcd(block, self.in_dim)
        whole = {"nvfp4": 16, "bitnet": 1, "bitsandbytes8": 1, "scaled": 1}
        columns = whole[self.format] if self.format in whole else words
        # Zero points of several rows are in a word.
        rows = words if self.format in ("pack_quantized", "gptq", "awq") else 1
        return columns if along else rows

    def block(self, along: int) -> int:
        """The number of neighbouring rows (or columns) with one scale; all of them, if any part has its scales."""
        options: dict[str, Any] = dict(self.options)
        size = self.shape[along]
        if self.format == "scaled":
            return min((options.get("block") or self.shape)[along], size)
        if not along or self.is_ordered:
            return size
        return min(options.get("group", size), size)

    def with_block(self, along: int, size: int) -> QuantLayout:
        """A layout with another number of rows (or columns) in a block."""
        options: dict[str, Any] = dict(self.options)
        if self.format == "scaled":
            sizes = list(options["block"])
            sizes[along] = size
            options["block"] = tuple(sizes)
        else:
            options["group"] = size
        return dataclasses.replace(self, options=tuple(options.items()))

    def dequantise(self, tensors: Mapping[str, jax.Array]) -> jax.Array:
        """The weight in float32 ``[out_dim, in_dim]``, from its tensors by name.

        Args:
            tensors: the tensors by name; 8-bit floats may also be given as their bits, uint8.
        """
        found = dict(tensors)
        for one in self.tensors:
            if one.has_bits and found[one.name].dtype == jnp.uint8:
                found[one.name] = jax.lax.bitcast_convert_type(found[one.name], one.dtype.np)
        return FORMATS[self.format](found, self.shape, **dict(self.options))

    def rounded(self, x: jax.Array) -> jax.Array:
        """The input of the layer ``[..., in_dim]``, rounded as the format says."""
        return x if self.activations is None else ACTIVATIONS[self.activations](x)

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
