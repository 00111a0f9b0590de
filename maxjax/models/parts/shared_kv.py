"""Layers that attend to the keys and values of an earlier layer (arXiv:2405.12981)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...nn.kv_cache.kinds import KeysValues, Shared

SHARED = "shared"
"""Name of the cache group of the layer with a sliding window whose keys and values later layers read."""


def kept_or_shared(
    kinds: Sequence[str], shared: int, layer: int, kept: KeysValues
) -> dict[str, KeysValues | Shared]:
    """Return what the cache holds for a layer of a model whose last layers have no keys and values of their own.

    Each of these attends to the last layer of its own kind that has some. If that is a layer with a sliding window,
    it keeps all tokens: after a long prompt a rotating cache would no longer hold the keys that later layers need.

    Args:
        kinds: "full_attention" or "sliding_attention" for each layer.
        shared: number of last layers without keys and values.
        layer: index of the layer.
        kept: the layer's keys and values, with its window, if it has some.

    Example:
        >>> kinds = ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
        >>> for layer in range(4):
        ...     print(kept_or_shared(kinds, 1, layer, KeysValues(1, 4, 8)))
        {'sliding': KeysValues(heads=1, width=4, window=8, query_heads=None)}
        {'shared': KeysValues(heads=1, width=4, window=None, query_heads=None)}
        {'full': KeysValues(heads=1, width=4, window=None, query_heads=None)}
        {'shared': Shared(layer=1)}
    """
    first, kind = len(kinds) - shared, kinds[layer]
    source = max(i for i in range(first) if kinds[i] == kind)
    is_sliding = kind == "sliding_attention"
    group = SHARED if is_sliding else "full"
    if layer >= first:
        return {group: Shared(source)}
    if is_sliding and not (shared and layer == source):
        return {"sliding": kept}
    return {group: dataclasses.replace(kept, window=None)}
