"""Shard: what one device gets of a Weight, by its sharding strategy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import jax

from ..device import DeviceRef
from ..placement.strategy import shard_shape
from ..shape import StaticDim
from . import weight as weight_module
from .weight import Weight


class Shard(Weight):
    """A view of a part of another Weight, which holds the value. Made by ``Weight.shard``.

    Attributes:
        shard_idx: Which part.
        host: The Weight it is a part of.
    """

    def __init__(self, host: Weight, i: int, device: DeviceRef):
        strategy, self.host = host.sharding_strategy, host
        sizes = tuple(int(d) if isinstance(d, StaticDim) else d for d in host.shape)
        known = all(isinstance(size, int) for size in sizes)
        shape = shard_shape(strategy, sizes, i) if known else strategy(host, i).shape
        encoding = host.quantization_encoding
        super().__init__(
            f"{host.name}[{i}]", host.dtype, shape, device, encoding, host.align, strategy
        )
        self.shard_idx = i

    def of(self, host: Weight | None) -> Shard:
        """The same part of another Weight."""
        new = object.__new__(Shard)
        vars(new).update(vars(self), host=host)
        return new

    @property
    def _leaf(self) -> Any:
        return self._own if self.host._is_missing else self._as_array()

    @property
    def shape(self) -> Any:
        """The part's shape."""
        return weight_module.Shape(self._dims)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self._dims)

    @property
    def dtype(self) -> Any:
        """The element type: that of the whole."""
        return self.host.dtype

    def _as_array(self) -> jax.Array:
        return self._sharding_strategy(self.host._as_array(), self.shard_idx)

    def _put(self, leaf: Any) -> None:
        if self.shard_idx is None:  # the placeholder it is made with
            self._own = leaf
        else:
            self._refuse()

    def _set(self, value: Any) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(f"weight '{self.name}' is a shard: set the value of '{self.host.name}'")

    def shard(self, devices: Iterable[DeviceRef]) -> list[Weight]:
        """Refuses.

        Raises:
            ValueError: It is a shard already.
        """
        raise ValueError(f"Weight '{self.name}' was already sharded. Use __getitem__ instead.")

    @property
    def _plain(self) -> tuple[type[Weight], dict[str, Any]]:
        # On its own, as a leaf of a pytree, it is a plain Weight of the part.
        return Weight, {name: value for name, value in vars(self).items() if name != "host"}


weight_module.make_shard = Shard
