"""How much a template may still make, counted before or as soon as it is there.

No value may be larger than ``at_once`` where it is written out, so that one step is short; and all
that is made, kept or not, may not be more than ``left``, so that memory is bounded. A unit is a
character; each object has some more, so that a unit is never more than four bytes. Both grow with
the messages, for which what a template makes of them is no more than it should.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from itertools import chain
from typing import Any

from jinja2.runtime import Undefined

from .thread import Stopped

_AT_ONCE, _IN_ALL = 1 << 20, 1 << 25
_TEXT, _NUMBER, _OTHER = 50, 32, 512
_LIST, _ITEM, _ENTRY = 64, 16, 100
_NESTED = 100  # lists in lists
_CALLS = 200  # macros in macros; jinja's own frames of so many are within Python's limit
INT_BITS = 1 << 16
TOO_MUCH = 1 << 60


class TooMuchError(Stopped):
    """A template that works or grows without end."""


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self.at_once, self.left, self.calls = _AT_ONCE, _IN_ALL, 0
        self.over: str | None = None
        self.opaque = False
        self.inputs: Any = None
        self.known: dict[int, int] = {}

    def learn(self, inputs: Any, text: str) -> None:
        """Takes the values and the text of a template, with which the budget grows."""
        self.inputs = inputs  # alive, so that no other value has the id of one of them
        weight = self._learn(inputs) + len(text)
        self.at_once += 4 * weight
        self.left += 64 * weight

    def _learn(self, value: Any) -> int:
        if type(value) is str:
            size = _TEXT + len(value)
        elif type(value) in (list, tuple):
            size = _LIST + _ITEM * len(value) + sum(map(self._learn, value))
        elif type(value) is dict:
            pairs = chain(value, value.values())
            size = _LIST + _ENTRY * len(value) + sum(map(self._learn, pairs))
        else:
            return _NUMBER
        self.known[id(value)] = size
        return size

    def stop(self, why: str) -> None:
        """From another thread: the next thing that is counted is the last."""
        self.over = why

    def check(self) -> None:
        if self.over is not None:
            raise TooMuchError(self.over)

    def allow(self, size: int) -> None:
        if size > self.at_once:
            raise TooMuchError(f"it makes something of more than {self.at_once} characters")

    def spend(self, value: Any) -> Any:
        """The value, after what is new in it was taken from what is left."""
        if self.over is not None:
            raise TooMuchError(self.over)
        if type(value) is str:
            new = _TEXT + len(value)
            self.allow(new)
        else:
            new = self.weigh(value)[1]
        self.left -= new
        if self.left < 0:
            raise TooMuchError("it makes too much text")
        return value

    def weigh(self, *values: Any) -> tuple[int, int]:
        """How large values are where they are written out, and how much of it no message has.

        Afterwards ``opaque`` says whether there are objects in it that may have more in them.

        Raises:
            TooMuchError: Larger than ``at_once``, nested too deep, or a number of too many digits.
        """
        whole, new, todo = 0, 0, [(iter(values), 0)]
        self.opaque = False
        while todo:
            items, level = todo.pop()
            for item in items:
                size, inside = self._size(item)
                whole += size
                if id(item) not in self.known:
                    new += size
                if whole > self.at_once:
                    self.allow(whole)
                if inside is not None:
                    if level == _NESTED:
                        raise TooMuchError(f"it makes lists in lists, more than {_NESTED} deep")
                    todo.append((inside, level + 1))
        return whole, new

    def _size(self, item: Any) -> tuple[int, Iterator[Any] | None]:
        """The size of an object, and what is in it, unless that is counted."""
        if isinstance(item, (str, bytes)):
            return _TEXT + len(item), None
        if isinstance(item, int):
            bits = item.bit_length()
            if bits > INT_BITS:
                raise TooMuchError(f"it makes a number of more than {INT_BITS} bits")
            return _NUMBER + bits, None
        if item is None or isinstance(item, (float, Undefined)):
            return _NUMBER, None
        if (size := self.known.get(id(item))) is not None:
            return size, None
        if isinstance(item, Mapping):
            return _LIST + _ENTRY * len(item), chain(item, item.values())
        if isinstance(item, range):
            return _LIST, None
        if isinstance(item, (Sequence, Set, ValuesView)):
            return _LIST + _ITEM * len(item), iter(item)
        self.opaque = True
        return _OTHER, None

    def enter(self) -> None:
        """Before a template calls what may call it again; afterwards ``calls`` is one less."""
        if self.calls >= _CALLS:
            raise TooMuchError(f"it calls itself, more than {_CALLS} deep")
        self.calls += 1


class _Here(threading.local):
    """The budget of the template that runs in this thread."""

    def __init__(self) -> None:
        self.budget = Budget()


_here = _Here()


def use(budget: Budget) -> None:
    """Makes it that of this thread."""
    _here.budget = budget


def budget() -> Budget:
    return _here.budget
