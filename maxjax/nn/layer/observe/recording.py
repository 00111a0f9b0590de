"""Recording: the captured values of several calls of a model by a maxjax function, concatenated along tokens.

Shapes: B rows of one call, T tokens, R rows of the whole run, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import UserInputError
from .captures import ByName, Captures
from .plans import Key


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


class Recording(ByName):
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

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._limits: dict[int, int] = {}
        self._joined: Captures | None = None

    def add(self, piece: Piece) -> None:
        """Add the values that a dispatch recorded."""
        self._joined = None
        self._pieces.append(piece)

    def end(self, row: int, tokens: int) -> None:
        """Drop the values of a row after this number of tokens, which are beyond the end of the text."""
        self._joined = None
        self._limits[row] = tokens

    @property
    def calls(self) -> list[Captures]:
        found = []
        for piece in self._pieces:
            if piece.width is not None:
                found.append(piece.found)
                continue
            for i in range(int(np.max(np.asarray(piece.counts), initial=0))):
                found.append(Captures(jax.tree.map(lambda a, i=i: a[i], piece.found.entries)))
        return found

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row that the model has read, int64 ``[R]``."""
        total = np.zeros(self._rows() + 1, np.int64)  # the last is that of padding, row -1
        for piece in self._pieces:
            np.add.at(total, piece.rows, np.asarray(piece.counts))
        return np.array(
            [min(n, self._limits.get(i, n)) for i, n in enumerate(total[:-1])], np.int64
        )

    def _rows(self) -> int:
        return 1 + max((max(piece.rows) for piece in self._pieces), default=-1)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for piece in self._pieces for key in piece.found))

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
        """Return the captured values of all dispatches, concatenated."""
        if self._joined is None:
            found = {}
            for key in dict.fromkeys(key for piece in self._pieces for key in piece.found.entries):
                pieces = [piece for piece in self._pieces if key in piece.found.entries]
                trees = [piece.found.entries[key] for piece in pieces]
                join = lambda *arrays, key=key, pieces=pieces: self._join(key, pieces, arrays)
                found[key] = jax.tree.map(join, *trees)
            self._joined = Captures(found)
        return self._joined

    def _join(self, key: Key, pieces: Sequence[Piece], arrays: Sequence[Any]) -> jax.Array:
        """Return an array of all calls, ``[R, tokens, ...]``, after an axis of layers if ``key`` has several."""
        is_weights = key.site == "weights"
        values = [_by_row(key, *pair) for pair in zip(pieces, map(np.asarray, arrays), strict=True)]
        if is_weights:  # [L, B, T, H, S]: the caches of the calls differ in S
            wide = max(value.shape[-1] for value in values)
            values = [
                np.pad(value, [*[(0, 0)] * 4, (0, wide - value.shape[-1])]) for value in values
            ]
        # Decode steps have tokens; a prompt has them too, unless its value is that of the last token alone.
        axes = next((v.ndim for v, p in zip(values, pieces, strict=True) if p.width is None), None)
        parts: dict[int, list[np.ndarray]] = {}  # [L, tokens, ...] for each text
        for piece, value in zip(pieces, values, strict=True):
            counts = np.asarray(piece.counts)
            if axes is None:
                has_tokens = is_weights or value.shape[2:3] == (piece.width,)
            else:
                has_tokens = value.ndim >= axes
            if not has_tokens:
                value, counts = value[:, :, None], np.minimum(counts, 1)
            for i, row in enumerate(piece.rows):
                if row >= 0:
                    parts.setdefault(row, []).append(value[:, i, : counts[i]])
        texts = {
            row: np.concatenate(own, 1)[:, : self._limits.get(row)] for row, own in parts.items()
        }
        longest = max(text.shape[1] for text in texts.values())
        one = next(iter(texts.values()))
        found = np.zeros((len(one), self._rows(), longest, *one.shape[2:]), one.dtype)
        for row, text in texts.items():
            found[:, row, : text.shape[1]] = text
        if is_weights:
            found = np.moveaxis(found, 2, 3)[..., :longest]  # [L, R, H, tokens, tokens]
        return jnp.asarray(found if key.layers else found[0])


def _by_row(key: Key, piece: Piece, given: np.ndarray) -> np.ndarray:
    """Return what one dispatch recorded as ``[L, B, ...]``, or ``[L, B, T, ...]`` if it has an axis of tokens.

    Raises:
        UserInputError: the array has no axis of rows.
    """
    is_decode = piece.width is None
    value = given if key.layers else np.expand_dims(given, int(is_decode))
    axis = 2 if is_decode else 1
    if value.ndim <= axis or value.shape[axis] != len(piece.rows):
        raise UserInputError(
            f"'{key.name}' gives {given.shape[1:] if is_decode else given.shape} for "
            f"{len(piece.rows)} rows, which is no value for each row and token: use .calls"
        )
    if is_decode:
        value = np.moveaxis(value, 0, 2)  # each step is a token
    if key.site != "weights":
        return value
    return value[..., 0, :] if is_decode else np.moveaxis(value, 3, 2)  # [L, B, T, H, S]
