"""TextMemory: what texts have on the devices: slots, pages, and words for penalties and biases.

A mesh may divide sequences among G groups of its devices. Each group then has its slots and its pages, whose numbers
are those in its part of the pool, and a text stays in its group.

Layers with a sliding window have a pool of their own where that takes less memory (:func:`window_page_count`). It has
enough pages for all slots, whatever the length of their texts: a text never waits for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ...graph.placement.arrays import platform_of, put
from ...graph.placement.specs import mesh_of
from ...kernels.tpu import paged_decode
from ...lockstep import Lockstep
from ...nn.kv_cache.kinds import KeysValues, States
from ...nn.kv_cache.layout import page_layout
from ..bucket import bucket
from ..sampling.rows import Words
from ..sampling.sequences import Sequences
from ..shardings import shardings_on_mesh
from .dispatch import MAX_STEPS
from .messages import tell
from .pages import Key, Pages, SlidingWindow
from .programs import EngineMemory, moved, resized_words, start_words
from .running import RunningText
from .snapshots import LEAST_PAGES, Snapshots, copied, recurrent_states, snapshot_count

# The number of tokens of a page, where no kernel needs more.
_PAGE_SIZE = 64
# Texts of this length have room in arrays about the order of tokens, if there are no pages to tell.
_LONGEST_AT_FIRST = 4096


def in_groups(model: Any, slots: int) -> tuple[int, int]:
    """The number of slots, at least so many, and of groups of devices: each has equally many, or one slot is of all."""
    if slots == 1:
        return 1, 1
    groups = model.row_parts(0)  # all axes that may divide sequences divide none
    return slots + -slots % groups, groups


def page_size_of(model: Any) -> int:
    """The number of tokens of a page: that which the kernels of the model's devices read in place."""
    mesh = mesh_of([model._sharding])
    if platform_of(mesh or model._sharding) != "tpu":
        return _PAGE_SIZE
    kinds = [group.kind for group in model._groups.values()]
    found = [paged_decode.PAGE_SIZE]
    for kind in kinds:
        if isinstance(kind, KeysValues) and not paged_decode.takes_any_page(kind.width):
            layout = page_layout(mesh, 1, kind.query_heads or kind.heads, kind.heads, found[0])
            found.append(found[0] * (1 if layout is None else layout.slots))
    return max(found)


def rows_of_states(model: Any, slots: int) -> int:
    """The number of states of texts that there is room for: those of slots, and snapshots."""
    has_snapshots = is_recurrent(model) and mesh_of([model._sharding]) is None
    return slots + (snapshot_count(slots) if has_snapshots else 0)


def is_recurrent(model: Any) -> bool:
    """Whether a text has a state that cannot be shared or taken back."""
    return any(isinstance(group.kind, States) for group in model._groups.values())


def window_page_count(model: Any, slots: int, pages: int, chunk: int, draft: Any = None) -> int:
    """The number of pages, in each group of devices, that slots need in layers with a window.

    They have room for the window, a piece of a prompt and a page, for each slot.

    Args:
        model: a decoder.
        slots: number of slots (:func:`in_groups`).
        pages: number of pages of each group, if all layers keep all tokens.
        chunk: largest number of prompt tokens that are read at once.
        draft: a smaller model that guesses tokens. Its pages have the numbers that texts have in layers of the model
            that keep all tokens.

    Returns:
        The number; 0 if these layers have the pages of the others: there are none with a window, these would need as
        many as ``pages``, a draft has no other numbers, or the model reads pictures.
    """
    kinds = [group.kind for group in model._groups.values() if isinstance(group.kind, KeysValues)]
    windows = [kind.window for kind in kinds if kind.window is not None]
    if not windows or (draft is not None and len(windows) == len(kinds)):
        return 0
    if getattr(model, "vision", None) is not None:
        return 0  # a picture is read as a whole, whatever its size
    slots, groups = in_groups(model, slots)
    most = SlidingWindow(max(windows), page_size_of(model)).most(_most_new(chunk))
    count = slots // groups * most
    return count if count < pages else 0


def _most_new(chunk: int) -> int:
    """The largest number of tokens that a call adds to a text."""
    return max(chunk, MAX_STEPS)


class TextMemory:
    """Slots, pages and words.

    Args:
        model: a decoder whose weights are loaded.
        slots: least number of slots (``in_groups``).
        pages: number of pages of each group at first.
        most_pages: number to which they may grow.
        cache_dtype: dtype of keys and values; None for the model's.
        is_exact: whether a text gets all its pages at once.
        has_order: whether texts may have settings about the order of tokens, or rare filters.
        has_mtp: whether the model's layer of multi-token prediction follows the texts.
        window_pages: number of pages of each group in layers with a window, at least that of
            :func:`window_page_count`; 0: these layers have the pages of the others.
        chunk: largest number of prompt tokens that are read at once.
        together: the call that it belongs to, if several processes make it together.

    Attributes:
        arrays: what is on the devices.
        slots, groups: number of slots, and number G of groups.
        page_size: number of tokens of a page.
        cache_dtype: dtype of keys and values; None for the model's.
        shardings: shardings of the pool's arrays; None without a mesh.
        is_recurrent: whether a text has a state that cannot be shared or taken back.
        has_whole_pages: whether each device has whole pages.
        hits: number of tokens that were found instead of read.
        window: what layers with a window keep of a text; None if they have no pages of their own.
    """

    def __init__(
        self, model: Any, slots: int, pages: int, most_pages: int, cache_dtype: Any, is_exact: bool,
        has_order: bool, has_mtp: bool, window_pages: int, chunk: int, together: Lockstep | None = None,
    ):  # fmt: skip
        self.model, self._together = model, together
        slots, self.groups = in_groups(model, slots)
        self.slots = slots
        self.cache_dtype, self._is_exact, self.hits = cache_dtype, is_exact, 0
        self._has_order, self.has_mtp = has_order, has_mtp
        self.page_size, self._most_new = page_size_of(model), _most_new(chunk)
        self._window_pages, self.window = window_pages, None
        self._most, pool = max(pages, most_pages), self._pool(pages)
        self.arrays = EngineMemory(pool, None)
        self.is_recurrent = is_recurrent(model)
        self.has_whole_pages = all(
            getattr(state, "parts", 1) == 1 for state in pool.states.values()
        )
        self.shardings = shardings_on_mesh(pool)
        each, rows = pool.pages // self.groups, slots // self.groups
        self._pages = [Pages(each, self.page_size) for _ in range(self.groups)]
        self._windows: list[Pages] = []
        if window_pages:
            windows = [getattr(state, "window", None) for state in pool.states.values()]
            tokens = max(window for window in windows if window is not None)
            self.window = SlidingWindow(tokens, self.page_size)
            self._windows = [Pages(window_pages, self.page_size) for _ in range(self.groups)]
        # Models with recurrent layers alone have no pages, and texts of any length.
        most = self._most * self.page_size if each else _LONGEST_AT_FIRST
        self._longest = min(model.max_length, most)
        self._free = [[*range((g + 1) * rows - 1, g * rows - 1, -1)] for g in range(self.groups)]
        self._snapshots = self._states = None
        if self.is_recurrent and self.shardings is None:
            self._snapshots = Snapshots(snapshot_count(slots))

    def _pool(self, count: int) -> Any:
        """A pool of so many pages in each group."""
        return self.model.page_pool(
            count * self.groups, self.page_size, self.slots, self.cache_dtype, mtp=self.has_mtp,
            window_pages=self._window_pages * self.groups,
        )  # fmt: skip

    def close(self) -> None:
        """Frees the memory on the devices."""
        if hasattr(self, "arrays"):
            del self.arrays
            self._states = None

    # --- numbers

    @property
    def pages(self) -> Pages:
        """The pages of the only group."""
        (pages,) = self._pages
        return pages

    def group_of(self, text: RunningText) -> int:
        """The group of a text that has a slot."""
        assert text.slot is not None
        return text.slot // (self.slots // self.groups)

    @property
    def has_free_slot(self) -> bool:
        """Whether a text can get a slot."""
        return any(self._free)

    @property
    def count(self) -> int:
        """The number of pages of layers that keep all tokens; 0 if the model has none."""
        return sum(pages.count for pages in self._pages)

    @property
    def free(self) -> int:
        """The number of these pages that no text has."""
        return sum(pages.free for pages in self._pages)

    @property
    def window_count(self) -> int:
        """The number of pages of layers with a window; 0 if they have none of their own."""
        return sum(pages.count for pages in self._windows)

    @property
    def window_free(self) -> int:
        """The number of these pages that no text has."""
        return sum(pages.free for pages in self._windows)

    @property
    def longest(self) -> int | None:
        """The largest number of tokens of a text for which there are pages when the pool has grown; None: any."""
        return self._most * self.page_size if self.count else None

    def needed(self, tokens: int) -> int:
        """The number of pages of so many tokens, in layers that keep all tokens."""
        return self._pages[0].needed(tokens)

    def entries(self, tokens: int) -> int:
        """The number of entries of a table for so many tokens; 0 if the model keeps no keys and values."""
        return -(-tokens // self.page_size) if self.count or self._windows else 0

    def can_add(self, texts: Sequence[RunningText], tokens: Sequence[int]) -> bool:
        """Whether there are pages for so many tokens of each text."""
        wanted = [0] * self.groups
        for text, count in zip(texts, tokens, strict=True):
            wanted[self.group_of(text)] += max(self.needed(count) - len(text.pages), 0)
        return all(
            n <= self._available(pages) for n, pages in zip(wanted, self._pages, strict=True)
        )

    def _available(self, pages: Pages) -> int:
        """The number of pages that texts of a group can get, now or when the pool has grown."""
        return pages.free + (self._most - pages.count if pages.count else 0)

    # --- prefixes

    def keys(self, text: RunningText, count: int) -> list[Key]:
        """The keys of the pages of a text's first tokens; none if pages are not shared."""
        if text.is_lazy or (self.is_recurrent and self._snapshots is None):
            return []
        salt = repr((text.salt, text.loaded, text.text_length)).encode()
        return self._pages[0].keys(text.tokens[:count], salt, text.keys or (), text.pictures)

    def known(self, keys: Sequence[Key]) -> int:
        """The largest number of the first pages with these keys that a text could share now."""
        return max(next(iter(self._shareable(g, keys)), 0) for g in range(self.groups))

    def _shareable(self, group: int, keys: Sequence[Key]) -> Sequence[int]:
        """The numbers of the first pages with these keys that a text of a group can share, the largest first.

        Layers with a window need only the pages that tokens after them see.
        """
        known = self._pages[group].known(keys) if self.count else len(keys)
        if self.window is None:
            return range(known, 0, -1)
        found, run, pages = [], 0, self._windows[group]
        for count, key in enumerate(keys[:known], 1):
            run = run + 1 if pages.has(key) else 0
            if run >= count - self.window.first(count * self.page_size):
                found.append(count)
        return found[::-1]

    def publish(self, text: RunningText, keys: Sequence[Key]) -> None:
        """Gives the pages of a text these keys."""
        for pages, own in self._pages_of(text):
            pages.publish(own, keys)

    def _pages_of(self, text: RunningText) -> list[tuple[Pages, list[int]]]:
        """The pages of a text's group, and those of the text: of layers that keep all tokens, and of the others."""
        group = self.group_of(text)
        found = [(self._pages[group], text.pages)]
        return [*found, (self._windows[group], text.window_pages)] if self._windows else found

    # --- states of recurrent layers

    def _find_state(
        self, text: RunningText, keys: Sequence[Key], counts: Sequence[int]
    ) -> tuple[int, int | None]:
        """How many of its first pages a text shares, one of ``counts`` or 0, and the row of the state after them."""
        if self._snapshots is None:
            return next(iter(counts), 0), None
        pages, row = self._snapshots.find(keys, counts) or (0, None)
        ends = self._snapshots.common(keys), len(keys)
        text.cuts = [n * self.page_size for n in ends if n > pages and n >= LEAST_PAGES]
        return pages, row

    def keep_state(self, text: RunningText) -> None:
        """Keeps the state of a text whose reading has come to one of its cuts."""
        assert self._snapshots is not None and text.keys is not None
        row = self._snapshots.add(text.keys[: text.stored // self.page_size])
        if row is not None:
            self._copy_to_snapshots(row, text.slot)

    def _copy_to_snapshots(self, row: int, slot: Any) -> None:
        assert self._snapshots is not None
        if self._states is None:
            pool = self.model.page_pool(1, self.page_size, self._snapshots.count, self.cache_dtype)
            self._states = recurrent_states(pool)
        states = recurrent_states(self.arrays.pool)
        self._states = copied(self._states, states, np.int32(row), np.int32(slot))

    def _copy_to_slots(self, slot: int, row: int) -> None:
        pool = self.arrays.pool
        states = copied(recurrent_states(pool), self._states, np.int32(slot), np.int32(row))
        pool = dataclasses.replace(pool, states={**pool.states, **states})
        self.arrays = self.arrays._replace(pool=pool)

    def compile_snapshots(self) -> int:
        """Compiles the programs that keep and restore states; returns their number."""
        if self._snapshots is None:
            return 0
        # A row that there is not: nothing is written.
        self._copy_to_snapshots(self._snapshots.count, 0)
        self._copy_to_slots(self.slots, 0)
        return 2

    def is_state_coming(self, text: RunningText, others: Sequence[RunningText]) -> bool:
        """Whether one of the others, which are being read, will keep a state that this text can begin with."""
        own = set(text.keys or ())
        cuts = (
            (one, cut // self.page_size) for one in others for cut in one.cuts if cut > one.stored
        )
        return any((one.keys or ())[pages - 1] in own for one, pages in cuts)

    # --- slots and pages

    def start(self, text: RunningText) -> bool:
        """Gives a text its slot and pages, and those that it shares; False if there are too few."""
        # A prompt that is scored must be read as a whole.
        keys = [] if text.scores_prompt else text.keys or []
        if text.pictures is not None:
            keys = keys[: self._uncut(text, keys)]
        size = text.limit if self._is_exact else len(text.tokens)
        if text.slot is not None:  # it has what another one has left
            if self.add_pages(text, size):
                return True
            self.release(text)
        shareable = {g: self._shareable(g, keys) for g in range(self.groups) if self._free[g]}
        # The group that has most of its beginning, and of these the one with the fewest texts.
        order = lambda g: (-next(iter(shareable[g]), 0), -len(self._free[g]))
        for g in sorted(shareable, key=order):
            count, row = self._find_state(text, keys, shareable[g])
            text.slot, text.pages = self._free[g].pop(), self._pages[g].share(keys[:count])
            text.stored = text.found = count * self.page_size
            if self.window is not None:
                first = self.window.first(text.stored)
                shared = self._windows[g].share(keys[first:count])
                text.window_pages = [-1] * first + shared
            if self.add_pages(text, size):
                self._count_found(text)
                if row is not None:
                    self._copy_to_slots(text.slot, row)
                return True
            self.release(text)
        return False

    def _uncut(self, text: RunningText, keys: Sequence[Key]) -> int:
        """The number of first pages that can be shared without a part of a picture that must be read as a whole."""
        assert text.pictures is not None
        count = max(pages.known(keys) for pages in self._pages)
        while text.pictures.uncut(count * self.page_size) < count * self.page_size:
            count -= 1
        return count

    def add_pages(self, text: RunningText, tokens: int) -> bool:
        """Gives a text pages for so many tokens; False if there are too few."""
        pages = self._pages[self.group_of(text)]
        wanted = max(pages.needed(tokens) - len(text.pages), 0)
        if wanted > self._available(pages):
            return False
        if wanted > pages.free:
            self._grow(min(bucket(pages.count + wanted - pages.free), self._most))
        more = pages.allocate(wanted)
        assert more is not None
        text.pages += more
        self.move_window(text, min(tokens, text.stored + self._most_new))
        return True

    def move_window(self, text: RunningText, tokens: int) -> None:
        """Gives the pages back that no later token of a text sees, and takes those of its first ``tokens`` tokens.

        This is for layers with a window, and there are always enough pages.
        """
        if self.window is None:
            return
        pages, own = self._windows[self.group_of(text)], text.window_pages
        first = self.window.first(text.stored)
        if first and own[first - 1] >= 0:
            pages.release(own[:first])
            own[:first] = [-1] * first
        more = pages.allocate(max(self.entries(tokens) - len(own), 0))
        assert more is not None
        own += more

    def _grow(self, count: int) -> None:
        """Makes the pool larger, with so many pages in each group."""
        pool = moved(self._pool(count), self.arrays.pool, shardings=self.shardings)
        self.arrays = self.arrays._replace(pool=pool)
        for pages in self._pages:
            pages.grow(count)

    def release(self, text: RunningText, *, is_valid: bool = True) -> None:
        """Takes slot and pages from a text; what is not valid is shared with no other."""
        assert text.slot is not None
        group = self.group_of(text)
        for pages, own in self._pages_of(text):
            if not is_valid:
                pages.withdraw(text.keys or ())
            pages.release(own)
        if not is_valid and self._snapshots is not None:
            self._snapshots.drop(text.keys or ())
        self._free[group].append(text.slot)
        text.slot, text.pages, text.window_pages, text.stored, text.cuts = None, [], [], 0, []

    def take_over(self, text: RunningText, before: RunningText) -> None:
        """Gives a text the slot of another one, and the pages of the tokens with which both begin."""
        if before.slot is None:
            return
        read, least = before.tokens[: before.stored], len(text.tokens) - 1
        pairs = zip(read, text.tokens[:least], strict=False)
        count = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(read), least))
        if text.pictures is not None:
            count = text.pictures.uncut(min(count, text.pictures.common(before.pictures)))
        elif before.pictures is not None:
            count = min(count, before.pictures.common(None))
        is_other = (text.text_length[1], text.loaded) != (before.text_length[1], before.loaded)
        # A state cannot go back, and what earlier tokens see may be gone.
        is_fixed = self.is_recurrent or self.window is not None
        if is_other or (count < len(read) and is_fixed):
            count = 0
        entries = self.entries(count)
        for pages, own in self._pages_of(before):
            pages.release(own[entries:])
        text.slot, text.pages, text.stored = before.slot, before.pages[:entries], count
        text.window_pages = before.window_pages[:entries]
        text.found = 0 if count == len(read) else count
        before.slot, before.pages, before.window_pages = None, [], []
        self._count_found(text)

    def _count_found(self, text: RunningText) -> None:
        """Counts the tokens that a text has found in the cache."""
        self.hits += text.stored
        if not text.recorded:  # a text that starts again finds what it has written itself
            text.partial.cached_tokens = text.stored

    # --- words

    def start_words(self, text: RunningText) -> None:
        """Sets the words of a text's slot."""
        assert text.slot is not None
        size = text.prompt_length
        prompt, answer = text.tokens[:size], text.tokens[size:]
        longest = None if text.limit <= self._longest else bucket(text.limit)
        self.set_words(text.slot, prompt, answer, text.bias, text.sequences, longest)

    def set_words(
        self, slot: int, prompt: Sequence[int], answer: Sequence[int], bias: np.ndarray | None = None,
        sequences: Sequences | None = None, longest: int | None = None,
    ) -> None:  # fmt: skip
        """Sets the words of a slot; there are none before the first text that uses them."""
        ids = (np.asarray(one, np.int32) for one in (prompt, answer))
        tell(self._together, "put words", slot, *ids, bias, sequences, longest)
        self.put_words(slot, prompt, answer, bias, sequences, longest)

    def put_words(
        self, slot: int, prompt: Sequence[int], answer: Sequence[int], bias: np.ndarray | None,
        sequences: Sequences | None, longest: int | None,
    ) -> None:  # fmt: skip
        """Sets the words of a slot in this process."""
        size = self.model.config.vocab_size
        longest = (longest or self._longest) if self._has_order else None
        words = self.arrays.words or self._placed(Words.empty(self.slots, size, longest))
        new = Words.of(prompt, answer, bias, sequences, longest, size)
        # Arrays of sequences grow with the largest request.
        sizes = tuple(map(max, words.sizes, new.sizes))
        if sizes != words.sizes:
            words = self._placed(resized_words(words, sizes=sizes))
        words = start_words(words, np.int32(slot), new.resized(*sizes))
        self.arrays = self.arrays._replace(words=words)

    def drop_words(self) -> None:
        """Frees the words, which the next text that uses them makes anew."""
        tell(self._together, "drop words")
        self.forget_words()

    def forget_words(self) -> None:
        """Frees the words in this process."""
        self.arrays = self.arrays._replace(words=None)

    def _placed(self, words: Words) -> Words:
        if self.shardings is None:
            return words
        whole = NamedSharding(self.shardings[0].mesh, PartitionSpec())
        return jax.tree.map(lambda array: put(array, whole), words)
