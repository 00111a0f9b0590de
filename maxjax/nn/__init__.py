"""Floor 4. Layers: the container calculus and the layers models are made of, under MAX's names."""

from . import hooks as hooks
from .embedding import Embedding as Embedding
from .init import init as init
from .init import merge as merge
from .init import partition as partition
from .layer import Layer as Layer
from .layer import LayerList as LayerList
from .layer import LayerV2 as LayerV2
from .layer import MissingLayer as MissingLayer
from .layer import Module as Module
from .layer import Sequential as Sequential
from .layer import recursive_named_layers as recursive_named_layers
from .linear import Linear as Linear
from .norm import LayerNorm as LayerNorm
from .norm import RMSNorm as RMSNorm
