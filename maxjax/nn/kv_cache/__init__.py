"""The KV cache: keys and values of all tokens so far, in one pytree that a jitted step can donate.

``cache`` has the class; ``slots`` stores the keys and values of some layers, as floats or int8.
"""

from ...absent import absent as _absent
from .cache import KVCache as KVCache

__getattr__ = _absent(
    __name__,
    {
        "PagedCacheValues KVCacheParams MultiKVCacheParams KVCacheParamInterface KVCacheInputs "
        "KVCacheInputsPerDevice KVCacheMetrics RecurrentStateInputsPerDevice build_max_lengths_tensor": (
            "use maxjax.nn.KVCache, which is an argument and a result of the model"
        ),
    },
)
