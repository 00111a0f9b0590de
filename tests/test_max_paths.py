"""Names are at the same paths as in MAX, so that a file runs after `max` is replaced by `maxjax` in imports."""

import importlib

import jax.numpy as jnp
import pytest

from maxjax.driver import CPU, DeviceSpec, load_devices
from maxjax.graph import DeviceRef, TensorValue, Weight
from maxjax.nn.activation import activation_function_from_name
from maxjax.nn.clamp import clamp

# Path below maxjax: names.
TABLE = """
driver: CPU Accelerator Buffer DLPackArray Device DeviceSpec accelerator_count load_devices
dtype: DType finfo
engine: InferenceSession
graph: AlgebraicDim DeviceKind DeviceRef Dim DimLike Graph Module Shape ShardingStrategy StaticDim SymbolicDim
graph: TensorType TensorValue TensorValueLike Type Value Weight ops
graph.dim: AlgebraicDim Dim DimLike StaticDim SymbolicDim
graph.graph: Graph
graph.ops: add argmax argsort broadcast_to call cast chunk concat cond constant conv2d cumsum flatten gather
graph.ops: layer_norm matmul max mean min outer pad permute range rebind reshape rms_norm softmax split stack
graph.quantization: BlockParameters QuantizationConfig QuantizationEncoding
graph.shape: Shape
graph.type: ConvInputLayout DeviceKind DeviceRef Dim DimLike FilterLayout Shape StaticDim SymbolicDim TensorType Type
graph.value: TensorValue TensorValueLike Value
graph.weight: Segment ShardingStrategy Weight
graph.weights: GGUFWeights SafetensorWeights WeightData Weights WeightsAdapter WeightsFormat load_weights weights_format
nn: AttentionWithRope ColumnParallelLinear ConstantLayerNorm Conv1D Conv2d Conv3D ConvTranspose1d
nn: DynamicRotaryEmbedding Embedding GroupNorm Identity Layer LayerList LayerNorm Linear LinearScalingParams
nn: Llama3RopeScalingParams Llama3RotaryEmbedding LongRoPERotaryEmbedding LongRoPEScalingParams MLP MoE MoEGate Module
nn: RMSNorm RotaryEmbedding Sequential Shardable TransformerBlock VocabParallelEmbedding YarnRotaryEmbedding clamp
nn: YarnScalingParams Allreduce DistributedTransformer DistributedTransformerBlock HyperConnection InputScaleSpec
nn: KVCacheInputs KVCacheParams MultiheadAttention QuantFormat ScaleGranularity ScaleOrigin Signals WeightScaleSpec
nn: TensorParallelAttentionWithRope Transformer forward_moe_sharded_layers split_batch split_batch_replicated
nn.activation: activation_function_from_name
nn.attention: AttentionMaskVariant AttentionWithRope MHAMaskVariant
nn.attention.attention_with_rope: AttentionWithRope
nn.attention.mask_config: AttentionMaskVariant MHAMaskVariant
nn.clamp: clamp
nn.conv: Conv1D Conv2d Conv3D
nn.conv_transpose: ConvTranspose1d
nn.embedding: Embedding VocabParallelEmbedding
nn.hooks: PrintHook
nn.identity: Identity
nn.layer: Layer LayerList Module Shardable add_layer_hook clear_hooks recursive_named_layers
nn.layer.layer: Layer LayerList Module Shardable add_layer_hook clear_hooks recursive_named_layers
nn.linear: ColumnParallelLinear Linear MLP
nn.moe: MoE MoEGate
nn.moe.moe: MoE MoEGate
nn.norm: ConstantLayerNorm GroupNorm LayerNorm RMSNorm
nn.norm.group_norm: GroupNorm
nn.norm.layer_norm: ConstantLayerNorm LayerNorm
nn.norm.rms_norm: RMSNorm
nn.rotary_embedding: Llama3RotaryEmbedding RotaryEmbedding YarnRotaryEmbedding
nn.sequential: Sequential
nn.stacked_linear: StackedLinear
nn.kv_cache: CacheLeafParamInterface KVCacheParamInterface KVCacheParams MultiKVCacheParams
nn.transformer: DistributedLogitsPostprocessMixin LogitsPostprocessMixin TransformerBlock distributed_logits_postprocess
nn.transformer.transformer: TransformerBlock
"""
NAMES = [(path.strip(), name) for line in TABLE.strip().splitlines()
         for path, names in [line.split(":")] for name in names.split()]  # fmt: skip


def test_names_are_where_max_has_them():
    missing = [f"{path}.{name}" for path, name in NAMES
               if not hasattr(importlib.import_module(f"maxjax.{path}"), name)]  # fmt: skip
    assert missing == []


def test_one_thing_is_at_all_its_paths():
    for name in {name for _, name in NAMES} - {"Module", "clamp"}:
        found = [
            getattr(importlib.import_module(f"maxjax.{path}"), name)
            for path, other in NAMES
            if other == name
        ]
        assert all(thing is found[0] for thing in found), name


def test_devices_by_their_specs():
    assert load_devices([DeviceSpec.cpu(), DeviceSpec(1)]) == [CPU(0), CPU(1)]
    with pytest.raises(ValueError, match="no device gpu:7"):
        load_devices([DeviceSpec.accelerator(7)])
    with pytest.raises(ValueError, match="'tpu'"):
        load_devices([DeviceSpec(0, "tpu")])


def test_activations_by_name_and_clamp_give_the_kind_they_get():
    x = TensorValue(jnp.array([-1.0, 2.0]))
    w = Weight("w", "float32", (2,), DeviceRef.CPU())
    w.value = x.value
    for run in (
        activation_function_from_name("relu"),
        lambda x: clamp(x, 0.0),
        lambda x: clamp(x, max=2, min=0),
    ):
        assert isinstance(run(x), TensorValue) and run(x).to_numpy().tolist() == [0, 2]
        assert isinstance(run(x.value), type(x.value))
    with pytest.raises(ValueError, match="unsafe cast"):
        clamp(TensorValue(jnp.ones(2, jnp.uint8)), -1, 300)
