"""Matmuls with weights in ggml's blocks on NVIDIA GPUs: two kernels in Pallas for Triton.

Both take the stack of all layers and the index of a layer, so that nothing is copied out of it, and
dequantise in registers. For few tokens a program reads some rows of the weight once, in order, and
sums in float32 without rounding a weight. For more it multiplies a tile of dequantised weights, in
the dtype of the activations, by a tile of tokens.

A block is read in units of W neighbouring bytes of packed weights, with the scales that belong to them.
Sizes are those that were the fastest on an H200.

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
from .triton import FLOATS, WARPS, as_stack, dot, power, too_many

# The most tokens for which rows of the weight are multiplied one by one, instead of in tiles.
FEW = 4
# The most activations that a program multiplies at a time: twice as many are in shared memory.
_MOST_NUMBERS = 1 << 14
# The most partial sums, in float32, that are written where programs divide the rows between them.
_MOST_SUMS = 1 << 19
# The bits of 2^23 as a float32, and its value: an integer in the low bits is added to the value.
_INTEGER, _OFFSET = 0x4B000000, 8388608.0
# Twice the absolute values of E2M1, four bits each: 0, 1, 2, 3, 4, 6, 8, 12.
_E2M1 = np.int32(0xC8643210 - (1 << 32))


class ProductTiles(NamedTuple):
    """Sizes that a kernel is compiled for.

    Attributes:
        rows: number of rows of the weight of a program.
        tokens: number of tokens of a program.
        units: number of units of each row that a program reads at a time.
        warps: number of warps of a program.
        splits: number of programs between which the units of a row are divided.
    """

    rows: int
    tokens: int
    units: int
    warps: int
    splits: int = 1


def lacks(encoding: str, dtype: Any, x: Any, blocks: Any) -> str:
    """Why no GPU kernel can compute this matmul of operands on one device; "" if one can.

    Args:
        encoding: name of the encoding.
        dtype: dtype of the result.
        x: activations ``[..., in]``.
        blocks: blocks of the weight, uint8 ``[out, bytes]``, or of a stack ``[n, out, bytes]``.

    Example:
        >>> shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)
        >>> lacks("Q8_0", jnp.float64, shape(jnp.float64, 1, 64), shape(jnp.uint8, 9, 68))
        'activations are float64 and results float64'
    """
    if encoding not in _LAYOUTS:
        return f"weights are in {encoding}"
    if x.dtype not in FLOATS or np.dtype(dtype) not in FLOATS:
        return f"activations are {x.dtype} and results {np.dtype(dtype)}"
    if 0 in x.shape:
        return "there are no numbers"
    tokens = math.prod(x.shape[:-1])
    if x.dtype == jnp.float32 and tokens > FEW:
        # In full precision, Triton does not use tensor cores for them.
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
    """The result ``[..., out]`` of the matmul, summed in float32.

    Args:
        encoding: name of the encoding.
        dtype: dtype of the result.
        x: activations ``[..., in]``.
        blocks: blocks of the weight, uint8 ``[out, bytes]``, or of a stack ``[n, out, bytes]``.
        layer: index of the weight in a stack.
        interpret: whether to run the kernel's operations one by one, on any platform.
    """
    blocks, layer = as_stack(blocks, layer)
    tokens = x.reshape(-1, x.shape[-1])
    size = tiles(encoding, tokens.shape[0], tokens.shape[1], blocks.shape[1])
    call = _call(encoding, np.dtype(dtype), size, interpret)
    return call(layer.reshape(1), tokens, blocks).reshape(*x.shape[:-1], blocks.shape[1])


def tiles(encoding: str, tokens: int, depth: int, rows: int) -> ProductTiles:
    """The tile sizes for a number of tokens and a weight ``[rows, depth]``.

    Example:
        >>> tiles("Q4_K", 1, 4096, 4096)
        ProductTiles(rows=2, tokens=1, units=64, warps=2, splits=1)
        >>> tiles("Q8_0", 512, 4096, 4096)
        ProductTiles(rows=64, tokens=128, units=16, warps=4, splits=1)
    """
    layout = _LAYOUTS[encoding]
    parts = decoder_of(encoding).elements // layout.nbytes
    if tokens <= FEW:
        each = 2 if rows % 2 == 0 else 1
        # Several warps exchange their sums, one for each token; units of four parts are long enough for one warp.
        warps = 1
        if tokens == 1 and parts <= 2:
            warps = 4 if rows // each * 2 < WARPS else 2
        while 32 * warps > max(32, _count(encoding, depth, layout.few)):
            warps //= 2
        return ProductTiles(each, tokens, 32 * warps, warps)
    wide = min(128, power(tokens))
    each, warps = (32, 2) if wide == 16 else (64, 4)
    deep = next(n for n in (128, 64, 32) if n * parts * wide <= _MOST_NUMBERS)
    units = deep // layout.many
    programs = -(-tokens // wide) * -(-rows // each)
    steps = -(-_count(encoding, depth, layout.many) // units)
    wanted = -(-WARPS // 2 // (programs * warps))
    splits = min(wanted, steps // 2, _MOST_SUMS // (tokens * rows))
    return ProductTiles(each, wide, units, warps, max(1, splits))


@functools.lru_cache(maxsize=256)
def _call(encoding: str, dtype: np.dtype, size: ProductTiles, interpret: bool) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    def call(layer: Any, x: Any, blocks: Any) -> Any:
        tokens, rows = x.shape[0], blocks.shape[1]
        tiles_of_rows = -(-rows // size.rows)
        # Only the first axis of a CUDA grid may be longer than 65,535.
        program, grid = _few, (tiles_of_rows, 1)
        if tokens > FEW:
            program, grid = _many, (-(-tokens // size.tokens), tiles_of_rows, size.splits)
        found = pl.pallas_call(
            functools.partial(program, encoding, size, x.shape, rows),
            grid=grid,
            out_shape=result(
                (size.splits, tokens, rows), x, dtype if size.splits == 1 else jnp.float32
            ),
            compiler_params=triton.CompilerParams(num_warps=size.warps, num_stages=2),
            interpret=interpret,
            name="maxjax_packed_matmul",
        )(layer, x, blocks)
        return found[0] if size.splits == 1 else jnp.sum(found, axis=0).astype(dtype)

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
    """One program: some rows of the weight, one by one, for some tokens.

    All arrays have the shape [N, W] or [N], so that Triton keeps bytes and the activations that they are
    multiplied by in the same threads. Each thread has complete units: it scales the sum of each one once.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, depth = shape
    layout = _LAYOUTS[encoding]
    row = [pl.program_id(0) * size.rows + i for i in range(size.rows)]
    width = layout.few
    column = jnp.arange(width, dtype=jnp.int32)
    count = _count(encoding, depth, width)
    read = functools.partial(
        _Units, encoding, width, count, count % size.units > 0, blocks, layer[0]
    )

    def step(i: Any, sums: Any) -> Any:
        number = i * size.units + jnp.arange(size.units, dtype=jnp.int32)
        units = [read(jnp.minimum(one, rows - 1), number) for one in row]
        sums = list(sums)
        for parts in zip(*(layout.parts(one) for one in units), strict=True):
            place = (units[0].element + parts[0].first)[:, None] + column[None, :]
            for t in range(tokens):
                numbers = units[0].load(x.at[t, place], 1).astype(jnp.float32)
                total = None if parts[0].least is None else jnp.sum(numbers, axis=1)
                for r, part in enumerate(parts):
                    value = part.scale * jnp.sum(part.q * numbers, axis=1)
                    value = value if part.least is None else value - part.least * total
                    sums[r * tokens + t] += value
        return tuple(sums)

    zeros = (jnp.zeros((size.units,), jnp.float32),) * (size.rows * tokens)
    sums = jax.lax.fori_loop(0, -(-count // size.units), step, zeros)
    first = pl.program_id(1)  # 0, which Pallas does not take as a constant here
    for place, one in enumerate(sums):
        r, t = divmod(place, tokens)
        value = jnp.sum(one).astype(out.dtype)
        triton.store(out.at[first, first + t, row[r]], value, mask=row[r] < rows)


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
    layout = _LAYOUTS[encoding]
    width, count = layout.many, _count(encoding, depth, layout.many)
    column = jnp.arange(size.units * width, dtype=jnp.int32)
    of_unit, column = jax.lax.div(column, width), jax.lax.rem(column, width)
    where = blocks, layer[0], jnp.minimum(row, rows - 1)[:, None]
    read = functools.partial(_Units, encoding, width, count, count % size.units > 0, *where)

    def step(i: Any, sums: Any) -> Any:
        units = read(i * size.units + jnp.arange(size.units, dtype=jnp.int32))
        flat = read(i * size.units + of_unit)  # the same units, each W times
        for part in layout.parts(units):
            weights = part.values().astype(x.dtype).reshape(size.rows, size.units * width)
            place = x.at[own[:, None], (flat.element + part.first + column)[None, :]]
            numbers = flat.load(place)
            sums = sums + dot(weights, numbers.T)  # [R, tokens]
        return sums

    steps = -(-count // size.units)
    each = -(-steps // size.splits)
    split = pl.program_id(2)
    zeros = jnp.zeros((size.rows, size.tokens), jnp.float32)
    sums = jax.lax.fori_loop(split * each, jnp.minimum((split + 1) * each, steps), step, zeros)
    inside = (token < tokens)[:, None] & (row < rows)[None, :]
    place = out.at[split, token[:, None], row[None, :]]
    triton.store(place, sums.T.astype(out.dtype), mask=inside)


# --- blocks -------------------------------------------------------------------------------


class _UnitPart(NamedTuple):
    """Neighbouring weights of each unit: ``scale · q - least``.

    Attributes:
        first: offset of its first weight from the first weight of the unit.
        q: integers as float32 ``[..., N, W]``.
        scale: float32 ``[..., N]``.
        least: float32 ``[..., N]``; None: zero.
    """

    first: int
    q: Any
    scale: Any
    least: Any = None

    def values(self) -> Any:
        """The weights ``[..., N, W]``."""
        values = self.scale[..., None] * self.q
        return values if self.least is None else values - self.least[..., None]


class _Units:
    """Units of the blocks of a row, or of rows ``[R, 1]``, in GPU memory; loads after the last one give zeros.

    Attributes:
        width: number of bytes of a unit, W.
        thirty_two: index of the group of 32 packed bytes of its block that each unit is in ``[N]``.
        within: offset of each unit's first byte in this group ``[N]``.
        offset: offset of each unit's first byte among all packed bytes of its block ``[N]``.
        element: index of each unit's first weight in the row ``[N]``.
    """

    def __init__(
        self, encoding: str, width: int, count: int, ragged: bool, array: Any, layer: Any, row: Any, unit: Any
    ):  # fmt: skip
        self.array, self.layer, self.row, self.width = array, layer, row, width
        layout, decoder = _LAYOUTS[encoding], decoder_of(encoding)
        each = layout.nbytes // width
        block, number = jax.lax.div(unit, each), jax.lax.rem(unit, each)
        self.start = block * decoder.nbytes
        # Triton sees that these are multiples of W, so that loads are wide.
        self.thirty_two = jax.lax.div(number, 32 // width)
        self.within, self.offset = jax.lax.rem(number, 32 // width) * width, number * width
        self.element = block * decoder.elements + layout.weights * self.thirty_two + self.within
        # No mask where all units exist, so that loads stay wide.
        self.there = unit < count if ragged else None

    def load(self, place: Any, axes: int = 0) -> Any:
        """The elements at ``place``, in which ``axes`` axes follow the axis of units."""
        from jax.experimental.pallas import triton

        if self.there is None:
            return triton.load(place)
        mask = self.there.reshape(*(1,) * (len(place.shape) - 1 - axes), -1, *(1,) * axes)
        return triton.load(place, mask=jnp.broadcast_to(mask, place.shape), other=0)

    def byte(self, at: Any) -> Any:
        """The byte at offset ``at`` of each unit's block, int32 ``[..., N]``."""
        place = self.start + at
        if self.row.ndim:
            place = place[None, :]
        return self.load(self.array.at[self.layer, self.row, place]).astype(jnp.int32)

    def bytes(self, at: Any, width: int = 0) -> Any:
        """``width`` or W bytes from offset ``at`` of each unit's block on, int32 ``[..., N, W]``."""
        column = jnp.arange(width or self.width, dtype=jnp.int32)
        place = (self.start + at)[:, None] + column[None, :]
        row = self.row
        if row.ndim:
            row, place = row[:, :, None], place[None]
        return self.load(self.array.at[self.layer, row, place], 1).astype(jnp.int32)

    def half(self, at: int) -> Any:
        """The float16 at offset ``at`` of each unit's block, as float32 ``[..., N]``."""
        return _half(self.byte(at) | self.byte(at + 1) << 8)

    def head(self) -> list[Any]:
        """The first 16 bytes of each unit's block, in one load: four int32 ``[..., N]``."""
        column = jnp.arange(16, dtype=jnp.int32)
        found = self.bytes(0, 16)
        shifted = found << jnp.broadcast_to(8 * (column & 3), found.shape)
        word = jnp.broadcast_to(column >> 2, found.shape)
        return [jnp.sum(jnp.where(word == i, shifted, 0), axis=-1) for i in range(4)]


def _float(bits: Any) -> Any:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _half(bits: Any) -> Any:
    """float16 from its bits, as float32."""
    half = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
    return half.astype(jnp.float32)


def _number(q: Any, less: int = 0) -> Any:
    """``q - less`` as float32, for integers ``0 ≤ q < 2^23``: cheaper than a conversion."""
    return _float(q | _INTEGER) - jnp.float32(_OFFSET + less)


Parts = Iterator[_UnitPart]


def _q8_0(units: _Units) -> Parts:
    yield _UnitPart(0, _number(units.bytes(2 + units.offset) ^ 128, 128), units.half(0))


def _q4_0(units: _Units) -> Parts:
    scale, packed = units.half(0), units.bytes(2 + units.offset)
    yield _UnitPart(0, _number(packed & 15, 8), scale)
    yield _UnitPart(16, _number(packed >> 4, 8), scale)


def _mxfp4(units: _Units) -> Parts:
    e = units.byte(0)
    # The table has twice the values of E2M1, so the scale is 2^(e - 128): two factors, neither of them subnormal.
    first, second = (_float((part + 63) << 23) for part in (e >> 1, e - (e >> 1)))
    packed = units.bytes(1 + units.offset)
    for place, q in ((0, packed), (16, packed >> 4)):
        size = _number((_E2M1 >> ((q & 7) << 2)) & 15)
        sign = (q & 8) << 28
        bits = jax.lax.bitcast_convert_type(size, jnp.int32) | sign
        yield _UnitPart(place, _float(bits), first * second)


def _two_groups(units: _Units) -> list[tuple[Any, Any]]:
    """Scale and minimum of the two groups of 32 bytes of Q4_K or Q5_K, ``[..., N]`` each."""
    halves, *words = units.head()
    d, least = _half(halves & 0xFFFF), _half((halves >> 16) & 0xFFFF)
    found = []
    for j in (2 * units.thirty_two, 2 * units.thirty_two + 1):
        shift = jnp.broadcast_to(8 * (j & 3), d.shape)
        a, b, c = (word >> shift for word in words)
        early = jnp.broadcast_to(j < 4, d.shape)
        scale = jnp.where(early, a & 63, (c & 15) | ((a >> 2) & 48))
        minimum = jnp.where(early, b & 63, ((c >> 4) & 15) | ((b >> 2) & 48))
        found.append((d * _number(scale), least * _number(minimum)))
    return found


def _q4_k(units: _Units) -> Parts:
    packed = units.bytes(16 + units.offset)
    for i, (scale, least) in enumerate(_two_groups(units)):
        yield _UnitPart(32 * i, _number((packed >> 4 * i) & 15), scale, least)


def _q5_k(units: _Units) -> Parts:
    packed, high = units.bytes(48 + units.offset), units.bytes(16 + units.within)
    high = high >> (2 * units.thirty_two).reshape(*(1,) * (high.ndim - 2), -1, 1)
    for i, (scale, least) in enumerate(_two_groups(units)):
        q = ((packed >> 4 * i) & 15) | ((high >> i) & 1) << 4
        yield _UnitPart(32 * i, _number(q), scale, least)


def _q6_k(units: _Units) -> Parts:
    # Each half of a block has four parts of 32 weights, of which a unit has a few each.
    half, within = units.thirty_two, units.within
    d = units.half(208)
    low = [units.bytes(64 * half + within + 32 * i) for i in range(2)]
    high = units.bytes(128 + units.offset)
    for i in range(4):
        scale = _number(units.byte(192 + 8 * half + (within >> 4) + 2 * i) ^ 128, 128)
        q = ((low[i % 2] >> 4 * (i // 2)) & 15) | ((high >> 2 * i) & 3) << 4
        yield _UnitPart(32 * i, _number(q, 32), d * scale)


class _Layout(NamedTuple):
    """How the blocks of an encoding are read.

    Attributes:
        nbytes: number of bytes that the units of a block divide among them.
        few: W for few tokens: 16 if all blocks begin at a multiple of 16 bytes, so that a thread loads a
            unit at once, otherwise 8.
        many: W for more tokens.
        weights: number of weights from the start of one group of 32 bytes to the next; 0 if there is one.
        parts: function that yields the weights of units, in parts.
    """

    nbytes: int
    few: int
    many: int
    weights: int
    parts: Callable[[_Units], Parts]


_LAYOUTS = {
    "Q4_0": _Layout(16, 8, 8, 0, _q4_0),
    "Q8_0": _Layout(32, 8, 8, 0, _q8_0),
    "Q4_K": _Layout(128, 16, 32, 64, _q4_k),
    "Q5_K": _Layout(128, 16, 32, 64, _q5_k),
    "Q6_K": _Layout(64, 8, 8, 128, _q6_k),
    "MXFP4": _Layout(16, 8, 8, 0, _mxfp4),
}


def _count(encoding: str, depth: int, width: int) -> int:
    """The number of units in a row of ``depth`` weights."""
    return depth // decoder_of(encoding).elements * (_LAYOUTS[encoding].nbytes // width)
