"""Mixtures of experts, under the names and paths of ``max.nn.moe``."""

from ...absent import absent as _absent
from ..activation import GatedActivation as GatedActivation
from .expert_list import Experts as Experts
from .expert_parallel import forward_moe_sharded_layers as forward_moe_sharded_layers
from .gate import MoEGate as MoEGate
from .moe import MoE as MoE
from .routing import SHARES as SHARES
from .routing import Routing as Routing
from .routing import check_experts as check_experts
from .routing import route as route
from .sigmoid_router import SigmoidTopKRouter as SigmoidTopKRouter
from .stacked_moe import GateUpFormat as GateUpFormat
from .stacked_moe import StackedMoE as StackedMoE
from .stacked_moe import (
    make_concatenated_gated_activation_fn as make_concatenated_gated_activation_fn,
)
from .stacked_moe import (
    make_interleaved_gated_activation_fn as make_interleaved_gated_activation_fn,
)
from .stacked_moe import make_stacked_gated_activation_fn as make_stacked_gated_activation_fn

__getattr__ = _absent(__name__)
