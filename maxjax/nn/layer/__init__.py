"""The base classes of layers: Layer, Module, LayerList and LayerStack, with hooks and state dicts.

A Module is a pytree of one level. Its leaves are the values of its unique Weights in
state-dict order; everything else is its definition, interned so that JAX compares it by
identity. Therefore layers of equal structure have equal treedefs, and so have a lazy model and the
same model after loading. Tied weights stay one leaf under every transformation. A change of
structure makes JAX trace again; a change of a value does not.

Read in this order:

* ``module.py``: Module, which registers Weights, Modules and static attributes as they are assigned.
* ``static.py``: static attributes, frozen and compared by content, with ``contents.py`` (what may not be in them),
  ``frozen.py`` (lists and dicts) and ``watched.py`` (what can change without an assignment).
* ``walk.py``: the walk below a Module, which gives names, finds ties, and says what holds the leaf of each Weight.
* ``definition.py``: the treedef that is made of a walk, flattening and unflattening, and the one Cache of a Module.
* ``call_stack.py``: a call, with names for profiles and warnings; ``hooks.py`` and ``calls.py``: hooks and
  observers around it.
* ``layer_list.py``; ``stack/``: equal layers with stacked weights, run as one loop.
* ``state.py`` and ``load/``: state dicts; ``replacing.py``: a model with other values; ``place.py``: ``Module.to``.
* ``sharded.py``: one layer for each device, as in MAX; ``compiled_from.py``: whether a program is out of date;
  ``rows.py``: displays; ``observe/``: captures and patches.
"""

from ...graph.placement.strategy import Shardable as Shardable
from .call_stack import layer_name as layer_name
from .hooks import Layer as Layer
from .hooks import add_layer_hook as add_layer_hook
from .hooks import add_layer_prehook as add_layer_prehook
from .hooks import clear_hooks as clear_hooks
from .hooks import layer_hook as layer_hook
from .hooks import layer_prehook as layer_prehook
from .layer_list import LayerList as LayerList
from .layer_list import MissingLayer as MissingLayer
from .layer_list import Sequential as Sequential
from .module import Module as Module
from .observe.frames import is_tapped as is_tapped
from .observe.frames import tap as tap
from .stack.expert_stack import ExpertStack as ExpertStack
from .stack.layer_stack import LayerStack as LayerStack
from .stack.per_layer import PerLayer as PerLayer
from .state import LoadResult as LoadResult
from .walk import recursive_named_layers as recursive_named_layers

# The name of Module before MAX 25; model code still imports it.
LayerV2 = Module
"""Module, under the name that it has in older model files of MAX."""
