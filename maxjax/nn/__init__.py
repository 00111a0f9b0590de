"""The base class Module, its containers, and the layers that models are made of, under MAX's names.

Layers take sizes first; dtype (float32) and device (the CPU) have defaults: ``nn.Linear(3, 2, bias=True)``. What only
files of Modular MAX need, such as ``kernels``, ``comm`` and ``transformer``, is in packages and modules whose
docstrings begin by saying so. Names are imported on first use.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..absent import absent as _absent
from ..lazy import attributes as _attributes

# Imported eagerly: the submodule ``clamp`` would otherwise shadow the function.
from .clamp import clamp as clamp
from .init import init as init
from .init import labels as labels
from .init import merge as merge
from .init import partition as partition

if _TYPE_CHECKING:
    from . import hooks as hooks
    from .attention import AttentionWithRope as AttentionWithRope
    from .attention import LatentAttentionWithRope as LatentAttentionWithRope
    from .attention import MHAMaskVariant as MHAMaskVariant
    from .attention import MultiHeadAttention as MultiHeadAttention
    from .attention import MultiheadAttention as MultiheadAttention
    from .attention import TensorParallelAttentionWithRope as TensorParallelAttentionWithRope
    from .attention import (
        TensorParallelLatentAttentionWithRope as TensorParallelLatentAttentionWithRope,
    )
    from .comm import Allreduce as Allreduce
    from .comm import Signals as Signals
    from .conv import Conv1D as Conv1D
    from .conv import Conv2d as Conv2d
    from .conv import Conv3D as Conv3D
    from .conv_transpose import ConvTranspose1d as ConvTranspose1d
    from .data_parallelism import split_batch as split_batch
    from .data_parallelism import split_batch_replicated as split_batch_replicated
    from .dropout import Dropout as Dropout
    from .embedding import Embedding as Embedding
    from .embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from .hyper_connection import HyperConnection as HyperConnection
    from .identity import Identity as Identity
    from .kv_cache import KVCache as KVCache
    from .kv_cache import KVCacheInputs as KVCacheInputs
    from .kv_cache import KVCacheParams as KVCacheParams
    from .layer import Layer as Layer
    from .layer import LayerList as LayerList
    from .layer import LayerStack as LayerStack
    from .layer import LayerV2 as LayerV2
    from .layer import MissingLayer as MissingLayer
    from .layer import Module as Module
    from .layer import PerLayer as PerLayer
    from .layer import Sequential as Sequential
    from .layer import Shardable as Shardable
    from .layer import is_tapped as is_tapped
    from .layer import recursive_named_layers as recursive_named_layers
    from .layer import tap as tap
    from .linear import MLP as MLP
    from .linear import ColumnParallelLinear as ColumnParallelLinear
    from .linear import FusedMLP as FusedMLP
    from .linear import Linear as Linear
    from .moe import MoE as MoE
    from .moe import MoEGate as MoEGate
    from .moe import forward_moe_sharded_layers as forward_moe_sharded_layers
    from .norm import BatchNorm as BatchNorm
    from .norm import BatchNorm1d as BatchNorm1d
    from .norm import BatchNorm2d as BatchNorm2d
    from .norm import BatchNorm3d as BatchNorm3d
    from .norm import ConstantLayerNorm as ConstantLayerNorm
    from .norm import GroupNorm as GroupNorm
    from .norm import LayerNorm as LayerNorm
    from .norm import RMSNorm as RMSNorm
    from .quant_config import InputScaleSpec as InputScaleSpec
    from .quant_config import QuantConfig as QuantConfig
    from .quant_config import QuantFormat as QuantFormat
    from .quant_config import ScaleGranularity as ScaleGranularity
    from .quant_config import ScaleOrigin as ScaleOrigin
    from .quant_config import WeightScaleSpec as WeightScaleSpec
    from .recurrent import GRU as GRU
    from .recurrent import LSTM as LSTM
    from .recurrent import GRUCell as GRUCell
    from .recurrent import LSTMCell as LSTMCell
    from .rotary_embedding import DynamicRotaryEmbedding as DynamicRotaryEmbedding
    from .rotary_embedding import LinearScalingParams as LinearScalingParams
    from .rotary_embedding import Llama3RopeScalingParams as Llama3RopeScalingParams
    from .rotary_embedding import Llama3RotaryEmbedding as Llama3RotaryEmbedding
    from .rotary_embedding import LongRoPERotaryEmbedding as LongRoPERotaryEmbedding
    from .rotary_embedding import LongRoPEScalingParams as LongRoPEScalingParams
    from .rotary_embedding import RotaryEmbedding as RotaryEmbedding
    from .rotary_embedding import YarnRotaryEmbedding as YarnRotaryEmbedding
    from .rotary_embedding import YarnScalingParams as YarnScalingParams
    from .stacked_linear import StackedLinear as StackedLinear
    from .transformer import DistributedTransformer as DistributedTransformer
    from .transformer import DistributedTransformerBlock as DistributedTransformerBlock
    from .transformer import ReturnHiddenStates as ReturnHiddenStates
    from .transformer import ReturnLogits as ReturnLogits
    from .transformer import Transformer as Transformer
    from .transformer import TransformerBlock as TransformerBlock

__getattr__, __dir__, __all__ = _attributes(
    __name__,
    {
        "": "hooks",
        "attention": "AttentionWithRope LatentAttentionWithRope MHAMaskVariant MultiHeadAttention MultiheadAttention "
        "TensorParallelAttentionWithRope TensorParallelLatentAttentionWithRope",
        "comm": "Allreduce Signals",
        "conv": "Conv1D Conv2d Conv3D",
        "conv_transpose": "ConvTranspose1d",
        "data_parallelism": "split_batch split_batch_replicated",
        "dropout": "Dropout",
        "embedding": "Embedding VocabParallelEmbedding",
        "hyper_connection": "HyperConnection",
        "identity": "Identity",
        "kv_cache": "KVCache KVCacheInputs KVCacheParams",
        "layer": "Layer LayerList LayerStack LayerV2 MissingLayer Module PerLayer Sequential "
        "Shardable is_tapped recursive_named_layers tap",
        "linear": "MLP ColumnParallelLinear FusedMLP Linear",
        "moe": "MoE MoEGate forward_moe_sharded_layers",
        "norm": "BatchNorm BatchNorm1d BatchNorm2d BatchNorm3d ConstantLayerNorm GroupNorm LayerNorm RMSNorm",
        "quant_config": "InputScaleSpec QuantConfig QuantFormat ScaleGranularity ScaleOrigin WeightScaleSpec",
        "recurrent": "GRU GRUCell LSTM LSTMCell",
        "rotary_embedding": "DynamicRotaryEmbedding LinearScalingParams Llama3RopeScalingParams "
        "Llama3RotaryEmbedding LongRoPERotaryEmbedding LongRoPEScalingParams "
        "RotaryEmbedding YarnRotaryEmbedding YarnScalingParams",
        "stacked_linear": "StackedLinear",
        "transformer": "DistributedTransformer DistributedTransformerBlock ReturnHiddenStates ReturnLogits Transformer "
        "TransformerBlock",
    },
    _absent(__name__),
)
