"""Written for files of Modular MAX: base classes of layers and hooks, re-exported at MAX's path.

maxjax itself does not import it.
"""

from ...graph.placement.strategy import Shardable as Shardable
from .hooks import Layer as Layer
from .hooks import add_layer_hook as add_layer_hook
from .hooks import clear_hooks as clear_hooks
from .layer_list import LayerList as LayerList
from .module import Module as Module
from .walk import recursive_named_layers as recursive_named_layers
