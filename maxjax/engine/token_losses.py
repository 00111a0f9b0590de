"""How probable a model finds each token of given texts: what ``perplexity`` and ``score`` compute.

Logits are computed for a few tokens at a time, so that all of them are never in memory at once.

Shapes: B texts, T tokens of a text, V tokens of the vocabulary, E values of a hidden state, n top tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import UserInputError
from ..graph.placement.arrays import put, with_sharding
from ..graph.placement.specs import batch_axes, mesh_of
from ..lockstep import Lockstep
from ..models import LanguageModel
from ..models.weights import check_loaded, shardings_of
from ..nn.layer.observe.programs import ProgramObserver, tapped
from ..nn.layer.walk import check_module
from ..progress import compiling, task
from .bucket import bucket
from .sampling.draw import largest

# The largest size in bytes of the logits that are computed at a time.
_LOGITS = 64 << 20


class TextTokens(NamedTuple):
    """A text: its token ids, int32 ``[T]``, and the token after each."""

    ids: np.ndarray
    targets: np.ndarray


class TokenLosses(NamedTuple):
    """What is known of the targets of a text, or of several with a further first axis.

    Attributes:
        losses: their negative log-likelihoods, float32 ``[T]``.
        is_best: whether no token is more probable, bool ``[T]``.
        top_tokens, top_logprobs: the n most probable tokens in place of each, int32 and float32 ``[T, n]``.
    """

    losses: Any
    is_best: Any
    top_tokens: Any
    top_logprobs: Any


def row_losses(
    model: Any, rows: Sequence[TextTokens], order: Sequence[int], *, batch_size: int, width_of: Callable[[int], int],
    together: Lockstep, name: str, title: str, unit: str, tops: int = 0,
) -> list[tuple[int, TokenLosses]]:  # fmt: skip
    """Computes what is known of the targets of each row.

    Args:
        model: a decoder.
        rows: the texts.
        order: the numbers of the rows in the order in which they are computed.
        batch_size: number of rows of a batch.
        width_of: the number of columns of a batch whose longest row has so many tokens.
        together: the call that this belongs to, if several processes make it together.
        name: name of the program where compilation is shown.
        title, unit: what is shown of the progress.
        tops: n.

    Returns:
        The number of each row, and what is known of its targets, as NumPy arrays; in the given order.
    """
    mesh = mesh_of(list(shardings_of(model)))
    split = mesh and NamedSharding(mesh, PartitionSpec(batch_axes(mesh, batch_size)))
    gathered = NamedSharding(mesh, PartitionSpec()) if mesh else None
    observer = ProgramObserver(model)
    found: list[tuple[int, TokenLosses]] = []
    pending: list[tuple[Sequence[int], Any]] = []

    def take(shown: Any = None) -> None:
        part, values = pending.pop(0)
        fetched = jax.tree.map(np.asarray, together.fetch(values))
        for i, number in enumerate(part):
            count = len(rows[number].ids)
            found.append((number, TokenLosses(*(a[i, :count] for a in fetched))))
        if shown is not None:
            shown.add(len(part))

    with task(title, len(order), unit=unit) as shown:
        for i in range(0, len(order), batch_size):
            part = order[i : i + batch_size]
            width = width_of(max(len(rows[number].ids) for number in part))
            batch = _batch([rows[number] for number in part], batch_size, width)
            if split:
                batch = jax.tree.map(partial(put, where=split), batch)
            if together.is_shared:
                together.decide()  # a barrier: every process has this batch
            # The devices compute this batch while the host takes the one before.
            with compiling(name):
                blanks = [-1] * (batch_size - len(part))
                values = observer.run(
                    together, losses_of, *batch, rows=[*part, *blanks],
                    counts=lambda _, n=batch.counts: n, width=width, tops=tops, gathered=gathered,
                    chunk=chunk_of(batch_size, width, model.config.vocab_size),
                )  # fmt: skip
                pending.append((part, values))
            if together.is_shared or len(pending) > 1:
                take(shown)
    while pending:
        take()
    return found


class _Batch(NamedTuple):
    """Rows as arrays.

    Attributes:
        ids: token ids int32 ``[B, T]``, padded at the right.
        targets: the token after each, int32 ``[B, T]``.
        counts: the number of tokens of each row, int32 ``[B]``.
    """

    ids: Any
    targets: Any
    counts: Any


def _batch(part: Sequence[TextTokens], count: int, width: int) -> _Batch:
    """Arrays of ``count`` rows; rows beyond the texts hold one token of padding."""
    ids, targets = np.zeros((count, width), np.int32), np.zeros((count, width), np.int32)
    counts = np.ones(count, np.int32)
    for i, row in enumerate(part):
        counts[i] = n = len(row.ids)
        ids[i, :n], targets[i, :n] = row
    return _Batch(ids, targets, counts)


@partial(jax.jit, static_argnames=("chunk", "tops", "gathered"))
def losses_of(
    model: Any,
    ids: jax.Array,
    targets: jax.Array,
    counts: jax.Array,
    *,
    chunk: int,
    gathered: NamedSharding | None,
    tops: int = 0,
    patches: Any = (),
) -> Any:
    """The TokenLosses of the targets ``[B, T]``, and what captures of the model have recorded.

    Logits are computed for ``chunk`` tokens of every text at a time.
    """
    run = lambda: model.states(ids, lengths=counts)
    states, taps = tapped(model, patches, run)  # [B, T, E]
    length = ids.shape[1]
    rest = -length % chunk
    states = jnp.pad(states, ((0, 0), (0, rest), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, rest)))

    def chunks(array: jax.Array) -> jax.Array:  # [B, n · chunk, …] → [n, B, chunk, …]
        shape = (array.shape[0], -1, chunk, *array.shape[2:])
        return jnp.moveaxis(array.reshape(shape), 1, 0)

    def losses(part: tuple[jax.Array, jax.Array]) -> TokenLosses:
        states, targets = part
        return losses_of_logits(model.logits(states), targets, tops, gathered)

    def joined(array: jax.Array) -> jax.Array:  # [n, B, chunk, …] → [B, T, …]
        array = jnp.moveaxis(array, 0, 1)
        array = array.reshape(ids.shape[0], length + rest, *array.shape[3:])[:, :length]
        return array if gathered is None else with_sharding(array, gathered)

    found = jax.lax.map(losses, (chunks(states), chunks(targets)))
    return jax.tree.map(joined, found), taps


def losses_of_logits(
    logits: jax.Array, targets: jax.Array, tops: int, gathered: NamedSharding | None
) -> TokenLosses:
    """The TokenLosses of targets ``[B, T]``, given logits ``[B, T, V]`` in float32."""
    # A sum, and not a gather, so that logits split over the vocabulary stay where they are.
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    chosen = jnp.sum(jnp.where(tokens == targets[..., None], logits, 0.0), axis=-1)
    total = jax.nn.logsumexp(logits, axis=-1)
    top_tokens, top = _largest(logits, tops, gathered)
    return TokenLosses(
        total - chosen, chosen >= jnp.max(logits, axis=-1), top_tokens, top - total[..., None]
    )


def _largest(
    logits: jax.Array, count: int, gathered: NamedSharding | None
) -> tuple[jax.Array, jax.Array]:
    """The most probable tokens and their logits, ``[B, chunk, count]``."""
    if gathered is not None and count:
        logits = with_sharding(logits, gathered)
    shape = (*logits.shape[:2], count)
    if count == 0:
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    found, tokens = largest(logits.reshape(-1, logits.shape[-1]), count)
    return tokens.reshape(shape), found.reshape(shape)


def chunk_of(batch: int, length: int, vocab_size: int) -> int:
    """The number of tokens of each text whose logits are computed at a time: a power of two.

    Example:
        >>> chunk_of(8, 512, 32_000)
        64
    """
    fits = max(1, _LOGITS // (4 * batch * vocab_size))
    return min(1 << (fits.bit_length() - 1), bucket(length))


def check_scores(model: Any, what: str) -> None:
    """Raises UserInputError unless the model is a decoder whose weights are loaded."""
    check_module(model, what)
    if not isinstance(model, LanguageModel):
        raise UserInputError(
            f"{type(model).__name__} is not a language model: its {what} is not defined. Load a decoder"
        )
    check_loaded(model)
