"""Stacking and unstacking in place: weight by weight, on meshes too, and all or nothing."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxjax import make_mesh
from maxjax.graph import DeviceRef, Weight
from maxjax.graph.placement import stacking
from maxjax.graph.weight import stacked as stacked_module
from maxjax.nn import LayerList, LayerStack, Linear, Module
from tests.nn.layer.stack.test_layer_stack import fill

CPU = DeviceRef.CPU()


class Block(Module):
    """Weights of several sizes, one of them shared by all layers."""

    def __init__(self, scale, size):
        super().__init__()
        self.up = Linear(size, 4 * size, "float32", CPU)
        self.down = Linear(4 * size, size, "bfloat16", CPU)
        self.norm = Weight("norm", "float32", (size,), CPU)
        self.scale = scale

    def __call__(self, h):
        """Uses every weight."""
        return h + self.down(self.up(h * self.scale + self.norm))


class Net(Module):
    def __init__(self, n=6, size=8):
        super().__init__()
        scale = Weight("scale", "float32", (size,), CPU)
        self.layers = LayerList(Block(scale, size) for _ in range(n))
        self.head = Linear(size, 4 * size, "float32", CPU)
        self.head.set_shared_weight("weight", self.layers[1].up.weight)

    def __call__(self, h):
        """Runs all layers."""
        return self.head(self.layers(h))


def live():
    """Bytes on all devices, each buffer once: a shard that was looked at is an array as well."""
    gc.collect()
    return sum(buffers(jax.live_arrays()).values())


def buffers(arrays):
    shards = [shard for array in arrays for shard in array.addressable_shards]
    return {(one.device, one.data.unsafe_buffer_pointer()): one.data.nbytes for one in shards}


def contents(model):
    return {name: np.asarray(w.value).tobytes() for name, w in model.raw_state_dict().items()}


def placed(net, where):
    if where is not None:
        net.to(make_mesh(data=2, model=4, axis_types=where))
    return net


def shardings(model):
    return {name: weight.value.sharding for name, weight in model.raw_state_dict().items()}


@pytest.fixture(autouse=True)
def what_was_there():
    """Leaves all that other tests have made out of the collections of :func:`live`."""
    gc.collect()
    gc.freeze()


PLACES = [None, AxisType.Auto, AxisType.Explicit]


@pytest.mark.sampled
@pytest.mark.parametrize("where", PLACES, ids=["one device", "auto", "explicit"])
@pytest.mark.parametrize("period", [1, 2])
def test_at_most_one_weight_of_all_layers_more(where, period, monkeypatch):
    """Counted when most is there: a program has returned, and its operands are not dropped yet."""
    net = fill(placed(Net(size=32), where))
    all_of_one = sum(buffers(net.layers[i].up.weight.value for i in range(0, 6, period)).values())
    want, places = contents(net), shardings(net)
    before = live()
    most = []

    def watched(name):
        run = getattr(stacking, name)

        def watch(*args):
            result = run(*args)
            most.append(live() - before)
            return result

        monkeypatch.setattr(stacked_module, name, watch)

    watched("stack"), watched("unstack")
    net.layers = net.layers.stack(period=period)
    assert len(most) == 3 * period and all_of_one <= max(most) < all_of_one + 1024
    assert live() == before and contents(net) == want
    assert isinstance(net.layers, LayerStack) and len(jax.tree.leaves(net)) == 3 * period + 1
    most.clear()
    net.layers = net.layers.unstack()
    assert len(most) == 3 * period and all_of_one <= max(most) < all_of_one + 1024
    assert live() == before and contents(net) == want and shardings(net) == places
    assert net.head.weight is net.layers[1].up.weight
    assert all(layer.scale is net.layers[0].scale for layer in net.layers)


@pytest.mark.sampled
@pytest.mark.parametrize("where", PLACES, ids=["one device", "auto", "explicit"])
@pytest.mark.parametrize("way", ["stack", "unstack"])
def test_what_fails_changes_nothing(where, way, monkeypatch):
    net = fill(placed(Net(), where))
    want, treedef = contents(net), jax.tree.structure(net)
    if way == "unstack":
        net.layers = net.layers.stack()
        treedef = jax.tree.structure(net)
    run, calls = getattr(stacking, way), []

    def fails(*args):
        calls.append(args[0])
        if len(calls) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return run(*args)

    monkeypatch.setattr(stacked_module, way, fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        getattr(net.layers, way)()
    monkeypatch.undo()
    assert jax.tree.structure(net) == treedef and contents(net) == want
    net.layers = getattr(net.layers, way)()  # and then it works
    assert contents(net) == want
    fill(net, 1)
    assert contents(net) != want


def test_half_loaded_layers_fail_without_a_change_too(monkeypatch):
    net = Net()
    net.load_state_dict({"layers.0.norm": jnp.ones(8)}, strict=False)
    stack = net.layers.stack()
    monkeypatch.setattr(stack._mx_stacks[-1], "dissolve", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stack.unstack()
    monkeypatch.undo()
    fill(stack)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(stack)} == {6, 8}
