"""from_torch: modules of torch and of transformers, live state dicts, in every form that tensors have."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import maxjax
from maxjax import nn
from maxjax.errors import UserInputError
from tests.models.decoders import drawn
from tests.models.families import cases
from tests.oracles.models import OracleModel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 4, padding=1, permute=True, has_bias=True)
        self.norm, self.fc = nn.BatchNorm2d(4), nn.Linear(4, 2, has_bias=True)

    def __call__(self, x):
        return self.fc(jax.nn.relu(self.norm(self.conv(x))).mean((2, 3)))


def test_a_state_dict_of_arrays_with_other_names_and_axes():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    state = {"a.kernel": draw(3, 4).T.copy().T, "b.weight": draw(4, 6)[:, ::2], "mask": draw(2)}
    rename = {"a.kernel": ("0.weight", "i o -> o i"), "b.*": "1.*", "mask": None}
    model = maxjax.from_torch(
        state, nn.Sequential([nn.Linear(3, 4), nn.Linear(3, 4)]), rename=rename
    )
    np.testing.assert_array_equal(model[0].weight.value, state["a.kernel"].T)
    np.testing.assert_array_equal(model[1].weight.value, state["b.weight"])
    # The renaming may be a function; and one tensor several weights.
    both = {"qk": np.concatenate([state["a.kernel"].T, state["a.kernel"].T])}
    halves = {"qk": [("0.weight", "(0/2 o) i -> o i"), ("1.weight", "(1/2 o) i -> o i")]}
    model = maxjax.from_torch(both, model, rename=halves)
    np.testing.assert_array_equal(model[1].weight.value, state["a.kernel"].T)
    with pytest.raises(UserInputError, match="both renamed to 'x'"):
        maxjax.from_torch(state, model, rename=lambda name: "x")


def test_a_module_that_torch_has_wrapped():
    kind = lambda name, **values: type(name, (), values)()
    inner = kind("Net", state_dict=lambda self: {"weight": np.ones((4, 3), np.float32)})
    wrapped = kind("DistributedDataParallel", module=kind("OptimizedModule", _orig_mod=inner))
    assert maxjax.from_torch(wrapped, nn.Linear(3, 4)).weight.value.sum() == 12


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: maxjax.from_torch(3), "not a int"),
        (lambda: maxjax.from_torch({}), "pass the Module to fill"),
        (lambda: maxjax.from_torch({}, 3), "maxjax Module, not a int"),
        (lambda: maxjax.from_torch({}, Net(), dtype="float32"), "the given one has its own"),
        (lambda: maxjax.from_torch({}, cast=True), "for a model that is given"),
        (lambda: maxjax.from_torch({"a": 1}, config={"model_type": "llama"}), "'a' is a int"),
        (lambda: maxjax.from_torch({"fc.weigt": np.ones(1)}, Net()), "did you mean"),
        (
            lambda: maxjax.from_torch(
                {"weight": np.ones((4, 4))},
                nn.Linear(3, 4),
                rename={"weight": ("weight", "i o -> o i")},
            ),
            r"takes a tensor of shape \(3, 4\), not \(4, 4\)",
        ),
    ],
)
def test_what_cannot_be_done_is_said(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.oracle
def test_a_torch_module_by_its_names():
    import torch

    theirs = torch.nn.Sequential()
    theirs.add_module("conv", torch.nn.Conv2d(3, 4, 2, padding=1))
    theirs.add_module("norm", torch.nn.BatchNorm2d(4))
    theirs.add_module("fc", torch.nn.Linear(4, 2))
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 5)).astype(np.float32)
    with torch.no_grad():
        theirs.norm(theirs.conv(torch.tensor(x)))  # running statistics that are not the first
        h = theirs.eval().norm(theirs.conv(torch.tensor(x)))
        expected = theirs.fc(torch.relu(h).mean((2, 3))).numpy()
    net = maxjax.from_torch(theirs, Net())
    np.testing.assert_allclose(net(x), expected, atol=1e-6)
    # A copy, in bfloat16, of tensors that require gradients, lie across and are tied.
    low = torch.nn.Linear(4, 4).to(torch.bfloat16)
    low.weight = torch.nn.Parameter(low.weight.detach().T)
    pair = dict(low.named_parameters(prefix="0")) | dict(low.named_parameters(prefix="1"))
    layers = [nn.Linear(4, 4, "bfloat16", has_bias=True) for _ in range(2)]
    model = maxjax.from_torch(pair, nn.Sequential(layers))
    before = low.weight.detach().float().numpy().copy()
    with torch.no_grad():
        low.weight.zero_()
    assert model[1].weight.dtype == maxjax.DType.bfloat16
    np.testing.assert_array_equal(np.asarray(model[1].weight.value, np.float32), before)
    assert np.asarray(model[0].bias.value).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("value", [np.full((3, 2), 1e300), np.full((3, 2), 1 << 40)])
def test_a_function_gets_values_of_64_bits_as_they_are(value):
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=f"actual=DType.{value.dtype}"):
        maxjax.from_torch({"w": value}, model, rename={"w": ("weight", lambda x: x.T)})


@pytest.mark.oracle
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_module_of_transformers_is_its_model(is_tied):
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=is_tied,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    ids = np.arange(8)[None]
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    model = maxjax.from_torch(theirs)
    assert type(model.model.layers) is nn.LayerStack
    assert ("lm_head.weight" in model.raw_state_dict()) is not is_tied
    np.testing.assert_allclose(model(jnp.asarray(ids)), expected, atol=1e-5)
    split = maxjax.from_torch(theirs, mesh=maxjax.make_mesh(model=2, data=-1))
    np.testing.assert_allclose(split(jnp.asarray(ids)), expected, atol=1e-5)
    low = maxjax.from_torch(theirs.to(torch.bfloat16), dtype="float32")
    assert low.model.norm.weight.dtype == maxjax.DType.float32


@pytest.mark.oracle
def test_tensors_without_values_or_in_other_layouts_are_named():
    import torch

    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2, bias=False)
    cases = [
        (empty, "'weight' is a tensor on torch's meta device"),
        ({"weight": torch.eye(2).to_sparse()}, "'weight' is a sparse_coo tensor of torch"),
        (torch.nn.LazyLinear(2, bias=False), "'weight' is an uninitialized parameter"),
    ]
    for source, message in cases:
        with pytest.raises(ValueError, match=message):
            maxjax.from_torch(source, nn.Linear(2, 2))
        with pytest.raises(UserInputError, match=message):
            maxjax.from_torch(source, nn.Linear(2, 2), rename={"weight": ("weight", "i o -> o i")})


_ENCODER = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "pad_token_id": 0}  # fmt: skip


def modules_of_families():
    found = {case.family: case.model for case in reversed(cases.every())}
    for kind in ("Gte", "NomicBert", "JinaEmbeddingsV3"):
        found[kind] = lambda directory, kind=kind: encoder(kind, directory)
    return [pytest.param(make, id=name) for name, make in found.items()]


def encoder(kind, directory):
    made = OracleModel(
        f"{kind}ForMaskedLM", f"{kind}Config", _ENCODER, draw=drawn, file="lora.peft_names"
    )
    made.save(directory)
    return made


@pytest.mark.oracle
@pytest.mark.parametrize("make", modules_of_families())
def test_modules_of_transformers_with_other_names_than_their_files_are_the_same_model(
    make, tmp_path
):
    module = make(tmp_path).live()
    expected = maxjax.load(tmp_path)[0].raw_state_dict()
    found = maxjax.from_torch(module).raw_state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name].value, weight.value, err_msg=name)
