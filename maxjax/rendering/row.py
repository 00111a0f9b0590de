"""Row: one line of an object's rendering, with rows below it; equal rows fold into one.

:func:`lines` writes a row as text: one line for a small object, a few lines for one with parts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..columns import columns
from ..errors import printable
from .division import Division, numbers

_MOST_LINES = 8
_WIDTH = 40
_LONGEST_PERIOD = 16


@dataclass(slots=True)
class Row:
    """A line of a rendering.

    Attributes:
        name: name below the row above; "" for the object itself.
        kind: class of the object.
        dtype: dtype or encoding of its elements; if there are several, ordered by their bytes.
        shape: sizes of an array, as numbers or text; None if the object is not an array.
        parameters: number of elements in all ``count`` objects together.
        nbytes: bytes of all ``count`` objects together.
        count: number of equal objects that the row stands for; ``children`` are the rows of one.
        notes: further short remarks: lazy, tied to another, where it is.
        settings: plain attributes by name: numbers and texts.
        division: the part of the array on each device.
        children: rows below it.
        is_array: whether the object is a single array, and not a container.
    """

    name: str = ""
    kind: str = ""
    dtype: str = ""
    shape: tuple[Any, ...] | None = None
    parameters: int = 0
    nbytes: int = 0
    count: int = 1
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    division: Division | None = None
    children: tuple[Row, ...] = ()
    is_array: bool = False

    @property
    def type_text(self) -> str:
        """Dtype and shape in one: ``float32[2, 3]``.

        Example:
            >>> Row(dtype="float32", shape=(2, "n")).type_text
            'float32[2, n]'
        """
        if self.shape is None:
            return self.dtype
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def kind_text(self) -> str:
        """The kind, with the number of equal objects before it."""
        return f"{self.count} × {self.kind}" if self.count > 1 else self.kind


def short(text: object, most: int = 80) -> str:
    """Text on one line with control characters escaped, cut in the middle if it is too long.

    Example:
        >>> short("a" * 9, 5), short("two\\nlines")
        ('aa…aa', 'two\\\\nlines')
    """
    given = str(text)
    if len(given) <= most and given.isprintable():
        return given
    shown = printable(given[: 4 * most])
    if len(shown) <= most and len(given) <= 4 * most:
        return shown
    end = printable(given[-most:])
    half = (most - 1) // 2
    return f"{shown[: most - 1 - half]}…{end[len(end) - half :]}"


def bytes_text(count: int) -> str:
    """A number of bytes in the unit that suits it.

    Example:
        >>> bytes_text(96), bytes_text(3 << 20), bytes_text(16060522496)
        ('96 bytes', '3 MiB', '14.96 GiB')
    """
    size, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    digits = 0 if unit == "bytes" else 2 if size < 100 else 1 if size < 1000 else 0
    text = f"{size:,.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{text} {unit}" if (text, unit) != ("1", "bytes") else "1 byte"


def counted(count: int, one: str, several: str = "") -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "layer"), counted(8030261248, "parameter")
        ('1 layer', '8,030,261,248 parameters')
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def flat(rows: Iterable[Row], prefix: str = "") -> Iterator[tuple[str, Row]]:
    """Every row below, with its full name."""
    for row in rows:
        name = prefix + row.name
        yield name, row
        yield from flat(row.children, f"{name}.")


# --- folding --------------------------------------------------------------------------------


def braced(indices: Sequence[int]) -> str:
    """Indices as a part of a name: one as it is, several in braces.

    Example:
        >>> braced([3]), braced(range(32)), braced(range(0, 32, 2)), braced([0, 1, 2, 4, 5, 6, 8, 9])
        ('3', '{0..31}', '{0,2..30}', '{0..2,4..6,8..9}')
    """
    return str(indices[0]) if len(indices) == 1 else f"{{{numbers(indices)}}}"


def fold(rows: Sequence[Row]) -> list[Row]:
    """The rows of the items of a list, with equal ones folded into one.

    A repeated pattern becomes one row for each kind of item in it, and any other run of equal items one row.
    Items are equal if their rows are equal apart from settings. A setting with a few recurring values (layers
    with and without a sliding window) also tells items apart; one that differs in each item does not.

    Example:
        >>> kinds = "aabaabaab"
        >>> [(row.name, row.kind_text) for row in fold([Row(str(i), k) for i, k in enumerate(kinds)])]
        [('{0..1,3..4,6..7}', '6 × a'), ('{2,5,8}', '3 × b')]
        >>> kinds = "aabbba"
        >>> [(row.name, row.kind_text) for row in fold([Row(str(i), k) for i, k in enumerate(kinds)])]
        [('{0..1}', '2 × a'), ('{2..4}', '3 × b'), ('5', 'a')]
    """
    known: dict[Any, int] = {}
    kinds = zip(map(_key, rows), _telling(rows), strict=True)
    keys = [known.setdefault(kind, len(known)) for kind in kinds]
    found: list[Row] = []
    for start, stop in _regions(keys):
        groups: dict[int, list[int]] = {}
        for i in range(start, stop):
            groups.setdefault(keys[i], []).append(i)
        for members in groups.values():
            folded = together([rows[i] for i in members])
            folded.name = braced([int(rows[i].name) for i in members])
            found.append(folded)
    return found


def merged(rows: Sequence[tuple[list[int], Row]]) -> list[Row]:
    """The rows of several sets of items of a list, with sets of one kind merged.

    Args:
        rows: for each set the indices of its items, and its row, which holds their sums.
    """
    groups: dict[Any, list[tuple[list[int], Row]]] = {}
    for members, row in rows:
        one = replace(row, count=1, parameters=row.parameters // max(row.count, 1))
        groups.setdefault((_key(one), tuple(_flat_settings(row))), []).append((members, row))
    found = []
    for group in groups.values():
        row = together([row for _, row in group])
        if numbers_ := sorted(i for members, _ in group for i in members):
            row.name = braced(numbers_)
        found.append(row)
    return found


def _flat_settings(row: Row, path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a row and of all below it, by path."""
    for name, value in row.settings.items():
        yield f"{path}.{name}", value
    for child in row.children:
        if child.settings or child.children:
            yield from _flat_settings(child, f"{path}.{child.name}")


def _same_settings(a: Row, b: Row) -> bool:
    """Whether two rows and all below them have the same settings."""
    if a.settings != b.settings or len(a.children) != len(b.children):
        return False
    return all(map(_same_settings, a.children, b.children))


def _telling(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """For each row, the values of the settings that distinguish kinds of rows."""
    if len(rows) < 3:
        return [()] * len(rows)
    if all(_same_settings(rows[0], row) for row in rows):
        return [()] * len(rows)
    settings = [dict(_flat_settings(row)) for row in rows]
    names = dict.fromkeys(name for one in settings for name in one)
    columns = ([str(one.get(name)) for one in settings] for name in names)
    told = [column for column in columns if 1 < len(set(column)) <= len(rows) // 2]
    return list(zip(*told, strict=True)) if told else [()] * len(rows)


def _regions(keys: list[int]) -> Iterator[tuple[int, int]]:
    """The (start, stop) of each repeated pattern, and of each single item between them."""
    i = 0
    while i < len(keys):
        best = 1
        for period in range(1, min(_LONGEST_PERIOD, (len(keys) - i) // 2) + 1):
            end = i + period
            while end < len(keys) and keys[end] == keys[end - period]:
                end += 1
            repeats = (end - i) // period
            if repeats > 1 and period * repeats > best:
                best = period * repeats
        yield i, i + best
        i += best


def _key(row: Row) -> Any:
    """A key that is equal for rows that are equal apart from names and settings."""
    below = tuple([(child.name, _key(child)) for child in row.children])
    where = None if row.division is None else row.division.title
    return row.kind, row.dtype, row.shape, row.count, row.parameters, row.notes, where, below


def together(rows: Sequence[Row]) -> Row:
    """One row for several equal ones: their sums, and the settings that all have."""
    if len(rows) == 1:
        return rows[0]
    return replace(
        _alike(rows),
        count=sum(row.count for row in rows),
        parameters=sum(row.parameters for row in rows),
        nbytes=sum(row.nbytes for row in rows),
    )


def _alike(rows: Sequence[Row]) -> Row:
    """The first row, with the settings that all have."""
    children = tuple(_alike(same) for same in zip(*(row.children for row in rows), strict=True))
    return replace(rows[0], settings=_common(rows), children=children)


def _common(rows: Sequence[Row]) -> dict[str, Any]:
    first = rows[0].settings
    if all(row.settings == first for row in rows):
        return first
    every = dict.fromkeys(itertools.chain.from_iterable(row.settings for row in rows))
    return {
        name: first[name]
        if name in first and all(row.settings.get(name) == first[name] for row in rows)
        else "differs"
        for name in every
    }


def lines(title: str, row: Row, most: int = _MOST_LINES) -> str:
    """A title, and below it at most ``most`` rows: the largest ones are replaced by their children first.

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
    """The rows to show with their full names, in order: the largest are replaced by their children."""
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
    """Whether the row has anything to show."""
    return bool(row.nbytes or row.parameters or row.notes or row.is_array)
