"""ExpertStack: one array for the weights of all experts, in layers alone and in a LayerStack."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax import init, load_weights
from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Weight
from maxjax.graph.placement import arrays
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.models import MixtralConfig
from maxjax.models.mixtral import Mixtral
from maxjax.nn import LayerList, Linear
from maxjax.nn.layer import ExpertStack, LayerStack
from maxjax.nn.layer.load import stacks

L, X, E, F = 3, 4, 8, 12
CONFIG = MixtralConfig(
    32,
    E,
    F,
    num_hidden_layers=L,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=X,
    num_experts_per_tok=2,
)
PARTS = {"w1": (F, E), "w2": (E, F), "w3": (F, E)}


def made(stacked=True, filled=True):
    model = Mixtral(CONFIG, "float32", stacked=stacked)
    return init(model, jax.random.key(0)) if filled else model


def state(model):
    return {name: np.asarray(w.value) for name, w in model.raw_state_dict().items()}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def name_of(layer, expert, part):
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"


def leaves(model):
    found = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path, simple=True): leaf for path, leaf in found}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [True, False])
def test_one_leaf_for_each_projection(stacked):
    found = {n: a.shape for n, a in leaves(made(stacked)).items() if ".experts." in n}
    if stacked:
        prefix = "model.layers.*.block_sparse_moe.experts.*"
        assert found == {f"{prefix}.{p}.weight": (L, X, *shape) for p, shape in PARTS.items()}
    else:
        prefix = "model.layers.{}.block_sparse_moe.experts.*"
        assert found == {
            f"{prefix.format(i)}.{p}.weight": (X, *s) for i in range(L) for p, s in PARTS.items()
        }
    assert jax.tree.structure(made(stacked)) == jax.tree.structure(made(stacked, filled=False))


def test_experts_have_names_values_and_random_draws_of_their_own():
    one, two = state(made()), state(made(stacked=False))
    same(one, two)
    assert {name_of(i, x, p) for i in range(L) for x in range(X) for p in PARTS} < set(one)
    # As separate layers draw them.
    alone = LayerList(Linear(E, F, DType.float32, DeviceRef.CPU()) for _ in range(X))
    together = ExpertStack(Linear(E, F, DType.float32, DeviceRef.CPU()), X)
    same(*(state(init(layers, jax.random.key(1))) for layers in (alone, together)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [True, False])
def test_views(stacked):
    model = made(stacked)
    arrays, (name, leaf) = leaves(model), next(n for n in leaves(model).items() if "w3" in n[0])
    expert = model.model.layers[1].block_sparse_moe.experts[2]
    at = (1, 2) if stacked else 2
    leaf = leaf if stacked else arrays[name.replace("layers.0", "layers.1")]
    np.testing.assert_array_equal(expert.w3.weight.value, leaf[at])
    np.testing.assert_allclose(expert.w3(jnp.ones(E)), leaf[at].sum(-1), rtol=1e-5)
    expert.w3.weight.value = jnp.full((F, E), 7.0)
    changed = leaves(model)[name if stacked else name.replace("layers.0", "layers.1")]
    expected = np.array(leaf)
    expected[at] = 7
    np.testing.assert_array_equal(changed, expected)
    assert expert is model.model.layers[1].block_sparse_moe.experts[2]
    assert model.raw_state_dict()[name_of(1, 2, "w3")] is expert.w3.weight
    with pytest.raises(ValueError, match="belongs to a LayerStack"):
        expert.w3.weight.sharding_strategy = None


@pytest.mark.extra
def test_a_layer_alone_has_its_part_of_the_stack():
    model = made()
    layer = model.model.layers[2]
    found = leaves(layer)
    whole = leaves(model)["model.layers.*.block_sparse_moe.experts.*.w2.weight"]
    np.testing.assert_array_equal(found["block_sparse_moe.experts.*.w2.weight"], whole[2])
    again = jax.tree.map(lambda a: a + 1, layer)
    np.testing.assert_array_equal(
        again.block_sparse_moe.experts[3].w2.weight.value, whole[2, 3] + 1
    )
    x = jnp.ones((2, E))
    run = jax.jit(lambda mlp, x: mlp(x))
    moe = made(stacked=False).model.layers[2].block_sparse_moe
    np.testing.assert_array_equal(run(layer.block_sparse_moe, x), run(moe, x))


def test_rebuilt_models_see_their_own_values():
    model = jax.tree.map(lambda a: a * 2, made())
    same({n: a * 2 for n, a in state(made()).items()}, state(model))
    experts = model.model.layers[1].block_sparse_moe.experts
    assert len(experts) == X and isinstance(experts, ExpertStack)
    assert experts[0].w1.weight.name == name_of(1, 0, "w1")


def test_unstacked_and_stacked_again():
    model, before = made(), state(made())
    held = model.model.layers[1].block_sparse_moe.experts[3].w1.weight
    with pytest.raises(ValueError, match="belongs to a LayerStack"):
        model.model.layers[1].block_sparse_moe.experts.unstack()
    model.unstack()
    same(state(model), before)
    assert model.model.layers[1].block_sparse_moe.experts[3].w1.weight is held
    assert isinstance(model.model.layers[1].block_sparse_moe.experts, ExpertStack)
    held.value = held.value + 1
    before[name_of(1, 3, "w1")] = before[name_of(1, 3, "w1")] + 1
    same(state(model.stack()), before)
    assert not isinstance(model.unstack().model.layers, LayerStack)
    moe = model.model.layers[0].block_sparse_moe
    x = jnp.arange(2.0 * E).reshape(2, E) / E
    expected = moe(x)
    moe.experts = moe.experts.unstack()
    assert moe.experts[1].w1.weight.home is None
    np.testing.assert_allclose(moe(x), expected, rtol=1e-5, atol=1e-6)
    same(state(model), before)


@pytest.mark.sampled
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(stacked, how):
    model = made(stacked)
    model.model.layers[1].block_sparse_moe.experts[2]  # a view that exists
    new, before = how(model), state(model)
    new.model.layers[1].block_sparse_moe.experts[2].w1.weight.value = jnp.zeros((F, E))
    same(state(model), before)
    before[name_of(1, 2, "w1")] = np.zeros((F, E), np.float32)
    same(state(new), before)


def test_lenient_loads_one_by_one():
    model, values = made(filled=False), state(made())
    for name, value in reversed(values.items()):
        assert not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))
        model.load_state_dict({name: value}, strict=False)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))
    same(state(model), values)
    model.load_state_dict({name_of(0, 1, "w2"): np.zeros((E, F), np.float32)}, strict=False)
    assert not np.any(leaves(model)["model.layers.*.block_sparse_moe.experts.*.w2.weight"][0, 1])


def test_partly_filled_layers_alone():
    model = made(filled=False)
    values = state(made())
    first = {n: v for n, v in values.items() if n.startswith("model.layers.0.")}
    model.load_state_dict(first, strict=False)
    layer = model.model.layers[0]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer))
    assert leaves(layer)["block_sparse_moe.experts.*.w1.weight"].shape == (X, F, E)
    model.unstack()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model.model.layers[0]))
    assert isinstance(jax.tree.leaves(model.model.layers[1])[0], jax.ShapeDtypeStruct)
    model.load_state_dict(values)
    same(state(model), values)


SPREAD = [None, {"model": 4}, {"expert": 4, "model": 2}, {"expert": 8}, {"fsdp": 4}, {"expert": 2}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("stacked", [True, False])
def test_files_are_read_into_the_arrays(tmp_path, monkeypatch, spread, where, stacked):
    values = state(made())
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors")
    if where == "device":
        monkeypatch.setattr(stacks, "is_host", lambda sharding: False)
    model = made(stacked, filled=False)
    if spread is not None:
        model.to(maxjax.make_mesh(**spread))
    places = [leaf.sharding for leaf in jax.tree.leaves(model)]
    model.load_state_dict(load_weights(tmp_path))
    if spread is not None:
        assert [leaf.sharding for leaf in jax.tree.leaves(model)] == places
    same(state(model), values)
    written = {n: np.concatenate(list(rows)) for n, rows in written_rows(model).items()}
    same(written, values)


@pytest.mark.parametrize("where", ["host", "device"])
def test_experts_that_are_kept_together_in_memory(tmp_path, monkeypatch, where):
    """As on TPUs, where XLA would make 128 experts the columns of registers; here it would be 4."""
    values, ids = state(made()), jnp.arange(6)[None]
    expected = made()(ids)
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors")
    monkeypatch.setattr(arrays, "_CHOOSES_LAYOUTS", "cpu")
    monkeypatch.setattr(arrays, "LANES", X)
    if where == "device":
        monkeypatch.setattr(stacks, "is_host", lambda sharding: False)
    model = made(filled=False).to(maxjax.make_mesh(data=2))
    placeholders = jax.tree.leaves(model)
    order = lambda leaf: leaf.format.layout.major_to_minor
    assert {order(leaf) for leaf in placeholders if leaf.ndim == 4} == {(0, 1, 2, 3), (0, 1, 3, 2)}
    model.load_state_dict(load_weights(tmp_path))
    if where == "device":
        for leaf, one in zip(jax.tree.leaves(model), placeholders, strict=True):
            assert leaf.ndim < 4 or order(leaf) == order(one)
    np.testing.assert_allclose(
        jax.jit(lambda model, ids: model(ids))(model, ids), expected, atol=1e-5
    )
    same(state(model), values)
    moved = made().to(maxjax.make_mesh(data=2))
    for leaf, one in zip(jax.tree.leaves(moved), placeholders, strict=True):
        assert leaf.ndim < 4 or order(leaf) == order(one)
    same(state(moved), values)


def written_rows(model):
    from maxjax.graph.weights.host_reads import data_rows
    from maxjax.graph.weights.writing import weight_data

    return {n: data_rows(weight_data(n, w)) for n, w in model.raw_state_dict().items()}


def test_experts_in_different_encodings_are_a_list():
    model = made(filled=False)
    kind = QuantizationEncoding.Q8_0
    moe = ExpertStack(Linear(32, F, DType.float32, DeviceRef.CPU()), 2)
    moe.holder("weight").redeclare(DType.uint8, kind.packed_shape((F, 32)), kind)
    assert moe[1].weight.quantization_encoding is kind and moe[1].weight.dtype is DType.uint8
    assert jax.tree.leaves(moe)[0].shape == (2, F, 34)
    with pytest.raises(ValueError, match="belongs to a LayerStack"):
        model.model.layers[0].block_sparse_moe.experts.holder("w1.weight").redeclare(
            DType.bfloat16, (F, E), None
        )
    assert isinstance(moe[0].weight, Weight)


def test_other_stacks_do_not_nest():
    class Layer(maxjax.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = LayerList(
                Linear(2, 2, "float32", DeviceRef.CPU()) for _ in range(2)
            ).stack()

        def __call__(self, x):
            return self.inner(x)

    with pytest.raises(NotImplementedError, match="stacks within stacks"):
        LayerList(Layer() for _ in range(2)).stack()
