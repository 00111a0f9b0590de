"""Embedding: looks up rows of an embedding table by token id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..dtype import DType
from ..graph.device import DeviceRef
from ..graph.kind import on_arrays
from ..graph.placement.arrays import beside, replicate_last_axis
from ..graph.placement.fsdp import can_be_in_place, in_place
from ..graph.placement.specs import parts
from ..graph.placement.split import TABLE
from ..graph.placement.strategy import ShardingStrategy
from ..graph.quantization import QuantizationEncoding
from ..graph.weight.weight import Weight
from ..kernels import embed
from .layer.sharded import sharded
from .low_rank import LowRank, added

_NORMAL = jax.nn.initializers.normal(0.02)
_OF_UPDATE = jax.nn.initializers.normal(1.0)


class Embedding(LowRank):
    """An embedding table, whose rows are looked up by index. Arguments in MAX's order.

    Args:
        vocab_size: number of rows of the table.
        hidden_dim: length of a row.
        dtype: dtype of the table.
        device: device that the table is declared on; None means the CPU.
        quantization_encoding: block format of a quantised table, or None. The table is then uint8
            ``[vocab_size, bytes]``, and looked-up rows are float32.
        name: name of the weight instead of ``"weight"``, used unchanged as in MAX.

    Attributes:
        weight: Weight ``[vocab_size, hidden_dim]``.

    Example:
        >>> table = Embedding(2, 3)
        >>> _ = table.load_state_dict({"weight": jnp.arange(6.0).reshape(2, 3)})
        >>> print(table(jnp.array([1, 0, 1])))
        [[3. 4. 5.]
         [0. 1. 2.]
         [3. 4. 5.]]
    """

    out_axis = 1
    update_names = {
        **LowRank.update_names,
        "lora_A": "lora_embedding_A",
        "lora_B": "lora_embedding_B",
    }

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        dtype: Any = DType.float32,
        device: DeviceRef | None = None,
        quantization_encoding: QuantizationEncoding | None = None,
        name: str | None = None,
    ):
        super().__init__()
        self.device = device = device or DeviceRef.CPU()
        shape = (vocab_size, hidden_dim)
        if quantization_encoding is not None and quantization_encoding.is_gguf:
            dtype, shape = DType.uint8, quantization_encoding.packed_shape(shape)
        self.weight = Weight(name or "weight", dtype, shape, device, quantization_encoding)

    @on_arrays
    def __call__(self, indices: Any) -> Any:
        """Integers ``[...]`` → ``[..., hidden_dim]`` in the dtype of the table.

        The table of a quantised layer gives float32.
        An index of -1 means the last row, as in NumPy. An index outside the table gives a row of
        NaN: compiled code cannot raise, and a wrong row would go unnoticed.

        Raises:
            ValueError: ``indices`` are not integers.
        """
        return self._result(indices)

    def _result(self, indices: Any) -> Any:
        rows = _integers(indices)
        if self.weight.sharding is None and self.lora is None:
            return embed(self.weight, rows)
        if can_be_in_place(self.weight, rows) and rows.size <= int(self.weight.logical_shape[0]):
            found = in_place(self._looked_up, self.weight, rows, features=1, whole=True)
        else:
            found = self._looked_up(self.weight, rows)
        if self.lora is not None and not self.lora.merged:
            found = added(self, found, embed(jnp.asarray(self.lora_A).T, rows))
        return replicate_last_axis(found, self.weight)

    def _looked_up(self, table: Any, rows: jax.Array) -> jax.Array:
        if parts(self.weight, 0) > 1 and rows.size == 1:
            # The row is looked up twice: on a GPU, XLA turns a lookup of a single row into a slice, and
            # gathers a sharded table in full before it slices it.
            return embed(table, jnp.stack([rows, rows]))[0]
        return embed(table, rows)

    def sharding_rules(self) -> dict[str, Any]:
        """Splits rows (the vocabulary), or columns where the rows do not divide evenly.

        ``fsdp`` splits columns: each device looks up its columns of all rows that any device needs, and the
        devices exchange these results, which are far smaller than the table.
        """
        return {"weight": replace(TABLE, fsdp=1), **super().sharding_rules()}

    @property
    def sharding_strategy(self) -> ShardingStrategy | None:
        """The sharding strategy of the table."""
        return self.weight.sharding_strategy

    @sharding_strategy.setter
    def sharding_strategy(self, strategy: ShardingStrategy) -> None:
        self.weight.sharding_strategy = strategy

    def shard(self, devices: Iterable[DeviceRef]) -> list[Any]:
        """Returns one Embedding for each device, each with its shard of the table.

        Raises:
            ValueError: ``sharding_strategy`` is not set.
        """
        self.refuse_update("shard()")
        return sharded(self, devices)

    def initializer(self, name: str) -> Any:
        """Normal with standard deviation 0.02. LoRA weights as in PEFT: A is zero, B normal with deviation 1."""
        if name.endswith("lora_embedding_A"):
            return jax.nn.initializers.zeros
        return (
            _OF_UPDATE
            if name.endswith("lora_embedding_B")
            else super().initializer(name) or _NORMAL
        )


def _integers(indices: Any) -> jax.Array:
    """The indices of an Embedding as an array of 32 bits or more: fewer may not hold the number of rows."""
    rows = jnp.asarray(indices)
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(f"an Embedding takes integers as indices, not {rows.dtype}")
    return rows.astype(jnp.int32) if rows.dtype.itemsize < 4 else rows


class VocabParallelEmbedding(Embedding):
    """An Embedding whose rows are split over the devices. Arguments in MAX's order.

    Called with signal buffers, as in MAX, it returns a list with the complete result for each device.

    Args:
        vocab_size, hidden_dim, dtype, quantization_encoding, name: as in Embedding.
        devices: devices; the table is declared on the first.

    Example:
        >>> table = VocabParallelEmbedding(6, 4, "float32", [DeviceRef.CPU()])
        >>> list(table.raw_state_dict())
        ['weight']
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_dim: int,
        dtype: Any = DType.float32,
        devices: Sequence[DeviceRef] = (),
        quantization_encoding: QuantizationEncoding | None = None,
        name: str | None = None,
    ):
        device = devices[0] if devices else DeviceRef.CPU()
        super().__init__(vocab_size, hidden_dim, dtype, device, quantization_encoding, name)
        self.devices = list(devices)
        self.num_devices = len(self.devices)
        if self.num_devices > 1:
            self.sharding_strategy = ShardingStrategy.rowwise(self.num_devices)
            self.distributed_embeddings = self.shard(self.devices)

    @on_arrays
    def __call__(self, indices: Any, signal_buffers: Iterable[Any] | None = None) -> Any:
        """Looks up rows as Embedding does; with ``signal_buffers``, one for each device, returns a list of results.

        Raises:
            ValueError: there is not one signal buffer for each device.
        """
        if signal_buffers is None:
            return self._result(indices)
        buffers = list(signal_buffers)
        if len(buffers) != max(len(self.devices), 1):
            raise ValueError(
                f"{len(buffers)} signal buffers for the {len(self.devices)} devices of a layer"
            )
        if len(buffers) == 1:
            return [self._result(indices)]
        self.refuse_update("signal_buffers")
        each = [beside(jnp.asarray(indices), getattr(one, "value", one)) for one in buffers]
        rows, start, size = [], 0, int(self.weight.logical_shape[0])
        for shard, places in zip(self.distributed_embeddings, each, strict=True):
            count = int(shard.weight.shape[0])
            at = _integers(places)
            at = jnp.where(at < 0, at + size, at)
            # An index outside the whole table is one outside each shard, which gives NaN.
            beyond = (at < 0) | (at >= size)
            inside = (at >= start) & (at < start + count)
            local = jnp.where(inside, at - start, jnp.where(beyond, count, 0)).astype(at.dtype)
            rows.append(jnp.where((inside | beyond)[..., None], shard._result(local), 0))
            start += count
        total = rows[0]
        for one in rows[1:]:
            total = total + beside(one, total)
        return [beside(total, one) for one in rows]
