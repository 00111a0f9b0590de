"""Layouts: how the axes of a tensor in a file correspond to the axes of another library's array.

``"(h d) e -> e h d"`` means that the file has a weight ``[heads * width, inputs]``, and the model an
array ``[inputs, heads, width]``. A layout is data, not a function, so it also gives the tensor's shape
in the file, the box of the file from which a part of the array is read, and the inverse.
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
    """A factor of an axis of the file: an axis of the array, or one of several equal parts.

    Attributes:
        name: name of the axis; None for a part.
        part, parts: index of the part, from 0, and the number of parts.
    """

    name: str | None
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class AxisLayout:
    """A layout that :func:`layout` has parsed.

    Attributes:
        text: text that was parsed.
        groups: for each axis of the file, its factors, from the outermost to the innermost.
        axes: names of the array's axes.
        flipped: names of the axes whose order is reversed.
    """

    text: str
    groups: tuple[tuple[Atom, ...], ...]
    axes: tuple[str, ...]
    flipped: frozenset[str]

    @property
    def stacks(self) -> int | None:
        """The axis of the array along which the tensors of several layers are stacked."""
        return self.axes.index("*") if "*" in self.axes else None

    @property
    def part(self) -> tuple[int, int]:
        """(Index of the part of the file's tensor that the array is, number of parts)."""
        found = [atom for group in self.groups for atom in group if atom.name is None]
        return (found[0].part, found[0].parts) if found else (0, 1)

    @property
    def all_parts(self) -> tuple[Any, ...]:
        """A key that is equal for the layouts of all parts of one tensor."""
        groups = tuple(tuple((a.name, a.parts) for a in group) for group in self.groups)
        return groups, self.axes, self.flipped

    def of(self, shape: Sequence[int]) -> BoundLayout | None:
        """The layout for an array of this shape; None if the number of axes differs."""
        if len(shape) != len(self.axes):
            return None
        return BoundLayout(self, dict(zip(self.axes, shape, strict=True)))

    def __str__(self) -> str:
        return self.text


@lru_cache
def layout(text: str) -> AxisLayout:
    """Parses a layout.

    Args:
        text: the axes of the tensor in the file, then ``->``, then the axes of the array. Axes in
            brackets are merged into one axis of the file. ``1/3``, in brackets or alone, takes
            the second of three equal parts. ``-h`` on the right reverses the axis. ``*`` on the
            right is the axis along which layers are stacked, each of which is a tensor in the file.

    Raises:
        UserInputError: the text cannot be parsed, or an axis is on one side only.

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
    on_right = [axis for axis in axes if axis != "*"]
    if not arrow or sorted(named) != sorted(set(on_right)) or len(set(axes)) < len(axes):
        raise _unreadable(text, "each axis must be once on either side of '->'")
    if len(atoms) - len(named) > 1 or "*" in flipped:
        raise _unreadable(text, "at most one axis may be a part")
    return AxisLayout(text, groups, axes, flipped)


def _tokens(side: str, text: str) -> list[str]:
    tokens = _TOKEN.findall(side)
    if "".join(tokens) != re.sub(r"\s", "", side):
        raise _unreadable(text, "the name of an axis must be a word")
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
            raise _unreadable(text, f"{token} is not a part: the first of n parts is 0/n")
        return Atom(None, part, parts)
    if token == "*" or token.startswith("-"):
        raise _unreadable(text, f"'{token}' is allowed on the right only")
    return Atom(token)


def _unreadable(text: str, why: str) -> UserInputError:
    return UserInputError(
        f"'{text}' is not a layout ({why}); examples are 'o i -> i o' and '(h d) e -> e h d'"
    )


class BoundLayout:
    """A layout that is applied to an array of a given shape.

    Attributes:
        layout: the layout.
        sizes: size of each axis of the array.
        shape: shape of the array.
        file_shape: shape of the tensor in the file; if layers are stacked, of each layer's tensor.
    """

    def __init__(self, layout: AxisLayout, sizes: Mapping[str, int]):
        self.layout, self.sizes = layout, sizes
        self.shape = tuple(sizes[axis] for axis in layout.axes)
        self.file_shape = tuple(
            math.prod(self._size(atom) for atom in group) for group in layout.groups
        )

    def _size(self, atom: Atom) -> int:
        return atom.parts if atom.name is None else self.sizes[atom.name]

    def _range(self, atom: Atom, box: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """The range of the factor's indices that a box of the array covers."""
        if atom.name is None:
            return atom.part, atom.part + 1
        start, stop = box[atom.name]
        if atom.name in self.layout.flipped:
            size = self.sizes[atom.name]
            return size - stop, size - start
        return start, stop

    def file_box(self, box: Box) -> Box:
        """The smallest box of the file's tensor that contains a box of the array.

        Example:
            >>> layout("(h d) e -> e h d").of((8, 4, 2)).file_box(((0, 8), (1, 3), (0, 2)))
            ((2, 6), (0, 8))
        """
        return tuple(covered for covered, _, _ in self._cuts(box))

    def _cuts(self, box: Box) -> list[tuple[tuple[int, int], list[int], list[slice]]]:
        """For each axis of the file: (range to read, sizes of its factors in that range, slices to keep)."""
        named = dict(zip(self.layout.axes, box, strict=True))
        return [self._cut([(self._size(a), *self._range(a, named)) for a in group])
                for group in self.layout.groups]  # fmt: skip

    @staticmethod
    def _cut(
        factors: list[tuple[int, int, int]],
    ) -> tuple[tuple[int, int], list[int], list[slice]]:
        first, last = 0, math.prod(size for size, _, _ in factors)
        stride, sizes, kept = last, [], []
        is_exact = True  # so far each factor is a single index
        for size, start, stop in factors:
            if is_exact:
                stride //= max(size, 1)
                last = first + stop * stride
                first += start * stride
                sizes.append(stop - start)
                kept.append(slice(None))
                is_exact = stop - start == 1
            else:  # read completely, because a box of the file is contiguous along each axis
                sizes.append(size)
                kept.append(slice(start, stop))
        return (first, last), sizes, kept

    def take(self, read: np.ndarray, box: Box) -> np.ndarray:
        """Makes a box of the array from ``read``, the values of the box of the file that :meth:`file_box` gives.

        An axis of layers has size 1 in it. The result is a view where possible.
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
        """The inverse: makes the file's tensor from the array, or from the arrays of all its parts.

        Args:
            arrays: one array for each part, in order; without the axis of layers.
            np_like: ``numpy`` or ``jax.numpy``, which concatenates the parts.
        """
        axes = [axis for axis in self.layout.axes if axis != "*"]
        names = [atom.name for atom in self._atoms if atom.name is not None]
        found = []
        for array in arrays:
            permuted = array[tuple(self._step(axis) for axis in axes)]
            permuted = permuted.transpose([axes.index(name) for name in names])
            sizes = [1 if atom.name is None else self.sizes[atom.name] for atom in self._atoms]
            found.append(permuted.reshape(sizes))
        one = found[0]
        if len(found) > 1:
            place = next(i for i, atom in enumerate(self._atoms) if atom.name is None)
            one = np_like.concatenate(found, axis=place)
        return one.reshape(self.file_shape)

    def misfit(self, shape: Sequence[int]) -> str | None:
        """Why a tensor of this shape cannot be converted; None if it can."""
        if tuple(shape) == self.file_shape:
            return None
        return f"the layout {self.layout.text!r} takes a tensor of shape {self.file_shape}, not {tuple(shape)}"

    def apply(self, array: Any) -> np.ndarray:
        """Makes the complete array from the file's tensor, which must have the shape ``file_shape``.

        Example:
            >>> layout("o i -> i o").of((3, 2)).apply(np.zeros((2, 3))).shape
            (3, 2)
        """
        box = tuple((0, 1 if axis == "*" else self.sizes[axis]) for axis in self.layout.axes)
        part = self.file_box(box)
        host = np.asarray(array)
        read = host[tuple(slice(start, stop) for start, stop in part)]
        return self.take(read.reshape(extents(part)), box)
