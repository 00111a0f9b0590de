"""Renaming tables between the tensors of a checkpoint and the arrays of a model; they can be inverted.

A table is plain data: pattern → pattern, with a layout where the order of axes differs. It is the caller's, for a
module of any library, or made from that module's layers; the names of maxjax's models are in the families' tables
(``models.names``), by which ``from_torch`` reads the modules of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UserInputError
from .layouts import AxisLayout, layout

STARS = re.compile(r"\*\*|\*")


@dataclass(frozen=True)
class Function:
    """A conversion of arrays that cannot be written as a layout.

    Attributes:
        there: function from the tensor in the file to the model's array.
        back: inverse of ``there``; None: there is no inverse.
    """

    there: Callable[[Any], Any]
    back: Callable[[Any], Any] | None = None


STACKED = (
    "'{}' is to be a stack of layers ('*' in its layout): only maxjax.interop.nnx.load makes stacks. LayerStack and "
    "stack_for stack the layers of a Module"
)

TWO_OF_ONE_NAME = "the paths of two arrays are both '{}', since the parts of a path are joined by dots: rename one"


class Route(NamedTuple):
    """The array of the model that a tensor of the checkpoint becomes.

    Attributes:
        target: name of the array in the model.
        change: conversion of the tensor; None: no conversion.
        index: index of the tensor's layer, if layers are stacked in the array.
    """

    target: str
    change: AxisLayout | Function | None
    index: int | None = None


class Origin(NamedTuple):
    """The tensor of the checkpoint from which an array of the model is made.

    Attributes:
        name: name in the checkpoint; if layers are stacked, with ``*`` in place of their indices.
        change: conversion of the tensor, as in :class:`Route`.
        number: function from a layer's index to its tensor's name, if layers are stacked.
    """

    name: str
    change: AxisLayout | Function | None
    number: Callable[[int], str] | None = None


@dataclass(frozen=True)
class _Rule:
    source: str
    target: str
    change: AxisLayout | Function | None
    stacks: bool

    def route(self, groups: Sequence[str]) -> Route | None:
        if not self.stacks:
            return Route(filled(self.target, groups), self.change)
        first, *rest = groups
        if not first.isdecimal():
            return None
        return Route(filled(self.target, rest), self.change, int(first))

    def origin(self, groups: Sequence[str]) -> Origin:
        if not self.stacks:
            return Origin(filled(self.source, groups), self.change)
        return Origin(
            filled(self.source, ["*", *groups]),
            self.change,
            lambda number: filled(self.source, [str(number), *groups]),
        )


class Renaming:
    """A checked renaming table; a name that matches no pattern is not changed.

    Args:
        rename: table of pattern → name, or (name, layout or function), or a list of these for a
            tensor that becomes several arrays, or None to ignore the tensor. In patterns, ``*``
            matches a part of a name between dots, ``**`` any text; the stars of the name are
            replaced with the matches in order. The first pattern that matches is used. Instead of
            a table it may be a function from a name to such a value.
        transform: table from patterns of the model's names to a layout or function, for arrays to
            which ``rename`` gives none.

    Raises:
        UserInputError: a pattern and its name have different numbers of stars, or a value has
            the wrong type.

    Example:
        >>> table = Renaming({"layers.*.q_proj.weight": ("blocks.*.q.kernel", "o i -> i o")})
        >>> table.routes("layers.3.q_proj.weight")[0].target
        'blocks.3.q.kernel'
        >>> table.origin("blocks.3.q.kernel").name
        'layers.3.q_proj.weight'
    """

    def __init__(self, rename: Any = None, transform: Mapping[str, Any] | None = None):
        self._function = rename if callable(rename) else None
        table = {} if rename is None or self._function else rename
        if not isinstance(table, Mapping):
            raise UserInputError(
                f"rename is a table (a mapping) or a function, not {type(rename).__name__}"
            )
        self._table = [(source, _rules(source, value)) for source, value in table.items()]
        self._forward = _Finder([source for source, _ in self._table])
        targets = [rule for _, rules in self._table for rule in rules]
        self._rules = targets
        self._backward = _Finder([rule.target for rule in targets])
        changes = {} if transform is None else transform
        self._changes = _Finder(list(changes))
        self._change_of = [_change(value) for value in changes.values()]

    def routes(self, name: str) -> list[Route]:
        """The arrays that a tensor of the checkpoint becomes; an empty list if the tensor is ignored."""
        if self._function is not None:
            rules = _rules(name, self._function(name))
            return [self._changed(Route(rule.target, rule.change)) for rule in rules]
        for place, groups in self._forward.find(name):
            found = [rule.route(groups) for rule in self._table[place][1]]
            routes = [route for route in found if route is not None]
            if len(routes) == len(found):
                return [self._changed(route) for route in routes]
        return [self._changed(Route(name, None))]

    def origin(self, target: str) -> Origin:
        """The tensor of the checkpoint from which an array of the model is made.

        Raises:
            UserInputError: ``rename`` is a function; or no pattern matches, and the table maps the
                tensor of the array's own name to another array.
        """
        if self._function is not None:
            raise UserInputError("rename is a function, which has no inverse: use a table")
        for place, groups in self._backward.find(target):
            found = self._rules[place].origin(groups)
            return found._replace(change=found.change or self._found_change(target))
        if all(route.target != target for route in self.routes(target)):
            raise UserInputError(f"'{target}' has no name in the checkpoint: the table maps the tensor "
                                 f"'{target}' to another array. Add an entry for it")  # fmt: skip
        return Origin(target, self._found_change(target))

    def _changed(self, route: Route) -> Route:
        return route._replace(change=route.change or self._found_change(route.target))

    def _found_change(self, target: str) -> AxisLayout | Function | None:
        for place, _ in self._changes.find(target):
            return self._change_of[place]
        return None


class _Finder:
    """Finds the patterns that match a name, in order; patterns without stars by one dict lookup."""

    def __init__(self, patterns: Sequence[str]):
        self._exact: dict[str, list[int]] = {}
        self._patterns: list[tuple[int, re.Pattern[str]]] = []
        for place, pattern in enumerate(patterns):
            if "*" in pattern:
                self._patterns.append((place, compiled(pattern)))
            else:
                self._exact.setdefault(pattern, []).append(place)

    def find(self, name: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yields (index, texts that the stars match) of each pattern that matches."""
        found: list[tuple[int, tuple[str, ...]]] = [(i, ()) for i in self._exact.get(name, ())]
        for place, pattern in self._patterns:
            if match := pattern.fullmatch(name):
                found.append((place, match.groups()))
        yield from sorted(found)


def compiled(pattern: str) -> re.Pattern[str]:
    stars = STARS.findall(pattern)
    texts = STARS.split(pattern)
    parts = [re.escape(texts[0])]
    for star, text in zip(stars, texts[1:], strict=True):
        parts += ["(.*)" if star == "**" else "([^.]+)", re.escape(text)]
    return re.compile("".join(parts), re.DOTALL)


def filled(pattern: str, groups: Sequence[str]) -> str:
    values = iter(groups)
    return STARS.sub(lambda _: next(values), pattern)


def _rules(source: str, value: Any) -> list[_Rule]:
    """The value of a table's entry as rules; none if it is None."""
    if value is None:
        return []
    if isinstance(value, list):
        return [rule for one in value for rule in _rules(source, one)]
    target, change = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(target, str):
        raise UserInputError(f"'{source}' must be renamed to a name, (name, layout), a list of these "
                             f"or None, not {value!r}")  # fmt: skip
    change = _change(change)
    stacks = isinstance(change, AxisLayout) and change.stacks is not None
    stars = len(STARS.findall(source)), len(STARS.findall(target)) + stacks
    if stars[0] != stars[1]:
        raise UserInputError(f"'{source}' has {stars[0]} stars and '{target}' takes {stars[1]}")
    return [_Rule(source, target, change, stacks)]


def _change(value: Any) -> AxisLayout | Function | None:
    if value is None or isinstance(value, (AxisLayout, Function)):
        return value
    if isinstance(value, str):
        return layout(value)
    if callable(value):
        return Function(value)
    if isinstance(value, tuple) and len(value) == 2 and all(map(callable, value)):
        return Function(*value)
    raise UserInputError(f"a transform must be a layout ('o i -> i o'), a function, or a pair of "
                         f"functions (forward, inverse), not {value!r}")  # fmt: skip
