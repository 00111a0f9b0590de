"""The KV cache: keys and values of all tokens so far, one donated pytree.

``cache`` is the class; ``slots`` stores the keys and values of some layers, in floats or int8.
"""

from .cache import KVCache as KVCache
