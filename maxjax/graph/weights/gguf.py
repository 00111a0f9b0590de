"""Floor 3. GGUFWeights: a cursor over a GGUF file, with the names the file has.

Blocks that stay packed are uint8 in MAX's byte view and carry their encoding; everything
else is an array of its own type. ``maxjax.models.gguf`` has the names of Hugging Face for
them. Below: cursor. Above: load.
"""

from __future__ import annotations

import os
from typing import Any

from ...storage import open_checkpoint
from ..device import DeviceRef
from ..quantization import QuantizationEncoding
from ..weight import Weight
from .cursor import Weights, _Family
from .weight_data import WeightData, as_leaf


class GGUFWeights(Weights):
    """Weights of a GGUF file, or of a split set by any of its parts.

    Args:
        source: The file; or an open ``gguf.GGUFReader``, whose file is opened again.
        tensors: MAX's own bookkeeping; not looked at.
        prefix: The place to start at.
        allocated: A dict to enter allocated data in.

    :attr:`metadata` has the file's keys and values. ``allocate`` takes shapes counted in
    weights; a Weight of packed blocks has MAX's byte view, and ``logical_shape`` beside it.

    Raises:
        CheckpointError: As for :func:`load_weights`.
    """

    def __init__(
        self,
        source: Any,
        tensors: Any = None,
        prefix: str = "",
        allocated: dict[str, Any] | None = None,
    ):
        del tensors
        reader = getattr(getattr(source, "data", None), "filename", None)
        path = os.fsdecode(source if reader is None else reader)
        self._family = _Family(open_checkpoint(path), path, allocated)
        self._prefix = prefix

    @property
    def metadata(self) -> dict[str, Any]:
        """Keys and values of the file's header."""
        return self._family.open_table().metadata

    @property
    def _alignment(self) -> int:  # type: ignore[override]
        return int(self.metadata.get("general.alignment", 32))

    def keys(self) -> list[str]:
        """Full names of the tensors at or below this place, in the file's order."""
        below = {str(name): name for name in super().keys()}
        return [below[name] for name in self._family.open_table().entries if name in below]

    def allocate(
        self,
        dtype: Any = None,
        shape: Any = None,
        quantization_encoding: QuantizationEncoding | None = None,
        device: DeviceRef | None = None,
    ) -> Weight:
        """A new Weight of this full name, whose value is read when it is first used.

        Args:
            dtype: Another float width to convert to; packed blocks are decoded for it. None
                keeps the file's.
            shape: Checked against the file's, counted in weights.
            quantization_encoding: Which blocks are expected; any, for a tensor of blocks.
            device: Where it is declared to live; the CPU by default.

        Raises:
            KeyError: No such tensor.
            ValueError: Another shape, a dtype that is no float width, or an encoding for a
                tensor that is not packed.
        """
        # As in MAX, the data is entered even if it is refused below.
        self._family.allocated[self.name] = self.data()
        return super().allocate(dtype, shape, quantization_encoding, device)

    def _check_encoding(self, data: WeightData, encoding: QuantizationEncoding) -> None:
        if data.quantization_encoding is None:
            raise ValueError(
                f"'{self.name}' is unquantized ({data.dtype}), not {encoding.value}: "
                "leave quantization_encoding away"
            )


as_leaf(GGUFWeights)
