"""Written for files of Modular MAX: the inputs of paged caches, re-exported at MAX's path.

maxjax itself does not import it.
"""

from ...absent import absent as _absent
from .paged import KVCacheInputs as KVCacheInputs
from .paged import KVCacheInputsPerDevice as KVCacheInputsPerDevice
from .paged import PagedCacheValues as PagedCacheValues
from .paged import RecurrentLeafInputs as RecurrentLeafInputs
from .paged import RecurrentStateInputsPerDevice as RecurrentStateInputsPerDevice

__getattr__ = _absent(__name__)
