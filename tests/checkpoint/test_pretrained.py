"""save_pretrained: a directory that transformers opens, in the place of whatever was there."""

import errno
import fcntl
import json
import os
import threading
import warnings
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType

import maxjax
from maxjax import nn
from maxjax.checkpoint import file_set as writing
from maxjax.errors import (
    CheckpointBusyError,
    CheckpointCorruptError,
    CheckpointSaveError,
    UserInputError,
)
from maxjax.graph import DeviceRef, Weight
from maxjax.graph.quantization import QuantizationEncoding
from maxjax.models.pooling import Pooling
from maxjax.storage.save import staging
from tests.models.test_bert import from_torch, inputs, pair, same
from tests.nn.test_device_major import Net, initialized, placed
from tests.oracles.models import ask_of, opened
from tests.oracles.recorded import recorded, transformers

CPU = DeviceRef.CPU()
SINGLE, INDEX, DIGESTS = "model.safetensors", "model.safetensors.index.json", "maxjax_digests.json"
# Of a Net: about a third of its bytes.
PARTS = 4000


def layers(k, count=4):
    """A small model all of whose values are k."""
    model = nn.Sequential([nn.Linear(8, 8, "float32", CPU) for _ in range(count)])
    model.load_state_dict({f"{i}.weight": np.full((8, 8), k, np.float32) for i in range(count)})
    return model


def loaded(directory):
    with maxjax.load_weights(directory, verify=True) as weights:
        return {name: np.asarray(place.data().data) for name, place in weights.items()}


def value(directory):
    """Which of the models above is there, all of it."""
    found = {float(v) for array in loaded(directory).values() for v in np.unique(array)}
    assert len(found) == 1
    return found.pop()


def names(directory):
    """Every file below a directory."""
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        np.testing.assert_array_equal(found[name].view(np.uint8), np.asarray(array).view(np.uint8))


def check_digests(directory):
    """That the record lists exactly the files of weights, with zlib's sums of their tensors."""
    recorded = json.loads((directory / DIGESTS).read_text())["files"]
    weights = (".safetensors", ".safetensors.index.json")
    assert sorted(recorded) == [n for n in names(directory) if n.endswith(weights)]
    if records := recorded.pop(INDEX, None):
        data = (directory / INDEX).read_bytes()
        header = [len(data), f"{zlib.crc32(data):08x}"]
        assert records == [{"size": len(data), "header": header, "tensors": {}}]
    for name, records in recorded.items():
        arrays = safetensors.numpy.load_file(directory / name)
        sums = {key: f"{zlib.crc32(array.tobytes()):08x}" for key, array in arrays.items()}
        data = (directory / name).read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        header = [length, f"{zlib.crc32(data[:length]):08x}"]
        assert records == [{"size": len(data), "header": header, "tensors": sums}]


# -- transformers


@pytest.mark.parametrize("limit", ["5GB", 20_000])
def test_transformers_opens_it(tmp_path, limit):
    oracle, model = pair(tmp_path / "theirs")
    maxjax.save_pretrained(model, tmp_path / "ours", max_shard_size=limit)

    def again():
        found, info = opened("AutoModel", tmp_path / "ours", output_loading_info=True)
        state = {name: zlib.crc32(value.numpy()) for name, value in found.state_dict().items()}
        return [[*info["missing_keys"], *info["unexpected_keys"]], state]

    wrong, sums = ask_of(tmp_path / "ours", "info and checksums", again)
    assert not wrong
    assert sums == {name: zlib.crc32(oracle.tensors[name]) for name in oracle.shapes}
    ids, mask, types = inputs(2, 7)
    wanted = from_torch(oracle, ids, mask, types).last_hidden_state
    reloaded, _ = maxjax.load(tmp_path / "ours")
    found = jax.jit(lambda model, *rows: model(*rows)[0])(reloaded, ids, mask, types)
    same(np.asarray(found), wanted)


def test_files_are_those_that_transformers_writes(tmp_path):
    oracle, model = pair(tmp_path / "theirs")

    def in_parts(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(tmp_path / "theirs")
            model.save_pretrained(tmp_path / "theirs in parts", max_shard_size=20_000)
        whole = (tmp_path / "theirs" / SINGLE).read_bytes()
        config = (tmp_path / "theirs" / "config.json").read_text()
        index = (tmp_path / "theirs in parts" / INDEX).read_text()
        return [zlib.crc32(whole), config, index, names(tmp_path / "theirs in parts")]

    whole, wanted, index, files = oracle.ask("files in one and in parts", in_parts)
    maxjax.save_pretrained(model, tmp_path / "ours")
    maxjax.save_pretrained(model, tmp_path / "ours in parts", max_shard_size=20_000)
    assert zlib.crc32((tmp_path / "ours" / SINGLE).read_bytes()) == whole
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config == json.loads(wanted)
    assert config["architectures"] == ["BertModel"] and config["dtype"] == "float32"
    # transformers puts tensors into files in the order of its modules; which is ours as well.
    ours, theirs = json.loads((tmp_path / "ours in parts" / INDEX).read_text()), json.loads(index)
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert names(tmp_path / "ours in parts") == sorted([*files, DIGESTS])


# -- what was there


def some_files(directory):
    for name in ("README.md", "notes.safetensors.txt", "vocab.txt", "sub/model.safetensors"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    (directory / "adapter_model.safetensors").write_bytes(
        safetensors.numpy.save({"lora": np.zeros(3, np.float32)})
    )


FOREIGN = [
    "README.md", "adapter_model.safetensors", "notes.safetensors.txt", "sub/model.safetensors",
    "vocab.txt",
]  # fmt: skip
HOW = {"one": "5GB", "parts": 300, "parts of the same names": 300, "more parts": 256}


@pytest.mark.parametrize("new", ["one", "parts", "more parts"])
@pytest.mark.parametrize("old", [None, *HOW, "one and a set", "a broken set"])
def test_every_change(tmp_path, old, new):
    some_files(tmp_path)
    stays = []
    if old == "one and a set":
        maxjax.save_pretrained(layers(8), tmp_path, max_shard_size=300)
        (tmp_path / SINGLE).write_bytes(safetensors.numpy.save({"w": np.full(3, 9, np.float32)}))
    elif old == "a broken set":
        maxjax.save_pretrained(layers(8), tmp_path, max_shard_size=300)
        stays = sorted(n for n in names(tmp_path) if n.startswith("model-") and "4-of" not in n)
        (tmp_path / "model-00004-of-00004.safetensors").unlink()
    elif old is not None:
        maxjax.save_pretrained(layers(8), tmp_path, max_shard_size=HOW[old])
        assert value(tmp_path) == 8
    maxjax.save_pretrained(layers(9), tmp_path, max_shard_size=HOW[new])
    assert value(tmp_path) == 9
    if new == "one":
        weights = [SINGLE]
    else:
        index = json.loads((tmp_path / INDEX).read_text())
        weights = [INDEX, *{*index["weight_map"].values()}]
        assert index["metadata"] == {"total_parameters": 256, "total_size": 1024}
    if old == "a broken set":  # what cannot be told is left, if the new one has other names
        assert {*weights, *FOREIGN, DIGESTS} <= {*names(tmp_path)}
        assert {*names(tmp_path)} <= {*weights, *FOREIGN, DIGESTS, *stays}
    else:
        assert names(tmp_path) == sorted([*weights, *FOREIGN, DIGESTS])
        recorded = json.loads((tmp_path / DIGESTS).read_text())["files"]
        assert sorted(recorded) == sorted(weights)
    for name in FOREIGN[:1] + FOREIGN[2:]:
        assert (tmp_path / name).read_text() == name


def test_parts_in_a_directory_below(tmp_path):
    """They are another's, and so is a file of that name beside the index."""
    maxjax.save_pretrained(layers(1), tmp_path, max_shard_size=300)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / "sub").mkdir()
    for name in {*index["weight_map"].values()}:
        os.rename(tmp_path / name, tmp_path / "sub" / name)
    index["weight_map"] = {key: f"sub/{name}" for key, name in index["weight_map"].items()}
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00004.safetensors").write_text("another's")
    below = names(tmp_path / "sub")
    maxjax.save_pretrained(layers(2), tmp_path)
    assert value(tmp_path) == 2 and names(tmp_path / "sub") == below
    assert (tmp_path / "model-00001-of-00004.safetensors").read_text() == "another's"


def test_the_same_again_and_again(tmp_path):
    for k in range(1, 6):
        maxjax.save_pretrained(layers(k), tmp_path, max_shard_size=300)
        assert value(tmp_path) == k and len(names(tmp_path)) == 6
        check_digests(tmp_path)
    for k in range(6, 9):
        maxjax.save_pretrained(layers(k), tmp_path)
        assert value(tmp_path) == k and names(tmp_path) == [DIGESTS, SINGLE]
        check_digests(tmp_path)


def test_parts_of_an_interrupted_save_are_removed(tmp_path, monkeypatch):
    """They have their names, but no index names them."""
    maxjax.save_pretrained(layers(1), tmp_path)
    maxjax.save_pretrained(layers(2), tmp_path / "other", max_shard_size=300)
    parts = [n for n in names(tmp_path / "other") if n.startswith("model-")]
    for name in parts:
        os.rename(tmp_path / "other" / name, tmp_path / name)
    ours = json.loads((tmp_path / DIGESTS).read_text())
    ours["files"].update(json.loads((tmp_path / "other" / DIGESTS).read_text())["files"])
    (tmp_path / DIGESTS).write_text(json.dumps(ours))
    (tmp_path / "model-00009-of-00009.safetensors").write_text("not of ours")
    with open(tmp_path / parts[0], "ab") as file:
        file.write(b"of another size: it is not what was recorded")
    assert value(tmp_path) == 1
    maxjax.save_pretrained(layers(3), tmp_path)
    assert value(tmp_path) == 3
    found = [n for n in names(tmp_path) if not n.startswith("other")]
    assert found == sorted([DIGESTS, SINGLE, parts[0], "model-00009-of-00009.safetensors"])


def test_what_an_interrupted_save_recorded_is_sorted_out(tmp_path):
    maxjax.save_pretrained(layers(1), tmp_path)
    before = json.loads((tmp_path / DIGESTS).read_text())
    wrong = {"size": (tmp_path / SINGLE).stat().st_size, "tensors": {"0.weight": "00000000"}}
    before["files"][SINGLE].append(wrong)
    (tmp_path / DIGESTS).write_text(json.dumps(before))
    assert value(tmp_path) == 1  # it agrees with one of them
    seen = []
    real = writing.to_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "to_bytes", lambda files: (seen.append(dict(files)), real(files))[1])
        maxjax.save_pretrained(layers(2), tmp_path)
    assert [len(files[SINGLE]) for files in seen] == [2, 1]  # not three
    check_digests(tmp_path)


def test_a_record_that_cannot_be_read_is_replaced(tmp_path):
    (tmp_path / DIGESTS).write_text("{")
    maxjax.save_pretrained(layers(1), tmp_path)
    check_digests(tmp_path)


def test_records_of_other_files_stay(tmp_path):
    other = {"size": 3, "tensors": {"w": "01234567"}}
    text = {"version": 1, "algorithm": "crc32", "files": {"other.gguf": [other]}}
    (tmp_path / DIGESTS).write_text(json.dumps(text))
    for limit in ("5GB", 300):
        maxjax.save_pretrained(layers(1), tmp_path, max_shard_size=limit)
        assert json.loads((tmp_path / DIGESTS).read_text())["files"]["other.gguf"] == [other]


def test_links_of_a_cache_are_replaced_and_blobs_stay(tmp_path):
    maxjax.save_pretrained(layers(1), tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / SINGLE).symlink_to(f"../blobs/{SINGLE}")
    maxjax.save_pretrained(layers(2), tmp_path / "snapshot")
    assert value(tmp_path / "snapshot") == 2 and value(tmp_path / "blobs") == 1


def test_a_pipe_with_the_name_of_a_file(tmp_path):
    """Opening it for reading waits for a writer, for ever."""
    os.mkfifo(tmp_path / "config.json")
    config = {"model_type": "mine"}
    save = lambda: maxjax.save_pretrained(layers(1), tmp_path, config=config)
    saving = threading.Thread(target=save, daemon=True)
    saving.start()
    saving.join(20)
    assert not saving.is_alive()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mine"


def test_saving_to_where_it_is_read_from(tmp_path):
    maxjax.save_pretrained(layers(5), tmp_path)
    with maxjax.load_weights(tmp_path) as weights:
        model = nn.Sequential([nn.Linear(8, 8, "float32", CPU) for _ in range(4)])
        model.load_state_dict(weights)
        maxjax.save_pretrained(model, tmp_path, max_shard_size=300)
        maxjax.save_pretrained(model, tmp_path)
    assert value(tmp_path) == 5


# -- what is written


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_another_type(tmp_path, dtype):
    model = initialized()
    maxjax.save_pretrained(model, tmp_path, dtype=dtype, config={"torch_dtype": "float32"})
    to = np.dtype(getattr(ml_dtypes, dtype, dtype))
    equal(loaded(tmp_path), {k: np.asarray(v).astype(to) for k, v in model.state_dict().items()})
    assert json.loads((tmp_path / "config.json").read_text()) == {"torch_dtype": dtype}


def test_integers_keep_their_type(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = Weight("steps", "int32", (3,), CPU)
            self.weight = Weight("weight", "float32", (3,), CPU)

        def __call__(self, x):
            return x * self.weight

    model = Counts()
    model.load_state_dict({"steps": np.arange(3, dtype=np.int32), "weight": np.ones(3, np.float32)})
    maxjax.save_pretrained(model, tmp_path, dtype="bfloat16")
    found = loaded(tmp_path)
    assert found["steps"].dtype == np.int32 and found["weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "no type", 7])
def test_what_is_no_type(tmp_path, dtype):
    with pytest.raises(UserInputError, match="dtype"):
        maxjax.save_pretrained(layers(1), tmp_path / "new", dtype=dtype)
    assert not (tmp_path / "new").exists()


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Weight(
            "weight", "uint8", (8, 2 * 144), CPU, quantization_encoding=QuantizationEncoding.Q4_K
        )

    def __call__(self, x):
        return x @ self.weight.T


def test_packed_blocks(tmp_path):
    raw = np.random.default_rng(0).integers(0, 256, (8, 288)).astype(np.uint8)
    raw[:, [0, 1, 2, 3, 144, 145, 146, 147]] = np.float16([0.01, 0.02]).view(np.uint8).repeat(2)
    model = Packed()
    model.load_state_dict({"weight": raw})
    maxjax.save_pretrained(model, tmp_path / "packed")
    with maxjax.load_weights(tmp_path / "packed", verify=True) as weights:
        data = weights.weight.data()
        assert data.quantization_encoding is QuantizationEncoding.Q4_K
        again = Packed()
        again.load_state_dict(weights)
        np.testing.assert_array_equal(np.asarray(again.state_dict()["weight"]), raw)
        decoded = np.asarray(data.astype("float32").data)
    maxjax.save_pretrained(model, tmp_path / "wide", dtype="float32")
    equal(loaded(tmp_path / "wide"), {"weight": decoded})


def test_a_model_in_user_code_has_no_configuration(tmp_path):
    maxjax.save_pretrained(layers(1), tmp_path / "a")
    assert names(tmp_path / "a") == [DIGESTS, SINGLE]
    maxjax.save_pretrained(layers(1), tmp_path / "b", config={"width": 8, "name": "ß"})
    text = (tmp_path / "b" / "config.json").read_text()
    assert json.loads(text) == {"width": 8, "name": "ß", "dtype": "float32"} and "ß" in text


def test_tokenizer_and_pooling(tmp_path, minilm):
    model, tokenizer = maxjax.load(minilm)
    model.pooling = Pooling(normalize=True)
    maxjax.save_pretrained(model, tmp_path, tokenizer=tokenizer)
    again, tokens = maxjax.load(tmp_path)
    assert again.pooling == model.pooling
    texts = ["A cat sat on the mat.", "Ein Fluß"]
    np.testing.assert_array_equal(
        maxjax.embed(again, tokens, texts), maxjax.embed(model, tokenizer, texts)
    )
    read = transformers.AutoTokenizer.from_pretrained
    for name, text in tokens.files().items():
        assert json.loads((tmp_path / name).read_text()) == json.loads(text)
    ids = tokenizer.encode(texts[0])
    again = lambda: read(tmp_path)(texts)["input_ids"]
    wanted = recorded(lambda: read(minilm)(texts)["input_ids"])
    assert ask_of(tmp_path, "tokens of two texts", again) == wanted and wanted[0] == ids


def test_a_model_without_values(tmp_path):
    with pytest.raises(ValueError, match="has no value"):
        maxjax.save_pretrained(Net(False), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_progress_is_told_of_every_byte(tmp_path):
    told = []
    maxjax.save_pretrained(layers(1), tmp_path, max_shard_size=300, progress=told.append)
    parts = [p for p in tmp_path.iterdir() if p.suffix == ".safetensors"]
    assert sum(told) == sum(p.stat().st_size for p in parts)


@pytest.mark.parametrize("size", ["1 parsec", 0])
def test_what_is_no_size(tmp_path, size):
    with pytest.raises(UserInputError, match="is not a size"):
        maxjax.save_pretrained(layers(1), tmp_path / "new", max_shard_size=size)
    assert not (tmp_path / "new").exists()


# -- meshes

MESHES = [
    {"fsdp": 2, "model": 2, "data": 2}, {"fsdp": 8}, {"model": 4}, {"model": 1}, {"model": 2},
    {"model": 8}, {"fsdp": 2},
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_bytes_are_the_same_from_every_mesh(tmp_path, sizes, stacked, kind):
    model = placed(stacked, **sizes, kind=kind)
    for limit, name in (("5GB", "whole"), (PARTS, "parts")):
        maxjax.save_pretrained(initialized(), tmp_path / name, max_shard_size=limit)
        maxjax.save_pretrained(model, tmp_path / f"{name} of many", max_shard_size=limit)
        wanted, found = (
            {n: (folder / n).read_bytes() for n in names(folder)}
            for folder in (tmp_path / name, tmp_path / f"{name} of many")
        )
        assert found == wanted
    equal(loaded(tmp_path / "parts"), {k: np.asarray(v) for k, v in model.state_dict().items()})
    again = Net(not stacked).to(maxjax.make_mesh(fsdp=2, model=2))
    with maxjax.load_weights(tmp_path / "parts of many", verify=True) as weights:
        again.load_state_dict(weights)
    equal({k: np.asarray(v) for k, v in again.state_dict().items()}, loaded(tmp_path / "whole"))


# -- what goes wrong


def test_another_writer(tmp_path, monkeypatch):
    maxjax.save_pretrained(layers(1), tmp_path)
    monkeypatch.setattr(staging, "_WAIT_SECONDS", 0.1)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(CheckpointBusyError, match="another process is writing"):
            maxjax.save_pretrained(layers(2), tmp_path)
    finally:
        os.close(fd)
    assert value(tmp_path) == 1
    maxjax.save_pretrained(layers(2), tmp_path)
    assert value(tmp_path) == 2


def test_no_space(tmp_path, monkeypatch):
    maxjax.save_pretrained(layers(1), tmp_path)
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(
            os,
            "statvfs",
            lambda path: type(
                "Free", (), {"f_bavail": 1, "f_blocks": 9, "f_frsize": 512, "f_files": 0}
            ),
        )
        with pytest.raises(CheckpointSaveError, match="1,024 bytes are needed, 512") as caught:
            maxjax.save_pretrained(layers(2), tmp_path)
    assert caught.value.errno == errno.ENOSPC and f"untouched: {tmp_path}" in str(caught.value)
    assert value(tmp_path) == 1 and names(tmp_path) == before


def test_the_old_single_file_that_cannot_be_put_away(tmp_path, monkeypatch):
    """It would be read in the place of the set: then the save has failed."""
    maxjax.save_pretrained(layers(1), tmp_path)
    before = names(tmp_path)
    real = os.rename

    def rename(start, end):
        if os.path.basename(start) == SINGLE and ".old-" in end:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(start, end)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(CheckpointSaveError, match="EIO"):
            maxjax.save_pretrained(layers(2), tmp_path, max_shard_size=300)
    assert value(tmp_path) == 1 and names(tmp_path) == before
    maxjax.save_pretrained(layers(2), tmp_path, max_shard_size=300)
    assert value(tmp_path) == 2


@pytest.mark.parametrize("limit", ["5GB", 300])
def test_a_flipped_bit_is_found(tmp_path, limit):
    maxjax.save_pretrained(layers(1), tmp_path, max_shard_size=limit)
    with maxjax.load_weights(tmp_path) as weights:
        table = weights._family.open_table()
        places = {n: (table.files[e.file].path, e.offset) for n, e in table.entries.items()}
    for name, (path, offset) in places.items():
        with open(path, "r+b") as file:
            file.seek(offset + 5)
            byte = file.read(1)[0]
            file.seek(offset + 5)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(CheckpointCorruptError, match=f"'{name}'"):
            loaded(tmp_path)
        with open(path, "r+b") as file:
            file.seek(offset + 5)
            file.write(bytes([byte]))
    assert value(tmp_path) == 1


def test_an_interrupt_in_the_middle(tmp_path):
    maxjax.save_pretrained(layers(1), tmp_path)
    before = names(tmp_path)

    def interrupt(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        maxjax.save_pretrained(layers(2), tmp_path, progress=interrupt)
    assert value(tmp_path) == 1 and names(tmp_path) == before
    maxjax.save_pretrained(layers(3), tmp_path)
    assert value(tmp_path) == 3
    assert jax.devices()  # nothing of JAX was hurt


def test_over_the_files_that_a_model_is_still_to_read(tmp_path):
    """Weights that were not read yet are read of the old files, whole, before these are replaced."""
    values = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    safetensors.numpy.save_file({"weight": values}, tmp_path / "model.safetensors")
    weights = maxjax.load_weights(tmp_path)
    layer = maxjax.nn.Linear(6, 8, "float32", DeviceRef.CPU())
    layer.weight = weights.weight.allocate()
    maxjax.save_pretrained(layer, tmp_path)
    np.testing.assert_array_equal(
        safetensors.numpy.load_file(tmp_path / "model.safetensors")["weight"], values
    )
    np.testing.assert_array_equal(layer.state_dict()["weight"], values)
