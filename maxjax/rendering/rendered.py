"""Rendered: what gives a class ``__repr__``, ``_repr_html_`` and ``__treescope_repr__``, made of its row.

A repr may be asked for at any time: of an object whose ``__init__`` has failed, inside a trace, of arrays
whose memory is gone. So whatever fails here becomes text, never an exception.
"""

from __future__ import annotations

import html
from typing import Any

from .row import Row, short
from .text import lines
from .tree import tree


class Rendered:
    """A class that shows itself as a row: of text in a terminal, of HTML in a notebook.

    A subclass defines ``_mx_row``, ``_mx_title`` for its first line, and ``_mx_html`` if it is no tree.
    """

    __slots__ = ()

    def _mx_row(self) -> Row:
        """What is shown of the object; it reads nothing from a device."""
        return Row(kind=type(self).__name__)

    def _mx_title(self, row: Row) -> str:
        """The first line, complete by itself."""
        return row.kind

    def __repr__(self) -> str:
        return guarded(self, lambda: lines(self._mx_title(row := self._mx_row()), row))

    def _mx_html(self) -> str:
        """Its HTML."""
        row = self._mx_row()
        return tree(self._mx_title(row), row)

    def _repr_html_(self) -> str:
        try:
            return self._mx_html()
        except Exception as error:
            return f"<pre>{html.escape(failed(self, error))}</pre>"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        """The same rows for treescope, which calls this and is therefore there."""
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
    """What ``write`` returns; a text that says why if it fails."""
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
