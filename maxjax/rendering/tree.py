"""Rows as HTML: a tree that folds, without scripts, for light and dark notebooks."""

from __future__ import annotations

import html
from collections import deque
from collections.abc import Mapping

from .row import Row, bytes_text, short

# Rows that are shown at most: with about 250 characters each, a rendering stays below 30 kB.
_MOST_ROWS = 90
_OPEN_LEVELS = 1
# Colours come from the notebook's own text colour, so that both themes work.
_STYLE = (
    ".mxj{font:12px/1.55 ui-monospace,Menlo,Consolas,monospace;overflow-x:auto}"
    ".mxj details,.mxj .r{margin-left:1.1em;background:none}.mxj>details{margin-left:0}"
    ".mxj .r{padding-left:1em}.mxj summary{cursor:pointer}"
    ".mxj i{opacity:.75}.mxj u{text-decoration:none;color:#4c86b8}.mxj s{text-decoration:none;opacity:.6}"
    ".mxj summary>*,.mxj .r>*{margin-right:.6em}.mxj svg{vertical-align:middle}"
    ".mxj .l{fill:none;stroke:currentColor;stroke-opacity:.5;stroke-width:.8}"
    ".mxj .p{fill:#4c86b8}.mxj .w{fill:#f0a24b}"
)


def tree(title: str, row: Row, opened: int = _OPEN_LEVELS) -> str:
    """The HTML of a row and all rows below it.

    Args:
        title: text of the first line.
        row: row whose children are shown.
        opened: number of levels that are open at first.

    Example:
        >>> page = tree("Model", Row(kind="Model", children=(Row("<a>", "Linear"),)))
        >>> "&lt;a&gt;" in page, "<details" in page, "<script" in page
        (True, True, False)
    """
    shown = _nearest(row)
    return boxed(_node(row, f"<b>{html.escape(title)}</b>", shown, opened))


def card(title: str, facts: Mapping[str, str], drawing: str = "") -> str:
    """The HTML of a single thing: what is known of it, line by line, and a drawing.

    Args:
        title: text of the first line.
        facts: texts by their names.
        drawing: HTML, which is not escaped.
    """
    lines = "".join(
        f'<div class="r"><s>{_text(name, 40)}</s><span>{_text(text, 300)}</span></div>'
        for name, text in facts.items()
    )
    below = f'<div class="r">{drawing}</div>' if drawing else ""
    return boxed(f"<b>{_text(title, 200)}</b>{lines}{below}")


def boxed(content: str) -> str:
    """HTML content in the font and the colours of renderings."""
    return f'<div class="mxj"><style>{_STYLE}</style>{content}</div>'


def _nearest(row: Row) -> set[int]:
    """ids of the rows that are nearest to the top, as many as are shown."""
    queue, found = deque(row.children), set[int]()
    while queue and len(found) < _MOST_ROWS:
        one = queue.popleft()
        found.add(id(one))
        queue.extend(one.children)
    return found


def _node(row: Row, line: str, shown: set[int], opened: int) -> str:
    below = [child for child in row.children if id(child) in shown]
    if not row.children:
        return f'<div class="r">{line}</div>'
    inside = "".join(_node(child, _line(child), shown, opened - 1) for child in below)
    rest = len(row.children) - len(below)
    more = f'<div class="r">… and {rest:,} more</div>' if rest else ""
    # A list of equal layers has one row below it, which is opened with it.
    mark = " open" if opened > 0 else ""
    return f"<details{mark}><summary>{line}</summary>{inside}{more}</details>"


def _line(row: Row) -> str:
    cells = [f"<b>{_text(row.name, 60)}</b>"]
    if row.kind and not row.is_array:
        cells.append(f"<i>{_text(row.kind_text, 48)}</i>")
    if row.type_text and (row.is_array or row.shape is not None):
        cells.append(f"<u>{_text(row.type_text, 60)}</u>")
    if row.nbytes:
        size = bytes_text(row.nbytes)
        if not row.is_array:
            size = f"{row.parameters:,} · {size}"
        cells.append(f"<s>{size}</s>")
    if row.division is not None:
        drawing = row.division.small()
        cells.append(f'<span title="{_text(row.division.title, 100)}">{drawing}</span>')
    if row.notes:
        cells.append(f"<s>{_text(', '.join(row.notes), 100)}</s>")
    if row.settings:
        settings = " ".join(f"{name}={value}" for name, value in row.settings.items())
        cells.append(f"<s>{_text(settings, 100)}</s>")
    return "".join(cells)


def _text(text: object, most: int) -> str:
    return html.escape(short(text, most))
