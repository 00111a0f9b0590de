"""Penalties of tokens that a text has already, inside of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.ops.lift import lift
from ...graph.tensor_type import TensorType
from ..ragged import sequences


@dataclass(frozen=True)
class LogitPenalties:
    """What is subtracted from the logits of tokens that were generated before.

    Attributes:
        data: integers ``[entries, 2]``: a token, and how often it was generated; negative tokens count for nothing.
        offsets: ``[N + 1]``, where the entries of each row begin.
        frequency: ``[N]``, subtracted for each time.
        presence: ``[N]``, subtracted once.

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
        """The penalties of four values, in the order of :meth:`input_types`."""
        data, offsets, frequency, presence = values
        return cls(data, offsets, frequency, presence)

    def apply(self, logits: Any) -> Any:
        """Logits ``[N, V]`` without the penalties, in the same dtype."""
        return _penalised(logits, self.data, self.offsets, self.frequency, self.presence)

    def apply_with_bitmask(self, logits: Any, packed: Any, fill_val: float) -> Any:
        """The same, with the logits of tokens that a mask leaves out replaced, and those at -inf kept.

        Args:
            logits: ``[N, V]``, or ``[B, positions, V]`` with N rows.
            packed: int32 ``[…, V / 32 rounded up]``; a token stays where its bit is set, the lowest bit first.
            fill_val: logit of tokens that are left out.
        """
        return _masked(
            logits, packed, fill_val, self.data, self.offsets, self.frequency, self.presence
        )


def _amounts(shape: Any, data: Any, offsets: Any, frequency: Any, presence: Any) -> Any:
    """What is subtracted of each of ``[N, V]`` logits."""
    rows = sequences(offsets, data.shape[0])[0]
    tokens, counts = data[:, 0].astype(jnp.int32), data[:, 1].astype(jnp.float32)
    amounts = counts * frequency[rows] + presence[rows]
    within = (tokens >= 0) & (jnp.arange(data.shape[0]) < offsets[-1].astype(jnp.int32))
    columns = jnp.where(within, tokens, shape[1])  # past the end: left out
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
    masked = jnp.where(kept, flat, jnp.asarray(fill_val, flat.dtype))
    less = _amounts(flat.shape, data, offsets, frequency, presence)
    found = (masked.astype(jnp.float32) - less).astype(flat.dtype)
    return jnp.where(kept & (flat != -jnp.inf), found, masked).reshape(logits.shape)
