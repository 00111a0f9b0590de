"""The jitted programs of the engine: ``read`` prompts, ``read_tokens`` of many prompts at once, and ``decode``.

They take the pool of pages, which they donate, and small arrays that say which texts they are for: nothing of a text
but its pages stays on the devices, so each call may be for other texts. Settings are arrays too.

Shapes: B texts of a call, T tokens of each, N tokens of several texts, M pages of a text, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...graph.placement.arrays import on_mesh
from ...kernels import explicit
from ...nn.kv_cache.pages import PagedCache, PagePool
from ...nn.layer.observe.loops import zeros
from ...nn.layer.observe.programs import is_observed, tapped
from ..bucket import bucket
from ..pictures import Inputs
from ..sampling.draw import Sampled
from ..sampling.rows import RowSettings, Words, sample_rows
from ..sampling.settings import GREEDY
from ..shardings import Shardings, replicated, resharded
from ..token_losses import losses_of_logits
from .dispatch import MAX_STEPS, DispatchTokens
from .grammar import mask_words
from .running import RunningText

# Programs are for so many tokens that end a text; one with more has programs of its own.
_LEAST_ENDS = 32
LEAST_TOKENS = 16
"""The smallest number of tokens that a program of reading is for."""


class EngineMemory(NamedTuple):
    """What the engine keeps on the devices. A pytree.

    Attributes:
        pool: the pages.
        words: counts and biases of tokens, by slot; None until a request needs them.
    """

    pool: PagePool
    words: Words | None


class TextRows(NamedTuple):
    """The texts of a call, arrays ``[B]`` of NumPy. A pytree.

    Attributes:
        slots: the slot of each text, int32; the number of slots for a row that is padding.
        table: its pages, int32 ``[B, M]``.
        lengths: number of its tokens that are stored, int32.
        limits: largest number of its tokens, int32.
        written: number of tokens of its answer, int32.
        finishes: whether the call reads its last token, so that the sampled one is part of its answer, bools.
        text_lengths: the length for which RoPE rotates its keys, int32; None where RoPE does not depend on it.
        settings: how its next token is chosen.
        allowed: the tokens that may come next, bits as in ``sample_rows``; None where no text may have a grammar.
        found: number of its first tokens that it has found in pages of other texts, int32; None where no layer of
            multi-token prediction follows.
        offsets: by how much positions for RoPE exceed numbers of tokens after its pictures, int32; None where RoPE
            does not know of rows and columns.
        window_table: its pages in layers with a window, int32 ``[B, M]``, -1 for those that it has given back; None
            where these have no pages of their own.
    """

    slots: Any
    table: Any
    lengths: Any
    limits: Any
    written: Any
    finishes: Any
    text_lengths: Any
    settings: RowSettings
    allowed: Any = None
    found: Any = None
    offsets: Any = None
    window_table: Any = None

    @staticmethod
    def of(
        texts: Sequence[RunningText | None], width: int, slots: int, *, vocab_size: int,
        finishes: Sequence[bool] | None = None, has_lengths: bool = False, has_masks: bool = False,
        has_mtp: bool = False, has_axes: bool = False, has_windows: bool = False,
    ) -> TextRows:  # fmt: skip
        """The arrays of these texts.

        Args:
            texts: the text of each row; None for padding.
            width: M.
            slots: the number of slots.
            vocab_size: V.
            finishes: of each row, whether the last token of its text is read; False by default.
            has_lengths: whether RoPE depends on the length of a text.
            has_masks: whether texts may have grammars.
            has_mtp: whether a layer of multi-token prediction follows the texts.
            has_axes: whether RoPE turns some pairs by rows and columns.
            has_windows: whether layers with a window have pages of their own.
        """
        of = lambda get, rest: row_of(texts, get, rest)
        zero = np.int32(0)
        none = np.full(width, -1, np.int32)
        filled = lambda pages: np.concatenate([pages[:width], none[len(pages) :]])
        table = of(lambda text: filled(text.pages), none)
        windows = of(lambda text: filled(text.window_pages), none) if has_windows else None
        done = np.zeros(len(texts), bool) if finishes is None else np.asarray(finishes, bool)
        allowed = None
        if has_masks:
            allowed = _every_token(len(texts), vocab_size)
            matchers = [None if text is None else text.matcher for text in texts]
            if any(matcher is not None for matcher in matchers):
                allowed = allowed.copy()
                for row, matcher in zip(allowed, matchers, strict=True):
                    if matcher is not None:
                        row[:] = matcher.allowed()
        return TextRows(
            of(lambda text: text.slot, np.int32(slots)), table, of(lambda text: text.stored, zero),
            of(lambda text: text.limit, zero), of(lambda text: text.written, zero), done,
            of(lambda text: text.text_length[0], zero) if has_lengths else None,
            _settings(texts, vocab_size), allowed, of(lambda text: text.found, zero) if has_mtp else None,
            of(_offset, zero) if has_axes else None,
            windows,
        )  # fmt: skip

    def cache(self, memory: EngineMemory) -> PagedCache:
        """The cache of these texts."""
        return PagedCache(
            memory.pool, self.table, self.lengths, self.slots, self.text_lengths, found=self.found,
            offsets=self.offsets,
            window_table=self.window_table,
        )  # fmt: skip


@lru_cache(maxsize=16)
def _every_token(rows: int, vocab_size: int) -> np.ndarray:
    """The masks of texts without grammars; they are read alone."""
    return np.full((rows, mask_words(vocab_size)), 2**32 - 1, np.uint32)


def _offset(text: RunningText) -> int:
    return 0 if text.pictures is None else text.pictures.offset


def row_of(
    texts: Sequence[RunningText | None], get: Callable[[RunningText], Any], rest: Any
) -> np.ndarray:
    """An array with a row for each text, and ``rest`` in the rows that are padding."""
    found = np.full((len(texts), *np.shape(rest)), rest, np.asarray(rest).dtype)
    for row, text in enumerate(texts):
        if text is not None:
            found[row] = get(text)
    return found


def joined_tokens(
    pieces: Sequence[tuple[list[int], int, int]], rows: int, size: int | None = None
) -> list[np.ndarray]:
    """The arrays of ``read_tokens`` for the tokens of each text from a first one on, so many of them.

    Args:
        pieces: tokens of a text, the place of the first of them, and their number.
        rows: number of texts.
        size: number of tokens, padding included; None: the smallest for which there is a program.

    Example:
        >>> [a.tolist() for a in joined_tokens([([5, 6, 7], 1, 2), ([8], 0, 1)], 2)][3]
        [1, 2]
    """
    size = size or bucket(sum(count for _, _, count in pieces), LEAST_TOKENS)
    ids, row_of_token, at = (np.full(size, n, np.int32) for n in (0, 0, -1))
    ends, done = np.zeros(rows, np.int32), 0
    for row, (tokens, start, count) in enumerate(pieces):
        part = slice(done, done + count)
        ids[part] = tokens[start : start + count]
        row_of_token[part], at[part] = row, np.arange(start, start + count)
        done += count
        ends[row] = done - 1
    return [ids, row_of_token, at, ends]


def token_counts(chunk: int) -> list[int]:
    """The numbers of tokens that programs of reading are for."""
    return [n for n in (LEAST_TOKENS << i for i in range(20)) if n <= chunk]


def _settings(texts: Sequence[RunningText | None], vocab_size: int) -> RowSettings:
    """The settings of these texts."""
    ends = [text.settings.ends for text in texts if text is not None]
    none = np.full(bucket(max(map(len, ends), default=0), _LEAST_ENDS), -1, np.int32)
    blank = RowSettings.of(GREEDY, np.zeros(2, np.uint32), 0, none, vocab_size)

    def of(text: RunningText) -> RowSettings:
        own = text.settings.ends
        return text.settings._replace(ends=np.concatenate([own, none[len(own) :]]))

    each = [blank if text is None else of(text) for text in texts]
    return RowSettings(*map(np.stack, zip(*each, strict=True)))


LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Takes logits ``[B, V]`` in float32, the last token of each text and the position of the next one, int32 ``[B]`` each;
returns other logits."""


class Choosing(NamedTuple):
    """What is the same for all texts of an engine, static under jit.

    Attributes:
        tops: number of most probable tokens that are reported; None where no text reports log-probabilities.
        draws: False where all texts are greedy.
        processor: what logits go through before a token is chosen; None for nothing.
        step: the relative step of the floats that logits are computed in.
        delays_ends: False where no text has ``min_new_tokens``.
    """

    tops: int | None
    draws: bool = True
    processor: LogitsProcessor | None = None
    step: float = 0.0
    delays_ends: bool = True


@partial(jax.jit, static_argnames=("how", "shardings"), donate_argnums=1)
def read(
    model: Any, memory: EngineMemory, texts: TextRows, ids: jax.Array, counts: jax.Array,
    inputs: Inputs | None = None, *, how: Choosing, shardings: Shardings = None, patches: Any = (),
) -> Any:  # fmt: skip
    """Reads ``counts`` ``[B]`` of the tokens ``ids`` ``[B, T]`` of each text, and samples the token after them.

    Args:
        inputs: what stands in place of tokens; None: nothing.

    Returns:
        The memory and the samples; and what captures of the model have recorded (``nn/layer/observe``).
    """
    more = {} if inputs is None else inputs._asdict()
    run = lambda: model(ids, texts.cache(memory), lengths=counts, last=True, **more)
    (logits, cache), taps = tapped(model, patches, run)
    last = jnp.take_along_axis(ids, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    texts = texts._replace(lengths=cache.lengths)
    return _read(memory.words, cache.pool, texts, logits, last, how, shardings), taps


@partial(jax.jit, static_argnames=("how", "shardings"), donate_argnums=1)
def read_scored(
    model: Any, memory: EngineMemory, texts: TextRows, ids: jax.Array, counts: jax.Array, targets: jax.Array,
    inputs: Inputs | None = None, *, how: Choosing, shardings: Shardings = None, patches: Any = (),
) -> Any:  # fmt: skip
    """Reads tokens as :func:`read` does, and scores the tokens after each of them.

    Args:
        targets: the token after each, int32 ``[B, T]``.
        inputs: what stands in place of tokens; None: nothing.

    Returns:
        The memory, and the samples with the TokenLosses of the targets; and what captures of the model have recorded.
    """
    cache, more = texts.cache(memory), {} if inputs is None else inputs._asdict()
    (logits, cache), taps = tapped(
        model, patches, lambda: model(ids, cache, lengths=counts, **more)
    )
    logits = replicated(logits, shardings)
    found = losses_of_logits(logits, targets, how.tops or 0, None)
    at = jnp.maximum(counts - 1, 0)[:, None]
    logits, last = (
        jnp.take_along_axis(logits, at[..., None], 1)[:, 0],
        jnp.take_along_axis(ids, at, 1)[:, 0],
    )
    texts = texts._replace(lengths=cache.lengths)
    memory, sampled = _read(memory.words, cache.pool, texts, logits, last, how, shardings)
    return (memory, (sampled, found)), taps


@partial(jax.jit, static_argnames=("how", "shardings"), donate_argnums=1)
def read_tokens(
    model: Any, memory: EngineMemory, texts: TextRows, ids: jax.Array, text: jax.Array, positions: jax.Array,
    ends: jax.Array, *, how: Choosing, shardings: Shardings = None, patches: Any = (),
) -> Any:  # fmt: skip
    """Reads N tokens of several texts, and samples the token after the last one of each text.

    Each token is a row of a decode step: none is padding, whatever the lengths of the texts.

    Args:
        texts: the texts; ``lengths`` are those after these tokens.
        ids: the tokens, int32 ``[N]``.
        text: the number of each token's text in ``texts``, int32 ``[N]``.
        positions: the position of each token in its text, int32 ``[N]``; -1 for padding.
        ends: the number of the last token of each text, int32 ``[B]``.

    Returns:
        As :func:`read`.
    """
    real = positions >= 0
    of_tokens = lambda array: jnp.take(array, text, axis=0, mode="clip")
    table, rows = of_tokens(texts.table), of_tokens(texts.slots)
    each = (texts.text_lengths, texts.found, texts.offsets, texts.window_table)
    lengths, found, offsets, windows = jax.tree.map(of_tokens, each)
    at = jnp.maximum(positions, 0)
    cache = PagedCache(memory.pool, table, at, rows, lengths, True, found, offsets, windows)
    run = lambda: model(ids[:, None], cache, lengths=real.astype(jnp.int32), last=ends)
    (logits, cache), taps = tapped(model, patches, run)
    last = jnp.take(ids, ends, axis=0)
    return _read(memory.words, cache.pool, texts, logits, last, how, shardings), taps


def _read(
    words: Words | None, pool: PagePool, texts: TextRows, logits: jax.Array, last: jax.Array,
    how: Choosing, shardings: Shardings,
) -> tuple[EngineMemory, Sampled]:  # fmt: skip
    """The memory after texts were read, and the sampled tokens after them."""
    found = sampled(logits, texts, last, texts.lengths, texts.written, words, how, shardings)
    words = added(words, texts, found.tokens, texts.lengths, texts.finishes)
    return placed(EngineMemory(pool, words), shardings), found


class _Decoding(NamedTuple):
    """The state of the loop of ``decode``: the number of the step, and what it has written."""

    step: jax.Array
    memory: EngineMemory
    last: jax.Array
    lengths: jax.Array
    active: jax.Array
    bad: jax.Array
    counts: jax.Array
    samples: Any
    recorded: Any


@partial(jax.jit, static_argnames=("how", "shardings"), donate_argnums=1)
def decode(
    model: Any, memory: EngineMemory, texts: TextRows, last: jax.Array, active: jax.Array, steps: jax.Array,
    min_active: jax.Array, *, how: Choosing, shardings: Shardings = None, patches: Any = (),
) -> Any:  # fmt: skip
    """Generates token by token: at most ``steps``, and only while more than ``min_active`` texts go on.

    Args:
        last: the last token of each text, which the model has not read, int32 ``[B]``.
        active: which texts go on, bools ``[B]``.
        steps, min_active: int32 scalars.

    Returns:
        The memory and the DispatchTokens; and what captures of the model have recorded, whose first axis is the
        step, of length ``MAX_STEPS``.
    """

    def call(state: _Decoding) -> Any:
        cache = replace(own, pool=state.memory.pool, lengths=state.lengths)
        counts = state.active.astype(jnp.int32)
        return tapped(
            model, patches, lambda: model(state.last[:, None], cache, lengths=counts, last=True)
        )

    def choose(logits: jax.Array, state: _Decoding) -> Sampled:
        written = texts.written + state.counts
        return sampled(
            logits, texts, state.last, state.lengths, written, state.memory.words, how, shardings
        )

    def more(state: _Decoding) -> jax.Array:
        return (state.step < steps) & (jnp.sum(state.active.astype(jnp.int32)) > min_active)

    def step(state: _Decoding) -> _Decoding:
        i, active = state.step, state.active
        (logits, cache), taps = call(state)
        state = state._replace(lengths=jnp.where(active, state.lengths + 1, state.lengths))
        found = choose(logits, state)
        tokens = jnp.where(active, found.tokens, state.last)
        put = lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new[:, None], i, 1)
        keep = lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, i, 0)
        ended = jnp.any(tokens[:, None] == texts.settings.ends, axis=1)
        words = added(state.memory.words, texts, tokens, state.lengths, active)
        return _Decoding(
            i + 1,
            placed(EngineMemory(cache.pool, words), shardings),
            tokens,
            state.lengths,
            active & ~ended & found.valid & (state.lengths + 1 < texts.limits),
            state.bad | (active & ~found.valid),
            state.counts + active.astype(jnp.int32),
            jax.tree.map(put, state.samples, found._replace(tokens=tokens)),
            jax.tree.map(keep, state.recorded, taps),
        )

    none = jnp.zeros(active.shape, jnp.int32)
    of_all = texts.cache(memory)
    own = (
        of_all.of_sequences()
    )  # recurrent states are taken from their rows, and put back, once for all steps
    memory = placed(EngineMemory(own.pool, memory.words), shardings)
    start = _Decoding(jnp.int32(0), memory, last, texts.lengths, active, none > 0, none, None, {})

    def one_step() -> Any:
        (logits, _), taps = call(start)
        return choose(logits, start), taps

    shapes, taps = jax.eval_shape(one_step)
    wide = lambda a: jnp.zeros((a.shape[0], MAX_STEPS, *a.shape[1:]), a.dtype)
    start = start._replace(samples=jax.tree.map(lambda a: replicated(wide(a), shardings), shapes))
    if is_observed(model):
        start = start._replace(recorded=jax.tree.map(partial(zeros, MAX_STEPS), taps))
    end = jax.lax.while_loop(more, step, start)
    # XLA gives the results of a loop other shardings than its body says.
    pool = of_all.put_back(end.memory.pool)
    memory = placed(EngineMemory(pool, end.memory.words), shardings)
    written = DispatchTokens(end.samples.tokens, end.counts, ~end.active, end.bad, end.samples)
    return (memory, jax.tree.map(lambda a: replicated(a, shardings), written)), end.recorded


@partial(jax.jit, static_argnames="shardings", donate_argnums=0)
def moved(new: PagePool, old: PagePool, *, shardings: Shardings) -> PagePool:
    """A larger pool with the pages of another one, which keep their numbers in each group of devices."""
    copy = lambda new, old: jax.lax.dynamic_update_slice(new, old, (0,) * new.ndim)
    run = lambda *pools: jax.tree.map(copy, *pools)
    if shardings is None:
        return run(new, old)
    specs = jax.tree.unflatten(jax.tree.structure(new), [one.spec for one in shardings])
    found = on_mesh(run, shardings[0].mesh, (specs, specs), specs)(new, old)
    return resharded(found, shardings)


@partial(jax.jit, donate_argnums=0)
def start_words(words: Words, slot: jax.Array, new: Words) -> Words:
    """The words with those of a slot's new text, arrays ``[V]``."""
    return jax.tree.map(lambda all_, one: all_.at[slot].set(one, mode="drop"), words, new)


@partial(jax.jit, static_argnames="sizes")
def resized_words(words: Words, *, sizes: tuple[int, int, int]) -> Words:
    """The words with these sizes."""
    return words.resized(*sizes)


def sampled(
    logits: jax.Array, texts: TextRows, last: jax.Array, lengths: jax.Array, written: jax.Array,
    words: Words | None, how: Choosing, shardings: Shardings,
) -> Sampled:  # fmt: skip
    """Samples the token after ``last``, which is at position ``lengths - 1`` of each text."""
    if explicit.mesh_of(logits) is not None:
        logits = replicated(logits, shardings)
    if how.processor is not None:
        logits = how.processor(logits, last, lengths)
    found = sample_rows(
        logits,
        texts.settings,
        lengths,
        written,
        words,
        texts.slots,
        how.tops,
        texts.allowed,
        how.draws,
        how.step,
        how.delays_ends,
    )
    return jax.tree.map(lambda a: replicated(a, shardings), found)


def added(
    words: Words | None, texts: TextRows, tokens: jax.Array, positions: jax.Array, is_new: jax.Array
) -> Words | None:
    """The words with the new tokens, at these positions, of those texts that use them."""
    if words is None:
        return None
    used = is_new & texts.settings.has_words
    add = lambda words: words.added(texts.slots, tokens, positions, used)
    return jax.lax.cond(jnp.any(used), add, lambda words: words, words)


def placed(memory: EngineMemory, shardings: Shardings) -> EngineMemory:
    """The memory with the shardings of its pool, so that the next call needs no other executable."""
    words = jax.tree.map(lambda a: replicated(a, shardings), memory.words)
    return EngineMemory(resharded(memory.pool, shardings), words)
