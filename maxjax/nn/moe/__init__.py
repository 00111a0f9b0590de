"""Mixtures of experts: ``MoE`` and its gate, the layers of experts of maxjax's models, and the choice of experts.

The routers, stacked experts and calls over several devices of MAX's files are in modules of their own
(``sigmoid_router``, ``stacked_moe``, ``expert_parallel``). Names are imported on first use.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ...absent import absent as _absent
from ...lazy import attributes as _attributes
from ..activation import GatedActivation as GatedActivation

if _TYPE_CHECKING:
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

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "expert_list": "Experts",
        "expert_parallel": "forward_moe_sharded_layers",
        "gate": "MoEGate",
        "moe": "MoE",
        "routing": "SHARES Routing check_experts route",
        "sigmoid_router": "SigmoidTopKRouter",
        "stacked_moe": "GateUpFormat StackedMoE make_concatenated_gated_activation_fn "
        "make_interleaved_gated_activation_fn make_stacked_gated_activation_fn",
    },
    _absent(__name__),
)
