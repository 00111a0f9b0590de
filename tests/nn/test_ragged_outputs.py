"""Logits and hidden states of ragged batches, layers over lists, and settings of quantised models as data."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.graph import BufferValue, DeviceRef, Graph, TensorType, TensorValue, Weight
from maxjax.nn import Module, ReturnHiddenStates, ReturnLogits
from maxjax.nn.moe import forward_moe_sharded_layers
from maxjax.nn.quant_config import (
    InputScaleSpec,
    QuantConfig,
    QuantFormat,
    ScaleGranularity,
    ScaleOrigin,
    WeightScaleSpec,
    ceildiv,
    fp4_packed_k,
)  # fmt: skip
from maxjax.nn.transformer import distributed_transformer, transformer
from maxjax.nn.transformer.outputs import captures_by_device, fuse_captured_hidden_states

RNG = np.random.default_rng(0)
H = RNG.standard_normal((9, 4)).astype(np.float32)
HEAD = RNG.standard_normal((4, 7)).astype(np.float32)
OFFSETS = np.array([0, 3, 5, 9])
LAST = H[[2, 4, 8]]


def values(*arrays):
    return [TensorValue(jnp.asarray(one)) for one in arrays]


def norm(x):
    return x * 2


def head(x):
    return TensorValue(x.value @ HEAD)


class Decoder(transformer.LogitsPostprocessMixin):
    norm, lm_head = staticmethod(norm), staticmethod(head)

    def __init__(self, logits, states):
        self.return_logits, self.return_hidden_states = logits, states
        self.logits_scaling = 4.0


@pytest.mark.parametrize(
    ("logits", "states", "wanted"),
    [
        ("LAST_TOKEN", "NONE", []), ("LAST_TOKEN", "LAST", [LAST]), ("ALL", "ALL_NORMALIZED", [H * 2]),
        ("VARIABLE", "ALL", [H]), ("ALL", "SELECTED_LAYERS", [H + 1, H + 2]), ("ALL", "LAST_PER_DEVICE", [LAST]),
    ],
)  # fmt: skip
def test_the_logits_and_states_that_are_asked_for(logits, states, wanted):
    h, offsets, n = values(H, OFFSETS, np.array([2]))
    captured = [values(H + 1), values(H + 2)]
    decoder = Decoder(ReturnLogits[logits], ReturnHiddenStates[states])
    got = decoder._postprocess_logits(h, offsets, n, captured)
    more = {"LAST_TOKEN": [], "ALL": [H @ HEAD / 2, OFFSETS],
            "VARIABLE": [H[[1, 2, 3, 4, 7, 8]] @ HEAD / 2, [0, 2, 4, 6]]}[logits]  # fmt: skip
    for one, want in zip(got, [LAST @ HEAD / 2, *more, *wanted], strict=True):
        np.testing.assert_allclose(one.to_numpy(), want, rtol=1e-5)
    assert got[0].dtype == DType.float32


def test_the_same_on_two_devices():
    class Distributed(distributed_transformer.DistributedLogitsPostprocessMixin):
        return_logits, return_hidden_states = ReturnLogits.ALL, ReturnHiddenStates.LAST_PER_DEVICE
        devices, norm_shards = (None, None), (norm, norm)
        logit_softcapping = 3.0

        def lm_head(self, xs, signals):
            assert signals == ["signal"]
            return [head(x) for x in xs]

    (h, offsets, n) = values(H, OFFSETS, np.array([2]))
    got = Distributed()._postprocess_logits([h, h], [offsets, offsets], n, ["signal"])
    capped = 3 * np.tanh(H @ HEAD * 2 / 3)
    for one, want in zip(got, [capped[[2, 4, 8]], capped, OFFSETS, LAST, LAST], strict=True):
        np.testing.assert_allclose(one.to_numpy(), want, rtol=1e-5, atol=1e-6)


def test_captures_of_several_layers():
    given = values(H, H + 1, H + 2, H + 3)
    of_devices = captures_by_device(given, 2)
    assert [
        [one is given[i] for i, one in zip(row, part, strict=True)]
        for row, part in zip([(0, 1), (2, 3)], of_devices, strict=True)
    ]
    fused = fuse_captured_hidden_states(of_devices)
    np.testing.assert_array_equal(fused[1].to_numpy(), np.concatenate([H + 2, H + 3], axis=1))
    with pytest.raises(ValueError, match="4 captured hidden states .* 3 devices"):
        captures_by_device(given, 3)
    for state in (ReturnHiddenStates.ALL_NORMALIZED, ReturnHiddenStates.SELECTED_LAYERS):
        with pytest.raises(ValueError, match="needs"):
            transformer.extract_hs(state, given, given)


class Add(Module):
    def __init__(self, value):
        super().__init__()
        self.weight = Weight("weight", DType.float32, (4,), DeviceRef.CPU())
        self.weight.value = jnp.full(4, value)

    def __call__(self, h, factor):
        return h * factor + self.weight


@pytest.mark.parametrize("groups", [None, [[0, 2]]])
def test_layers_in_turn_with_and_without_subgraphs(groups):
    class Net(Module):
        def __init__(self):
            super().__init__()
            self.layers = [Add(1.0), Add(10.0), Add(100.0)]

        def __call__(self, h):
            seen = []
            h = transformer.forward_sequential_layers(
                self.layers, inputs_for_layer=lambda i, h: [h[0], h[0] * 0 + i + 1], initial_hidden_states=[h],
                on_layer_output=lambda i, h: seen.append(i), subgraph_layer_groups=groups,
                weight_prefix_for_layer="layers.{}.".format,
            )  # fmt: skip
            assert seen == [0, 1, 2]
            return h[0]

    net = Net()
    want = ((H + 1) * 2 + 10) * 3 + 100
    np.testing.assert_allclose(net(TensorValue(jnp.asarray(H))).to_numpy(), want, rtol=1e-6)
    graph = Graph("net", net, input_types=[TensorType(DType.float32, ("n", 4), DeviceRef.CPU())])
    assert graph.output_types == graph.input_types or list(graph.input_types) == graph.output_types


def test_layers_that_write_to_a_buffer_are_called_directly():
    class Count(Module):
        def __call__(self, h, count):
            count[...] = count[...] + h
            return h + 1.0

    pool = BufferValue(jnp.zeros(4))
    (h,) = transformer.forward_sequential_layers(
        [Count(), Count()], inputs_for_layer=lambda i, h: [h[0], pool],
        initial_hidden_states=[TensorValue(jnp.asarray(H[0]))], subgraph_layer_groups=[[0, 1]],
        weight_prefix_for_layer="layers.{}.".format,
    )  # fmt: skip
    np.testing.assert_allclose(h.to_numpy(), H[0] + 2, rtol=1e-6)
    np.testing.assert_allclose(pool.value, 2 * H[0] + 1, rtol=1e-6)


def test_layers_and_tensors_in_lists():
    assert forward_moe_sharded_layers([abs, str], [-1, 2]) == [1, "2"]
    assert transformer.forward_sharded_layers([abs, str], [-1, 2]) == [1, "2"]
    with pytest.raises(ValueError, match="1 layers and 2 tensors"):
        transformer.forward_sharded_layers([abs], [1, 2])
    with pytest.raises(ValueError, match="need weight_prefix_for_layer"):
        transformer.forward_sequential_layers(
            [abs],
            inputs_for_layer=lambda i, h: h,
            initial_hidden_states=[],
            subgraph_layer_groups=[[0]],
        )
    with pytest.raises(ValueError, match="names layer 5"):
        transformer.forward_sequential_layers(
            [abs], inputs_for_layer=lambda i, h: h, initial_hidden_states=[], subgraph_layer_groups=[[5]],
            weight_prefix_for_layer=str,
        )  # fmt: skip


def test_settings_of_quantised_models():
    layers = {"mlp_quantized_layers": range(2), "attn_quantized_layers": (0,)}
    fp8, mx, nv = (
        make(**layers)
        for make in (QuantConfig.blockscaled_fp8, QuantConfig.mxfp4, QuantConfig.nvfp4)
    )
    assert fp8.scales_granularity_mnk == (1, 128, 128) and mx.scales_granularity_mnk == (1, 1, 32)
    assert (nv.is_static, mx.is_dynamic, nv.is_fp4, mx.is_mx, fp8.is_fp4, nv.is_mx) == (
        True,
        True,
        True,
        True,
        False,
        False,
    )
    assert mx.attn_quantized_layers == {0} and mx.weight_scale.dtype == DType.float8_e8m0fnu
    assert (
        nv.shared_experts_use_quant(DType.uint8)
        and fp4_packed_k(32, nv) == 16
        and fp4_packed_k(32, fp8) == 32
    )
    assert ceildiv(7, 2) == 4 and str(ScaleGranularity.BLOCK) == "block"
    with pytest.raises(ValueError, match="block_size must be two integers"):
        WeightScaleSpec(ScaleGranularity.BLOCK, DType.float32)
    row = InputScaleSpec(ScaleGranularity.ROWWISE, ScaleOrigin.DYNAMIC, DType.float32)
    odd = QuantConfig(
        row,
        WeightScaleSpec(ScaleGranularity.TENSOR, DType.float32),
        set(),
        set(),
        QuantFormat.FBGEMM_FP8,
    )
    with pytest.raises(ValueError, match="unsupported input scale granularity"):
        odd.scales_granularity_mnk
    assert BufferValue(jnp.zeros(1)).dtype == DType.float32
