"""Calls: how the programs of an engine are called for given texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ...graph.placement.arrays import platform_of
from ...graph.placement.specs import held_bytes, mesh_of
from ...lockstep import Lockstep
from ...nn.kv_cache.recurrent import Recurrent
from ...nn.layer.observe.programs import ProgramObserver
from ...progress import compiling
from .adapters import Adapters
from .in_place import why_copied
from .memory import TextMemory
from .messages import tell
from .programs import Choosing, TextRows, row_of
from .running import RunningText

RAGGED = 2048
"""Up to this position, tokens of several texts are read together, each of which attends to its text by itself."""
_LEAST_PAGES = 8
# Tables with room for so many pages take no time to speak of: 131,072 tokens.
_ENOUGH_PAGES = 2048


def platform_of_arrays(tree: Any) -> str:
    """The platform of the devices that the arrays of a pytree are on."""
    where = [leaf.sharding for leaf in jax.tree.leaves(tree)]
    return platform_of(mesh_of(where) or where[0])


def _held(tree: Any) -> int:
    """The bytes of a pytree's arrays on a device."""
    leaves = jax.tree.leaves(tree)
    return sum(held_bytes(leaf.sharding, leaf.shape, leaf.dtype.itemsize) for leaf in leaves)


def compiled_count(*programs: Any) -> int:
    """The number of programs that have been compiled of jitted functions."""
    return sum(program._cache_size() for program in programs)


def table_widths(pages: int) -> list[int]:
    """The sizes of tables for texts of up to so many pages.

    Example:
        >>> table_widths(128), table_widths(129)
        ([8, 32, 128], [8, 32, 128, 512])
    """
    found = [_LEAST_PAGES]
    while found[-1] < pages:
        found.append(4 * found[-1])
    return found


class Calls:
    """Calls of programs, which change the memory of texts.

    Args:
        model: a decoder whose weights are loaded.
        memory: what the texts have on the devices.
        adapters: the adapters that they may use.
        how: how their tokens are chosen.
        is_exact: whether a text gets the same bits whatever else runs.
        has_masks: whether texts may have grammars.
        longest: largest number of tokens of a text.
        chunk: largest number of prompt tokens of a call, in each group of devices.
        together: the call that all belong to, if several processes make it together.

    Attributes:
        observer: the run of the model, for captures and patches.
        platform: the platform of the devices.
        is_ragged: whether a row of a call may be a token of any text.
        shows: whether it is shown that a program is being compiled.
    """

    def __init__(
        self, model: Any, memory: TextMemory, adapters: Adapters, how: Choosing, is_exact: bool,
        has_masks: bool, longest: int, chunk: int, together: Lockstep | None,
    ):  # fmt: skip
        self.memory, self.adapters, self.how, self.is_exact = memory, adapters, how, is_exact
        self.observer, self.together = ProgramObserver(model), together or Lockstep("generate", ())
        self.vocab_size, self.shows = model.config.vocab_size, True
        self._has_masks, self._longest = has_masks, longest
        self._has_lengths = bool(model.config.ropes_by_length)
        self._has_axes = model.config.has_axes
        self.platform = platform_of_arrays(memory.arrays)
        self.is_ragged = memory.has_whole_pages and not memory.is_recurrent
        if self.is_ragged and self.platform != "cpu":
            # Otherwise each token of a ragged call would read a copy of all pages of its text.
            shape = memory.slots, chunk * memory.groups, self.ragged_width
            self.is_ragged = not why_copied(model, *shape, memory.cache_dtype)

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of the weights on a device."""
        return _held(self.memory.model)

    @cached_property
    def token_bytes(self) -> float:
        """The bytes that the cache of a token takes on a device."""
        pool = self.memory.arrays.pool
        each = [one for one in pool.states.values() if not isinstance(one, Recurrent)]
        pages = sum(_held(one) / one.keys.shape[1] for one in each)
        return pages * self.memory.groups / pool.page_size

    def placed(
        self, texts: Sequence[RunningText], rows: int | None = None
    ) -> list[RunningText | None]:
        """The text of each row of a call: those of a group of devices have the rows of one block.

        Args:
            texts: the texts.
            rows: the number of rows; None: the smallest for which there is a program.
        """
        groups = self.memory.groups
        blocks: list[list[RunningText | None]] = [[] for _ in range(groups)]
        for text in texts:
            blocks[self.memory.group_of(text)].append(text)
        if rows is None:
            rows = next(n for n in self.row_counts() if n >= groups * max(map(len, blocks)))
        return [one for part in blocks for one in [*part, *[None] * (rows // groups - len(part))]]

    def text_rows(
        self, texts: Sequence[RunningText | None], finishes: Sequence[bool] | None = None,
        width: int | None = None, gathers: bool = False,
    ) -> TextRows:  # fmt: skip
        """The arrays of the texts in these rows; the table has ``width`` pages, by default as many as they need."""
        if width is None:
            each = [text for text in texts if text is not None]
            longest = max(
                (len(p) for one in each for p in (one.pages, one.window_pages)), default=1
            )
            width = next(n for n in self.widths(gathers) if n >= longest)
        return TextRows.of(
            texts, width, self.memory.slots, vocab_size=self.vocab_size, finishes=finishes,
            has_lengths=self._has_lengths, has_masks=self._has_masks, has_mtp=self.memory.has_mtp,
            has_axes=self._has_axes,
            has_windows=self.memory.window is not None,
        )  # fmt: skip

    def widths(self, gathers: bool = False) -> list[int]:
        """The sizes of tables of pages: few, so that few programs are compiled.

        Args:
            gathers: whether a program copies all pages that the table has room for, on any platform. Where a kernel
                reads the pages of a text alone, the longest texts decide on one size.
        """
        found = table_widths(self.memory.entries(self._longest))
        # A TPU copies a table to its memory for scalars.
        if gathers or not self.is_ragged or self.platform == "tpu":
            return found
        return [width for width in found if width >= min(found[-1], _ENOUGH_PAGES)]

    @property
    def ragged_width(self) -> int:
        """The size of tables for tokens of several texts that are read at once: ``RAGGED`` tokens at most."""
        return min(self.widths()[-1], self.memory.entries(RAGGED))

    def row_counts(self) -> list[int]:
        """The numbers of texts that a decode step may be for."""
        groups = self.memory.groups
        fewer = () if self.is_exact else (groups, 8 * groups)
        return [n for n in fewer if n < self.memory.slots] + [self.memory.slots]

    def run(
        self, program: Any, texts: Sequence[RunningText | None], arrays: TextRows, *args: Any, width: int | None,
        counts: Callable[[Any], Any] = lambda _: None, keeps: bool = True,
        rows: tuple[np.ndarray | None, np.ndarray | None] = (None, None), has_adapters: bool = False,
    ) -> Any:  # fmt: skip
        """Dispatches a program, and keeps the memory that it returns.

        Args:
            rows: the text of each row of tokens that the model gets, and of each row of its logits; None: the texts.
            has_adapters: whether it is the model with adapters, if no text has one.
        """
        has_adapters |= self.is_exact and self.adapters.has_model
        places = None
        if has_adapters or any(text is not None and text.loaded is not None for text in texts):
            no = np.int32(-1)
            place = lambda text: no if text.loaded is None else text.loaded.place
            of_rows = row_of(texts, place, no)
            places = [of_rows if n is None else of_rows[n] for n in rows]
        numbers = [-1 if text is None else text.number for text in texts]
        tell(self.together, "run", program.__name__, arrays, args, places)
        return self.dispatch(
            program, arrays, args, places, rows=numbers, counts=counts, width=width, keeps=keeps
        )

    def dispatch(
        self, program: Any, arrays: TextRows, args: Sequence[Any], places: Sequence[np.ndarray] | None, *,
        rows: Sequence[int] = (), counts: Callable[[Any], Any] = lambda _: None, width: int | None = None,
        keeps: bool = False,
    ) -> Any:  # fmt: skip
        """Dispatches a program in this process.

        Args:
            places: the place of the adapter of each row of tokens, and of each row of logits; None for the model
                without adapters.
            rows, counts, width, keeps: as for ``ProgramObserver.run``.
        """
        observer = self.observer if places is None else self.adapters.observer(*places)
        with compiling(program.__name__, self.shows):
            self.memory.arrays, result = observer.run(
                self.together, program, self.memory.arrays, arrays, *args, rows=rows,
                counts=lambda found: counts(found[1]), width=width, keeps=keeps, how=self.how,
                shardings=self.memory.shardings,
            )  # fmt: skip
        return result
