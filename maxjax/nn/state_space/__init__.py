"""MAX's path of kernels for state space layers; those that are not supported raise NotImplementedError when called."""

from ...absent import absent as _absent
from ..kernels import gated_group_rmsnorm as gated_group_rmsnorm
from .ragged_scans import causal_conv1d_varlen_fwd as causal_conv1d_varlen_fwd
from .ragged_scans import gated_delta_conv1d_fwd as gated_delta_conv1d_fwd
from .ragged_scans import gated_delta_recurrence_fwd as gated_delta_recurrence_fwd
from .ragged_scans import (
    mamba2_ssd_chunk_scan_varlen_fwd_inplace as mamba2_ssd_chunk_scan_varlen_fwd_inplace,
)

__getattr__ = _absent(__name__)
