"""Re-exports from ``norms.py`` under MAX's path."""

from .norms import ConstantLayerNorm as ConstantLayerNorm
from .norms import LayerNorm as LayerNorm
