"""Embed: texts → vectors, one for each.

Texts are sorted into batches of a few padded shapes, so that the number of compilations
stays small whatever the texts are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..dtype import DType
from ..errors import UnsupportedModelError, UserInputError
from ..graph.placement.arrays import put
from ..graph.placement.specs import batch_axes, mesh_of
from ..models import Decoder
from ..models.family import check_loaded
from ..models.pooling import POOLINGS, Pooling, pool
from ..text.tokenizer.tokenizer import Tokenizer, Tokens

# No text is padded to less: shorter programs are hardly faster.
_LEAST_LENGTH = 16


def embed(
    model: Any,
    tokenizer: Tokenizer | None,
    texts: Iterable[str],
    *,
    batch_size: int = 32,
    truncate: bool = False,
    normalize: bool | None = None,
    pooling: Pooling | str | None = None,
    prompt: str | None = None,
    prompt_name: str | None = None,
) -> np.ndarray:
    """One vector for each text, pooled as the model's own files say.

    An encoder without such files (``model.pooling``) gives the mean over a text's tokens; of a
    decoder it must be said: the last token's state, or the mean.

    Args:
        model: An encoder of text or a decoder, as ``maxjax.load`` gives it.
        tokenizer: Its tokenizer.
        texts: The texts; an empty one is a text.
        batch_size: The most texts computed at once.
        truncate: Cut texts that are longer than the model takes, instead of refusing them.
        normalize: Scale each vector to length 1, or not; None does as the files say.
        pooling: In the place of what the files say: ``"lasttoken"``, ``"mean"``, another name in
            ``engine.pooling.POOLINGS``, or a ``Pooling``.
        prompt: Put before every text.
        prompt_name: One of the prompts that the files name is put there. None of both: the usual one,
            if the files say which that is.

    Returns:
        float32 ``[len(texts), d]``, in the order of the texts.

    Raises:
        TypeError: A text is not a str.
        UserInputError: No tokenizer, a text that is too long, a model without weights or
            one that is neither; a decoder of which nobody says how its tokens are pooled; a prompt
            that the files do not have.
        UnsupportedModelError: The files ask for a step that maxjax does not have
            (a NotImplementedError).
    """
    if tokenizer is None:
        raise UserInputError(
            "texts cannot be embedded without a tokenizer: "
            "the model's directory has no tokenizer.json"
        )
    pooling = _pooling(model, batch_size, pooling)
    if prompt is None:
        prompt = pooling.before(prompt_name)
    elif prompt_name is not None:
        raise UserInputError("prompt= and prompt_name= say the same: pass one of them")
    normalize = pooling.normalize if normalize is None else bool(normalize)
    limit = _limit(model, tokenizer, pooling)
    rows = _rows(tokenizer, texts, pooling, limit, truncate, prompt)
    _check_ids(model, rows)
    left = 0 if pooling.include_prompt else _tokens_of(tokenizer, pooling, prompt)
    run = partial(_encode, model, modes=pooling.modes, normalize=normalize, left=left)
    mesh = mesh_of([getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(model)])
    pending = []
    for batch in batches([len(row.ids) for row in rows], batch_size, limit):
        members = [rows[i] for i in batch.members]
        padded = tokenizer.pad(members, batch.length, batch.count)
        if mesh is not None:  # each device works on its part of the batch
            split = NamedSharding(mesh, PartitionSpec(batch_axes(mesh, batch.count)))
            padded = jax.tree.map(partial(put, sharding=split), padded)
        pending.append((batch.members, run(padded)))
    if not rows:
        width = jax.eval_shape(run, tokenizer.pad([], _LEAST_LENGTH, 1)).shape[1]
        return np.zeros((0, width), np.float32)
    # Only now is anything waited for: the device works on while batches are put together.
    result = np.empty((len(rows), pending[0][1].shape[1]), np.float32)
    for members, vectors in pending:
        result[members] = np.asarray(vectors)[: len(members)]
    return result


@partial(jax.jit, static_argnames=("modes", "normalize", "left"))
def _encode(
    model: Any, batch: Any, *, modes: tuple[str, ...], normalize: bool, left: int = 0
) -> jax.Array:
    if isinstance(model, Decoder):
        lengths = jnp.sum(batch.attention_mask, axis=1)  # padding is at the right
        states = model.states(batch.input_ids, lengths=lengths)
    else:
        states = model(*batch).last_hidden_state  # [B, T, E]
    dtype = DType.of(getattr(model, "reduce_dtype", DType.float32)).np
    mask = batch.attention_mask
    if left:  # tokens of the prompt
        mask = jnp.where(jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :] >= left, mask, 0)
    pooled = pool(states.astype(dtype), mask, modes, normalize=normalize)
    return pooled.astype(jnp.float32)  # [B, d]


# --- what can be wrong ----------------------------------------------------------------------


def _pooling(model: Any, batch_size: Any, wanted: Any) -> Pooling:
    if not hasattr(model, "family") or not hasattr(model, "max_length"):
        raise UserInputError(
            f"{type(model).__name__} is neither a text encoder nor a decoder: there is nothing to "
            "embed texts with"
        )
    check_loaded(model)
    if type(batch_size) is not int or batch_size < 1:
        raise UserInputError(f"batch_size must be a positive integer, not {batch_size!r}")
    said = getattr(model, "pooling", None)
    if isinstance(wanted, str):
        if wanted not in POOLINGS:
            known = ", ".join(map(repr, POOLINGS))
            raise UserInputError(f"pooling={wanted[:60]!r} is none of {known}")
        wanted = replace(said or Pooling(), modes=(wanted,), unsupported=None)
    elif wanted is not None and not isinstance(wanted, Pooling):
        raise UserInputError(f"pooling must be a name or a Pooling, not {type(wanted).__name__}")
    pooling = wanted or said
    if pooling is None and isinstance(model, Decoder):
        raise UserInputError(
            f"a {type(model).__name__} is a decoder, and no file of its says how its tokens become one "
            "vector: pass pooling='lasttoken' or pooling='mean' as it was trained, or put the "
            "modules.json and 1_Pooling/config.json of sentence-transformers beside it"
        )
    pooling = pooling or Pooling()
    if pooling.unsupported:
        raise UnsupportedModelError(
            f"the model's embeddings need {pooling.unsupported}, which is not supported yet"
        )
    return pooling


def _tokens_of(tokenizer: Tokenizer, pooling: Pooling, prompt: str) -> int:
    """How many tokens a prompt has at the front of a text, as sentence-transformers counts them."""
    if not prompt:
        return 0
    [row] = tokenizer.tokens([prompt.lower() if pooling.lower_case else prompt])
    plain = tokenizer.encode(prompt.lower() if pooling.lower_case else prompt, special=False)
    # Of the special tokens around it those at the end come after the text.
    return len(row.ids) - int(len(row.ids) > len(plain) and row.ids[-1:] != plain[-1:])


def _limit(model: Any, tokenizer: Tokenizer, pooling: Pooling) -> int:
    """The most tokens a text may have, special ones and all."""
    limits = (model.max_length, pooling.max_length, tokenizer.max_length)
    return min(limit for limit in limits if limit is not None)


def _rows(
    tokenizer: Tokenizer, texts: Iterable[str], pooling: Pooling, limit: int, truncate: bool,
    prompt: str,
) -> list[Tokens]:  # fmt: skip
    if prompt and not isinstance(texts, str):
        texts = [prompt + text if isinstance(text, str) else text for text in texts]
    if pooling.lower_case and not isinstance(texts, str):
        texts = [text.lower() if isinstance(text, str) else text for text in texts]
    rows = tokenizer.tokens(texts, max_length=limit if truncate else None)
    for i, row in enumerate(rows):
        if len(row.ids) > limit:
            raise UserInputError(
                f"texts[{i}] has {len(row.ids)} tokens and the model takes {limit}: "
                "shorten it, or pass truncate=True"
            )
    return rows


def _check_ids(model: Any, rows: list[Tokens]) -> None:
    """An id outside the table would come out as NaN."""
    size = model.config.vocab_size
    highest = max((max(row.ids, default=0) for row in rows), default=0)
    if highest >= size:
        raise UserInputError(
            f"the tokenizer gives the token id {highest} and the model knows {size}: "
            "they do not belong together"
        )


# --- batches of few shapes ------------------------------------------------------------------


class PaddedBatch(NamedTuple):
    """Which texts are computed together, and the shape ``[count, length]`` they are padded to."""

    members: list[int]
    count: int
    length: int


def batches(lengths: list[int], batch_size: int, limit: int) -> list[PaddedBatch]:
    """Puts texts of similar length together.

    Lengths are padded to a power of two, counts to a power of four: a bounded number of
    shapes, each of which is compiled once.

    Example:
        >>> for batch in batches([5, 100, 7, 6], batch_size=2, limit=120):
        ...     print(batch)
        PaddedBatch(members=[0, 3], count=2, length=16)
        PaddedBatch(members=[2], count=1, length=16)
        PaddedBatch(members=[1], count=1, length=120)
    """
    buckets: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = _at_least(lengths[i], _LEAST_LENGTH, 2)
        buckets.setdefault(min(padded, limit), []).append(i)
    found = []
    for length, members in buckets.items():
        for start in range(0, len(members), batch_size):
            part = members[start : start + batch_size]
            found.append(PaddedBatch(part, min(_at_least(len(part), 1, 4), batch_size), length))
    return found


def _at_least(number: int, start: int, factor: int) -> int:
    """The first of start, start · factor, start · factor², … that is not below ``number``."""
    while start < number:
        start *= factor
    return start
