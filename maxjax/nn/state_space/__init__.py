"""MAX's path of state space layers."""

from ...absent import absent as _absent
from ..kernels import gated_group_rmsnorm as gated_group_rmsnorm

__getattr__ = _absent(__name__)
