"""A tensor of a type that there are no arrays of: its file opens, and only it is refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import maxjax
from maxjax import DType
from maxjax.checkpoint import convert, restore, save
from maxjax.cli.application import main
from maxjax.errors import CheckpointFormatError
from maxjax.graph.weights import WeightData
from maxjax.storage.entry import UnknownType
from tests.oracles.recorded import torch
from tests.storage.corpus import file_bytes
from tests.storage.pytorch.oracle import file_of

GOOD = np.arange(6, dtype=np.float32).reshape(2, 3)


def st(path: Path) -> str:
    header = {
        "good": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "odd": {"dtype": "I3", "shape": [4, 2], "data_offsets": [24, 27]},
    }
    path.write_bytes(file_bytes(header, GOOD.tobytes() + b"abc"))
    return "I3"


def npz(path: Path) -> str:
    np.savez(path, good=GOOD, odd=np.array([["a"] * 2] * 4))
    return "<U1"


def compressed(path: Path) -> str:
    np.savez_compressed(path, good=GOOD, odd=np.zeros((4, 2), "M8[s]"))
    return "<M8[s]"


def fields(path: Path) -> str:
    np.savez(path, good=GOOD, odd=np.zeros((4, 2), [("a", "<f4"), ("b", "<i2", (3,))]))
    return "a structured dtype"


def bits(path: Path) -> str:
    np.savez(path, good=GOOD, odd=np.zeros((4, 2), "V1"))
    return "|V1"


def quantised(path: Path) -> str:
    def state():
        odd = torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.qint8)
        return {"good": torch.tensor(GOOD), "odd": odd}

    path.write_bytes(file_of(state, "unknown types: quantised"))
    return "a quantised tensor"


CASES = {
    "safetensors": (st, "m.safetensors"), "text": (npz, "m.npz"), "dates": (compressed, "m.npz"),
    "fields": (fields, "m.npz"), "bits": (bits, "m.npz"), "torch": (quantised, "m.pt"),
}  # fmt: skip


@pytest.fixture(params=CASES)
def made(request, tmp_path) -> tuple[Path, str]:
    make, name = CASES[request.param]
    path = tmp_path / name
    return path, make(path)


def test_only_it_is_refused(made):
    path, word = made
    weights = maxjax.load_weights(path)
    table = weights._family.open_table()
    assert list(weights) == ["good", "odd"] and table.entries["odd"].shape == (4, 2)
    assert isinstance(table.entries["odd"].dtype, UnknownType)
    assert table.entries["odd"].dtype.name == word
    np.testing.assert_array_equal(weights.good.data().data, GOOD, strict=True)
    for act in (weights.odd.data, weights.odd.allocate, lambda: jnp.asarray(weights.odd)):
        for _ in range(2):
            with pytest.raises(ValueError, match="odd") as caught:
                act()
            assert isinstance(caught.value, CheckpointFormatError)
            assert (caught.value.tensor, caught.value.path) == ("odd", str(path))


def test_inspect_lists_it(made, capsys):
    path, word = made
    assert main(["inspect", str(path), "--json"]) == 0
    tensors = {one["name"]: one for one in json.loads(capsys.readouterr().out)["tensors"]}
    assert (tensors["odd"]["dtype"], tensors["odd"]["shape"]) == (word, [4, 2])
    assert main(["inspect", str(path)]) == 0
    assert main(["verify", str(path)]) == 1


def test_a_module_that_does_not_want_it_loads(made):
    path, _ = made

    class Net(maxjax.Module):
        def __init__(self, name):
            super().__init__()
            setattr(self, name, maxjax.Weight(name, "float32", GOOD.shape, maxjax.DeviceRef.CPU()))

        def __call__(self, x):
            return x

    with maxjax.load_weights(path) as weights:
        net = Net("good")
        net.load_state_dict(weights, strict=False)
        assert jnp.array_equal(net.good.value, GOOD)
        with pytest.raises(ValueError, match="odd"):
            Net("odd").load_state_dict(weights, strict=False)


def test_nothing_is_converted_without_it(made, tmp_path):
    path, _ = made
    with pytest.raises(CheckpointFormatError, match="odd"):
        convert(path, tmp_path / "new.safetensors")
    assert not (tmp_path / "new.safetensors").exists()


# --- complex values, which there are arrays of -------------------------------------------------

VALUES = (np.arange(8) + 1j * np.arange(8, 16)).reshape(4, 2).astype(np.complex64)


def test_safetensors_has_complex_values(tmp_path):
    path = tmp_path / "m.safetensors"
    header = {"c": {"dtype": "C64", "shape": [4, 2], "data_offsets": [0, 64]}}
    path.write_bytes(file_bytes(header, VALUES.tobytes()))
    data = maxjax.load_weights(path).c.data()
    assert data.dtype is DType.complex64
    np.testing.assert_array_equal(data.data, VALUES, strict=True)
    np.testing.assert_array_equal(jnp.asarray(data), VALUES, strict=True)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("save_as", [np.savez, np.savez_compressed])
def test_npz_has_complex_values(tmp_path, order, fortran, save_as):
    path = tmp_path / "m.npz"
    values = {"c": VALUES, "z": VALUES.astype(np.complex128)}
    layout = np.asfortranarray if fortran else np.ascontiguousarray
    save_as(path, **{n: layout(v.astype(v.dtype.newbyteorder(order))) for n, v in values.items()})
    with maxjax.load_weights(path) as weights:
        for name, value in values.items():
            np.testing.assert_array_equal(weights[name].data().data, value, strict=True)


class Spectrum(maxjax.Module):
    def __init__(self):
        super().__init__()
        self.c = maxjax.Weight("c", "complex64", VALUES.shape, maxjax.DeviceRef.CPU())

    def __call__(self, x):
        return self.c * x


def test_a_model_of_complex_weights_in_each_format(tmp_path):
    """Loaded, run, differentiated, split over devices, saved as both formats and converted."""
    model = Spectrum()
    model.load_state_dict({"c": VALUES})
    out = jax.jit(lambda m, x: m(x))(model, jnp.ones((4, 2), jnp.complex64))
    np.testing.assert_array_equal(out, VALUES)
    mesh = maxjax.make_mesh(model=2)
    directory = maxjax.save_pretrained(model, tmp_path / "hf")
    save(tmp_path / "steps", model)
    for to, name in (("safetensors", "again.safetensors"), ("orbax", "again")):
        convert(directory, tmp_path / name, to=to)
    (tmp_path / "m.pt").write_bytes(file_of(lambda: {"c": torch.tensor(VALUES)}))
    for place in ("hf", "steps", "again.safetensors", "again", "m.pt"):
        found = Spectrum().to(mesh, rules={"c": PartitionSpec("model", None)})
        with maxjax.load_weights(tmp_path / place, verify=True) as weights:
            found.load_state_dict(weights)
        assert found.c.value.sharding == NamedSharding(mesh, PartitionSpec("model", None))
        np.testing.assert_array_equal(found.state_dict()["c"], VALUES, strict=True)
    restored = Spectrum()
    restore(tmp_path / "steps", restored)
    np.testing.assert_array_equal(restored.c.value, VALUES, strict=True)


def test_what_has_no_complex_values_says_so(tmp_path):
    path = tmp_path / "m.npz"
    np.savez(path, c=VALUES.astype(np.complex128))
    with pytest.raises(ValueError, match="complex128"):
        convert(path, tmp_path / "m.safetensors")
    safetensors.numpy.save_file({"w": GOOD}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="imaginary part"):
        WeightData(VALUES, "c", DType.complex64, VALUES.shape).astype("bfloat16")
