"""Re-exports the settings of paged caches under MAX's path."""

from ...absent import absent as _absent
from .paged import KVCacheParamInterface as KVCacheParamInterface
from .paged import KVCacheParams as KVCacheParams
from .paged import MHAKVCacheParams as MHAKVCacheParams
from .paged import MLAKVCacheParams as MLAKVCacheParams
from .paged import MultiKVCacheParams as MultiKVCacheParams
from .paged import spec_decode_cache_slack as spec_decode_cache_slack
from .recurrent_params import PACKED_PAGE_STRIDE as PACKED_PAGE_STRIDE
from .recurrent_params import RecurrentStateParams as RecurrentStateParams
from .recurrent_params import RecurrentStateRegion as RecurrentStateRegion
from .recurrent_params import packed_page_stride as packed_page_stride
from .recurrent_params import recurrent_leaf as recurrent_leaf
from .server_settings import TIERED_CONNECTOR_TYPES as TIERED_CONNECTOR_TYPES
from .server_settings import CacheLeafKind as CacheLeafKind
from .server_settings import HostStagingAlloc as HostStagingAlloc
from .server_settings import KVCacheQuantizationConfig as KVCacheQuantizationConfig
from .server_settings import KVConnectorType as KVConnectorType
from .server_settings import KVHashAlgo as KVHashAlgo
from .server_settings import SpeculativeMethod as SpeculativeMethod

CacheLeafParamInterface = KVCacheParamInterface
"""The settings of one kind of page: another name of `KVCacheParamInterface`, as in MAX."""

__getattr__ = _absent(__name__)
