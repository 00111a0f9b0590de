"""Rendered: a base class that makes ``__repr__``, ``_repr_html_`` and ``__treescope_repr__`` from an object's row.

A row as HTML is a tree that folds, without scripts, for light and dark notebooks.

A repr may be requested at any time: of an object whose ``__init__`` has failed, inside a trace, or of arrays
whose memory was freed. So any failure here becomes text, never an exception.
"""

from __future__ import annotations

import html
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from .row import Row, bytes_text, lines, short


class Rendered:
    """A base class of objects that show themselves as a row: text in a terminal, HTML in a notebook.

    A subclass defines ``_mx_row``, ``_mx_title`` for its first line, and ``_mx_html`` if its HTML is not a tree.
    """

    __slots__ = ()

    def _mx_row(self) -> Row:
        """The row that shows the object; making it reads nothing from a device."""
        return Row(kind=type(self).__name__)

    def _mx_title(self, row: Row) -> str:
        """The first line, which can stand alone."""
        return row.kind

    def __repr__(self) -> str:
        return guarded(self, lambda: lines(self._mx_title(row := self._mx_row()), row))

    def _mx_html(self) -> str:
        """The HTML of the object."""
        row = self._mx_row()
        return tree(self._mx_title(row), row)

    def _repr_html_(self) -> str:
        try:
            return self._mx_html()
        except Exception as error:
            return f"<pre>{html.escape(failed(self, error))}</pre>"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """The same rows for treescope, which calls this and is therefore installed."""
        from treescope import rendering_parts

        try:
            row = self._mx_row()
            title = self._mx_title(row)
        except Exception as error:
            return rendering_parts.build_one_line_tree_node(failed(self, error), path)
        return _treescope(rendering_parts, title, row, path)


def summary(shown: Any) -> str:
    """The first line of an object's rendering."""
    if not isinstance(shown, Rendered):
        return short(repr(shown), 200)
    return guarded(shown, lambda: shown._mx_title(shown._mx_row()))


def guarded(shown: Any, write: Any) -> str:
    """The result of ``write``; if it raises an error, a text that describes the error."""
    try:
        return write()
    except Exception as error:
        return failed(shown, error)


def failed(shown: Any, error: Exception) -> str:
    """The text for an object that cannot be shown."""
    return f"<{type(shown).__name__} that cannot be shown: {type(error).__name__}: {short(error)}>"


def _treescope(parts: Any, title: str, row: Row, path: str | None) -> Any:
    below = [_treescope(parts, _one_line(child), child, None) for child in row.children]
    if not below:
        return parts.build_one_line_tree_node(title, path)
    return parts.build_foldable_tree_node_from_children(
        prefix=f"{title} {{", children=below, suffix="}", comma_separated=True, path=path
    )


def _one_line(row: Row) -> str:
    what = row.type_text if row.is_array else row.kind_text
    where = [] if row.division is None else [row.division.title]
    return short(f"{row.name}: {', '.join(filter(None, [what, *row.notes, *where]))}", 160)


# Only for tables, for which notebooks have a style of their own.
_TABLE_STYLE = (
    ".mxj table{border-collapse:collapse;font:inherit;color:inherit}.mxj tr{background:none!important}"
    ".mxj td,.mxj th{border:none;padding:0 8px;text-align:right;white-space:nowrap;background:none}"
    ".mxj .t{text-align:left}"
)
_LEFT = ("", "name", "type")
_BARS = ("#4c86b8", "#f0a24b", "#8a8a8a")
# The largest number of rows: with about 250 characters each, a rendering stays below 30 kB.
_MOST_ROWS = 90
# The number of rows that are visible at first: levels are opened until it is reached.
_OPEN_ROWS = 12
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


def tree(title: str, row: Row) -> str:
    """The HTML of a row and all rows below it.

    Args:
        title: text of the first line.
        row: row whose children are shown.

    Example:
        >>> page = tree("Model", Row(kind="Model", children=(Row("<a>", "Linear"),)))
        >>> "&lt;a&gt;" in page, "<details" in page, "<script" in page
        (True, True, False)
    """
    shown = _nearest(row)
    return boxed(_node(row, f"<b>{html.escape(title)}</b>", shown, _opened(row)))


def card(title: str, facts: Mapping[str, str], drawing: str = "", in_line: bool = False) -> str:
    """The HTML of a single object: a title, facts, and a drawing.

    Args:
        title: text of the first line.
        facts: texts by their names.
        drawing: HTML, which is not escaped.
        in_line: whether all facts are on one line, and not each on its own.
    """
    found = [
        f"<s>{_text(name, 40)}</s><span>{_text(text, 300)}</span>" for name, text in facts.items()
    ]
    joined = ["".join(found)] if in_line else found
    lines = "".join(f'<div class="r">{one}</div>' for one in joined)
    below = f'<div class="r">{drawing}</div>' if drawing else ""
    return boxed(f"<b>{_text(title, 200)}</b>{lines}{below}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], pictures: Sequence[str] = ()) -> str:
    """A table of texts as HTML; columns of names and types are aligned to the left.

    Args:
        head: titles of the columns.
        rows: texts of the cells, which are escaped.
        pictures: HTML of a last cell for each row, which is not escaped.
    """
    left = [' class="t"' if name in _LEFT else "" for name in head]
    cell = lambda tag, i, text: f"<{tag}{left[i]}>{text}</{tag}>"
    lines = ["".join(cell("th", i, _text(name, 40)) for i, name in enumerate(head))]
    for i, row in enumerate(rows):
        cells = "".join(cell("td", k, _text(text, 60)) for k, text in enumerate(row))
        lines.append(cells + (cell("td", len(head) - 1, pictures[i]) if pictures else ""))
    style = f"<style>{_TABLE_STYLE}</style>"
    return f"{style}<table>{''.join(f'<tr>{one}</tr>' for one in lines)}</table>"


def plain_table(rows: Sequence[Sequence[str]], titles: int = 1) -> str:
    """A table of texts as HTML in the notebook's own style, of which the first ``titles`` rows are titles.

    Example:
        >>> plain_table([["name"], ["<w>"]])
        '<table><tr><th>name</th></tr><tr><td>&lt;w&gt;</td></tr></table>'
    """
    lines = []
    for i, row in enumerate(rows):
        tag = "th" if i < titles else "td"
        lines.append("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def memory_bar(parts: Mapping[str, int], size: int) -> str:
    """A bar of the parts of a device's memory as HTML; its border is red if they exceed ``size`` bytes.

    Example:
        >>> "weights: 3 KiB" in memory_bar({"weights": 3072}, 4096)
        True
    """
    total = sum(parts.values())
    scale = 100 / max(total, size, 1)
    pieces = "".join(
        f'<div title="{_text(name, 40)}" style="width:{taken * scale:.2f}%;background:{color}"></div>'
        for (name, taken), color in zip(parts.items(), _BARS, strict=False)
        if taken
    )
    edge = "#c44" if total > size else "currentColor"
    names = ", ".join(
        f"{_text(name, 40)}: {bytes_text(taken)}" for name, taken in parts.items() if taken
    )
    return boxed(
        f'<div style="display:flex;height:12px;max-width:480px;border:1px solid {edge}">{pieces}</div>'
        f"<s>{names}, of {bytes_text(size)}</s>"
    )


def boxed(content: str) -> str:
    """HTML content in the font and the colours of renderings."""
    return f'<div class="mxj"><style>{_STYLE}</style>{content}</div>'


def _nearest(row: Row) -> set[int]:
    """The ``id`` of each row to show: those nearest to the top, at most ``_MOST_ROWS``."""
    queue, found = deque(row.children), set[int]()
    while queue and len(found) < _MOST_ROWS:
        one = queue.popleft()
        found.add(id(one))
        queue.extend(one.children)
    return found


def _opened(row: Row) -> set[int]:
    """The ``id`` of each row that is open at first: from the top, up to ``_OPEN_ROWS`` visible rows."""
    found, count, queue = {id(row)}, len(row.children), deque(row.children)
    while queue:
        one = queue.popleft()
        below = one.children
        # The weights of a layer are left closed beside other layers.
        is_last = bool(below) and below[0].is_array and len(row.children) > 1
        if below and not is_last and count + len(below) <= _OPEN_ROWS:
            found.add(id(one))
            count += len(below)
            queue.extend(below)
    return found


def _node(row: Row, line: str, shown: set[int], opened: set[int]) -> str:
    below = [child for child in row.children if id(child) in shown]
    if not row.children:
        return f'<div class="r">{line}</div>'
    inside = "".join(_node(child, _line(child), shown, opened) for child in below)
    rest = len(row.children) - len(below)
    more = f'<div class="r">… and {rest:,} more</div>' if rest else ""
    mark = " open" if id(row) in opened else ""
    return f"<details{mark}><summary>{line}</summary>{inside}{more}</details>"


def _line(row: Row) -> str:
    cells = [f"<b>{_text(row.name, 60)}</b>"]
    if row.kind and not row.is_array:
        cells.append(f"<i>{_text(row.kind_text, 48)}</i>")
    # A layer with a single weight shows that on its own line.
    only = row.children[0] if len(row.children) == 1 and row.children[0].is_array else row
    if only.type_text and (only.is_array or only.shape is not None):
        cells.append(f"<u>{_text(only.type_text, 60)}</u>")
    if row.nbytes:
        size = bytes_text(row.nbytes)
        if not row.is_array:
            size = f"{row.parameters:,} · {size}"
        cells.append(f"<s>{size}</s>")
    if only.division is not None:
        drawing = only.division.small()
        cells.append(f'<span title="{_text(only.division.title, 100)}">{drawing}</span>')
    if notes := dict.fromkeys([*row.notes, *only.notes]):
        cells.append(f"<s>{_text(', '.join(notes), 100)}</s>")
    if row.settings:
        settings = " ".join(f"{name}={_value(value)}" for name, value in row.settings.items())
        cells.append(f"<s>{_text(settings, 100)}</s>")
    return "".join(cells)


def _text(text: object, most: int) -> str:
    return html.escape(short(text, most))


def _value(value: Any) -> str:
    """A setting as text; a float with 7 digits, because the numbers of GGUF files are float32: 1e-05."""
    return f"{value:.7g}" if type(value) is float else short(value, 24)
