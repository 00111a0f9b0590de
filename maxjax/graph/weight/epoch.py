"""Counters that say when the structure or the values of any Module changed.

Caches of treedefs and leaves compare them: what was computed at an older count is computed anew.
"""

from __future__ import annotations

import weakref
from typing import Any


class Epoch:
    """Counts changes in the whole process: what a Module cached under older counts is made anew.

    Attributes:
        structure: Changes of structure (never of values): definitions.
        values: Values put into Weights: the list of leaves.
    """

    __slots__ = ("structure", "values")


EPOCH = Epoch()
EPOCH.structure = EPOCH.values = 0
# Objects with a tuple ``leaves`` of values, good for the present count of values.
LEAF_CACHES: weakref.WeakSet[Any] = weakref.WeakSet()


def structure_changed() -> None:
    """Makes every cached Module definition be checked again at its next use."""
    EPOCH.structure += 1


def values_changed() -> None:
    """Makes every cached list of leaves be collected again at its next use."""
    EPOCH.values += 1
    if LEAF_CACHES:
        for cache in list(LEAF_CACHES):
            cache.leaves = ()  # an old value must not be kept alive by a list that is stale anyway
        LEAF_CACHES.clear()
