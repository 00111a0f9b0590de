"""convert: every format that opens into every format that is written, and what goes along.

Files are looked at with safetensors' own rules (a parser of a few lines), orbax and gguf: never
with the readers that convert itself uses.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import maxjax
from maxjax.checkpoint import Converted, convert
from maxjax.errors import (
    CheckpointError,
    CheckpointLimitError,
    CheckpointMismatchError,
    CheckpointMissingError,
    CheckpointUnsafeError,
    UnsupportedModelError,
    UserInputError,
)
from maxjax.graph.weights import load_weights
from maxjax.storage.blocks import decode, encode
from maxjax.storage.save.staging import Staging
from tests.models.gguf import files as gguf_files
from tests.oracles.models import ask_of, opened
from tests.oracles.recorded import torch
from tests.storage.orbax import corpus as orbax_corpus
from tests.storage.orbax.corpus import quiet
from tests.storage.pytorch import corpus

BF16 = np.dtype(ml_dtypes.bfloat16)
CODES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16,
    "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64, "F16": np.float16,
    "F32": np.float32, "F64": np.float64, "BF16": BF16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
Arrays = dict[str, np.ndarray]


def parsed(path: Path) -> tuple[Arrays, dict[str, str]]:
    """(name → array in the file's order, metadata) of a safetensors file, by the format's text."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata, found = header.pop("__metadata__", {}), {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        data = np.frombuffer(content[start + begin : start + end], CODES[about["dtype"]])
        found[name] = data.reshape(about["shape"])
    return found, metadata


def held(path: Path) -> Arrays:
    """What a checkpoint holds that convert wrote: a file, a directory, steps of orbax."""
    if path.is_file():
        return parsed(path)[0]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        places = json.loads(index.read_text())["weight_map"]
        files = {name: parsed(path / name)[0] for name in set(places.values())}
        assert sorted(name for of in files.values() for name in of) == sorted(places)
        assert not (path / "model.safetensors").exists()
        return {name: files[file][name] for name, file in places.items()}
    if (path / "model.safetensors").is_file():
        return parsed(path / "model.safetensors")[0]
    with quiet():
        found = orbax_corpus.v1().load_checkpointables(path)["state"]
        return {name: np.asarray(value) for name, value in found.items()}


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


# --- every format in, every format out -----------------------------------------------------------


def some_arrays() -> Arrays:
    rng = np.random.default_rng(3)
    found = {
        "model.layers.0.weight": rng.standard_normal((24, 16)).astype(np.float32),
        "model.layers.1.weight": rng.standard_normal((16, 40)).astype(np.float16),
        "scalar": np.array(2.5, np.float32),
        "none": np.zeros((0, 3), np.float32),
        "ids": rng.integers(-9, 9, (3, 4, 5)),
        "mask": rng.integers(0, 2, 70).astype(bool),
        "ünï": np.arange(4, dtype=np.int8),
    }
    found["model.layers.0.weight"][0, :4] = [np.nan, -0.0, np.inf, 1e-42]
    return found


def _safetensors(folder: Path) -> tuple[Path, Arrays]:
    arrays = some_arrays()
    safetensors.numpy.save_file(arrays, folder / "m.safetensors")
    return folder / "m.safetensors", arrays


def _directory(folder: Path) -> tuple[Path, Arrays]:
    arrays = some_arrays()
    weight_map = {}
    for number, name in enumerate(arrays, 1):
        file = f"model-{number:05}-of-{len(arrays):05}.safetensors"
        safetensors.numpy.save_file({name: arrays[name]}, folder / file)
        weight_map[name] = file
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder, arrays


def _index(folder: Path) -> tuple[Path, Arrays]:
    path, arrays = _directory(folder)
    return path / "model.safetensors.index.json", arrays


def _torch(name: str, legacy: bool = False):
    def make(folder: Path) -> tuple[Path, Arrays]:
        arrays = some_arrays()
        tensors = dict(arrays)
        tensors["half"] = np.arange(6).astype(BF16).reshape(2, 3)
        # A view with strides, and a part of another's memory.
        tensors["view"] = tensors["model.layers.0.weight"].T[2:5]
        (folder / name).write_bytes(corpus.saved(tensors, is_legacy=legacy))
        arrays["half"] = tensors["half"]
        arrays["view"] = np.ascontiguousarray(tensors["view"])
        return folder / name, arrays

    return make


def _npz(folder: Path) -> tuple[Path, Arrays]:
    arrays = some_arrays()
    arrays["swapped"] = np.arange(6, dtype=">i4").reshape(2, 3)
    arrays["fortran"] = np.asfortranarray(arrays["ids"][0])
    np.savez_compressed(folder / "m.npz", **arrays)
    arrays["swapped"] = arrays["swapped"].astype("<i4")
    return folder / "m.npz", arrays


def _npy(folder: Path) -> tuple[Path, Arrays]:
    array = some_arrays()["model.layers.0.weight"]
    np.save(folder / "m.npy", array)
    (name,) = load_weights(folder / "m.npy")._family.open_table().entries
    return folder / "m.npy", {name: array}


def _orbax(kind: str):
    def make(folder: Path) -> tuple[Path, Arrays]:
        return orbax_corpus.build(kind, folder / "root"), orbax_corpus.tensors()

    return make


def _ours(folder: Path) -> tuple[Path, Arrays]:
    path, arrays = _safetensors(folder)
    convert(path, folder / "run", to="orbax")
    return folder / "run", arrays


SOURCES = {
    "safetensors": _safetensors, "directory": _directory, "index": _index,
    "bin": _torch("pytorch_model.bin"), "pt": _torch("m.pt", legacy=True),
    "npz": _npz, "npy": _npy, "orbax-v0": _orbax("composite"), "orbax-v1": _orbax("v1_training"),
    "orbax-ours": _ours,
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_every_format_into_every_format(source, tmp_path):
    path, arrays = SOURCES[source](tmp_path)
    expected = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
    nbytes = sum(array.nbytes for array in expected.values())
    out = tmp_path / "out"
    for target, kind, options in (
        ("one.safetensors", "safetensors", {}),
        ("single", "safetensors", {}),
        ("several", "safetensors", {"max_shard_size": 700}),
        ("steps", "orbax", {"to": "orbax"}),
    ):
        told: list[int] = []

        def watch(total, told=told):
            told.append(total)
            return told.append

        found = convert(path, out / target, watch=watch, **options)
        where = out / target / "0" if kind == "orbax" else out / target
        assert found == Converted(where, kind, len(expected), nbytes, 0)
        assert told[0] == sum(told[1:]) == nbytes
        # Of those without values orbax knows nothing: maxjax keeps them beside.
        stored = {n: a for n, a in expected.items() if a.size or kind != "orbax"}
        assert_same(held(where), stored)
        with load_weights(out / target, verify=True) as weights:  # and its checksums agree
            assert_same(
                {name: np.asarray(weights[name].data().data) for name in expected}, expected
            )
    if len(expected) > 3:
        assert len(list((out / "several").glob("*.safetensors"))) > 1
    assert sorted(p.name for p in (out / "single").iterdir()) == [
        "maxjax_digests.json", "model.safetensors",
    ]  # fmt: skip


def test_what_safetensors_wrote_is_written_again_byte_by_byte(tmp_path):
    for number, metadata in enumerate((None, {"format": "pt"}, {"z": "1", "a": "ä\n", "m": ""})):
        path = tmp_path / f"{number}.safetensors"
        safetensors.numpy.save_file(some_arrays(), path, metadata)
        convert(path, tmp_path / "again.safetensors", overwrite=True)
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
        convert(path, tmp_path / f"{number}")
        assert (tmp_path / f"{number}" / "model.safetensors").read_bytes() == path.read_bytes()


def test_order_and_metadata_of_another_writer_stay(tmp_path):
    """Names out of order, data in yet another, with a gap of nothing; metadata last."""
    names, places = ["b", "a", "d", "c"], {"c": 0, "a": 1, "d": 2, "b": 3}
    header: dict = {
        name: {
            "dtype": "F32",
            "shape": [2],
            "data_offsets": [8 * places[name], 8 * places[name] + 8],
        }
        for name in names
    }
    header["__metadata__"] = {"zeta": "1", "alpha": "2"}
    text = json.dumps(header).encode()
    data = np.arange(8, dtype=np.float32)
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())
    for target in ("again.safetensors", "folder"):
        convert(path, tmp_path / target)
        file = tmp_path / target
        found, metadata = parsed(file if file.is_file() else file / "model.safetensors")
        assert list(found) == names and list(metadata.items()) == [("zeta", "1"), ("alpha", "2")]
        for name in names:
            np.testing.assert_array_equal(found[name], data[2 * places[name] :][:2])


# --- GGUF ----------------------------------------------------------------------------------------

MODELS = ["bert", "llama", "llama-tied", "qwen2", "gemma2", "gpt2", "mixtral"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory that transformers wrote for a case, and what is in it."""
    made: dict[str, tuple[Path, Arrays]] = {}

    def get(case: str) -> tuple[Path, Arrays]:
        if case not in made:
            folder = tmp_path_factory.mktemp("model") / case
            made[case] = folder, gguf_files.checkpoint(gguf_files.model(case), folder)
        return made[case]

    return get


def of_gguf(arrays: Arrays) -> Arrays:
    """What llama.cpp has of a model: BERT's pooler it leaves out."""
    return {name: array for name, array in arrays.items() if not name.startswith("pooler.")}


def shifted(case: str) -> bool:
    return case.startswith("gemma")


@pytest.mark.parametrize("case", MODELS)
def test_hugging_face_to_gguf_and_back(case, models, tmp_path):
    folder, arrays = models(case)
    found = convert(folder, tmp_path / "m.gguf")
    _, written = gguf_files.read(tmp_path / "m.gguf")
    model = gguf_files.model(case)
    expected = dict(gguf_files.converted(case, model, arrays))
    assert sorted(written) == sorted(expected)
    assert (found.format, found.tensors, found.packed) == ("gguf", len(expected), 0)
    for name, values in expected.items():
        np.testing.assert_allclose(written[name], values, rtol=1e-6, atol=0, err_msg=name)
    for target, options in (
        ("back", {}),
        ("parts", {"max_shard_size": 9000}),
        ("run", {"to": "orbax"}),
    ):
        convert(tmp_path / "m.gguf", tmp_path / target, **options)
        where = tmp_path / target / "0" if options.get("to") else tmp_path / target
        assert_same(held(where), of_gguf(arrays))
        assert (
            json.loads((where / "config.json").read_text())["model_type"] == model.config.model_type
        )
    # The second file is the first.
    convert(tmp_path / "back", tmp_path / "m2.gguf")
    _, again = gguf_files.read(tmp_path / "m2.gguf")
    assert_same(again, written)


def test_transformers_opens_what_came_back_from_gguf(models, tmp_path):
    folder, _ = models("llama")
    convert(folder, tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "back")
    model = gguf_files.model("llama")

    def logits(directory):
        def answer():
            with torch.no_grad():
                return opened(model.kind, directory)(torch.arange(10)[None]).logits.numpy()

        return ask_of(directory, "logits of ten tokens", answer)

    np.testing.assert_array_equal(logits(tmp_path / "back"), logits(folder))


def test_a_single_file_has_its_configuration_beside_it(models, tmp_path):
    folder, arrays = models("qwen2")
    convert(folder / "model.safetensors", tmp_path / "m.gguf")
    convert(folder, tmp_path / "n.gguf")
    a, b = (gguf_files.read(tmp_path / name) for name in ("m.gguf", "n.gguf"))
    assert_same(a[1], b[1])
    different = {key for key in a[0].keys() | b[0].keys() if a[0].get(key) != b[0].get(key)}
    assert different <= {"general.name"}


# What gguf's writer makes of numbers, text and lists of each type.
def any_gguf(path: Path) -> Path:
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("x.u8", 3)
    writer.add_int8("x.i8", -3)
    writer.add_uint16("x.u16", 3)
    writer.add_int16("x.i16", -3)
    writer.add_uint32("x.u32", 3)
    writer.add_int32("x.i32", 3)
    writer.add_uint64("x.u64", 3)
    writer.add_int64("x.i64", 3)
    writer.add_float32("x.f32", 0.1)
    writer.add_float64("x.f64", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_string("x.text", "zwölf\n")
    writer.add_string("x.empty", "")
    writer.add_array("x.texts", ["a", "", "ü"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, 1.5])
    writer.add_array("x.bools", [True, False])
    for name, kind in (
        ("q8", "Q8_0"),
        ("q4", "Q4_0"),
        ("q4k", "Q4_K"),
        ("q6k", "Q6_K"),
        ("q5", "Q5_1"),
    ):
        kind = gguf.GGMLQuantizationType[kind]
        elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (3, 512 // elements * nbytes)).astype(np.uint8)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.add_tensor("f16", rng.standard_normal((2, 3, 5)).astype(np.float16))
    writer.add_tensor("f32", np.arange(3, dtype=np.float32))
    bits = rng.integers(0, 1 << 15, (4, 6)).astype(np.uint16)
    writer.add_tensor("bf16", bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("i32", np.arange(3, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_all_tokens_that_end_an_answer_go_through_gguf(tmp_path):
    shutil.copytree(Path(maxjax.__file__).parent / "tiny", tmp_path / "hf")
    (tmp_path / "hf" / "maxjax_digests.json").unlink()
    file = tmp_path / "hf" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [0, 100, 101]}))
    convert(tmp_path / "hf", tmp_path / "m.gguf")
    loaded, _ = maxjax.load(tmp_path / "m.gguf")
    assert loaded.generation.eos_ids == (0, 100, 101)
    convert(tmp_path / "m.gguf", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert back["eos_token_id"] == [0, 100, 101]


def test_a_gguf_file_is_copied_byte_by_byte(tmp_path):
    """Whatever model it is of: nothing of it has to be understood."""
    path = any_gguf(tmp_path / "m.gguf")
    found = convert(path, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == path.read_bytes()
    assert found.packed == 5 and found.tensors == 9


def test_a_split_gguf_file_becomes_one(models, tmp_path):
    """Names as the tool of llama.cpp gives them, its three keys in each part."""
    folder, _ = models("llama")
    convert(folder, tmp_path / "whole.gguf")
    metadata, tensors = gguf_files.read(tmp_path / "whole.gguf")
    names = list(tensors)
    for part in range(2):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part + 1:05}-of-00002.gguf", "llama")
        for key, value in metadata.items() if part == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
                kinds[type(value)](key, value)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        for name in names[part::2]:
            writer.add_tensor(name, tensors[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    convert(tmp_path / "m-00001-of-00002.gguf", tmp_path / "one.gguf")
    found, arrays = gguf_files.read(tmp_path / "one.gguf")
    assert_same(arrays, tensors)
    assert found == metadata


# --- packed blocks -------------------------------------------------------------------------------

WIDE = {**gguf_files.TINY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A llama whose rows are whole blocks of any kind: (directory, arrays)."""
    folder = tmp_path_factory.mktemp("wide") / "llama"
    case = gguf_files.CASES["llama"]
    gguf_files.CASES["llama-wide"] = (case[0], case[1], {**WIDE})
    try:
        return folder, gguf_files.checkpoint(gguf_files.model("llama-wide"), folder)
    finally:
        del gguf_files.CASES["llama-wide"]


# Of each kind the largest error in parts of a block's largest value, and the bits for a value.
KINDS = {"q8_0": 1 / 200, "q4_0": 1 / 7, "q4_k": 1 / 7, "q6_k": 1 / 28}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", ["gguf", "safetensors", "orbax"])
def test_quantize(kind, through, wide, tmp_path):
    """From any format, by way of a GGUF file of floats too: what the encoder makes of the values."""
    folder, arrays = wide
    source = folder
    if through == "gguf":
        source = convert(folder, tmp_path / "float.gguf").path
    elif through == "orbax":
        source = convert(folder, tmp_path / "run", to="orbax").path
    found = convert(source, tmp_path / "m.gguf", quantize=kind)
    convert(folder, tmp_path / "f32.gguf")
    _, floats = gguf_files.read(tmp_path / "f32.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert sorted(t.name for t in reader.tensors) == sorted(floats)
    packed = 0
    for tensor in reader.tensors:
        values, encoding = floats[tensor.name], tensor.tensor_type.name
        if values.ndim < 2:
            assert encoding == "F32"
            np.testing.assert_array_equal(tensor.data, values)
            continue
        packed += 1
        assert encoding == kind.upper()
        np.testing.assert_array_equal(tensor.data, encode(encoding, values), err_msg=tensor.name)
        decoded = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        worst = np.abs(decoded - values).reshape(-1, 32 if kind.endswith("0") else 256).max(1)
        largest = np.abs(values).reshape(len(worst), -1).max(1)
        assert (worst <= largest * KINDS[kind]).all(), tensor.name
    assert found.packed == packed == 9
    metadata, _ = gguf_files.read(tmp_path / "m.gguf")
    name = {"q4_k": "Q4_K_M"}.get(kind, kind.upper())
    assert metadata["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{name}"]
    assert metadata["general.quantization_version"] == gguf.GGML_QUANT_VERSION


def test_packed_blocks_survive_safetensors_and_orbax(wide, tmp_path):
    folder, _ = wide
    first = convert(folder, tmp_path / "a.gguf", quantize="q4_k")
    _, blocks = gguf_files.read(first.path)
    middle = convert(first.path, tmp_path / "st")
    assert middle.packed == first.packed == 9
    stored, metadata = parsed(tmp_path / "st" / "model.safetensors")
    assert set(json.loads(metadata["maxjax.encodings"]).values()) == {"Q4_K"}
    assert stored["model.embed_tokens.weight"].dtype == np.uint8
    run = convert(tmp_path / "st", tmp_path / "run", to="orbax")
    for source in (tmp_path / "st", run.path, tmp_path / "run"):
        again = convert(source, tmp_path / "b.gguf", overwrite=True)
        assert again.packed == 9
        _, found = gguf_files.read(tmp_path / "b.gguf")
        assert_same(found, blocks)
    convert(run.path, tmp_path / "st2.safetensors")
    assert_same(parsed(tmp_path / "st2.safetensors")[0], stored)
    # The next file of blocks has them as they are: encoded once.
    convert(tmp_path / "st", tmp_path / "c.gguf", quantize="q4_k")
    _, found = gguf_files.read(tmp_path / "c.gguf")
    assert_same(found, blocks)


def test_packed_blocks_are_decoded_by_dtype(wide, tmp_path):
    folder, arrays = wide
    convert(folder, tmp_path / "a.gguf", quantize="q8_0")
    found = convert(tmp_path / "a.gguf", tmp_path / "st", dtype="float32")
    assert found.packed == 0
    name = "model.layers.0.mlp.up_proj.weight"
    values = held(tmp_path / "st")[name]
    np.testing.assert_array_equal(values, decode("Q8_0", encode("Q8_0", arrays[name])))
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", dtype="float16")
    metadata, tensors = gguf_files.read(tmp_path / "b.gguf")
    assert tensors["blk.0.ffn_up.weight"].dtype == np.float16
    np.testing.assert_array_equal(tensors["blk.0.ffn_up.weight"], values.astype(np.float16))
    assert tensors["output_norm.weight"].dtype == np.float32
    assert metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    assert "general.quantization_version" not in metadata


def test_another_kind_of_blocks_is_made_of_the_decoded_values(wide, tmp_path):
    folder, arrays = wide
    convert(folder, tmp_path / "a.gguf", quantize="q8_0")
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", quantize="q4_0")
    _, found = gguf_files.read(tmp_path / "b.gguf")
    values = decode("Q8_0", encode("Q8_0", arrays["model.embed_tokens.weight"]))
    np.testing.assert_array_equal(found["token_embd.weight"], encode("Q4_0", values))


def test_rows_that_are_no_whole_blocks(models, tmp_path):
    """Rows of 48 take no block of any kind, and become float16; those of 32 take Q8_0."""
    folder, arrays = models("llama")
    convert(folder, tmp_path / "m.gguf", quantize="q4_k")
    found = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert found["blk.0.ffn_up.weight"].tensor_type.name == "Q8_0"
    down = found["blk.0.ffn_down.weight"]
    assert down.tensor_type.name == "F16"
    values = arrays["model.layers.0.mlp.down_proj.weight"].astype(np.float16)
    np.testing.assert_array_equal(down.data, values)


# --- types ---------------------------------------------------------------------------------------


def test_dtype(models, tmp_path):
    folder, arrays = models("llama")
    expected = {name: array.astype(BF16) for name, array in arrays.items()}
    convert(folder, tmp_path / "st", dtype="bfloat16")
    assert_same(held(tmp_path / "st"), expected)
    config = json.loads((tmp_path / "st" / "config.json").read_text())
    original = json.loads((folder / "config.json").read_text())
    assert original.pop("dtype") == "float32" and config.pop("dtype") == "bfloat16"
    assert config == original
    run = convert(folder, tmp_path / "run", to="orbax", dtype="bfloat16")
    assert_same(held(run.path), expected)
    convert(folder, tmp_path / "m.gguf", dtype="bfloat16")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    assert tensors["output.weight"].tensor_type.name == "BF16"
    raw = tensors["output.weight"].data.tobytes()
    assert raw == expected["lm_head.weight"].tobytes()
    metadata, _ = gguf_files.read(tmp_path / "m.gguf")
    assert metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16


def test_dtype_of_whole_numbers_stays(tmp_path):
    path, arrays = _safetensors(tmp_path)
    convert(path, tmp_path / "b.safetensors", dtype="bf16")
    found = parsed(tmp_path / "b.safetensors")[0]
    for name, array in arrays.items():
        wanted = BF16 if array.dtype.kind == "f" else array.dtype
        assert found[name].dtype == wanted
        assert found[name].tobytes() == array.astype(wanted).tobytes()


def test_a_model_in_bfloat16_goes_through_gguf_and_back(models, tmp_path):
    """Norms are float32 in the file, and bfloat16 again behind it."""
    folder, _ = models("gemma2")
    convert(folder, tmp_path / "st", dtype="bfloat16")
    convert(tmp_path / "st", tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "back")
    assert_same(held(tmp_path / "back"), held(tmp_path / "st"))


# --- names of destinations -----------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.safetensors"
    safetensors.numpy.save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, path)
    return path


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("m.gguf", {"to": "safetensors"}, "is the name of a gguf file, and safetensors was asked"),
        ("m.safetensors", {"to": "gguf"}, "is the name of a safetensors file, and gguf was asked"),
        (
            "m.safetensors",
            {"to": "orbax"},
            "is the name of a safetensors file, and orbax was asked",
        ),
        ("m", {"to": "gguf"}, r"m: name a file for GGUF, for example .*model\.gguf"),
        ("m", {"to": "pt"}, "to='pt': it must be one of safetensors, gguf, orbax"),
        ("m", {"dtype": "int8"}, "int8"),
        ("m", {"dtype": "float23"}, "float23"),
        ("m", {"dtype": 7}, "7"),
        ("m", {"quantize": "q4_k"}, "quantize='q4_k' is for GGUF files: safetensors has no such"),
        ("m", {"quantize": "q4_0", "to": "orbax"}, "orbax has no such blocks"),
        ("m.gguf", {"quantize": "q3_x"}, "'q3_x': it must be one of q4_0, q4_1, q5_0"),
        ("m.gguf", {"quantize": 8}, "quantize=8: it must be one of q4_0, q4_1, q5_0"),
        ("m", {"max_shard_size": "many"}, "'many' is not a size"),
        ("m", {"max_shard_size": 0}, "0 is not a size"),
        ("m.bin", {}, r"m\.bin.*not written"),
        ("m.pt", {}, r"m\.pt.*not written"),
        ("m.npz", {"to": "safetensors"}, r"m\.npz.*not written"),
        ("m.h5", {}, r"m\.h5.*not written"),
    ],
)
def test_arguments_that_do_not_go_together(small, tmp_path, target, options, says):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserInputError, match=says) as info:
        convert(small, tmp_path / target, **options)
    assert "\n" not in str(info.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_may_be_called_like_a_version(small, tmp_path):
    convert(small, tmp_path / "model-v1.5")
    assert (tmp_path / "model-v1.5" / "model.safetensors").is_file()
    (tmp_path / "d.safetensors").mkdir()  # a directory, whatever its name says
    convert(small, tmp_path / "d.safetensors")
    assert (tmp_path / "d.safetensors" / "model.safetensors").is_file()


def test_names_that_are_none(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, target in ((small, ""), ("", tmp_path / "o")):
        with pytest.raises(UserInputError, match="must not be empty"):
            convert(source, target)
    assert [p.name for p in tmp_path.iterdir()] == ["small.safetensors"]


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode")
def test_names_that_are_not_utf_8(small, tmp_path):
    folder, name = tmp_path / "source", os.fsdecode(b"\xe9")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(small.read_bytes())
    (folder / "config.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / f"{name}.jinja").write_text("x")
    convert(folder, tmp_path / name)
    assert (tmp_path / name / "additional_chat_templates" / f"{name}.jinja").is_file()
    convert(tmp_path / name, tmp_path / f"{name}.safetensors")
    with load_weights(tmp_path / f"{name}.safetensors") as weights:
        assert list(weights.items())


def test_orbax_where_it_would_not_be_opened(small, tmp_path):
    run = convert(small, tmp_path / "run", to="orbax")
    with pytest.raises(UserInputError, match=r"run/0 is a step: name the directory of .*/run$"):
        convert(small, run.path, to="orbax")
    convert(small, tmp_path / "st")
    convert(small, tmp_path / "set", max_shard_size=1)
    os.rename(tmp_path / "set" / "model.safetensors", tmp_path / "set" / "x")
    (tmp_path / "set" / "model.safetensors.index.json").write_text("{}")
    for folder in ("st", "set"):
        before = names(tmp_path / folder)
        with pytest.raises(UserInputError, match=f"{folder} holds a safetensors checkpoint"):
            convert(small, tmp_path / folder, to="orbax")
        assert names(tmp_path / folder) == before


def test_gguf_without_a_configuration(small, tmp_path):
    with pytest.raises(
        CheckpointMissingError, match=r"small\.safetensors: there is no config\.json"
    ):
        convert(small, tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["small.safetensors"]


def test_gguf_of_an_architecture_without_names(small, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nosuch"}')
    with pytest.raises(UnsupportedModelError, match="nosuch"):
        convert(small, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_gguf_of_a_model_that_torch_had_wrapped(models, tmp_path):
    folder, arrays = models("llama")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    wrapped = {f"module._orig_mod.{name}": array for name, array in arrays.items()}
    safetensors.numpy.save_file(wrapped, tmp_path / "model.safetensors")
    convert(tmp_path, tmp_path / "m.gguf")
    convert(folder, tmp_path / "plain.gguf")
    with load_weights(tmp_path / "m.gguf") as found, load_weights(tmp_path / "plain.gguf") as plain:
        entries = [one._family.open_table().entries for one in (found, plain)]
    assert entries[0].keys() == entries[1].keys()


def test_gguf_of_another_model_than_the_configuration_says(small, models, tmp_path):
    (tmp_path / "config.json").write_bytes((models("llama")[0] / "config.json").read_bytes())
    with pytest.raises(
        CheckpointMismatchError, match="'vocab_size' is larger than the tensors of the file allow"
    ):
        convert(small, tmp_path / "m.gguf")
    # Where the sizes could be, the names tell.
    tensors = {f"{i}.w": np.zeros((4096, 4), np.float32) for i in range(40)}
    safetensors.numpy.save_file(tensors, small)
    with pytest.raises(CheckpointMismatchError, match=r"does not have: '?0\.w"):
        convert(small, tmp_path / "m.gguf")


def test_a_gguf_file_of_an_unknown_architecture_has_no_names_for_hugging_face(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_tensor("w", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises((UnsupportedModelError, CheckpointError), match="rwkv7"):
        convert(path, tmp_path / "st")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_types_that_a_format_does_not_have(tmp_path):
    safetensors.numpy.save_file(
        {"w": np.zeros(4, ml_dtypes.float8_e4m3fn)}, tmp_path / "a.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **WIDE}))
    run = orbax_corpus.save(tmp_path / "run", {"w": np.zeros(4, ml_dtypes.int4)})
    with pytest.raises(CheckpointMismatchError, match="'w'.*int4"):
        convert(run, tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


# --- what goes along -----------------------------------------------------------------------------

ALONG = {
    "tokenizer.json": "{}", "tokenizer_config.json": '{"a": "ü"}', "special_tokens_map.json": "{}",
    "vocab.txt": "a\nb\n", "merges.txt": "a b\n", "spiece.model": "\0\1", "README.md": "# x",
    "generation_config.json": '{"eos_token_id": 2}', "chat_template.jinja": "{{ x }}\n",
    "modules.json": '[{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]',
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}', "2_Normalize/config.json": "{}",
    "3_Dense/config.json": "{}", "3_Dense/model.safetensors": "weights of a layer of their own",
}  # fmt: skip
LEFT = {
    "modeling_x.py": "import os", "run.sh": "exit", "optimizer.pt": "x", ".hidden.json": "{}",
    "model.onnx": "x", "onnx/config.json": "{}", "maxjax_digests.json": "{}", "1_Pooling/x.py": "",
    "train.json": "{}", "notes.txt": "mine", "CHANGES.md": "x", "logs.txt/a": "", "adapter_config.json": "{}",
    "pytorch_model.bin.index.json": "{}", "flax_model.msgpack": "x", "module.so": "x",
}  # fmt: skip


def beside(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("by", ["directory", "file"])
def test_what_belongs_to_the_model_goes_along_and_nothing_else(models, tmp_path, by):
    folder, blobs = tmp_path / "snapshots" / "0123", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for path in models("llama")[0].iterdir():
        if path.name not in ("maxjax_digests.json", "generation_config.json"):
            shutil.copy(path, blobs)
            (folder / path.name).symlink_to(
                f"../../blobs/{path.name}"
            )  # as in Hugging Face's cache
    beside(folder, ALONG | LEFT)
    os.mkfifo(folder / "x.json")
    with open(folder / "data.json", "wb") as file:
        file.truncate(1 << 34)
    source = folder if by == "directory" else folder / "model.safetensors"
    convert(source, tmp_path / "out")
    expected = {*ALONG, "config.json", "model.safetensors", "maxjax_digests.json"}
    assert names(tmp_path / "out") == expected
    for name, text in ALONG.items():
        assert (tmp_path / "out" / name).read_text() == text
        assert not (tmp_path / "out" / name).is_symlink()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("to", ["out", "out.gguf"])
@pytest.mark.parametrize(
    "name", ["README.md", "tokenizer.json", "config.json", "1_Pooling/config.json"]
)
def test_links_out_of_the_directory_are_not_copied(models, tmp_path, caplog, name, to):
    """Or a private file would be published with the new checkpoint; weights that are links open."""
    folder, private = tmp_path / "model", tmp_path / "private"
    shutil.copytree(models("llama")[0], folder)
    source = folder / name
    shutil.rmtree(source, ignore_errors=True) if source.is_dir() else source.unlink(missing_ok=True)
    source.parent.mkdir(exist_ok=True)
    private.write_text('{"secret": 1}')
    source.symlink_to(private)
    shutil.move(folder / "model.safetensors", tmp_path / "weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "weights")
    load_weights(folder).close()
    convert(folder, tmp_path / "w.safetensors")  # which copies no file beside the weights
    if name == "README.md":
        convert(folder, tmp_path / to)
        assert not (tmp_path / "out" / name).exists()
        assert "has no README.md" in caplog.text
    else:
        with pytest.raises(CheckpointUnsafeError, match=f"{name}: the file is a link"):
            convert(folder, tmp_path / to)
        assert not (tmp_path / to).exists()


def test_files_that_are_too_large_are_not_copied(models, tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(models("llama")[0], folder)
    for name in ("README.md", "vocab.txt"):
        with open(folder / name, "wb") as file:
            file.truncate(1 << 34)
        if name == "README.md":
            convert(folder, tmp_path / "out")
            assert not (tmp_path / "out" / name).exists() and "has no README.md" in caplog.text
    with pytest.raises(CheckpointLimitError, match="vocab.txt.*json_bytes"):
        convert(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_files_beside_the_weights_are_counted_before_anything_is_written(
    models, tmp_path, monkeypatch
):
    folder = tmp_path / "model"
    shutil.copytree(models("llama")[0], folder)
    (folder / "vocab.txt").write_bytes(bytes(3_000_000))
    needed = []
    monkeypatch.setattr(Staging, "require_space", lambda self, nbytes: needed.append(nbytes))
    convert(folder, tmp_path / "out")
    others = sum(p.stat().st_size for p in (tmp_path / "out").iterdir() if "maxjax" not in p.name)
    assert others - 10_000 < needed[0] <= others and len(needed) == 1  # without the header


def test_a_single_file_in_a_heap_of_files_has_nothing_beside_it(small, tmp_path):
    beside(tmp_path, {"notes.txt": "mine", "other.json": "{}"})
    convert(small, tmp_path / "out")
    assert names(tmp_path / "out") == {"model.safetensors", "maxjax_digests.json"}


# --- onto itself ---------------------------------------------------------------------------------


def test_onto_the_same_directory(models, tmp_path):
    folder, arrays = tmp_path / "m", models("qwen2")[1]
    convert(models("qwen2")[0], folder)
    (folder / "notes.md").write_text("mine")
    before = names(folder)
    for options in ({"max_shard_size": 9000}, {"max_shard_size": 20000}, {}, {}):
        convert(folder, folder, overwrite=True, **options)
        assert_same(held(folder), arrays)
        index = {"model.safetensors.index.json"} if options else set()
        rest = {name for name in names(folder) if not name.endswith(".safetensors")}
        assert rest == {name for name in before if not name.endswith(".safetensors")} | index
        with load_weights(folder, verify=True) as weights:
            assert len(list(weights._family.open_table().read_many())) == len(arrays)
    assert names(folder) == before
    with pytest.raises(UserInputError, match="would lose bits"):
        convert(folder, folder, dtype="bfloat16", overwrite=True)
    assert_same(held(folder), arrays)
    convert(folder, tmp_path / "narrow", dtype="bfloat16")
    narrow = {name: array.astype(BF16) for name, array in arrays.items()}
    assert_same(held(tmp_path / "narrow"), narrow)
    convert(tmp_path / "narrow", tmp_path / "narrow", dtype="float32", overwrite=True)
    wide = {name: array.astype(np.float32) for name, array in narrow.items()}
    assert_same(held(tmp_path / "narrow"), wide)


def test_onto_the_same_file(wide, tmp_path):
    folder, arrays = wide
    file = tmp_path / "m.safetensors"
    convert(folder, file)
    file.chmod(0o640)
    first = file.read_bytes()
    convert(file, file, overwrite=True)
    assert file.read_bytes() == first and file.stat().st_mode & 0o777 == 0o640
    file = tmp_path / "m.gguf"
    convert(folder, file, quantize="q8_0")
    first = file.read_bytes()
    for options in ({"quantize": "q4_0"}, {"dtype": "float16"}, {"dtype": "float32"}):
        with pytest.raises(UserInputError, match="would lose bits"):
            convert(file, file, overwrite=True, **options)
    assert file.read_bytes() == first
    assert convert(file, file, overwrite=True).packed == 9
    assert names(tmp_path) == {"m.safetensors", "m.gguf", "maxjax_digests.json"}


# Names of the source, or of what holds it: the file or directory, and where it is made.
def _copies(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "link.safetensors").symlink_to(folder / "model.safetensors")
    os.link(folder / "model.safetensors", tmp_path / "hard.safetensors")
    return {
        "itself": (folder, folder),
        "its file": (folder, folder / "model.safetensors"),
        "its directory": (folder / "model.safetensors", folder),
        "a link": (folder, tmp_path / "link"),
        "of a link": (tmp_path / "link", folder),
        "a link to the file": (folder, tmp_path / "link.safetensors"),
        "a second name": (folder, tmp_path / "hard.safetensors"),
        "of a second name": (tmp_path / "hard.safetensors", folder / "model.safetensors"),
    }


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_source_is_not_replaced_by_a_lossy_copy(models, tmp_path, overwrite):
    folder = tmp_path / "m"
    convert(models("qwen2")[0], folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    for name, (source, target) in _copies(folder, tmp_path).items():
        with pytest.raises(UserInputError, match="is the checkpoint that is converted"):
            convert(source, target, dtype="bfloat16", overwrite=overwrite)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before, name


def test_a_part_of_the_source_is_not_replaced(models, tmp_path):
    folder = tmp_path / "m"
    convert(models("qwen2")[0], folder, max_shard_size=9000)
    part = sorted(folder.glob("model-*"))[0]
    with pytest.raises(UserInputError, match="of which this is one"):
        convert(folder, part, overwrite=True)


def test_a_destination_that_is_there_is_not_replaced(wide, models, tmp_path):
    folder, _ = wide
    for target, options in (("x.safetensors", {}), ("x.gguf", {}), ("x", {})):
        target = tmp_path / target
        convert(folder, target, **options)
        before = held(target) if target.suffix != ".gguf" else target.read_bytes()
        with pytest.raises(UserInputError, match=r"already.*overwrite=True"):
            convert(folder, target, dtype="bfloat16", **options)
        after = held(target) if target.suffix != ".gguf" else target.read_bytes()
        assert before == after if isinstance(before, bytes) else not assert_same(after, before)
        convert(folder, target, dtype="bfloat16", overwrite=True, **options)
    for name in ("config.json", "pytorch_model.bin", "model.safetensors.index.json"):
        target = tmp_path / name.replace(".", "-")
        target.mkdir()
        (target / name).write_bytes(b"{}")
        with pytest.raises(UserInputError, match=f"there is '{name}' already"):
            convert(folder, target)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("mine")
    convert(folder, tmp_path / "empty")
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserInputError, match="already"):
        convert(folder, tmp_path / "dangling.safetensors")


def test_steps_of_orbax_are_not_hidden_by_safetensors(small, tmp_path):
    run = tmp_path / "run"
    convert(small, run, to="orbax")
    with pytest.raises(UserInputError, match="there is an orbax checkpoint already"):
        convert(small, run)
    assert not (run / "model.safetensors").exists()
    convert(small, run, overwrite=True)
    assert (run / "model.safetensors").is_file()


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_a_file_where_a_directory_is_to_be(small, tmp_path, to):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserInputError, match="file is a file: name a directory"):
        convert(small, tmp_path / "file", to=to, overwrite=True)


def test_a_step_of_orbax_replaces_none(tmp_path):
    path, arrays = _safetensors(tmp_path)
    run = convert(path, tmp_path / "run", to="orbax")
    with pytest.raises(UserInputError, match="is the checkpoint that is converted"):
        convert(tmp_path / "run", tmp_path / "run", to="orbax", dtype="bfloat16")
    convert(path, tmp_path / "run", to="orbax", dtype="bfloat16")
    del arrays["none"]
    assert_same(held(run.path), arrays)


def test_onto_the_same_steps_of_orbax(tmp_path):
    path, arrays = _safetensors(tmp_path)
    del arrays["none"]
    for number in range(3):
        run = convert(path if not number else tmp_path / "run", tmp_path / "run", to="orbax")
        assert run.path == tmp_path / "run" / str(number)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["0", "1", "2"]
    assert_same(held(run.path), arrays)


# --- a model that is used ------------------------------------------------------------------------

TEXTS = ["A cat sits on the mat.", "Where is the nearest station?", "ein Satz mit Ümläuten"]


@pytest.mark.extra
def test_minilm_embeds_the_same_in_every_format(minilm, tmp_path):
    def embedded(path):
        model, tokenizer = maxjax.load(path)
        return maxjax.embed(model, tokenizer, TEXTS)

    expected = embedded(minilm)
    steps = [
        (tmp_path / "several", {"max_shard_size": "30MB"}), (tmp_path / "m.gguf", {}),
        (tmp_path / "run", {"to": "orbax"}), (tmp_path / "again.gguf", {}),
    ]  # fmt: skip
    source = minilm
    for path, options in steps:
        convert(source, path, **options)
        np.testing.assert_array_equal(embedded(path), expected, err_msg=str(path))
        source = path  # each of the one before
    (first, tensors), (second, again) = map(
        gguf_files.read, (tmp_path / "m.gguf", tmp_path / "again.gguf")
    )
    assert_same(again, tensors)
    assert first.pop("general.name") == "several" and second.pop("general.name")
    assert first == second
    convert(minilm, tmp_path / "q8.gguf", quantize="q8_0")
    assert (embedded(tmp_path / "q8.gguf") * expected).sum(-1).min() > 0.999


# --- memory --------------------------------------------------------------------------------------

MEMORY = """
import json, re, sys
from pathlib import Path
from maxjax.checkpoint import convert
import maxjax.storage.blocks, maxjax.checkpoint.file_set
# Of this program alone: getrusage() counts what the process was before it began too.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
small, source, target, options = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
convert(small, target, **options)  # what is imported and set up on the way
start = peak()
convert(source, target, overwrite=True, **options)
print(peak() - start)
"""


@pytest.mark.extra
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("o.safetensors", {}), ("o.gguf", {}), ("out", {"max_shard_size": "150MB"}),
        ("o.safetensors", {"dtype": "f16"}), ("o.gguf", {"quantize": "q4_k"}), ("o.gguf", {"quantize": "q8_0"}),
    ],
)  # fmt: skip
def test_memory_of_400_megabytes(target, options, wide, tmp_path):
    """In a process of its own, after a small one of the same kind: at most 200 MB more."""
    config = json.loads((wide[0] / "config.json").read_text())
    rng = np.random.default_rng(0)
    arrays = dict(wide[1])
    rows = 200_000  # two tensors of 205 MB
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        arrays[name] = rng.standard_normal((rows, 256), dtype=np.float32)
    folder = tmp_path / "large"
    folder.mkdir()
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    command = [
        sys.executable,
        "-c",
        MEMORY,
        wide[0],
        folder,
        tmp_path / target,
        json.dumps(options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200e6


def test_tensors_that_a_family_ignores_are_left_out_of_a_gguf_file(tmp_path, caplog):
    """As GPT-NeoX's masks, and layers of multi-token prediction: the model is loaded without them too."""
    from maxjax.models import GPTNeoX

    config = GPTNeoX.family.config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = maxjax.init(GPTNeoX(config), jax.random.key(0))
    maxjax.save_pretrained(model, tmp_path / "hf", config=NEOX)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    ignored = {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), np.uint8),
               "gpt_neox.layers.0.attention.masked_bias": np.float32([-1e9])}  # fmt: skip
    safetensors.numpy.save_file({**tensors, **ignored}, file, {"format": "pt"})
    convert(tmp_path / "hf", tmp_path / "m.gguf")
    assert "left out" in caplog.text and "masked_bias" in caplog.text
    again, _ = maxjax.load(tmp_path / "m.gguf")
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], value, err_msg=name)


NEOX = {
    "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
