"""Settings of expert parallelism, at the paths of ``max.nn.comm.ep``; the rest is refused."""

from ....absent import absent as _absent
from .ep_config import EPConfig as EPConfig
from .ep_config import calculate_ep_max_tokens_per_rank as calculate_ep_max_tokens_per_rank

__getattr__ = _absent(__name__)
