"""Modules as nnx State and as nnx modules: the same buffers, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax import nn
from maxjax.errors import CheckpointMismatchError, UserInputError
from maxjax.graph import DeviceRef, Weight
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.interop.nnx.interchange import load, tensors
from maxjax.interop.nnx.state import Packed, as_nnx, from_state, to_state

nnx = pytest.importorskip("flax.nnx")
CPU = DeviceRef.CPU()


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up = nn.Linear(width, width, "float32", CPU, has_bias=True)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Net(nn.Module):
    """Ties, a stack or a list, and packed weights."""

    def __init__(self, stacked=True, packed=True):
        super().__init__()
        self.embed = nn.Embedding(7, 4, "float32", CPU)
        layers = nn.LayerList(Block() for _ in range(3))
        self.layers = layers.stack() if stacked else layers
        self.head = nn.Linear(4, 7, "float32", CPU)
        self.head.set_shared_weight("weight", self.embed.weight)
        if packed:
            self.blocks = Weight("blocks", "uint8", (2, 34), CPU, QuantizationEncoding.Q8_0)

    def __call__(self, ids):
        return self.head(self.layers(self.embed(ids)))


def net(**options):
    model = Net(**options)
    rng = np.random.default_rng(0)
    values = {
        name: (rng.integers(0, 255, (2, 34)).astype(np.uint8) if name == "blocks"
               else rng.standard_normal(tuple(map(int, weight.shape))).astype(np.float32))
        for name, weight in model.raw_state_dict().items()
    }  # fmt: skip
    model.load_state_dict(values)
    return model, values


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


IDS = np.array([[1, 6, 0]], np.int32)


@pytest.mark.parametrize("stacked", [True, False], ids=["stack", "list"])
def test_there_and_back_shares_every_buffer(stacked):
    model, values = net(stacked=stacked)
    state = to_state(model)
    assert sorted(pointers(state)) == sorted(pointers(model))
    again = from_state(model, state)
    assert pointers(again) == pointers(model)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    np.testing.assert_array_equal(again(IDS), model(IDS))
    for name, value in again.state_dict().items():
        np.testing.assert_array_equal(value, values[name])
    assert again.head.weight is again.embed.weight


def test_what_a_state_holds():
    model, values = net()
    state = to_state(model)
    flat = {".".join(path): one for path, one in nnx.to_flat_state(state)}
    assert set(flat) == {"embed.weight", "layers.*.up.weight", "layers.*.up.bias", "blocks"}
    assert flat["layers.*.up.weight"].shape == (3, 4, 4)
    assert type(flat["blocks"]) is Packed and flat["blocks"].get_metadata("encoding") == "Q8_0"
    assert set(nnx.to_flat_state(nnx.filter_state(state, nnx.Param)).paths) == {
        ("embed", "weight"), ("layers", "*", "up", "weight"), ("layers", "*", "up", "bias"),
    }  # fmt: skip


def test_a_layer_at_a_time():
    model, values = net()
    state = to_state(model, unstack=True)
    flat = {".".join(path): one for path, one in nnx.to_flat_state(state)}
    assert set(flat) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(flat[name].get_value(), value)
    assert type(flat["blocks"]) is Packed and flat["blocks"].get_metadata("encoding") == "Q8_0"
    again = from_state(Net(), state)
    np.testing.assert_array_equal(again(IDS), model(IDS))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    with pytest.raises(ValueError, match="was not initialized"):
        to_state(Net(), unstack=True)


def test_a_model_without_values():
    state = to_state(Net())
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(state))
    model, _ = net()
    lazy = Net()
    filled = from_state(lazy, to_state(model))
    assert pointers(filled) == pointers(model)
    assert lazy.embed.weight.value is None


def test_a_sharded_model_stays_where_it_is():
    model, _ = net(packed=False)
    model.to(maxjax.make_mesh(model=4), rules={"*.up.weight": P("model")})
    state = to_state(model)
    held = state["layers"]["*"]["up"]["weight"].get_value()
    assert held.sharding.spec == P(None, "model", None) or held.sharding.spec == P(None, "model")
    again = from_state(model, state)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        assert one is other


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: f.pop("embed.weight"), "missing embed.weight; unexpected nothing"),
        (lambda f: f.update(extra=f["embed.weight"]), "missing nothing; unexpected extra"),
        (
            lambda f: f.update({"embed.weight": jnp.ones((7, 5))}),
            r"'embed.weight' is DType.float32 \[7, 5\] and must be DType.float32 \[7, 4\]",
        ),
        (lambda f: f.update({"embed.weight": jnp.ones((7, 4), jnp.bfloat16)}), "is DType.bfloat16"),
        (lambda f: f.update({"embed.weight": None}), "is NoneType"),
    ],
)
def test_a_state_of_another_model(change, says):
    model, _ = net()
    flat = {".".join(path): one.get_value() for path, one in nnx.to_flat_state(to_state(model))}
    change(flat)
    with pytest.raises(CheckpointMismatchError, match=says):
        from_state(model, flat)


def test_a_wrong_layer_at_a_time():
    model, values = net()
    values["layers.1.up.bias"] = np.ones(5, np.float32)
    with pytest.raises(CheckpointMismatchError, match="layers.1.up.bias"):
        from_state(model, values)
    with pytest.raises(UserInputError, match="expected a maxjax Module, not int"):
        to_state(3)


def test_names_that_no_tree_can_hold():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Weight("w", "float32", (1,), CPU)
            self.b = Weight("w.scale", "float32", (1,), CPU)

        def __call__(self):
            return self.a

    with pytest.raises(UserInputError, match="'w'.*'w.scale'"):
        to_state(Odd())


# --- as an nnx module ----------------------------------------------------------------------------


def test_it_runs_under_nnx():
    model, _ = net()
    wrapped = as_nnx(model)
    assert sorted(pointers(nnx.state(wrapped))) == sorted(pointers(model))
    assert pointers(wrapped.model) == pointers(model)
    expected = model(IDS)
    np.testing.assert_array_equal(wrapped(IDS), expected)
    run = nnx.jit(lambda m, x: m(x))
    np.testing.assert_allclose(run(wrapped, IDS), expected, rtol=1e-5)
    graph, state = nnx.split(wrapped)
    np.testing.assert_array_equal(nnx.merge(graph, state)(IDS), expected)


def test_its_gradients_are_those_of_jax():
    model, _ = net(packed=False)
    grads = nnx.grad(lambda m: (m(IDS) ** 2).sum())(as_nnx(model))
    expected = jax.grad(lambda m: (m(IDS) ** 2).sum())(model)
    for name, one in nnx.to_flat_state(grads["weights"]):
        found = dict(
            zip(expected._mx_definition()[0].names, jax.tree.leaves(expected), strict=True)
        )
        np.testing.assert_allclose(one.get_value(), found[".".join(name)], rtol=1e-6, atol=1e-6)


def test_it_trains():
    optax = pytest.importorskip("optax")
    model, values = net()
    wrapped = as_nnx(model)
    optimizer = nnx.Optimizer(wrapped, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(wrapped, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: (m(IDS) ** 2).mean())(wrapped)
        optimizer.update(wrapped, grads)
        return loss

    losses = [float(step(wrapped, optimizer)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    trained = wrapped.model.state_dict()
    assert not np.array_equal(trained["embed.weight"], values["embed.weight"])
    np.testing.assert_array_equal(trained["blocks"], values["blocks"])
    np.testing.assert_array_equal(model.state_dict()["embed.weight"], values["embed.weight"])


def test_a_checkpoint_goes_into_it(tmp_path):
    from safetensors.numpy import save_file

    model, values = net(stacked=False)
    wrapped = as_nnx(Net(stacked=False))
    save_file(values, tmp_path / "m.safetensors")
    load(wrapped, tmp_path / "m.safetensors", rename={"**": "weights.**"})
    np.testing.assert_array_equal(wrapped(IDS), model(IDS))
    back = tensors(wrapped, rename={"**": "weights.**"})
    assert set(back) == set(values)
