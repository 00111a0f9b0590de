"""Pages: which pages of the pool are free, which belong to texts, and which hold the beginning of a text to come.

A page that a text has filled is known by a key: its tokens and the key of the page before it. It stays after the text
has ended, until the pool needs it, and a later text that begins with the same tokens shares it (radix attention,
arXiv:2312.07104). This is the host's side alone: numbers of pages, not their content.

Layers with a sliding window may have pages of their own (:class:`SlidingWindow`). A text gives these back as it grows,
each when no later token sees its tokens. It can begin with the first pages of another text only if those of the last
window are still there, as in vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..pictures import Pictures

Key = bytes


class SlidingWindow(NamedTuple):
    """What layers with a sliding window keep of a text.

    Attributes:
        tokens: number of tokens that a token attends to, itself included.
        size: number of tokens of a page.

    Example:
        >>> window = SlidingWindow(100, 64)
        >>> [window.first(stored) for stored in (100, 200, 300, 1000)], window.most(512)
        ([0, 1, 2, 13], 11)
    """

    tokens: int
    size: int

    def first(self, stored: int) -> int:
        """The first page that is kept of a text with so many tokens: those after its last full page see it."""
        return max(stored // self.size * self.size - self.tokens, 0) // self.size

    def most(self, new: int) -> int:
        """The largest number of pages that a text has in a call which adds at most ``new`` tokens to it."""
        return -(-self.tokens // self.size) + (new + self.size - 2) // self.size + 1


class Pages:
    """The pages of a pool.

    Args:
        count: number of pages.
        size: number of tokens of a page.

    Example:
        >>> pages = Pages(4, 2)
        >>> keys = pages.keys([5, 6, 7, 8, 9], b"")
        >>> first = pages.allocate(3)
        >>> pages.publish(first, keys)  # two of them are full
        >>> pages.release(first)
        >>> pages.share(keys) == first[:2], pages.free
        (True, 2)
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._users = [0] * count  # number of texts that have each page
        self._empty = list(range(count - 1, -1, -1))
        self._keys: dict[int, Key] = {}
        self._numbers: dict[Key, int] = {}
        self._kept: OrderedDict[int, None] = (
            OrderedDict()
        )  # named pages of no text, least recently used first

    @property
    def free(self) -> int:
        """The number of pages that :meth:`allocate` can give."""
        return len(self._empty) + len(self._kept)

    def grow(self, count: int) -> None:
        """Adds pages, so that there are ``count``."""
        self._empty[:0] = range(count - 1, self.count - 1, -1)
        self._users += [0] * (count - self.count)
        self.count = count

    def needed(self, tokens: int) -> int:
        """The number of pages of so many tokens; 0 in a pool without pages, whose model keeps no keys and values."""
        return -(-tokens // self.size) if self.count else 0

    def keys(
        self, tokens: Sequence[int], salt: bytes, known: Sequence[Key] = (), pictures: Pictures | None = None
    ) -> list[Key]:  # fmt: skip
        """The keys of the pages that these tokens fill.

        Args:
            tokens: token ids of a text, from its beginning.
            salt: what else decides the content of the pages.
            known: the keys of the first of them.
            pictures: the pictures of the text.
        """
        found = list(known[: len(tokens) // self.size])
        key = found[-1] if found else salt
        for start in range(len(found) * self.size, len(tokens) - self.size + 1, self.size):
            page = np.asarray(tokens[start : start + self.size], np.int32).tobytes()
            if pictures is not None:
                page += pictures.digest(start, start + self.size)
            key = hashlib.blake2b(key + page, digest_size=16).digest()
            found.append(key)
        return found

    def has(self, key: Key) -> bool:
        """Whether a page has this key."""
        return key in self._numbers

    def key(self, number: int) -> Key | None:
        """The key of a page; None if it has none."""
        return self._keys.get(number)

    def known(self, keys: Sequence[Key]) -> int:
        """The number of these keys, from the first on, that pages have."""
        return next((i for i, key in enumerate(keys) if key not in self._numbers), len(keys))

    def share(self, keys: Sequence[Key]) -> list[int]:
        """Takes the pages with these keys for one more text, up to the first key that no page has."""
        found = []
        for key in keys[: self.known(keys)]:
            number = self._numbers[key]
            self._users[number] += 1
            self._kept.pop(number, None)
            found.append(number)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """Takes so many pages that nobody uses; None if there are fewer."""
        if count > self.free:
            return None
        found = []
        for _ in range(count):
            if self._empty:
                number = self._empty.pop()
            else:
                number, _ = self._kept.popitem(last=False)
                del self._numbers[self._keys.pop(number)]
            self._users[number] = 1
            found.append(number)
        return found

    def publish(self, numbers: Sequence[int], keys: Sequence[Key]) -> None:
        """Gives the pages of a text the keys of its tokens, for later texts; as many as there are keys."""
        for number, key in zip(numbers, keys, strict=False):
            if number >= 0 and key not in self._numbers and number not in self._keys:
                self._keys[number], self._numbers[key] = key, number

    def release(self, numbers: Sequence[int]) -> None:
        """Gives the pages of a text back, other numbers than -1; those with keys stay for later texts."""
        # The last pages of a text are dropped before its first ones.
        for number in reversed([number for number in numbers if number >= 0]):
            self._users[number] -= 1
            if self._users[number] == 0:
                if number in self._keys:
                    self._kept[number] = None
                else:
                    self._empty.append(number)

    def withdraw(self, keys: Sequence[Key]) -> None:
        """Removes these keys: the content of their pages is not what they say."""
        for key in keys:
            number = self._numbers.pop(key, None)
            if number is not None:
                del self._keys[number]
                if self._kept.pop(number, 0) is None:
                    self._empty.append(number)
