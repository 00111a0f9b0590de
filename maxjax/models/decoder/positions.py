"""Learned positions: a decoder with an embedding table of positions instead of RoPE (GPT-2, OPT).

Shapes: B sequences, T tokens, hidden size E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ...dtype import DType
from ...errors import UserInputError
from ...graph.device import DeviceRef
from ...graph.placement.specs import Split
from ...graph.placement.strategy import ShardingStrategy
from ...graph.value import unwrap
from ...nn.embedding import Embedding
from ...nn.kv_cache.cache import KVCache
from ..config import setting
from .aliases import spelling
from .attention import Cached, Step
from .config import DecoderConfig, own
from .model import Decoder, DecoderModel
from .rope import Rope
from .step import nan_beyond


@dataclass(frozen=True)
class PositionedConfig(DecoderConfig):
    """The settings of a decoder with learned positions: LayerNorm, no RoPE, no grouped KV heads, no windows."""

    num_key_value_heads: int | None = own(None)
    head_dim: int | None = own(None)
    max_position_embeddings: int = setting(default=2048, minimum=1, held="axis")
    tie_word_embeddings: bool = setting(default=True)
    sliding_window: int | None = own(None)
    norm: str = own("layer")
    rope: Rope | None = own(None)  # type: ignore[assignment]

    @classmethod
    def ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, None]:
        """Returns that there is no RoPE."""
        return {"rope": None}


class PositionedModel(DecoderModel):
    """Embeddings of tokens and positions, layers and final norm.

    Attributes:
        embed_positions: embedding table of the positions.
        max_length: number of positions.
        first_row: row of the table for position 0.
    """

    first_row: ClassVar[int] = 0

    def make_embeddings(self, config: DecoderConfig, dtype: DType) -> None:
        """Makes the tables of tokens and of positions."""
        super().make_embeddings(config, dtype)
        self.max_length = config.max_position_embeddings
        rows = self.max_length + self.first_row
        self.embed_positions = Embedding(rows, config.hidden_size, dtype, DeviceRef.CPU())

    def sharding_rules(self) -> dict[str, Any]:
        """Replicates the table of positions, which is small."""
        name = spelling(self, "embed_positions")
        return {f"{name}.weight": Split(ShardingStrategy.replicate(1))}

    def learned(self, ids: jax.Array, step: Step) -> jax.Array:
        """The embeddings of the tokens' positions; positions beyond the table get the last row."""
        positions = step.positions(1 if ids.ndim == 1 else ids.shape[1])  # [B or 1, T]
        positions = positions[:, 0] if ids.ndim == 1 else positions
        # NaN here would reach other tokens, because attention multiplies masked values by zero.
        rows = jnp.minimum(positions, self.max_length - 1) + self.first_row
        return self.embed_positions(rows).astype(self.dtype.np)

    def embed(self, ids: jax.Array, step: Step) -> jax.Array:
        """The sums of token and position embeddings, ``[B, T, E]`` or ``[B, E]``."""
        return super().embed(ids, step) + self.learned(ids, step)

    def __call__(
        self, ids: jax.Array, step: Step, cached: Cached, at: jax.Array | None = None
    ) -> tuple[jax.Array, Cached]:
        """As :class:`DecoderModel`; states of tokens beyond the learned positions are NaN."""
        x, cached = super().__call__(ids, step, cached, at)
        length = 1 if ids.ndim == 1 else ids.shape[1]
        step = step._replace(counts=None)
        return nan_beyond(self.max_length, x, step, length, at if ids.ndim == 2 else None), cached


class PositionedDecoder(Decoder):
    """A language model with learned positions.

    A sequence longer than ``max_length`` is refused outside of ``jax.jit``, where lengths are known;
    inside it, logits of tokens beyond that length are NaN.
    """

    model_class: ClassVar[Any] = PositionedModel

    def __call__(
        self, ids: Any, cache: KVCache | None = None, *, lengths: Any = None, last: bool = False
    ) -> Any:
        """As a call of :class:`Decoder`.

        Raises:
            UserInputError: as for Decoder, or a token is beyond the last learned position.
        """
        shape = getattr(unwrap(ids), "shape", ())
        # An exported program may be for any length.
        if cache is None and lengths is None and len(shape) == 2 and isinstance(shape[1], int):
            self._check_length(shape[1])
        return super().__call__(ids, cache, lengths=lengths, last=last)

    def _step(
        self, starts: jax.Array, counts: jax.Array | None, length: int, cache: KVCache | None
    ) -> Step:
        after = starts + (length if counts is None else counts)
        if not isinstance(after, Tracer) and after.is_fully_addressable:
            self._check_length(int(after.max()))
        return super()._step(starts, counts, length, cache)

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise UserInputError(
                f"a text of {length} tokens is longer than the {self.max_length} positions "
                f"that this {type(self).__name__} has learned: shorten it"
            )
