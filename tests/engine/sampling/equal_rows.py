"""Runs the sampling of the engine on rows that have the same settings: what tests compare with other libraries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from maxjax.engine.batching.running import bias_of, key_words
from maxjax.engine.sampling.draw import _filtered, scaled
from maxjax.engine.sampling.rows import (
    MOST_LOGPROBS,
    RowSettings,
    Words,
    adjusted_rows,
    sample_rows,
    uses_order,
    uses_words,
)
from maxjax.engine.sampling.sequences import sequences_of
from maxjax.engine.sampling.settings import GREEDY
from maxjax.kernels import explicit

_NO_ENDS = np.full(1, -1, np.int32)


def row_settings(settings, batch, width, key=None, rows=None):
    """The settings of ``batch`` rows: one key, and the number of each row's text, by default 0, 1, 2, …"""
    one = RowSettings.of(settings, key_words(key), 0, _NO_ENDS, width)
    found = jax.tree.map(lambda a: np.broadcast_to(a, (batch, *np.shape(a))), one)
    return found._replace(numbers=np.asarray(range(batch) if rows is None else rows, np.int32))


def words_of(settings, texts, width):
    """The words of rows with these texts, pairs of prompt and answer; None if the settings need none."""
    if not uses_words(settings):
        return None
    sequences = sequences_of(settings, width) if settings.needs_order else None
    longest = 32 if uses_order(settings) else None
    bias = bias_of(settings, width)
    each = [Words.of(*map(list, text), bias, sequences, longest, width) for text in texts]
    return jax.tree.map(lambda *a: jnp.asarray(np.stack(a)), *each)


def draw_rows(logits, each, settings, *, positions=0, words=None):
    """``sample_rows`` for rows that may have keys of their own."""
    batch = len(logits)
    at = np.broadcast_to(np.asarray(positions, np.int32), (batch,))
    numbers = np.arange(batch, dtype=np.int32)
    tops = None if settings.logprobs is None else MOST_LOGPROBS
    found = _sampled(logits, each, at, words, numbers, tops=tops, draws=not settings.is_greedy)
    if not settings.logprobs:
        return found
    few = found.top_tokens[:, : settings.logprobs], found.top_logprobs[:, : settings.logprobs]
    return found._replace(top_tokens=few[0], top_logprobs=few[1])


def draw(logits, key=None, settings=GREEDY, *, rows=None, positions=0, texts=None):
    """The next token of each row."""
    batch, width = logits.shape
    words = words_of(settings, texts or [((), ())] * batch, width)
    each = row_settings(settings, batch, width, key, rows)
    return draw_rows(logits, each, settings, positions=positions, words=words)


def processed(logits, settings, texts=None, *, words=None):
    """The logits that a token is drawn from, float32 ``[B, V]``, -inf for excluded tokens; XTC where it is certain."""
    batch, width = logits.shape
    words = words_of(settings, texts or [((), ())] * batch, width) if words is None else words
    return _processed(logits, row_settings(settings, batch, width), words)


@functools.partial(jax.jit, static_argnames=("tops", "draws"))
def _sampled(logits, each, positions, words, numbers, **how):
    written = jnp.zeros_like(positions)
    return sample_rows(_whole(logits), each, positions, written, words, numbers, **how)


@jax.jit
def _processed(logits, each, words):
    zeros = jnp.zeros(len(logits), jnp.int32)
    numbers = jnp.arange(len(logits), dtype=jnp.int32)
    values = _whole(logits).astype(jnp.float32)
    values = adjusted_rows(values, each, zeros, zeros, words, numbers)
    is_drawn = (each.temperature > 0)[:, None]
    temperature = jnp.where(is_drawn, each.temperature[:, None], 1.0)
    values = scaled(values, jnp.max(values, axis=1, keepdims=True), temperature)
    usual = tuple(a[:, None] for a in (each.top_k, each.top_p, each.least))
    return jnp.where(is_drawn, _filtered(values, usual, each.rare_filters, 1.0), values)


def _whole(logits):
    """The logits on every device, as the engine samples from them on a mesh with explicit axes."""
    mesh = explicit.mesh_of(logits)
    if mesh is None:
        return logits
    return jax.sharding.reshard(logits, jax.NamedSharding(mesh, jax.P()))
