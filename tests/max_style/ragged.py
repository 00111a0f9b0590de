"""A decoder over a paged cache as a MAX user writes it; only the imports say maxjax."""

from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Graph, TensorType
from maxjax.nn import MLP, AttentionWithRope, Embedding, Linear, RMSNorm, RotaryEmbedding
from maxjax.nn.attention import TensorParallelAttentionWithRope
from maxjax.nn.comm import Signals
from maxjax.nn.embedding import VocabParallelEmbedding
from maxjax.nn.kv_cache import KVCacheParams, MHAKVCacheParams
from maxjax.nn.linear import ColumnParallelLinear
from maxjax.nn.transformer import (
    DistributedTransformer,
    DistributedTransformerBlock,
    ReturnLogits,
    Transformer,
    TransformerBlock,
)

CPU, F = DeviceRef.CPU(), DType.float32


def cache_of(config: dict, page_size: int, devices: list[DeviceRef] | None = None) -> KVCacheParams:
    return MHAKVCacheParams(
        dtype=F, head_dim=config["head_dim"], num_layers=config["num_hidden_layers"],
        n_kv_heads=config["num_key_value_heads"], devices=devices or [CPU], page_size=page_size,
    )  # fmt: skip


def decoder(config: dict, kv_params: KVCacheParams, qk_norm: bool) -> Transformer:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    rope = RotaryEmbedding(
        width, heads, 10000.0, 64, head_dim=config["head_dim"], interleaved=False
    )

    def norm() -> RMSNorm:
        return RMSNorm(width, F, 1e-6, multiply_before_cast=False)

    layers = [
        TransformerBlock(
            attention=AttentionWithRope(
                rope=rope, num_attention_heads=heads, hidden_size=width, kv_params=kv_params,
                num_key_value_heads=config["num_key_value_heads"], devices=[CPU], use_qk_norm=qk_norm,
            ),
            mlp=MLP(F, None, width, config["intermediate_size"], [CPU]),
            attention_norm=norm(),
            mlp_norm=norm(),
        )
        for _ in range(config["num_hidden_layers"])
    ]  # fmt: skip
    vocab = config["vocab_size"]
    return Transformer(
        width, heads, layers, norm(), Linear(width, vocab, F, CPU), Embedding(vocab, width, F, CPU),
        kv_params, rope, ReturnLogits.ALL,
    )  # fmt: skip


def graph_of(model: Transformer) -> Graph:
    def forward(tokens, offsets, count, *rest):
        (cache,) = model.kv_params.unflatten_kv_inputs(iter(rest))
        return model(tokens.tensor, cache, count.tensor, offsets.tensor)

    types = [
        TensorType(DType.int64, ["total_seq_len"], CPU),
        TensorType(DType.uint32, ["input_row_offsets_len"], CPU),
        TensorType(DType.int64, ["return_n_logits"], CPU),
    ]
    return Graph("decoder", forward, [*types, *model.kv_params.flattened_kv_inputs()])


def distributed_decoder(
    config: dict, kv_params: KVCacheParams, qk_norm: bool, stacked: bool = False
):
    width, heads, devices = config["hidden_size"], config["num_attention_heads"], kv_params.devices
    rope = RotaryEmbedding(
        width, heads, 10000.0, 64, head_dim=config["head_dim"], interleaved=False
    )

    def norm() -> RMSNorm:
        return RMSNorm(width, F, 1e-6, multiply_before_cast=False)

    layers = [
        DistributedTransformerBlock(
            attention=TensorParallelAttentionWithRope(
                rope=rope, num_attention_heads=heads, hidden_size=width, kv_params=kv_params, stacked_qkv=stacked,
                num_key_value_heads=config["num_key_value_heads"], devices=devices, use_qk_norm=qk_norm,
            ),
            mlp=MLP(F, None, width, config["intermediate_size"], devices),
            attention_norm=norm(),
            mlp_norm=norm(),
            devices=devices,
        )
        for _ in range(config["num_hidden_layers"])
    ]  # fmt: skip
    vocab = config["vocab_size"]
    return DistributedTransformer(
        width, heads, layers, norm(), ColumnParallelLinear(width, vocab, F, devices),
        VocabParallelEmbedding(vocab, width, F, devices), kv_params, devices, rope, ReturnLogits.ALL,
    )  # fmt: skip


def distributed_graph_of(model: DistributedTransformer) -> Graph:
    signals = Signals(model.devices).input_types()

    def forward(tokens, offsets, count, *rest):
        buffers = [one.buffer for one in rest[: len(signals)]]
        caches = model.kv_params.unflatten_kv_inputs(iter(rest[len(signals) :]))
        return model(tokens.tensor, buffers, caches, count.tensor, offsets.tensor)

    types = [
        TensorType(DType.int64, ["total_seq_len"], CPU),
        TensorType(DType.uint32, ["input_row_offsets_len"], CPU),
        TensorType(DType.int64, ["return_n_logits"], CPU),
    ]
    return Graph("decoder", forward, [*types, *signals, *model.kv_params.flattened_kv_inputs()])
