"""Attention of a decoder that embeds texts: each token sees those before and after it."""

from __future__ import annotations

from typing import Any

from ...dtype import DType
from ...errors import UserInputError
from ...nn.attention.both_ways import both_ways
from .attention import Cached, DecoderAttention, Step
from .config import DecoderConfig


class BothWays(DecoderAttention):
    """Attention to the tokens before and after each one, for embeddings: there is no cache.

    Args:
        config, slides, dtype: as for :class:`DecoderAttention`.
        reach: how far a token sees in a sliding layer; by default as far as the window is long.
    """

    def __init__(self, config: DecoderConfig, slides: bool, dtype: DType, reach: int | None = None):
        super().__init__(config, slides, dtype)
        window = self.sliding_window
        self.reach = None if window is None else window if reach is None else reach

    def __call__(self, x: Any, step: Step, cached: Cached, layer: Any) -> tuple[Any, Cached]:
        """:meth:`DecoderAttention.__call__` without a cache.

        Raises:
            UserInputError: there is a cache.
        """
        if cached:
            raise UserInputError(
                "a model whose attention sees both ways ('is_causal' is false, or "
                "'use_bidirectional_attention') embeds texts (maxjax.embed): it writes none"
            )
        q, k, v = self.project(x)
        q, k = self._rotated(step, q, k)
        y = both_ways(
            q, k, v, step.real(x.shape[1]), self.reach,
            scale=self.scale, soft_cap=self.soft_cap, softmax_dtype=self.softmax_dtype,
        )  # fmt: skip
        return self.o_proj(y.reshape(*x.shape[:-1], -1)).astype(x.dtype), cached
