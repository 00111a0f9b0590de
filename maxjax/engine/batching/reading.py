"""How a scheduler reads prompts: which pieces of them at once, and by which program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..bucket import bucket
from ..pictures import Inputs
from ..token_losses import TokenLosses, chunk_of
from .calls import RAGGED, Calls
from .dispatch import DispatchTokens
from .programs import LEAST_TOKENS, joined_tokens, read, read_scored, read_tokens
from .running import RunningText, Stage


class ReadCounts(NamedTuple):
    """The numbers of tokens that were read, of texts that have their first token, and of near-ties among these."""

    tokens: int
    began: int
    near_ties: int


def read_prompts(calls: Calls, running: Sequence[RunningText], chunk: int) -> ReadCounts:
    """Reads the next tokens of prompts, ``chunk`` of them at most."""
    room, pieces = chunk, []
    for text in running:
        if text.stage is Stage.READING and room > 0:
            until = next((cut for cut in text.cuts if cut > text.stored), len(text.tokens))
            count = min(until - text.stored, room)
            if text.pictures is not None:
                count = text.pictures.piece_end(text.stored, count) - text.stored
            if text.scores_prompt:  # all of their logits are in memory
                fits = chunk_of(calls.memory.groups, chunk, calls.vocab_size)
                count = min(count, max(fits, calls.memory.page_size))
            if calls.is_exact and count < text.unread:
                count -= (
                    count % calls.memory.page_size
                )  # pieces end where pages do, whatever else is read
            pieces.append((text, count))
            room -= count
    pieces = [piece for piece in pieces if piece[1]]
    for text, count in pieces:
        calls.memory.move_window(text, text.stored + count)
    joined = _joined(calls, pieces)
    near_ties = _read_tokens(calls, joined) if joined else 0
    rest = [(text, count) for text, count in pieces if (text, count) not in joined]
    for is_scored in (False, True):
        alike = [piece for piece in rest if piece[0].scores_prompt == is_scored]
        rows = list(_rows_of_pieces(calls, alike))
        near_ties += sum(_read_pieces(calls, row, is_scored) for row in rows)
    began = sum(text.stage is not Stage.READING for text, _ in pieces)
    return ReadCounts(sum(n for _, n in pieces), began, near_ties)


def _joined(
    calls: Calls, pieces: Sequence[tuple[RunningText, int]]
) -> list[tuple[RunningText, int]]:
    """The pieces whose tokens are read together."""
    if calls.is_exact or calls.observer.is_observed or not calls.is_ragged:
        return []
    short = [
        (text, n)
        for text, n in pieces
        if text.stored + n <= RAGGED and not text.scores_prompt and text.pictures is None
    ]
    if calls.platform == "cpu":
        return short
    # A piece that is read alone reads all weights, and one that is not reads its text for each token.
    most = calls.weight_bytes / calls.token_bytes
    cheap = [(text, n) for text, n in short if n * (text.stored + n) <= most]
    return cheap if len(cheap) > 1 else []


def _read_tokens(calls: Calls, pieces: Sequence[tuple[RunningText, int]]) -> int:
    """Reads tokens of several texts at once; returns the number of near-ties."""
    counts, groups = dict(pieces), calls.memory.groups
    texts = calls.placed([text for text, _ in pieces], calls.memory.slots)
    rows = len(texts) // groups
    blocks = [[one for one in texts[i : i + rows] if one] for i in range(0, len(texts), rows)]
    size = bucket(max(sum(counts[one] for one in block) for block in blocks), LEAST_TOKENS)
    parts = [
        joined_tokens([(one.tokens, one.stored, counts[one]) for one in block], rows, size)
        for block in blocks
    ]
    for g, (_, row_of_token, _, ends) in enumerate(parts):
        row_of_token += g * rows
        ends += g * size
    args = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    for one, count in pieces:
        _mark_read(calls, one, count)
    finishes = [one is not None and not one.unread for one in texts]
    arrays = calls.text_rows(texts, finishes, calls.ragged_width)
    of = (args[1], None)
    sampled = calls.run(read_tokens, texts, arrays, *args, width=None, rows=of)
    return _take_first(calls, texts, sampled)


def _parts(calls: Calls, start: int, count: int) -> list[int]:
    """The numbers of tokens that are read at once; each page by itself where bits must be the same."""
    if not calls.is_exact:
        return [count]
    borders = [*range(start, start + count, calls.memory.page_size), start + count]
    return [end - begin for begin, end in zip(borders, borders[1:], strict=False)]


def _rows_of_pieces(calls: Calls, pieces: Sequence[tuple[RunningText, int]]) -> Iterator[Any]:
    """The pieces that are read at once: one in each group of devices, None where there is none."""
    each = [(text, size) for text, n in pieces for size in _parts(calls, text.stored, n)]
    of_group = lambda g: [piece for piece in each if calls.memory.group_of(piece[0]) == g]
    groups = [of_group(g) for g in range(calls.memory.groups)]
    if not calls.observer.is_observed:
        yield from itertools.zip_longest(*groups)
        return
    for g, own in enumerate(groups):
        for piece in own:
            yield [piece if i == g else None for i in range(len(groups))]


def _read_pieces(
    calls: Calls, pieces: Sequence[tuple[RunningText, int] | None], is_scored: bool
) -> int:
    """Reads tokens of one text in each group of devices, and scores them or not; returns the number of near-ties."""
    texts = [None if piece is None else piece[0] for piece in pieces]
    counts = np.asarray([0 if piece is None else piece[1] for piece in pieces], np.int32)
    width = calls.memory.page_size if calls.is_exact else bucket(int(counts.max()), LEAST_TOKENS)
    ids = np.zeros((len(texts), width), np.int32)
    targets = np.zeros_like(ids)
    for row, text in enumerate(texts):
        if text is not None:
            ids[row, : counts[row]] = text.tokens[text.stored : text.stored + counts[row]]
            following = text.tokens[text.stored + 1 : text.stored + 1 + counts[row]]
            targets[row, : len(following)] = following
    pairs = list(zip(texts, counts, strict=True))
    finishes = [text is not None and n == text.unread for text, n in pairs]
    arrays = calls.text_rows(texts, finishes, gathers=True)
    inputs = Inputs.of(
        [
            (None, 0, 0) if text is None else (text.pictures, text.stored, int(n))
            for text, n in pairs
        ],
        width,
        calls.memory.model,
    )
    again = any(text is not None and text.stored < text.recorded for text in texts)
    options = {"width": width, "counts": lambda _: counts, "keeps": not again}
    losses = None
    if is_scored:
        found = calls.run(read_scored, texts, arrays, ids, counts, targets, inputs, **options)
        sampled, losses = found[0], calls.together.fetch(found[1])
    else:
        sampled = calls.run(read, texts, arrays, ids, counts, inputs, **options)
    for row, (text, count) in enumerate(pairs):
        if text is not None:
            _mark_read(calls, text, int(count))
            if losses is not None:
                text.receive_losses(TokenLosses(*(array[row, :count] for array in losses)))
    return _take_first(calls, texts, sampled)


def _mark_read(calls: Calls, text: RunningText, count: int) -> None:
    text.stored += count
    text.recorded = max(text.recorded, text.stored)
    assert text.keys is not None
    calls.memory.publish(text, text.keys[: text.stored // calls.memory.page_size])
    if text.stored in text.cuts:
        calls.memory.keep_state(text)


def _take_first(calls: Calls, texts: Sequence[RunningText | None], sampled: Any) -> int:
    """Gives those texts their first token that have been read to their end; returns the number of near-ties."""
    read = [text is not None and not text.unread for text in texts]
    if not any(read) and not calls.together.is_shared:
        return 0
    found = calls.together.fetch(sampled)
    one = np.ones(found.tokens.shape, np.int32)
    first = DispatchTokens(
        found.tokens[:, None],
        one,
        ~found.valid,
        ~found.valid,
        jax.tree.map(lambda a: a[:, None], found),
    )
    for row, text in enumerate(texts):
        if text is not None and read[row]:
            text.stage = Stage.WRITING
            text.receive(first, row)
            if not text.is_lazy:
                text.take(calls.together.is_symmetric)
    return int(found.is_near_tie[read].sum())
