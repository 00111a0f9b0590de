"""Written for files of Modular MAX: LayerNorm and ConstantLayerNorm, re-exported at MAX's path.

maxjax itself does not import it.
"""

from .norms import ConstantLayerNorm as ConstantLayerNorm
from .norms import LayerNorm as LayerNorm
