"""The kind of value that a Weight's operators give in this thread.

As in MAX they give TensorValues while a Graph is written, or while a Module runs that was
called with one; else plain arrays, which plain JAX code wants. What is traced under one kind
is not what the other would have traced (``.mean()`` of a TensorValue keeps its axis), so the
kind is a part of the treedef of every Module and Weight, and so of the key of every trace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Kind(threading.local):
    """Attributes:
    values: Whether Weights give TensorValues.
    """

    # Not a ContextVar: each greenlet has its own of those, and a Graph is written by two.
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
