"""The KV cache: the states that layers keep of all tokens so far, in one pytree that a jitted step can donate.

``cache`` has the class ``KVCache``. ``kinds`` describes what layers keep. ``slots`` stores keys and values, or
latent vectors, as floats or int8; ``recurrent`` stores states that do not grow with a sequence.
"""

from ...absent import absent as _absent
from .cache import KVCache as KVCache
from .cache_params import CacheLeafParamInterface as CacheLeafParamInterface
from .paged import KVCacheInputs as KVCacheInputs
from .paged import KVCacheInputsPerDevice as KVCacheInputsPerDevice
from .paged import KVCacheParamInterface as KVCacheParamInterface
from .paged import KVCacheParams as KVCacheParams
from .paged import MHAKVCacheParams as MHAKVCacheParams
from .paged import MLAKVCacheParams as MLAKVCacheParams
from .paged import MultiKVCacheParams as MultiKVCacheParams
from .paged import PagedCacheValues as PagedCacheValues
from .paged import spec_decode_cache_slack as spec_decode_cache_slack
from .recurrent_params import RecurrentLeafInputs as RecurrentLeafInputs
from .recurrent_params import RecurrentStateInputsPerDevice as RecurrentStateInputsPerDevice
from .recurrent_params import RecurrentStateParams as RecurrentStateParams
from .recurrent_params import RecurrentStateRegion as RecurrentStateRegion
from .recurrent_params import packed_page_stride as packed_page_stride
from .recurrent_params import recurrent_leaf as recurrent_leaf
from .server_settings import CacheLeafKind as CacheLeafKind
from .server_settings import KVCacheQuantizationConfig as KVCacheQuantizationConfig
from .server_settings import KVConnectorType as KVConnectorType
from .server_settings import KVHashAlgo as KVHashAlgo

__getattr__ = _absent(__name__)
