"""The fields of ggml's quantised blocks as a table, and the reversal of their byte order.

A block is a C structure without padding; ``LAYOUTS`` lists the fields of each in file order, as in
ggml-common.h of llama.cpp. The decoders document the bits of each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Name, values per block, fields as name:type or name:type*count; u1 and i1 are bytes, f2 is a
# float16, u2 an unsigned 16-bit integer. "!" marks blocks with bytes that ggml itself reads as wider
# native integers, so that their big-endian form is undefined.
_TABLE = """
Q1_0      128  d:f2 qs:u1*16
Q2_0       64  d:f2 qs:u1*16
Q4_0       32  d:f2 qs:u1*16
Q4_1       32  d:f2 m:f2 qs:u1*16
Q5_0   !   32  d:f2 qh:u1*4 qs:u1*16
Q5_1   !   32  d:f2 m:f2 qh:u1*4 qs:u1*16
Q8_0       32  d:f2 qs:i1*32
Q8_1       32  d:f2 s:f2 qs:i1*32
Q2_K      256  scales:u1*16 qs:u1*64 d:f2 dmin:f2
Q3_K      256  hmask:u1*32 qs:u1*64 scales:u1*12 d:f2
Q4_K      256  d:f2 dmin:f2 scales:u1*12 qs:u1*128
Q5_K      256  d:f2 dmin:f2 scales:u1*12 qh:u1*32 qs:u1*128
Q6_K      256  ql:u1*128 qh:u1*64 scales:i1*16 d:f2
Q8_K      256  d:f4 qs:i1*256 bsums:i2*16
IQ1_S     256  d:f2 qs:u1*32 qh:u2*8
IQ1_M  !  256  qs:u1*32 qh:u1*16 scales:u2*4
IQ2_XXS ! 256  d:f2 qs:u4*16
IQ2_XS    256  d:f2 qs:u2*32 scales:u1*8
IQ2_S     256  d:f2 qs:u1*32 signs:u1*32 qh:u1*8 scales:u1*8
IQ3_XXS ! 256  d:f2 qs:u1*64 scales:u4*8
IQ3_S     256  d:f2 qs:u1*64 qh:u1*8 signs:u1*32 scales:u1*4
IQ4_NL     32  d:f2 qs:u1*16
IQ4_XS    256  d:f2 scales_h:u2 scales_l:u1*4 qs:u1*128
TQ1_0     256  qs:u1*48 qh:u1*4 d:f2
TQ2_0     256  qs:u1*64 d:f2
MXFP4      32  e:u1 qs:u1*16
NVFP4      64  d:u1*4 qs:u1*32
"""


@dataclass(frozen=True, slots=True)
class Field:
    """``count`` values of type ``code`` (NumPy's, without byte order) at byte ``offset`` of a block."""

    name: str
    code: str
    count: int
    offset: int

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return int(self.code[1:])

    @property
    def end(self) -> int:
        """The offset of the next field."""
        return self.offset + self.itemsize * self.count


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block type: ``elements`` values in ``nbytes`` bytes, divided into ``fields``.

    ``swappable`` says whether the block is defined in big-endian files; ``record`` is its NumPy dtype.
    """

    name: str
    elements: int
    fields: tuple[Field, ...]
    swappable: bool
    record: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.record.itemsize

    def split(self, blocks: np.ndarray) -> list[np.ndarray]:
        """Views of the fields of blocks ``[n, nbytes]``: ``[n]`` for single values, otherwise ``[n, count]``.

        Example:
            >>> d, qs = LAYOUTS["Q4_0"].split(np.zeros((3, 18), np.uint8))
            >>> d.dtype, d.shape, qs.shape
            (dtype('float16'), (3,), (3, 16))
        """
        records = blocks.view(self.record)[:, 0]
        return [records[field.name] for field in self.fields]


def _parse(line: str) -> BlockLayout:
    name, *rest = line.split()
    swappable = rest[0] != "!"
    elements, *fields = rest if swappable else rest[1:]
    found: list[Field] = []
    for text in fields:
        field, _, kind = text.partition(":")
        code, _, count = kind.partition("*")
        found.append(Field(field, code, int(count or 1), found[-1].end if found else 0))
    record = [
        (f.name, f"<{f.code}", f.count) if f.count > 1 else (f.name, f"<{f.code}") for f in found
    ]
    return BlockLayout(name, int(elements), tuple(found), swappable, np.dtype(record))


LAYOUTS: dict[str, BlockLayout] = {
    layout.name: layout for layout in map(_parse, _TABLE.strip().splitlines())
}
"""Name of a type of ggml → how the bytes of its blocks are laid out."""


KEPT = (
    "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Types that stay quantised in memory, for kernels that take blocks. Others are read as float32."""


def layout_of(name: str) -> BlockLayout:
    """The layout of a block type by its name.

    Raises:
        NotImplementedError: the block type does not exist or is not supported.

    Example:
        >>> layout_of("Q4_K").elements, layout_of("Q4_K").nbytes
        (256, 144)
    """
    if name not in LAYOUTS:
        raise NotImplementedError(f"block type {name!r} is not supported")
    return LAYOUTS[name]


def block_shape(layout: BlockLayout, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the values in an array of blocks whose shape in bytes is ``shape``.

    Raises:
        ValueError: the last axis does not consist of complete blocks.
    """
    if not shape or shape[-1] % layout.nbytes:
        raise ValueError(
            f"the last axis of {layout.name} blocks must be a multiple of {layout.nbytes} bytes, "
            f"got shape {tuple(shape)}"
        )
    return (*shape[:-1], shape[-1] // layout.nbytes * layout.elements)


def swap_blocks(name: str, blocks: np.ndarray) -> np.ndarray:
    """Reverses the byte order of blocks in place: uint8 ``[..., n * nbytes]``.

    Every value of more than one byte is reversed, as in llama.cpp's gguf_convert_endian.py. Returns
    ``blocks``, which must be C-contiguous.

    Raises:
        NotImplementedError: the type is unknown, or its big-endian form is undefined.
        ValueError: the last axis does not consist of complete blocks, or the array is not contiguous.

    Example:
        >>> swap_blocks("Q8_0", np.arange(34, dtype=np.uint8))[:4]
        array([1, 0, 2, 3], dtype=uint8)
    """
    layout = layout_of(name)
    if not layout.swappable:
        raise NotImplementedError(f"{name} blocks have no defined form in big-endian files")
    block_shape(layout, blocks.shape)
    if not blocks.flags.c_contiguous:
        raise ValueError("swap_blocks takes a C-contiguous array")
    rows = blocks.reshape(-1, layout.nbytes)
    for field in layout.fields:
        if field.itemsize > 1:
            values = rows[:, field.offset : field.end].view(f"u{field.itemsize}")
            values.byteswap(inplace=True)
    return blocks
