"""The arguments of layers: defaults, the two names of ``has_bias``, and what is only for files of MAX."""

import inspect
import pydoc

import jax
import jax.numpy as jnp
import pytest

import maxjax
from maxjax import nn
from maxjax.dtype import DType
from maxjax.errors import UnknownArgumentError
from maxjax.graph import DeviceRef
from maxjax.nn.linear import linear

CPU = DeviceRef.CPU()
# A layer as a user of JAX makes it, and the shape of its input.
SIMPLE = {
    "Linear": (lambda **more: nn.Linear(3, 2, **more), (5, 3)),
    "MLP": (lambda **more: nn.MLP(hidden_dim=3, feed_forward_length=4, **more), (5, 3)),
    "LayerNorm": (lambda **more: nn.LayerNorm(3, **more), (5, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(3), (5, 3)),
    "Embedding": (lambda: nn.Embedding(7, 3), None),
    "StackedLinear": (lambda **more: nn.StackedLinear(3, [2, 2], ["q", "k"], **more), (5, 3)),
    "Conv1D": (lambda **more: nn.Conv1D(2, 3, 4, **more), (1, 5, 3)),
    "Conv2d": (lambda **more: nn.Conv2d(2, 3, 4, **more), (1, 5, 5, 3)),
    "Conv3D": (lambda **more: nn.Conv3D(2, 2, 2, 3, 4, **more), (1, 5, 5, 5, 3)),
    "ConvTranspose1d": (lambda **more: nn.ConvTranspose1d(2, 3, 4, **more), (1, 5, 3)),
    "MultiHeadAttention": (lambda **more: nn.MultiHeadAttention(8, 2, **more), (1, 3, 8)),
    "LSTM": (lambda **more: nn.LSTM(3, 4, **more), (1, 5, 3)),
    "GRUCell": (lambda **more: nn.GRUCell(3, 4, **more), (5, 3)),
}
HAS_BIAS = [name for name in SIMPLE if name not in ("RMSNorm", "Embedding")]
BIAS_BY_DEFAULT = {"LayerNorm", "MultiHeadAttention", "LSTM", "GRUCell"}
# Layers and functions with arguments of MAX that maxjax does not have, and how a file of MAX calls them.
ONLY_MAX = [
    (nn.Linear, "quant_config", lambda **more: nn.Linear(3, 2, "float32", CPU, **more)),
    (nn.MLP, "quant_config", lambda **more: nn.MLP("float32", None, 3, 4, [CPU], **more)),
    (nn.StackedLinear, "quant_config", lambda **more: nn.StackedLinear(3, [2], ["q"], **more)),
    (nn.MoE, "quant_config", lambda **more: nn.MoE([CPU], 6, 4, 2, 8, **more)),
    (nn.MoE, "shared_experts_quant_config", lambda **more: nn.MoE([CPU], 6, 4, 2, 8, **more)),
    (nn.RotaryEmbedding, "_freqs_cis", lambda **more: nn.RotaryEmbedding(8, 2, 1e4, 16, **more)),
    (nn.YarnRotaryEmbedding, "_freqs_cis", lambda **more: nn.YarnRotaryEmbedding(8, 2, 1e4, 16, **more)),
    (linear, "quant_config", lambda **more: linear(jnp.ones((1, 2)), jnp.ones((3, 2)), **more)),
]  # fmt: skip


def biases(layer) -> list[str]:
    return [name for name in layer.raw_state_dict() if "bias" in name]


@pytest.mark.parametrize("name", SIMPLE)
def test_sizes_alone_make_a_layer_of_float32_on_the_cpu(name):
    make, shape = SIMPLE[name]
    layer = make()
    weights = layer.raw_state_dict().values()
    assert {weight.dtype for weight in weights} == {DType.float32}
    assert {weight.device for weight in weights} == {CPU}
    x = jnp.array([0, 6]) if shape is None else jnp.ones(shape)
    out = maxjax.init(layer, jax.random.key(0))(x)
    assert all(jnp.isfinite(array).all() for array in jax.tree.leaves(out))


@pytest.mark.parametrize("name", HAS_BIAS)
def test_bias_is_another_name_of_has_bias(name):
    make, first = SIMPLE[name][0], "use_bias" if name == "LayerNorm" else "has_bias"
    assert bool(biases(make())) == (name in BIAS_BY_DEFAULT)
    for value in (True, False):
        found = [
            biases(make(**given))
            for given in ({"bias": value}, {first: value}, {"bias": value, first: value})
        ]
        assert [bool(one) for one in found] == [value] * 3 and found[0] == found[1] == found[2]
        with pytest.raises(TypeError, match=rf"{first}={value} and bias={not value} are two names"):
            make(**{first: value, "bias": not value})  # fmt: skip


def test_has_bias_keeps_its_position():
    assert biases(nn.Linear(3, 2, "float32", CPU, True)) == ["bias"]
    assert len(biases(nn.MLP("float32", None, 3, 4, [CPU], nn.Linear, True))) == 3
    assert biases(nn.LayerNorm(3, [CPU], "float32", 1e-5, False)) == []
    with pytest.raises(TypeError, match="has_bias=True.*bias=False"):
        nn.Linear(3, 2, "float32", CPU, True, bias=False)


def test_an_mlp_needs_its_sizes_by_name_or_at_their_position():
    assert nn.MLP("bfloat16", None, 3, 8).gate_proj.weight.dtype is DType.bfloat16
    for make in (nn.MLP, lambda: nn.MLP(3, 8), lambda: nn.MLP(hidden_dim=3)):
        with pytest.raises(TypeError, match=r"hidden_dim=…, feed_forward_length=…"):
            make()


@pytest.mark.parametrize(("what", "name", "make"), ONLY_MAX)
def test_what_only_files_of_max_pass_is_not_shown_and_raises_with_advice(what, name, make):
    assert name not in inspect.signature(what).parameters
    assert name not in pydoc.plaintext.document(what)
    make(**{name: None})
    with pytest.raises(NotImplementedError, match=rf"\w+\({name}=…\) is not supported: .*\w"):
        make(**{name: "given"})


def test_hidden_arguments_keep_their_positions():
    layer = nn.Linear(3, 2, "float32", CPU, False, None, None, "inner", 0.5)
    assert list(layer.raw_state_dict()) == ["inner.weight"] and layer.clip_weight == 0.5
    with pytest.raises(
        NotImplementedError, match=r"Linear\(quant_config=…\) is not supported: .*maxjax\.load"
    ):
        nn.Linear(3, 2, "float32", CPU, False, None, object())  # fmt: skip
    assert (
        nn.MLP("float32", None, 3, 4, [CPU], nn.Linear, False, "silu", None, 7.0).swiglu_limit == 7
    )


def test_an_mlp_passes_quant_config_to_a_linear_layer_of_ones_own():
    given = []

    def make(*, quant_config, **options):
        given.append(quant_config)
        return nn.Linear(**options)

    nn.MLP("float32", None, 3, 4, [CPU], make, quant_config="mine")
    assert given == ["mine"] * 3


def test_an_unknown_argument_does_not_show_what_is_only_for_files_of_max():
    with pytest.raises(UnknownArgumentError, match="it takes in_dim, out_dim") as caught:
        nn.Linear(3, 2, zzz=1)
    assert "quant_config" not in str(caught.value) and "bias" in str(caught.value)
