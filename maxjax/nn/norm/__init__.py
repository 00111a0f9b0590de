"""Norms, under the names and paths of ``max.nn.norm``."""

from .norms import ConstantLayerNorm as ConstantLayerNorm
from .norms import GroupNorm as GroupNorm
from .norms import LayerNorm as LayerNorm
from .norms import RMSNorm as RMSNorm
