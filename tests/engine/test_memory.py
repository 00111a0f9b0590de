"""``maxjax.memory`` and ``maxjax.free``, and what is left after memory has run out."""

import gc
import html.parser
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax import nn
from maxjax.engine.memory import DeviceMemory, Memory
from maxjax.errors import OutOfMemoryError, UserInputError
from maxjax.graph import DeviceRef, ShardingStrategy, Weight
from maxjax.graph.weights import device_reads
from maxjax.nn.layer.load import memory as room

pytestmark = pytest.mark.usefixtures("few_objects")

SIZE = 64 * 32 * 4


def linear():
    return nn.Linear(64, 32, "float32", DeviceRef.CPU())


class Tied(nn.Module):
    """Two layers with one weight, and a stack."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = linear(), linear()
        self.head.set_shared_weight("weight", self.embed.weight)
        self.layers = nn.LayerList(linear() for _ in range(3)).stack()

    def __call__(self, x):
        return self.head(x)


@pytest.fixture
def model():
    return maxjax.init(Tied(), jax.random.key(0))


def held(model):
    """The bytes that memory() finds for models of this class."""
    gc.collect()
    name = type(model).__name__
    return sum(one.nbytes for one in maxjax.memory().models if one.model == name)


# --- free -----------------------------------------------------------------------------------


def test_what_is_freed_is_a_placeholder_again(model):
    before = jax.tree.structure(model)
    values = {name: np.array(value) for name, value in model.state_dict().items()}
    assert held(model) == 4 * SIZE  # the tie once
    found = maxjax.free(model)
    assert (found.nbytes, found.kept, repr(found)) == (4 * SIZE, 0, "freed 32 KiB")
    assert held(model) == 0 and jax.tree.structure(model) == before
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(model))
    with pytest.raises(ValueError, match="'head.weight' has no value|'embed.weight' has no value"):
        model(jnp.ones(64))
    assert maxjax.free(model, model.embed).nbytes == 0  # again, and twice in one call
    model.load_state_dict(values)
    assert model.embed.weight is model.head.weight
    np.testing.assert_array_equal(model.layers[2].weight, values["layers.2.weight"])


def test_single_weights_and_several_modules(model):
    other = maxjax.init(linear(), jax.random.key(1))
    found = maxjax.free(model.layers, other, other.weight)
    assert found.nbytes == 4 * SIZE and found.kept == 0
    assert held(model) == SIZE and held(other) == 0
    assert maxjax.free(model.embed.weight).nbytes == SIZE


def test_a_tie_to_what_is_not_freed_is_told(model):
    with pytest.warns(UserWarning, match="Linear.weight is tied to a weight that is freed"):
        maxjax.free(model.embed)
    assert model.head.weight.value is None
    # The head does not own it.
    assert maxjax.free(model.head).nbytes == 0


def test_one_layer_of_a_stack_is_not_freed_alone(model):
    for one in (model.layers[1], model.layers[1].weight):
        with pytest.raises(UserInputError, match="one of the 3 layers of a LayerStack.*unstack"):
            maxjax.free(model.embed, one)
    assert held(model) == 4 * SIZE  # nothing else was freed either
    assert maxjax.free(*model.layers).nbytes == 3 * SIZE  # all of them


def test_parts_of_a_weight():
    weight = Weight(
        "w", "float32", (4, 2), DeviceRef.CPU(), sharding_strategy=ShardingStrategy.rowwise(2)
    )
    weight.value = jnp.ones((4, 2))
    first, second = weight.shard([DeviceRef.CPU(), DeviceRef.CPU()])
    with pytest.raises(UserInputError, match="is a part of another one"):
        maxjax.free(first)
    assert maxjax.free(weight).nbytes == 32 and second.value is None


def test_parts_that_only_a_tree_keeps(model):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = Weight(
                "whole", "float32", (4, 2), DeviceRef.CPU(),
                sharding_strategy=ShardingStrategy.rowwise(2),
            )  # fmt: skip
            self.first, self.second = self.whole.shard([DeviceRef.CPU(), DeviceRef.CPU()])

        def __call__(self):
            return self.first

    tree = jax.tree.structure(maxjax.init(Parts(), jax.random.key(0)))
    mine = model.embed.weight.value
    assert maxjax.free(model).kept == mine.nbytes
    assert tree.num_leaves == 1


def test_sharded_weights_count_every_device(model):
    model.to(maxjax.make_mesh(model=8))
    found = maxjax.memory()
    assert len([one for one in found.devices if one.weights]) == 8
    (own,) = [one.nbytes for one in found.models if one.model == "Tied"]
    assert maxjax.free(model).nbytes == own == 8 * 4 * SIZE


def test_what_others_hold_stays(model):
    quantized, _ = maxjax.quantize(model, None, patterns={"embed.*": "q8_0"})
    mine = model.embed.weight.value
    found = maxjax.free(model)
    assert found.kept == 4 * SIZE and "weights of other Modules: layers.0.weight" in repr(found)
    np.testing.assert_array_equal(mine, mine)
    # Only what no Module has is deleted, and only where that is asked for.
    again = jax.tree.map(lambda leaf: leaf, quantized)
    value = quantized.layers[0].weight.value
    found = maxjax.free(quantized, delete=True)
    assert not value.is_deleted() and again.layers[0].weight.value is not None
    array = again.embed.weight.value
    assert maxjax.free(again, delete=True).kept == 0
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(array)
    assert not mine.is_deleted()


def test_a_compiled_program_keeps_nothing(model):
    program = model.compile(jax.ShapeDtypeStruct((64,), np.float32))
    program(jnp.ones(64))
    assert maxjax.free(model).kept == 0
    with pytest.raises(ValueError, match="has no value"):
        program(jnp.ones(64))


def test_other_arrays_are_not_ours_to_free():
    for other in (jnp.ones(3), {"w": jnp.ones(3)}, None):
        with pytest.raises(TypeError, match="takes Modules and Weights, not .*: .* del"):
            maxjax.free(other)


# --- memory ---------------------------------------------------------------------------------


def test_what_lies_where():
    gc.collect()
    before = maxjax.memory()
    model, _ = maxjax.load("tiny")
    cache = model.cache(2, 64)
    key, large = jax.random.key(0), jnp.ones((1000, 1000))
    found = maxjax.memory()
    first = {one.device: one for one in before.devices}.get("cpu:0")
    now = next(one for one in found.devices if one.device == "cpu:0")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert now.weights - (first.weights if first else 0) == weights
    assert now.caches - (first.caches if first else 0) == caches
    assert now.others - (first.others if first else 0) >= large.nbytes
    assert found.models[0].nbytes == weights and found.models[0].shared == 0
    again = jax.tree.map(lambda leaf: leaf, model)
    assert [one.shared for one in maxjax.memory().models[:2]] == [weights, weights]
    assert found.host_in_use > large.nbytes and found.host_free
    del again, key


def test_how_it_looks():
    model = maxjax.init(linear(), jax.random.key(0))
    found = maxjax.memory()
    lines = repr(found).splitlines()
    assert lines[0].split() == ["weights", "caches", "others", "in", "use", "peak", "free"]
    assert any(line.startswith("cpu:0 ") for line in lines) and len(lines) < 30
    assert any(line.split()[:3] == ["Linear", "8", "KiB"] for line in lines)
    parser = html.parser.HTMLParser()
    parser.feed(found._repr_html_())
    assert "<td>Linear</td>" in found._repr_html_()
    del model
    gpus = [
        DeviceMemory("cuda:0", 6 << 10, 3 << 10, 0, 10 << 10, 11 << 10, 80 << 10),
        DeviceMemory("cuda:1", 500, 0, 0, 10 << 10, 11 << 10),
    ]
    lines = repr(Memory(tuple(gpus), (), 1000, None)).splitlines()
    assert lines[1].split() == "cuda:0 6 KiB 3 KiB 0 bytes 10 KiB 11 KiB 70 KiB".split()
    assert (
        lines[2].split() == "cuda:1 500 bytes 0 bytes 0 bytes 10 KiB 11 KiB".split()
    )  # no limit is known


# --- out of memory --------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LayerList(linear() for _ in range(6))

    def __call__(self, x):
        return x


@pytest.fixture
def file(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"layers.{i}.weight": rng.random((32, 64), np.float32) for i in range(6)}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("where", ["before", "host", "device"])
def test_after_an_error_the_next_cell_works(file, monkeypatch, where):
    """A notebook keeps the last error, and with it every frame: nothing may be left in them."""
    model = Deep().to(maxjax.make_mesh(model=8))
    weights = maxjax.load_weights(file)
    gc.collect()
    before, kept = live_bytes(), []
    with monkeypatch.context() as patch:
        calls = iter(range(1000))
        real_empty, real_put = device_reads.aligned_empty, jax.device_put

        def empty(nbytes):
            if next(calls) > 3:
                raise MemoryError
            return real_empty(nbytes)

        def put(value, *args, **options):
            if next(calls) > 20:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9")
            array = real_put(value, *args, **options)
            kept.append(array.nbytes)
            return array

        if where == "before":
            patch.setattr(room, "SMALL_BYTES", 0)
            patch.setattr(room, "free_bytes", lambda device: 1000)
        elif where == "host":
            patch.setattr(device_reads, "aligned_empty", empty)
        else:
            patch.setattr(jax, "device_put", put)
        with pytest.raises(OutOfMemoryError) as caught:
            model.load_state_dict(weights)
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    assert live_bytes() == before and (where != "device" or len(kept) > 10)
    assert all(
        leaf is None or type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(model)
    )
    model.load_state_dict(weights)
    assert live_bytes() - before == 6 * SIZE


def test_the_result_of_quantize_is_not_the_model(model):
    quantized = maxjax.quantize(model, None, patterns={"embed.*": "q8_0"})
    with pytest.raises(TypeError, match="not Quantized: pass its .model"):
        maxjax.free(quantized)
