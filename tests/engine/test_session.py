"""InferenceSession: seed 003's and the issue's walk through it."""

import numpy as np
import pytest
import safetensors.numpy

from maxjax.engine import InferenceSession
from maxjax.graph import DeviceRef, Graph, TensorType, Weight
from maxjax.graph import Module as GraphModule
from maxjax.graph.weights import WeightData, load_weights
from maxjax.nn import Module

KIND = TensorType("float32", ["batch", 3], DeviceRef.CPU())


class Lin(Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight("weight", "float32", (2, 3), DeviceRef.CPU())

    def __call__(self, x):
        return x @ self.weight.T


def test_a_state_dict_is_a_registry():
    model, value = Lin(), np.arange(6, dtype=np.float32).reshape(2, 3)
    model.load_state_dict({"weight": value})
    graph = Graph("lin", model, input_types=[KIND])
    compiled = InferenceSession().load(graph, weights_registry=model.state_dict())
    for n in (1, 4):
        x = np.ones((n, 3), np.float32)
        np.testing.assert_allclose(compiled.execute(x)[0].to_numpy(), x @ value.T)


def test_a_scalar_that_was_loaded_with_one_element_is_in_the_registry():
    class Scale(Module):
        def __init__(self):
            super().__init__()
            self.scale = Weight("scale", "float32", (), DeviceRef.CPU())

        def __call__(self, x):
            return x * self.scale

    model = Scale()
    model.load_state_dict({"scale": WeightData.from_numpy(np.full(1, 3, np.float32), "scale")})
    values = model.state_dict()
    assert values["scale"].shape == (1,)
    graph = Graph("scale", model, input_types=[KIND])
    compiled = InferenceSession().load(graph, weights_registry=values)
    np.testing.assert_array_equal(compiled(np.ones((1, 3), np.float32))[0], [[3, 3, 3]])


def test_allocated_weights_are_a_registry(tmp_path):
    path = tmp_path / "m.safetensors"
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.numpy.save_file({"a.b.weight": value}, path)
    weights = load_weights(path)
    with Graph("g", input_types=[KIND]) as g:
        g.output(g.inputs[0].tensor @ g.add_weight(weights.a.b.weight.allocate()).T)
    compiled = InferenceSession().load(g, weights_registry=weights.allocated_weights)
    np.testing.assert_allclose(compiled(np.ones((2, 3), np.float32))[0], np.ones((2, 3)) @ value.T)


def test_what_is_refused():
    with pytest.raises(TypeError, match="Lin"):
        InferenceSession().load(Lin())
    with pytest.raises(NotImplementedError, match="custom_extensions"):
        InferenceSession().load(Graph("g"), custom_extensions=["x"])
    with pytest.raises(ValueError, match="'weight' is not in the weights registry; it has other"):
        InferenceSession().load(Graph("g", Lin(), [KIND]), weights_registry={"other": np.ones(1)})


def test_graphs_of_a_module_are_loaded_together():
    """As MAX's files for several stages do, with a class of the same name as a model's layers."""
    module, model = GraphModule(), Lin()
    model.load_state_dict({"weight": np.ones((2, 3), np.float32)})
    with Graph("encoder", input_types=[KIND], module=module) as encoder:
        encoder.output(encoder.inputs[0].tensor * 2)
    decoder = Graph("decoder", model, [KIND], module=module)
    assert module.top_level_graph_names() == ["encoder", "decoder"]
    models = InferenceSession().load_all(module, weights_registry=model.state_dict())
    x = np.ones((2, 3), np.float32)
    assert models[encoder.name].execute(x)[0].to_numpy().sum() == 12
    assert models[decoder.name].execute(x)[0].to_numpy().sum() == 12
    assert list(InferenceSession().load_all(encoder)) == ["encoder"]
    with pytest.raises(ValueError, match="already has a Graph 'encoder'"):
        Graph("encoder", lambda x: x, [KIND], module=module)


def test_two_layers_without_full_names_in_one_graph():
    first, second = Lin(), Lin()
    second.weight = Weight("weight", "float32", (1, 2), DeviceRef.CPU())
    first.load_state_dict({"weight": np.ones((2, 3), np.float32)})
    second.load_state_dict({"weight": np.full((1, 2), 2, np.float32)})
    graph = Graph("two", lambda x: second(first(x)), [KIND])
    (found,) = InferenceSession().load(graph).execute(np.ones((1, 3), np.float32))
    assert found.to_numpy().tolist() == [[12]]
