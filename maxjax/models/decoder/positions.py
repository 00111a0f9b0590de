"""Learned positions: a decoder with an embedding table of positions instead of RoPE (GPT-2, OPT).

Shapes: B sequences, T tokens, hidden size E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...dtype import DType
from ...graph.device import DeviceRef
from ...graph.placement.specs import Split
from ...graph.placement.strategy import ShardingStrategy
from ...nn.embedding import Embedding
from ..config import setting
from ..parts.aliases import spelling
from ..parts.rotary import Rope
from .attention import Step
from .config import DecoderConfig, own
from .model import Decoder, DecoderModel


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


class PositionedDecoder(Decoder):
    """A language model with learned positions."""

    model_class: ClassVar[Any] = PositionedModel

    @property
    def position_limit(self) -> int:
        """The number of positions that the model has learned."""
        return self.max_length
