"""Names that MAX has at a path and maxjax has not: importing one says why.

A stand-in would let a file import and fail later, or silently do something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn


def absent(module: str, reasons: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a module that tells of names in ``reasons``.

    Args:
        module: Its name.
        reasons: Names, several with spaces between, → what to do instead.

    Example:
        >>> absent("maxjax.nn", {"Signals": "XLA puts the communication in"})("Signals")
        Traceback (most recent call last):
        ImportError: maxjax.nn has no Signals, as MAX has: XLA puts the communication in
    """
    known = {name: reason for names, reason in reasons.items() for name in names.split()}

    def __getattr__(name: str) -> NoReturn:
        if name in known:
            raise ImportError(f"{module} has no {name}, as MAX has: {known[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
