"""``embed``: one vector for each text.

Texts are sorted into batches of a few padded shapes, so that few programs are compiled whatever
the texts are. An encoder's short texts lie end to end in rows (``packing``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..dtype import DType
from ..elsewhere import unknown_argument
from ..errors import UnsupportedModelError, UserInputError, releasing
from ..graph.placement.arrays import put, with_sharding
from ..graph.placement.specs import batch_axes, mesh_of
from ..lockstep import Lockstep
from ..models import Encoder, LanguageModel
from ..models.pooling import POOLINGS, Pooling, densified, normalized, pool, unit
from ..models.weights import check_loaded, model_facts, shardings_of
from ..nn.layer.observe.programs import Watch, is_observed, tapped
from ..nn.layer.walk import check_module
from ..progress import compiling, task
from ..text.tokenizer.arguments import check_is_tokenizer, checked_texts
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .isolation import isolated
from .packing import LONGEST, PackedTokens, packed_batches, packed_tokens, places
from .sampling.settings import is_count, positive

# The smallest padded length: shorter programs are hardly faster.
_MIN_LENGTH = 16


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
    truncate_dim: int | None = None,
    **unknown: Any,
) -> np.ndarray:
    """Computes one vector per text, pooled as the checkpoint's sentence-transformers files say.

    Several processes that share the model's mesh make the call together, with the same arguments,
    and all get the vectors. Without such files (``model.pooling``), an encoder uses the mean over
    the tokens of a text; a decoder needs ``pooling``, usually ``"lasttoken"`` or ``"mean"``.

    Args:
        model: a text encoder or a decoder, as returned by ``maxjax.load``.
        tokenizer: the model's tokenizer.
        texts: the texts; an empty text is allowed.
        batch_size: the maximum number of rows in one batch. A row holds one text, or several short
            texts of an encoder.
        truncate: whether to truncate texts longer than the model's limit; otherwise they are an
            error.
        normalize: whether to scale each vector to length 1; None follows the files.
        pooling: the pooling to use instead of that of the files: ``"lasttoken"``, ``"mean"``,
            another name in ``maxjax.models.pooling.POOLINGS``, or a ``Pooling``.
        prompt: a text to put before every text.
        prompt_name: the name of a prompt in the files, used as ``prompt``. Without either, the
            files' default prompt is used if they have one.
        truncate_dim: how many of the first numbers of each vector are kept, for a model that was trained
            for it (A. Kusupati et al., Matryoshka representation learning, arXiv:2205.13147). As in
            sentence-transformers, only ``normalize=True`` gives the rest length 1 again. By default the number of
            the model's files, or all.

    Returns:
        The vectors, float32 ``[len(texts), d]``, in the order of the texts; d is ``truncate_dim`` if it
        is given.

    Raises:
        TypeError: a text or the prompt is not a str; or an argument is unknown, and the message suggests the right
            name if it can.
        UserInputError: there is no tokenizer; a text is too long; the model's weights are not
            loaded, or it is neither an encoder nor a decoder; the pooling of a decoder is not
            known; the files do not have the named prompt; ``truncate_dim`` is not between 1 and d.
        UnsupportedModelError: the files configure a module that maxjax does not support.
        ProgramMismatchError: the model, a text or an option is not the same in all processes.
        PeerFailedError, PeerLostError: another process raised an error in this call, or has ended.
    """
    for name in unknown:
        raise unknown_argument(embed, name)
    if truncate_dim is not None and not is_count(truncate_dim):
        raise UserInputError(f"truncate_dim={str(truncate_dim)[:60]} must be at least 1")
    with Lockstep("embed", shardings_of(model)) as together, releasing():
        found = _embed(
            model, tokenizer, texts, together,
            batch_size=batch_size, truncate=truncate, normalize=normalize, pooling=pooling,
            prompt=prompt, prompt_name=prompt_name, truncate_dim=truncate_dim,
        )  # fmt: skip
        together.finish()
    if truncate_dim is None:
        given = pooling if isinstance(pooling, Pooling) else getattr(model, "pooling", None)
        truncate_dim = None if given is None else given.truncate_dim
    return found if truncate_dim is None else _truncated(found, truncate_dim, normalize)


def _truncated(vectors: np.ndarray, count: int, normalize: bool | None) -> np.ndarray:
    width = vectors.shape[1]
    if count > width:
        raise UserInputError(f"truncate_dim={str(count)[:60]} must be from 1 to {width}")
    vectors = np.ascontiguousarray(vectors[:, :count])
    return unit(vectors) if normalize else vectors


def _embed(
    model: Any,
    tokenizer: Tokenizer | None,
    texts: Iterable[str],
    together: Lockstep,
    *,
    batch_size: int,
    truncate: bool,
    normalize: bool | None,
    pooling: Pooling | str | None,
    prompt: str | None,
    prompt_name: str | None,
    truncate_dim: int | None,
) -> np.ndarray:
    check_module(model, "embed")
    check_is_tokenizer(tokenizer)
    if tokenizer is None:
        raise UserInputError(
            "texts cannot be embedded without a tokenizer: "
            "the model's directory has no tokenizer.json. Put it there"
        )
    pooling, batch_size = _pooling(model, pooling), positive("batch_size", batch_size)
    if prompt is not None and not isinstance(prompt, str):
        raise TypeError(f"prompt is a {type(prompt).__name__}, not a str")
    if prompt is None:
        prompt = pooling.before(prompt_name)
    elif prompt_name is not None:
        raise UserInputError("prompt= and prompt_name= are both given: pass one of them")
    normalize = pooling.normalize if normalize is None else bool(normalize)
    limit = text_limit(model, tokenizer, pooling)
    rows = _rows(tokenizer, texts, pooling, limit, truncate, prompt)
    skipped = 0 if pooling.include_prompt else _tokens_of(tokenizer, pooling, prompt)
    return pooled_rows(
        model, tokenizer, rows, together, ("embedding {:,} texts", " texts"), batch_size=batch_size, limit=limit,
        pooling=replace(pooling, normalize=normalize), skipped=skipped, facts={"truncate_dim": truncate_dim},
    )  # fmt: skip


@isolated()
def pooled_rows(
    model: Any,
    tokenizer: Tokenizer,
    rows: list[Encoding],
    together: Lockstep,
    shown_as: tuple[str, str],
    *,
    batch_size: int,
    limit: int,
    pooling: Pooling,
    skipped: int = 0,
    head: bool = False,
    answers: tuple[int, int] | None = None,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> np.ndarray:
    """The pooled state of each row of tokens, float32 ``[rows, d]``, or the output of the model's head for it.

    Args:
        model, tokenizer: the loaded model and its tokenizer.
        rows: the tokens of each text or text pair, at most ``limit``.
        together: the processes that make the call.
        shown_as: text and unit of the progress bar.
        batch_size: the largest number of rows in one batch.
        limit: the largest number of tokens of a row.
        pooling: modes, dense layers and normalisation.
        skipped: number of first tokens that are not pooled.
        head: whether the model's classification head is applied to the pooled states.
        answers: two token ids; a decoder's result is the logit of the first minus that of the second.
        facts: further options, which must be the same in all processes.
    """
    _check_ids(model, rows)
    if together.is_shared:
        together.agree(
            texts=[list(map(int, (*row.ids, -1, *row.type_ids))) for row in rows],
            batch_size=batch_size, pooling=str(pooling), normalize=pooling.normalize,
            skipped=skipped, limit=limit, tokenizer=tokenizer.digest, **facts, **model_facts(model),
        )  # fmt: skip
    mesh = mesh_of(list(shardings_of(model)))
    settings: dict[str, Any] = {
        "modes": pooling.modes, "normalize": pooling.normalize, "skipped": skipped,
        "gathered": NamedSharding(mesh, PartitionSpec()) if together.is_shared and mesh else None,
    }  # fmt: skip
    if pooling.dense:
        settings["activations"] = tuple(dense.activation for dense in pooling.dense)
        settings["dense"] = [(dense.matrix, dense.vector) for dense in pooling.dense]
        if not together.is_shared and mesh is None:
            settings["dense"] = jax.device_put(settings["dense"])
    if head:
        settings["head"], settings["answers"] = True, answers
    watch = Watch(model)
    packs = not watch.is_watched  # an observer of the model expects one text in each row
    pending: list[_Pending] = []
    ready = 0  # number of batches that are counted
    with task(shown_as[0].format(len(rows)), len(rows), unit=shown_as[1]) as shown:
        for members, slots, tokens in _batches_of(model, tokenizer, rows, batch_size, limit, packs):
            numbers = [*members, *[-1] * (len(tokens[0]) - len(members))]
            lengths = [len(rows[i].ids) if i >= 0 else 0 for i in numbers]
            if mesh is not None:  # shard the batch over the data axes
                split = NamedSharding(mesh, PartitionSpec(batch_axes(mesh, len(tokens[0]))))
                tokens = jax.tree.map(partial(put, sharding=split), tokens)
            if together.is_shared:
                together.decide()  # a barrier: every process has this batch
            with compiling("embed"):
                vectors = watch.run(
                    together, _encode, tokens, rows=numbers, counts=lambda _, n=lengths: n,
                    width=tokens[0].shape[1], **settings,
                )  # fmt: skip
            # With several processes, none may dispatch more before this result is there.
            vectors = together.fetch(vectors) if together.is_shared else vectors
            pending.append(_Pending(members, slots, vectors))
            while ready < len(pending) and pending[ready].is_ready():
                shown.add(len(pending[ready].members))
                ready += 1
        if not rows:
            width = jax.eval_shape(
                partial(_encode, **settings), model, tokenizer.pad([], _MIN_LENGTH, 1)
            ).shape[1]
            return np.zeros((0, width), np.float32)
        # Waiting begins only here: the devices compute while the host prepares batches.
        result = np.empty((len(rows), pending[0].vectors.shape[1]), np.float32)
        for number, (members, slots, vectors) in enumerate(pending):
            result[members] = np.asarray(vectors)[slots]
            shown.add(len(members) if number >= ready else 0)
    return result


class _Pending(NamedTuple):
    """The indices of a batch's texts, the slots of their vectors, and the vectors of all its slots."""

    members: list[int]
    slots: list[int]
    vectors: Any

    def is_ready(self) -> bool:
        """Whether the vectors are computed."""
        is_ready = getattr(self.vectors, "is_ready", None)  # NumPy's arrays have none
        return is_ready is None or is_ready()


def _batches_of(
    model: Any,
    tokenizer: Tokenizer,
    rows: list[Encoding],
    batch_size: int,
    limit: int,
    packs: bool,
) -> Iterator[tuple[list[int], list[int], Any]]:
    """Yields for each batch the indices of its texts, the slots of their vectors, and its tokens."""
    lengths = [len(row.ids) for row in rows]
    # Packed rows need position ids, and a mask of the pairs of tokens that see each other.
    packs = packs and isinstance(model, Encoder)
    short = [i for i, n in enumerate(lengths) if n <= LONGEST and packs]
    for batch in packed_batches([lengths[i] for i in short], batch_size, limit):
        found = [(i, k) for i, row in enumerate(batch.rows) for k in range(len(row))]
        members = [short[batch.rows[i][k]] for i, k in found]
        slots = [i * places(batch.length) + k for i, k in found]
        yield members, slots, packed_tokens([rows[i] for i in short], batch, tokenizer.pad_id)
    kept = set(short)
    long = [i for i in range(len(rows)) if i not in kept]
    for batch in batches([lengths[i] for i in long], batch_size, limit):
        members = [long[i] for i in batch.members]
        padded = tokenizer.pad([rows[i] for i in members], batch.length, batch.count)
        yield members, list(range(len(members))), padded


@partial(
    jax.jit,
    static_argnames=("modes", "normalize", "skipped", "gathered", "activations", "head", "answers"),
)
def _encode(
    model: Any,
    batch: Any,
    *,
    modes: tuple[str, ...],
    normalize: bool,
    skipped: int = 0,
    gathered: NamedSharding | None = None,
    activations: tuple[str, ...] = (),
    dense: Any = (),
    head: bool = False,
    answers: tuple[int, int] | None = None,
    patches: Any = (),
) -> Any:
    """The vectors; for a model that is observed, the vectors and what was recorded."""
    dtype = DType.of(getattr(model, "reduce_dtype", DType.float32)).np
    if isinstance(batch, PackedTokens):
        seen = batch.numbers[:, :, None] == batch.numbers[:, None, :]  # [B, T, T]
        types = batch.type_ids if model.takes_types else None
        places = model.position_ids(batch.ids, batch.positions)
        run = lambda: model(batch.ids, seen, types, places)
        output, taps = tapped(model, patches, run)
        states = output.last_hidden_state.astype(dtype)
        pooled = _pooled(states, batch, modes, normalize and not dense, skipped)
    else:
        if isinstance(model, LanguageModel):
            lengths = jnp.sum(batch.attention_mask, axis=1)  # padding is at the right
            run = lambda: model.states(batch.input_ids, lengths=lengths)
        else:
            types = batch.token_type_ids if getattr(model, "takes_types", True) else None
            arrays = (batch.input_ids, batch.attention_mask, types)
            run = lambda: model(*arrays).last_hidden_state  # [B, T, E]
        states, taps = tapped(model, patches, run)
        mask = batch.attention_mask
        if skipped:  # the tokens of the prompt do not count
            at = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
            mask = jnp.where(at >= skipped, mask, 0)
        pooled = pool(states.astype(dtype), mask, modes, normalize=normalize and not dense)
        # Without special tokens an empty text has no token: its row is padding alone.
        has_tokens = jnp.any(batch.attention_mask > 0, axis=1, keepdims=True)
        pooled = jnp.where(has_tokens, pooled, 0)
    if dense:
        pooled = densified(pooled, dense, activations)
        pooled = normalized(pooled) if normalize else pooled
    if head and answers is None:
        pooled = model.scores(pooled)  # type: ignore[union-attr]
    elif answers is not None:
        logits = model.logits(pooled.astype(states.dtype))  # [B, V]
        pooled = (logits[:, answers[0]] - logits[:, answers[1]])[:, None]
    pooled = pooled.astype(jnp.float32)  # [B, d]
    pooled = pooled if gathered is None else with_sharding(pooled, gathered)
    return (pooled, taps) if is_observed(model) else pooled


def _pooled(
    states: jax.Array, batch: PackedTokens, modes: tuple[str, ...], normalize: bool, skipped: int
) -> jax.Array:
    """The vectors of the texts in packed rows, ``[B · K, d]``; zeros for slots without a text."""
    count, length, _ = states.shape
    numbers = jnp.arange(1, places(length) + 1, dtype=jnp.int32)
    masks = batch.numbers[:, None, :] == numbers[None, :, None]  # [B, K, T]
    starts = jnp.argmax(masks, axis=2).astype(jnp.int32)  # [B, K]
    taken = jnp.any(masks, axis=2)
    if skipped:
        masks = masks & (batch.positions >= skipped)[:, None, :]

    def of_text(mask: jax.Array, starts: jax.Array) -> jax.Array:
        return pool(states, mask, modes, normalize=normalize, starts=starts)

    pooled = jax.vmap(of_text, in_axes=1, out_axes=1)(masks, starts)  # [B, K, d]
    return jnp.where(taken[..., None], pooled, 0).reshape(count * places(length), -1)


# --- checks ---------------------------------------------------------------------------------


def _pooling(model: Any, given: Any) -> Pooling:
    if not hasattr(model, "family") or not hasattr(model, "max_length"):
        raise UserInputError(
            f"{type(model).__name__} is neither a text encoder nor a decoder: it cannot embed texts. "
            "Pass a model of maxjax.load"
        )
    check_loaded(model)
    default = getattr(model, "pooling", None)
    if isinstance(given, str):
        if given not in POOLINGS:
            known = ", ".join(map(repr, POOLINGS))
            raise UserInputError(f"pooling={given[:60]!r} is not one of {known}")
        given = replace(default or Pooling(), modes=(given,), unsupported=None)
    elif given is not None and not isinstance(given, Pooling):
        raise UserInputError(f"pooling must be a name or a Pooling, not {type(given).__name__}")
    pooling = given or default
    if pooling is None and isinstance(model, LanguageModel):
        raise UserInputError(
            f"{type(model).__name__} is a decoder, and its files do not say how its token states are "
            "pooled: pass pooling='lasttoken' or pooling='mean', whichever it was trained with, or "
            "put the modules.json and 1_Pooling/config.json of sentence-transformers beside it"
        )
    pooling = pooling or Pooling()
    if pooling.unsupported:
        raise UnsupportedModelError(
            f"the model's embeddings need {pooling.unsupported}, which is not supported yet"
        )
    return pooling


def _tokens_of(tokenizer: Tokenizer, pooling: Pooling, prompt: str) -> int:
    """The number of tokens of a prompt before a text, as sentence-transformers counts them."""
    if not prompt:
        return 0
    prompt = pooling.cased(prompt)
    [row] = tokenizer.tokens([prompt])
    plain = tokenizer.encode(prompt, special=False)
    # Special tokens at the end come after the text, so they are not part of the prompt.
    return len(row.ids) - int(len(row.ids) > len(plain) and row.ids[-1:] != plain[-1:])


def text_limit(model: Any, tokenizer: Tokenizer, pooling: Pooling) -> int:
    """The largest number of tokens of a text, special tokens included."""
    # As in sentence-transformers, a limit of the pooling's files takes the place of the tokenizer's.
    own = tokenizer.max_length if pooling.max_length is None else pooling.max_length
    return min(limit for limit in (model.max_length, own) if limit is not None)


def _rows(
    tokenizer: Tokenizer, texts: Iterable[str], pooling: Pooling, limit: int, truncate: bool,
    prompt: str,
) -> list[Encoding]:  # fmt: skip
    if prompt or pooling.lower_case:
        texts = [pooling.cased(prompt + text) for text in checked_texts(texts)]
    rows = tokenizer.tokens(texts, max_length=limit if truncate else None)
    for i, row in enumerate(rows):
        if len(row.ids) > limit:
            raise UserInputError(
                f"texts[{i}] has {len(row.ids)} tokens and the model takes {limit}: "
                "shorten it, or pass truncate=True"
            )
    return rows


def _check_ids(model: Any, rows: list[Encoding]) -> None:
    """Raises an error for an id outside the embedding table, which would give NaN."""
    size = model.config.vocab_size
    highest = max((max(row.ids, default=0) for row in rows), default=0)
    if highest >= size:
        raise UserInputError(
            f"the tokenizer gives the token id {highest}, but the vocabulary of the model has {size} "
            "tokens: the tokenizer belongs to another model"
        )


# --- batches of few shapes ------------------------------------------------------------------


class PaddedBatch(NamedTuple):
    """The indices of the texts of a batch, and the shape ``[count, length]`` it is padded to."""

    members: list[int]
    count: int
    length: int


def batches(lengths: list[int], batch_size: int, limit: int) -> list[PaddedBatch]:
    """Groups texts of similar length into batches.

    Lengths are padded to powers of two, and counts to powers of four, so that the number of shapes
    is bounded; one program is compiled for each.

    Example:
        >>> for batch in batches([5, 100, 7, 6], batch_size=2, limit=120):
        ...     print(batch)
        PaddedBatch(members=[0, 3], count=2, length=16)
        PaddedBatch(members=[2], count=1, length=16)
        PaddedBatch(members=[1], count=1, length=120)
    """
    buckets: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = _at_least(lengths[i], _MIN_LENGTH, 2)
        buckets.setdefault(min(padded, limit), []).append(i)
    found = []
    for length, members in buckets.items():
        for start in range(0, len(members), batch_size):
            part = members[start : start + batch_size]
            found.append(PaddedBatch(part, min(_at_least(len(part), 1, 4), batch_size), length))
    return found


def _at_least(number: int, start: int, factor: int) -> int:
    """The smallest of start, start · factor, start · factor², … that is at least ``number``."""
    while start < number:
        start *= factor
    return start
