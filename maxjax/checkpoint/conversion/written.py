"""What a conversion writes, counted piece by piece, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...progress import Task
from ...rendering.row import bytes_text, counted
from ...storage.save.outgoing import Outgoing

# Called with the number of bytes to write; returns a function that is called with the size of
# each piece.
Watch = Callable[[int], Callable[[int], Any]]


@dataclass(frozen=True, repr=False)
class Converted:
    """The checkpoint that :func:`convert` has written.

    Attributes:
        path: path of the file or directory.
        format: format of the checkpoint.
        tensors, nbytes: number of tensors, and of their bytes.
        packed: number of tensors that are quantised.
    """

    path: Path
    format: str
    tensors: int
    nbytes: int
    packed: int

    def __repr__(self) -> str:
        some = f", {self.packed:,} of them quantised" if self.packed else ""
        what = f"{counted(self.tensors, 'tensor')}{some}, {bytes_text(self.nbytes)}"
        return f"Converted('{self.path}', {self.format}: {what})"


def result_of(target: Path, kind: str, outgoing: list[Outgoing]) -> Converted:
    packed = sum(1 for one in outgoing if one.encoding)
    return Converted(target, kind, len(outgoing), sum(one.nbytes for one in outgoing), packed)


def counting(shown: Task, watch: Watch | None) -> Watch:
    """The Watch that counts in a task, and tells the caller's own."""

    def begin(total: int) -> Callable[[int], Any]:
        shown.expect(total)
        return shown.telling(watch and watch(total))

    return begin


def watched(outgoing: list[Outgoing], watch: Watch) -> list[Outgoing]:
    """The tensors; each piece is reported when the writer asks for the next one."""
    report = watch(sum(one.nbytes for one in outgoing))

    def reported(one: Outgoing) -> Iterator[memoryview]:
        for piece in one.pieces():
            yield piece
            report(len(piece))

    return [replace(one, pieces=partial(reported, one)) for one in outgoing]
