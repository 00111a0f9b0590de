"""The KV cache: keys and values of all tokens so far, one donated pytree.

``cache`` is the class; ``slots`` stores the keys and values of some layers, in floats or int8.
"""

from ...absent import absent as _absent
from .cache import KVCache as KVCache

__getattr__ = _absent(
    __name__,
    {
        "PagedCacheValues KVCacheParams MultiKVCacheParams KVCacheParamInterface KVCacheInputs "
        "KVCacheInputsPerDevice KVCacheMetrics RecurrentStateInputsPerDevice build_max_lengths_tensor": (
            "keys and values are an argument and a result of the model here: maxjax.nn.KVCache"
        ),
    },
)
