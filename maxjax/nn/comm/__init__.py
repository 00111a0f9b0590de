"""Communication between devices, under the names and paths of ``max.nn.comm``."""

from ...absent import absent as _absent
from .allreduce import Allreduce as Allreduce
from .allreduce import Signals as Signals

__getattr__ = _absent(__name__)
