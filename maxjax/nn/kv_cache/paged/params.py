"""Paged caches for model files written for MAX: pages of keys and values, and a table of each sequence's pages.

A program takes the pages as a :class:`~maxjax.graph.BufferValue`, writes to it, and returns the new pages.
maxjax does not have MAX's server, which allocates pages to requests: the caller makes the tables.
maxjax's own models use ``maxjax.nn.KVCache`` instead.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar, get_args

import numpy as np

from ....dtype import DType
from ....graph.buffer import BufferValue
from ....graph.device import DeviceRef
from ....graph.placement.split import even_range
from ....graph.tensor_type import BufferType, TensorType
from ....graph.value import TensorValue
from .server_settings import CacheLeafKind, KVCacheQuantizationConfig, KVHashAlgo, SpeculativeMethod

_Tensor = TypeVar("_Tensor")
_Buffer = TypeVar("_Buffer")


class TreeNode:
    """The protocol by which ``max.tree`` flattens and unflattens a dataclass; fields that are None are left out."""

    def __tree_flatten__(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        found = {name: value for name, value in values.items() if value is not None}
        return tuple(found.values()), tuple(found)

    @classmethod
    def __tree_unflatten__(cls, names: tuple[str, ...], children: Sequence[Any]) -> Any:
        absent = {one.name: None for one in fields(cls)}  # type: ignore[arg-type]
        return cls(**absent | dict(zip(names, children, strict=True)))


@dataclass
class KVCacheInputsPerDevice(TreeNode, Generic[_Tensor, _Buffer]):
    """The inputs of a program for a paged cache on one device: their types, or their values.

    Attributes:
        kv_blocks: pages, ``[pages, 2, layers, page_size, KV heads, head_dim]``, keys before values.
        cache_lengths: number of tokens of each sequence that are in the cache already, ``[B]``.
        lookup_table: indices of the pages of each sequence, in order, ``[B, P]``.
        max_prompt_length, max_cache_length: largest numbers of new and of cached tokens of a sequence, ``[1]``;
            ignored.
        page_stride, attention_dispatch_metadata and the others: inputs of MAX's kernels; ignored. MAX's files check
            that there is an ``attention_dispatch_metadata``, so that among values it is a constant by default.
    """

    kv_blocks: _Buffer
    cache_lengths: _Tensor
    lookup_table: _Tensor
    max_prompt_length: _Tensor
    max_cache_length: _Tensor
    page_stride: _Tensor | None = None
    kv_scales: _Buffer | None = None
    scales_page_stride: _Tensor | None = None
    scales_lookup_table: _Tensor | None = None
    attention_dispatch_metadata: _Tensor | None = None
    draft_attention_dispatch_metadata: _Tensor | None = None

    def __post_init__(self) -> None:
        if self.attention_dispatch_metadata is None and isinstance(self.kv_blocks, BufferValue):
            unused: Any = TensorValue(np.zeros(4, np.int64))
            self.attention_dispatch_metadata = unused

    def flatten(self) -> list[Any]:
        """The fields that are set, in order."""
        return list(self.__tree_flatten__()[0])

    def unflatten(self, values: Iterator[Any]) -> KVCacheInputsPerDevice[TensorValue, BufferValue]:
        """A copy whose set fields have the next values, for example of ``graph.inputs``."""
        return KVCacheInputsPerDevice(**{name: next(values) for name in self.__tree_flatten__()[1]})


PagedCacheValues = KVCacheInputsPerDevice[TensorValue, BufferValue]
"""The inputs of a paged cache on one device, as values of a graph."""
KVCacheInputs = (
    Sequence[KVCacheInputsPerDevice[_Tensor, _Buffer]]
    | Mapping[str, KVCacheInputsPerDevice[_Tensor, _Buffer]]
)
"""The inputs of paged caches: a list with one for each device, or several such lists by name."""


def over_pages(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the arguments are those of MAX's call over a paged cache, ``layer(layer_idx, x, kv_collection, …)``."""
    return "kv_collection" in named or (
        len(args) > 2 and isinstance(args[2], KVCacheInputsPerDevice)
    )


# Methods of speculative decoding that draft all their tokens in one step.
_AT_ONCE = ("dflash", "dflash2", "dspark")


class KVCacheParamInterface:
    """Base class of the settings of caches."""

    page_size: int
    devices: Sequence[DeviceRef]
    data_parallel_degree: int
    enable_prefix_caching: bool
    speculative_method: SpeculativeMethod | None
    num_draft_tokens: int

    @property
    def n_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @property
    def tensor_parallel_degree(self) -> int:
        """The number of devices of a replica."""
        return self.n_devices // self.data_parallel_degree

    @property
    def num_draft_tokens_per_step(self) -> int:
        """The number of tokens that a step of the draft writes: one, or all at once, or 0 without speculation.

        Raises:
            ValueError: ``speculative_method`` is unknown.
        """
        method, known = self.speculative_method, [None, *get_args(SpeculativeMethod)]
        if method not in known:
            raise ValueError(f"speculative_method is {method!r}: it must be one of {known}")
        return self.num_draft_tokens if method in _AT_ONCE else int(method is not None)

    @property
    def devices_per_replica(self) -> list[list[DeviceRef]]:
        """The devices of each replica."""
        size = self.tensor_parallel_degree
        return [list(self.devices[i : i + size]) for i in range(0, self.n_devices, size)]

    def _check_devices(self) -> None:
        degree = self.data_parallel_degree
        if degree < 1 or not self.devices or self.n_devices % degree:
            raise ValueError(
                f"{self.n_devices} devices do not divide into {degree} groups of data parallelism"
            )

    def get_symbolic_inputs(self, namespace: str = "") -> Any:
        """The types of a program's inputs, as a tree."""
        raise NotImplementedError

    def flattened_kv_inputs(self) -> list[TensorType | BufferType]:
        """The types of a program's inputs, in order."""
        return [one for inputs in _leaves(self.get_symbolic_inputs()) for one in inputs.flatten()]

    def unflatten_kv_inputs(self, it: Iterator[Any]) -> Any:
        """The tree of :meth:`get_symbolic_inputs`, with the next values instead of types."""
        return _mapped(self.get_symbolic_inputs(), it)

    def unflatten_basic_kv_tree(self, it: Iterator[Any]) -> tuple[list[Any], ...]:
        """The next values for each of several caches, in the order in which the caches were given.

        Raises:
            ValueError: the settings are those of a single cache, or caches are nested.
        """
        raise ValueError(f"{type(self).__name__} has no caches by name")


def _leaves(tree: Any) -> list[KVCacheInputsPerDevice[Any, Any]]:
    if isinstance(tree, Mapping):
        return [leaf for one in tree.values() for leaf in _leaves(one)]
    return list(tree)


def _mapped(tree: Any, values: Iterator[Any]) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(one, values) for key, one in tree.items()}
    return tuple(one.unflatten(values) for one in tree)


@dataclass(kw_only=True)
class KVCacheParams(KVCacheParamInterface):
    """Settings of a paged cache.

    Attributes:
        dtype: dtype of keys and values.
        head_dim: number of features of a head.
        num_layers: number of layers.
        devices: devices; each has some of the KV heads.
        page_size: number of tokens in a page.
        slots_per_page: number of entries of a page, which divides ``page_size``; one for each token by default.
        data_parallel_degree: number of groups of devices, each of which has its own sequences.
        kvcache_quant_config, per_layer_buffers: not supported; ``maxjax.nn.KVCache`` can be quantised.

    The other attributes are settings of MAX's server, which are ignored.

    Raises:
        ValueError: a number is not positive, or the devices do not divide evenly into groups.
        NotImplementedError: ``kvcache_quant_config`` or ``per_layer_buffers`` is set.
    """

    leaf_kind: ClassVar[CacheLeafKind] = CacheLeafKind.ATTENTION

    dtype: DType
    head_dim: int
    num_layers: int
    devices: Sequence[DeviceRef]
    enable_prefix_caching: bool = False
    enable_dp_cross_replica_prefix_copy: bool = True
    per_layer_buffers: bool = False
    kv_hash_algo: KVHashAlgo = "ahash64"
    kv_hash_seed: bytes | None = None
    kv_connector_config: Any = None
    page_size: int = 128
    slots_per_page: int | None = None
    data_parallel_degree: int = 1
    kvcache_quant_config: KVCacheQuantizationConfig | None = None
    speculative_method: SpeculativeMethod | None = None
    num_draft_tokens: int = 0
    window_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("head_dim", "num_layers", "page_size", "data_parallel_degree"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{type(self).__name__}: {name} must be positive, not {getattr(self, name)}"
                )
        self._check_devices()
        refused = {
            "kvcache_quant_config": self.kvcache_quant_config,
            "per_layer_buffers": self.per_layer_buffers,
        }
        for name, value in refused.items():
            if value:
                raise NotImplementedError(f"{type(self).__name__}({name}=...) is not supported; maxjax.nn.KVCache "
                                          "keeps keys and values as int8")  # fmt: skip
        if self.slots_per_page is None:
            self.slots_per_page = self.page_size
        if self.slots_per_page < 1 or self.page_size % self.slots_per_page:
            raise ValueError(
                f"slots_per_page is {self.slots_per_page}: it must divide the {self.page_size} tokens of a page"
            )

    @property
    def quantized_kv_cache(self) -> bool:
        """Whether keys and values are quantised: False."""
        return False

    @property
    def is_fp8_kv_dtype(self) -> bool:
        """Whether keys and values are float8 with four bits of exponent, as MAX's kernels have them."""
        return self.dtype.name.startswith("float8_e4m3")

    @property
    def is_nvfp4_kv_cache(self) -> bool:
        """Whether keys and values are NVFP4: False."""
        return False

    @property
    def n_kv_heads_per_device(self) -> int:
        """The number of KV heads of a device."""
        raise NotImplementedError

    @property
    def shape_per_block(self) -> list[int]:
        """The shape of a page: keys and values, layers, tokens, KV heads, head_dim."""
        assert self.slots_per_page is not None
        return [
            self.kv_dim,
            self.num_layers,
            self.slots_per_page,
            self.n_kv_heads_per_device,
            self.head_dim,
        ]

    @property
    def kv_dim(self) -> int:
        """The number of tensors in a page: keys and values."""
        return 2

    @property
    def row_bytes(self) -> int:
        """The size of the keys of one token and layer on one device, in bytes."""
        return self.n_kv_heads_per_device * self.head_dim * self.dtype.size_in_bytes

    @property
    def bytes_per_block(self) -> int:
        """The size of a page in bytes, summed over the devices of a group."""
        size = self.dtype.size_in_bytes * self.tensor_parallel_degree
        return size * math.prod(self.shape_per_block)

    def get_symbolic_inputs(
        self, namespace: str = ""
    ) -> tuple[KVCacheInputsPerDevice[TensorType, BufferType], ...]:
        """The types of a program's inputs, for each device; ``namespace`` is a prefix of the names of sizes."""
        host = DeviceRef.CPU()
        one = TensorType(DType.uint32, [1], host)
        return tuple(
            KVCacheInputsPerDevice(
                BufferType(self.dtype, [f"{namespace}total_num_pages", *self.shape_per_block], device),
                TensorType(DType.uint32, [f"replica_{i}_batch_size"], device),
                TensorType(DType.uint32, [f"replica_{i}_batch_size", f"replica_{i}_{namespace}max_num_pages"], device),
                one, one,
            )
            for i, group in enumerate(self.devices_per_replica)
            for device in group
        )  # fmt: skip


@dataclass(kw_only=True)
class MHAKVCacheParams(KVCacheParams):
    """Settings of a paged cache of KV heads.

    Attributes:
        n_kv_heads: number of KV heads, which are split over the devices of a group.
        allow_kv_head_replication: whether heads may be replicated if a group has more devices than heads.

    Example:
        >>> params = MHAKVCacheParams(dtype=DType.float32, head_dim=8, num_layers=2, n_kv_heads=4, page_size=16,
        ...                           devices=[DeviceRef.CPU()])
        >>> params.get_symbolic_inputs()[0].kv_blocks.shape
        [Dim('total_num_pages'), Dim(2), Dim(2), Dim(16), Dim(4), Dim(8)]
    """

    n_kv_heads: int
    allow_kv_head_replication: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        degree, heads = self.tensor_parallel_degree, self.n_kv_heads
        copied = self.allow_kv_head_replication and heads > 0 and degree % heads == 0
        if heads < 1 or (heads % degree and not copied):
            raise ValueError(f"{heads} KV heads do not divide over {degree} devices")

    @property
    def n_kv_heads_per_device(self) -> int:
        """The number of KV heads of a device."""
        start, stop = even_range(self.n_kv_heads, 0, self.tensor_parallel_degree)
        return max(stop - start, 1)


@dataclass(kw_only=True)
class MLAKVCacheParams(KVCacheParams):
    """Settings of a paged cache of latent vectors (multi-head latent attention), which every device has whole.

    Attributes:
        num_q_heads: number of query heads, which are split over the devices of a group.

    Raises:
        ValueError: the query heads do not divide evenly over the devices of a group.

    Example:
        >>> params = MLAKVCacheParams(dtype=DType.float32, head_dim=40, num_layers=2, num_q_heads=4, page_size=16,
        ...                           devices=[DeviceRef.CPU()])
        >>> params.get_symbolic_inputs()[0].kv_blocks.shape
        [Dim('total_num_pages'), Dim(1), Dim(2), Dim(16), Dim(1), Dim(40)]
    """

    num_q_heads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_q_heads % self.tensor_parallel_degree:
            raise ValueError(
                f"{self.num_q_heads} query heads do not divide over {self.tensor_parallel_degree} devices"
            )

    @property
    def kv_dim(self) -> int:
        """The number of tensors in a page: 1, because latent vectors are keys and values."""
        return 1

    @property
    def n_kv_heads_per_device(self) -> int:
        """The number of latent vectors of a token: 1."""
        return 1

    @property
    def num_q_heads_per_device(self) -> int:
        """The number of query heads of a device."""
        return max(self.num_q_heads // self.tensor_parallel_degree, 1)

    @property
    def replicates_kv_across_tp(self) -> bool:
        """Whether several devices have the same cache."""
        return self.tensor_parallel_degree > 1


# Settings that all caches of a model share.
_SHARED = ("page_size", "data_parallel_degree", "devices", "enable_prefix_caching", "speculative_method",
           "num_draft_tokens")  # fmt: skip


@dataclass(frozen=True)
class MultiKVCacheParams(KVCacheParamInterface):
    """Settings of several caches of one model, by name.

    ``page_size``, ``devices``, ``num_draft_tokens`` and others are those of the caches, which share them.

    Raises:
        ValueError: there is no cache, or none has pages, or caches with pages differ in a shared setting.
    """

    children: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.children:
            raise ValueError("MultiKVCacheParams needs the settings of at least one cache")
        paged = {key: one for key, one in self.children.items() if one.page_size}
        if not paged:
            raise ValueError(f"no cache of {list(self.children)} has a page_size")
        for name in _SHARED:
            found = {key: getattr(one, name) for key, one in paged.items()}
            first, *others = (list(one) if name == "devices" else one for one in found.values())
            if any(one != first for one in others):
                raise ValueError(
                    f"the caches of MultiKVCacheParams must have one {name}, not {found}"
                )

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> MultiKVCacheParams:
        """The settings of several caches, as the constructor makes them."""
        return cls(dict(params))

    def __getattr__(self, name: str) -> Any:
        if name not in _SHARED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # Recurrent states beside a paged cache have no pages of their own.
        return getattr(next(one for one in self.children.values() if one.page_size), name)

    @property
    def bytes_per_block(self) -> int:
        """The size of a page of every cache together, in bytes, summed over the devices of a group."""
        return sum(one.bytes_per_block for one in self.children.values())

    def child(self, key: str, kind: type[Any]) -> Any:
        """The settings of one cache.

        Raises:
            KeyError: there is no cache of that name.
            TypeError: the settings are not an instance of ``kind``.
        """
        found = self.children[key]
        if not isinstance(found, kind):
            raise TypeError(f"the cache {key!r} has {type(found).__name__}, not {kind.__name__}")
        return found

    def get_symbolic_inputs(self, namespace: str = "") -> dict[str, Any]:
        """The types of a program's inputs, for each cache and device."""
        # An OrderedDict, because ``max.tree`` sorts the keys of other dicts.
        return OrderedDict(
            (key, one.get_symbolic_inputs(f"{namespace}{key}_"))
            for key, one in self.children.items()
        )

    def unflatten_basic_kv_tree(self, it: Iterator[Any]) -> tuple[list[Any], ...]:
        """The next values of each cache, for each device."""
        found = self.unflatten_kv_inputs(it)
        if any(isinstance(one, Mapping) for one in found.values()):
            raise ValueError("unflatten_basic_kv_tree takes caches, not caches of caches")
        return tuple(list(found[key]) for key in self.children)


def spec_decode_cache_slack(params: KVCacheParamInterface) -> int:
    """The number of positions after the longest sequence that a step of speculative decoding may write to.

    It is 3 · ``num_draft_tokens`` + 1, and one more if all tokens are drafted in one step; 0 without drafts.
    """
    drafts = params.num_draft_tokens
    return 3 * drafts + 1 + (params.num_draft_tokens_per_step == drafts) if drafts > 0 else 0
