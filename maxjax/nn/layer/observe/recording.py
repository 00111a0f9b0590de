"""Recording: the captured values of several calls of a model by a maxjax function, concatenated along tokens.

Shapes: B rows of one call, T tokens, R rows of the whole run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import UserInputError
from .captures import Captures
from .frames import StackedValues
from .places import Place


class Piece(NamedTuple):
    """The values that one dispatch of a program recorded.

    Attributes:
        found: captured values; those of a dispatch of several decode steps have a leading axis of steps.
        rows: for each row of the call, the index of its text in the run; -1 for padding.
        counts: number of tokens of each row, ``[B]``, possibly still on the devices.
        width: number T of tokens of a call; None for decode steps of one token each.
    """

    found: Captures
    rows: Sequence[int]
    counts: Any
    width: int | None


class Recording(Mapping[str, Any]):
    """The captured values of one run of ``generate``, ``stream``, ``embed`` or ``perplexity``.

    ``recording["layers.3.mlp"]`` has the values of all tokens that the model has read, ``[R, tokens,
    ...]``, with a row for each text, in the order of the texts. A row has the prompt and then the answer without
    its last token, which the model never reads. All rows are as long as the longest, with zeros after
    their own tokens; ``lengths`` has the number of tokens of each row. Attention weights are ``[R, H, tokens,
    tokens]``. A value that the model computes only for the last token of a call (such as the output layer's in
    ``generate``) has one entry for each call.

    Attributes:
        calls: a Captures for each call of the model, with the values as they were computed: with padding, and
            without the axis of tokens for decode steps.
    """

    # Compared by identity, because arrays do not compare to a single bool.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._limits: dict[int, int] = {}
        self._merged: dict[str, Any] = {}

    def add(self, found: Captures, rows: Sequence[int], counts: Any, width: int | None) -> None:
        """Adds the values that a dispatch recorded."""
        self._merged.clear()
        self._pieces.append(Piece(found, list(rows), counts, width))

    def end(self, row: int, tokens: int) -> None:
        """Drops the values of a row after this number of tokens, which are beyond the end of the text."""
        self._merged.clear()
        self._limits[row] = tokens

    @property
    def calls(self) -> list[Captures]:
        found = []
        for piece in self._pieces:
            if piece.width is not None:
                found.append(piece.found)
                continue
            steps = int(np.max(np.asarray(piece.counts), initial=0))
            entries = dict(piece.found.entries)
            for i in range(steps):
                found.append(Captures(jax.tree.map(lambda a, i=i: a[i], entries)))
        return found

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row that the model has read, int64 ``[R]``."""
        total = np.zeros(self._rows(), np.int64)
        for piece in self._pieces:
            for row, count in zip(piece.rows, np.asarray(piece.counts).tolist(), strict=True):
                if row >= 0:
                    total[row] += count
        for row, limit in self._limits.items():
            if row < len(total):
                total[row] = min(total[row], limit)
        return total

    def _rows(self) -> int:
        return 1 + max((max(piece.rows) for piece in self._pieces), default=-1)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for piece in self._pieces for key in piece.found))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: object) -> bool:
        return any(key in piece.found for piece in self._pieces)

    def __getitem__(self, key: str) -> Any:
        return self._all()[key]

    def __repr__(self) -> str:
        if not self._pieces:
            return "Captures: nothing"
        lengths = self.lengths
        return f"{self._all()!r}\n  of {len(lengths)} texts, {int(lengths.sum())} tokens"

    def _all(self) -> Captures:
        """The captured values of all dispatches, concatenated."""
        if "all" not in self._merged:
            values: dict[Place, tuple[Any, ...]] = {}
            for place in dict.fromkeys(p for piece in self._pieces for p in piece.found.entries):
                pieces = [piece for piece in self._pieces if place in piece.found.entries]
                values[place] = self._joined(place, pieces)
            self._merged["all"] = Captures(values)
        return self._merged["all"]

    def _joined(self, place: Place, pieces: list[Piece]) -> tuple[Any, ...]:
        first = pieces[0].found.entries[place]
        runs = []
        for i, run in enumerate(first):
            stacked = isinstance(run, StackedValues)
            trees = [piece.found.entries[place][i] for piece in pieces]
            flat = [jax.tree.leaves(tree) for tree in trees]
            leaves = [
                self._leaf(place, pieces, [one[k] for one in flat], stacked)
                for k in range(len(flat[0]))
            ]
            runs.append(jax.tree.unflatten(jax.tree.structure(run), leaves))
        return tuple(runs)

    def _leaf(self, place: Place, pieces: list[Piece], arrays: list[Any], stacked: bool) -> Any:
        """One array of all calls, concatenated: ``[R, tokens, ...]``, after a leading axis of layers if ``stacked``."""
        weights = place[1] == "weights"
        lead = int(stacked)
        step = next(
            (a.ndim - 1 for a, p in zip(arrays, pieces, strict=True) if p.width is None), None
        )
        rows: dict[int, list[np.ndarray]] = {}
        for piece, array in zip(pieces, map(np.asarray, arrays), strict=True):
            counts = np.asarray(piece.counts)
            steps = array if piece.width is None else array[None]  # [steps, (L,) B, ...]
            if steps.ndim < 2 + lead or steps.shape[1 + lead] != len(piece.rows):
                raise UserInputError(
                    f"'{place[0]}' gives {array.shape[1:] if piece.width is None else array.shape} for "
                    f"{len(piece.rows)} rows, which is no value for each row and token: use .calls"
                )
            tokens = self._has_tokens(weights, lead, step, piece, steps[0].shape)
            for at, row in enumerate(piece.rows):
                if row < 0 or not counts[at]:
                    continue
                own = steps.take(at, 1 + lead)  # [steps, (L,) ...]
                axis = 2 if weights else 1  # of the tokens of one call, among (L,) ...
                for i in range(int(counts[at]) if piece.width is None else 1):
                    value = own[i] if stacked else own[i][None]  # [L or 1, ...]
                    if not tokens:
                        value = np.expand_dims(value, axis)
                    count = int(counts[at]) if tokens and piece.width is not None else 1
                    rows.setdefault(row, []).append(np.moveaxis(value, axis, 1)[:, :count])
        found = self._padded(rows, weights)
        return jnp.asarray(found if stacked else found[0])

    def _has_tokens(
        self, weights: bool, lead: int, step: int | None, piece: Piece, shape: tuple[int, ...]
    ) -> bool:
        """Whether the value of a call has an axis of tokens."""
        if weights:
            return True
        if piece.width is None:
            return False
        if step is not None:
            return len(shape) > step
        return len(shape) > 1 + lead and shape[1 + lead] == piece.width

    def _padded(self, rows: dict[int, list[np.ndarray]], weights: bool) -> np.ndarray:
        """The rows ``[L, tokens, ...]``, padded, as one array ``[L, R, tokens, ...]``."""
        if weights:  # [L, tokens, H, S]: the caches of the calls differ in S
            wide = max(part.shape[3] for parts in rows.values() for part in parts)
            rows = {
                row: [np.pad(p, ((0, 0), (0, 0), (0, 0), (0, wide - p.shape[3]))) for p in parts]
                for row, parts in rows.items()
            }
        whole = {row: np.concatenate(parts, 1) for row, parts in rows.items()}
        for row, limit in self._limits.items():
            if row in whole:
                whole[row] = whole[row][:, :limit]
        longest = max(one.shape[1] for one in whole.values())
        some = next(iter(whole.values()))
        found = np.zeros((len(some), self._rows(), longest, *some.shape[2:]), some.dtype)
        for row, values in whole.items():
            found[:, row, : values.shape[1]] = values
        if not weights:
            return found
        return np.moveaxis(found, 2, 3)[..., :longest]  # [L, R, H, tokens, tokens]
