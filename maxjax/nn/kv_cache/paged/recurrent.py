"""MAX's data classes for recurrent states in a pool of pages: settings, and inputs of programs.

A page holds the states of all layers for one request; each layer has a row of it. maxjax's own models keep such
states in a ``maxjax.nn.KVCache``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from ....driver import Buffer
from ....dtype import DType
from ....graph import ops
from ....graph.device import DeviceRef
from ....graph.tensor_type import BufferType, TensorType
from ....graph.value import TensorValue
from .params import KVCacheParamInterface, MultiKVCacheParams, TreeNode
from .server_settings import CacheLeafKind, SpeculativeMethod

_Tensor = TypeVar("_Tensor")
_Buffer = TypeVar("_Buffer")

PACKED_PAGE_STRIDE = -1
"""The stride of pages that means that pages are contiguous."""


def packed_page_stride(like: Any) -> Any:
    """``[PACKED_PAGE_STRIDE]`` in int64: a Buffer for a Buffer, a TensorType for a BufferType, else a TensorValue.

    Example:
        >>> packed_page_stride(Buffer(DType.float32, (1,))).to_numpy()
        array([-1])
    """
    if isinstance(like, Buffer):
        return Buffer.from_numpy(np.array([PACKED_PAGE_STRIDE], np.int64))
    if isinstance(like, BufferType):
        return TensorType(DType.int64, [1], DeviceRef.CPU())
    return ops.constant([PACKED_PAGE_STRIDE], DType.int64, DeviceRef.CPU())


@dataclass(frozen=True)
class RecurrentStateRegion:
    """The shape of one kind of recurrent state.

    Attributes:
        leaf_id: name of the state.
        num_layers: number of layers.
        row_shape: shape of the state of one layer, on each device.
        dtype: dtype of the state.
        scratch: whether the state belongs to one request only and is not cached for prefixes.

    Example:
        >>> region = RecurrentStateRegion("ssm/state", 3, (2, 4), DType.float32)
        >>> region.rows_dim, region.pool_key, region.bytes_per_page, region.rows_of(2)
        ('ssm_state_rows', 'ssm/state/pool', 96, range(6, 9))
    """

    leaf_id: str
    num_layers: int
    row_shape: tuple[int, ...]
    dtype: DType
    scratch: bool = False

    @property
    def rows_dim(self) -> str:
        """Name of the symbolic number of rows."""
        return f"{self.leaf_id.replace('/', '_')}_rows"

    @property
    def row_elements(self) -> int:
        """The number of elements in the state of one layer."""
        return math.prod(self.row_shape)

    @property
    def pool_key(self) -> str:
        """Name of the pool."""
        return f"{self.leaf_id}/pool"

    @property
    def bytes_per_page(self) -> int:
        """The size of a page on one device, in bytes."""
        return self.num_layers * self.row_elements * self.dtype.size_in_bytes

    def rows_of(self, page: int) -> range:
        """The indices of a page's rows, one for each layer."""
        return range(page * self.num_layers, (page + 1) * self.num_layers)


@dataclass
class RecurrentLeafInputs(TreeNode, Generic[_Tensor, _Buffer]):
    """The inputs of a program for one kind of recurrent state on one device: their types, or their values.

    Attributes:
        pool: states of all layers and requests, ``[rows, …]``.
        live_row_ids: index of the row of each layer and sequence, ``[layers, B]``.

    Example:
        >>> import jax.numpy as jnp
        >>> ids = TensorValue(jnp.array([[4, 0], [5, 1]]))
        >>> RecurrentLeafInputs(None, ids).live_row_id(1).to_numpy().tolist()
        [5, 1]
    """

    pool: _Buffer
    live_row_ids: _Tensor

    def live_row_id(self, layer: int) -> TensorValue:
        """The indices of a layer's rows, ``[B]``.

        Raises:
            TypeError: ``live_row_ids`` is a type, not a value.
        """
        if not isinstance(self.live_row_ids, TensorValue):
            raise TypeError(f"rows are of values, not of a {type(self.live_row_ids).__name__}")
        return self.live_row_ids[layer]


@dataclass
class RecurrentStateInputsPerDevice(TreeNode, Generic[_Tensor, _Buffer]):
    """The inputs of a program for all recurrent states on one device, in the order of their regions.

    Attributes:
        leaves: inputs, one entry for each region.
    """

    leaves: tuple[RecurrentLeafInputs[_Tensor, _Buffer], ...]

    def flatten(self) -> list[Any]:
        """The pool and row indices of each leaf, in order."""
        return [value for leaf in self.leaves for value in (leaf.pool, leaf.live_row_ids)]

    def unflatten(self, values: Iterator[Any]) -> RecurrentStateInputsPerDevice[Any, Any]:
        """A copy with the next values, for example of ``graph.inputs``."""
        return RecurrentStateInputsPerDevice(
            tuple(RecurrentLeafInputs(next(values), next(values)) for _ in self.leaves)
        )


@dataclass(kw_only=True)
class RecurrentStateParams(KVCacheParamInterface):
    """Settings of recurrent states. The caller allocates the pool, which in MAX the server does.

    Attributes:
        regions: descriptions of the states.
        devices: devices, equally many for each replica.
        data_parallel_degree: number of replicas.
        page_size: number of tokens that a state covers; 0 if there is also a paged cache.
        enable_prefix_caching, speculative_method, num_draft_tokens: settings of MAX's server.

    Raises:
        ValueError: there is no region, or two regions have the same name.

    Example:
        >>> region = RecurrentStateRegion("conv", 3, (4,), DType.float32)
        >>> params = RecurrentStateParams(regions=(region,), devices=[DeviceRef.CPU()])
        >>> params.bytes_per_state, params.tensor_parallel_degree, recurrent_leaf(params) is params
        (48, 1, True)
    """

    leaf_kind: ClassVar[CacheLeafKind] = CacheLeafKind.RECURRENT

    regions: tuple[RecurrentStateRegion, ...]
    devices: Sequence[DeviceRef]
    data_parallel_degree: int = 1
    page_size: int = 0
    enable_prefix_caching: bool = False
    speculative_method: SpeculativeMethod | None = None
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        names = [region.leaf_id for region in self.regions]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"RecurrentStateParams needs regions of different names, not {names}")
        self.regions = tuple(self.regions)
        self._check_devices()

    @property
    def bytes_per_state(self) -> int:
        """The size of the states of one request on one device, in bytes."""
        return sum(region.bytes_per_page for region in self.regions)

    @property
    def bytes_per_block(self) -> int:
        """Always 0, because states do not grow with the number of tokens."""
        return 0

    def get_symbolic_inputs(self, namespace: str = "") -> Any:
        """The types of a program's inputs, for each device."""
        return [
            RecurrentStateInputsPerDevice(
                tuple(
                    RecurrentLeafInputs(
                        BufferType(region.dtype, [region.rows_dim, *region.row_shape], device),
                        TensorType(
                            DType.uint32,
                            [region.num_layers, f"replica_{replica}_batch_size"],
                            device,
                        ),
                    )
                    for region in self.regions
                )
            )
            for replica, devices in enumerate(self.devices_per_replica)
            for device in devices
        ]


def recurrent_leaf(params: Any) -> RecurrentStateParams | None:
    """The first RecurrentStateParams in the settings of a cache or of several caches; None if there are none."""
    if isinstance(params, RecurrentStateParams):
        return params
    children: Mapping[str, Any] = params.children if isinstance(params, MultiKVCacheParams) else {}
    return next((found for one in children.values() if (found := recurrent_leaf(one))), None)
