"""MAX's path of kernels for state space layers; those that are not supported raise NotImplementedError when called."""

from ...absent import absent as _absent
from ..kernels import gated_group_rmsnorm as gated_group_rmsnorm

__getattr__ = _absent(__name__)
