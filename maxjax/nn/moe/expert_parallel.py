"""Experts on lists of tensors, one for each device, under MAX's path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..transformer.sequence import forward_sharded_layers


def forward_moe_sharded_layers(
    shards: Sequence[Callable[[Any], Any]],
    xs: Sequence[Any],
    eplb_counter_buffers: Any = None,
    layer_idx_per_device: Any = None,
) -> list[Any]:
    """Each layer's result for the tensor of its device: :func:`forward_sharded_layers`.

    Args:
        shards: layers.
        xs: a tensor for each.
        eplb_counter_buffers, layer_idx_per_device: of MAX's balancing of experts; must be None.

    Raises:
        ValueError: there are not as many tensors as layers.
        NotImplementedError: experts are to be balanced.
    """
    if eplb_counter_buffers is not None or layer_idx_per_device is not None:
        raise NotImplementedError("experts are not balanced over devices: nn.MoE on a mesh with an expert axis "
                                  "(Module.to) gives each device its part of every batch")  # fmt: skip
    return forward_sharded_layers(shards, xs)
