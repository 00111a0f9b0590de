"""What a model's weights become in a file: the bytes of its state dict, wherever they lie."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import maxjax
from maxjax.dtype import DType
from maxjax.graph import DeviceRef, Weight
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.graph.weights import WeightData, load_weights
from maxjax.graph.weights import host_reads as module
from maxjax.graph.weights.host_reads import data_rows, row_boxes
from maxjax.graph.weights.writing import (
    array_rows,
    outgoing_data,
    weight_data,
)
from maxjax.storage.safetensors.writer import file_pieces
from maxjax.storage.save import outgoing as storage
from tests.nn.test_device_major import Net, initialized, placed
from tests.storage.save.test_outgoing import nibbles

CPU = DeviceRef.CPU()
RNG = np.random.default_rng(7)


@pytest.fixture
def small(monkeypatch):
    """Pieces of a few bytes, as if the tensors were large."""
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    monkeypatch.setattr(storage, "PIECE_BYTES", 64)


def written(model):
    """name → (dtype, shape, bytes) of what is written of a model."""
    found = {}
    for name, weight in model.raw_state_dict().items():
        one = outgoing_data(weight_data(name, weight))
        assert one.name == name
        found[name] = (one.dtype, one.shape, b"".join(map(bytes, one.pieces())))
        assert len(found[name][2]) == one.nbytes
    return found


def wanted(values):
    arrays = {name: np.asarray(value) for name, value in values.items()}
    return {n: (DType.of(a.dtype), a.shape, a.tobytes()) for n, a in arrays.items()}


# -- arrays, over devices


def sharded(array, *spec, kind=AxisType.Auto, **sizes):
    mesh = maxjax.make_mesh(**sizes, axis_types=kind)
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8, bool], ids=str)
@pytest.mark.parametrize(
    "spec, sizes",
    [
        ((), {"model": 8}),
        (("model",), {"model": 8}),
        ((None, "model"), {"model": 4}),
        (("data", "model"), {"data": 2, "model": 4}),
        (("model", "data"), {"data": 2, "model": 4}),
        ((("data", "model"),), {"data": 4, "model": 2}),
        ((None, None, "model"), {"data": 4, "model": 2}),
    ],
    ids=str,
)
def test_arrays_over_devices(spec, sizes, dtype, kind, small):
    array = RNG.integers(0, 2, (16, 8, 6)).astype(dtype)
    rows = list(array_rows(sharded(array, *spec, kind=kind, **sizes)))
    assert b"".join(row.tobytes() for row in rows) == array.tobytes()
    assert all(row.ndim == 3 and row.shape[-1] == 6 for row in rows) and len(rows) > 1


@pytest.mark.parametrize("index", [(0,), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("spec", [(), ("model",), (None, "model"), (None, None, "model")], ids=str)
def test_parts_of_arrays_over_devices(index, spec, small):
    array = RNG.standard_normal((4, 8, 4)).astype(np.float32)
    rows = array_rows(sharded(array, *spec, model=4), index)
    assert b"".join(row.tobytes() for row in rows) == array[index].tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (0, 4)], ids=str)
@pytest.mark.parametrize("as_jax", [False, True])
def test_arrays_with_little_in_them(shape, as_jax):
    array = np.ones(shape, np.float32)
    data = WeightData(jnp.asarray(array) if as_jax else array, "w", "float32", shape)
    one = outgoing_data(data)
    assert b"".join(map(bytes, one.pieces())) == array.tobytes() and one.shape == shape
    rows = list(array_rows(jnp.asarray(array) if as_jax else array))
    assert sum(row.nbytes for row in rows) == array.nbytes


def test_what_a_device_has_is_not_copied(small):
    array = jnp.arange(64.0).reshape(8, 8)
    held = np.asarray(array)
    assert all(np.shares_memory(row, held) for row in array_rows(array))


@pytest.mark.parametrize("shape", [(5,), (3, 7), (4, 3, 5), (2, 2, 2, 9)], ids=str)
@pytest.mark.parametrize("itemsize", [1, 8, 200])
def test_boxes_are_those_of_the_bytes_in_order(shape, itemsize, small):
    array = np.arange(np.prod(shape)).reshape(shape)
    found = [array[tuple(slice(*span) for span in box)] for box in row_boxes(shape, itemsize)]
    np.testing.assert_array_equal(np.concatenate([f.reshape(-1) for f in found]), array.reshape(-1))
    rows = [f.size // shape[-1] for f in found]
    assert all(n == 1 or n * shape[-1] * itemsize <= 64 for n in rows)


# -- weights of models


def test_a_plain_model(small):
    model = initialized()
    assert written(model) == wanted(model.state_dict())


def test_a_stacked_model_is_written_as_its_layers(small):
    model = initialized(stacked=True)
    assert written(model) == written(initialized()) == wanted(model.state_dict())


@pytest.mark.sampled
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("sizes", [{"model": 4}, {"model": 2}, {"data": 2, "model": 4}], ids=str)
def test_models_on_meshes(stacked, kind, sizes, small):
    model = placed(stacked, **sizes, kind=kind)
    layouts = [weight.spec.layout for weight in model.raw_state_dict().values()]
    assert any(layouts)  # some are in the order of the devices
    assert written(model) == WRITTEN


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stacked", [False, True])
def test_fully_sharded(stacked, small):
    assert written(placed(stacked, fsdp=8)) == WRITTEN
    assert written(placed(stacked, fsdp=2, model=2, data=2)) == WRITTEN


WRITTEN = wanted(initialized().state_dict())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_other_types(dtype, small):
    weight = Weight("w", dtype, (9, 5), CPU)
    array = RNG.integers(0, 50, (9, 5)).astype(DType[dtype].np)
    weight.value = jnp.asarray(array)
    one = outgoing_data(weight_data("w", weight))
    assert (one.dtype, b"".join(map(bytes, one.pieces()))) == (DType[dtype], array.tobytes())


@pytest.mark.parametrize("sizes", [None, {"model": 2}, {"fsdp": 4}], ids=str)
def test_packed_blocks_stay_as_they_are(sizes, small):
    raw = RNG.integers(0, 256, (8, 2 * 144)).astype(np.uint8)
    weight = Weight("w", "uint8", raw.shape, CPU, quantization_encoding=QuantizationEncoding.Q4_K)
    weight.value = raw if sizes is None else sharded(raw, *sizes, **sizes)
    one = outgoing_data(weight_data("w", weight))
    assert (one.encoding, one.dtype, one.shape) == ("Q4_K", DType.uint8, raw.shape)
    assert b"".join(map(bytes, one.pieces())) == raw.tobytes()


def test_what_has_not_been_read_comes_from_its_file(tmp_path, small):
    arrays = {"a": RNG.standard_normal((40, 3)).astype(np.float32), "b": np.array(3, np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors")
    with load_weights(tmp_path / "m.safetensors") as weights:
        for name, array in arrays.items():
            data = weights[name].data()
            rows = list(data_rows(data))
            assert b"".join(row.tobytes() for row in rows) == array.tobytes()
            assert not data.is_loaded
        weight = weights["a"].allocate("float32", (40, 3))
        data = weight_data("new.name", weight)
        one = outgoing_data(data, "new.name")
        assert b"".join(map(bytes, one.pieces())) == arrays["a"].tobytes()
        assert one.name == "new.name" and not data.is_loaded


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_casts_on_the_way(tmp_path, to, small):
    array = RNG.standard_normal((40, 3)).astype(np.float32)
    safetensors.numpy.save_file({"a": array}, tmp_path / "m.safetensors")
    with load_weights(tmp_path / "m.safetensors") as weights:
        one = outgoing_data(weights["a"].data().astype(to))
        assert b"".join(map(bytes, one.pieces())) == array.astype(DType[to].np).tobytes()
    held = outgoing_data(WeightData.from_numpy(array, "a").astype(to))
    assert b"".join(map(bytes, held.pieces())) == array.astype(DType[to].np).tobytes()


@pytest.mark.parametrize("shape", [(9, 5, 2), (6, 4), (7, 3, 4)], ids=str)
def test_four_bits(tmp_path, shape, small):
    codes = RNG.integers(0, 16, shape).astype(np.uint8)
    array = codes.view(ml_dtypes.float4_e2m1fn)
    one = outgoing_data(WeightData.from_numpy(array, "w"))
    assert b"".join(map(bytes, one.pieces())) == nibbles(array)
    # Rows of an odd number of values, read from a file of two values a byte.
    data = b"".join(map(bytes, file_pieces([one])))
    (tmp_path / "m.safetensors").write_bytes(data)
    with load_weights(tmp_path / "m.safetensors") as weights:
        again = outgoing_data(weights["w"].data())
        assert b"".join(map(bytes, again.pieces())) == nibbles(array)


@pytest.mark.parametrize("shape", [(9, 5), (3, 3, 3)], ids=str)
def test_four_bits_of_a_weight_over_devices(shape, small):
    array = RNG.integers(0, 16, shape).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    weight = Weight("w", "float4_e2m1fn", shape, CPU)
    weight.value = sharded(array, model=2)
    one = outgoing_data(weight_data("w", weight))
    assert b"".join(map(bytes, one.pieces())) == nibbles(array)


def test_a_weight_without_a_value():
    with pytest.raises(ValueError, match=r"'layers\.0.*has no value: load a checkpoint"):
        written(Net(False))


def test_encoded_on_the_way(small):
    array = RNG.standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
    seen = []

    def encode(name, rows, first):
        seen.append((name, rows.dtype, rows.shape, first))
        return np.zeros((len(rows), 2 * 34), np.uint8)

    one = outgoing_data(WeightData.from_numpy(array, "w"), encode=("Q8_0", encode))
    assert (one.dtype, one.shape, one.encoding) == (DType.uint8, (4, 68), "Q8_0")
    assert sum(map(len, one.pieces())) == one.nbytes == 4 * 68
    assert seen == [("Q8_0", np.dtype(np.float32), (4, 64), 0)]


# -- memory

MEMORY = """
    import os, sys, tempfile
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax, numpy as np
    jax.config.update("jax_num_cpu_devices", 4)
    import maxjax
    from maxjax import nn
    from maxjax.graph import DeviceRef

    layers = nn.LayerList([nn.Linear(1024, 1024, "float32", DeviceRef.CPU()) for _ in range(32)])
    model = layers.stack()
    if sys.argv[2] != "one":
        model.to(maxjax.make_mesh(**{sys.argv[2]: 4}))
    ones = lambda i: np.full((1024, 1024), i + 1, np.float32)
    model.load_state_dict({f"{i}.weight": ones(i) for i in range(32)})
    jax.block_until_ready(jax.tree.leaves(model))
    small = nn.Linear(4, 4, "float32", DeviceRef.CPU())
    small.load_state_dict({"weight": np.ones((4, 4), np.float32)})
    maxjax.save_pretrained(small, tempfile.mkdtemp())  # what is imported late
    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    def now():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    before = now()
    maxjax.save_pretrained(model, sys.argv[1], max_shard_size=sys.argv[3])
    print(peak() - before)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "size"),
    [("fsdp", "100MB"), ("one", "5GB"), ("data", "5GB")],
)
def test_saving_does_not_copy_a_stacked_model(tmp_path, mesh, size):
    program = textwrap.dedent(MEMORY)
    command = [sys.executable, "-c", program, str(tmp_path), mesh, size]
    run = subprocess.run(command, capture_output=True, text=True)
    assert not run.returncode, run.stderr
    assert int(run.stdout) <= 64 << 20
    files = list(tmp_path.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > 32 * 4 << 20
