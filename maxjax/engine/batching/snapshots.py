"""Snapshots: states of recurrent layers after the first pages of texts, so that later texts need not read these again.

Keys and values of a prefix are those of its pages; a recurrent state is that after one token alone. So a few states are
copied while prompts are read: after the last full page of a prompt, and where a prompt leaves the beginning that it
has in common with an earlier one. Those that were not used for the longest time make room for others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax

from ...nn.kv_cache.pages import PagePool
from ...nn.kv_cache.recurrent import Recurrent
from .pages import Key

# A shorter beginning is read again sooner than it is kept: copies are few.
LEAST_PAGES = 2


def snapshot_count(slots: int) -> int:
    """The number of snapshots of an engine with so many slots."""
    return max(4, slots // 4)


class Snapshots:
    """Which rows hold the states after which pages.

    Args:
        count: number of rows.

    Example:
        >>> snapshots = Snapshots(2)
        >>> snapshots.add([b"a", b"b"]), snapshots.add([b"a", b"b", b"c"]), snapshots.add([b"a", b"b"])
        (0, 1, None)
        >>> snapshots.find([b"a", b"b", b"d"], (3, 2, 1)), snapshots.common([b"a", b"x"]), snapshots.find([b"a"], (1,))
        ((2, 0), 1, None)
        >>> snapshots.add([b"x"])  # in place of the one that was not used for the longest time
        1
    """

    def __init__(self, count: int):
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        # By the key of the last page: the row, and the keys of all pages; least recently used first.
        self._rows: OrderedDict[Key, tuple[int, list[Key]]] = OrderedDict()

    def find(self, keys: Sequence[Key], counts: Iterable[int]) -> tuple[int, int] | None:
        """The first of these numbers of a text's first pages after which there is a state, and its row."""
        for pages in counts:
            if keys[pages - 1] in self._rows:
                self._rows.move_to_end(keys[pages - 1])
                return pages, self._rows[keys[pages - 1]][0]
        return None

    def common(self, keys: Sequence[Key]) -> int:
        """The largest number of a text's first pages with which another one of these begins too."""
        most = 0
        for _, others in self._rows.values():
            pairs = enumerate(zip(keys, others, strict=False))
            most = max(
                most, next((i for i, (a, b) in pairs if a != b), min(len(keys), len(others)))
            )
        return most

    def add(self, keys: Sequence[Key]) -> int | None:
        """The row for the state after these pages; None if there is one already."""
        if keys[-1] in self._rows:
            self._rows.move_to_end(keys[-1])
            return None
        if not self._free:
            self._free.append(self._rows.popitem(last=False)[1][0])
        row = self._free.pop()
        self._rows[keys[-1]] = row, list(keys)
        return row

    def drop(self, keys: Sequence[Key]) -> None:
        """Forgets the states after these pages: they are not what the keys say."""
        for key in keys:
            if key in self._rows:
                self._free.append(self._rows.pop(key)[0])


States = Mapping[str, Recurrent]


def recurrent_states(pool: PagePool) -> dict[str, Recurrent]:
    """The recurrent states of a pool, by the name of the group of layers."""
    return {name: one for name, one in pool.states.items() if isinstance(one, Recurrent)}


@partial(jax.jit, donate_argnums=0)
def copied(to: States, source: States, row: jax.Array, of: jax.Array) -> Any:
    """The states ``to``, whose ``row`` is the row ``of`` of the source."""
    return jax.tree.map(lambda new, old: new.at[:, row].set(old[:, of]), to, source)
