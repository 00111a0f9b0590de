"""The same tensors in every format: equal names, types and values, on one device and on eight."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from safetensors.numpy import save_file

import maxjax
from maxjax import nn
from maxjax.dtype import DType
from maxjax.graph import DeviceRef, ShardingStrategy, Weight
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.graph.weights import FileWeights, GGUFWeights, SafetensorWeights
from maxjax.storage.blocks import DECODERS, LAYOUTS
from maxjax.storage.gguf.reader import KEPT
from tests.oracles.recorded import recorded_files, torch

CPU = DeviceRef.CPU()
S = ShardingStrategy
BF16 = np.dtype(ml_dtypes.bfloat16)
Arrays = dict[str, np.ndarray]


class Kind(NamedTuple):
    """A tensor of the model: its type and shape, how it is split, its name in a GGUF file."""

    dtype: np.dtype | type
    shape: tuple[int, ...]
    split: ShardingStrategy | None
    gguf: str


MODEL = {
    "emb.weight": Kind(np.float32, (24, 16), S.rowwise(8), "token_embd.weight"),
    "layers.0.up": Kind(np.float16, (16, 40), S.rowwise(8), "blk.0.ffn_up.weight"),
    "layers.0.down": Kind(BF16, (40, 16), S.columnwise(8), "blk.0.ffn_down.weight"),
    "layers.0.gate": Kind(np.float32, (16, 24), S.columnwise(8), "blk.0.ffn_gate.weight"),
    "layers.0.norm": Kind(np.float32, (7,), None, "blk.0.attn_norm.weight"),
    "layers.0.odd": Kind(BF16, (5, 3), None, "blk.0.odd"),
    "layers.0.experts": Kind(np.float16, (3, 8, 5), S.axiswise(1, 8), "blk.0.experts"),
    "layers.0.bytes": Kind(np.int8, (16, 9), S.rowwise(8), "blk.0.bytes"),
    "positions": Kind(np.int32, (1, 11), None, "positions"),
    # Stored once where the format can: the same values as emb.weight.
    "head.weight": Kind(np.float32, (24, 16), S.columnwise(8), "output.weight"),
}


def bits(array: np.ndarray) -> bytes:
    """Dtype, shape and bytes, to be compared."""
    return f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes()


def model() -> Arrays:
    """Random bits: NaN, infinities, both zeros and subnormal numbers too."""
    rng = np.random.default_rng(0)
    found = {
        name: np.frombuffer(rng.bytes(math.prod(kind.shape) * np.dtype(kind.dtype).itemsize),
                            kind.dtype).reshape(kind.shape)
        for name, kind in MODEL.items()
    }  # fmt: skip
    return {**found, "head.weight": found["emb.weight"]}


# What load_weights gives besides, for types and shapes that no Module here has.
EXTRA: Arrays = {
    "extra.f64": np.array([[0.1, -1e300, 5e-324]]),
    "extra.i64": np.array([-(2**63), 2**63 - 1, 0]),
    "extra.i16": np.arange(-4, 3, dtype=np.int16).reshape(7, 1),
}
# Those that GGUF has no place for.
SMALL: Arrays = {
    "extra.bool": np.array([[True, False, True]]),
    "extra.u8": np.arange(255, dtype=np.uint8).reshape(5, 3, 17),
    "extra.scalar": np.array(2.5, np.float32),
    "extra.empty": np.zeros((0, 4), np.float16),
}


# --- writing ----------------------------------------------------------------------------------


def tensor(array: np.ndarray) -> Any:
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def halves(arrays: Arrays, stem: str, end: str) -> tuple[dict[str, Arrays], dict]:
    """Two parts by the names of their files, and the index."""
    names = list(arrays)
    files = {f"{stem}-0000{i + 1}-of-00002{end}": names[i::2] for i in (0, 1)}
    index = {name: file for file, part in files.items() for name in part}
    return {file: {n: arrays[n] for n in part} for file, part in files.items()}, {
        "weight_map": index
    }


def safetensors(directory: Path, arrays: Arrays) -> Path:
    path = directory / "model.safetensors"
    save_file(arrays, path)
    return path


def safetensors_sharded(directory: Path, arrays: Arrays) -> Path:
    parts, index = halves(arrays, "model", ".safetensors")
    for file, part in parts.items():
        save_file(part, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def state(arrays: Arrays) -> dict[str, Any]:
    """Tensors as a model has them: some are views, and two are one."""
    found = {name: tensor(array) for name, array in arrays.items()}
    found["layers.0.down"] = found["layers.0.down"].T.contiguous().T
    whole = torch.zeros(40, 30)
    whole[3:19, 2:26] = found["layers.0.gate"]
    found["layers.0.gate"] = whole[3:19, 2:26]
    if "head.weight" in found:
        found["head.weight"] = found["emb.weight"]
    return found


def pytorch(directory: Path, arrays: Arrays) -> Path:
    path = directory / "pytorch_model.bin"
    recorded_files(directory, lambda: torch.save(state(arrays), path), "formats: pytorch")
    return directory


def pytorch_legacy(directory: Path, arrays: Arrays) -> Path:
    path = directory / "model.pt"
    options = {"_use_new_zipfile_serialization": False}
    recorded_files(directory, lambda: torch.save(state(arrays), path, **options), "formats: legacy")
    return path


def pytorch_sharded(directory: Path, arrays: Arrays) -> Path:
    parts, index = halves(arrays, "pytorch_model", ".bin")

    def write() -> None:
        found = state(arrays)
        for file, part in parts.items():
            torch.save({name: found[name] for name in part}, directory / file)

    recorded_files(directory, write, "formats: pytorch in parts")
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory / "pytorch_model.bin.index.json"


def npz(directory: Path, arrays: Arrays) -> Path:
    np.savez(directory / "model.npz", **arrays)
    return directory / "model.npz"


def npz_deflated(directory: Path, arrays: Arrays) -> Path:
    np.savez_compressed(directory / "model.npz", **arrays)
    return directory


def write_gguf(path: Path, arrays: Arrays, kinds: dict[str, GGMLQuantizationType]) -> Path:
    """`kinds` of those arrays that are bytes of something else."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, array in arrays.items():
        name = MODEL[name].gguf if name in MODEL else name
        if array.dtype == BF16:
            raw, kind = array.view(np.uint8), GGMLQuantizationType.BF16
        else:
            raw, kind = array, kinds.get(name)
        writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_file(directory: Path, arrays: Arrays) -> Path:
    return write_gguf(directory / "model.gguf", arrays, {})


# --- what a format can hold -------------------------------------------------------------------


def all_of_it(arrays: Arrays) -> Arrays:
    return {**arrays, **EXTRA, **SMALL}


def no_bfloat16(arrays: Arrays) -> Arrays:
    wide = {name: a.astype(np.float32) if a.dtype == BF16 else a for name, a in arrays.items()}
    return all_of_it(wide)


def floats_as(dtype: np.dtype | type) -> Callable[[Arrays], Arrays]:
    """All floats of one type, as converters write GGUF files; of a type with its own kept."""

    def held(arrays: Arrays) -> Arrays:
        is_float = {name: a.dtype == BF16 or a.dtype.kind == "f" for name, a in arrays.items()}
        with np.errstate(all="ignore"):
            return {n: a.astype(dtype) if is_float[n] else a for n, a in arrays.items()} | EXTRA

    return held


def as_they_are(arrays: Arrays) -> Arrays:
    return {**arrays, **EXTRA}


class Format(NamedTuple):
    name: str
    write: Callable[[Path, Arrays], Path]
    held: Callable[[Arrays], Arrays]
    cursor: type = FileWeights
    is_gguf: bool = False

    def __str__(self) -> str:
        return self.name


FORMATS = [
    Format("safetensors", safetensors, all_of_it, SafetensorWeights),
    Format("safetensors-sharded", safetensors_sharded, all_of_it, SafetensorWeights),
    Format("pytorch", pytorch, all_of_it),
    Format("pytorch-legacy", pytorch_legacy, all_of_it),
    Format("pytorch-sharded", pytorch_sharded, all_of_it),
    Format("npz", npz, no_bfloat16),
    Format("npz-deflated", npz_deflated, no_bfloat16),
    Format("gguf", gguf_file, as_they_are, GGUFWeights, True),
    Format("gguf-f32", gguf_file, floats_as(np.float32), GGUFWeights, True),
    Format("gguf-f16", gguf_file, floats_as(np.float16), GGUFWeights, True),
    Format("gguf-bf16", gguf_file, floats_as(BF16), GGUFWeights, True),
]
OURS = {kind.gguf: name for name, kind in MODEL.items()}
every_format = pytest.mark.parametrize("format", FORMATS, ids=str)


def written(format: Format, directory: Path) -> tuple[Path, Arrays]:
    """The file, and what is in it by the names of the model."""
    arrays = format.held(model())
    return format.write(directory, arrays), arrays


# --- names, types, values ---------------------------------------------------------------------


@every_format
def test_names_types_and_values(format, tmp_path):
    path, arrays = written(format, tmp_path)
    weights = maxjax.load_weights(path)
    assert type(weights) is format.cursor
    names = {(MODEL[n].gguf if format.is_gguf and n in MODEL else n): n for n in arrays}
    assert {name for name, _ in weights.items()} == names.keys()
    for name, place in weights.items():
        array, data = arrays[names[name]], place.data()
        assert data.dtype is DType.of(array.dtype) and not data.is_loaded
        assert [int(size) for size in data.shape] == list(array.shape)
        assert bits(np.asarray(data.data)) == bits(array), name


def test_formats_that_hold_everything_are_equal(tmp_path):
    """No array of one format differs from that of another in as much as a bit."""
    seen: dict[str, set[bytes]] = {}
    for format in FORMATS[:5]:
        directory = tmp_path / format.name
        directory.mkdir()
        for name, place in maxjax.load_weights(written(format, directory)[0]).items():
            seen.setdefault(name, set()).add(bits(np.asarray(place.data().data)))
    assert seen.keys() == all_of_it(model()).keys()
    assert {len(found) for found in seen.values()} == {1}


# --- into a Module ----------------------------------------------------------------------------


class Part(nn.Module):
    """Weights by name, a dot for each Module inside."""

    def __init__(self, arrays: Arrays):
        super().__init__()
        below: dict[str, Arrays] = {}
        for name, array in arrays.items():
            first, _, rest = name.partition(".")
            if rest:
                below.setdefault(first, {})[rest] = array
            else:
                setattr(self, first, Weight(first, DType.of(array.dtype), array.shape, CPU))
        for name, some in below.items():
            parts = list(some) and all(key.split(".")[0].isdigit() for key in some)
            setattr(self, name, nn.LayerList([self._layer(some)]) if parts else Part(some))

    @staticmethod
    def _layer(arrays: Arrays) -> nn.Module:
        return Part({name.removeprefix("0."): array for name, array in arrays.items()})

    def __call__(self):
        raise NotImplementedError


def loaded(format: Format, directory: Path, mesh=None) -> tuple[nn.Module, Arrays]:
    path, arrays = written(format, directory)
    arrays = {name: arrays[name] for name in MODEL}
    module = Part(arrays)
    for name, weight in module.raw_state_dict().items():
        if MODEL[name].split is not None:
            weight.sharding_strategy = MODEL[name].split
    if mesh is not None:
        module.to(mesh)
    with maxjax.load_weights(path) as weights:
        data = {(OURS if format.is_gguf else {}).get(n, n): w.data() for n, w in weights.items()}
        module.load_state_dict({name: data[name] for name in MODEL})
    return module, arrays


@every_format
def test_on_one_device(format, tmp_path):
    module, arrays = loaded(format, tmp_path)
    found = module.state_dict()
    assert found.keys() == arrays.keys()
    for name, value in found.items():
        assert bits(np.asarray(value)) == bits(arrays[name]), name


def assert_parts(value: jax.Array, array: np.ndarray, devices: int) -> None:
    """Every device has its own part, bit for bit."""
    assert len(value.sharding.device_set) == devices
    for shard in value.addressable_shards:
        assert bits(np.asarray(shard.data)) == bits(array[shard.index])
    assert bits(np.asarray(value)) == bits(array)


@pytest.mark.sampled
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [{"model": 8}, {"data": 2, "model": 4}, {"fsdp": 8}], ids=str)
@pytest.mark.parametrize("explicit", [False, True])
def test_on_eight_devices(format, sizes, explicit, tmp_path):
    kind = jax.sharding.AxisType
    mesh = maxjax.make_mesh(**sizes, axis_types=kind.Explicit if explicit else kind.Auto)
    module, arrays = loaded(format, tmp_path, mesh)
    for name, weight in module.raw_state_dict().items():
        assert_parts(weight.value, arrays[name], 8)
        if "model" in sizes and MODEL[name].split is not None:
            shard = weight.value.addressable_shards[0].data.shape
            assert math.prod(shard) * sizes["model"] == arrays[name].size, name


# --- packed weights ---------------------------------------------------------------------------

ROWS, COLUMNS = 16, 2048
SPLITS = {"whole": None, "rows": S.rowwise(8), "columns": S.columnwise(8)}
splits = pytest.mark.parametrize("split", SPLITS)
DECODED = sorted(
    name for name in DECODERS.keys() - set(KEPT)
    if getattr(GGMLQuantizationType, name, None) in quants._type_traits
)  # fmt: skip


def blocks(name: str) -> np.ndarray:
    """Random blocks, ``[ROWS, bytes]``, of which all scales are finite."""
    rng = np.random.default_rng(len(name) + ord(name[-1]))
    layout = LAYOUTS[name]
    elements = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]
    raw = rng.integers(0, 256, (ROWS * COLUMNS // elements, layout.nbytes), np.uint8)
    records = raw.view(layout.record)[:, 0]
    for field in layout.fields:
        if field.code == "f2":
            records[field.name] = rng.standard_normal(records[field.name].shape).astype("<f2")
    if name == "IQ1_M":  # its scale lies in four pieces; the last has the sign and the exponent
        raw[:, -1] &= 0xBF
    return raw.reshape(ROWS, -1)


def file_of(name: str, directory: Path) -> tuple[Path, np.ndarray]:
    raw = blocks(name)
    arrays, kinds = {"weight": raw}, {"weight": GGMLQuantizationType[name]}
    return write_gguf(directory / "m.gguf", arrays, kinds), raw


def linear(path: Path, split: str, encoding: QuantizationEncoding | None) -> jax.Array:
    """The value of a Linear's weight: on one device, or split over eight."""
    layer = nn.Linear(COLUMNS, ROWS, "float32", CPU, quantization_encoding=encoding)
    if SPLITS[split] is not None:
        layer.sharding_strategy = SPLITS[split]
        layer.to(maxjax.make_mesh(model=8))
    layer.load_state_dict(maxjax.load_weights(path))
    return layer.weight.value


def assert_split(value: jax.Array, array: np.ndarray, split: str) -> None:
    if split == "whole":
        assert bits(np.asarray(value)) == bits(array)
        return
    assert_parts(value, array, 8)
    axis = ["rows", "columns"].index(split)
    assert value.addressable_shards[0].data.shape[axis] * 8 == array.shape[axis]


@splits
@pytest.mark.parametrize("name", KEPT)
def test_packed_types_keep_their_bytes(name, split, tmp_path):
    path, raw = file_of(name, tmp_path)
    assert_split(linear(path, split, QuantizationEncoding(name)), raw, split)


@splits
@pytest.mark.parametrize("name", DECODED)
def test_other_types_are_decoded_as_by_the_gguf_package(name, split, tmp_path):
    path, raw = file_of(name, tmp_path)
    with np.errstate(all="ignore"):
        wanted = quants.dequantize(raw, GGMLQuantizationType[name])
    assert wanted.shape == (ROWS, COLUMNS) and np.isfinite(wanted).all()
    assert_split(linear(path, split, None), wanted, split)


def test_the_types_that_are_decoded_are_many():
    assert {"Q2_K", "Q3_K", "IQ3_S", "IQ2_XS", "TQ1_0", "IQ1_M"} <= set(DECODED)


def test_items_of_a_gguf_file_are_in_the_files_order(tmp_path):
    names = ["z", "a.b", "a", "m"]
    path = write_gguf(tmp_path / "order.gguf", {name: np.ones(1, np.float32) for name in names}, {})
    with maxjax.load_weights(path) as w:
        assert [name for name, _ in w.items()] == list(w.keys()) == names
        assert [name for name, _ in w.a.items()] == ["a.b", "a"]


def test_a_list_with_one_directory(tmp_path):
    model = maxjax.init(nn.Linear(3, 2, "float32", CPU), jax.random.key(0))
    maxjax.checkpoint.save(tmp_path / "orbax", model)
    with maxjax.load_weights([tmp_path / "orbax"]) as weights:
        np.testing.assert_array_equal(np.asarray(weights.weight.data()), model.weight.value)
