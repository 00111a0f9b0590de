"""Re-exports the inputs of paged caches under MAX's path."""

from ...absent import absent as _absent
from .paged import KVCacheInputs as KVCacheInputs
from .paged import KVCacheInputsPerDevice as KVCacheInputsPerDevice
from .paged import PagedCacheValues as PagedCacheValues
from .recurrent_params import RecurrentLeafInputs as RecurrentLeafInputs
from .recurrent_params import RecurrentStateInputsPerDevice as RecurrentStateInputsPerDevice

__getattr__ = _absent(__name__)
