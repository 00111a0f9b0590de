"""maxjax: open any checkpoint lazily, shard it over any mesh, compile it once, run it.

It is Modular MAX's module and weight system as a functional JAX library, with MAX's import paths:
``from max.graph import Weight`` becomes ``from maxjax.graph import Weight``.

Names are imported when they are first used, so that ``maxjax inspect`` and ``--help`` do not
import JAX.
"""

import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

__version__ = "0.2.0"

if _TYPE_CHECKING:
    from . import checkpoint as checkpoint
    from . import distributed as distributed
    from . import dtype as dtype
    from . import errors as errors
    from . import graph as graph
    from . import kernels as kernels
    from . import lora as lora
    from . import models as models
    from . import nn as nn
    from .checkpoint.conversion.run import convert as convert
    from .checkpoint.pretrained import save_pretrained as save_pretrained
    from .dtype import DType as DType
    from .engine.drawings import draw_sharding as draw_sharding
    from .engine.embed import embed as embed
    from .engine.export.program import load_exported as load_exported
    from .engine.export.write import export as export
    from .engine.generate.completion import Completion as Completion
    from .engine.generate.conversation import Conversation as Conversation
    from .engine.generate.nans import first_nan as first_nan
    from .engine.generate.texts import generate as generate
    from .engine.generate.texts import stream as stream
    from .engine.load import load as load
    from .engine.looks import look as look
    from .engine.memory import free as free
    from .engine.memory import memory as memory
    from .engine.perplexity import perplexity as perplexity
    from .engine.plan.report import plan as plan
    from .engine.quantize.calibration import calibrate as calibrate
    from .engine.quantize.model import quantize as quantize
    from .engine.rerank import rerank as rerank
    from .engine.sampling.settings import Sampling as Sampling
    from .errors import CheckpointError as CheckpointError
    from .graph import DeviceRef as DeviceRef
    from .graph import Weight as Weight
    from .graph.placement.mesh import make_mesh as make_mesh
    from .graph.weights import WeightData as WeightData
    from .graph.weights import Weights as Weights
    from .graph.weights import load_weights as load_weights
    from .interop.torch_modules import from_torch as from_torch
    from .models import build as build
    from .nn import Layer as Layer
    from .nn import LayerList as LayerList
    from .nn import LayerStack as LayerStack
    from .nn import Module as Module
    from .nn import Sequential as Sequential
    from .nn.init import init as init
    from .nn.init import labels as labels
    from .nn.init import merge as merge
    from .nn.init import partition as partition
    from .nn.layer import add_layer_hook as add_layer_hook
    from .nn.layer import add_layer_prehook as add_layer_prehook
    from .nn.layer import clear_hooks as clear_hooks
    from .nn.layer import layer_hook as layer_hook
    from .nn.layer import layer_prehook as layer_prehook
    from .nn.layer.observe.contexts import capture as capture
    from .nn.layer.observe.contexts import patch as patch
    from .nn.layer.observe.functions import captured as captured
    from .nn.layer.observe.functions import patched as patched
    from .nn.layer.replacing import replace as replace
    from .rendering.attention import draw_attention as draw_attention
    from .storage.limits import Limits as Limits
    from .text.chat import apply_chat_template as apply_chat_template
    from .text.tokenizer.tokenizer import load_tokenizer as load_tokenizer

# The module of each name; None for a submodule. tests/test_facade.py compares it with the imports
# above.
_HOMES: dict[str, str | None] = {
    **dict.fromkeys(
        ("checkpoint", "distributed", "dtype", "errors", "graph", "kernels", "lora", "models", "nn")
    ),
    "DType": "dtype",
    "convert": "checkpoint.conversion.run",
    "save_pretrained": "checkpoint.pretrained",
    "apply_chat_template": "text.chat",
    "Completion": "engine.generate.completion",
    "Conversation": "engine.generate.conversation",
    "embed": "engine.embed",
    "rerank": "engine.rerank",
    "export": "engine.export.write",
    "load_exported": "engine.export.program",
    "generate": "engine.generate.texts",
    "stream": "engine.generate.texts",
    "load": "engine.load",
    "look": "engine.looks",
    "draw_sharding": "engine.drawings",
    "draw_attention": "rendering.attention",
    "first_nan": "engine.generate.nans",
    "perplexity": "engine.perplexity",
    "plan": "engine.plan.report",
    "calibrate": "engine.quantize.calibration",
    "quantize": "engine.quantize.model",
    "free": "engine.memory",
    "memory": "engine.memory",
    "Sampling": "engine.sampling.settings",
    "load_tokenizer": "text.tokenizer.tokenizer",
    "CheckpointError": "errors",
    "DeviceRef": "graph",
    "Weight": "graph",
    "from_torch": "interop.torch_modules",
    "make_mesh": "graph.placement.mesh",
    "WeightData": "graph.weights",
    "Weights": "graph.weights",
    "load_weights": "graph.weights",
    "build": "models",
    "Layer": "nn",
    "LayerList": "nn",
    "LayerStack": "nn",
    "Module": "nn",
    "Sequential": "nn",
    "init": "nn.init",
    "labels": "nn.init",
    "merge": "nn.init",
    "partition": "nn.init",
    "add_layer_hook": "nn.layer",
    "add_layer_prehook": "nn.layer",
    "clear_hooks": "nn.layer",
    "layer_hook": "nn.layer",
    "layer_prehook": "nn.layer",
    "capture": "nn.layer.observe.contexts",
    "patch": "nn.layer.observe.contexts",
    "captured": "nn.layer.observe.functions",
    "patched": "nn.layer.observe.functions",
    "replace": "nn.layer.replacing",
    "Limits": "storage.limits",
}

__all__ = ["__version__", *_HOMES]

if "IPython" in _sys.modules:
    _importlib.import_module(".completion", __name__).register()


def __getattr__(name: str) -> _Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'maxjax' has no attribute {name!r}")
    home = _HOMES[name]
    with _importlib.import_module(".lazy", __name__).without_collector():
        found = _importlib.import_module(f".{home or name}", __name__)
    value = found if home is None else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
