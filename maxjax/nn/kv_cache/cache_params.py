"""Written for files of Modular MAX: the settings of paged caches, re-exported at MAX's path.

maxjax itself does not import it.
"""

from ...absent import absent as _absent
from .paged import PACKED_PAGE_STRIDE as PACKED_PAGE_STRIDE
from .paged import TIERED_CONNECTOR_TYPES as TIERED_CONNECTOR_TYPES
from .paged import CacheLeafKind as CacheLeafKind
from .paged import HostStagingAlloc as HostStagingAlloc
from .paged import KVCacheParamInterface as KVCacheParamInterface
from .paged import KVCacheParams as KVCacheParams
from .paged import KVCacheQuantizationConfig as KVCacheQuantizationConfig
from .paged import KVConnectorType as KVConnectorType
from .paged import KVHashAlgo as KVHashAlgo
from .paged import MHAKVCacheParams as MHAKVCacheParams
from .paged import MLAKVCacheParams as MLAKVCacheParams
from .paged import MultiKVCacheParams as MultiKVCacheParams
from .paged import RecurrentStateParams as RecurrentStateParams
from .paged import RecurrentStateRegion as RecurrentStateRegion
from .paged import SpeculativeMethod as SpeculativeMethod
from .paged import packed_page_stride as packed_page_stride
from .paged import recurrent_leaf as recurrent_leaf
from .paged import spec_decode_cache_slack as spec_decode_cache_slack

CacheLeafParamInterface = KVCacheParamInterface
"""The settings of one kind of page: another name of `KVCacheParamInterface`, as in MAX."""

__getattr__ = _absent(__name__)
