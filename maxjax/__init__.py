"""maxjax: open any checkpoint lazily, place it on any mesh, compile it once, run it.

Modular MAX's module and weight system as a functional JAX library. MAX's import paths
are ours: ``from max.graph import Weight`` becomes ``from maxjax.graph import Weight``.
"""

from . import dtype as dtype
from . import errors as errors
from . import graph as graph
from . import models as models
from . import nn as nn
from .dtype import DType as DType
from .engine.embed import embed as embed
from .engine.load import load as load
from .engine.tokenizer import load_tokenizer as load_tokenizer
from .errors import CheckpointError as CheckpointError
from .graph import DeviceRef as DeviceRef
from .graph import Weight as Weight
from .graph.weights import WeightData as WeightData
from .graph.weights import Weights as Weights
from .graph.weights import load_weights as load_weights
from .models import build as build
from .nn import Layer as Layer
from .nn import LayerList as LayerList
from .nn import Module as Module
from .nn import Sequential as Sequential
from .nn.init import init as init
from .nn.init import merge as merge
from .nn.init import partition as partition
from .nn.layer import add_layer_hook as add_layer_hook
from .nn.layer import clear_hooks as clear_hooks

__version__ = "0.1.0"
