"""MAX's path of the inputs of paged caches."""

from ...absent import absent as _absent
from .paged import KVCacheInputs as KVCacheInputs
from .paged import KVCacheInputsPerDevice as KVCacheInputsPerDevice
from .paged import PagedCacheValues as PagedCacheValues

__getattr__ = _absent(__name__)
