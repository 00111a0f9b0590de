"""What convert tells: how far it is, and at the end what it has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...storage.save.outgoing import Outgoing

# Told how many bytes are to be written, gives what is told of each piece.
Watch = Callable[[int], Callable[[int], Any]]


@dataclass(frozen=True)
class Converted:
    """What :func:`convert` has written.

    Attributes:
        path: The file or directory.
        format: Of it.
        tensors, nbytes: How many, and how many bytes of data.
        packed: How many of them are quantised blocks.
    """

    path: Path
    format: str
    tensors: int
    nbytes: int
    packed: int


def result_of(target: Path, kind: str, outgoing: list[Outgoing]) -> Converted:
    packed = sum(1 for one in outgoing if one.encoding)
    return Converted(target, kind, len(outgoing), sum(one.nbytes for one in outgoing), packed)


def watched(outgoing: list[Outgoing], watch: Watch | None) -> list[Outgoing]:
    """The tensors, whose pieces are told of when the writer comes back from them."""
    if watch is None:
        return outgoing
    tell = watch(sum(one.nbytes for one in outgoing))

    def told(one: Outgoing) -> Iterator[memoryview]:
        for piece in one.pieces():
            yield piece
            tell(len(piece))

    return [replace(one, pieces=partial(told, one)) for one in outgoing]
