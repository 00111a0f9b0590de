"""Weights: names, items, reading, allocating, closing."""

import copy
import gc
import json
import os
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.dtype import DType
from maxjax.errors import CheckpointError, CheckpointMissingError
from maxjax.graph import DeviceRef, Graph, Model, TensorType
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.graph.weights import (
    RESERVED_NAMES,
    FileWeights,
    SafetensorWeights,
    WeightData,
    Weights,
    load_weights,
    weights_format,
)
from maxjax.nn import Linear, Module

TENSORS = {
    "layers.1.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "layers.10.w": np.ones(1, np.float32),
    "layers.1.w2": np.ones(2, np.float16),
    "model": np.ones(1, np.float32),
    "modelled": np.ones(1, np.float32),
    "_hidden": np.ones(1, np.float32),
    "data": np.ones(3, np.float32),
    "norm": np.array(3, np.float32),
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(TENSORS, file)
    return file


def names(weights):
    return [name for name, _ in weights.items()]


def test_names(path):
    w = load_weights(path)
    assert w.name == "" and w.layers[1].w.name == "layers.1.w" == w["layers"]["1"]["w"].name
    assert (
        w.layers[1].w.exists() and not w.layers.exists() and not w.exists() and w[-1].name == "-1"
    )
    assert hasattr(w, "anything") and not hasattr(w, "_anything")
    with pytest.raises(AttributeError, match=r"weights\['_hidden'\]"):
        w._hidden
    assert w["_hidden"].exists() and w["data"].exists() and list(w["data"].data().shape) == [3]
    assert set(RESERVED_NAMES) == {
        n for cls in (FileWeights, SafetensorWeights) for n in vars(cls) if not n.startswith("_")
    }


class Held:
    """Weights in memory, as a user of MAX writes them."""

    def __init__(self, arrays, name=""):
        self._arrays, self._name = arrays, name

    @property
    def name(self):
        return self._name

    @property
    def allocated_weights(self):
        return {}

    def __getattr__(self, attr):
        return self[attr]

    def __getitem__(self, index):
        return Held(self._arrays, f"{self._name}.{index}".lstrip("."))

    def exists(self):
        return self._name in self._arrays

    def items(self):
        return ((name, Held(self._arrays, name)) for name in self._arrays)

    def data(self):
        return WeightData.from_numpy(self._arrays[self._name], self._name)

    def allocate(self, dtype=None, shape=None, quantization_encoding=None, device=None):
        raise NotImplementedError


def test_weights_is_a_protocol(path):
    held = Held({"weight": np.ones((2, 3), np.float32)})
    assert isinstance(held, Weights) and isinstance(load_weights(path), Weights)
    assert not isinstance({}, Weights) and not isinstance(held, FileWeights)
    layer = Linear(3, 2, "float32", DeviceRef.CPU())
    layer.load_state_dict({name: one.data() for name, one in held.items()})
    assert layer.weight.value.sum() == 6
    with pytest.raises(TypeError):
        maxjax.load(held)


def test_items_go_by_components(path):
    w = load_weights(path)
    assert names(w) == sorted(TENSORS)
    assert names(w.layers[1]) == ["layers.1.w", "layers.1.w2"]
    assert (
        names(w.model) == ["model"]
        and names(w.layers[1].w) == ["layers.1.w"]
        and names(w.nope) == []
    )
    assert all(place.exists() and place.name == name for name, place in w.items())


def test_completion_copying_and_text(path):
    w = load_weights(path)
    assert {"layers", "norm", "items"} <= set(dir(w)) and {"w", "w2"} <= set(dir(w.layers[1]))
    assert copy.copy(w).layers[1].w.exists()
    assert "2 tensors" in repr(w.layers[1]) and "m.safetensors" in repr(w)


def test_data(path):
    w = load_weights(path)
    d = w.layers[1].w.data()
    assert not d.is_loaded and d.shape == [2, 3]
    np.testing.assert_array_equal(d.data, TENSORS["layers.1.w"])
    assert d.is_loaded and w.layers[1].w.data().data is d.data
    with pytest.raises(KeyError, match="Did you mean 'layers.1.w'"):
        w.layers[1].ww.data()
    lazy = w.layers[1].w.data().astype("bfloat16")
    assert not lazy.is_loaded and lazy.data.dtype == jnp.bfloat16
    assert w.layers[1].w.data().to_buffer().shape


def test_nothing_is_read_when_opening(path, monkeypatch):
    read = []
    plain = os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, buffers, offset, *a: (
            read.append(sum(map(len, buffers))) or plain(fd, buffers, offset, *a)
        ),
    )
    w = load_weights(path)
    _ = list(w.items()), w.layers[1].w.data().shape, w.layers[1].w.allocate().shape
    assert sum(read) <= struct.unpack("<Q", path.read_bytes()[:8])[0] + 4096
    w.norm.data().data
    del w
    gc.collect()


def test_allocate(path):
    w = load_weights(path)
    a = w.layers[1].w.allocate(dtype="bfloat16", shape=(2, 3), device=DeviceRef.CPU())
    assert a.name == "layers.1.w" and a.dtype is DType.bfloat16 and a.align == 1 and a.value is None
    np.testing.assert_array_equal(np.asarray(a + 0).astype(np.float32), TENSORS["layers.1.w"])
    assert a.value.dtype == jnp.bfloat16
    assert w.layers[1].w.allocate() is not w.layers[1].w.allocate()
    for bad, message in (
        ({"shape": ("n", 2)}, r"different shape \(expected=\(Dim\('n'\), 2\), actual=\(2, 3\)\)"),
        ({"shape": ("n", 3, 1)}, r"different shape \(expected=\(Dim\('n'\), 3, 1\), actual=\(2, 3\)\)"),
        ({"shape": (3, 2)}, r"'layers.1.w' had different shape \(expected=\(3, 2\), actual=\(2, 3\)\)"),
        ({"dtype": "int32"}, r"dtype \(expected=DType.int32, actual=DType.float32\): only floats"),
        ({"quantization_encoding": QuantizationEncoding.Q4_0}, "not supported"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load_weights(path).layers[1].w.allocate(**bad)
    with pytest.raises(KeyError):
        w.nope.allocate()
    fresh = load_weights(path)
    with pytest.raises(ValueError):
        fresh.norm.allocate(shape=(9,))
    fresh.model.allocate()
    assert list(fresh.allocated_weights) == ["model"] == list(fresh.layers.allocated_weights)
    np.testing.assert_array_equal(np.asarray(fresh.allocated_weights["model"]), [1])


def test_allocate_with_a_named_size(path):
    weights = load_weights(path)
    w = weights.layers[1].w.allocate("float32", ("rows", 3))
    assert w.shape == ["rows", 3] and w.value is None
    kind = TensorType("float32", ("batch", 3), DeviceRef.CPU())
    graph = Graph("g", lambda x: x @ w.T, [kind])
    assert graph.output_types[0].shape == ["batch", "rows"]
    x = np.ones((4, 3), np.float32)
    for registry in (weights.allocated_weights, None):
        (found,) = Model(graph, registry)(x)
        np.testing.assert_allclose(found.to_numpy(), x @ TENSORS["layers.1.w"].T, rtol=1e-6)
    np.testing.assert_array_equal(w.value, TENSORS["layers.1.w"])


def test_allocated_weights_in_a_module(path):
    class M(Module):
        def __init__(self, w):
            super().__init__()
            self.w = w.layers[1].w.allocate()

        def __call__(self, x):
            return x @ self.w.T

    m = M(load_weights(path))
    assert jax.eval_shape(lambda m, x: m(x), m, jnp.ones(3)).shape == (2,) and m.w.value is None
    np.testing.assert_array_equal(m(jnp.ones(3)), TENSORS["layers.1.w"].sum(1))
    n = M(load_weights(path))
    np.testing.assert_array_equal(n.state_dict()["layers.1.w"], TENSORS["layers.1.w"])


def test_allocate_as_bytes(path):
    w = load_weights(path)
    a, b = w.layers[1].w.allocate_as_bytes(), w.norm.allocate_as_bytes()
    assert a.dtype is DType.uint8 and a.shape == [2, 12] and a.align is None and b.shape == [4]
    assert np.asarray(a).tobytes() == TENSORS["layers.1.w"].tobytes()
    assert np.asarray(b).tobytes() == TENSORS["norm"].tobytes()


def test_close(path):
    w = load_weights(path)
    layer = w.layers[1]
    with w:
        pass
    with pytest.raises(CheckpointError, match="closed. Open them again"):
        layer.w.data()
    assert "closed" in repr(w)
    # The names are still there.
    assert layer.w.exists() and not w.model.layers.exists() and "norm" in w
    assert [name for name, _ in w.items()] == sorted(TENSORS)


def test_paths(path, tmp_path):
    assert (
        len(names(load_weights(str(path))))
        == len(names(load_weights([path])))
        == len(names(load_weights(tmp_path)))
    )
    with pytest.raises(CheckpointMissingError, match=r"nowhere"):
        load_weights(tmp_path / "nowhere.safetensors")
    with pytest.raises(ValueError, match="does not exist"):
        load_weights([tmp_path / "nowhere.safetensors"])
    with pytest.raises(ValueError, match="no paths"):
        load_weights([])
    with (
        open(path, "rb") as file,
        pytest.raises(TypeError, match="not BufferedReader: name the file"),
    ):
        load_weights(file)
    with pytest.raises(CheckpointError):
        load_weights(tmp_path / "x.bin")
    assert (
        weights_format([path]).value == "safetensors" and weights_format(["a.gguf"]).value == "gguf"
    )
    assert (
        str(weights_format(["a.gguf"])) == "WeightsFormat.gguf" == f"{weights_format(['a.gguf'])}"
    )
    with pytest.raises(ValueError):
        weights_format(["a.SAFETENSORS"])


def test_of_two_files_the_last_counts(path, tmp_path):
    other = tmp_path / "z.safetensors"
    safetensors.numpy.save_file({"norm": np.array(7, np.float32), "new": np.ones(1)}, other)
    w = load_weights([path, other])
    assert float(w.norm.data().data) == 7 and w.new.exists() and w.model.exists()


def test_narrow_and_empty_tensors(tmp_path):
    header, blob = {}, b""
    for name, dtype, shape, raw in (
        ("bf", "BF16", [2], b"\x80\x3f\xc0\xbf"), ("f8", "F8_E4M3", [2], b"\x38\xb8"), ("e", "F32", [0, 3], b""),
        ("f4", "F4", [2, 4], b"\x21\x43\x65\x07"), ("odd", "F4", [2, 3], b"\x21\x43\x65"),
    ):  # fmt: skip
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(blob), len(blob) + len(raw)],
        }
        blob += raw
    text = json.dumps(header).encode()
    file = tmp_path / "n.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + blob)
    w = load_weights(file)
    assert w.bf.data().data.astype(float).tolist() == [1.0, -1.5] and w.f8.data().data.astype(
        float
    ).tolist() == [1, -1]
    assert w.e.data().data.shape == (0, 3)
    assert w.f8.allocate(dtype="float32").dtype is DType.float32
    packed = w.f4.allocate_as_bytes()
    assert packed.shape == [2, 2] and np.asarray(packed).tolist() == [[0x21, 0x43], [0x65, 0x07]]
    with pytest.raises(ValueError, match="'odd': rows of .* not whole bytes"):
        w.odd.allocate_as_bytes()


# --- a mapping, and an array -------------------------------------------------------------------


def test_a_place_is_a_mapping_of_full_names(path):
    weights = load_weights(path)
    assert list(weights) == weights.keys() == sorted(TENSORS) == [n for n, _ in weights.items()]
    assert len(weights) == len(TENSORS)
    below = weights.layers[1]
    assert list(below) == ["layers.1.w", "layers.1.w2"] == [name for name, _ in below.items()]
    assert len(below) == 2 and len(weights.model) == 1 and len(weights.nothing) == 0
    for name in TENSORS:
        assert name in weights
        assert (name in below) == name.startswith("layers.1.")
    assert "layers" not in weights and 7 not in weights and "w" not in below
    # What it iterates over leads to the tensor from any place.
    assert {name: below[name].name for name in below} == {name: name for name in below}
    assert {name: place.name for name, place in dict(below).items()} == {
        name: name for name in below
    }


def test_a_tensor_called_as_a_method_is_reached_by_index(tmp_path):
    """The method wins as an attribute, so a model's file never changes what code means."""
    names = ["keys.weight", "items.weight", "a.keys.weight"]
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({name: np.ones(1, np.float32) for name in names}, path)
    weights = load_weights(path)
    assert weights.keys() == sorted(names) and len(list(weights.items())) == 3
    for name in names:
        assert weights[name].exists()
    assert weights["keys"].weight.exists() and weights.a["keys"].weight.exists()


def test_what_jax_and_numpy_take_as_an_array(path):
    weights = load_weights(path)
    place = weights.layers[1].w
    for found in (place, place.data()):
        for array in (jnp.asarray(found), np.asarray(found), jnp.from_dlpack(found)):
            np.testing.assert_array_equal(array, TENSORS["layers.1.w"], strict=True)
        assert jnp.dot(found, jnp.ones(3)).tolist() == [3.0, 12.0]
        assert jax.jit(jnp.sum)(found) == 15
        assert jax.eval_shape(jnp.sum, found).shape == ()
        assert np.dot(found, np.ones(3, np.float32)).tolist() == [3.0, 12.0]
    with pytest.raises(KeyError, match="did you mean|no tensor is named"):
        jnp.asarray(weights.layers[1].x)


def test_an_array_of_it_is_a_copy(path):
    data = load_weights(path).layers[1].w.data()
    array, copied = jnp.asarray(data), np.array(data)
    data.data[:] = -1
    assert array[1, 2] == copied[1, 2] == 5


def test_names_read_nothing(path, monkeypatch):
    weights = load_weights(path)
    monkeypatch.setattr(os, "pread", None)
    monkeypatch.setattr(os, "preadv", None)
    assert len(weights) == len(list(weights)) == len(weights.keys()) and "norm" in weights
    with pytest.raises(TypeError):
        jnp.asarray(weights.norm)
