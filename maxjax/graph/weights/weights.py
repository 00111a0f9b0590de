"""Weights, MAX's protocol of weights by name; and re-exports of the values under MAX's path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, Self, runtime_checkable

from ..device import DeviceRef
from ..quantization import QuantizationEncoding
from ..shape import Shape as Shape
from ..weight.weight import Weight
from .load import WeightsAdapter as WeightsAdapter
from .weight_data import WeightData as WeightData


@runtime_checkable
class Weights(Protocol):
    """The protocol of weights by name: what ``load_weights`` returns, and any object with these methods.

    As in MAX, ``isinstance(x, Weights)`` tests for the methods. Functions of maxjax that read files take
    what ``load_weights`` returns (:class:`FileWeights`); they read other objects as state dicts:
    ``{name: one.data() for name, one in weights.items()}``.

    Example:
        >>> from maxjax.graph import Graph
        >>> isinstance(Graph("my_model").weights(), Weights), isinstance({}, Weights)
        (True, False)
    """

    @property
    def name(self) -> str:
        """The full name of this position; "" at the root."""
        ...

    def __getattr__(self, attr: str) -> Self: ...

    def __getitem__(self, index: int | str) -> Self: ...

    def exists(self) -> bool:
        """Whether a tensor has exactly this name."""
        ...

    def items(self) -> Iterator[tuple[str, Self]]:
        """Name and position of each tensor at or below this position."""
        ...

    def data(self) -> WeightData:
        """The tensor of this name."""
        ...

    def allocate(
        self,
        dtype: Any = None,
        shape: Any = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef | None = None,
    ) -> Weight:
        """A new Weight of this name, which has the tensor's value."""
        ...

    @property
    def allocated_weights(self) -> dict[str, Any]:
        """The data of all allocated Weights, by full name."""
        ...
