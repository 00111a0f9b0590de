"""Division: which device holds which part of an array, and drawings of it as text and as SVG.

A drawing has two axes: those of the array that are split most.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

# The range along each axis.
Ranges = tuple[tuple[int, int], ...]
# The largest numbers of devices or columns, of lines, and of labelled parts that are drawn.
_MOST_DEVICES, _MOST_LINES, _MOST_CELLS = 16, 32, 64


def numbers(found: Iterable[int], most: int = 4) -> str:
    """Whole numbers in a few characters, runs and steps joined.

    Example:
        >>> numbers([0, 1, 2, 3]), numbers([0, 4]), numbers([0, 2, 4, 6]), numbers(range(0, 99, 9))
        ('0..3', '0,4', '0,2..6', '0,9..90')
        >>> numbers([0, 1, 5, 6, 10, 11, 15, 16, 20, 21])
        '0..1,5..6,…,20..21'
    """
    every = list(found)
    steps = {b - a for a, b in zip(every, every[1:], strict=False)}
    if len(every) > 3 and len(steps) == 1 and (step := steps.pop()) > 1:
        return f"{every[0]},{every[0] + step}..{every[-1]}"
    runs: list[list[int]] = []
    for one in every:
        if runs and one == runs[-1][-1] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    texts = [str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs]
    if len(texts) > most:
        texts = [*texts[: most - 2], "…", texts[-1]]
    return ",".join(texts)


@dataclass(frozen=True)
class Division:
    """The parts of an array, and the devices that hold each.

    Attributes:
        shape: sizes of the array.
        title: description of the sharding in words.
        parts: for each part, the range along each axis, and the ids of the devices that hold it.
    """

    shape: tuple[int, ...]
    title: str
    parts: tuple[tuple[Ranges, tuple[int, ...]], ...]

    @classmethod
    def of(cls, shape: Sequence[int], title: str, boxes: Mapping[int, Ranges]) -> Division:
        """The division of an array for which ``boxes`` gives the part of each device.

        Example:
            >>> found = Division.of((4, 2), "rows", {0: ((0, 2), (0, 2)), 1: ((2, 4), (0, 2))})
            >>> found.parts[1], found.counts
            ((((2, 4), (0, 2)), (1,)), (2, 1))
        """
        parts: dict[Ranges, list[int]] = {}
        for device, box in boxes.items():
            parts.setdefault(box, []).append(device)
        ordered = sorted(parts.items())
        return cls(tuple(shape), title, tuple((box, tuple(held)) for box, held in ordered))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of parts along each axis."""
        return tuple(
            max(len({box[axis] for box, _ in self.parts}), 1) for axis in range(len(self.shape))
        )

    @property
    def devices(self) -> list[int]:
        """The ids of all devices."""
        return sorted({device for _, held in self.parts for device in held})

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the complete array."""
        return len(self.parts) == 1

    @cached_property
    def axes(self) -> tuple[int, int] | tuple[int] | tuple[()]:
        """The axes that are drawn: the most split ones, or else the last ones, in their order."""
        rank = len(self.shape)
        order = sorted(range(rank), key=lambda axis: (-self.counts[axis], -axis))
        return tuple(sorted(order[:2]))  # type: ignore[return-value]

    def drawn(self) -> dict[tuple[tuple[int, int], tuple[int, int]], list[int]]:
        """The parts as rectangles (rows, columns) of the drawn axes, each with its devices.

        If further axes are split, only the first part along them is included.
        """
        axes, found = self.axes, {}
        others = [axis for axis in range(len(self.shape)) if axis not in axes]
        for box, held in self.parts:
            if all(box[axis][0] == 0 for axis in others):
                found.setdefault(self._spans(box), []).extend(held)
        return found

    def _spans(self, box: Ranges) -> tuple[tuple[int, int], tuple[int, int]]:
        """The rows and columns of a part in the drawing."""
        spans = [box[axis] for axis in self.axes]
        while len(spans) < 2:
            spans.insert(0, (0, 1))
        return spans[0], spans[1]

    def size_on(self, device: int) -> int:
        """The number of elements that a device has."""
        return sum(
            math.prod(stop - start for start, stop in box)
            for box, held in self.parts
            if device in held
        )

    @property
    def extent(self) -> tuple[int, int]:
        """The number of rows and columns of the drawn axes."""
        sizes = [max(self.shape[axis], 1) for axis in self.axes]
        while len(sizes) < 2:
            sizes.insert(0, 1)
        return sizes[0], sizes[1]

    @property
    def sentence(self) -> str:
        """How many parts there are, of which shape, and on how many devices."""
        if not self.parts:
            return "no devices"
        box, held = self.parts[0]
        count, devices = len(self.parts), len(self.devices)
        sizes = f"[{', '.join(str(stop - start) for start, stop in box)}]"
        if devices == 1:
            return f"on device {held[0]}"
        if count == 1:
            return f"replicated on {devices} devices"
        each = f", each on {len(held)} devices" if len(held) > 1 else ""
        hidden = sum(n > 1 for n in self.counts) > 2
        first = "; drawn is the first part of the other axes" if hidden else ""
        return f"{count} parts of {sizes}{each}{first}"

    # -- drawings

    def text(self) -> str:
        """The parts as a grid of characters, with the ids of the devices in each.

        Example:
            >>> rows = {0: ((0, 2), (0, 2)), 1: ((2, 4), (0, 2)), 2: ((0, 2), (0, 2)), 3: ((2, 4), (0, 2))}
            >>> print(Division.of((4, 2), "rows", rows).text())
            ┌─────┐
            │ 0,2 │
            ├─────┤
            │ 1,3 │
            └─────┘
        """
        cells = self.drawn()
        tops = sorted({rows for rows, _ in cells})
        lefts = sorted({columns for _, columns in cells})
        if len(tops) > _MOST_LINES or len(lefts) > _MOST_DEVICES:
            return "\n".join(
                f"{_range(r)} × {_range(c)}: {numbers(held)}"
                for (r, c), held in list(cells.items())[:_MOST_LINES]
            ) + ("\n…" if len(cells) > _MOST_LINES else "")
        table = [[numbers(sorted(cells.get((r, c), []))) for c in lefts] for r in tops]
        width = max((len(cell) for line in table for cell in line), default=0)
        rule = lambda a, b, c: a + b.join("─" * (width + 2) for _ in lefts) + c
        lines = [f"│{'│'.join(f' {cell:^{width}} ' for cell in line)}│" for line in table]
        middle = f"\n{rule('├', '┼', '┤')}\n".join(lines)
        return f"{rule('┌', '┬', '┐')}\n{middle}\n{rule('└', '┴', '┘')}"

    def line(self) -> str:
        """The devices of each part on one line: columns between bars, rows between slashes.

        Example:
            >>> rows = {0: ((0, 2), (0, 2)), 1: ((2, 4), (0, 2)), 2: ((0, 2), (0, 2)), 3: ((2, 4), (0, 2))}
            >>> Division.of((4, 2), "rows", rows).line()
            '0,2 / 1,3'
        """
        cells = self.drawn()
        tops = dict.fromkeys(rows for rows, _ in cells)
        if len(cells) > _MOST_CELLS:
            return f"{len(cells)} parts"
        lines = (
            " | ".join(numbers(sorted(held)) for (at, _), held in cells.items() if at == rows)
            for rows in tops
        )
        return " / ".join(lines)

    def _scaled(self, wide: float, high: float, least: float) -> tuple[float, float]:
        """The size of the drawing of the array within a box, in its own proportions."""
        rows, columns = self.extent
        scale = min(wide / columns, high / rows)
        return max(columns * scale, least), max(rows * scale, least)

    def _rectangle(
        self, rows: tuple[int, int], columns: tuple[int, int], wide: float, high: float
    ) -> tuple[str, str, str, str]:
        """Corner and size of a part in a drawing, as text."""
        all_rows, all_columns = self.extent
        left, right = (wide * x / all_columns for x in columns)
        top, down = (high * y / all_rows for y in rows)
        return _n(left), _n(top), _n(right - left), _n(down - top)

    def small(self) -> str:
        """A drawing as high as a line of text: the array with its parts, the first device's filled."""
        wide, high = self._scaled(24, 14, 4)
        cells = self.drawn()
        if not cells:
            return ""
        first = next(iter(cells.values()))[0]
        mine = [self._rectangle(*at, wide, high) for at, held in cells.items() if first in held]
        filled = "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in mine)
        tops = sorted({rows[0] for rows, _ in cells})[1:]
        lefts = sorted({columns[0] for _, columns in cells})[1:]
        all_rows, all_columns = self.extent
        lines = ""
        if len(tops) <= _MOST_LINES and len(lefts) <= _MOST_LINES:
            lines = "".join(f"M0 {_n(high * r / all_rows)}h{_n(wide)}" for r in tops)
            lines += "".join(f"M{_n(wide * c / all_columns)} 0v{_n(high)}" for c in lefts)
        kind = "w" if self.is_replicated else "p"
        return (
            f'<svg width="{_n(wide)}" height="{_n(high)}"><path class="{kind}" d="{filled}"/>'
            f'<path class="l" d="M0 0h{_n(wide)}v{_n(high)}H0z{lines}"/></svg>'
        )

    def svg(self) -> str:
        """A drawing in which each part shows the ids of its devices."""
        wide, high = self._scaled(320, 240, 24)
        cells = self.drawn()
        pieces = []
        colors = {held: i for i, held in enumerate(dict.fromkeys(map(tuple, cells.values())))}
        for (rows, columns), held in cells.items():
            x, y, w, h = self._rectangle(rows, columns, wide, high)
            color = (
                "hsl(30 85% 62%)"
                if self.is_replicated
                else _color(colors[tuple(held)], len(colors))
            )
            label = html.escape(numbers(sorted(held)))
            pieces.append(
                f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{color}" '
                f'stroke="currentColor" stroke-opacity="0.6"><title>{label}: {_range(rows)} × '
                f"{_range(columns)}</title></rect>"
            )
            if len(cells) <= _MOST_CELLS:
                size = min(13.0, 1.5 * float(w) / max(len(label), 1), 0.8 * float(h))
                pieces.append(
                    f'<text x="{_n(float(x) + float(w) / 2)}" y="{_n(float(y) + float(h) / 2)}" font-size="{_n(size)}" '
                    f'fill="#111" text-anchor="middle" dominant-baseline="central">{label}</text>'
                )
        return _svg(wide + 2, high + 2, f'<g transform="translate(1 1)">{"".join(pieces)}</g>')

    def on_device(self, device: int, side: float = 56) -> str:
        """The array in outline, and the part of it that one device has, filled."""
        wide, high = self._scaled(side, side, 3)
        mine = [self._spans(box) for box, held in self.parts if device in held]
        color = "#f0a24b" if self.is_replicated else "#4c86b8"
        piece = "".join(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{color}"/>'
            for x, y, w, h in (self._rectangle(*at, wide, high) for at in mine)
        )
        outline = f'<rect width="{_n(wide)}" height="{_n(high)}" fill="none" stroke="#888" stroke-width="0.8"/>'
        return _svg(wide + 2, high + 2, f'<g transform="translate(1 1)">{piece}{outline}</g>')


def device_table(rows: Mapping[str, Division], labels: Mapping[int, str]) -> str:
    """An HTML table of the part that each device has, with a row for each array and a column for each device.

    Args:
        rows: divisions by the names of the arrays.
        labels: title of a device's column, by device id.
    """
    devices = sorted({device for one in rows.values() for device in one.devices})
    shown = devices[:_MOST_DEVICES]
    cell = 'style="padding:3px 5px;text-align:center;background:none;border:none"'
    name = 'style="padding:3px 8px;text-align:right;background:none;border:none;white-space:nowrap"'
    head = "".join(
        f"<th {cell}>{html.escape(labels.get(d, str(d))).replace(chr(10), '<br>')}</th>"
        for d in shown
    )
    lines = [f"<tr><th {name}></th>{head}</tr>"]
    for title, one in rows.items():
        sizes = " × ".join(str(one.shape[axis]) for axis in one.axes)
        if len(one.shape) > 2:
            sizes = f"axes {' and '.join(map(str, one.axes))}: {sizes}"
        cells = "".join(f"<td {cell}>{one.on_device(d)}</td>" for d in shown)
        label = f"{html.escape(title)}<br><small>{sizes}</small>"
        lines.append(f'<tr><th {name} title="{html.escape(one.title)}">{label}</th>{cells}</tr>')
    more = len(devices) - len(shown)
    rest = f"<div>… and {more} more devices</div>" if more else ""
    return (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:12px">'
        f"{''.join(lines)}</table>{rest}</div>"
    )


def _color(i: int, count: int) -> str:
    return f"hsl({round(205 + 300 * i / max(count, 1)) % 360} 45% {58 + 9 * (i % 2)}%)"


def _range(span: tuple[int, int]) -> str:
    return f"{span[0]}:{span[1]}"


def _n(value: float) -> str:
    """A coordinate in as few characters as it needs."""
    return f"{value:.1f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def _svg(wide: float, high: float, content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(wide)}" height="{_n(high)}" '
        f'viewBox="0 0 {_n(wide)} {_n(high)}" style="max-width:100%">{content}</svg>'
    )
