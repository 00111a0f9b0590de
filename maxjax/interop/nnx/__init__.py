"""flax nnx: load any checkpoint into an nnx module, and use maxjax Modules in nnx.

``load`` fills an nnx module from a checkpoint, ``tensors`` gives its values under the names of a
checkpoint, and ``torch_rules`` makes the renaming table for both from the module's layers.
``to_state``, ``from_state`` and ``as_nnx`` convert maxjax Modules. Importing this package imports flax.

``interchange`` holds ``load`` and ``tensors``; ``variables`` finds the Variables of a module,
``matching`` assigns tensors to them, ``filling`` reads each device's shard, ``state`` converts
Modules, and ``torch_layers`` describes how PyTorch stores each kind of layer.
"""

from .interchange import AS_IS as AS_IS
from .interchange import OIHW_TO_HWIO as OIHW_TO_HWIO
from .interchange import T as T
from .interchange import load as load
from .interchange import tensors as tensors
from .state import Packed as Packed
from .state import as_nnx as as_nnx
from .state import from_state as from_state
from .state import to_state as to_state
from .torch_layers import torch_rules as torch_rules
