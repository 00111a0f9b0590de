"""Written for files of Modular MAX: its paged caches, under the names of ``max.nn.kv_cache``.

maxjax itself does not import it: its models keep states in a ``maxjax.nn.KVCache``. ``params`` has settings of caches
and inputs of programs, ``recurrent`` those of recurrent states, and ``server_settings`` settings of MAX's server,
which are ignored. The kernels that read and write pages are in ``maxjax.nn.kernels``.
"""

from .params import KVCacheInputs as KVCacheInputs
from .params import KVCacheInputsPerDevice as KVCacheInputsPerDevice
from .params import KVCacheParamInterface as KVCacheParamInterface
from .params import KVCacheParams as KVCacheParams
from .params import MHAKVCacheParams as MHAKVCacheParams
from .params import MLAKVCacheParams as MLAKVCacheParams
from .params import MultiKVCacheParams as MultiKVCacheParams
from .params import PagedCacheValues as PagedCacheValues
from .params import TreeNode as TreeNode
from .params import over_pages as over_pages
from .params import spec_decode_cache_slack as spec_decode_cache_slack
from .recurrent import PACKED_PAGE_STRIDE as PACKED_PAGE_STRIDE
from .recurrent import RecurrentLeafInputs as RecurrentLeafInputs
from .recurrent import RecurrentStateInputsPerDevice as RecurrentStateInputsPerDevice
from .recurrent import RecurrentStateParams as RecurrentStateParams
from .recurrent import RecurrentStateRegion as RecurrentStateRegion
from .recurrent import packed_page_stride as packed_page_stride
from .recurrent import recurrent_leaf as recurrent_leaf
from .server_settings import TIERED_CONNECTOR_TYPES as TIERED_CONNECTOR_TYPES
from .server_settings import CacheLeafKind as CacheLeafKind
from .server_settings import HostStagingAlloc as HostStagingAlloc
from .server_settings import KVCacheQuantizationConfig as KVCacheQuantizationConfig
from .server_settings import KVConnectorType as KVConnectorType
from .server_settings import KVHashAlgo as KVHashAlgo
from .server_settings import SpeculativeMethod as SpeculativeMethod
