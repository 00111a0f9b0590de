"""The two programs that write texts, and what they keep on the devices.

``prefill`` reads a piece of the prompts, padded to a bucket; ``decode`` writes up to ``MAX_STEPS``
tokens of every text in one dispatch, as many as it is told at run time, so that there is one
program whether tokens are streamed or not. Both take the state and give it back in place.

Shapes: B texts, T tokens, n top tokens that are reported.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ...nn.kv_cache.cache import KVCache
from ..sampling.draw import Sampled, sample
from ..sampling.penalties import History
from ..sampling.settings import Amounts, Sampling

MAX_STEPS = 32
"""The most tokens of a text that one dispatch writes."""


class State(NamedTuple):
    """What is known of each text, on the devices.

    Attributes:
        cache: Keys and values of all tokens but the last.
        last: The last token ``[B]``, of which the model has not been told.
        done: Which texts are ended ``[B]``.
        bad: Whose logits were no numbers ``[B]``.
        prompts, limits: How many tokens the prompt has, and the text may have ``[B]``.
        rows: The number of each text among all ``[B]``.
        first: What was sampled for the first token of the answer.
        history: For the penalties.
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


class Tokens(NamedTuple):
    """What one dispatch wrote. Arrays of the host, or of devices that still compute.

    Attributes:
        tokens: ``[B, MAX_STEPS]``; of each row the first ``counts``.
        counts: ``[B]``.
        done, bad: As in State.
        sampled: Log-probabilities, with an axis of tokens after that of texts.
    """

    tokens: Any
    counts: Any
    done: Any
    bad: Any
    sampled: Sampled


class SamplerArgs(NamedTuple):
    """By what the next token is chosen, and a text ends: arguments of the programs. A pytree.

    Attributes:
        eos: Tokens that end a text; -1 is none.
        key: Of the random numbers, or None.
        amounts: The numbers of the settings, of which the program has the kind alone.
    """

    eos: jax.Array
    key: jax.Array | None
    amounts: Amounts


Shardings = tuple[NamedSharding, ...] | None


@partial(jax.jit, static_argnames=("settings", "shardings"), donate_argnums=1)
def prefill(
    model: Any,
    state: State,
    ids: jax.Array,
    counts: jax.Array,
    sampler: SamplerArgs,
    *,
    settings: Sampling,
    shardings: Shardings,
) -> State:
    """Reads ``ids`` ``[B, T]``; of texts whose prompt ends here the first token is chosen."""
    logits, cache = model(ids, state.cache, lengths=counts, last=True)
    ends = (counts > 0) & (_replicated(cache.lengths, shardings) == state.prompts)
    state = state._replace(cache=cache)
    state, sampled = _choose(state, logits, ends, sampler, settings, shardings)

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(ends if new.ndim == 1 else ends[:, None], new, old)

    return _resharded(state._replace(first=jax.tree.map(pick, sampled, state.first)), shardings)


@partial(jax.jit, static_argnames=("settings", "shardings"), donate_argnums=1)
def decode(
    model: Any,
    state: State,
    steps: jax.Array,
    sampler: SamplerArgs,
    *,
    settings: Sampling,
    shardings: Shardings,
) -> tuple[State, Tokens]:
    """Writes one token after the other, until all texts are done or ``steps`` are."""
    batch = state.last.shape[0]
    room = jax.tree.map(
        lambda a: _replicated(jnp.zeros((batch, MAX_STEPS, *a.shape[1:]), a.dtype), shardings),
        state.first,
    )
    counts = _replicated(jnp.zeros(batch, jnp.int32), shardings)

    def more(carry: Any) -> jax.Array:
        i, state, _, _ = carry
        return (i < steps) & ~jnp.all(state.done)

    def step(carry: Any) -> Any:
        i, state, room, counts = carry
        going = ~state.done
        logits, cache = model(
            state.last[:, None], state.cache, lengths=going.astype(jnp.int32), last=True
        )
        state = state._replace(cache=cache)
        state, sampled = _choose(state, logits, going, sampler, settings, shardings)
        state = _resharded(state, shardings)
        put = lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new[:, None], i, 1)
        return i + 1, state, jax.tree.map(put, room, sampled), counts + going.astype(jnp.int32)

    start = (_replicated(jnp.int32(0), shardings), state, room, counts)
    _, state, room, counts = jax.lax.while_loop(more, step, start)
    return state, Tokens(room.tokens, counts, state.done, state.bad, room)


def _choose(
    state: State,
    logits: jax.Array,
    which: jax.Array,
    sampler: SamplerArgs,
    settings: Sampling,
    shardings: Shardings,
) -> tuple[State, Sampled]:
    """The next token of some of the texts, and what it means for them."""
    lengths = _replicated(state.cache.lengths, shardings)
    rows = state.rows if sampler.key is not None else None
    found = sample(
        logits, sampler.key, settings,
        amounts=sampler.amounts, history=state.history, rows=rows, positions=lengths,
    )  # fmt: skip
    found = jax.tree.map(lambda a: _replicated(a, shardings), found)
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


def _replicated(array: jax.Array, shardings: Shardings) -> jax.Array:
    """On a mesh: whole on every device."""
    if shardings is None:
        return array
    return _with_sharding(array, NamedSharding(shardings[0].mesh, PartitionSpec()))


def _resharded(state: State, shardings: Shardings) -> State:
    """On a mesh: where it was, so that the next call finds what this one was compiled for."""
    if shardings is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    placed = [
        _with_sharding(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def _with_sharding(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(array, sharding)
    return jax.lax.with_sharding_constraint(array, sharding)
