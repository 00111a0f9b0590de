"""Decoders over several devices, whose hidden states are lists with one entry for each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ...absent import absent as _absent
from ...dtype import DType
from ...graph import ops
from ...graph.device import DeviceRef
from ...graph.placement.strategy import Shardable, ShardingStrategy
from ...graph.value import TensorValue
from ..comm.allreduce import Allreduce
from ..kv_cache.paged import PagedCacheValues
from ..layer import LayerList, Module
from .outputs import DistributedLogitsPostprocessMixin as DistributedLogitsPostprocessMixin
from .outputs import ReturnHiddenStates as ReturnHiddenStates
from .outputs import ReturnLogits as ReturnLogits
from .outputs import distributed_logits_postprocess as distributed_logits_postprocess
from .outputs import extract_hs as extract_hs
from .sequence import forward_sequential_layers as forward_sequential_layers
from .sequence import forward_sharded_layers as forward_sharded_layers


class ShardableCallable(Shardable, Protocol):
    """A layer that is called with one tensor and can be sharded."""

    def __call__(self, x: Any) -> Any: ...


class DistributedTransformerBlock(Module):
    """A TransformerBlock over several devices: attention and feed-forward network are split, norms replicated.

    Args (in MAX's order):
        attention: layer that takes and returns lists, such as TensorParallelAttentionWithRope.
        mlp: layer that is split by ``tensor_parallel``; the results of its shards are summed.
        attention_norm, mlp_norm: layers that are replicated on every device.
        devices: devices, one for each entry of a list.

    Attributes:
        self_attn, mlp, input_layernorm, post_attention_layernorm: layers, under their names in Hugging Face's
            checkpoints.
        mlp_shards, input_layernorm_shards, post_attention_layernorm_shards: shards of the layers, one for each device.
    """

    def __init__(
        self,
        attention: Any,
        mlp: Any,
        attention_norm: Any,
        mlp_norm: Any,
        devices: Sequence[DeviceRef],
    ):
        super().__init__()
        n = len(devices)
        self.devices = list(devices)
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = attention_norm
        self.post_attention_layernorm = mlp_norm
        self.mlp.sharding_strategy = ShardingStrategy.tensor_parallel(n)
        for norm in (attention_norm, mlp_norm):
            norm.sharding_strategy = ShardingStrategy.replicate(n)
        self.mlp_shards = mlp.shard(devices)
        self.input_layernorm_shards = attention_norm.shard(devices)
        self.post_attention_layernorm_shards = mlp_norm.shard(devices)
        self.allreduce = Allreduce(n)

    def __call__(
        self,
        layer_idx: Any,
        xs: Sequence[Any],
        signal_buffers: Sequence[Any],
        kv_collections: Sequence[PagedCacheValues],
        freqs_cis: Sequence[Any],
        input_row_offsets: Sequence[Any],
    ) -> list[TensorValue]:
        """``[tokens, E]`` for each device → the same; every argument except ``layer_idx`` is a list."""
        normed = forward_sharded_layers(self.input_layernorm_shards, xs)
        found = self.self_attn(
            layer_idx, normed, signal_buffers, kv_collections, freqs_cis, input_row_offsets
        )
        hs = [x + y for x, y in zip(xs, found, strict=True)]
        normed = forward_sharded_layers(self.post_attention_layernorm_shards, hs)
        found = self.allreduce(forward_sharded_layers(self.mlp_shards, normed), signal_buffers)
        return [h + y for h, y in zip(hs, found, strict=True)]


class DistributedTransformer(DistributedLogitsPostprocessMixin, Module):
    """A Transformer over several devices, which split heads, features and vocabulary. Arguments in MAX's order.

    In a Graph, XLA decides where values are computed; eagerly, each shard is computed on its device.

    Args:
        dim, n_heads, norm, kv_params, rope, return_logits, logits_scaling: as in Transformer.
        layers: DistributedTransformerBlocks.
        output, embedding: a ColumnParallelLinear and a VocabParallelEmbedding.
        devices: devices, one for each entry of a list.
        use_subgraphs: whether equal layers are traced only once, as a subgraph.
        subgraph_layer_groups: for each subgraph, the indices of its layers; by default one subgraph has all layers.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        layers: Sequence[Any],
        norm: Any,
        output: Any,
        embedding: Any,
        kv_params: Any,
        devices: Sequence[DeviceRef],
        rope: Any,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        use_subgraphs: bool = False,
        subgraph_layer_groups: Sequence[Sequence[int]] | None = None,
        logits_scaling: float = 1.0,
    ):
        super().__init__()
        self.dim, self.n_heads, self.kv_params, self.rope = dim, n_heads, kv_params, rope
        self.layers = LayerList(layers)
        self.norm = norm
        self.norm.sharding_strategy = ShardingStrategy.replicate(len(devices))
        self.norm_shards = norm.shard(devices)
        self.lm_head = output
        self.embed_tokens = embedding
        self.return_logits, self.devices = return_logits, list(devices)
        self.use_subgraphs, self.logits_scaling = use_subgraphs, logits_scaling
        self.subgraph_layer_groups = [
            list(one) for one in subgraph_layer_groups or [range(len(layers))]
        ]

    def __call__(
        self,
        tokens: Any,
        signal_buffers: Sequence[Any],
        kv_collections: Sequence[PagedCacheValues],
        return_n_logits: Any,
        input_row_offsets: Any,
    ) -> tuple[TensorValue, ...]:
        """Token ids ``[tokens]`` of B sequences → logits, as from Transformer; one buffer and cache for each device."""
        tables = [TensorValue(self.rope.freqs_cis).to(device) for device in self.devices]
        offsets = ops.distributed_broadcast(input_row_offsets.to(self.devices[0]), signal_buffers)

        def inputs(number: int, h: list[TensorValue]) -> list[Any]:
            index = ops.constant(number, DType.uint32, DeviceRef.CPU())
            return [index, h, signal_buffers, kv_collections, tables, offsets]

        h = forward_sequential_layers(
            list(self.layers),
            inputs_for_layer=inputs,
            weight_prefix_for_layer="layers.{}.".format,
            subgraph_layer_groups=self.subgraph_layer_groups if self.use_subgraphs else None,
            initial_hidden_states=self.embed_tokens(tokens, signal_buffers),
        )
        return self._postprocess_logits(h, offsets, return_n_logits, signal_buffers)


__getattr__ = _absent(__name__)
