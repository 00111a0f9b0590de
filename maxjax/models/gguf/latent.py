"""Latent attention in GGUF files: ``kv_b_proj`` as two tensors, keys ``[C, N]`` and values ``[V, C]`` of each head.

llama.cpp so attends to latent vectors as to one KV head. Files from before April 2025 hold it as one tensor.

Source: ``DeepseekV2Model`` of llama.cpp's converter, and its src/models/deepseek2.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import CheckpointFormatError
from ...graph.weights import WeightData
from .metadata import Settings
from .pieces import computed

_BOTH, _KEYS, _VALUES = (f"self_attn.{part}_proj.weight" for part in ("kv_b", "k_b", "v_b"))


def join_keys_and_values(
    given: Settings, tensors: Mapping[str, WeightData]
) -> dict[str, WeightData]:
    """Join keys ``[H, C, N]`` and values ``[H, V, C]`` to ``kv_b_proj`` ``[H · (N + V), C]``."""
    found = dict(tensors)
    for name in tensors:
        if not name.endswith(_KEYS):
            continue
        front = name.removesuffix(_KEYS)
        pair: list[Any] = [found.pop(name), found.pop(front + _VALUES, None)]
        shapes: list[Any] = [
            () if one is None else tuple(map(int, one.logical_shape)) for one in pair
        ]
        if pair[1] is None or [len(shape) for shape in shapes] != [3, 3]:
            raise CheckpointFormatError(
                "keys without values of latents", path=given.path, tensor=name,
                expected="[H, C, N] and [H, V, C]", found=shapes,
            )  # fmt: skip
        (heads, size, keys), (others, values, other) = shapes
        if (heads, size) != (others, other):
            raise CheckpointFormatError(
                "keys and values differ in their heads or latents", path=given.path, tensor=name,
                expected=[heads, values, size], found=shapes[1],
            )  # fmt: skip

        def join(k: np.ndarray, v: np.ndarray) -> np.ndarray:
            return np.concatenate([k.swapaxes(1, 2), v], 1).reshape(-1, k.shape[1])

        new = front + _BOTH
        if new in found:
            raise CheckpointFormatError(
                "the tensor is there as a whole too", path=given.path, tensor=name
            )
        found[new] = computed(new, pair, join, (heads * (keys + values), size))
    return found


def split_keys_and_values(config: Any, tensors: Mapping[str, WeightData]) -> dict[str, WeightData]:
    """Split ``kv_b_proj`` into keys ``[H, C, N]`` and values ``[H, V, C]``; blocks are dequantised."""
    heads, keys, values = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    size = config.kv_lora_rank

    def split(both: np.ndarray) -> np.ndarray:
        return both.reshape(heads, keys + values, size)[:, :keys].swapaxes(1, 2)

    def rest(both: np.ndarray) -> np.ndarray:
        return both.reshape(heads, keys + values, size)[:, keys:]

    found: dict[str, WeightData] = {}
    for name, data in tensors.items():
        if not name.endswith(_BOTH):
            found[name] = data
            continue
        front = name.removesuffix(_BOTH)
        shape = tuple(map(int, data.logical_shape))
        if shape != (heads * (keys + values), size):
            raise CheckpointFormatError(
                "not the shape that the configuration says", tensor=name,
                expected=[heads * (keys + values), size], found=shape,
            )  # fmt: skip
        found[front + _KEYS] = computed(front + _KEYS, [data], split, (heads, size, keys))
        found[front + _VALUES] = computed(front + _VALUES, [data], rest, (heads, values, size))
    return found


def mla_widths(given: Settings) -> tuple[int, int, int]:
    """Return the features of a head's query with RoPE and without, and those of its value.

    Args:
        given: the file's metadata.
    """
    rotated = given.count("rope.dimension_count")
    width, value = (
        given.count(f"attention.{kind}_length_mla", given.count(f"attention.{kind}_length"))
        for kind in ("key", "value")
    )
    if width <= rotated:
        raise given.wrong("attention.key_length_mla", f"over {rotated}", width, "is out of range")
    return rotated, width - rotated, value
