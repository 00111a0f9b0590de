"""Floor 4. MAX's two layers that are split over the vocabulary.

On one device they are a Linear and an Embedding; on a mesh ``Module.to`` splits them over
``model`` by rows, or by columns where the vocabulary does not divide. There are no signal
buffers and no lists of tensors, one for each device: arrays are whole, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..graph.device import DeviceRef
from ..graph.placement import Split
from ..graph.quantization import QuantizationEncoding
from ..graph.sharding import ShardingStrategy
from ..graph.weight import Weight
from .embedding import Embedding
from .linear import Linear


class ColumnParallelLinear(Linear):
    """A Linear whose outputs are split over the devices: the head of a language model.

    Args (in MAX's order):
        in_dim, out_dim: Length of the last axis before and after.
        dtype: Of weight and bias.
        devices: Where the weights are declared to live: the first of them.
        tied_weight: A weight of another layer to use instead of one of its own, as of the
            Embedding.
        kwargs: As of Linear.

    Example:
        >>> import maxjax
        >>> head = ColumnParallelLinear(4, 6, "float32", [DeviceRef.CPU()])
        >>> tuple(head.to(maxjax.make_mesh(model=1)).weight.sharding.spec)
        (None, None)
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: Any,
        devices: Sequence[DeviceRef],
        tied_weight: Weight | None = None,
        **kwargs: Any,
    ):
        device = devices[0] if devices else DeviceRef.CPU()
        super().__init__(in_dim, out_dim, dtype, device, **kwargs)
        if tied_weight is not None:
            self.set_shared_weight("weight", tied_weight)

    def sharding_rules(self) -> dict[str, Any]:
        """By rows, or by columns where they do not divide."""
        rows, columns = ShardingStrategy.rowwise(1), ShardingStrategy.columnwise(1)
        return {"weight": Split(rows, instead=columns), "bias": rows}


class VocabParallelEmbedding(Embedding):
    """An Embedding whose rows are split over the devices. Arguments in MAX's order.

    Args:
        vocab_size, hidden_dim, dtype, quantization_encoding, name: As of Embedding.
        devices: Where the table is declared to live: the first of them.

    Example:
        >>> table = VocabParallelEmbedding(6, 4, "float32", [DeviceRef.CPU()])
        >>> list(table.raw_state_dict())
        ['weight']
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        dtype: Any,
        devices: Sequence[DeviceRef],
        quantization_encoding: QuantizationEncoding | None = None,
        name: str | None = None,
    ):
        device = devices[0] if devices else DeviceRef.CPU()
        super().__init__(vocab_size, hidden_dim, dtype, device, quantization_encoding, name)
