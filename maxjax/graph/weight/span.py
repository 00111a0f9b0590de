"""Span: which layers a leading axis of a stack stands for, and the names of their weights."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """The layers that a stack holds: ``start``, ``start + step``, …, with a common name.

    Attributes:
        pattern: text in place of the layer's number in the name of the leaf.
        start, step, count: number of the first layer, distance between numbers, and number of layers.
    """

    pattern: str
    start: int
    step: int
    count: int

    def name(self, full: str, index: int) -> str:
        """The name of one layer's weight, from the name of the leaf."""
        parts = full.split(".")
        if self.pattern in parts:
            parts[parts.index(self.pattern)] = str(self.start + index * self.step)
        return ".".join(parts)
