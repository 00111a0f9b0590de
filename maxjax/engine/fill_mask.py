"""``fill_mask``: the most probable tokens for each mask in a text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..elsewhere import unknown_argument
from ..errors import UserInputError, checked_integer, releasing
from ..graph.placement.arrays import with_sharding
from ..kernels import explicit
from ..lockstep import Lockstep
from ..models.pooling import Pooling
from ..models.weights import shardings_of
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .bucket import bucket
from .heads import check_head, listed_texts
from .rows import RowBatch, check_lengths, encoder_output, run_rows, text_limit
from .sampling.draw import largest


class FilledMask(NamedTuple):
    """One token for a mask.

    Attributes:
        token: the token's text.
        score: its probability.
        token_id: its id.
        sequence: the whole text with this token, as the tokenizer decodes it; other masks stay.
    """

    token: str
    score: float
    token_id: int
    sequence: str


def fill_mask(
    model: Any,
    tokenizer: Tokenizer | None,
    texts: str | Iterable[str],
    *,
    top: int = 5,
    batch_size: int = 32,
    **unknown: Any,
) -> Any:
    """Finds the most probable tokens for each mask in a text, as transformers' pipeline "fill-mask".

    As in ``embed``, short texts are packed into rows, and all processes that share the model's mesh must make
    the call.

    Args:
        model: an encoder with a head for masked words (``…ForMaskedLM``), as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer.
        texts: a text or a list of texts, each with at least one mask token, such as "[MASK]" or "<mask>".
        top: the number of tokens for each mask.
        batch_size: the maximum number of rows in one batch.

    Returns:
        For each mask of the text in their order, a list of ``top`` :class:`FilledMask`, the most probable first;
        for a list of texts, a list of these.

    Raises:
        TypeError: a text is not a str; or an argument is unknown, and the message suggests the right name if it can.
        UserInputError: the model has no such head or no weights; there is no tokenizer, or it has no mask token; a
            text has no mask or is too long; there are less than ``top`` tokens.
        ProgramMismatchError: the model or a text is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.
    """
    for name in unknown:
        raise unknown_argument(fill_mask, name)
    top, batch_size = checked_integer("top", top), checked_integer("batch_size", batch_size)
    with Lockstep("fill_mask", shardings_of(model)) as together, releasing():
        check_head(model, tokenizer, "fill-mask")
        assert tokenizer is not None
        listed, is_single = listed_texts(texts)
        if top > model.config.vocab_size:
            raise UserInputError(f"top={top} must be at most {model.config.vocab_size}")
        if (mask := tokenizer.special_id("mask_token")) is None:
            raise UserInputError("the tokenizer has no mask token")
        limit = text_limit(model, tokenizer, Pooling())
        rows = tokenizer.tokens(listed)
        check_lengths(rows, limit, "shorten it")
        masks = [[at for at, i in enumerate(row.ids) if i == mask] for row in rows]
        for i, places in enumerate(masks):
            if not places:
                token = tokenizer.special_tokens["mask_token"]
                raise UserInputError(f"texts[{i}] has no mask token ({token})")
        found: list[Any] = [None] * len(rows)
        shown_as = ("filling masks in {:,} texts", " texts")
        for batch, (scores, ids) in run_rows(
            model, tokenizer, rows, together, shown_as, _best_tokens, batch_size=batch_size, limit=limit,
            facts={"top": top}, inputs=partial(_with_places, masks), top=top,
        ):  # fmt: skip
            for member, row, numbers in _numbers(batch, masks):
                found[member] = [
                    _filled(tokenizer, rows[member], masks[member], k, scores[row, n], ids[row, n])
                    for k, n in enumerate(numbers)
                ]
        together.finish()
    return found[0] if is_single else found


def _numbers(batch: RowBatch, masks: list[list[int]]) -> list[tuple[int, int, range]]:
    """(Member, row of the batch, numbers of its masks in the row) of each member of a batch."""
    count: dict[int, int] = {}
    found = []
    for member, (row, _) in zip(batch.members, batch.starts, strict=True):
        first = count.get(row, 0)
        count[row] = first + len(masks[member])
        found.append((member, row, range(first, count[row])))
    return found


def _with_places(masks: list[list[int]], batch: RowBatch) -> tuple[Any, np.ndarray]:
    """The tokens of a batch, and the places of the masks in each row, int32 ``[B, M]``; M is a power of two."""
    listed = _numbers(batch, masks)
    most = max(numbers.stop for _, _, numbers in listed)
    places = np.zeros((len(batch.tokens[0]), bucket(most)), np.int32)
    for (member, row, numbers), (_, start) in zip(listed, batch.starts, strict=True):
        places[row, numbers.start : numbers.stop] = [start + at for at in masks[member]]
    return batch.tokens, places


@partial(jax.jit, static_argnames=("top", "gathered"))
def _best_tokens(
    model: Any,
    tokens: Any,
    *,
    top: int,
    gathered: NamedSharding | None = None,
    patches: Any = (),
) -> Any:
    """The probabilities and ids of the best tokens for each mask, ``[B, M, top]``, and what was recorded."""
    batch, places = tokens
    output, taps = encoder_output(model, batch, patches)
    # The logits of all tokens would be as large as the vocabulary for each of them.
    states = jnp.take_along_axis(output.last_hidden_state, places[:, :, None], axis=1)  # [B, M, E]
    logits = model.head_outputs(states, None)["logits"].astype(jnp.float32)  # [B, M, V]

    def best(logits: jax.Array) -> list[jax.Array]:
        values, ids = largest(logits.reshape(-1, logits.shape[-1]), top)  # [B · M, top]
        shape = (*logits.shape[:2], top)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return [jnp.exp(values.reshape(shape) - total), ids.reshape(shape)]

    wanted = [[*explicit.entries(logits)[:1], (), ()]] * 2
    found = explicit.automatic(best, explicit.mesh_of(logits), wanted)(logits)
    if gathered is not None:
        found = [with_sharding(one, gathered) for one in found]
    return tuple(found), taps


def _filled(
    tokenizer: Tokenizer,
    row: Encoding,
    masks: list[int],
    number: int,
    scores: np.ndarray,
    ids: np.ndarray,
) -> list[FilledMask]:
    """The best tokens for the mask of this number."""
    found = []
    for score, token_id in zip(scores.tolist(), ids.tolist(), strict=True):
        whole = list(row.ids)
        whole[masks[number]] = token_id
        # Special tokens are left out, but then other masks would be too.
        sequence = tokenizer.decode(
            [i for i in whole if i != tokenizer.pad_id], skip_special=len(masks) == 1
        )
        found.append(
            FilledMask(tokenizer.decode([token_id], skip_special=False), score, token_id, sequence)
        )
    return found
