"""Mixtures of experts, under the names and paths of ``max.nn.moe``."""

from ...absent import absent as _absent
from .moe import MoE as MoE
from .moe import MoEGate as MoEGate
from .routing import SHARES as SHARES
from .routing import Routing as Routing

__getattr__ = _absent(__name__)
