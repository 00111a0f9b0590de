"""Splits a layer into one layer for each device; the layers' ``shard`` methods use it.

This is MAX's way of splitting: each part is a separate layer around shards of the weights, and the
caller combines the results. On a mesh ``Module.to`` does it without such parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...graph.device import DeviceRef
from ...graph.placement.strategy import ShardingStrategy


def sharded(module: Any, devices: Iterable[DeviceRef]) -> list[Any]:
    """One copy of the layer for each device, whose weights are the shards of the layer's weights.

    Raises:
        ValueError: a weight has no strategy, or is itself a shard.
    """
    devices = list(devices)
    modules = [layer for _, layer in module.named_modules()]
    weights = {id(weight): weight for layer in modules for weight in layer._mx_weights.values()}
    shards = {key: weight.shard(devices) for key, weight in weights.items()}
    return [_copy(modules, shards, i) for i in range(len(devices))]


def _copy(modules: list[Any], shards: dict[int, list[Any]], i: int) -> Any:
    copies = {id(module): object.__new__(type(module)) for module in modules}
    for module in modules:
        new = copies[id(module)]
        statics = {name: vars(module)[name] for name in module._mx_statics}
        vars(new).update(statics, _mx_weights={}, _mx_locals={}, _mx_children={}, _mx_shared=set(),
                         _mx_statics=dict(module._mx_statics), _mx_cache=None, _mx_source=module)  # fmt: skip
        for attr, child in module._mx_children.items():
            if id(child) in copies:  # without parts of itself or of others that it holds
                setattr(new, attr, copies[id(child)])
        for attr, local in module._mx_locals.items():
            setattr(new, attr, shards[id(module._mx_weights[local])][i])
    return copies[id(modules[0])]


def strategy_by(last: Any) -> ShardingStrategy | None:
    """The strategy of a layer that is split by :func:`tensor_parallel`, by that of its last matmul, if any."""
    strategy = last.sharding_strategy
    if strategy is None or strategy.is_replicate:
        return strategy
    return ShardingStrategy.tensor_parallel(strategy.num_devices)


def tensor_parallel(
    module: Any, strategy: ShardingStrategy
) -> tuple[ShardingStrategy, ShardingStrategy]:
    """The strategies of a layer's first and last matmul, given the strategy of the layer.

    Raises:
        ValueError: the strategy is neither tensor_parallel nor replicate.
    """
    n = strategy.num_devices
    if strategy.is_replicate:
        return strategy, strategy
    if not strategy.is_tensor_parallel:
        raise ValueError(
            f"{type(module).__name__} takes ShardingStrategy.tensor_parallel or replicate"
        )
    return ShardingStrategy.rowwise(n), ShardingStrategy.columnwise(n)
