"""The KV cache: the states that layers keep of all tokens so far, in one pytree that a jitted step can donate.

``cache`` has the class ``KVCache``. ``kinds`` describes what layers keep. ``slots`` stores keys and values, or
latent vectors, as floats or int8; ``recurrent`` stores states that do not grow with a sequence. ``paged`` is for
files of MAX only, as are the other names. Names are imported on first use.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ...absent import absent as _absent
from ...lazy import attributes as _attributes

if _TYPE_CHECKING:
    from .cache import KVCache as KVCache
    from .cache_params import CacheLeafParamInterface as CacheLeafParamInterface
    from .paged import CacheLeafKind as CacheLeafKind
    from .paged import KVCacheInputs as KVCacheInputs
    from .paged import KVCacheInputsPerDevice as KVCacheInputsPerDevice
    from .paged import KVCacheParamInterface as KVCacheParamInterface
    from .paged import KVCacheParams as KVCacheParams
    from .paged import KVCacheQuantizationConfig as KVCacheQuantizationConfig
    from .paged import KVConnectorType as KVConnectorType
    from .paged import KVHashAlgo as KVHashAlgo
    from .paged import MHAKVCacheParams as MHAKVCacheParams
    from .paged import MLAKVCacheParams as MLAKVCacheParams
    from .paged import MultiKVCacheParams as MultiKVCacheParams
    from .paged import PagedCacheValues as PagedCacheValues
    from .paged import RecurrentLeafInputs as RecurrentLeafInputs
    from .paged import RecurrentStateInputsPerDevice as RecurrentStateInputsPerDevice
    from .paged import RecurrentStateParams as RecurrentStateParams
    from .paged import RecurrentStateRegion as RecurrentStateRegion
    from .paged import packed_page_stride as packed_page_stride
    from .paged import recurrent_leaf as recurrent_leaf
    from .paged import spec_decode_cache_slack as spec_decode_cache_slack

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "cache": "KVCache",
        "cache_params": "CacheLeafParamInterface",
        "paged": "CacheLeafKind KVCacheInputs KVCacheInputsPerDevice KVCacheParamInterface KVCacheParams "
        "KVCacheQuantizationConfig KVConnectorType KVHashAlgo MHAKVCacheParams MLAKVCacheParams "
        "MultiKVCacheParams PagedCacheValues RecurrentLeafInputs RecurrentStateInputsPerDevice "
        "RecurrentStateParams RecurrentStateRegion packed_page_stride recurrent_leaf "
        "spec_decode_cache_slack",
    },
    _absent(__name__),
)
