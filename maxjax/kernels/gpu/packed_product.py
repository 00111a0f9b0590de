"""Products with weights in ggml's blocks on NVIDIA GPUs: kernels in Pallas for Triton.

Both take the stack of all layers and the number of a layer, so that nothing is copied out of it, and
dequantise in registers. For few tokens a program reads some rows of the weight once, in order, and
sums in float32 without rounding a weight. For more it multiplies a tile of dequantised weights, in
the dtype of the activations, by a tile of tokens.

A block is read in units of W neighbouring bytes of packed weights, with the scales that belong to them.

Shapes of what a program has in registers: R rows of the weight, N units of each, W bytes of a unit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..blocks import decoder_of
from ..pallas import result
from .triton import FLOATS, dot, power, too_many

# The most tokens for which each weight is multiplied by itself, instead of in tiles.
FEW = 4
# What a program for few tokens reads at a time: rows, and bytes of them all.
_ROWS, _BYTES = 4, 2048
# As many programs fill a GPU: four for each of the 132 multiprocessors of an H100 or H200.
_PROGRAMS = 528
# 2^23 as bits of a float32: its last bits hold an integer.
_INTEGER, _OFFSET = 0x4B000000, 8388608.0


class ProductTiles(NamedTuple):
    """Sizes that a kernel is compiled for.

    Attributes:
        rows: number of rows of the weight of a program.
        tokens: number of tokens of a program.
        units: number of units of each row that it reads at a time.
        warps: number of warps of a program.
    """

    rows: int
    tokens: int
    units: int
    warps: int


def lacks(encoding: str, dtype: Any, x: Any, blocks: Any) -> str:
    """Why no kernel can compute it, for operands on one device; "" if a GPU can.

    Args:
        encoding: name of the encoding.
        dtype: dtype of the result.
        x: activations ``[..., in]``.
        blocks: ``[out, bytes]`` or ``[n, out, bytes]``.

    Example:
        >>> shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)
        >>> lacks("Q8_0", jnp.float64, shape(jnp.float64, 1, 64), shape(jnp.uint8, 9, 68))
        'activations are float64 and results float64'
    """
    if encoding not in _UNITS:
        return f"weights are in {encoding}"
    if x.dtype not in FLOATS or np.dtype(dtype) not in FLOATS:
        return f"activations are {x.dtype} and results {np.dtype(dtype)}"
    if 0 in x.shape:
        return "there are no numbers"
    tokens = math.prod(x.shape[:-1])
    if x.dtype == jnp.float32 and tokens > FEW:
        # With all their digits they do not use the tensor cores of Triton.
        return f"activations of {tokens} tokens are float32, more than {FEW}"
    return too_many(blocks)


def kernel(
    encoding: str,
    dtype: Any,
    x: jax.Array,
    blocks: jax.Array,
    layer: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """The product ``[..., out]``.

    Args:
        encoding: name of the encoding.
        dtype: dtype of the result.
        x: activations ``[..., in]``.
        blocks: ``[out, bytes]`` or ``[n, out, bytes]``.
        layer: index of the weight in a stack.
        interpret: whether to run the kernel's operations one by one, on any platform.
    """
    if blocks.ndim == 2:
        blocks, layer = blocks[None], jnp.zeros_like(layer)
    tokens = x.reshape(-1, x.shape[-1])
    size = tiles(encoding, tokens.shape[0], tokens.shape[1], blocks.shape[1])
    call = _call(encoding, np.dtype(dtype), size, interpret)
    return call(layer.reshape(1), tokens, blocks).reshape(*x.shape[:-1], blocks.shape[1])


def tiles(encoding: str, tokens: int, depth: int, rows: int) -> ProductTiles:
    """The sizes for so many tokens and a weight ``[rows, depth]``.

    Example:
        >>> tiles("Q4_K", 1, 4096, 4096)
        ProductTiles(rows=4, tokens=1, units=16, warps=4)
        >>> tiles("Q8_0", 512, 4096, 4096)
        ProductTiles(rows=64, tokens=128, units=2, warps=4)
    """
    unit = _UNITS[encoding]
    if tokens > FEW:
        return ProductTiles(64, min(128, power(tokens)), 64 // unit.width, 4)
    count = depth // decoder_of(encoding).elements * unit.count
    each = max(n for n in (1, 2, _ROWS) if n == 1 or n * _PROGRAMS <= rows)
    most = min(_BYTES // each // unit.width, 1 << (count - 1).bit_length())
    # A power of two that divides the number of units, if there is one that is not small.
    fitting = min(most, count & -count)
    return ProductTiles(each, tokens, fitting if fitting * 8 >= most else most, 4)


@functools.lru_cache(maxsize=256)
def _call(encoding: str, dtype: np.dtype, size: ProductTiles, interpret: bool) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    def call(layer: Any, x: Any, blocks: Any) -> Any:
        tokens, rows = x.shape[0], blocks.shape[1]
        few = tokens <= FEW
        grid = (-(-tokens // size.tokens), -(-rows // size.rows))
        return pl.pallas_call(
            functools.partial(_few if few else _many, encoding, size, x.shape, rows),
            grid=grid[1:] if few else grid,
            out_shape=result((tokens, rows), x, dtype),
            compiler_params=triton.CompilerParams(num_warps=size.warps, num_stages=2),
            interpret=interpret,
            name="maxjax_packed_matmul",
        )(layer, x, blocks)

    return call


def _few(
    encoding: str,
    size: ProductTiles,
    shape: Any,
    rows: int,
    layer: Any,
    x: Any,
    blocks: Any,
    out: Any,
) -> None:
    """One program: some rows of the weight, all tokens."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    row = pl.program_id(0) * size.rows + jnp.arange(size.rows, dtype=jnp.int32)
    column = jnp.arange(_UNITS[encoding].width, dtype=jnp.int32)
    count = _count(encoding, shape[1])
    where = blocks, layer[0], jnp.minimum(row, rows - 1)
    read = functools.partial(_Units, encoding, count, count % size.units > 0, *where)

    def step(i: Any, sums: Any) -> Any:
        units = read(i * size.units + jnp.arange(size.units, dtype=jnp.int32))
        sums = list(sums)
        for first, values in _UNITS[encoding].parts(units):
            place = (units.element + first)[:, None] + column[None, :]  # [N, W]
            for token in range(size.tokens):
                numbers = units.load(x.at[token, place], (slice(None), None))
                sums[token] = sums[token] + values * numbers.astype(jnp.float32)[None]
        return tuple(sums)

    zeros = jnp.zeros((size.rows, size.units, column.size), jnp.float32)
    sums = jax.lax.fori_loop(0, -(-count // size.units), step, (zeros,) * size.tokens)
    for token, found in enumerate(sums):
        total = jnp.sum(jnp.sum(found, axis=2), axis=1)
        triton.store(out.at[token, row], total.astype(out.dtype), mask=row < rows)


def _many(
    encoding: str,
    size: ProductTiles,
    shape: Any,
    rows: int,
    layer: Any,
    x: Any,
    blocks: Any,
    out: Any,
) -> None:
    """One program: a tile of rows of the weight, and one of tokens."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, depth = shape
    token = pl.program_id(0) * size.tokens + jnp.arange(size.tokens, dtype=jnp.int32)
    row = pl.program_id(1) * size.rows + jnp.arange(size.rows, dtype=jnp.int32)
    own = jnp.minimum(token, tokens - 1)
    width, count = _UNITS[encoding].width, _count(encoding, depth)
    column = jnp.arange(size.units * width, dtype=jnp.int32)
    of_unit, column = jax.lax.div(column, width), jax.lax.rem(column, width)
    where = blocks, layer[0], jnp.minimum(row, rows - 1)
    read = functools.partial(_Units, encoding, count, count % size.units > 0, *where)

    def step(i: Any, sums: Any) -> Any:
        units = read(i * size.units + jnp.arange(size.units, dtype=jnp.int32))
        flat = read(i * size.units + of_unit)  # the same units, each W times
        for first, values in _UNITS[encoding].parts(units):
            weights = values.astype(x.dtype).reshape(size.rows, size.units * width)
            place = x.at[own[:, None], (flat.element + first + column)[None, :]]
            numbers = flat.load(place, (None, slice(None)))
            sums = sums + dot(weights, numbers.T)  # [R, tokens]
        return sums

    zeros = jnp.zeros((size.rows, size.tokens), jnp.float32)
    sums = jax.lax.fori_loop(0, -(-count // size.units), step, zeros)
    inside = (token < tokens)[:, None] & (row < rows)[None, :]
    triton.store(out.at[token[:, None], row[None, :]], sums.T.astype(out.dtype), mask=inside)


# --- blocks -------------------------------------------------------------------------------


class _Units:
    """Units of the blocks of some rows, in the memory of a GPU; after the last one there are zeros.

    Attributes:
        number: index of each unit in its block.
        element: index of its first weight in the row.
    """

    def __init__(
        self, encoding: str, count: int, ragged: bool, array: Any, layer: Any, row: Any, unit: Any
    ):
        self.array, self.layer, self.row = array, layer, row
        found, decoder = _UNITS[encoding], decoder_of(encoding)
        block, self.number = jax.lax.div(unit, found.count), jax.lax.rem(unit, found.count)
        self.start = block * decoder.nbytes
        self.element = block * decoder.elements + found.first(self.number)
        # No mask where there is no unit too many, so that loads stay wide.
        self.there = unit < count if ragged else None

    def load(self, place: Any, axes: Any) -> Any:
        from jax.experimental.pallas import triton

        if self.there is None:
            return triton.load(place)
        return triton.load(place, mask=self.there[axes], other=0)

    def byte(self, at: Any) -> Any:
        """The byte at a place of each unit's block, int32 ``[R, N]``."""
        place = self.array.at[self.layer, self.row[:, None], (self.start + at)[None, :]]
        return self.load(place, (None, slice(None))).astype(jnp.int32)

    def bytes(self, at: Any, width: int) -> Any:
        """Neighbouring bytes of each unit's block, int32 ``[R, N, width]``."""
        columns = (self.start + at)[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        place = self.array.at[self.layer, self.row[:, None, None], columns[None]]
        return self.load(place, (None, slice(None), None)).astype(jnp.int32)

    def half(self, at: int) -> Any:
        """The float16 at a place of each unit's block, as float32 ``[R, N, 1]``."""
        bits = self.byte(at) | self.byte(at + 1) << 8
        half = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
        return half.astype(jnp.float32)[:, :, None]


def _float(bits: Any) -> Any:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _number(q: Any, less: int = 0) -> Any:
    """``q - less`` as float32, for integers ``0 ≤ q < 2^23``: cheaper than a conversion."""
    return _float(q | _INTEGER) - jnp.float32(_OFFSET + less)


Parts = Iterator[tuple[int, Any]]


def _q8_0(units: _Units) -> Parts:
    yield 0, units.half(0) * _number(units.bytes(2, 32) ^ 128, 128)


def _q4_0(units: _Units) -> Parts:
    scale, packed = units.half(0), units.bytes(2, 16)
    yield 0, scale * _number(packed & 15, 8)
    yield 16, scale * _number(packed >> 4, 8)


def _mxfp4(units: _Units) -> Parts:
    e = units.byte(0)
    # 2^(e - 128) as two factors, neither of which is subnormal.
    scales = [_float((part + 63) << 23)[:, :, None] for part in (e >> 1, e - (e >> 1))]
    packed = units.bytes(1, 16)
    for first, q in ((0, packed & 15), (16, packed >> 4)):
        size = q & 7
        # Four times the value of E2M1.
        four = jnp.where(size < 2, 2 * size, ((size & 1) | 2) << (size >> 1))
        values = _number(four) * jnp.float32(0.5)
        yield first, jnp.where(q > 7, -values, values) * scales[0] * scales[1]


def _two_groups(units: _Units) -> list[tuple[Any, Any]]:
    """Scale and minimum of the two groups of a unit of Q4_K or Q5_K, ``[R, N, 1]`` each."""
    d, least = units.half(0), units.half(2)
    found = []
    for j in (2 * units.number, 2 * units.number + 1):
        a, b, c = (units.byte(first + (j & 3)) for first in (4, 8, 12))
        early = (j < 4)[None, :]
        scale = jnp.where(early, a & 63, (c & 15) | (a >> 6 << 4))
        minimum = jnp.where(early, b & 63, (c >> 4) | (b >> 6 << 4))
        found.append((d * _number(scale)[:, :, None], least * _number(minimum)[:, :, None]))
    return found


def _q4_k(units: _Units) -> Parts:
    packed = units.bytes(16 + 32 * units.number, 32)
    for i, (scale, minimum) in enumerate(_two_groups(units)):
        yield 32 * i, scale * _number((packed >> 4 * i) & 15) - minimum


def _q5_k(units: _Units) -> Parts:
    packed, high = units.bytes(48 + 32 * units.number, 32), units.bytes(16, 32)
    high = high >> (2 * units.number)[None, :, None]
    for i, (scale, minimum) in enumerate(_two_groups(units)):
        q = ((packed >> 4 * i) & 15) | ((high >> i) & 1) << 4
        yield 32 * i, scale * _number(q) - minimum


def _q6_k(units: _Units) -> Parts:
    # Each half of a block has four parts of 32 weights, of which a unit has 16 each.
    half, second = units.number >> 1, units.number & 1
    d = units.half(208)
    low = [units.bytes(64 * half + 16 * second + 32 * i, 16) for i in range(2)]
    high = units.bytes(128 + 32 * half + 16 * second, 16)
    for i in range(4):
        scale = _number(units.byte(192 + 8 * half + second + 2 * i) ^ 128, 128)
        q = ((low[i % 2] >> 4 * (i // 2)) & 15) | ((high >> 2 * i) & 3) << 4
        yield 32 * i, d * scale[:, :, None] * _number(q, 32)


class _Unit(NamedTuple):
    """How the blocks of an encoding are read.

    Attributes:
        count: number of units of a block.
        width: W, the number of bytes that give neighbouring weights.
        parts: of units the weights, float32 ``[R, N, W]`` each, with the place of the first in its unit.
        first: index in the block of the first weight of a unit, by the index of the unit.
    """

    count: int
    width: int
    parts: Callable[[_Units], Parts]
    first: Callable[[Any], Any]


_UNITS = {
    "Q4_0": _Unit(1, 16, _q4_0, lambda i: i),
    "Q8_0": _Unit(1, 32, _q8_0, lambda i: i),
    "Q4_K": _Unit(4, 32, _q4_k, lambda i: 64 * i),
    "Q5_K": _Unit(4, 32, _q5_k, lambda i: 64 * i),
    "Q6_K": _Unit(4, 16, _q6_k, lambda i: 128 * (i >> 1) + 16 * (i & 1)),
    "MXFP4": _Unit(1, 16, _mxfp4, lambda i: i),
}


def _count(encoding: str, depth: int) -> int:
    """The number of units of a row of so many weights."""
    return depth // decoder_of(encoding).elements * _UNITS[encoding].count
