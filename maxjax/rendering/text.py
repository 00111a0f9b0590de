"""Rows as text: one line for a small thing, a few for one with parts."""

from __future__ import annotations

import heapq

from ..columns import columns
from .row import Row, bytes_text, short

_MOST_LINES = 8
_WIDTH = 40


def lines(title: str, row: Row, most: int = _MOST_LINES) -> str:
    """A title, and below it the parts that matter most: the largest are opened first.

    Example:
        >>> rows = (Row("a", "Linear", "float32", None, 6, 24), Row("b", "Linear", "float32", None, 3, 12))
        >>> print(lines("Model(9 parameters)", Row(kind="Model", children=rows)))
        Model(9 parameters)
          a  Linear  6  24 bytes
          b  Linear  3  12 bytes
    """
    found = _opened(row, most)
    if not found:
        return title
    table = [
        [f"  {short(name, _WIDTH)}", short(one.type_text if one.is_array else one.kind_text, _WIDTH),
         f"{one.parameters:,}" if one.parameters else "", bytes_text(one.nbytes) if one.nbytes else "",
         short(", ".join(one.notes), _WIDTH)]
        for name, one in found[:most]
    ]  # fmt: skip
    rest = len(found) - most
    more = [f"  … and {rest:,} more"] if rest > 0 else []
    return "\n".join([title, *columns(table, right=(2, 3)), *more])


def _opened(row: Row, most: int) -> list[tuple[str, Row]]:
    """The rows to show with their full names, in order: the largest ones replaced by those below."""
    shown: dict[tuple[int, ...], tuple[str, Row]] = {
        (i,): (child.name, child) for i, child in enumerate(row.children) if _counts(child)
    }
    queue: list[tuple[int, tuple[int, ...]]] = []

    def offer(place: tuple[int, ...]) -> None:
        one = shown[place][1]
        if one.count == 1 and any(not child.is_array and _counts(child) for child in one.children):
            heapq.heappush(queue, (-one.nbytes, place))

    for place in list(shown):
        offer(place)
    while queue:
        _, place = heapq.heappop(queue)
        name, one = shown[place]
        below = [(i, child) for i, child in enumerate(one.children) if _counts(child)]
        if len(shown) - 1 + len(below) > most:
            continue
        del shown[place]
        for i, child in below:
            shown[(*place, i)] = (f"{name}.{child.name}", child)
            offer((*place, i))
    return [shown[place] for place in sorted(shown)]


def _counts(row: Row) -> bool:
    """Whether it has anything worth a line."""
    return bool(row.nbytes or row.parameters or row.notes or row.is_array)
