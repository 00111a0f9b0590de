"""How the axes of a tensor in a file lie in another library's array, written out.

``"(h d) e -> e h d"`` is a weight whose rows are heads by width and whose columns are
inputs, and an array of inputs, heads, width. A layout is data: it says which shape the file
must have, which rectangle of the file a piece of the array is, and the way back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserInputError
from ..storage.boxes import Box, extents

_TOKEN = re.compile(r"\(|\)|\d+/\d+|-?[A-Za-z_]\w*|\*")


class Atom(NamedTuple):
    """A factor of an axis of the file: one of the array's axes, or one part of several.

    Attributes:
        name: The axis; None for a part.
        part, parts: Which of how many equal parts, where it is one.
    """

    name: str | None
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Layout:
    """A layout that was read; :func:`layout` reads one.

    Attributes:
        text: As it was written.
        groups: For each axis of the file, what it consists of, from the outside.
        axes: The names of the array's axes.
        flipped: Those that run the other way.
    """

    text: str
    groups: tuple[tuple[Atom, ...], ...]
    axes: tuple[str, ...]
    flipped: frozenset[str]

    @property
    def stacks(self) -> int | None:
        """The axis of the array along which the tensors of several layers lie."""
        return self.axes.index("*") if "*" in self.axes else None

    @property
    def part(self) -> tuple[int, int]:
        """Which of how many equal parts of the file's tensor it takes."""
        found = [atom for group in self.groups for atom in group if atom.name is None]
        return (found[0].part, found[0].parts) if found else (0, 1)

    @property
    def whole(self) -> tuple[Any, ...]:
        """What the layouts of all parts of one tensor have in common."""
        groups = tuple(tuple((a.name, a.parts) for a in group) for group in self.groups)
        return groups, self.axes, self.flipped

    def of(self, shape: Sequence[int]) -> Turn | None:
        """The layout for an array of some shape; None where it has other axes."""
        if len(shape) != len(self.axes):
            return None
        return Turn(self, dict(zip(self.axes, shape, strict=True)))

    def __str__(self) -> str:
        return self.text


@lru_cache
def layout(text: str) -> Layout:
    """Reads a layout.

    Args:
        text: On the left the axes of the tensor in the file, on the right those of the array.
            Axes in brackets lie in one axis of the file. ``1/3`` in brackets or alone takes
            the second of three equal parts. ``-h`` on the right runs backwards. ``*`` on the
            right is the axis along which layers, each a tensor of its own, are stacked.

    Raises:
        UserInputError: It cannot be read, or an axis stands on one side alone.

    Example:
        >>> layout("(h d) e -> e h d").of((8, 4, 2)).file_shape
        (8, 8)
    """
    left, arrow, right = text.partition("->")
    sides = [_tokens(side, text) for side in (left, right)]
    groups = _groups(sides[0], text)
    axes = tuple(token.lstrip("-") for token in sides[1])
    flipped = frozenset(token[1:] for token in sides[1] if token.startswith("-"))
    atoms = [atom for group in groups for atom in group]
    named = [atom.name for atom in atoms if atom.name is not None]
    wanted = [axis for axis in axes if axis != "*"]
    if not arrow or sorted(named) != sorted(set(wanted)) or len(set(axes)) < len(axes):
        raise _unreadable(text, "each axis stands once on either side of '->'")
    if len(atoms) - len(named) > 1 or "*" in flipped:
        raise _unreadable(text, "at most one axis is a part")
    return Layout(text, groups, axes, flipped)


def _tokens(side: str, text: str) -> list[str]:
    tokens = _TOKEN.findall(side)
    if "".join(tokens) != re.sub(r"\s", "", side):
        raise _unreadable(text, "an axis is a word")
    return tokens


def _groups(tokens: list[str], text: str) -> tuple[tuple[Atom, ...], ...]:
    groups: list[tuple[Atom, ...]] = []
    inside: list[Atom] | None = None
    for token in tokens:
        if (token == "(") is (inside is not None) and token in "()":
            raise _unreadable(text, "brackets do not match")
        if token == "(":
            inside = []
        elif token == ")":
            groups.append(tuple(inside or ()))
            inside = None
        elif inside is None:
            groups.append((_atom(token, text),))
        else:
            inside.append(_atom(token, text))
    if inside is not None:
        raise _unreadable(text, "brackets do not match")
    return tuple(groups)


def _atom(token: str, text: str) -> Atom:
    if token[0].isdigit():
        part, parts = map(int, token.split("/"))
        if part >= parts:
            raise _unreadable(text, f"{token} is no part: the first of n is 0/n")
        return Atom(None, part, parts)
    if token == "*" or token.startswith("-"):
        raise _unreadable(text, f"'{token}' may stand on the right alone")
    return Atom(token)


def _unreadable(text: str, why: str) -> UserInputError:
    return UserInputError(f"'{text}' is no layout ({why}): 'o i -> i o', '(h d) e -> e h d'")


class Turn:
    """A layout for an array of one shape.

    Attributes:
        shape: Of the array.
        file_shape: Of the tensor in the file, of one layer where it stacks them.
    """

    def __init__(self, layout: Layout, sizes: Mapping[str, int]):
        self.layout, self.sizes = layout, sizes
        self.shape = tuple(sizes[axis] for axis in layout.axes)
        self.file_shape = tuple(
            math.prod(self._size(atom) for atom in group) for group in layout.groups
        )

    def _size(self, atom: Atom) -> int:
        return atom.parts if atom.name is None else self.sizes[atom.name]

    def _range(self, atom: Atom, box: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """Which indices of the factor belong to a part of the array."""
        if atom.name is None:
            return atom.part, atom.part + 1
        start, stop = box[atom.name]
        if atom.name in self.layout.flipped:
            size = self.sizes[atom.name]
            return size - stop, size - start
        return start, stop

    def file_box(self, box: Box) -> Box:
        """The smallest rectangle of the file's tensor that holds a part of the array.

        Example:
            >>> layout("(h d) e -> e h d").of((8, 4, 2)).file_box(((0, 8), (1, 3), (0, 2)))
            ((2, 6), (0, 8))
        """
        return tuple(covered for covered, _, _ in self._cuts(box))

    def _cuts(self, box: Box) -> list[tuple[tuple[int, int], list[int], list[slice]]]:
        """For each axis of the file: what is read, its factors' sizes in it, and what is kept."""
        named = dict(zip(self.layout.axes, box, strict=True))
        return [self._cut([(self._size(a), *self._range(a, named)) for a in group])
                for group in self.layout.groups]  # fmt: skip

    @staticmethod
    def _cut(
        factors: list[tuple[int, int, int]],
    ) -> tuple[tuple[int, int], list[int], list[slice]]:
        first, last = 0, math.prod(size for size, _, _ in factors)
        stride, sizes, kept = last, [], []
        is_exact = True  # so far a single index of each
        for size, start, stop in factors:
            if is_exact:
                stride //= max(size, 1)
                last = first + stop * stride
                first += start * stride
                sizes.append(stop - start)
                kept.append(slice(None))
                is_exact = stop - start == 1
            else:  # read whole, for the rectangle's sake
                sizes.append(size)
                kept.append(slice(start, stop))
        return (first, last), sizes, kept

    def take(self, read: np.ndarray, box: Box) -> np.ndarray:
        """A part of the array, of what :meth:`file_box` said was to be read; of one layer.

        The axis of layers has size 1 in it. A view where it can be one.
        """
        cuts = self._cuts(box)
        array = read.reshape([size for _, sizes, _ in cuts for size in sizes])
        array = array[tuple(index for _, _, kept in cuts for index in kept)]
        atoms = self._atoms
        array = array.squeeze(tuple(i for i, atom in enumerate(atoms) if atom.name is None))
        names = [atom.name for atom in atoms if atom.name is not None]
        axes = [axis for axis in self.layout.axes if axis != "*"]
        array = array.transpose([names.index(axis) for axis in axes])
        array = array[tuple(self._step(axis) for axis in axes)]
        stacks = self.layout.stacks
        return array if stacks is None else np.expand_dims(array, stacks)

    @property
    def _atoms(self) -> list[Atom]:
        return [atom for group in self.layout.groups for atom in group]

    def _step(self, axis: str) -> slice:
        return slice(None, None, -1) if axis in self.layout.flipped else slice(None)

    def back(self, arrays: Sequence[Any], np_like: Any = np) -> Any:
        """The file's tensor, of the array; of all parts' arrays where the layout takes a part.

        Args:
            arrays: One for each part, in order; without the axis of layers.
            np_like: ``numpy`` or ``jax.numpy``.
        """
        axes = [axis for axis in self.layout.axes if axis != "*"]
        names = [atom.name for atom in self._atoms if atom.name is not None]
        found = []
        for array in arrays:
            turned = array[tuple(self._step(axis) for axis in axes)]
            turned = turned.transpose([axes.index(name) for name in names])
            sizes = [1 if atom.name is None else self.sizes[atom.name] for atom in self._atoms]
            found.append(turned.reshape(sizes))
        one = found[0]
        if len(found) > 1:
            place = next(i for i, atom in enumerate(self._atoms) if atom.name is None)
            one = np_like.concatenate(found, axis=place)
        return one.reshape(self.file_shape)

    def apply(self, array: Any) -> np.ndarray:
        """The whole array, of the file's tensor.

        Example:
            >>> layout("o i -> i o").of((3, 2)).apply(np.zeros((2, 3))).shape
            (3, 2)
        """
        box = tuple((0, 1 if axis == "*" else self.sizes[axis]) for axis in self.layout.axes)
        part = self.file_box(box)
        host = np.asarray(array)
        read = host[tuple(slice(start, stop) for start, stop in part)]
        return self.take(read.reshape(extents(part)), box)
