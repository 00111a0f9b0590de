"""The kind of value that a Weight's operators return in this thread.

As in MAX, they return TensorValues while a Graph is built, or while a Module runs that was called with
one; otherwise they return plain arrays, which plain JAX code needs. Traces of the two kinds differ
(``.mean()`` of a TensorValue keeps its axis). Therefore the kind is part of the treedef of every Module
and Weight, and so of the key of every trace.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any


class _Kind(threading.local):
    """State of one thread: ``values`` says whether operators of Weights return TensorValues."""

    # Not a ContextVar: each greenlet has its own, and building a Graph takes two.
    values = False


KIND = _Kind()


@contextlib.contextmanager
def returning_values(values: bool) -> Iterator[None]:
    """Context in which Weights return TensorValues, or plain arrays if ``values`` is False."""
    before = KIND.values
    KIND.values = values
    try:
        yield
    finally:
        KIND.values = before


def to_value(array: Any) -> Any:
    """Return an array, or a Weight, as a TensorValue."""
    return value_class()(array)


@functools.cache
def value_class() -> Any:
    """Return MAX's TensorValue. Nothing of the core imports it, so it is imported on first use, by the package."""
    return sys.modules["maxjax.graph"].TensorValue
