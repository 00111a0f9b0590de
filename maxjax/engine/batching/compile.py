"""Compiles all programs that a scheduler's texts can need."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..isolation import isolated
from .calls import RAGGED
from .draft import ModelGuesses
from .programs import decode, read, read_tokens, token_counts
from .running import RunningText
from .scheduler import Scheduler
from .speculation import verify


@isolated()
def compile_programs(scheduler: Scheduler) -> int:
    """Compiles all programs; returns their number."""
    count = 0
    had_words = scheduler.memory.arrays.words is not None
    for has_words in (True,) if had_words else (False, True):
        if has_words and not had_words:
            scheduler.memory.set_words(scheduler.slots, [], [])
        for has_adapters in _adapter_programs(scheduler):
            count += _compile(scheduler, has_adapters)
    count += scheduler.memory.compile_snapshots()
    if isinstance(scheduler.speculation, ModelGuesses):
        count += scheduler.speculation.compile()
    if not had_words:
        scheduler.memory.drop_words()
    return count


def _adapter_programs(scheduler: Scheduler) -> tuple[bool, ...]:
    """Whether programs are those of the model with adapters: the kinds that there are."""
    if not scheduler.adapters.has_model:
        return (False,)
    return (True,) if scheduler.calls.is_exact else (False, True)


def _compile(scheduler: Scheduler, has_adapters: bool) -> int:
    """Compiles the programs of the model with adapters, or without; returns their number."""
    count, calls = 0, scheduler.calls
    is_ragged = calls.is_ragged and not calls.is_exact

    def run(program: Any, batch: int, pages: int, *args: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        texts: list[RunningText | None] = [None] * batch
        options = {"width": None, "has_adapters": has_adapters, **options}
        calls.run(program, texts, calls.text_rows(texts, width=pages), *args, **options)

    groups, slots = scheduler.memory.groups, scheduler.slots
    page_size = scheduler.memory.page_size
    for size in [page_size] if calls.is_exact else token_counts(scheduler.chunk):
        none, ends = (np.zeros(n, np.int32) for n in (groups * size, slots))
        for pages in [calls.ragged_width] if is_ragged else ():
            run(read_tokens, slots, pages, none, none, none - 1, ends, rows=(none, None))
        for pages in calls.widths(gathers=True):
            if not is_ragged or calls.platform != "cpu" or pages * page_size > RAGGED:
                run(read, groups, pages, none.reshape(groups, -1), ends[:groups], width=size)
    shapes = [] if scheduler.speculation is None else scheduler.speculation.shapes
    for pages in calls.widths():
        for rows, tokens in shapes:
            none = np.zeros(rows, np.int32)
            texts = slots if tokens == 1 else rows
            ids = np.zeros((rows, tokens), np.int32)
            run(verify, texts, pages, ids, none, none, none, rows=(none, none))
        for rows in calls.row_counts() if not (shapes and calls.is_exact) else ():
            none = np.zeros(rows, np.int32)
            run(decode, rows, pages, none, none > 0, np.int32(1), np.int32(0))
    return count
