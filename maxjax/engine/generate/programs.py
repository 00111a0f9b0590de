"""The two programs that write texts, and what they keep on the devices.

``prefill`` reads a piece of the prompts, padded to a bucket; ``decode`` writes up to ``MOST``
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

MOST = 32
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


class Written(NamedTuple):
    """What one dispatch wrote. Arrays of the host, or of devices that still compute.

    Attributes:
        tokens: ``[B, MOST]``; of each row the first ``counts``.
        counts: ``[B]``.
        done, bad: As in State.
        sampled: Log-probabilities, with an axis of tokens after that of texts.
    """

    tokens: Any
    counts: Any
    done: Any
    bad: Any
    sampled: Sampled


class Choice(NamedTuple):
    """By what the next token is chosen, and a text ends: arguments of the programs. A pytree.

    Attributes:
        eos: Tokens that end a text; -1 is none.
        key: Of the random numbers, or None.
        amounts: The numbers of the settings, of which the program has the kind alone.
    """

    eos: jax.Array
    key: jax.Array | None
    amounts: Amounts


Places = tuple[NamedSharding, ...] | None


@partial(jax.jit, static_argnames=("settings", "places"), donate_argnums=1)
def prefill(
    model: Any,
    state: State,
    ids: jax.Array,
    counts: jax.Array,
    choice: Choice,
    *,
    settings: Sampling,
    places: Places,
) -> State:
    """Reads ``ids`` ``[B, T]``; of texts whose prompt ends here the first token is chosen."""
    logits, cache = model(ids, state.cache, lengths=counts, last=True)
    ends = (counts > 0) & (_whole(cache.lengths, places) == state.prompts)
    state = state._replace(cache=cache)
    state, sampled = _chosen(state, logits, ends, choice, settings, places)

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(ends if new.ndim == 1 else ends[:, None], new, old)

    return _settled(state._replace(first=jax.tree.map(pick, sampled, state.first)), places)


@partial(jax.jit, static_argnames=("settings", "places"), donate_argnums=1)
def decode(
    model: Any,
    state: State,
    steps: jax.Array,
    choice: Choice,
    *,
    settings: Sampling,
    places: Places,
) -> tuple[State, Written]:
    """Writes one token after the other, until all texts are done or ``steps`` are."""
    batch = state.last.shape[0]
    room = jax.tree.map(
        lambda a: _whole(jnp.zeros((batch, MOST, *a.shape[1:]), a.dtype), places), state.first
    )
    counts = _whole(jnp.zeros(batch, jnp.int32), places)

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
        state, sampled = _chosen(state, logits, going, choice, settings, places)
        state = _settled(state, places)
        put = lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new[:, None], i, 1)
        return i + 1, state, jax.tree.map(put, room, sampled), counts + going.astype(jnp.int32)

    start = (_whole(jnp.int32(0), places), state, room, counts)
    _, state, room, counts = jax.lax.while_loop(more, step, start)
    return state, Written(room.tokens, counts, state.done, state.bad, room)


def _chosen(
    state: State,
    logits: jax.Array,
    which: jax.Array,
    choice: Choice,
    settings: Sampling,
    places: Places,
) -> tuple[State, Sampled]:
    """The next token of some of the texts, and what it means for them."""
    lengths = _whole(state.cache.lengths, places)
    rows = state.rows if choice.key is not None else None
    found = sample(
        logits, choice.key, settings,
        amounts=choice.amounts, history=state.history, rows=rows, positions=lengths,
    )  # fmt: skip
    found = jax.tree.map(lambda a: _whole(a, places), found)
    tokens = jnp.where(which, found.tokens, state.last)
    ended = jnp.any(tokens[:, None] == choice.eos[None, :], axis=1) | (lengths + 1 >= state.limits)
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


def _whole(array: jax.Array, places: Places) -> jax.Array:
    """On a mesh: whole on every device."""
    if places is None:
        return array
    return _placed(array, NamedSharding(places[0].mesh, PartitionSpec()))


def _settled(state: State, places: Places) -> State:
    """On a mesh: where it was, so that the next call finds what this one was compiled for."""
    if places is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    placed = [_placed(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(structure, placed)


def _placed(array: jax.Array, place: NamedSharding) -> jax.Array:
    if AxisType.Explicit in place.mesh.axis_types:
        return jax.sharding.reshard(array, place)
    return jax.lax.with_sharding_constraint(array, place)
