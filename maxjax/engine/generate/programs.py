"""The two jitted programs of generation, prefill and decode, and their state on the devices.

``prefill`` runs a chunk of the prompts, padded to a bucket. ``decode`` generates up to
``MAX_STEPS`` tokens of every row in one dispatch; the number of steps is a run-time argument, so
that one program serves streaming and whole batches. Both donate the state they take.

Shapes: B rows, T tokens, n top tokens that are reported.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from ...graph.placement.arrays import with_sharding
from ...nn.kv_cache.cache import KVCache
from ...nn.layer.observe.loops import zeros
from ...nn.layer.observe.programs import is_observed, tapped
from ..sampling.draw import Sampled, sample
from ..sampling.penalties import History
from ..sampling.settings import Amounts, Sampling

MAX_STEPS = 32
"""The largest number of tokens of a row that one dispatch of ``decode`` generates."""


class BatchState(NamedTuple):
    """The state of a batch on the devices. A pytree.

    Attributes:
        cache: the KV cache of all tokens but the last.
        last: the last token of each row, int32 ``[B]``; the next step feeds it to the model.
        done: whether each row has ended, bool ``[B]``.
        bad: whether the logits of each row were NaN or infinite, bool ``[B]``.
        prompts, limits: the number of prompt tokens, and the largest number of all tokens, of each
            row, int32 ``[B]``.
        rows: the number of each text among all texts of the call, int32 ``[B]``.
        first: the sample of each answer's first token.
        history: the token counts that the penalties need, or None.
    """

    cache: KVCache
    last: jax.Array
    done: jax.Array
    bad: jax.Array
    prompts: jax.Array
    limits: jax.Array
    rows: jax.Array
    first: Sampled
    history: History | None


class DispatchTokens(NamedTuple):
    """The tokens of one dispatch, on the devices (possibly not computed yet) or on the host.

    Attributes:
        tokens: token ids ``[B, MAX_STEPS]``; the first ``counts`` of each row are valid.
        counts: the number of new tokens of each row ``[B]``.
        done, bad: the same as in :class:`BatchState`, after the dispatch.
        sampled: the samples with their log-probabilities; axis 1 is the step.
    """

    tokens: Any
    counts: Any
    done: Any
    bad: Any
    sampled: Sampled


class SamplerArgs(NamedTuple):
    """The run-time arguments of sampling. A pytree.

    Attributes:
        eos: the token ids that end a text, padded with -1.
        key: the random key, or None for greedy sampling.
        amounts: the numeric settings, such as the temperature; another value compiles nothing.
    """

    eos: jax.Array
    key: jax.Array | None
    amounts: Amounts


Shardings = tuple[NamedSharding, ...] | None
S = TypeVar("S")


@partial(jax.jit, static_argnames=("settings", "shardings"), donate_argnums=1)
def prefill(
    model: Any,
    state: BatchState,
    ids: jax.Array,
    counts: jax.Array,
    sampler: SamplerArgs,
    *,
    settings: Sampling,
    shardings: Shardings,
    patches: Any = (),
) -> Any:
    """Runs the chunk ``ids`` ``[B, T]``, and samples the first token of rows whose prompt ends here.

    Returns:
        The state, and what captures of the model have recorded (``nn/layer/observe``).
    """
    (logits, cache), taps = tapped(
        model, patches, lambda: model(ids, state.cache, lengths=counts, last=True)
    )
    ends = (counts > 0) & (replicated(cache.lengths, shardings) == state.prompts)
    state = state._replace(cache=cache)
    state, sampled = _choose(state, logits, ends, sampler, settings, shardings)

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(ends if new.ndim == 1 else ends[:, None], new, old)

    state = resharded(state._replace(first=jax.tree.map(pick, sampled, state.first)), shardings)
    return state, taps


@partial(jax.jit, static_argnames=("settings", "shardings"), donate_argnums=1)
def decode(
    model: Any,
    state: BatchState,
    steps: jax.Array,
    sampler: SamplerArgs,
    *,
    settings: Sampling,
    shardings: Shardings,
    patches: Any = (),
) -> Any:
    """Generates token by token until every row is done, but at most ``steps`` tokens.

    Returns:
        The state and the DispatchTokens; and what captures of the model have recorded, whose first axis is the
        step, of length ``MAX_STEPS``.
    """
    batch = state.last.shape[0]
    samples = jax.tree.map(
        lambda a: replicated(jnp.zeros((batch, MAX_STEPS, *a.shape[1:]), a.dtype), shardings),
        state.first,
    )
    counts = replicated(jnp.zeros(batch, jnp.int32), shardings)

    def more(carry: Any) -> jax.Array:
        i, state, _, _, _ = carry
        return (i < steps) & ~jnp.all(state.done)

    def call(state: BatchState, active: jax.Array) -> Any:
        run = lambda: model(
            state.last[:, None], state.cache, lengths=active.astype(jnp.int32), last=True
        )
        return tapped(model, patches, run)

    def step(carry: Any) -> Any:
        i, state, samples, counts, recorded = carry
        active = ~state.done
        (logits, cache), taps = call(state, active)
        state = state._replace(cache=cache)
        state, sampled = _choose(state, logits, active, sampler, settings, shardings)
        state = resharded(state, shardings)
        put = lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new[:, None], i, 1)
        keep = lambda all_, new: jax.lax.dynamic_update_index_in_dim(all_, new, i, 0)
        following = i + 1, state, jax.tree.map(put, samples, sampled)
        counts = counts + active.astype(jnp.int32)
        return *following, counts, jax.tree.map(keep, recorded, taps)

    recorded: Any = {}
    if is_observed(model):
        _, shapes = jax.eval_shape(call, state, state.done)
        recorded = jax.tree.map(partial(zeros, MAX_STEPS), shapes)
    start = (replicated(jnp.int32(0), shardings), state, samples, counts, recorded)
    _, state, samples, counts, recorded = jax.lax.while_loop(more, step, start)
    # XLA gives the results of a loop other shardings than its body says.
    state = resharded(state, shardings)
    written = DispatchTokens(samples.tokens, counts, state.done, state.bad, samples)
    result = state, jax.tree.map(lambda a: replicated(a, shardings), written)
    return result, recorded


def _choose(
    state: BatchState,
    logits: jax.Array,
    which: jax.Array,
    sampler: SamplerArgs,
    settings: Sampling,
    shardings: Shardings,
) -> tuple[BatchState, Sampled]:
    """Samples the next token of the rows in ``which``, and updates their state."""
    lengths = replicated(state.cache.lengths, shardings)
    rows = state.rows if sampler.key is not None else None
    found = sample(
        logits, sampler.key, settings,
        amounts=sampler.amounts, history=state.history, rows=rows, positions=lengths,
        withheld=_withheld(logits, lengths - state.prompts, sampler) if settings.min_new_tokens else None,
    )  # fmt: skip
    found = jax.tree.map(lambda a: replicated(a, shardings), found)
    tokens = jnp.where(which, found.tokens, state.last)
    ended = jnp.any(tokens[:, None] == sampler.eos[None, :], axis=1) | (lengths + 1 >= state.limits)
    history = state.history
    if history is not None:
        history = history.add(tokens, which)
    state = state._replace(
        last=tokens,
        done=state.done | (which & (ended | ~found.valid)),
        bad=state.bad | (which & ~found.valid),
        history=history,
    )
    return state, found._replace(tokens=tokens)


def _withheld(logits: jax.Array, written: jax.Array, sampler: SamplerArgs) -> jax.Array:
    """The end-of-text tokens that a row with ``written`` new tokens may not get yet, bool ``[B, V]``."""
    tokens = jax.lax.broadcasted_iota(jnp.int32, (logits.shape[1], sampler.eos.shape[0]), 0)
    ends = jnp.any(tokens == sampler.eos[None, :], axis=1)
    early = written.astype(jnp.float32) < sampler.amounts.min_new_tokens
    return early[:, None] & ends[None, :]


def shardings_on_mesh(state: Any) -> Shardings:
    """The shardings of a pytree's arrays, as :func:`resharded` takes them; None if they are on one device."""
    where = [leaf.sharding for leaf in jax.tree.leaves(state)]
    return tuple(where) if isinstance(where[0], NamedSharding) else None


def replicated(array: jax.Array, shardings: Shardings) -> jax.Array:
    """The array, replicated if there is a mesh."""
    if shardings is None:
        return array
    return with_sharding(array, NamedSharding(shardings[0].mesh, PartitionSpec()))


def resharded(state: S, shardings: Shardings) -> S:
    """A pytree with its given shardings, so that the next call needs no other executable."""
    if shardings is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    placed = [
        with_sharding(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)
