"""Tables of the command line: by rich in a terminal, as aligned columns of plain text elsewhere.

What goes into a pipe or a file is the same whatever the terminal: names are never cut and there are no
colours. rich is imported for a terminal only.
"""

from __future__ import annotations

import json
import os
import shutil
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

    In a narrower one rich would fold names, which could not be copied any more: each row becomes a
    paragraph.
    """
    console = _console() if is_terminal(sys.stdout) else None
    for part in parts:
        if isinstance(part, Table) and console is not None and _width(part) <= console.width:
            console.print(_drawn(part))
            continue
        if isinstance(part, Table) and console is not None:
            found = wrapped(map(printable, paragraphs(part)), console.width)
        else:
            found = lines([part])
        for line in found:
            sys.stdout.write(printable(line, keep="\n\t") + "\n")
    sys.stdout.flush()


def json_line(value: Any) -> str:
    """Return a value as one line of JSON: letters of all scripts as they are, what is not printable escaped.

    Example:
        >>> print(json_line(["\u00e9", "a\x9b"]))
        ["\u00e9", "a\\u009b"]
    """
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def wrapped(texts: Iterable[str], width: int | None = None) -> Iterator[str]:
    """Break lines of text between words, at the width of the terminal or of so many columns.

    Example:
        >>> list(wrapped(["  one two three"], 11))
        ['  one two', '    three']
    """
    import textwrap

    width = width or shutil.get_terminal_size().columns
    for line in texts:
        if len(line) <= width:
            yield line
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        yield from textwrap.wrap(
            line, max(width, len(indent) + 1), subsequent_indent=indent, tabsize=8,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def paragraphs(table: Table) -> Iterator[str]:
    """Return each row of a table as its first cell, and a line with the titles and values of the others.

    Example:
        >>> list(paragraphs(Table([["name", "dtype", "bytes"], ["w", "int8", "4"]], right={2})))
        ['w', '  dtype int8  bytes 4']
    """
    titles, rows = table.rows[: table.titles], table.rows[table.titles :]
    names = [" ".join(filter(None, column)) for column in zip(*titles, strict=True)]
    names = names or [""] * max(map(len, rows), default=0)
    for first, *others in rows:
        yield first
        cells = [
            f"{name} {cell}".strip() for name, cell in zip(names[1:], others, strict=True) if cell
        ]
        if cells:
            yield f"{' ' * (len(first) - len(first.lstrip()))}  {'  '.join(cells)}"


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
