"""Matmuls with weights in ggml's blocks on NVIDIA GPUs: two kernels in Pallas for Triton.

Both take the stack of all weights, and for each group of tokens the index of its weight, so that nothing is
copied out of the stack, and dequantise in registers. For few tokens a program reads some rows of the weight
once, in order, and sums in float32 without rounding a weight. For more it multiplies a tile of dequantised
weights, in the dtype of the activations, by a tile of tokens.

A block is read in units of W neighbouring bytes of packed weights, with the scales that belong to them.
Sizes are those that were the fastest on an H200.

Shapes of what a program has in registers: R rows of the weight, N units of each, W bytes of a unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..blocks import IQ4, decoder_of
from ..pallas import result
from .triton import FLOATS, WARPS, as_stack, dot, power, too_many

# The most tokens for which rows of the weight are multiplied one by one, instead of in tiles.
FEW = 4
# The most tokens that one program multiplies.
MOST_TOKENS = 128
# The most activations that a program multiplies at a time: twice as many are in shared memory.
_MOST_NUMBERS = 1 << 14
# The most partial sums, in float32, that are written where programs divide the rows between them.
_MOST_SUMS = 1 << 19
# The bits of 2^23 as a float32, and its value: an integer in the low bits is added to the value.
_INTEGER, _OFFSET = 0x4B000000, 8388608.0
# Twice the absolute values of E2M1, four bits each: 0, 1, 2, 3, 4, 6, 8, 12.
_E2M1 = np.int32(0xC8643210 - (1 << 32))
# The values of IQ4_NL and IQ4_XS + 127, a byte each, in four words.
_IQ4 = (IQ4 + 127).astype(np.uint8).view(np.dtype("<i4"))


class ProductTiles(NamedTuple):
    """Sizes that a kernel is compiled for.

    Attributes:
        rows: number of rows of the weight of a program.
        tokens: number of tokens of a program, with padding.
        units: number of units of each row that a program reads at a time.
        warps: number of warps of a program.
        splits: number of programs between which the units of a row are divided.
    """

    rows: int
    tokens: int
    units: int
    warps: int
    splits: int = 1


def lacks(dtype: Any, x: Any, tokens: int, blocks: Any) -> str:
    """Why no GPU kernel can compute this matmul of operands on one device; "" if one can.

    Args:
        dtype: dtype of the result.
        x: activations ``[..., in]``.
        tokens: number of tokens that are multiplied by one weight.
        blocks: blocks of the weight, uint8 ``[out, bytes]``, or of a stack ``[n, out, bytes]``.

    Example:
        >>> shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)
        >>> lacks(jnp.float64, shape(jnp.float64, 1, 64), 1, shape(jnp.uint8, 9, 68))
        'activations are float64 and results float64'
    """
    if x.dtype not in FLOATS or np.dtype(dtype) not in FLOATS:
        return f"activations are {x.dtype} and results {np.dtype(dtype)}"
    if 0 in x.shape:
        return "there are no numbers"
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
    each = min(tokens.shape[0], MOST_TOKENS)
    owner = jnp.broadcast_to(layer, (-(-tokens.shape[0] // each),))
    y = _groups(encoding, dtype, tokens, each, blocks, owner, interpret)
    return y.reshape(*x.shape[:-1], blocks.shape[1])


def group_kernel(
    encoding: str,
    dtype: Any,
    x: jax.Array,
    blocks: jax.Array,
    owner: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """``x[i] @ w[owner[i]].T``, summed in float32: ``[groups, tokens, in]`` → ``[groups, tokens, out]``.

    Args:
        encoding, dtype, interpret: the same as for :func:`kernel`.
        x: groups of at most 128 tokens.
        blocks: blocks of a stack of weights, uint8 ``[n, out, bytes]``.
        owner: index of each group's weight, int32 ``[groups]``; where it is negative, nothing is read.
    """
    groups, each, depth = x.shape
    y = _groups(encoding, dtype, x.reshape(-1, depth), each, blocks, owner, interpret)
    return y.reshape(groups, each, blocks.shape[1])


def _groups(
    encoding: str, dtype: Any, x: Any, each: int, blocks: Any, owner: Any, interpret: bool
) -> jax.Array:
    """The products of groups of ``each`` tokens of ``[tokens, in]``, of which the last may be smaller."""
    size = tiles(encoding, owner.shape[0], each, x.shape[1], blocks.shape[1])
    return _call(encoding, np.dtype(dtype), size, each, interpret)(owner, x, blocks)


def tiles(encoding: str, groups: int, tokens: int, depth: int, rows: int) -> ProductTiles:
    """The tile sizes for groups of tokens and a weight ``[rows, depth]``.

    Example:
        >>> tiles("Q4_K", 1, 1, 4096, 4096)
        ProductTiles(rows=2, tokens=1, units=64, warps=2, splits=1)
        >>> tiles("Q8_0", 4, 128, 4096, 4096)
        ProductTiles(rows=64, tokens=128, units=16, warps=4, splits=1)
    """
    layout = _LAYOUTS[encoding]
    parts = decoder_of(encoding).elements // layout.nbytes
    if tokens <= FEW:
        each = 2 if rows % 2 == 0 else 1
        # Several warps exchange their sums, one for each token; units of four parts are long enough for one warp.
        warps = 1
        if tokens == 1 and parts <= 2:
            warps = 4 if groups * (rows // each) * 2 < WARPS else 2
        while 32 * warps > max(32, _count(encoding, depth, layout.few)):
            warps //= 2
        return ProductTiles(each, tokens, 32 * warps, warps)
    wide = power(tokens)
    each, warps = (32, 2) if wide == 16 else (64, 4)
    deep = next(n for n in (128, 64, 32) if n * parts * wide <= _MOST_NUMBERS)
    units = deep // layout.many
    programs = groups * -(-rows // each)
    steps = -(-_count(encoding, depth, layout.many) // units)
    wanted = -(-WARPS // 2 // (programs * warps))
    splits = min(wanted, steps // 2, _MOST_SUMS // (groups * tokens * rows))
    return ProductTiles(each, wide, units, warps, max(1, splits))


@functools.lru_cache(maxsize=256)
def _call(encoding: str, dtype: np.dtype, size: ProductTiles, each: int, interpret: bool) -> Any:
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    def call(owner: Any, x: Any, blocks: Any) -> Any:
        tokens, rows = x.shape[0], blocks.shape[1]
        tiles_of_rows, groups = -(-rows // size.rows), owner.shape[0]
        # Only the first axis of a CUDA grid may be longer than 65,535.
        program, grid = _few, (tiles_of_rows, groups, 1)
        if each > FEW:
            program, grid = _many, (groups, tiles_of_rows, size.splits)
        found = pl.pallas_call(
            functools.partial(program, encoding, size, each, x.shape, rows),
            grid=grid,
            out_shape=result(
                (size.splits, tokens, rows), x, dtype if size.splits == 1 else jnp.float32
            ),
            compiler_params=triton.CompilerParams(num_warps=size.warps, num_stages=2),
            interpret=interpret,
            name="maxjax_packed_matmul",
        )(owner, x, blocks)
        return found[0] if size.splits == 1 else jnp.sum(found, axis=0).astype(dtype)

    return call


def _few(
    encoding: str,
    size: ProductTiles,
    each: int,
    shape: Any,
    rows: int,
    owner: Any,
    x: Any,
    blocks: Any,
    out: Any,
) -> None:
    """One program: some rows of the weight, one by one, for one group of tokens.

    All arrays have the shape [N, W] or [N], so that Triton keeps bytes and the activations that they are
    multiplied by in the same threads. Each thread has complete units: it scales the sum of each one once.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    depth = shape[1]
    layout = _LAYOUTS[encoding]
    group = pl.program_id(1)
    number, first = owner[group], group * each
    row = [pl.program_id(0) * size.rows + i for i in range(size.rows)]
    width = layout.few
    column = jnp.arange(width, dtype=jnp.int32)
    count = _count(encoding, depth, width)
    read = functools.partial(_Units, encoding, width, count, count % size.units > 0, blocks, number)

    def step(i: Any, sums: Any) -> Any:
        place = i * size.units + jnp.arange(size.units, dtype=jnp.int32)
        units = [read(jnp.minimum(one, rows - 1), place) for one in row]
        sums = list(sums)
        for parts in zip(*(layout.parts(one) for one in units), strict=True):
            place = (units[0].element + parts[0].first)[:, None] + column[None, :]
            for t in range(each):
                numbers = units[0].load(x.at[first + t, place], 1).astype(jnp.float32)
                total = None if parts[0].least is None else jnp.sum(numbers, axis=1)
                for r, part in enumerate(parts):
                    value = part.scale * jnp.sum(part.q * numbers, axis=1)
                    value = value if part.least is None else value - part.least * total
                    sums[r * each + t] += value
        return tuple(sums)

    zeros = (jnp.zeros((size.units,), jnp.float32),) * (size.rows * each)
    sums = jax.lax.fori_loop(0, _steps(number, -(-count // size.units)), step, zeros)
    split = pl.program_id(2)  # 0, which Pallas does not take as a constant here
    for place, one in enumerate(sums):
        r, t = divmod(place, each)
        value = jnp.sum(one).astype(out.dtype)
        triton.store(out.at[split, first + t, row[r]], value, mask=row[r] < rows)


def _steps(number: Any, count: int) -> Any:
    """The number of steps over a row of the weight with an index; 0 if the index is negative."""
    return jnp.where(number < 0, jnp.int32(0), jnp.int32(count))


def _many(
    encoding: str,
    size: ProductTiles,
    each: int,
    shape: Any,
    rows: int,
    owner: Any,
    x: Any,
    blocks: Any,
    out: Any,
) -> None:
    """One program: a tile of rows of the weight, and one group of tokens."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    tokens, depth = shape
    group, own = pl.program_id(0), jnp.arange(size.tokens, dtype=jnp.int32)
    number, token = owner[group], group * each + own
    there = (own < each) & (token < tokens)
    row = pl.program_id(1) * size.rows + jnp.arange(size.rows, dtype=jnp.int32)
    known = jnp.minimum(token, tokens - 1)
    layout = _LAYOUTS[encoding]
    width, count = layout.many, _count(encoding, depth, layout.many)
    column = jnp.arange(size.units * width, dtype=jnp.int32)
    of_unit, column = jax.lax.div(column, width), jax.lax.rem(column, width)
    where = blocks, number, jnp.minimum(row, rows - 1)[:, None]
    read = functools.partial(_Units, encoding, width, count, count % size.units > 0, *where)

    def step(i: Any, sums: Any) -> Any:
        units = read(i * size.units + jnp.arange(size.units, dtype=jnp.int32))
        flat = read(i * size.units + of_unit)  # the same units, each W times
        for part in layout.parts(units):
            weights = part.values().astype(x.dtype).reshape(size.rows, size.units * width)
            place = x.at[known[:, None], (flat.element + part.first + column)[None, :]]
            numbers = flat.load(place)
            sums = sums + dot(weights, numbers.T)  # [R, tokens]
        return sums

    steps = -(-count // size.units)
    part = -(-steps // size.splits)
    split = pl.program_id(2)
    zeros = jnp.zeros((size.rows, size.tokens), jnp.float32)
    end = jnp.minimum((split + 1) * part, _steps(number, steps))
    sums = jax.lax.fori_loop(split * part, end, step, zeros)
    inside = there[:, None] & (row < rows)[None, :]
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
        group: index of the group of packed bytes of its block that each unit is in ``[N]``.
        within: offset of each unit's first byte in this group ``[N]``.
        offset: offset of each unit's first byte among all packed bytes of its block ``[N]``.
        element: index of each unit's first weight in the row ``[N]``.
    """

    def __init__(
        self, encoding: str, width: int, count: int, ragged: bool, array: Any, layer: Any, row: Any, unit: Any
    ):  # fmt: skip
        self.array, self.layer, self.row, self.width = array, layer, row, width
        layout, decoder = _LAYOUTS[encoding], decoder_of(encoding)
        each, in_group = layout.nbytes // width, layout.group // width
        block, number = jax.lax.div(unit, each), jax.lax.rem(unit, each)
        self.start = block * decoder.nbytes
        # Triton sees that these are multiples of W, so that loads are wide.
        self.group = jax.lax.div(number, in_group)
        self.within, self.offset = jax.lax.rem(number, in_group) * width, number * width
        self.element = block * decoder.elements + layout.weights * self.group + self.within
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

    def words(self, at: int, count: int) -> list[Any]:
        """The ``count`` words from offset ``at`` of each unit's block on, in one load: int32 ``[..., N]`` each."""
        column = jnp.arange(4 * count, dtype=jnp.int32)
        found = self.bytes(at, 4 * count)
        shifted = found << jnp.broadcast_to(8 * (column & 3), found.shape)
        word = jnp.broadcast_to(column >> 2, found.shape)
        return [jnp.sum(jnp.where(word == i, shifted, 0), axis=-1) for i in range(count)]


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


def _q4_1(units: _Units) -> Parts:
    scale, least, packed = units.half(0), -units.half(2), units.bytes(4 + units.offset)
    yield _UnitPart(0, _number(packed & 15), scale, least)
    yield _UnitPart(16, _number(packed >> 4), scale, least)


def _fifth_bits(units: _Units, at: int, packed: Any) -> list[Any]:
    """The codes of Q5_0 or Q5_1, low nibbles and high ones; bit i of a word is the fifth bit of weight i."""
    (word,) = units.words(at, 1)
    column = units.within[:, None] + jnp.arange(units.width, dtype=jnp.int32)[None, :]
    high = word[..., None] >> jnp.broadcast_to(column, packed.shape)
    return [packed & 15 | (high & 1) << 4, packed >> 4 | (high >> 16 & 1) << 4]


def _q5_0(units: _Units) -> Parts:
    scale, packed = units.half(0), units.bytes(6 + units.offset)
    for i, q in enumerate(_fifth_bits(units, 2, packed)):
        yield _UnitPart(16 * i, _number(q, 16), scale)


def _q5_1(units: _Units) -> Parts:
    scale, least, packed = units.half(0), -units.half(2), units.bytes(8 + units.offset)
    for i, q in enumerate(_fifth_bits(units, 4, packed)):
        yield _UnitPart(16 * i, _number(q), scale, least)


def _iq4(packed: Any, scale: Any) -> Parts:
    for i, q in enumerate((packed & 15, packed >> 4)):
        low, high = (jnp.where(q & 4 > 0, _IQ4[n + 1], _IQ4[n]) for n in (0, 2))
        word = jnp.where(q & 8 > 0, high, low)
        yield _UnitPart(16 * i, _number(word >> ((q & 3) << 3) & 255, 127), scale)


def _iq4_nl(units: _Units) -> Parts:
    yield from _iq4(units.bytes(2 + units.offset), units.half(0))


def _iq4_xs(units: _Units) -> Parts:
    first, low = units.words(0, 2)  # d and the high bits of the scales, and their low bits
    shift = jnp.broadcast_to(units.group, low.shape)
    step = low >> 4 * shift & 15 | (first >> 16 + 2 * shift & 3) << 4
    yield from _iq4(units.bytes(8 + units.offset), _half(first & 0xFFFF) * _number(step, 32))


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
    halves, *words = units.words(0, 4)
    d, least = _half(halves & 0xFFFF), _half((halves >> 16) & 0xFFFF)
    found = []
    for j in (2 * units.group, 2 * units.group + 1):
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
    high = high >> (2 * units.group).reshape(*(1,) * (high.ndim - 2), -1, 1)
    for i, (scale, least) in enumerate(_two_groups(units)):
        q = ((packed >> 4 * i) & 15) | ((high >> i) & 1) << 4
        yield _UnitPart(32 * i, _number(q), scale, least)


def _q6_k(units: _Units) -> Parts:
    # Each half of a block has four parts of 32 weights, of which a unit has a few each.
    half, within = units.group, units.within
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
        weights: number of weights from the start of one group of bytes to the next; 0 if there is one.
        parts: function that yields the weights of units, in parts.
        group: number of bytes in a group; units of a group have neighbouring weights.
    """

    nbytes: int
    few: int
    many: int
    weights: int
    parts: Callable[[_Units], Parts]
    group: int = 32


_LAYOUTS = {
    "Q4_0": _Layout(16, 8, 8, 0, _q4_0),
    "Q8_0": _Layout(32, 8, 8, 0, _q8_0),
    "Q4_K": _Layout(128, 16, 32, 64, _q4_k),
    "Q5_K": _Layout(128, 16, 32, 64, _q5_k),
    "Q6_K": _Layout(64, 8, 8, 128, _q6_k),
    "MXFP4": _Layout(16, 8, 8, 0, _mxfp4),
    "Q4_1": _Layout(16, 8, 8, 0, _q4_1),
    "Q5_0": _Layout(16, 8, 8, 0, _q5_0),
    "Q5_1": _Layout(16, 8, 8, 0, _q5_1),
    "IQ4_NL": _Layout(16, 8, 8, 0, _iq4_nl),
    "IQ4_XS": _Layout(128, 8, 8, 32, _iq4_xs, 16),
}


def _count(encoding: str, depth: int, width: int) -> int:
    """The number of units in a row of ``depth`` weights."""
    return depth // decoder_of(encoding).elements * (_LAYOUTS[encoding].nbytes // width)
