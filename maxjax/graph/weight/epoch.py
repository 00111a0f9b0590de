"""Counters that say when the structure or the values of any Module changed.

Caches of treedefs and leaves compare them, and recompute what was computed at an older count.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any


class Epoch:
    """Counts changes in the whole process; Modules discard what they cached at older counts.

    Attributes:
        structure: number of changes of structure (not of values); it guards cached definitions.
        values: number of values stored in Weights; it guards cached lists of leaves.
    """

    __slots__ = ("structure", "values")


EPOCH = Epoch()
EPOCH.structure = EPOCH.values = 0
# Objects with a tuple ``leaves`` of values, valid for the present count of values.
_LEAF_CACHES: weakref.WeakSet[Any] = weakref.WeakSet()
_LOCK = threading.Lock()


def note_leaf_cache(cache: Any) -> None:
    """Note an object with a tuple ``leaves`` of values, which is emptied when a value changes."""
    with _LOCK:
        _LEAF_CACHES.add(cache)


def structure_changed() -> None:
    """Invalidates all cached Module definitions."""
    EPOCH.structure += 1


def values_changed() -> None:
    """Invalidates all cached lists of leaves."""
    EPOCH.values += 1
    if _LEAF_CACHES:
        with _LOCK:
            caches = list(_LEAF_CACHES)
            _LEAF_CACHES.clear()
        for cache in caches:
            cache.leaves = ()  # a stale list must not keep old values alive
