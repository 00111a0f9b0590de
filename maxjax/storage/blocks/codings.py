"""Codings of quantised blocks: ``Decoded`` reads them as float32, ``Swapped`` as little-endian blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .. import boxes
from ..boxes import Box, Wanted, count, extents, runs, within
from ..entry import DECODED_BYTES, Coding, TensorEntry, fill
from ..files import OpenFile, aligned_empty
from .decoders import decode_into
from .layout import BlockLayout, layout_of, swap_blocks


@dataclass(frozen=True, slots=True)
class Swapped(Coding):
    """Rows of quantised blocks, read as the bytes that a little-endian file would hold.

    The entry's dtype is uint8 and its last axis counts bytes; ``type_name`` is ggml's name of the
    blocks. Only the blocks that overlap a part are read.
    """

    type_name: str

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """See :class:`Coding`."""
        layout, total = layout_of(self.type_name), 0
        for part, array in parts:
            for box in self.split(entry, part) if array.size else ():
                start, stop = box[-1]
                rows = _read_blocks(file, entry, box, layout, layout.nbytes, swap=True)
                skipped = start % layout.nbytes
                array[within(box, part)] = rows[..., skipped : skipped + stop - start]
                total += rows.size
        return total


@dataclass(frozen=True, slots=True)
class Decoded(Coding):
    """Rows of quantised blocks; the entry's dtype is float32 and its shape that of the values.

    The last axis consists of complete blocks. Only the blocks that overlap a part are read, with at
    most 4 MB of memory besides the array.

    Attributes:
        type_name: ggml's name of the blocks ("Q4_K").
        swap: whether the file is big-endian, unlike GGUF's usual little-endian order.
    """

    type_name: str
    swap: bool = False

    def split(self, entry: TensorEntry, box: Box) -> Iterator[Box]:
        """Cuts a box between blocks, into boxes of at most 1 MiB of values."""
        layout = layout_of(self.type_name)
        limit = max(1, DECODED_BYTES // 4 // layout.elements)
        start, stop = box[-1]
        for piece in boxes.split(_enclosing(box, layout.elements), limit):
            first, last = piece[-1]
            span = max(start, first * layout.elements), min(stop, last * layout.elements)
            yield (*piece[:-1], span)

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """See :class:`Coding`."""
        total = 0
        for box, array in parts:
            for piece in self.split(entry, box) if array.size else ():
                total += self._read(file, entry, piece, array[within(piece, box)])
        return total

    def _read(self, file: OpenFile, entry: TensorEntry, box: Box, array: np.ndarray) -> int:
        layout = layout_of(self.type_name)
        rows = _read_blocks(file, entry, box, layout, layout.elements, self.swap)
        # One thread each: the jobs of a tensor already run in several.
        decoded = (*rows.shape[:-1], rows.shape[-1] // layout.nbytes * layout.elements)
        if array.shape == decoded:
            decode_into(self.type_name, rows, array, threads=1)
        else:
            values = np.empty(decoded, np.float32)
            decode_into(self.type_name, rows, values, threads=1)
            start = box[-1][0] % layout.elements
            array[...] = values[..., start : start + array.shape[-1]]
        return rows.size


def _read_blocks(
    file: OpenFile, entry: TensorEntry, box: Box, layout: BlockLayout, unit: int, swap: bool
) -> np.ndarray:
    """The bytes of the blocks that enclose a box, ``[..., n * nbytes]``; a block is ``unit`` long on the last axis."""
    blocks = _enclosing(box, unit)
    shape, in_blocks = extents(blocks), (*entry.shape[:-1], entry.shape[-1] // unit)
    packed = aligned_empty(count(blocks) * layout.nbytes)
    for first, run in runs(in_blocks, blocks, packed.reshape(*shape, layout.nbytes)):
        fill(file, entry, first * layout.nbytes, memoryview(run.reshape(-1)))
    if swap:
        swap_blocks(layout.name, packed)
    return packed.reshape(*shape[:-1], shape[-1] * layout.nbytes)


def _enclosing(box: Box, unit: int) -> Box:
    """The box, counted in blocks, that encloses a box; a block is ``unit`` long on the last axis."""
    start, stop = box[-1]
    return (*box[:-1], (start // unit, -(-stop // unit)))
