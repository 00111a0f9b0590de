"""Text for a terminal: aligned tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from .errors import printable


def columns(rows: Sequence[Sequence[str]], right: Collection[int]) -> Iterator[str]:
    """The rows as printable lines of equally wide columns, those in ``right`` aligned to the right.

    Example:
        >>> list(columns([["a", "1"], ["bcd", "10"]], right={1}))
        ['a     1', 'bcd  10']
    """
    rows = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(cells)]
        yield "  ".join(padded).rstrip()


class Table(NamedTuple):
    """Rows that are shown as a table.

    Attributes:
        rows: cells of each row, titles first.
        right: columns that are aligned to the right.
        titles: number of rows that are titles.
    """

    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    titles: int = 1

    def lines(self) -> Iterator[str]:
        """The table as plain text.

        Example:
            >>> list(Table([["name", "bytes"], ["w", "4"]], right={1}).lines())
            ['name  bytes', 'w         4']
        """
        return columns(self.rows, self.right)
