"""Floor 6. How much a template may still do: its time, and the size of what it makes.

Weighs values before or as soon as they are there. Below: nothing. Above: template_sandbox.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

SECONDS = 3.0
"""How long a template may take; those of chats take milliseconds."""
_AT_ONCE, _IN_ALL = 1 << 22, 1 << 26  # characters, and 32 for each item of a list
_DEPTH = 100
INT_BITS = 1 << 16
_CHECKED_EVERY = 64  # lines


class TooMuchError(Exception):
    """A template that works or grows without end."""


class _Budget(threading.local):
    """What the template that runs in this thread may still do."""

    at_once, left = _AT_ONCE, _IN_ALL

    def reset(self, weight: int) -> None:
        self.at_once, self.left = _AT_ONCE + 4 * weight, _IN_ALL + 64 * weight


_budget = _Budget()


def most_at_once() -> int:
    """How large one value may be."""
    return _budget.at_once


@contextmanager
def watched(inputs: Any) -> Iterator[None]:
    """Lets templates run inside for a time and a size, which grows with that of ``inputs``.

    Raises:
        TooMuchError: It was too long, or too much.
    """
    _budget.reset(weigh(inputs, 1 << 40, depth=10 * _DEPTH))
    deadline, lines = time.monotonic() + SECONDS, 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines % _CHECKED_EVERY == 0 and time.monotonic() > deadline:
            raise TooMuchError(f"it ran for more than {SECONDS:g} seconds")
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return None if frame.f_code.co_filename == __file__ else line(frame, event, argument)

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def weigh(value: Any, most: int, *, depth: int = _DEPTH) -> int:
    """How large a value is when it is written out: characters, and 32 for each value in it.

    Raises:
        TooMuchError: More than ``most``, or lists in lists deeper than ``depth``.
    """
    total, todo = 0, [(value, 0)]
    while todo:
        item, level = todo.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 8
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += 32 * len(item)
            todo += ((inner, level + 1) for inner in item)
        elif isinstance(item, Mapping):
            total += 64 * len(item)
            todo += ((inner, level + 1) for pair in item.items() for inner in pair)
        if total > most:
            raise TooMuchError(f"it makes something of more than {most} characters")
        if level > depth:
            raise TooMuchError(f"it makes lists in lists, more than {depth} deep")
    return total


def allow(size: int) -> None:
    if size > most_at_once():
        raise TooMuchError(f"it makes something of more than {most_at_once()} characters")


def spend(value: Any) -> Any:
    """The value, after its weight was taken from what is left."""
    _budget.left -= weigh(value, most_at_once())
    if _budget.left < 0:
        raise TooMuchError("it makes too much text")
    return value


# --- what could grow in one step ----------------------------------------------------------------


def format_size(text: str, arguments: Any) -> int:
    """No less than what a format string can make of its arguments."""
    if re.search(r"\{[^{}]*[:!][^{}]*\{", text) or re.search(r"%[^%a-zA-Z]*\*", text):
        raise TooMuchError("it has a format whose width is an argument")
    width = max((int(n[:9]) for n in re.findall(r"\d+", text)), default=0)
    fields = text.count("%") + text.count("{")
    return len(text) + fields * (width + 16 + weigh(arguments, most_at_once()))


def _numbers(arguments: Iterable[Any]) -> int:
    return max((abs(item) for item in arguments if isinstance(item, int)), default=0)


def _lengths(arguments: Iterable[Any]) -> int:
    return max((len(item) for item in arguments if isinstance(item, (str, bytes))), default=0)


def _replaced(text: Any, old: Any = "", new: Any = "", *more: Any, **options: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + text.count(old) * len(new)


def _lined(text: Any, *arguments: Any, **options: Any) -> int:
    given = [*arguments, *options.values()]
    lines = str(text).count("\n") + 1
    return len(str(text)) + lines * max(_numbers(given), _lengths(given))


def joined_size(items: Any, between: Any = "", *more: Any) -> int:
    return weigh(items, most_at_once()) + len(items) * len(str(between))


def wide_size(*arguments: Any, **options: Any) -> int:
    return _numbers([*arguments[1:], *options.values()])


def _small(*arguments: Any, **options: Any) -> int:
    """For those where any number or text of the template's is used again and again."""
    given: list[Any] = []
    for item in [*arguments[1:], *options.values()]:
        given += item if isinstance(item, (list, tuple)) else [item]
    return 0 if max(_numbers(given), _lengths(given)) <= 16 else 1 << 60


def _wrapped(text: Any, width: Any = 79, *more: Any, **options: Any) -> int:
    return _small(text, *more, **{name: v for name, v in options.items() if name != "width"})


def _summed(items: Any, attribute: Any = None, start: Any = 0) -> int:
    return 0 if isinstance(start, (int, float)) else 1 << 60


# Name of a filter → a size that what it makes cannot exceed. Others make no more than they get.
FILTERS: dict[str, Callable[..., int]] = {
    "center": wide_size, "indent": _lined, "batch": wide_size, "slice": wide_size, "truncate": wide_size,
    "round": wide_size, "wordwrap": _wrapped,
    "tojson": _small, "replace": _replaced, "sum": _summed,
    "format": lambda text, *args, **kwargs: format_size(str(text), [args, kwargs]),
}  # fmt: skip
# The same for methods of texts and numbers; the first argument is what they belong to.
METHODS: dict[str, Callable[..., int]] = {
    "format": FILTERS["format"], "format_map": FILTERS["format"], "replace": _replaced,
    "join": lambda text, items: joined_size(items, text),
    "expandtabs": lambda text, *size, **more: text.count("\t") * wide_size(text, *size, **more),
    "translate": lambda *arguments: 1 << 60,
}  # fmt: skip
