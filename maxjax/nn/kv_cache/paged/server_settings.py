"""Enumerations and data classes for settings of MAX's cache server; maxjax ignores them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from ....dtype import DType

KVHashAlgo = Literal["ahash64", "sha256"]
"""Names of the hashes by which MAX's server compares prefixes."""
HostStagingAlloc = Literal["registered", "driver"]
"""Ways in which MAX's server allocates the host memory through which pages are copied."""
SpeculativeMethod = Literal["eagle", "mtp", "dflash", "dflash2", "dspark"]
"""Names of the methods by which MAX's server drafts tokens ahead."""


class KVConnectorType(enum.StrEnum):
    """The place where MAX's server keeps pages that are not on a device; ``maxjax.nn.KVCache`` has no such pages."""

    null = "null"
    tiered = "tiered"
    rust_tiered = "rust_tiered"
    dkv = "dkv"


TIERED_CONNECTOR_TYPES = frozenset({KVConnectorType.tiered, KVConnectorType.rust_tiered})
"""The connectors that keep pages in several kinds of memory."""


class CacheLeafKind(enum.Enum):
    """The kind of state of a layer: keys and values of each token, or one recurrent state."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"


@dataclass
class KVCacheQuantizationConfig:
    """How keys and values are quantised: the dtype of scales, and the number of values that share a scale."""

    scale_dtype: DType = DType.float32
    quantization_granularity: int = 128
