"""Budget: limits on the values that a template makes, checked before or as soon as they exist.

No single value may be larger than ``at_once`` in its written form, so that each step is short. What
is held at one time may not exceed ``most``: the text written, what each variable has, and the values
of the expression being evaluated. The steps may not exceed ``steps``, so that time is bounded, on a
slow or busy machine as well. The unit of size is a character, plus some units for each object, so
that a unit is at most four bytes. All limits grow with the size of the messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence, Set, ValuesView
from itertools import chain
from typing import Any

from jinja2.runtime import Undefined

from .thread import Stopped

_AT_ONCE, _HELD, _STEPS = 1 << 20, 1 << 25, 1 << 20
_PER_STEP = 5  # text is read and written at 2^5 characters a step
_TEXT, _NUMBER, _OTHER = 50, 32, 512
_LIST, _ITEM, _ENTRY = 64, 16, 100
_NESTED = 100  # depth of nested lists
_CALLS = 200  # depth of calls; jinja's frames for that many are within Python's recursion limit
INT_BITS = 1 << 16
TOO_MUCH = 1 << 60


class TooMuchError(Stopped):
    """A template exceeds its limits on size or steps."""


class Budget:
    """The limits of one rendering, and what is left of them."""

    def __init__(self) -> None:
        self.at_once, self.most, self.steps, self.calls = _AT_ONCE, _HELD, _STEPS, 0
        # Sizes of what is held: for good or in a variable, in all; and by depth of calls, in expressions.
        self.held, self.places, self.passing = 0, dict[Any, int](), [0]
        self.over: str | None = None
        self.opaque = False
        self.inputs: Any = None
        self.known: dict[int, int] = {}

    def learn(self, inputs: Any, text: str) -> None:
        """Raises the limits by the size of the template's values and source."""
        self.inputs = inputs  # kept alive, so that no new value reuses one of their ids
        weight = self._learn(inputs) + len(text)
        self.at_once += 4 * weight
        self.most += 64 * weight
        self.steps += 64 * weight

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
        """Ends the rendering from another thread: the next value that is counted raises."""
        self.over = why

    def check(self) -> None:
        if self.over is not None:
            raise TooMuchError(self.over)

    def allow(self, size: int) -> None:
        if size > self.at_once:
            raise TooMuchError(f"it makes something of more than {self.at_once} characters")

    def step(self, count: int) -> None:
        """Counts steps of work."""
        if self.over is not None:
            raise TooMuchError(self.over)
        self.steps -= count
        if self.steps < 0:
            raise TooMuchError("it takes too many steps")

    def spend(self, value: Any) -> Any:
        """Counts a value of the expression that is being evaluated, and returns it."""
        self.passing[-1] += self._new(value)
        self._check_held()
        return value

    def write(self, text: str) -> str:
        """Counts text that is written, which is held to the end."""
        self.held += self._new(text)
        self.passing[-1] = 0  # the expression has ended
        self._check_held()
        return text

    def keep(self, place: Any, value: Any) -> Any:
        """Counts a value that a variable or a loop holds instead of the one before, and returns it."""
        place, new = (place, self.calls), self._new(value)
        self.held += new - self.places.get(place, 0)
        self.places[place] = new
        self.passing[-1] = 0
        self._check_held()
        return value

    def hold(self, *values: Any) -> None:
        """Counts values that an object holds, perhaps to the end."""
        self.held += self.weigh(*values)[1]
        self._check_held()

    def _new(self, value: Any) -> int:
        """The size of what is new in a value."""
        if type(value) is str:
            size = _TEXT + len(value)
            self.step(1 + (size >> _PER_STEP))
            self.allow(size)
            return 0 if id(value) in self.known else size
        return self.weigh(value)[1]

    def _check_held(self) -> None:
        if self.held + sum(self.passing) > self.most:
            raise TooMuchError("it holds too much text")

    def weigh(self, *values: Any) -> tuple[int, int]:
        """The size of the values when written out, and the part of it that is not in the inputs.

        Afterwards ``opaque`` says whether there are objects among them of unknown size.

        Raises:
            TooMuchError: a value is larger than ``at_once``, nested too deeply, or a number with too
                many digits.
        """
        total, new, count, todo = 0, 0, 0, [(iter(values), 0)]
        self.opaque = False
        while todo:
            items, level = todo.pop()
            for item in items:
                size, inside = self._size(item)
                total += size
                count += 1
                if id(item) not in self.known:
                    new += size
                if total > self.at_once:
                    self.allow(total)
                if inside is not None:
                    if level == _NESTED:
                        raise TooMuchError(f"it makes lists in lists, more than {_NESTED} deep")
                    todo.append((inside, level + 1))
        self.step(1 + count + (total >> _PER_STEP))
        return total, new

    def _size(self, item: Any) -> tuple[int, Iterator[Any] | None]:
        """The size of an object, and an iterator over its items if they are not counted in it."""
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
            self.step(len(item) >> 3)  # which a single call may go through
            return _LIST, None
        if isinstance(item, (Sequence, Set, ValuesView)):
            return _LIST + _ITEM * len(item), iter(item)
        self.opaque = True
        return _OTHER, None

    def enter(self) -> None:
        """Counts the start of a call that may recurse; :meth:`leave` must follow it."""
        self.step(1)
        if self.calls >= _CALLS:
            raise TooMuchError(f"its calls are nested more than {_CALLS} deep")
        self.calls += 1
        self.passing.append(0)

    def leave(self) -> None:
        """Counts the end of a call, whose expressions hold nothing any more."""
        self.calls -= 1
        self.passing.pop()


class _Current(threading.local):
    """The budget of the template that runs in this thread."""

    def __init__(self) -> None:
        self.budget = Budget()


_current = _Current()


def use(budget: Budget) -> None:
    """Makes ``budget`` the budget of this thread."""
    _current.budget = budget


def budget() -> Budget:
    """The budget of this thread."""
    return _current.budget
