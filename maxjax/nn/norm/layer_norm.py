"""MAX's path of what ``norms.py`` has."""

from .norms import ConstantLayerNorm as ConstantLayerNorm
from .norms import LayerNorm as LayerNorm
