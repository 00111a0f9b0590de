"""Errors for names that MAX has and maxjax does not: importing one says what to do instead.

There are no stubs: with one, a program would import and fail later, or silently do something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn


def absent(module: str, reasons: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__`` that raises ImportError for the names in ``reasons``.

    Args:
        module: name of the module.
        reasons: table of names, separated by spaces → what to do instead.

    Example:
        >>> absent("maxjax.nn", {"Signals": "XLA inserts the communication"})("Signals")
        Traceback (most recent call last):
        ImportError: maxjax.nn has no Signals, which MAX has: XLA inserts the communication
    """
    known = {name: reason for names, reason in reasons.items() for name in names.split()}

    def __getattr__(name: str) -> NoReturn:
        if name in known:
            raise ImportError(f"{module} has no {name}, which MAX has: {known[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
