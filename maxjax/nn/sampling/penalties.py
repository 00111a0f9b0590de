"""LogitPenalties: frequency and presence penalties of tokens that were generated before, inside a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.ops.lift import lift
from ...graph.tensor_type import TensorType
from ..kernels.ragged import sequences


@dataclass(frozen=True)
class LogitPenalties:
    """Penalties that are subtracted from the logits of tokens that were generated before.

    Attributes:
        data: integers ``[entries, 2]``: a token id, and how often it was generated. Negative ids are ignored.
        offsets: offsets of the entries of each row of logits, ``[N + 1]``.
        frequency: penalty for each occurrence, ``[N]``.
        presence: penalty that is subtracted once, ``[N]``.

    Example:
        >>> entries, starts = jnp.array([[1, 3], [2, 1], [-1, 9]]), jnp.array([0, 3])
        >>> penalties = LogitPenalties(entries, starts, jnp.array([0.5]), jnp.array([1.0]))
        >>> penalties.apply(jnp.zeros((1, 3))).tolist()
        [[0.0, -2.5, -1.5]]
    """

    data: Any
    offsets: Any
    frequency: Any
    presence: Any

    @staticmethod
    def input_types(device: DeviceRef) -> list[TensorType]:
        """The types of the four attributes, as inputs of a graph."""
        return [
            TensorType(DType.int32, ["penalty_entries", 2], device),
            TensorType(DType.uint32, ["penalty_offsets"], device),
            TensorType(DType.float32, ["penalty_rows"], device),
            TensorType(DType.float32, ["penalty_rows"], device),
        ]

    @classmethod
    def from_inputs(cls, values: Sequence[Any]) -> LogitPenalties:
        """The penalties from four values, in the order of :meth:`input_types`."""
        data, offsets, frequency, presence = values
        return cls(data, offsets, frequency, presence)

    def apply(self, logits: Any) -> Any:
        """Logits ``[N, V]`` minus the penalties, in the same dtype."""
        return _penalised(logits, self.data, self.offsets, self.frequency, self.presence)

    def apply_with_bitmask(self, logits: Any, packed: Any, fill_val: float) -> Any:
        """Logits minus the penalties; a mask sets the logits of some tokens to ``fill_val``, and -inf stays -inf.

        Args:
            logits: logits ``[N, V]``, or ``[B, positions, V]`` with N = B · positions.
            packed: bit mask, int32 ``[…, V / 32 rounded up]``; a token is allowed if its bit is set, lowest bit first.
            fill_val: logit of the tokens that the mask excludes.
        """
        return _masked(
            logits, packed, fill_val, self.data, self.offsets, self.frequency, self.presence
        )


def _amounts(shape: Any, data: Any, offsets: Any, frequency: Any, presence: Any) -> Any:
    """The penalty of each logit, ``[N, V]``."""
    rows = sequences(offsets, data.shape[0])[0]
    tokens, counts = data[:, 0].astype(jnp.int32), data[:, 1].astype(jnp.float32)
    amounts = counts * frequency[rows] + presence[rows]
    within = (tokens >= 0) & (jnp.arange(data.shape[0]) < offsets[-1].astype(jnp.int32))
    columns = jnp.where(within, tokens, shape[1])  # an index past the end is dropped
    return jnp.zeros(shape, jnp.float32).at[rows, columns].add(amounts, mode="drop")


@lift
def _penalised(logits: Any, data: Any, offsets: Any, frequency: Any, presence: Any) -> Any:
    less = _amounts(logits.shape, data, offsets, frequency, presence)
    return (logits.astype(jnp.float32) - less).astype(logits.dtype)


@lift
def _masked(
    logits: Any,
    packed: Any,
    fill_val: float,
    data: Any,
    offsets: Any,
    frequency: Any,
    presence: Any,
) -> Any:
    flat = logits.reshape(-1, logits.shape[-1])
    bits = packed.reshape(flat.shape[0], -1)
    token = jnp.arange(flat.shape[1])
    kept = (bits[:, token // 32] >> (token % 32)[None]) & 1 == 1
    found = _penalised(flat, data, offsets, frequency, presence)
    return jnp.where(kept, found, jnp.asarray(fill_val, flat.dtype)).reshape(logits.shape)
