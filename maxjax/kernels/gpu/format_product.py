"""Matmuls with weights in Hugging Face's quantised formats on NVIDIA GPUs: one kernel in Pallas for Triton.

A program multiplies a block of rows by some rows of the weight, of which it dequantises a tile at a time in
registers. Each format is a function from indices of rows and columns to the weights there (``_FORMATS``).
The kernel takes stacks, and for each block the index of its weight, so that nothing is copied out of a stack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import AWQ_ORDER, QuantLayout
from ..pallas import result
from .triton import FLOATS, WARPS, dot, power, too_many

_MOST_ROWS = 128
# In full precision Triton does not use tensor cores: float32 activations of more rows are not multiplied here.
_FEW = 16
# The columns of a tile, at most.
_DEEP = 64
# The most partial sums, in float32, that are written where programs divide the columns between them.
_MOST_SUMS = 1 << 19


class Tile(NamedTuple):
    """A tile of a weight, and how its tensors are read.

    Attributes:
        load: ``(name, *indices)`` → elements of a tensor, at indices that broadcast.
        layout: layout of the whole weight.
        rows: indices of the rows, int32 ``[R, 1]``.
        columns: indices of the columns, int32 ``[1, C]``.
        first: index of the first column, an int32 scalar.
        deep: number of columns, C.
    """

    load: Callable[..., Any]
    layout: QuantLayout
    rows: Any
    columns: Any
    first: Any
    deep: int

    def groups(self, size: int) -> Any:
        """The indices of groups of columns, ``[1, 1]`` if all columns are in one, otherwise ``[1, C]``."""
        if size % self.deep == 0:
            return jnp.broadcast_to(_div(self.first, size), (1, 1))
        return _div(self.columns, size)

    def words(
        self, name: str, bits: int, along: int, index: Any, other: Any, order: Any = None
    ) -> Any:
        """The unsigned numbers of ``bits`` bits in 32-bit words, at an index along one axis and one along the other."""
        each = 32 // bits
        place = _rem(index, each)
        if order is not None:
            place = _nibble(np.argsort(np.asarray(order)), place)
        word = _div(index, each)
        found = self.load(name, *((word, other) if along == 0 else (other, word)))
        found = jax.lax.bitcast_convert_type(found, jnp.int32)
        shift = jnp.broadcast_to(place * bits, jnp.broadcast_shapes(found.shape, place.shape))
        found = jnp.broadcast_to(found, shift.shape)
        return jax.lax.shift_right_logical(found, shift) & (2**bits - 1)


def _div(a: Any, n: int) -> Any:
    return jax.lax.div(a, jnp.full_like(a, n))


def _rem(a: Any, n: int) -> Any:
    return jax.lax.rem(a, jnp.full_like(a, n))


def _nibble(table: Any, index: Any) -> Any:
    """``table[index]`` for a table of eight numbers below 16."""
    packed = sum(int(n) << 4 * i for i, n in enumerate(table))
    packed = packed - (1 << 32) if packed >= 1 << 31 else packed
    return jax.lax.shift_right_logical(jnp.full_like(index, packed), index * 4) & 15


def _float(values: Any) -> Any:
    return values.astype(jnp.float32)


def _numbers(tile: Tile, name: str, *indices: Any) -> Any:
    """The elements of a tensor as float32, where 8-bit floats are held as their bits."""
    found = tile.load(name, *indices)
    one = next(one for one in tile.layout.tensors if one.name == name)
    if one.has_bits:
        found = jax.lax.bitcast_convert_type(found, one.dtype.np)
    return _float(found)


def _shape(tile: Tile, name: str) -> tuple[int, ...]:
    return next(one.shape for one in tile.layout.tensors if one.name == name)


def _scaled(tile: Tile, scale: str = "weight_scale", block: tuple[int, int] | None = None) -> Any:
    names = [one.name for one in tile.layout.tensors]

    def of_block(name: str) -> Any:
        shape = _shape(tile, name)
        if math.prod(shape) == 1:
            return _numbers(tile, name, *(jnp.zeros((1, 1), jnp.int32) for _ in shape))
        if len(shape) == 1:
            return _numbers(tile, name, tile.rows)
        sizes = block or [-(-n // count) for n, count in zip(tile.layout.shape, shape, strict=True)]
        zero = jnp.zeros((1, 1), jnp.int32)
        row = zero if shape[0] == 1 else _div(tile.rows, sizes[0])
        return _numbers(tile, name, row, zero if shape[1] == 1 else tile.groups(sizes[1]))

    values = _numbers(tile, "weight", tile.rows, tile.columns)
    if "weight_zero_point" in names:
        values = values - of_block("weight_zero_point")
    return values * of_block(scale)


def _group_of(tile: Tile, name: str, ordered: bool, group: int) -> Any:
    return tile.load(name, tile.columns) if ordered else tile.groups(group)


def _pack_quantized(tile: Tile, bits: int, group: int) -> Any:
    names = [one.name for one in tile.layout.tensors]
    groups = _group_of(tile, "weight_g_idx", "weight_g_idx" in names, group)
    q = tile.words("weight_packed", bits, 1, tile.columns, tile.rows)
    zero: Any = jnp.int32(2 ** (bits - 1))
    if "weight_zero_point" in names:
        zero = tile.words("weight_zero_point", bits, 0, tile.rows, groups)
    return _float(q - zero) * _numbers(tile, "weight_scale", tile.rows, groups)


def _gptq(tile: Tile, bits: int, group: int, offset: int, ordered: bool) -> Any:
    groups = _group_of(tile, "g_idx", ordered, group)
    q = tile.words("qweight", bits, 0, tile.columns, tile.rows)
    zero = tile.words("qzeros", bits, 1, tile.rows, groups)
    zero = (zero + offset) & (2**bits - 1)
    return _float(q - zero) * _numbers(tile, "scales", groups, tile.rows)


def _awq(tile: Tile, group: int) -> Any:
    groups = tile.groups(group)
    q = tile.words("qweight", 4, 1, tile.rows, tile.columns, AWQ_ORDER)
    zero: Any = jnp.int32(8)
    if any(one.name == "qzeros" for one in tile.layout.tensors):
        zero = tile.words("qzeros", 4, 1, tile.rows, groups, AWQ_ORDER)
    return _float(q - zero) * _numbers(tile, "scales", groups, tile.rows)


def _mlx(tile: Tile, bits: int, group: int) -> Any:
    groups = tile.groups(group)
    q = tile.words("weight", bits, 1, tile.columns, tile.rows)
    scale, bias = (_numbers(tile, name, tile.rows, groups) for name in ("scales", "biases"))
    return _float(q) * scale + bias


def _bitsandbytes8(tile: Tile) -> Any:
    scale = _numbers(tile, "SCB", tile.rows) / jnp.float32(127)
    return _numbers(tile, "weight", tile.rows, tile.columns) * scale


def _bitsandbytes4(tile: Tile, kind: str, size: int, nested: int) -> Any:
    if tile.layout.in_dim % size == 0:  # then a block is in one row
        place, groups = tile.columns, tile.groups(size)
        codes = tile.load("weight", tile.rows, _div(place, 2))
        scale = tile.load("weight.absmax", tile.rows, groups)
        each = tile.rows * (tile.layout.in_dim // size) + groups
    else:
        place = tile.rows * tile.layout.in_dim + tile.columns  # in the flattened weight
        codes = tile.load("weight", _div(place, 2), jnp.zeros_like(place))
        each = _div(place, size)
        scale = tile.load("weight.absmax", each)
    shift = jnp.broadcast_to(4 - 4 * _rem(place, 2), codes.shape)
    codes = jax.lax.shift_right_logical(codes.astype(jnp.int32), shift) & 15
    values = tile.load("weight.quant_map", codes)
    if nested:
        state = f"weight.quant_state.bitsandbytes__{kind}"
        zero = jnp.zeros_like(each)
        parts = [tile.load(state, zero + i).astype(jnp.int32) << 8 * i for i in range(4)]
        offset = jax.lax.bitcast_convert_type(sum(parts[1:], parts[0]), jnp.float32)
        levels = tile.load("weight.nested_quant_map", scale.astype(jnp.int32))
        scale = levels * tile.load("weight.nested_absmax", _div(each, nested)) + offset
    return values * scale


def _e2m1(codes: Any) -> Any:
    """The values of E2M1 numbers."""
    twice = _nibble((0, 1, 2, 3, 4, 6, 8, 12), codes & 7)
    return _float(jnp.where(codes & 8 > 0, -twice, twice)) * jnp.float32(0.5)


def _nvfp4(tile: Tile, weight: str, second: str, divides: bool) -> Any:
    codes = tile.load(weight, tile.rows, _div(tile.columns, 2)).astype(jnp.int32)
    codes = jax.lax.shift_right_logical(
        codes, jnp.broadcast_to(4 * _rem(tile.columns, 2), codes.shape)
    )
    zero = jnp.zeros((1, 1), jnp.int32)
    whole = tile.load(second, *(zero for _ in _shape(tile, second)))
    scale = _numbers(tile, "weight_scale", tile.rows, tile.groups(16))
    return _e2m1(codes & 15) * (scale / whole if divides else scale * whole)


def _bitnet(tile: Tile, divides: bool) -> Any:
    zero = jnp.zeros((1, 1), jnp.int32)
    scale = _numbers(tile, "weight_scale", *(zero for _ in _shape(tile, "weight_scale")))
    first = tile.layout.tensors[0]
    if first.dtype.is_float():
        values = _numbers(tile, "weight", tile.rows, tile.columns)
    else:
        quarter = first.shape[0]
        packed = tile.load("weight", _rem(tile.rows, quarter), tile.columns).astype(jnp.int32)
        shift = jnp.broadcast_to(2 * _div(tile.rows, quarter), packed.shape)
        values = _float((jax.lax.shift_right_logical(packed, shift) & 3) - 1)
    return values / scale if divides else values * scale


# Each function takes a Tile and the options of the layout, and returns the weights ``[R, C]`` in float32.
_FORMATS: dict[str, Callable[..., Any]] = {
    "scaled": _scaled,
    "pack_quantized": _pack_quantized,
    "gptq": _gptq,
    "awq": _awq,
    "mlx": _mlx,
    "bitsandbytes8": _bitsandbytes8,
    "bitsandbytes4": _bitsandbytes4,
    "nvfp4": _nvfp4,
    "bitnet": _bitnet,
}


def lacks(layout: QuantLayout, x: Any, tensors: Mapping[str, Any]) -> str:
    """Why the kernel cannot compute a matmul of operands on one device; "" if it can.

    Example:
        >>> lacks(QuantLayout("ternary", 2, 3, ()), jax.ShapeDtypeStruct((1, 3), jnp.bfloat16), {})
        'weights are in ternary'
    """
    if layout.format not in _FORMATS:
        return f"weights are in {layout.format}"
    if x.dtype not in FLOATS:
        return f"activations are {x.dtype}"
    if 0 in x.shape:
        return "there are no numbers"
    if x.dtype == jnp.float32 and math.prod(x.shape[:-1]) > _FEW:
        return f"activations are float32, of more than {_FEW} tokens"
    bits = dict(layout.options).get("bits", 4)
    if bits not in (2, 4, 8):
        return f"numbers have {bits} bits"
    return next(filter(None, map(too_many, tensors.values())), "")


def most_rows(layout: QuantLayout) -> int:
    """The most rows of a block: with more, a program runs out of registers."""
    return _MOST_ROWS


def kernel(
    layout: QuantLayout,
    dtype: Any,
    x: jax.Array,
    tensors: Mapping[str, Any],
    owner: jax.Array,
    interpret: bool = False,
    places: Any = 0,
) -> jax.Array:
    """``x[i] @ w[owner[i]].T``, summed in float32: ``[blocks, rows, in]`` → ``[blocks, rows, out]`` in ``dtype``.

    Args:
        x: blocks of at most 128 rows.
        tensors: stacks of the tensors by name.
        owner: index of each block's weight, int32 ``[blocks]``, or one index ``[1]`` for all; where it is negative,
            nothing is read.
        interpret: whether to run the kernel's operations one by one, on any platform.
        places: for each tensor the index in its stack of the weight with number 0.
    """
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import triton

    layout = layout.of_part(tensors)
    blocks, rows, depth = x.shape
    out = layout.out_dim
    padded = power(rows)
    wide, warps = (32, 2) if padded == 16 else (64, 4)
    steps = -(-depth // _DEEP)
    programs = blocks * -(-out // wide)
    wanted = -(-WARPS // 2 // (programs * warps))
    splits = max(1, min(wanted, steps // 2, _MOST_SUMS // (blocks * rows * out)))
    names = [one.name for one in layout.tensors]
    call = pl.pallas_call(
        functools.partial(_program, layout, names, padded, wide, splits),
        grid=(-(-out // wide), blocks, splits),
        out_shape=result((splits, blocks, rows, out), x, dtype if splits == 1 else jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=3),
        interpret=interpret,
        name="maxjax_format_matmul",
    )
    places = jnp.broadcast_to(jnp.asarray(places, jnp.int32), (len(names),))
    y = call(jnp.broadcast_to(owner, (blocks,)), places, x, *(tensors[name] for name in names))
    return y[0] if splits == 1 else jnp.sum(y, axis=0).astype(dtype)


def _program(
    layout: QuantLayout,
    names: Any,
    padded: int,
    wide: int,
    splits: int,
    owner: Any,
    places: Any,
    x: Any,
    *refs: Any,
) -> None:
    """One program: ``wide`` columns of the result of one block, padded to some rows, or a part of their sums."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *tensors, y = refs
    stacks = {name: (a, places[i]) for i, (name, a) in enumerate(zip(names, tensors, strict=True))}
    first_row, block, split = pl.program_id(0) * wide, pl.program_id(1), pl.program_id(2)
    _, rows, depth = x.shape
    number = owner[block]
    token = jnp.arange(padded, dtype=jnp.int32)[:, None]
    there = token < rows
    row = first_row + jnp.arange(wide, dtype=jnp.int32)
    own = jnp.minimum(row, layout.out_dim - 1)[:, None]
    ragged = depth % _DEEP > 0 or padded > rows

    def load(name: str, *indices: Any) -> Any:
        shape = jnp.broadcast_shapes(*(jnp.shape(i) for i in indices))
        stack, place = stacks[name]
        at = (number + place, *(jnp.broadcast_to(i, shape) for i in indices))
        return triton.load(stack.at[at])

    def step(i: Any, total: Any) -> Any:
        start = i * _DEEP
        inner = start + jnp.arange(_DEEP, dtype=jnp.int32)[None, :]
        known = jnp.minimum(inner, depth - 1)
        mask = (inner < depth) & there if ragged else None
        some = triton.load(x.at[block, token, known], mask=mask, other=0.0 if ragged else None)
        tile = Tile(load, layout, own, known, start, _DEEP)
        weights = _FORMATS[layout.format](tile, **dict(layout.options))
        weights = jnp.broadcast_to(weights, (wide, _DEEP)).astype(some.dtype)
        return total + dot(some, weights.T)

    steps = -(-depth // _DEEP)
    each = -(-steps // splits)
    # For an unused block nothing is read.
    end = jnp.where(number < 0, jnp.int32(0), jnp.minimum((split + 1) * each, steps))
    zeros = jnp.zeros((padded, wide), jnp.float32)
    total = jax.lax.fori_loop(split * each, end, step, zeros)
    place = y.at[split, block, token, row[None, :]]
    triton.store(place, total.astype(y.dtype), mask=there & (row < layout.out_dim)[None, :])
