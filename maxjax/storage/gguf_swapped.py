"""Floor 1. ``Swapped``: blocks of a big-endian GGUF file that stay packed.

Below: entry, coding, blocks. Above: gguf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .blocks import layout_of, swap_blocks
from .coding import runs
from .entry import Coding, TensorEntry, Wanted, count, extents, fill, within
from .files import OpenFile, aligned_empty


@dataclass(frozen=True, slots=True)
class Swapped(Coding):
    """Rows of packed blocks, read as the bytes that a little-endian file has of them.

    The entry's dtype is uint8 and its last axis in bytes; ``type_name`` is ggml's name of the
    blocks. A part is read by the blocks that hold it.
    """

    type_name: str

    def read(self, file: OpenFile, entry: TensorEntry, parts: Sequence[Wanted]) -> int:
        """See :class:`Coding`."""
        size, total = layout_of(self.type_name).nbytes, 0
        of_blocks = (*entry.shape[:-1], entry.shape[-1] // size)
        for whole, array in parts:
            for box in self.split(entry, whole) if array.size else ():
                start, stop = box[-1]
                blocks = (*box[:-1], (start // size, -(-stop // size)))
                packed = aligned_empty(count(blocks) * size)
                rows = packed.reshape(*extents(blocks), size)
                for first, run in runs(of_blocks, blocks, rows):
                    fill(file, entry, first * size, memoryview(run.reshape(-1)))
                swap_blocks(self.type_name, packed)
                values = packed.reshape(*extents(blocks[:-1]), -1)
                skipped = start - blocks[-1][0] * size
                array[within(box, whole)] = values[..., skipped : skipped + stop - start]
                total += packed.size
        return total
