"""Splits a layer into one layer for each device; the layers' ``shard`` methods use it.

This is MAX's way of sharding: each device gets a separate layer with shards of the weights, and the
caller combines the results. On a mesh, ``Module.to`` shards weights without separate layers.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping
from typing import Any

from ...graph.device import DeviceRef
from ...graph.placement.split import Split
from ...graph.placement.strategy import ShardingStrategy


def sharded(module: Any, devices: Iterable[DeviceRef], without: Container[str] = ()) -> list[Any]:
    """One copy of the layer for each device, whose weights are the shards of the layer's weights.

    Of a layer in it whose weight is split by columns, only the first copy has the bias.

    Args:
        without: names of child layers that are left out, because the caller assigns them.

    Raises:
        ValueError: a weight has no strategy, or is itself a shard.
    """
    devices = list(devices)
    left = {
        id(layer)
        for name, child in module._mx_children.items()
        if name in without
        for layer in _layers(child)
    }
    modules = [layer for layer in _layers(module) if id(layer) not in left]
    shards = {id(weight): weight.shard(devices) for weight in _weights(modules)}
    return [_copy(modules, shards, i) for i in range(len(devices))]


def _layers(module: Any) -> list[Any]:
    return [layer for _, layer in module.named_modules()]


def _weights(modules: Iterable[Any]) -> list[Any]:
    """The distinct weights of layers."""
    found = (one for layer in modules for one in layer._mx_weights.values())
    return list({id(weight): weight for weight in found}.values())


class ReplicatedLayer:
    """A mixin of Module for layers that are replicated on every device."""

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The strategy of the weights.

        Raises:
            ValueError: a strategy other than ``replicate`` is assigned.
        """
        return next((weight.sharding_strategy for weight in _weights(_layers(self))), None)

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        if not strategy.is_replicate:
            raise ValueError(f"{type(self).__name__} is replicated on every device: its strategy "
                             "can only be ShardingStrategy.replicate")  # fmt: skip
        self._set_sharding_strategy(strategy)

    def _set_sharding_strategy(self, strategy: ShardingStrategy) -> None:
        # A separate method, because classes derived from MAX's gates extend it.
        for weight in _weights(_layers(self)):
            weight.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns one layer for each device.

        Raises:
            ValueError: ``sharding_strategy`` is not set.
        """
        return sharded(self, devices)


def _copy(modules: list[Any], shards: dict[int, list[Any]], i: int) -> Any:
    copies = {id(module): object.__new__(type(module)) for module in modules}
    for module in modules:
        new = copies[id(module)]
        statics = {name: vars(module)[name] for name in module._mx_statics}
        vars(new).update(statics, _mx_weights={}, _mx_locals={}, _mx_children={}, _mx_shared=set(),
                         _mx_statics=dict(module._mx_statics), _mx_cache=None, _mx_source=module)  # fmt: skip
        for attr, child in module._mx_children.items():
            if id(child) in copies:  # children that are shards of this or other layers are left out
                # Not by setattr: a LayerList without some of its layers would refuse the next number.
                vars(new)[attr] = new._mx_children[attr] = copies[id(child)]
        for attr, local in module._mx_locals.items():
            setattr(new, attr, shards[id(module._mx_weights[local])][i])
        if i and _is_summed(module):
            new.bias = None
    return copies[id(modules[0])]


def _is_summed(module: Any) -> bool:
    """Whether the results of the copies of a layer must be summed, so that only one may have the bias."""
    if not {"weight", "bias"} <= module._mx_locals.keys():
        return False
    return module.weight.sharding_strategy.sharded_axis not in (0, -2, None)


def strategy_by(last: Any) -> ShardingStrategy | None:
    """The strategy of a layer that is split by :func:`split_layers`, derived from that of its last matmul."""
    strategy = last.sharding_strategy
    if strategy is None or strategy.is_replicate:
        return strategy
    return ShardingStrategy.tensor_parallel(strategy.num_devices)


def split_layers(module: Any, strategy: ShardingStrategy, rules: Mapping[str, Split]) -> None:
    """Gives the layers and Weights in a layer their strategies, given the strategy of the layer.

    Args:
        rules: attribute path → its Split, if the strategy is tensor_parallel.

    Raises:
        ValueError: the strategy is neither tensor_parallel nor replicate.
    """
    if not (strategy.is_replicate or strategy.is_tensor_parallel):
        raise ValueError(
            f"{type(module).__name__} takes ShardingStrategy.tensor_parallel or replicate"
        )
    for path, split in rules.items():
        own = strategy if strategy.is_replicate else ShardingStrategy(strategy.num_devices, split)
        functools.reduce(getattr, path.split("."), module).sharding_strategy = own
