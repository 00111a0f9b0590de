"""LayerList: numbering, changes, calls."""

import jax
import numpy as np
import pytest

from maxjax.graph import DeviceRef, Weight
from maxjax.nn import Layer, LayerList, MissingLayer, Module, Sequential


class Lin(Module):
    def __init__(self, n=2):
        super().__init__()
        self.w = Weight("w", "float32", (n,), DeviceRef.CPU())

    def __call__(self, x, scale=1):
        return x * self.w * scale


def sizes(layers):
    return [int(w.shape[0]) for w in layers.raw_state_dict().values()]


def test_every_change_renumbers():
    layers = LayerList(Lin(i) for i in (1, 2))
    layers.append(Lin(3))
    layers.insert(0, Lin(9))
    assert sizes(layers) == [9, 1, 2, 3] and list(layers.raw_state_dict()) == [
        "0.w",
        "1.w",
        "2.w",
        "3.w",
    ]
    del layers[1]
    layers[0] = Lin(7)
    layers.extend([Lin(4), Lin(5)])
    layers.extend(Lin(6))
    assert sizes(layers) == [7, 2, 3, 4, 5, 6] and len(layers) == 6
    assert int(layers.pop().w.shape[0]) == 6
    layers[1:3] = [Lin(8)]
    assert sizes(layers) == [7, 8, 4, 5] and list(layers.sublayers) == ["0", "1", "2", "3"]


def test_attributes_with_numbers_are_items():
    layers = LayerList(Lin(i) for i in (1, 2, 3))
    delattr(layers, "0")
    setattr(layers, "1", Lin(7))
    setattr(layers, "2", Lin(8))
    assert sizes(layers) == [2, 7, 8] and [int(layer.w.shape[0]) for layer in layers] == [2, 7, 8]
    with pytest.raises(AttributeError, match="'3'"):
        delattr(layers, "3")
    with pytest.raises(IndexError, match=r"LayerList\[99\].* is 3"):
        setattr(layers, "99", Lin(9))
    with pytest.raises(TypeError, match="not int"):
        setattr(layers, "1", 5)
    assert list(layers.raw_state_dict()) == ["0.w", "1.w", "2.w"]


def test_it_is_a_sequence():
    one, two = Lin(), Lin()
    layers = LayerList((one, two))
    assert layers[-1] is two and layers[0:1] == [one] and isinstance(layers[0:1], list)
    assert list(layers) == [one, two] and one in layers and Lin() not in layers
    assert str(layers) == str([one, two]) and repr(layers).startswith("LayerList(2 layers, ")
    with pytest.raises(IndexError):
        layers[2]
    with pytest.raises(TypeError, match="int"):
        layers.append(3)


def test_calls():
    layers = Sequential([Lin(), Lin()])
    for layer in layers:
        layer.load_state_dict({"w": np.array([2.0, 3.0], np.float32)})
    np.testing.assert_array_equal(layers(np.ones(2, np.float32), scale=10), [40, 90])
    with pytest.raises(IndexError):
        LayerList([])(1)


def test_the_same_module_twice_has_one_set_of_names():
    one = Lin()
    assert list(LayerList([one, one]).raw_state_dict()) == ["0.w"]


def test_legacy_layers_and_none():
    class Old(Layer):
        def __call__(self, x):
            return x

    layers = LayerList([Lin(), Old(), None])
    with pytest.raises(ValueError, match="V2"):
        layers.sublayers
    assert list(layers.raw_state_dict()) == ["0.w"] and len(jax.tree.leaves(layers)) == 1
    clone = jax.tree.map(lambda a: a, layers)
    assert clone[1] is layers[1] and clone[2] is None and len(clone) == 3


def test_a_pytree_keeps_the_list():
    layers = LayerList([Lin(), Lin()])
    clone = jax.tree.map(lambda a: a, layers)
    clone.append(Lin())
    assert len(clone) == 3 and len(layers) == 2


def test_missing_layer():
    layers = LayerList([Lin(), MissingLayer("layers.1")])
    assert list(layers.raw_state_dict()) == ["0.w"]
    with pytest.raises(RuntimeError, match=r"layers\.1"):
        layers[1](1)
