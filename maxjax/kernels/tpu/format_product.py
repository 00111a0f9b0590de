"""Matmuls with weights in Hugging Face's formats and in blocks of MXFP4 on TPUs: one kernel in Pallas for Mosaic.

A program widens a tile of the stored numbers in its registers, scales it and multiplies it by a block of rows.
The kernel takes stacks, and for each block the index of its weight, so that nothing is copied out of a stack.

Numbers of a few bits are stored in words, or bytes, of P numbers each. Instead of putting the numbers of a tile in
order, which registers cannot do quickly, the kernel takes the P *planes* of the words one after the other: plane p has
number p of each word. If words hold consecutive columns, the columns of the activations are divided into planes as
well; if they hold rows of the weight, the result is. Only words of eight or sixteen columns that run along the
sublanes of registers are put in order: each is repeated in as many sublanes, which costs nothing.

Every format becomes ``number · scale + offset``, with one scale and offset for each row and group of columns.
These are small, so XLA computes them from the file's tensors before; scales of 8 bits the kernel widens itself.
Numbers that are codes of other numbers are looked up in a table, which fills a register.

Blocks of MXFP4 have their scale in front of their numbers. The kernel takes them as they lie: the activations have
zeros at the places of scales, and a matmul with zeros and ones selects the scales from a tile.

If the columns of a group are not consecutive, a tile takes the scales of all groups, and ``g_idx`` chooses between
them for each column.

Shapes: B blocks of N rows each, weights ``[O, I]`` in G groups of columns, W words along the packed axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import AWQ_ORDER, E2M1, QuantLayout, unpacked
from ..pallas import result
from .mosaic import LANES, is_turned

# The rows of a register.
_SUBLANES = 8
# The most rows of a block, and the most rows and columns of a tile of a weight.
_MOST_ROWS = 1024
_ROWS, _COLUMNS = 256, 1024
# The most groups of columns that are not consecutive: a tile has the scales of them all.
_MOST_GROUPS = 1024
_FLOATS = (np.dtype("float32"), np.dtype(jnp.bfloat16))


class Planes(NamedTuple):
    """A weight as the kernel takes it.

    Attributes:
        words: name of the tensor of words.
        bits: number of bits of a number; 8 if the tensor holds the numbers themselves.
        order: for each position in a word, the index of its number.
        by_rows: whether words hold rows of the weight, otherwise columns.
        is_turned: whether the tensor of words is ``[I, O]``, otherwise ``[O, I]``.
        number: function from the bits of numbers, int32, or from the tensor's own elements to float32; None if
            they are codes in the first table.
        group: number of columns in a group, which may be all.
        scale: float32 or bfloat16 ``[B, G, O]``; or 8 bits, which ``widen`` converts; or None, if the first byte of
            each group of words is its scale.
        offset: float32 ``[B, G, O]``, or None.
        widen: function from the tables, a tile of the scale and, if there is one, of ``more`` to the scale in
            float32 or bfloat16; None if the scale is in floats.
        more: float32 ``[B, G, O]`` for ``widen``, or None.
        tables: float32 ``[B, n]``, n at most 256.
        factor: float32 ``[B]``, by which results are multiplied, or None.
        index: index of the group of each column, int32 ``[B, I]``; None if groups are consecutive columns.
        zeros: words of the zero points of consecutive rows, int32 ``[B, G, O / numbers in a word]``, or None.
        zero: function from the bits of zero points, int32, to float32.
        in_order: whether the numbers of words are put in order, and are then one plane.
    """

    words: str
    bits: int
    order: tuple[int, ...]
    by_rows: bool
    is_turned: bool
    number: Callable[[Any], Any] | None
    group: int
    scale: Any
    offset: Any = None
    widen: Callable[..., Any] | None = None
    more: Any = None
    tables: tuple[Any, ...] = ()
    factor: Any = None
    index: Any = None
    zeros: Any = None
    zero: Callable[[Any], Any] | None = None
    in_order: bool = False


def _unsigned(less: int, q: Any) -> Any:
    return (q - less).astype(jnp.float32)


def _elements(dtype: Any, q: Any) -> Any:
    """Numbers of 8 bits as float32; 8-bit floats are given as their bits."""
    from jax.experimental.pallas import tpu

    if q.dtype != dtype:
        q = tpu.bitcast(q, dtype)
    return q.astype(jnp.float32)


def _rows(blocks: jax.Array, count: int, size: int) -> jax.Array:
    """``[B, G, O / size]`` → ``[B, G, O]``."""
    if blocks.shape[-1] == count:
        return blocks
    return jnp.repeat(blocks, size, axis=-1)[..., :count]


def _scaled(
    layout: QuantLayout, small: Any, scale: str = "weight_scale", block: Any = None
) -> Planes:
    out, inner = layout.shape
    first = layout.tensors[0]

    def of_rows(name: str) -> jax.Array:
        found = small[name].astype(jnp.float32)
        if found[0].size == 1:
            return jnp.broadcast_to(found.reshape(-1, 1, 1), (len(found), 1, out))
        if found.ndim == 2:
            return found[:, None, :]
        sizes = block or (-(-out // found.shape[1]), 0)
        return _rows(found.swapaxes(1, 2), out, sizes[0])

    scales, zero = of_rows(scale), small.get("weight_zero_point")
    offset = None if zero is None else -of_rows("weight_zero_point") * scales
    group = block[1] if block and scales.shape[1] > 1 else inner
    number = functools.partial(_elements, jnp.dtype(first.dtype.np))
    return Planes("weight", 8, (0,), False, False, number, group, scales, offset)


def _bitsandbytes8(layout: QuantLayout, small: Any) -> Planes:
    scale = (small["SCB"].astype(jnp.float32) / 127)[:, None]
    number = functools.partial(_elements, np.dtype("int8"))
    return Planes("weight", 8, (0,), False, False, number, layout.in_dim, scale)


def _pack_quantized(layout: QuantLayout, small: Any, bits: int, group: int) -> Planes:
    scale = small["weight_scale"].swapaxes(1, 2)
    scale = scale.astype(jnp.bfloat16 if scale.dtype == jnp.bfloat16 else jnp.float32)
    less, offset = 2 ** (bits - 1), None
    if (words := small.get("weight_zero_point")) is not None:
        zero = unpacked(words, bits, 1, layout.out_dim).swapaxes(1, 2)
        less, offset = 0, -zero * scale.astype(jnp.float32)
    number, order = functools.partial(_unsigned, less), tuple(range(32 // bits))
    planes = Planes("weight_packed", bits, order, False, False, number, group, scale, offset)
    return planes._replace(index=small.get("weight_g_idx"))


def _gptq(
    layout: QuantLayout, small: Any, bits: int, group: int, offset: int, ordered: bool
) -> Planes:
    number, order = functools.partial(_unsigned, 0), tuple(range(32 // bits))
    scale, zero = small["scales"].astype(jnp.float32), functools.partial(_plus, offset, bits)
    index = small["g_idx"] if ordered else None
    planes = Planes("qweight", bits, order, False, True, number, group, scale, index=index)
    return planes._replace(zeros=small["qzeros"], zero=zero)


def _plus(more: int, bits: int, q: Any) -> Any:
    return ((q + more) & (2**bits - 1)).astype(jnp.float32)


def _awq(layout: QuantLayout, small: Any, group: int) -> Planes:
    scale = small["scales"].astype(jnp.float32)
    less, offset = 8, None
    if (words := small.get("qzeros")) is not None:
        less, offset = 0, -unpacked(words, 4, 2, layout.out_dim, AWQ_ORDER) * scale
    return Planes(
        "qweight",
        4,
        AWQ_ORDER,
        True,
        True,
        functools.partial(_unsigned, less),
        group,
        scale,
        offset,
    )


def _mlx(layout: QuantLayout, small: Any, bits: int, group: int) -> Planes:
    scale, bias = (small[name].astype(jnp.float32).swapaxes(1, 2) for name in ("scales", "biases"))
    number, order = functools.partial(_unsigned, 0), tuple(range(32 // bits))
    return Planes("weight", bits, order, False, False, number, group, scale, bias)


def _looked_up(codes: Any, table: Any) -> Any:
    """The values of codes, int32, in a table: float32 ``[1, 128]``, or ``[2, 128]`` for 256 values."""
    rows, width = codes.shape
    if rows == 1:  # a gather of registers has two axes
        return _looked_up(jnp.broadcast_to(codes, (8, width)), table)[:1]
    codes = jnp.pad(codes, ((0, 0), (0, -width % LANES)))
    found = []
    for start in range(0, width, LANES):
        index = codes[:, start : start + LANES]
        inside = index & (LANES - 1) if table.shape[0] > 1 else index
        parts = [
            jnp.take_along_axis(
                jnp.broadcast_to(table[i : i + 1], index.shape), inside, axis=1,
                mode="promise_in_bounds",
            )
            for i in range(table.shape[0])
        ]  # fmt: skip
        found.append(parts[0] if len(parts) == 1 else jnp.where(index < LANES, *parts))
    return jnp.concatenate(found, axis=1)[:, :width]


def _bitsandbytes4(layout: QuantLayout, small: Any, kind: str, size: int, nested: int) -> Planes:
    scale, tables = small["weight.absmax"], (small["weight.quant_map"],)
    planes = Planes("weight", 4, (1, 0), False, False, None, size, scale.swapaxes(1, 2))
    if not nested:
        return planes._replace(tables=tables)
    # Blocks of scales are consecutive in the flattened weight.
    of_scales = jnp.repeat(small["weight.nested_absmax"].astype(jnp.float32), nested, axis=1)
    of_scales = of_scales[:, : scale[0].size].reshape(scale.shape).swapaxes(1, 2)
    state = small[f"weight.quant_state.bitsandbytes__{kind}"][:, :4]
    offset = jax.lax.bitcast_convert_type(state, jnp.float32)[:, None]
    return planes._replace(
        widen=_nested, more=of_scales, tables=(*tables, small["weight.nested_quant_map"], offset)
    )


def _nested(tables: Sequence[Any], scale: Any, of_scales: Any) -> Any:
    """The scales whose codes are in blocks of scales."""
    _, levels, offset = tables
    return _looked_up(scale.astype(jnp.int32), levels) * of_scales + offset[:1, :1]


def _nvfp4(layout: QuantLayout, small: Any, weight: str, second: str, divides: bool) -> Planes:
    scale, whole = small["weight_scale"].swapaxes(1, 2), small[second].astype(jnp.float32)
    whole = whole.reshape(len(whole))
    table = jnp.broadcast_to(jnp.asarray(E2M1), (len(whole), len(E2M1)))
    return Planes(
        weight, 4, (0, 1), False, False, None, 16, scale, tables=(table,),
        widen=lambda tables, scale: _elements(jnp.dtype(jnp.float8_e4m3fn), scale),
        factor=1 / whole if divides else whole,
    )  # fmt: skip


def _mxfp4_blocks(layout: QuantLayout, small: Any) -> Planes:
    table = jnp.asarray(2 * E2M1)[None]
    return Planes(
        "blocks", 4, (0, 1), False, False, None, 32, None, tables=(table,), widen=_half_of_e8m0
    )


def _half_of_e8m0(tables: Sequence[Any], scale: Any) -> Any:
    """2^(e - 128) for bytes e, which bfloat16 holds exactly; 0 for the two numbers that are subnormal."""
    e = jnp.maximum(scale.astype(jnp.int32) - 1, 0)
    return jax.lax.bitcast_convert_type(e << 23, jnp.float32).astype(jnp.bfloat16)


# Each function takes the layout, the small tensors ``[B, ...]`` and the options of the layout.
_FORMATS: dict[str, Callable[..., Planes]] = {
    "scaled": _scaled,
    "bitsandbytes8": _bitsandbytes8,
    "pack_quantized": _pack_quantized,
    "gptq": _gptq,
    "awq": _awq,
    "mlx": _mlx,
    "bitsandbytes4": _bitsandbytes4,
    "nvfp4": _nvfp4,
    "MXFP4": _mxfp4_blocks,
}
# Bytes and numbers of a block, which begins with the byte of its scale.
_BLOCK, _BLOCK_NUMBERS = 17, 32
# Formats whose numbers are in bytes, two in each, and the number of columns in a group.
_IN_BYTES = ("bitsandbytes4", "nvfp4")
_NVFP4_GROUP = 16


def lacks(layout: QuantLayout, x: Any, tensors: Mapping[str, Any]) -> str:
    """Why the kernel cannot compute a matmul of operands on one device; "" if it can."""
    if layout.format not in _FORMATS:
        return f"weights are in {layout.format}"
    if x.dtype not in _FLOATS:
        return f"activations are {x.dtype}"
    if 0 in x.shape:
        return "there are no numbers"
    options = dict(layout.options)
    if options.get("bits", 4) not in (2, 4, 8):
        return f"numbers have {options['bits']} bits"
    if layout.is_ordered and layout.in_dim > _MOST_GROUPS * options["group"]:
        return f"more than {_MOST_GROUPS} groups of columns are not consecutive"
    return _sizes(layout.of_part(tensors))[1]


class _Tiles(NamedTuple):
    """Sizes of a tile: of words, and the number of columns and of groups in it.

    If each group of words begins with its scale, ``words`` counts these as well.
    """

    rows: int
    words: int
    columns: int
    groups: int


def _sizes(layout: QuantLayout) -> tuple[_Tiles, str]:
    """The tiles of a weight, and why there are none."""
    out, inner = layout.shape
    if layout.format == "MXFP4":
        return _sizes_of_blocks(out, inner), ""
    options = dict(layout.options)
    block = options.get("block")
    group = options.get("group", block[1] if block else options.get("size", inner))
    group = min(_NVFP4_GROUP if layout.format == "nvfp4" else group, inner)
    by_rows = layout.format == "awq"
    each = 1 if layout.format in ("scaled", "bitsandbytes8") else 32 // options.get("bits", 4)
    each = 2 if layout.format in _IN_BYTES else each
    across, along = (each, 1) if by_rows else (1, each)
    group = inner if layout.is_ordered else group  # then each tile has the scales of all groups
    if out % across or inner % along or inner % group:
        return _Tiles(0, 0, 0, 0), f"a weight of {out} x {inner} has incomplete words or groups"
    words = _divisor(inner // along, max(LANES, _COLUMNS // along))
    columns = words * along
    if columns % group and group % columns:
        return _Tiles(0, 0, 0, 0), f"tiles of {columns} columns divide groups of {group}"
    if out == across:
        return _Tiles(0, 0, 0, 0), f"a weight of {out} x {inner} has one row of words"
    # The sums of all planes of rows are in memory together.
    most = LANES if by_rows else _ROWS
    rows = min(out // across, most)
    return _Tiles(rows, words, columns, max(1, columns // group)), ""


def _sizes_of_blocks(out: int, inner: int) -> _Tiles:
    count = inner // _BLOCK_NUMBERS
    groups = LANES if count % LANES == 0 else count  # 128 blocks, or all, end where registers end
    rows = _ROWS if groups <= LANES else LANES
    return _Tiles(min(out, rows), groups * _BLOCK, groups * _BLOCK_NUMBERS, groups)


def _divisor(count: int, most: int) -> int:
    """The largest divisor of a count that is a multiple of 128 and at most ``most``; the count if there is none."""
    return next((n for n in range(most // LANES * LANES, 0, -LANES) if count % n == 0), count)


def most_rows(layout: QuantLayout) -> int:
    """The most rows of a block: the sums of all planes of rows are in memory together."""
    return _MOST_ROWS // 2 if layout.format == "awq" else _MOST_ROWS


def kernel(
    layout: QuantLayout,
    dtype: Any,
    x: jax.Array,
    tensors: Mapping[str, Any],
    owner: jax.Array,
    interpret: Any = False,
    places: Any = 0,
) -> jax.Array:
    """``x[i] @ w[owner[i]].T``, summed in float32: ``[B, N, in]`` → ``[B, N, out]`` in ``dtype``.

    Args:
        tensors: stacks of the tensors by name.
        owner: index of each block's weight, int32 ``[B]``, or one index ``[1]`` for all; where it is negative,
            results are undefined.
        interpret: argument of ``pallas_call`` that runs the kernel on another platform.
        places: for each tensor the index in its stack of the weight with number 0.
    """
    from jax.experimental import pallas as pl  # slow to import
    from jax.experimental.pallas import tpu

    layout = layout.of_part(tensors)
    names = [one.name for one in layout.tensors]
    first = names[0]
    known = jnp.where(owner < 0, jnp.maximum(jnp.max(owner), 0), owner)
    places = jnp.broadcast_to(jnp.asarray(places, jnp.int32), (len(names),))
    small = {name: tensors[name][known + places[i]] for i, name in enumerate(names) if i}
    planes = _FORMATS[layout.format](layout, small, **dict(layout.options))
    tiles, _ = _sizes(layout)
    if planes.index is not None:
        tiles = tiles._replace(groups=planes.scale.shape[1])
    stored = tensors[first]
    if is_turned(stored.shape[1:], stored.dtype.itemsize):
        stored = stored.swapaxes(1, 2)
        planes = planes._replace(is_turned=not planes.is_turned)
    if planes.is_turned and not planes.by_rows and len(planes.order) % _SUBLANES == 0:
        planes = planes._replace(order=(0,), in_order=True)
    (blocks, count, inner), out = x.shape, layout.out_dim
    parts = len(planes.order)
    of_rows, of_columns = (parts, 1) if planes.by_rows else (1, parts)
    steps, wide = inner // tiles.columns, out // of_rows
    # The columns of a plane in a tile.
    columns = tiles.columns if planes.in_order else tiles.words

    def in_planes(a: jax.Array) -> jax.Array:
        """``[..., in]`` → ``[..., planes of columns, columns of a plane]``."""
        if planes.scale is None:
            return _in_blocks(a)
        a = a.reshape(*a.shape[:-1], inner // of_columns, of_columns).swapaxes(-1, -2)
        return a[..., np.array(planes.order), :] if of_columns > 1 else a

    x = in_planes(x).swapaxes(1, 2)

    def grouped(a: jax.Array) -> jax.Array:
        """``[B, G, O]`` → ``[B, planes of rows, tiles or groups, groups in a tile, O / planes]``."""
        a = a.reshape(len(a), a.shape[1], wide, of_rows).transpose(0, 3, 1, 2)
        a = a[:, np.array(planes.order)] if of_rows > 1 else a
        return a.reshape(len(a), of_rows, -1, tiles.groups, wide)

    def in_lanes(a: jax.Array) -> jax.Array:
        """``[B, n]`` → ``[B, registers, 128]``."""
        return jnp.pad(a, ((0, 0), (0, -a.shape[1] % LANES))).reshape(len(a), -1, LANES)

    by_groups = (planes.scale, planes.more, planes.offset)
    small_blocks = [grouped(a) for a in by_groups if a is not None]
    zeros = [] if planes.zeros is None else [planes.zeros]
    zeros = [a.reshape(len(a), -1, tiles.groups, a.shape[-1]) for a in zeros]
    whole = () if planes.factor is None else (planes.factor[:, None],)
    tables = [in_lanes(a.astype(jnp.float32)) for a in (*planes.tables, *whole)]
    # The tiles in a group.
    in_group = max(1, planes.group // tiles.columns) if planes.index is None else steps
    index = [] if planes.index is None else [in_planes(planes.index)]
    last = len((*small_blocks, *tables)[0]) - 1
    grid = blocks, -(-wide // tiles.rows), steps

    def spec(shape: tuple[int, ...], place: Callable[..., Any]) -> Any:
        """A tile for each program; all programs of blocks without a weight have one tile, which is then read once."""

        def index_of(b: Any, i: Any, j: Any, owner: Any) -> Any:
            own = owner[jnp.minimum(b, owner.shape[0] - 1)]
            at = [jnp.where(own < 0, n - 1, a) for a, n in zip((b, i, j), grid, strict=True)]
            return place(jnp.where(own < 0, -1 - own, own), *at)

        return pl.BlockSpec((1, *shape), index_of)

    def of_words(own: Any, b: Any, i: Any, j: Any) -> Any:
        return (own, j, i) if planes.is_turned else (own, i, j)

    def of_small(own: Any, b: Any, i: Any, j: Any) -> Any:
        return jnp.minimum(b, last), 0, jax.lax.div(j, in_group), 0, i

    def of_zeros(own: Any, b: Any, i: Any, j: Any) -> Any:
        return jnp.minimum(b, last), jax.lax.div(j, in_group), 0, 0

    def of_index(own: Any, b: Any, i: Any, j: Any) -> Any:
        return jnp.minimum(b, last), 0, j

    def of_table(own: Any, b: Any, i: Any, j: Any) -> Any:
        return jnp.minimum(b, last), 0, 0

    tile = (tiles.words, tiles.rows) if planes.is_turned else (tiles.rows, tiles.words)
    program = jax.tree.map(lambda a: isinstance(a, jax.Array) or a, planes)
    call = pl.pallas_call(
        functools.partial(_program, program, tiles, x.dtype),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                spec((of_columns, count, columns), lambda own, b, i, j: (b, 0, 0, j)),
                spec(tile, of_words),
                *(spec((of_rows, 1, tiles.groups, tiles.rows), of_small) for _ in small_blocks),
                *(spec((1, *a.shape[2:]), of_zeros) for a in zeros),
                *(spec((of_columns, columns), of_index) for _ in index),
                *(spec(a.shape[1:], of_table) for a in tables),
            ],
            out_specs=pl.BlockSpec(
                (1, of_rows, count, tiles.rows), lambda b, i, j, owner: (b, 0, 0, i)
            ),
            scratch_shapes=[tpu.VMEM((of_rows, count, tiles.rows), jnp.float32)],
        ),
        out_shape=result((blocks, of_rows, count, wide), x, dtype),
        interpret=interpret,
        name="maxjax_format_matmul",
    )
    if not interpret:  # otherwise XLA may copy a small stack, with all layers, to VMEM
        stored = tpu.with_memory_space_constraint(stored, tpu.HBM)
    at = known + places[0]
    at = jnp.where(owner < 0, -1 - at, at)
    y = call(at, x, stored, *small_blocks, *zeros, *index, *tables)
    back = np.argsort(np.array(planes.order)) if of_rows > 1 else np.array([0])
    return y[:, back].transpose(0, 2, 3, 1).reshape(blocks, count, out)


def _program(
    planes: Planes, tiles: _Tiles, dtype: Any, owner: Any, x: Any, words: Any, *refs: Any
) -> None:
    """One program: adds the products of one tile of the weight to its columns of the result of one block.

    Args:
        planes: the weight, with True in place of arrays.
    """
    from jax.experimental import pallas as pl

    *operands, y, sums = refs
    block, tile, step = map(pl.program_id, range(3))
    own = owner[jnp.minimum(block, owner.shape[0] - 1)]

    @pl.when(step == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when(own >= 0)
    def _() -> None:
        for p in range(len(planes.order)):
            weights = _weights(planes, tiles, p, tile, words[0], operands).astype(dtype)
            row, column = (p, 0) if planes.by_rows else (0, p)
            axis = 0 if planes.is_turned else 1
            sums[row] += jax.lax.dot_general(
                x[0, column], weights, (((1,), (axis,)), ((), ())),
                precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )  # fmt: skip

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        factor = 1 if planes.factor is None else operands[-1][:, :1, :1]
        y[0] = (sums[...] * factor).astype(y.dtype)


def _weights(
    planes: Planes, tiles: _Tiles, p: int, tile: Any, words: Any, operands: Sequence[Any]
) -> Any:
    """Plane p of a tile of the weight, in float32 and in the axes of the words."""
    given: Any = iter(operands)
    by_groups = (planes.scale, planes.more, planes.offset, planes.zeros, planes.index)
    scales, more, offsets, zeros, index = ([] if a is None else [next(given)] for a in by_groups)
    tables = [next(given)[0] for _ in planes.tables]
    row = p if planes.by_rows else 0
    q = words
    if len(planes.order) > 1 or planes.in_order:
        is_word = q.dtype.itemsize == 4
        q = jax.lax.bitcast_convert_type(q, jnp.int32) if is_word else q.astype(jnp.int32)
        q = _in_order(q, planes.bits) if planes.in_order else _bits(q, planes.bits, p)
    numbers = _looked_up(q, tables[0]) if planes.number is None else planes.number(q)
    columns = tiles.columns if planes.in_order else tiles.words
    places = _places(planes, tiles.groups, columns, *(a[0, p : p + 1] for a in index))
    if planes.scale is None:
        scale = _firsts(words, tiles, 0 if planes.is_turned else 1)
    else:
        scale = scales[0][0, row, 0]  # [groups, rows]
    if planes.widen is not None:
        scale = planes.widen(tables, scale, *(a[0, row, 0] for a in more))
    weights = numbers * _spread(scale, places, planes)
    for one in offsets:
        weights = weights + _spread(one[0, row, 0], places, planes)
    for one in zeros:
        assert planes.zero is not None
        zero = planes.zero(_of_rows(one[0, 0], planes.bits, tile * tiles.rows, tiles.rows))
        weights = weights - _spread(zero * scale, places, planes)
    return weights


def _bits(words: Any, bits: int, place: Any) -> Any:
    """The numbers at one place of words, int32."""
    return jax.lax.shift_right_logical(words, jnp.int32(bits * place)) & (2**bits - 1)


def _in_order(words: Any, bits: int) -> Any:
    """The numbers of words of consecutive columns, in order: int32 ``[words, rows]`` → ``[columns, rows]``."""
    count, rows = words.shape
    shape = count, 32 // bits, rows
    places = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    repeated = jnp.broadcast_to(words[:, None, :], shape)
    found = jax.lax.shift_right_logical(repeated, places * bits) & (2**bits - 1)
    return found.reshape(-1, rows)


def _of_rows(words: Any, bits: int, start: Any, rows: int) -> Any:
    """The numbers of words of consecutive rows, from a row on: int32 ``[groups, words]`` → ``[groups, rows]``.

    A matmul with zeros and ones puts the byte that has the number of a row in its place.
    """
    each = (32 // bits).bit_length() - 1
    shape = words.shape[-1], rows
    word = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + start
    first = (row & (32 // bits - 1)) * bits  # bit of the word at which the row's number begins
    total: Any = 0
    for byte in range(4):
        is_here = ((row >> each) == word) & ((first >> 3) == byte)
        total += jax.lax.dot_general(
            _bits(words, 8, byte).astype(jnp.float32).astype(jnp.bfloat16),
            is_here.astype(jnp.bfloat16),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
    within = jnp.broadcast_to((first & 7)[:1], total.shape)
    return jax.lax.shift_right_logical(total.astype(jnp.int32), within) & (2**bits - 1)


def _in_blocks(x: jax.Array) -> jax.Array:
    """``[..., in]`` → ``[..., 2, words]`` as the numbers lie in blocks of bytes, with zeros for their scales."""
    # A byte has the numbers i and i + 16 of a block.
    x = x.reshape(*x.shape[:-1], -1, 2, _BLOCK - 1).swapaxes(-2, -3)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])
    return x.reshape(*x.shape[:-2], -1)


def _places(planes: Planes, groups: int, columns: int, index: Any = None) -> Any:
    """Which group each column of a plane is in, as zeros and ones ``[groups, columns]``; a column may be a scale.

    Args:
        index: index of the group of each of the columns, int32 ``[1, columns]``; None if groups are consecutive.
    """
    group = jax.lax.broadcasted_iota(jnp.int32, (groups, columns), 0)
    if index is not None:
        return (jnp.broadcast_to(index, group.shape) == group).astype(jnp.bfloat16)
    column = jax.lax.broadcasted_iota(jnp.int32, group.shape, 1)
    size = columns // groups
    first = group * size
    start = first + 1 if planes.scale is None else first
    return ((column >= start) & (column < first + size)).astype(jnp.bfloat16)


def _firsts(words: Any, tiles: _Tiles, along: int) -> Any:
    """The first of the bytes of each group, as floats ``[groups, rows]``."""
    group = jax.lax.broadcasted_iota(jnp.int32, (tiles.groups, tiles.words), 0)
    word = jax.lax.broadcasted_iota(jnp.int32, group.shape, 1)
    is_first = (word == group * (tiles.words // tiles.groups)).astype(jnp.bfloat16)
    # bfloat16 holds the numbers of a byte exactly.
    numbers = words.astype(jnp.int32).astype(jnp.float32).astype(jnp.bfloat16)
    return jax.lax.dot_general(
        is_first, numbers, (((1,), (along,)), ((), ())), preferred_element_type=jnp.float32
    )


def _spread(groups: Any, places: Any, planes: Planes) -> Any:
    """``[groups, rows]`` → the shape of a tile of words, ``[words, rows]`` or ``[rows, words]``, in float32.

    Registers cannot repeat numbers along a row; a matmul with zeros and ones can, exactly.
    """
    if groups.dtype != jnp.bfloat16:
        groups, places = groups.astype(jnp.float32), places.astype(jnp.float32)
    operands = (places, groups) if planes.is_turned else (groups, places)
    return jax.lax.dot_general(
        *operands, (((0,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if groups.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
