"""Runs a model on rows of tokens, one row for each text, in batches of a few padded shapes.

So few programs are compiled, whatever the texts are. An encoder's short texts lie end to end in rows (``packing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import UserInputError
from ..graph.placement.arrays import put
from ..graph.placement.specs import batch_axes, mesh_of
from ..lockstep import Lockstep
from ..models import Encoder
from ..models.pooling import Pooling
from ..models.weights import model_facts, shardings_of
from ..nn.layer.observe.programs import ProgramObserver, tapped
from ..progress import compiling, task
from ..text.tokenizer.tokenizer import Encoding, Tokenizer
from .isolation import isolated
from .packing import LONGEST, PackedTokens, packed_batches, packed_tokens, places

MIN_LENGTH = 16
"""The smallest padded length: shorter programs are hardly faster."""


class RowBatch(NamedTuple):
    """A batch of rows of tokens.

    Attributes:
        members: the indices of the rows in it.
        slots: the index of each member among the texts that the batch has room for.
        starts: where the tokens of each member are: (row of the batch, index of the first token).
        tokens: the arrays.
    """

    members: list[int]
    slots: list[int]
    starts: list[tuple[int, int]]
    tokens: Any


@isolated()
def run_rows(
    model: Any,
    tokenizer: Tokenizer,
    rows: list[Encoding],
    together: Lockstep,
    shown_as: tuple[str, str],
    program: Any,
    *,
    batch_size: int,
    limit: int,
    facts: Mapping[str, Any],
    inputs: Callable[[RowBatch], Any] | None = None,
    **settings: Any,
) -> list[tuple[RowBatch, Any]]:
    """Runs a program on all rows, and returns each batch with the program's output as NumPy arrays.

    Args:
        model, tokenizer: the loaded model and its tokenizer.
        rows: the tokens of each text or text pair, at most ``limit``.
        together: the processes that make the call.
        shown_as: text and unit of the progress bar.
        program: a jitted function ``program(model, tokens, *, gathered, patches, **settings)``.
        batch_size: the largest number of rows in one batch.
        limit: the largest number of tokens of a row.
        facts: options of the call, which must be the same in all processes.
        inputs: a function from a batch to what the program gets; by default the batch's tokens.
        settings: further arguments of the program.

    Raises:
        UserInputError: the tokenizer gives ids that the model does not have.
    """
    _check_ids(model, rows)
    if together.is_shared:
        together.agree(
            texts=[list(map(int, (*row.ids, -1, *row.type_ids))) for row in rows],
            batch_size=batch_size, limit=limit, tokenizer=tokenizer.digest, **facts, **model_facts(model),
        )  # fmt: skip
    mesh = mesh_of(list(shardings_of(model)))
    settings["gathered"] = (
        NamedSharding(mesh, PartitionSpec()) if together.is_shared and mesh else None
    )
    observer = ProgramObserver(model)
    packs = not observer.is_observed  # an observer of the model expects one text in each row
    pending: list[tuple[RowBatch, Any]] = []
    found: list[tuple[RowBatch, Any]] = []
    ready = 0  # number of batches that are counted
    with task(shown_as[0].format(len(rows)), len(rows), unit=shown_as[1]) as shown:
        for batch in _batches_of(model, tokenizer, rows, batch_size, limit, packs):
            members, ids = batch.members, batch.tokens[0]
            numbers = [*members, *[-1] * (len(ids) - len(members))]
            lengths = [len(rows[i].ids) if i >= 0 else 0 for i in numbers]
            tokens = batch.tokens if inputs is None else inputs(batch)
            if mesh is not None:  # shard the batch over the data axes
                split = NamedSharding(mesh, PartitionSpec(batch_axes(mesh, len(ids))))
                tokens = jax.tree.map(partial(put, where=split), tokens)
            if together.is_shared:
                together.decide()  # a barrier: every process has this batch
            with compiling(together.call):
                output = observer.run(
                    together, program, tokens, rows=numbers, counts=lambda _, n=lengths: n,
                    width=ids.shape[1], **settings,
                )  # fmt: skip
            # With several processes, none may dispatch more before this result is there.
            output = together.fetch(output) if together.is_shared else output
            pending.append((batch, output))
            while ready < len(pending) and _is_ready(pending[ready][1]):
                shown.add(len(pending[ready][0].members))
                ready += 1
        # Waiting begins only here: the devices compute while the host prepares batches.
        for number, (batch, output) in enumerate(pending):
            found.append((batch, jax.tree.map(np.asarray, output)))
            shown.add(len(batch.members) if number >= ready else 0)
    return found


def _is_ready(output: Any) -> bool:
    """Whether the arrays are computed; NumPy's are."""
    return all(one.is_ready() for one in jax.tree.leaves(output) if hasattr(one, "is_ready"))


def encoder_output(model: Encoder, tokens: Any, patches: Any) -> tuple[Any, Any]:
    """The output of an encoder for the tokens of a batch, and what observers of the model recorded."""
    if isinstance(tokens, PackedTokens):
        seen = tokens.numbers[:, :, None] == tokens.numbers[:, None, :]  # [B, T, T]
        types = tokens.type_ids if model.takes_types else None
        positions = model.position_ids(tokens.ids, tokens.positions)
        return tapped(model, patches, lambda: model(tokens.ids, seen, types, positions))
    types = tokens.token_type_ids if getattr(model, "takes_types", True) else None
    return tapped(model, patches, lambda: model(tokens.input_ids, tokens.attention_mask, types))


# --- checks ---------------------------------------------------------------------------------


def text_limit(model: Any, tokenizer: Tokenizer, pooling: Pooling) -> int:
    """The largest number of tokens of a text, special tokens included."""
    # As in sentence-transformers, a limit of the pooling's files takes the place of the tokenizer's.
    own = tokenizer.max_length if pooling.max_length is None else pooling.max_length
    return min(limit for limit in (model.max_length, own) if limit is not None)


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


def _batches_of(
    model: Any,
    tokenizer: Tokenizer,
    rows: list[Encoding],
    batch_size: int,
    limit: int,
    packs: bool,
) -> Iterator[RowBatch]:
    lengths = [len(row.ids) for row in rows]
    # Packed rows need position ids, and a mask of the pairs of tokens that see each other.
    packs = packs and isinstance(model, Encoder)
    short = [i for i, n in enumerate(lengths) if n <= LONGEST and packs]
    texts = [rows[i] for i in short]
    for batch in packed_batches([lengths[i] for i in short], batch_size, limit):
        members, slots, starts = [], [], []
        for i, row in enumerate(batch.rows):
            start = 0
            for k, member in enumerate(row):
                members.append(short[member])
                slots.append(i * places(batch.length) + k)
                starts.append((i, start))
                start += len(texts[member].ids)
        yield RowBatch(members, slots, starts, packed_tokens(texts, batch, tokenizer.pad_id))
    kept = set(short)
    long = [i for i in range(len(rows)) if i not in kept]
    for batch in batches([lengths[i] for i in long], batch_size, limit):
        members = [long[i] for i in batch.members]
        padded = tokenizer.pad([rows[i] for i in members], batch.length, batch.count)
        slots = list(range(len(members)))
        yield RowBatch(members, slots, [(i, 0) for i in slots], padded)


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
        padded = _at_least(lengths[i], MIN_LENGTH, 2)
        buckets.setdefault(min(padded, limit), []).append(i)
    found = []
    for length, members in buckets.items():
        for start in range(0, len(members), batch_size):
            part = members[start : start + batch_size]
            found.append(PaddedBatch(part, padded_count(len(part), batch_size), length))
    return found


def padded_count(count: int, batch_size: int) -> int:
    """The number of rows of a batch of ``count``, which is padded to a power of four: few programs are compiled.

    Example:
        >>> [padded_count(count, 32) for count in (1, 3, 17, 32)]
        [1, 4, 32, 32]
    """
    return min(_at_least(count, 1, 4), batch_size)


def _at_least(number: int, start: int, factor: int) -> int:
    """The smallest of start, start · factor, start · factor², … that is at least ``number``."""
    while start < number:
        start *= factor
    return start


def check_lengths(rows: Sequence[Any], limit: int, hint: str, which: str = "texts") -> None:
    """Raises an error for a text that has more tokens than the model takes."""
    for i, row in enumerate(rows):
        if len(row.ids) > limit:
            raise UserInputError(
                f"{which}[{i}] has {len(row.ids)} tokens and the model takes {limit}: {hint}"
            )
