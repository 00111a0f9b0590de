"""The KV cache: what layers keep of all tokens so far, in one pytree that a jitted step can donate.

``cache`` has the class; ``kinds`` says what layers keep; ``slots`` stores keys and values, or latent
vectors, as floats or int8, ``recurrent`` the states that do not grow with a sequence.
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
