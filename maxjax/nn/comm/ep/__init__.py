"""Written for files of Modular MAX: expert parallelism, at the paths of ``max.nn.comm.ep``.

maxjax itself does not import it: its models place experts on a mesh. These are the settings, and the exchange of tokens
between devices.

==================  ===================================================================
EPConfig            the settings
EPBatchManager      sends tokens to the devices of their experts, and results back
EPCommInitializer   prepares MAX's buffers; in maxjax it does nothing
==================  ===================================================================
"""

from ....absent import absent as _absent
from .ep_config import EPConfig as EPConfig
from .ep_config import calculate_ep_max_tokens_per_rank as calculate_ep_max_tokens_per_rank
from .ep_manager import EPBatchManager as EPBatchManager
from .ep_manager import EPCommBuffers as EPCommBuffers
from .ep_manager import EPCommInitializer as EPCommInitializer

__getattr__ = _absent(__name__)
