"""Tables of the command line: by rich in a terminal, as aligned columns of plain text elsewhere.

What goes into a pipe or a file is the same whatever the terminal: names are never cut and there are no
colours. rich is imported for a terminal only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ..columns import Table
from ..errors import printable


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that understands more than plain text."""
    return stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")


def lines(parts: Iterable[str | Table]) -> Iterator[str]:
    """The lines of text and tables as plain text."""
    for part in parts:
        if isinstance(part, Table):
            yield from part.lines()
        else:
            yield part


def show(parts: Iterable[str | Table]) -> None:
    """Writes text and tables to stdout; tables by rich in a terminal that is wide enough.

    In a narrower one rich would fold names, which could not be copied any more.
    """
    console = _console() if is_terminal(sys.stdout) else None
    for part in parts:
        if isinstance(part, Table) and console is not None and _width(part) <= console.width:
            console.print(_drawn(part))
        else:
            for line in lines([part]):
                sys.stdout.write(printable(line, keep="\n\t") + "\n")
    sys.stdout.flush()


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=False)


def _width(table: Table) -> int:
    widths = [max(map(len, column)) for column in zip(*table.rows, strict=True)]
    return sum(widths) + 3 * len(widths)


def _drawn(table: Table) -> Any:
    """A table of rich, with its titles in bold."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    found = RichTable(
        box=box.SIMPLE_HEAD if table.titles else None, show_edge=False,
        show_header=bool(table.titles),
        header_style="bold", pad_edge=False, padding=(0, 2, 0, 0),
    )  # fmt: skip
    width = max(map(len, table.rows), default=0)
    for i in range(width):
        title = "\n".join(row[i] for row in table.rows[: table.titles])
        justify = "right" if i in table.right else "left"
        found.add_column(Text(title), justify=justify, no_wrap=True)
    for row in table.rows[table.titles :]:
        found.add_row(*(Text(printable(cell)) for cell in row))
    return found
