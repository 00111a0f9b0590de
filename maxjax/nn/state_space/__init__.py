"""Written for files of Modular MAX: kernels for state space layers, at the path of ``max.nn.state_space``.

maxjax itself does not import it: its scans are in ``maxjax.nn.ssm``. Kernels that are not supported raise
NotImplementedError when they are called.
"""

from ...absent import absent as _absent
from ..kernels import gated_group_rmsnorm as gated_group_rmsnorm
from .ragged_scans import causal_conv1d_varlen_fwd as causal_conv1d_varlen_fwd
from .ragged_scans import gated_delta_conv1d_fwd as gated_delta_conv1d_fwd
from .ragged_scans import gated_delta_recurrence_fwd as gated_delta_recurrence_fwd
from .ragged_scans import (
    mamba2_ssd_chunk_scan_varlen_fwd_inplace as mamba2_ssd_chunk_scan_varlen_fwd_inplace,
)

__getattr__ = _absent(__name__)
