"""The report of a quantisation: for each weight its type, its bytes, and what was lost."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from ...columns import columns, visible

_HEAD = ("weight", "type", "before", "after", "error", "worst rows")


@dataclass(frozen=True)
class WeightReport:
    """A weight that was quantised.

    Attributes:
        name: name in the checkpoint.
        type: type of the blocks, "Q4_K" for example.
        bytes_before, bytes_after: size of its values.
        error: relative root mean square error: the norm of the difference over that of the weight.
        worst_rows: the rows with the largest relative errors and these errors, the worst first.
    """

    name: str
    type: str
    bytes_before: int
    bytes_after: int
    error: float
    worst_rows: tuple[tuple[int, float], ...]


@dataclass(frozen=True, repr=False)
class QuantizationReport:
    """What :func:`maxjax.quantize` did. It prints as a table, and is one in a notebook.

    Attributes:
        rows: the weights that were quantised.
        kept: names of the linear layers' and embedding tables' weights that were not, with the reason.
        bytes_kept: size of all weights that were not quantised.

    Example:
        >>> row = WeightReport("lm_head.weight", "Q8_0", 4096, 1088, 0.0042, ((3, 0.005),))
        >>> print(QuantizationReport((row,), {}, 128))
        weight          type  before  after    error  worst rows
        lm_head.weight  Q8_0   4,096  1,088  0.00420  3 (0.00500)
        1 weight: 4,096 → 1,088 bytes; 128 bytes of others
    """

    rows: tuple[WeightReport, ...]
    kept: dict[str, str]
    bytes_kept: int

    @property
    def bytes_before(self) -> int:
        """The size of the quantised weights before."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """The size of the quantised weights now."""
        return sum(row.bytes_after for row in self.rows)

    def __getitem__(self, name: str) -> WeightReport:
        """The row of a weight."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def _cells(self) -> list[Sequence[str]]:
        return [
            (visible(row.name), row.type, f"{row.bytes_before:,}", f"{row.bytes_after:,}",
             f"{row.error:.5f}", ", ".join(f"{i} ({e:.5f})" for i, e in row.worst_rows))
            for row in self.rows
        ]  # fmt: skip

    def _summary(self) -> list[str]:
        many = "1 weight" if len(self.rows) == 1 else f"{len(self.rows):,} weights"
        lines = [
            f"{many}: {self.bytes_before:,} → {self.bytes_after:,} bytes; "
            f"{self.bytes_kept:,} bytes of others"
        ]
        return lines + [f"not quantised: {visible(n)}: {why}" for n, why in self.kept.items()]

    def __repr__(self) -> str:
        return f"QuantizationReport({self._summary()[0]})"

    def __str__(self) -> str:
        table = columns([_HEAD, *self._cells()], right={2, 3, 4})
        return "\n".join([*table, *self._summary()])

    def _repr_html_(self) -> str:
        cell = lambda kind, text: f"<{kind}>{html.escape(text)}</{kind}>"
        rows = [("th", _HEAD), *(("td", cells) for cells in self._cells())]
        body = "".join(f"<tr>{''.join(cell(kind, c) for c in cells)}</tr>" for kind, cells in rows)
        summary = "".join(cell("div", line) for line in self._summary())
        return f"<table>{body}</table>{summary}"
