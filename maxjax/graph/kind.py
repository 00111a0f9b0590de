"""The kind of value that a Weight's operators return in this thread.

As in MAX they return TensorValues while a Graph is built, or while a Module runs that was
called with one; otherwise plain arrays, as plain JAX code needs. What is traced under one kind
is not what the other would have traced (``.mean()`` of a TensorValue keeps its axis), so the
kind is a part of the treedef of every Module and Weight, and so of the key of every trace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Kind(threading.local):
    """Attributes:
    values: whether Weights give TensorValues.
    """

    # Not a ContextVar: each greenlet has its own, and building a Graph takes two.
    values = False


KIND = _Kind()


@contextlib.contextmanager
def giving(values: bool) -> Iterator[None]:
    """Sets the kind inside a ``with`` block."""
    before = KIND.values
    KIND.values = values
    try:
        yield
    finally:
        KIND.values = before
