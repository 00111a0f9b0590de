"""Floor 3. A cursor without a checkpoint: names to allocate Weights from."""

from __future__ import annotations

from typing import Any

from ...dtype import DType
from ..device import DeviceRef
from ..quantization import QuantizationEncoding
from ..weight import Weight
from .cursor import Weights, _Family


class _NoTable:
    """A table of tensors that has only what was allocated, and no data."""

    format = "no"

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}

    def close(self) -> None:
        """There are no files."""


class UnreadWeights(Weights):
    """``Graph.weights()``: allocates Weights by name that a weights registry fills later.

    Example:
        >>> from maxjax.graph import Graph
        >>> weights = Graph("my_model").weights()
        >>> weights.layers[0].attention.weight.allocate("float32", (4, 4)).name
        'layers.0.attention.weight'
        >>> weights.layers[0].attention.weight.exists(), weights.layers[0].mlp.exists()
        (True, False)
    """

    def __init__(self) -> None:
        self._family = _Family(_NoTable(), "Graph.weights()")  # type: ignore[arg-type]
        self._prefix = ""

    def allocate(
        self,
        dtype: Any = None,
        shape: Any = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef | None = None,
    ) -> Weight:
        """A new Weight of this name.

        Raises:
            ValueError: Without dtype and shape: there is no file to take them from.
        """
        if dtype is None or shape is None:
            raise ValueError(
                f"'{self.name}': without a checkpoint, allocate() needs a dtype and a shape"
            )
        weight = Weight(
            self.name, DType.of(dtype), shape, device or DeviceRef.CPU(), quantization_encoding
        )
        self._family.open_table().entries[self.name] = weight  # type: ignore[assignment]
        self._family.__dict__.pop("names", None)
        return weight

    def data(self) -> Any:
        """Raises KeyError: there is no data."""
        raise KeyError(
            f"'{self.name}': these weights have no data; open a checkpoint with load_weights"
        )
