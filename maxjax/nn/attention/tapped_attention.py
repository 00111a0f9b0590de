"""Attention for Modules, whose attention weights and heads can be captured and patched.

Shapes: batch B, T queries, S keys, H query heads, K KV heads, head dimension D.
"""

from __future__ import annotations

from typing import Any

import jax

from ...kernels.attention import attention, attention_weights, weighted_values
from ..layer import is_tapped, tap


def tapped_attention(
    query: Any, key: Any, value: Any, mask: Any = None, **options: Any
) -> jax.Array:
    """:func:`maxjax.kernels.attention.attention` in a Module, with the taps ``weights`` and ``heads``.

    The fast implementation never forms the attention weights. It is used unless the tap ``weights`` is requested.

    Args:
        query, key, value, mask, options: arguments of ``attention``.

    Returns:
        The result ``[B, T, H, D]``.
    """
    if not is_tapped("weights"):
        return tap("heads", attention(query, key, value, mask, **options))
    weights = tap("weights", attention_weights(query, key, mask, **options))  # [B, H, T, S]
    return tap("heads", weighted_values(weights, value))
