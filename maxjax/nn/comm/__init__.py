"""Written for files of Modular MAX: communication between devices, at the paths of ``max.nn.comm``.

maxjax itself does not import it: on a mesh, XLA inserts the communication.
"""

from ...absent import absent as _absent
from .allreduce import Allreduce as Allreduce
from .allreduce import Signals as Signals

__getattr__ = _absent(__name__)
