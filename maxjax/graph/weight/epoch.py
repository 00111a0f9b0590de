"""Counters that say when the structure or the values of any Module changed.

Caches of treedefs and leaves compare them, and recompute what was computed at an older count.
"""

from __future__ import annotations

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
LEAF_CACHES: weakref.WeakSet[Any] = weakref.WeakSet()


def structure_changed() -> None:
    """Invalidates all cached Module definitions."""
    EPOCH.structure += 1


def values_changed() -> None:
    """Invalidates all cached lists of leaves."""
    EPOCH.values += 1
    if LEAF_CACHES:
        for cache in list(LEAF_CACHES):
            cache.leaves = ()  # a stale list must not keep old values alive
        LEAF_CACHES.clear()
