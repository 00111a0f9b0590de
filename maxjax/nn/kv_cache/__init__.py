"""The KV cache: what layers keep of all tokens so far, in one pytree that a jitted step can donate.

``cache`` has the class; ``kinds`` says what layers keep; ``slots`` stores keys and values, or latent
vectors, as floats or int8, ``recurrent`` the states that do not grow with a sequence.
"""

from ...absent import absent as _absent
from .cache import KVCache as KVCache
from .cache_params import CacheLeafKind as CacheLeafKind
from .cache_params import KVCacheQuantizationConfig as KVCacheQuantizationConfig
from .cache_params import KVConnectorType as KVConnectorType
from .cache_params import KVHashAlgo as KVHashAlgo

__getattr__ = _absent(__name__)
