"""Normalisation layers, under the names and paths of ``max.nn.norm``."""

from .batch_norm import BatchNorm as BatchNorm
from .batch_norm import BatchNorm1d as BatchNorm1d
from .batch_norm import BatchNorm2d as BatchNorm2d
from .batch_norm import BatchNorm3d as BatchNorm3d
from .norms import ConstantLayerNorm as ConstantLayerNorm
from .norms import GroupNorm as GroupNorm
from .norms import LayerNorm as LayerNorm
from .norms import RMSNorm as RMSNorm
