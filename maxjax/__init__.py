"""maxjax: open any checkpoint lazily, shard it over any mesh, compile it once, run it.

It is Modular MAX's module and weight system as a functional JAX library, with MAX's import paths:
``from max.graph import Weight`` becomes ``from maxjax.graph import Weight``.

Names are imported when they are first used, so that ``maxjax inspect`` and ``--help`` do not
import JAX.
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from .lazy import attributes as _attributes

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
    from . import tree as tree
    from .checkpoint.conversion.run import convert as convert
    from .checkpoint.pretrained import save_pretrained as save_pretrained
    from .dtype import DType as DType
    from .engine.answer import answer as answer
    from .engine.batching.engine import Engine as Engine
    from .engine.classify import classify as classify
    from .engine.drawings import draw_sharding as draw_sharding
    from .engine.embed import embed as embed
    from .engine.export.program import load_exported as load_exported
    from .engine.export.write import export as export
    from .engine.fill_mask import fill_mask as fill_mask
    from .engine.generate.completion import Completion as Completion
    from .engine.generate.conversation import Conversation as Conversation
    from .engine.generate.nans import first_nan as first_nan
    from .engine.generate.texts import generate as generate
    from .engine.generate.texts import generate_each as generate_each
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
    from .engine.score import score as score
    from .engine.tag import tag as tag
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
    from .text.chat import tokenize_chat as tokenize_chat
    from .text.tokenizer.tokenizer import load_tokenizer as load_tokenizer

__getattr__, __dir__, _names = _attributes(
    __name__,
    {
        "": "checkpoint distributed dtype errors graph kernels lora models nn tree",
        "checkpoint.conversion.run": "convert",
        "checkpoint.pretrained": "save_pretrained",
        "dtype": "DType",
        "engine.answer": "answer",
        "engine.batching.engine": "Engine",
        "engine.classify": "classify",
        "engine.drawings": "draw_sharding",
        "engine.embed": "embed",
        "engine.export.program": "load_exported",
        "engine.export.write": "export",
        "engine.fill_mask": "fill_mask",
        "engine.generate.completion": "Completion",
        "engine.generate.conversation": "Conversation",
        "engine.generate.nans": "first_nan",
        "engine.generate.texts": "generate generate_each stream",
        "engine.load": "load",
        "engine.looks": "look",
        "engine.memory": "free memory",
        "engine.perplexity": "perplexity",
        "engine.plan.report": "plan",
        "engine.quantize.calibration": "calibrate",
        "engine.quantize.model": "quantize",
        "engine.rerank": "rerank",
        "engine.sampling.settings": "Sampling",
        "engine.score": "score",
        "engine.tag": "tag",
        "errors": "CheckpointError",
        "graph": "DeviceRef Weight",
        "graph.placement.mesh": "make_mesh",
        "graph.weights": "WeightData Weights load_weights",
        "interop.torch_modules": "from_torch",
        "models": "build",
        "nn": "Layer LayerList LayerStack Module Sequential",
        "nn.init": "init labels merge partition",
        "nn.layer": "add_layer_hook add_layer_prehook clear_hooks layer_hook layer_prehook",
        "nn.layer.observe.contexts": "capture patch",
        "nn.layer.observe.functions": "captured patched",
        "nn.layer.replacing": "replace",
        "rendering.attention": "draw_attention",
        "storage.limits": "Limits",
        "text.chat": "apply_chat_template tokenize_chat",
        "text.tokenizer.tokenizer": "load_tokenizer",
    },
)
__all__ = ["__version__", *(name for name in _names if name != "lazy")]

if "IPython" in _sys.modules:
    from .completion import register as _register

    _register()
