"""The layers of maxjax as a table. Every contract of ``test_layers.py`` runs over every row.

A layer is added by adding a row:

    Row("RMSNorm", lambda: nn.RMSNorm(E), (X,), ref.rms_norm),

In order:

* the name, which is the test's id: ``pytest tests/contracts -k RMSNorm``;
* a function that returns a new layer without values;
* its inputs: arrays, or lists of arrays. The first axis is the batch, of even length;
* a float64 NumPy function of the weights by name and the inputs (``references.py``).

Then, where the layer needs them:

* ``split``: patterns of the names of weights that a mesh splits over its axis ``model``; others are replicated.
  Sizes that are split are multiples of 4.
* ``values``: functions of the random values of some weights, such as a variance, which is positive.
* ``without``: the contracts that do not apply, each with the reason. They run all the same and must fail: if
  one of them passes, the row says less than the layer can do.
* ``is_typical``: whether the default set of tests runs a stack of these layers through all contracts as well. Of
  other layers that is for `pytest --all`.
* ``is_variant``: whether the contracts after the first are for `pytest --all` alone, as another row is of nearly
  the same layer.

Inputs have 32 features where a linear layer takes them: a block of a quantised weight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxjax import nn
from maxjax.dtype import DType
from maxjax.graph import BufferValue, DeviceRef, ShardingStrategy, TensorValue, Weight
from maxjax.nn.attention import MultiheadAttention
from maxjax.nn.kv_cache import KVCacheInputsPerDevice, MHAKVCacheParams, MLAKVCacheParams
from maxjax.nn.moe import Experts, SigmoidTopKRouter, StackedMoE
from maxjax.nn.ssm.convolution import CausalConv
from maxjax.nn.ssm.gated_norm import GatedNorm
from maxjax.nn.transposed_linear import TransposedLinear
from tests.contracts import references as ref
from tests.nn.layers import CPU, filled, random


@dataclass(frozen=True, eq=False)
class Row:
    """A layer; the module's docstring describes the fields."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Sequence[Any]
    reference: Callable[..., Any]
    split: Sequence[str] = ()
    values: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    is_typical: bool = False
    is_variant: bool = False

    def filled(self, seed: int = 0) -> tuple[nn.Module, dict[str, np.ndarray]]:
        """The layer with random weights, and those weights in float64 by name."""
        layer, weights = filled(self.make(), seed, 0.25)
        changed = {name: change(weights[name]) for name, change in self.values.items()}
        layer.load_state_dict(changed, strict=False, cast=True)
        return layer, weights | changed


# --- sizes, inputs and layers that several rows use --------------------------------------------

B, T, E = 2, 4, 32  # sequences, tokens, features
X = random(B, T, E)
HEADS = random(B, T, 2, 8)
ROWS = X.reshape(B * T, E)
IDS = np.array([[1, 0, 7, 7], [3, 2, -1, 5]], np.int32)
CHOSEN, SHARES = np.array([[0, 2]] * 4 + [[3, 2]] * 4, np.int32), random(B * T, 2, seed=2)
STATES = random(B, 5, seed=3), random(B, 5, seed=4)
TWO = [DeviceRef.CPU(0), DeviceRef.CPU(1)]

NO_LINEAR = {"lora": "has no linear layer", "quantised": "has no matrix in blocks"}
ARRAYS_ONLY = {"tensor_value": "takes arrays only", "graph": "takes arrays only"}
NO_EXPLICIT_PAGES = {"explicit_mesh": "a paged cache is not supported on Explicit axes"}
ROPE = nn.RotaryEmbedding(E, 4, 1e4, 16, interleaved=False)
MIXTRAL = partial(nn.MoEGate, shares="softmax of chosen")


def split_by(strategy: ShardingStrategy, layer: Any) -> Any:
    layer.sharding_strategy = strategy
    return layer


def attention(**options: Any) -> nn.AttentionWithRope:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": E}
    return nn.AttentionWithRope(rope=ROPE, **sizes | options)


class Tied(nn.Module):
    """A table of embeddings that is the head as well."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(8, E), nn.Linear(E, E)
        self.head = nn.Linear(E, 8)
        self.head.set_shared_weight("weight", self.table.weight)

    def __call__(self, ids):
        return self.head(self.body(self.table(ids)))


class Named(nn.Module):
    """A weight whose name is not that of its attribute, and a list and a tuple of layers."""

    def __init__(self):
        super().__init__()
        self.gain = Weight("own.name", "float32", (1, 1, E), CPU)
        self.first = [nn.Linear(E, E), [nn.Linear(E, E)]]
        self.last = nn.Linear(E, E), nn.RMSNorm(E)

    def __call__(self, x):
        x = self.first[1][0](self.first[0](x * self.gain))
        return self.last[1](self.last[0](x))


def named(w, x):
    for name in ("first.0.", "first.1.0.", "last.0."):
        x = ref.linear(ref.below(w, name), x * w["own.name"] if name == "first.0." else x)
    return ref.rms_norm(ref.below(w, "last.1."), x)


class WithKey(nn.Module):
    """A Dropout that is called with a key."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x):
        return self.dropout(x, jax.random.key(7))


class OverPages(nn.Module):
    """Attention over a paged cache, which is empty: each row of the batch is a sequence."""

    def __init__(self, attention: Any, params: Any, rope: nn.RotaryEmbedding):
        super().__init__()
        self.attention, self.params, self.rope = attention, params, rope

    def __call__(self, x):
        batch, length, size = map(int, x.shape)
        zero = TensorValue(jnp.zeros(batch, jnp.uint32))
        cache = KVCacheInputsPerDevice(
            BufferValue(jnp.zeros((batch, *self.params.shape_per_block))), zero,
            TensorValue(jnp.arange(batch, dtype=jnp.uint32)[:, None]), zero, zero,
        )  # fmt: skip
        offsets = TensorValue(jnp.arange(batch + 1, dtype=jnp.uint32) * length)
        layer, tokens = TensorValue(jnp.uint32(0)), TensorValue(x).reshape((batch * length, size))
        y = self.attention(layer, tokens, cache, self.rope.freqs_cis, offsets)
        y = y.reshape((batch, length, size))
        return y if isinstance(x, TensorValue) else y.value


def latent() -> OverPages:
    rope = nn.RotaryEmbedding(16, 4, 1e4, 16, head_dim=4)
    params = MLAKVCacheParams(
        dtype=DType.float32, head_dim=12, num_layers=1, devices=[CPU], num_q_heads=4, page_size=T
    )
    layer = nn.LatentAttentionWithRope(
        rope=rope, num_attention_heads=4, num_key_value_heads=4, hidden_size=E, kv_params=params,
        dtype="float32", q_lora_rank=6, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    return OverPages(layer, params, rope)


def paged() -> OverPages:
    params = MHAKVCacheParams(
        dtype=DType.float32, head_dim=8, num_layers=1, devices=[CPU], n_kv_heads=4, page_size=T
    )
    return OverPages(attention(kv_params=params), params, ROPE)


def in_attention(reference):
    return lambda w, x: reference(ref.below(w, "attention."), x)


# --- stacks of layers --------------------------------------------------------------------------


class Holder(nn.Module):
    """A model that has only this layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def __call__(self, *inputs):
        return self.layer(*inputs)


class Stack(nn.Module):
    """The results of stacked layers for one input."""

    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.layers = nn.LayerList(map(Holder, layers)).stack()

    def __call__(self, *inputs):
        return self.layers.scan(jnp.zeros(()), call=of_layer, inputs=inputs)[1]


def of_layer(layer, carry, inputs):
    return carry, layer(*inputs)


def stack_of(row: Row, count: int = 2) -> Row:
    """A row for a stack of layers, made from the row of one."""

    def reference(w, *inputs):
        results = []
        for i in range(count):
            own = ref.below(w, f"layers.{i}.")
            own = {name.removeprefix("layer."): value for name, value in own.items()}
            results.append(row.reference(own, *inputs))
        return jax.tree.map(lambda *each: np.stack(each), *results)

    return Row(
        f"stack-{row.name}",
        lambda: Stack([row.make() for _ in range(count)]),
        row.inputs,
        reference,
        split=[f"*{pattern}" for pattern in row.split],
        values={f"layers.{i}.layer.{n}": f for i in range(count) for n, f in row.values.items()},
        without=row.without,
        is_typical=row.is_typical,
    )


# --- the table ------------------------------------------------------------------------------------

LAYERS = [
    # linear layers
    Row("Linear", lambda: nn.Linear(E, 8), (X,), ref.linear, is_variant=True),
    Row("Linear-bias", lambda: nn.Linear(E, 8, has_bias=True), (X,), ref.linear),
    Row("Linear-clip", lambda: nn.Linear(E, 8, has_bias=True, clip_weight=0.3), (X,), ref.clipped_linear(0.3),
        without={"lora": "the bound is that of the base weight"}, is_variant=True),
    Row("Linear-rows", lambda: split_by(ShardingStrategy.rowwise(1), nn.Linear(E, 8, has_bias=True)), (X,),
        ref.linear, split=("*",)),
    Row("Linear-columns", lambda: split_by(ShardingStrategy.columnwise(1), nn.Linear(E, 8, has_bias=True)), (X,),
        ref.linear, split=("weight",)),
    Row("ColumnParallelLinear", lambda: nn.ColumnParallelLinear(E, 8, has_bias=True), (X,), ref.linear, split=("*",),
        is_variant=True),
    Row("ColumnParallelLinear-devices", lambda: nn.ColumnParallelLinear(E, 8, devices=TWO), ((X, X),),
        ref.parallel_linear, split=("*",),
        without={"lora": "its parts have no adapters"}),
    Row("TransposedLinear", lambda: TransposedLinear(E, 8, DType.float32), (X,), ref.transposed_linear,
        without={"quantised": "its rows are inputs", **ARRAYS_ONLY}),
    Row("StackedLinear", lambda: nn.StackedLinear(E, [8, 4], ["a", "b"], has_bias=True), (X,), ref.together("a", "b")),
    Row("StackedLinear-stacked", lambda: nn.StackedLinear(E, [8, 4], ["a", "b"], stacked=True), (X,), ref.linear,
        is_variant=True),
    Row("MLP", lambda: nn.MLP("float32", None, E, 64, has_bias=True), (X,), ref.mlp,
        split=("gate_proj.*", "up_proj.*", "down_proj.weight"), is_typical=True),
    Row("FusedMLP", lambda: nn.FusedMLP("float32", E, 64, [CPU]), (X,), ref.fused_mlp),
    Row("Sequential", lambda: nn.Sequential([nn.Linear(E, E), nn.Linear(E, 8)]), (X,), ref.in_turn(2)),
    Row("LayerStack", lambda: nn.LayerList([nn.Linear(E, E, has_bias=True) for _ in range(3)]).stack(), (X,),
        ref.in_turn(3), without={"stack": "stacks within stacks are not supported"}),
    Row("Tied", Tied, (IDS,), ref.tied, split=("table.weight",),
        without={"lora": "the table and the head have adapters of their own"}),
    Row("Named", Named, (X,), named),
    # tables
    Row("Embedding", lambda: nn.Embedding(8, E), (IDS,), ref.embedding, split=("*",)),
    Row("VocabParallelEmbedding", lambda: nn.VocabParallelEmbedding(8, E, devices=TWO), (IDS,), ref.embedding,
        split=("*",), without={"quantised": "a table of several devices stays floats"}),
    # norms
    Row("LayerNorm", lambda: nn.LayerNorm(E), (X,), ref.layer_norm, without=NO_LINEAR),
    Row("RMSNorm", lambda: nn.RMSNorm(E), (X,), ref.rms_norm, without=NO_LINEAR),
    Row("ConstantLayerNorm", lambda: nn.ConstantLayerNorm(E), (X,), lambda w, x: ref.normalised(x, -1, 1e-5),
        without=NO_LINEAR, is_variant=True),
    Row("GroupNorm", lambda: nn.GroupNorm(2, 4, device=CPU), (random(B, 4, 5),), ref.group_norm(2), without=NO_LINEAR),
    Row("BatchNorm1d", lambda: nn.BatchNorm1d(4), (random(B, 4, 5),), ref.batch_norm,
        values={"running_var": lambda v: v**2 + 0.5}, without=NO_LINEAR),
    Row("BatchNorm2d", lambda: nn.BatchNorm2d(4), (random(B, 4, 3, 2),), ref.batch_norm,
        values={"running_var": lambda v: v**2 + 0.5}, without=NO_LINEAR, is_variant=True),
    # convolutions
    Row("Conv1D", lambda: nn.Conv1D(3, 4, 6, stride=2, padding=1, has_bias=True), (random(B, 7, 4),),
        ref.conv(stride=2, padding=1), without=NO_LINEAR),
    Row("Conv2d", lambda: nn.Conv2d((3, 2), 4, 6, num_groups=2), (random(B, 5, 4, 4),), ref.conv(groups=2),
        without=NO_LINEAR),
    Row("Conv2d-permute", lambda: nn.Conv2d(2, 3, 4, has_bias=True, permute=True), (random(B, 3, 4, 4),),
        ref.channels_first(ref.conv()), without=NO_LINEAR, is_variant=True),
    Row("Conv3D", lambda: nn.Conv3D(1, 2, 2, 3, 4), (random(B, 2, 3, 3, 3),), ref.conv(), without=NO_LINEAR,
        is_variant=True),
    Row("ConvTranspose1d", lambda: nn.ConvTranspose1d(3, 4, 6, stride=2, has_bias=True), (random(B, 4, 4),),
        ref.conv_transpose(2), without=NO_LINEAR),
    # recurrent layers
    Row("LSTMCell", lambda: nn.LSTMCell(3, 5), (random(B, 3), STATES), ref.lstm_cell, without=NO_LINEAR),
    Row("GRUCell", lambda: nn.GRUCell(3, 5), (random(B, 3), STATES[0]), ref.gru_cell, without=NO_LINEAR,
        is_variant=True),
    Row("LSTM", lambda: nn.LSTM(3, 5, bidirectional=True), (random(B, T, 3),), ref.lstm_both_ways(5),
        without=NO_LINEAR),
    Row("GRU", lambda: nn.GRU(3, 5, num_layers=2), (random(B, T, 3),), ref.gru(2, 5), without=NO_LINEAR,
        is_variant=True),
    # attention
    Row("RotaryEmbedding", lambda: nn.RotaryEmbedding(16, 2, 1e4, 8), (HEADS,), lambda w, x: ref.rope(x),
        without=NO_LINEAR),
    Row("Llama3RotaryEmbedding", lambda: nn.Llama3RotaryEmbedding(16, 2, 1e4, 8, interleaved=False, scaling_params=
                                                                  nn.LinearScalingParams(2.0)), (HEADS,),
        lambda w, x: ref.rope(x, interleaved=False, stretch=2), without=NO_LINEAR, is_variant=True),
    Row("MultiHeadAttention", lambda: nn.MultiHeadAttention(E, 4), (X,), ref.multi_head_attention(4)),
    Row("MultiheadAttention", lambda: MultiheadAttention(4, E, qkv_has_bias=True), (X,), ref.max_attention(4)),
    Row("AttentionWithRope", lambda: attention(num_key_value_heads=2, use_qk_norm=True), (X,),
        ref.rope_attention(4, 2, 8, qk_norm=True), split=("q_proj.weight", "o_proj.weight")),
    Row("AttentionWithRope-stacked", lambda: attention(stacked_qkv=True, has_bias=True), (X,),
        ref.rope_attention(4, 4, 8), split=("qkv_proj.*", "o_proj.weight")),
    Row("AttentionWithRope-paged", paged, (X,), in_attention(ref.rope_attention(4, 4, 8)),
        split=("*.weight",), without=NO_EXPLICIT_PAGES, is_variant=True),
    Row("LatentAttentionWithRope-paged", latent, (X,), in_attention(ref.latent_attention(4, 8, 4, 8)),
        without=NO_EXPLICIT_PAGES),
    Row("TransformerBlock", lambda: nn.TransformerBlock(attention(), nn.MLP("float32", None, E, E), nn.RMSNorm(E),
                                                        nn.RMSNorm(E)), (X,), ref.block(ref.rope_attention(4, 4, 8)),
        split=("*_proj.weight",)),
    # mixtures of experts
    Row("MoEGate", lambda: nn.MoEGate([CPU], E, 4, 2, "float32"), (X,), ref.gate(2),
        without={"quantised": "routers stay floats"}),
    Row("SigmoidTopKRouter", lambda: SigmoidTopKRouter([CPU], E, 4, 2, "float32"), (ROWS,), ref.sigmoid_router(2),
        without={"quantised": "routers stay floats"}),
    Row("Experts", lambda: Experts(E, E, 4, DType.float32), (ROWS, CHOSEN, SHARES), ref.experts, split=("*",),
        without={"lora": "experts have no adapters", **ARRAYS_ONLY}),
    Row("MoE", lambda: nn.MoE([CPU], E, 4, 2, E, gate_cls=MIXTRAL, has_shared_experts=True, shared_experts_dim=E,
                              dtype="float32"), (X,), ref.moe(2), split=("experts.*", "shared_experts.*"),
        without={"lora": "experts have no adapters"}),
    Row("StackedMoE", lambda: StackedMoE([CPU], E, 4, 2, 6, nn.MoEGate, "float32", has_bias=True,
                                         router_dtype="float32"), (ROWS,), ref.stacked_moe(2),
        without={"quantised": "only experts of their own stay in blocks"}),
    # others
    Row("HyperConnection", lambda: nn.HyperConnection(3, 2, CPU, hc_sinkhorn_iters=2), (random(B, 2, 3),),
        ref.hyper_connection(2, 2), without=NO_LINEAR),
    Row("CausalConv", lambda: CausalConv(6, 3, has_bias=True), (random(B, T, 6),), ref.causal_conv,
        without=NO_LINEAR | {"tensor_value": "gives arrays only"}),
    Row("GatedNorm", lambda: GatedNorm(8, DType.float32, 1e-5, groups=2), (random(B, T, 8), random(B, T, 8, seed=2)),
        ref.gated_norm(2), without=NO_LINEAR),
    Row("Dropout", WithKey, (X,), ref.dropout(0.5, 7), without=NO_LINEAR),
    Row("Identity", nn.Identity, (X,), lambda w, x: x, without=NO_LINEAR),
]  # fmt: skip

STACKS = [stack_of(row) for row in LAYERS if "stack" not in row.without]
