"""Tables of names: which tensor of a checkpoint is which array of a model, and back.

A table is plain data: pattern → pattern, with a layout where the axes lie otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UserInputError
from .layouts import Layout, layout

STARS = re.compile(r"\*\*|\*")


@dataclass(frozen=True)
class Function:
    """A change of arrays that is no layout.

    Attributes:
        there: Of the tensor in the file makes the model's array.
        back: The other way; None where nobody gave one.
    """

    there: Callable[[Any], Any]
    back: Callable[[Any], Any] | None = None


class Route(NamedTuple):
    """Where a tensor goes.

    Attributes:
        target: The name in the model.
        change: What is done to it on the way; None for nothing.
        index: Its layer's number, where it is one of those stacked in one array.
    """

    target: str
    change: Layout | Function | None
    index: int | None = None


class Origin(NamedTuple):
    """What an array of the model is called in the checkpoint.

    Attributes:
        name: The name there; of a stacked array, with a ``*`` where the number stands.
        change: As in :class:`Route`.
        number: How a layer's own name is made, where layers are stacked.
    """

    name: str
    change: Layout | Function | None
    number: Callable[[int], str] | None = None


@dataclass(frozen=True)
class _Rule:
    source: str
    target: str
    change: Layout | Function | None
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
    """A table of names that was checked; what no pattern fits keeps its name.

    Args:
        rename: Pattern → name, or (name, layout or function), or a list of these for a tensor
            that is several arrays, or None to leave it out. In patterns ``*`` stands for a
            part of a name between dots, ``**`` for any text; stars carry over in order. The
            first pattern that fits counts. Or a function of a name that gives such a value.
        transform: Pattern of the model's names → layout or function, for what the table of
            names gives none.

    Raises:
        UserInputError: A pattern whose stars do not carry over; a value of another kind.

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
            raise UserInputError(f"rename is a table or a function, not {type(rename).__name__}")
        self._table = [(source, _rules(source, value)) for source, value in table.items()]
        self._forward = _Finder([source for source, _ in self._table])
        targets = [rule for _, rules in self._table for rule in rules]
        self._rules = targets
        self._backward = _Finder([rule.target for rule in targets])
        changes = {} if transform is None else transform
        self._changes = _Finder(list(changes))
        self._change_of = [_change(value) for value in changes.values()]

    @property
    def is_function(self) -> bool:
        """Whether names are made by a function, of which there is no way back."""
        return self._function is not None

    def routes(self, name: str) -> list[Route]:
        """Where a tensor of the checkpoint goes; nowhere if it is to be left out."""
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
        """What an array of the model is called in the checkpoint.

        Raises:
            UserInputError: Names are made by a function, or the way back would not come here.
        """
        if self._function is not None:
            raise UserInputError("rename is a function, of which there is no way back: use a table")
        for place, groups in self._backward.find(target):
            found = self._rules[place].origin(groups)
            return found._replace(change=found.change or self._found_change(target))
        if all(route.target != target for route in self.routes(target)):
            raise UserInputError(f"'{target}' has no name in the checkpoint: the table takes "
                                 f"'{target}' for something else")  # fmt: skip
        return Origin(target, self._found_change(target))

    def _changed(self, route: Route) -> Route:
        return route._replace(change=route.change or self._found_change(route.target))

    def _found_change(self, target: str) -> Layout | Function | None:
        for place, _ in self._changes.find(target):
            return self._change_of[place]
        return None


class _Finder:
    """Finds the patterns that fit a name, the first first; those without stars by one look."""

    def __init__(self, patterns: Sequence[str]):
        self._exact: dict[str, list[int]] = {}
        self._patterns: list[tuple[int, re.Pattern[str]]] = []
        for place, pattern in enumerate(patterns):
            if "*" in pattern:
                self._patterns.append((place, compiled(pattern)))
            else:
                self._exact.setdefault(pattern, []).append(place)

    def find(self, name: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        """(place, what the stars stand for) of each that fits."""
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
    """The entry of a table as rules."""
    if value is None:
        return []
    if isinstance(value, list):
        return [rule for one in value for rule in _rules(source, one)]
    target, change = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(target, str):
        raise UserInputError(f"'{source}' is renamed to a name, (name, layout), a list of these "
                             f"or None, not {value!r}")  # fmt: skip
    change = _change(change)
    stacks = isinstance(change, Layout) and change.stacks is not None
    stars = len(STARS.findall(source)), len(STARS.findall(target)) + stacks
    if stars[0] != stars[1]:
        raise UserInputError(f"'{source}' has {stars[0]} stars and '{target}' takes {stars[1]}")
    return [_Rule(source, target, change, stacks)]


def _change(value: Any) -> Layout | Function | None:
    if value is None or isinstance(value, (Layout, Function)):
        return value
    if isinstance(value, str):
        return layout(value)
    if callable(value):
        return Function(value)
    if isinstance(value, tuple) and len(value) == 2 and all(map(callable, value)):
        return Function(*value)
    raise UserInputError(f"a transform is a layout ('o i -> i o'), a function, or a pair of "
                         f"functions (there, back), not {value!r}")  # fmt: skip
