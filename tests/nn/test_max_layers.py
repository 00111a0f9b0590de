"""MAX's layers and data without a counterpart of another name, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.driver import CPU as Host
from maxjax.driver import Buffer
from maxjax.dtype import DType
from maxjax.graph import (
    BufferType,
    DeviceRef,
    Graph,
    ShardingStrategy,
    TensorType,
    TensorValue,
    ops,
)
from maxjax.graph.dtype_promotion import _promote_weak_dtypes
from maxjax.graph.weights import WeightData
from maxjax.nn.activation import GatedActivation
from maxjax.nn.attention import MHAMaskVariant, MultiheadAttention
from maxjax.nn.float8_scale_stacking import can_use_fused_mlp
from maxjax.nn.kv_cache import (
    KVCacheParams,
    MultiKVCacheParams,
    RecurrentStateParams,
    RecurrentStateRegion,
    packed_page_stride,
    recurrent_leaf,
)
from maxjax.nn.linear import FusedMLP, linear
from maxjax.nn.moe import make_concatenated_gated_activation_fn
from maxjax.nn.parallel import ParallelArrayOps
from maxjax.nn.sampling.penalties import LogitPenalties

RNG = np.random.default_rng(6)
CPU = DeviceRef.CPU()
sigmoid = lambda x: 1 / (1 + np.exp(-x))


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def close(found, wanted, **how):
    np.testing.assert_allclose(np.asarray(found), wanted, **({"rtol": 2e-5, "atol": 1e-6} | how))


def test_gated_activations():
    x = 3 * draw(5, 8)
    gate, up = x[:, :4], x[:, 4:]
    low, narrow = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    close(GatedActivation()(x, 4), gate * sigmoid(gate) * up)
    close(GatedActivation("silu", limit=1.5)(x, 4), low * sigmoid(low) * narrow)
    found = GatedActivation("swigluoai", alpha=1.7, limit=1.5)
    close(found(TensorValue(x), 4).value, low * sigmoid(1.7 * low) * (narrow + 1))
    assert found.kernel_parameters() == {
        "activation": "swigluoai", "swiglu_alpha": 1.7, "swiglu_limit": 1.5}  # fmt: skip
    tanh = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    close(GatedActivation("gelu_tanh")(x, 4), tanh * up)
    own = GatedActivation(gated_activation_fn=lambda both, n: both[:, n:])
    close(own(x, 4), up)
    for wrong in (
        {"fused_activation": "relu"}, {"alpha": 1.0}, {"limit": -1.0}, {"fused_activation": "swigluoai"},
        {"fused_activation": "gelu_tanh", "limit": 1.0}, {"gated_activation_fn": min, "limit": 1.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"activation|limit"):
            GatedActivation(**wrong)
    with pytest.raises(ValueError, match="no setting"):
        own.kernel_parameters()
    of_two = make_concatenated_gated_activation_fn(ops.relu, 1.5)
    close(of_two(TensorValue(x), 4).value, np.clip(gate, 0, 1.5) * narrow)
    with pytest.raises(ValueError, match="positive"):
        make_concatenated_gated_activation_fn(ops.relu, 0)


def test_a_fused_mlp():
    mlp = FusedMLP("float32", 3, 4, [CPU], swiglu_limit=0.5)
    both, down, x = 3 * draw(8, 3), draw(3, 4), draw(2, 5, 3)
    mlp.load_state_dict({"gate_up_proj_fused": both, "down_proj.weight": down})
    gate, up = np.split(x @ both.T, 2, axis=-1)
    h = np.minimum(gate * sigmoid(gate), 0.5) * np.clip(up, -0.5, 0.5)
    close(mlp(x), h @ down.T)
    mlp.sharding_strategy = ShardingStrategy.replicate(2)
    close(mlp.shard([CPU, CPU])[1](TensorValue(x)).value, h @ down.T)
    with pytest.raises(ValueError, match="2 devices"):
        mlp.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    with pytest.raises(ValueError, match="one device"):
        FusedMLP("float32", 3, 4, [CPU, CPU])
    close(linear(TensorValue(x), both).value, x @ both.T)
    with pytest.raises(NotImplementedError, match="quant_config"):
        linear(x, both, quant_config=3)


def attention_of(x, values, heads, causal):
    q, k, v = (
        np.reshape(x @ values[f"{n}_proj.weight"].T + values[f"{n}_proj.bias"], (*x.shape[:2], heads, -1))
        for n in "qkv"
    )  # fmt: skip
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores += np.where(np.tri(x.shape[1], dtype=bool) | (not causal), 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)
    return y.reshape(x.shape) @ values["o_proj.weight"].T


@pytest.mark.parametrize("stacked", [False, True])
def test_multihead_attention(stacked):
    layer = MultiheadAttention(2, 8, qkv_has_bias=True, stacked_qkv=stacked)
    assert layer.qkv_has_bias and not layer.o_proj_has_bias and layer.stacked_qkv == stacked
    values = {f"{n}_proj.weight": draw(8, 8) for n in "qkvo"}
    values |= {f"{n}_proj.bias": draw(8) for n in "qkv"}
    given = values
    if stacked:
        given = {"o_proj.weight": values["o_proj.weight"]} | {
            f"qkv_proj.{kind}": np.concatenate([values[f"{n}_proj.{kind}"] for n in "qkv"])
            for kind in ("weight", "bias")
        }
    layer.load_state_dict(given)
    x = draw(2, 5, 8)
    close(layer(x), attention_of(x, values, 2, False), atol=1e-5)
    causal = layer(TensorValue(x), mask_variant=MHAMaskVariant.CAUSAL_MASK)
    close(causal.value, attention_of(x, values, 2, True), atol=1e-5)
    assert layer(x[:0]).shape == (0, 5, 8) and layer(x[:, :0]).shape == (2, 0, 8)
    if stacked:
        return
    over_two = MultiheadAttention(2, 8, [CPU, CPU], qkv_has_bias=True)
    over_two.load_state_dict(values)
    for one in over_two([TensorValue(x), TensorValue(x)], [None, None]):
        close(one.value, attention_of(x, values, 2, False), atol=1e-5)
    with pytest.raises(ValueError, match="a list of 2 inputs"):
        over_two(x)


def test_multihead_attention_refuses_what_does_not_fit():
    for wrong in ((3, 8), (2, 8, []), (3, 9, [CPU, CPU])):
        with pytest.raises(ValueError, match=r"multiple|device"):
            MultiheadAttention(*wrong)
    with pytest.raises(NotImplementedError, match="stacked_qkv"):
        MultiheadAttention(2, 8, [CPU, CPU], stacked_qkv=True)


def scales(gate, up):
    return {
        f"mlp.{part}_proj.weight_scale": WeightData.from_numpy(np.array(value, np.float32), part)
        for part, value in (("gate", gate), ("up", up))
    }


def test_scales_that_go_together():
    assert can_use_fused_mlp(scales(1, 1)) and not can_use_fused_mlp(scales([1], [2]))
    assert can_use_fused_mlp(scales([1], [2]), tensor_wise=True)
    assert can_use_fused_mlp(scales([[1], [2]], [[3]]))  # rows are stacked
    assert not can_use_fused_mlp(scales([[1, 2]], [[3]]))
    assert not can_use_fused_mlp(scales(1, [1])) and can_use_fused_mlp({})


def test_penalties_of_logits():
    logits, starts = draw(2, 40), np.array([0, 2, 4], np.uint32)
    data = np.array([[3, 2], [39, 1], [-1, 7], [5, 4]], np.int32)
    often, once = np.array([0.5, -2.0], np.float32), np.array([1.0, 0.25], np.float32)
    penalties = LogitPenalties.from_inputs([data, starts, often, once])
    less = np.zeros((2, 40), np.float32)
    less[0, 3], less[0, 39], less[1, 5] = 2.0, 1.5, -7.75
    close(jax.jit(penalties.apply)(logits), logits - less)
    kept = np.ones((2, 64), bool)
    kept[:, [5, 7, 39]] = False
    packed = np.packbits(kept, axis=-1, bitorder="little").view(np.int32)
    logits[0, 3] = -np.inf
    masked = penalties.apply_with_bitmask(TensorValue(logits), packed, -9.0)
    wanted = np.where(kept[:, :40], logits - less, -9.0)
    close(masked.value, wanted)
    three = penalties.apply_with_bitmask(logits[:, None], packed[:, None], -9.0)
    close(three[:, 0], wanted)
    assert [kind.dtype for kind in LogitPenalties.input_types(CPU)] == [
        DType.int32, DType.uint32, DType.float32, DType.float32]  # fmt: skip


def test_arrays_are_joined():
    parts = [draw(2, 3), draw(1, 3)]
    joined = ParallelArrayOps(max_workers=2).concatenate(parts, axis=-2)
    assert isinstance(joined, Buffer) and np.array_equal(joined.to_numpy(), np.concatenate(parts))
    for wrong in ([], [draw(2), draw(2).astype(np.float64)], [draw(2, 2), draw(2, 3)]):
        with pytest.raises(ValueError, match=r"no array|one dtype|must match"):
            ParallelArrayOps().concatenate(wrong)
    with pytest.raises(ValueError, match="host"):
        ParallelArrayOps(Host())
    with pytest.raises(IndexError, match="axis 2"):
        ParallelArrayOps().concatenate(parts, axis=2)


def test_recurrent_states_as_data():
    regions = tuple(RecurrentStateRegion(name, 2, (3, 4), DType.float32) for name in ("a/b", "c"))
    states = RecurrentStateParams(regions=regions, devices=[CPU], page_size=16)
    assert states.bytes_per_state == 2 * 2 * 12 * 4
    kinds = states.flattened_kv_inputs()
    assert kinds[0] == BufferType(DType.float32, ["a_b_rows", 3, 4], CPU)
    assert kinds[1] == TensorType(DType.uint32, [2, "replica_0_batch_size"], CPU)
    with Graph("states", input_types=kinds) as graph:
        (inputs,) = states.unflatten_kv_inputs(iter(graph.inputs))
        assert inputs.leaves[1].live_row_id(1).shape == ["replica_0_batch_size"]
        graph.output(inputs.leaves[0].live_row_id(0))
    with pytest.raises(TypeError, match="not of a TensorType"):
        states.get_symbolic_inputs()[0].leaves[0].live_row_id(0)
    paged = KVCacheParams(
        dtype=DType.float32, head_dim=4, num_layers=1, devices=[CPU], page_size=16
    )
    both = MultiKVCacheParams.from_params({"kv": paged, "state": states})
    assert recurrent_leaf(both) is states and recurrent_leaf(paged) is None
    beside = RecurrentStateParams(
        regions=regions, devices=[CPU]
    )  # its page_size is that of the paged cache
    assert MultiKVCacheParams.from_params({"state": beside, "kv": paged}).page_size == 16
    with pytest.raises(ValueError, match="has a page_size"):
        MultiKVCacheParams.from_params({"state": beside})
    with pytest.raises(ValueError, match="different names"):
        RecurrentStateParams(regions=regions[:1] * 2, devices=[CPU])
    with pytest.raises(ValueError, match="1 devices do not divide into 2 groups"):
        RecurrentStateParams(regions=regions[:1], devices=[CPU], data_parallel_degree=2)
    assert packed_page_stride(TensorValue(jnp.ones(2))).to_numpy().tolist() == [-1]
    assert packed_page_stride(kinds[0]) == TensorType(DType.int64, [1], CPU)


def test_collectives_that_normalise():
    rows, gammas = [draw(3, 4), draw(3, 4)], [draw(4), draw(4)]
    rms = lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)
    normed, joined = ops.allgather_rms_norm(rows, [None, None], gammas, 1e-3, weight_offset=1.0)
    for one, whole, gamma in zip(normed, joined, gammas, strict=True):
        close(whole.value, np.concatenate(rows))
        close(one.value, rms(np.concatenate(rows)) * (1 + gamma))
    residual = draw(3, 4)
    normed, sums = ops.reduce_scatter_rms_norm(rows, None, gammas, 1e-3, residuals=[residual] * 2)
    total = sum(rows) + residual
    for one, part, gamma, wanted in zip(normed, sums, gammas, (total[:2], total[2:]), strict=True):
        close(part.value, wanted)
        close(one.value, rms(wanted) * gamma)
    narrow = [x.astype(jnp.bfloat16) for x in rows]
    for found in ops.reduce_scatter_rms_norm(narrow, None, gammas, 1e-3):
        assert found[0].dtype == DType.bfloat16
    for call in (
        lambda: ops.allgather_rms_norm(rows[:1], None, gammas[:1], 0.1),
        lambda: ops.allgather_rms_norm(rows, None, gammas[:1], 0.1),
        lambda: ops.reduce_scatter_rms_norm(rows, None, gammas, 0.1, residuals=[residual]),
    ):
        with pytest.raises(ValueError, match=r"two devices|for each"):
            call()


def test_a_side_stream_is_a_call():
    kind = TensorType(DType.float32, [2], CPU)
    one, two = ops.side_stream(
        [np.ones(2, np.float32)], lambda x: (x, 2 * x), result_types=[kind] * 2
    )
    assert one.to_numpy().tolist() == [1, 1] and two.to_numpy().tolist() == [2, 2]
    with pytest.raises(TypeError, match="side_stream"):
        ops.side_stream([], lambda: jnp.ones(3), result_types=[kind])


def test_weak_dtypes_become_that_of_the_tensor():
    x = TensorValue(jnp.ones(2, jnp.bfloat16))
    for other in (2, 0.1, np.float64(0.1), np.array([1, 256]), np.array([0.1, 0.2])):
        assert [one.dtype for one in _promote_weak_dtypes(other, x)] == [DType.bfloat16] * 2
    y = TensorValue(jnp.ones(2, jnp.int32))
    assert [one.dtype for one in _promote_weak_dtypes(x, y)] == [DType.bfloat16, DType.int32]
    for strong, other in ((x, 257), (x, np.array([257])), (y, 0.5), (y, np.array([0.5]))):
        with pytest.raises(ValueError, match="unsafe cast"):
            _promote_weak_dtypes(strong, other)
    for strong, other in ((2, 3), (x, "text")):
        with pytest.raises(TypeError, match=r"TensorValue|no tensor"):
            _promote_weak_dtypes(strong, other)
