"""Compiles all programs that a scheduler's texts can need."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..isolation import isolated
from .draft import Drafts
from .grammar import mask_words
from .memory import PAGE_SIZE
from .programs import TextRows, decode, read, read_tokens, token_counts
from .reading import RAGGED
from .scheduler import Scheduler
from .speculation import verify


@isolated()
def compile_programs(scheduler: Scheduler, longest: int) -> int:
    """Compiles the programs for texts of at most ``longest`` tokens; returns their number."""
    count, calls = 0, scheduler.calls
    had_words = scheduler.memory.arrays.words is not None
    every = np.full(mask_words(scheduler.calls.vocab_size), 2**32 - 1, np.uint32)
    for has_words in (True,) if had_words else (False, True):
        if has_words and not had_words:
            scheduler.memory.set_words(scheduler.slots, [], [])
        each = itertools.product(calls.widths(longest), (None, every), _adapter_programs(scheduler))
        for width, allowed, has_adapters in each:
            count += _compile(scheduler, width, allowed, has_adapters)
    if isinstance(scheduler.speculation, Drafts):
        for width in calls.widths(longest):
            count += scheduler.speculation.compile(width)
    if not had_words:
        scheduler.memory.arrays = scheduler.memory.arrays._replace(words=None)
    return count


def _adapter_programs(scheduler: Scheduler) -> tuple[bool, ...]:
    """Whether programs are those of the model with adapters: the kinds that there are."""
    if not scheduler.adapters.has_model:
        return (False,)
    return (True,) if scheduler.calls.is_exact else (False, True)


def _compile(
    scheduler: Scheduler, width: int, allowed: np.ndarray | None, has_adapters: bool
) -> int:
    """Compiles the programs for tables of this width; returns their number."""
    count, calls = 0, scheduler.calls
    is_ragged = calls.is_ragged and not calls.is_exact

    def run(program: Any, batch: int, *args: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        options = {"width": None, "has_adapters": has_adapters, **options}
        calls.run(program, [None] * batch, blank(batch), *args, **options)

    def blank(rows: int) -> TextRows:
        bits = None if allowed is None else np.broadcast_to(allowed, (rows, len(allowed)))
        table = np.full((rows, width), -1, np.int32)
        return calls.text_rows([None] * rows)._replace(table=table, allowed=bits)

    groups = scheduler.memory.groups
    for size in [PAGE_SIZE] if calls.is_exact else token_counts(scheduler.chunk):
        none, ends = (np.zeros(n, np.int32) for n in (groups * size, scheduler.slots))
        if is_ragged:
            run(read_tokens, scheduler.slots, none, none, none - 1, ends, rows=(none, None))
        if not is_ragged or width * PAGE_SIZE > RAGGED:
            run(read, groups, none.reshape(groups, -1), ends[:groups], width=size)
    shapes = [] if scheduler.speculation is None else scheduler.speculation.shapes
    for rows, tokens in shapes:
        none = np.zeros(rows, np.int32)
        texts = scheduler.slots if tokens == 1 else rows
        ids = np.zeros((rows, tokens), np.int32)
        run(verify, texts, ids, none, none, none, rows=(none, none))
    for rows in calls.row_counts() if not (shapes and calls.is_exact) else ():
        none = np.zeros(rows, np.int32)
        run(decode, rows, none, none > 0, np.int32(1), np.int32(0))
    return count
