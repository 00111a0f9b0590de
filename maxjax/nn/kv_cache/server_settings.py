"""Settings of MAX's cache server that are plain data."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from ...dtype import DType

KVHashAlgo = Literal["ahash64", "sha256"]
"""Names of the hashes that MAX's server compares prefixes by."""
HostStagingAlloc = Literal["registered", "driver"]
SpeculativeMethod = Literal["eagle", "mtp", "dflash", "dflash2", "dspark"]


class KVConnectorType(enum.StrEnum):
    """Where MAX's server keeps pages that are not on a device; a maxjax.nn.KVCache is on its devices."""

    null = "null"
    tiered = "tiered"
    rust_tiered = "rust_tiered"
    dkv = "dkv"


TIERED_CONNECTOR_TYPES = frozenset({KVConnectorType.tiered, KVConnectorType.rust_tiered})


class CacheLeafKind(enum.Enum):
    """What a layer keeps: keys and values of tokens, or one state of all of them."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"


@dataclass
class KVCacheQuantizationConfig:
    """How keys and values are quantised: the dtype of scales, and how many values share one."""

    scale_dtype: DType = DType.float32
    quantization_granularity: int = 128
