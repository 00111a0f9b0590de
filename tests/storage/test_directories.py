"""Directories as they are found: downloads, caches, training runs, several formats at once."""

import json
import logging
import os

import gguf
import numpy as np
import pytest

from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    CheckpointMissingError,
    CheckpointUnsafeError,
)
from maxjax.storage import open_checkpoint
from maxjax.storage.directory import choose
from tests.storage.corpus import file_bytes, floats, spec
from tests.storage.pytorch import corpus as pytorch_corpus
from tests.storage.watch import watched

INDEX, PYTORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
GOOD, OTHER = 1.0, 9.0  # what the file that is meant holds, and what all the others do


def content(*names: str, start: float = GOOD) -> bytes:
    """A safetensors file of tensors, four floats each."""
    header = {name: spec("F32", [4], 16 * i, 16 * i + 16) for i, name in enumerate(names)}
    return file_bytes(header, floats(4 * len(names), start))


def put(directory, name, value=GOOD, tensors=("w",)):
    """A file of weights in the format that its name says."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".json"):
        path.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, value)}))
        return path
    values = {tensor: np.full(4, value, np.float32) for tensor in tensors}
    if name.endswith(".safetensors"):
        path.write_bytes(content(*tensors, start=value))
    elif name.endswith(".gguf"):
        write_gguf(path, values)
    elif name.endswith(".npz"):
        np.savez(path, **values)
    else:
        path.write_bytes(pytorch_corpus.saved(values))
    return path


def write_gguf(path, values, **split):
    writer = gguf.GGUFWriter(path, "llama")
    for key, number in split.items():
        (writer.add_int32 if key == "tensors_count" else writer.add_uint16)(
            f"split.{key.replace('_', '.')}", number
        )
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(path, name="w"):
    with open_checkpoint(path) as table:
        return float(table.read(name)[0])


def refused(path, error):
    """The error of an opening, which leaves no file open and does nothing else."""
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with watched() as acts, pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert type(caught.value) is error, caught.value
    assert not acts and "\n" not in str(caught.value)
    assert before is None or set(os.listdir("/proc/self/fd")) <= before
    return caught.value


# --- which one is meant -----------------------------------------------------------------------

MEANT = {
    # Name of the case: what is meant, and what lies beside it.
    "consolidated": ("model.safetensors", ["consolidated.safetensors", "consolidated.00.pth"]),
    "consolidated_of_meta": ("pytorch_model.bin", ["consolidated.00.pth", "consolidated.01.pth"]),
    "consolidated_before_bin": ("pytorch_model.bin", ["consolidated.safetensors"]),
    "consolidated_before_gguf": ("m.gguf", ["consolidated.00.pth", "consolidated.safetensors"]),
    "consolidated_alone": ("consolidated.00.pth", []),
    "folders": ("model.safetensors", ["original/consolidated.00.pth", "onnx/model.safetensors"]),
    "bin": ("model.safetensors", ["pytorch_model.bin"]),
    "bin_and_other_name": ("other.safetensors", ["pytorch_model.bin"]),
    "bin_among_others": ("pytorch_model.bin", ["other.bin"]),
    "pt": ("pytorch_model.bin", ["model.pt", "model.pth", "model.ckpt", "a.npz", "a.npy"]),
    "training": ("model.safetensors", ["training_args.bin", "optimizer.pt", "scheduler.pt"]),
    "training_bin": ("m.bin", ["training_args.bin", "optimizer.bin", "optimizer_1.bin"]),
    "training_more": ("m.bin", ["scheduler.bin", "scaler.pt", "rng_state_0.pth", "rng_state.pth"]),
    "training_pt": ("m.pt", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"]),
    "training_safetensors": ("m.safetensors", ["optimizer.safetensors"]),
    "named_as_training": ("optimizers.safetensors", ["optimizer.safetensors"]),
    "adapter": ("model.safetensors", ["adapter_model.safetensors"]),
    "adapter_bin": ("m.bin", ["adapter_model.bin", "adapter_config.json"]),
    "adapters_of_mlx": ("m.safetensors", ["adapters.safetensors", "0000100_adapters.safetensors"]),
    "adapter_index": ("m.safetensors", ["adapter_model.safetensors.index.json"]),
    "lora_of_diffusers": ("unet.safetensors", ["pytorch_lora_weights.safetensors"]),
    "variant": ("model.safetensors", ["model.fp16.safetensors"]),
    "variant_of_diffusers": (
        "diffusion_pytorch_model.safetensors",
        ["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.non_ema.safetensors"],
    ),
    "variant_alone": ("unet.fp16.safetensors", []),
    "one_gguf": ("llama-7b.Q4_K_M.gguf", ["imatrix.gguf"]),
    "projector": ("gemma.gguf", ["mmproj-gemma-f16.gguf", "gemma-mmproj-F16.gguf"]),
    "npz": ("weights.npz", ["a.npy"]),
    "ckpt": ("last.ckpt", ["a.npz"]),
    "hidden": ("model.safetensors", ["._model.safetensors", ".cache/model.safetensors"]),
}


@pytest.mark.parametrize("name", MEANT)
def test_the_one_that_is_meant(name, tmp_path):
    meant, others = MEANT[name]
    for other in others:
        put(tmp_path, other, OTHER)
    put(tmp_path, meant)
    with watched() as acts, open_checkpoint(tmp_path) as table:
        assert [os.path.basename(file.path) for file in table.files] == [meant]
        assert table.read("w").tolist()[0] == GOOD
    assert not [act for act in acts if not act.startswith("import")]  # a reader, the first time


@pytest.mark.parametrize("kind", ["h5", "msgpack", "onnx", "pkl", "safetensors.incomplete"])
def test_formats_that_are_not_read_do_no_harm(kind, tmp_path):
    (tmp_path / f"another.{kind}").write_bytes(b"\0" * 50)
    put(tmp_path, "model.safetensors")
    assert read(tmp_path) == GOOD


@pytest.mark.parametrize("name", ["unet.final.safetensors", "unet.0.safetensors", "a.ema.bin"])
def test_a_dot_in_a_name_is_no_variant(name, tmp_path):
    end = os.path.splitext(name)[1]
    put(tmp_path, f"unet{end}", tensors=("a",))
    put(tmp_path, name, tensors=("b",))
    with open_checkpoint(tmp_path) as table:
        assert sorted(table.entries) == ["a", "b"]


# --- what is said -----------------------------------------------------------------------------


def test_what_is_left_out_is_said_once_for_a_directory(tmp_path, caplog):
    for name in ("one", "two"):
        put(tmp_path / name, "model.safetensors")
        put(tmp_path / name, "pytorch_model.bin", OTHER)
        put(tmp_path / name, "optimizer.pt", OTHER)
    with caplog.at_level(logging.INFO, "maxjax"):
        for _ in range(3):
            assert read(tmp_path / "one") == read(tmp_path / "two") == GOOD
    said = f"{tmp_path}/{{}}: reading model.safetensors; not pytorch_model.bin"
    assert caplog.messages == [said.format("one"), said.format("two")]


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "config.json", "optimizer.pt", "tf_model.h5"),
        (INDEX, "one.safetensors", "two.safetensors"),
        ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"),
        ("a.safetensors", "b.safetensors"),
    ],
)
def test_nothing_is_said_when_nothing_is_left_out(names, tmp_path, caplog):
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with caplog.at_level(logging.INFO, "maxjax"), pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
    assert not caplog.messages


# --- the cache of Hugging Face ----------------------------------------------------------------


def cached(root, files):
    """`files` (name → bytes) as the cache keeps them; gives the snapshot."""
    blobs, snapshot = root / "models--a--b" / "blobs", root / "models--a--b/snapshots/0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (root / "models--a--b" / "refs").mkdir()
    (root / "models--a--b" / "refs" / "main").write_text("0123abcd")
    for number, (name, data) in enumerate(files.items()):
        (blobs / f"{number:064x}").write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_a_snapshot_of_links(tmp_path):
    snapshot = cached(tmp_path, {"model.safetensors": content("w"), "config.json": b"{}"})
    assert read(snapshot) == read(snapshot / "model.safetensors") == GOOD
    assert read(snapshot / os.readlink(snapshot / "model.safetensors")) == GOOD  # the blob itself


def test_a_sharded_snapshot_of_links(tmp_path, monkeypatch):
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    files: dict[str, bytes] = {shard: content(name) for name, shard in shards.items()}
    snapshot = cached(tmp_path, {**files, INDEX: json.dumps({"weight_map": shards}).encode()})
    assert (snapshot / INDEX).is_symlink()
    for path in (snapshot, snapshot / INDEX):
        with open_checkpoint(path) as table:
            assert list(table.entries) == ["a", "b"] and table.read("b")[0] == GOOD
    monkeypatch.chdir(snapshot)
    assert read(".", "b") == read(INDEX, "b") == GOOD
    (snapshot / INDEX).unlink()
    assert read(snapshot, "b") == GOOD


def test_a_link_to_a_directory_of_weights(tmp_path):
    put(tmp_path / "real", "model.safetensors")
    (tmp_path / "link").symlink_to("real")
    assert read(tmp_path / "link") == GOOD


def test_a_link_whose_blob_is_gone(tmp_path):
    snapshot = cached(tmp_path, {"model.safetensors": content("w")})
    (tmp_path / "models--a--b" / "blobs" / f"{0:064x}").unlink()
    error = refused(snapshot, CheckpointMissingError)
    assert error.path == str(snapshot / "model.safetensors")


def test_the_directory_of_the_cache_names_its_snapshots(tmp_path):
    snapshot = cached(tmp_path, {"model.safetensors": content("w")})
    error = refused(tmp_path / "models--a--b", CheckpointMissingError)
    assert error.hint == "Name one of its directories: snapshots/0123abcd."
    assert error.found == "blobs/, refs/, snapshots/"
    assert read(os.path.join(error.path, "snapshots/0123abcd")) == read(snapshot)


# --- sets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["../x.safetensors", "/etc/x.safetensors", "s/../../x.safetensors"])  # fmt: skip
@pytest.mark.parametrize("index", [INDEX, PYTORCH_INDEX])
def test_an_index_that_leads_out_of_the_directory(index, target, tmp_path):
    put(tmp_path, "x.safetensors")
    put(tmp_path, "x.bin")
    target = target if index == INDEX else target.replace(".safetensors", ".bin")
    put(tmp_path / "model", index, target)
    error = refused(tmp_path / "model", CheckpointUnsafeError)
    assert error.tensor == "w" and target in str(error)


def test_a_pytorch_index_with_its_files(tmp_path):
    shards = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for value, (name, shard) in enumerate(shards.items()):
        put(tmp_path, shard, value + 1.0, (name,))
    put(tmp_path, "training_args.bin", OTHER)
    (tmp_path / PYTORCH_INDEX).write_text(json.dumps({"weight_map": shards}))
    for path in (tmp_path, tmp_path / PYTORCH_INDEX):
        with open_checkpoint(path) as table:
            assert table.format == "pytorch" and list(table.entries) == ["a", "b"]
            assert [float(table.read(name)[0]) for name in "ab"] == [1.0, 2.0]
    os.rename(tmp_path / shards["b"], tmp_path / f"{shards['b']}.incomplete")
    error = refused(tmp_path, CheckpointMissingError)
    assert "download is not complete" in str(error) and "1 of the 2 tensors" in str(error)


@pytest.mark.parametrize("stem", ["pytorch_model.bin", "model.safetensors"])
def test_an_index_of_a_variant(stem, tmp_path):
    base, end = os.path.splitext(stem)
    for number, name in enumerate("ab", 1):
        put(tmp_path, f"{base}.fp16-0000{number}-of-00002{end}", float(number), (name,))
    files = {name: f"{base}.fp16-0000{n}-of-00002{end}" for n, name in enumerate("ab", 1)}
    index = tmp_path / f"{stem}.index.fp16.json"
    index.write_text(json.dumps({"weight_map": files}))
    for path in (tmp_path, index):
        with open_checkpoint(path) as table:
            assert list(table.entries) == ["a", "b"]
    (tmp_path / f"{stem}.index.json").write_text(json.dumps({"weight_map": {"a": files["a"]}}))
    with open_checkpoint(tmp_path) as table:  # the plain one goes before it
        assert list(table.entries) == ["a"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_beside_the_weights(name, tmp_path):
    put(tmp_path, "model.safetensors", tensors=("a",))
    (tmp_path / name).write_text('{"model": {}}')
    error = refused(tmp_path / name, CheckpointFormatError)
    assert f"this is {name}" in str(error) and "Pass its folder" in str(error)


def test_tied_tensors_in_two_files_of_a_set(tmp_path):
    """As written by tools that do not drop the duplicate; both are there, and equal."""
    put(tmp_path, "model-00001-of-00002.safetensors", tensors=("embed.weight",))
    put(tmp_path, "model-00002-of-00002.safetensors", tensors=("lm_head.weight",))
    with open_checkpoint(tmp_path) as table:
        np.testing.assert_array_equal(table.read("embed.weight"), table.read("lm_head.weight"))


def test_the_size_of_tied_tensors_may_be_counted_once(tmp_path, caplog):
    shared = pytorch_corpus.tensor((4,), (1,), numel=4)
    state = pytorch_corpus.dict_of(a=shared, b=shared, c=pytorch_corpus.B)
    data = {"data/0": floats(4), "data/1": floats(2)}
    (tmp_path / "m.bin").write_bytes(pytorch_corpus.zipped(pytorch_corpus.members(state, data)))
    index = {"weight_map": dict.fromkeys("abc", "m.bin")}
    for total, count in ((40, 0), (24, 0), (25, 1)):
        index["metadata"] = {"total_size": total}
        (tmp_path / PYTORCH_INDEX).write_text(json.dumps(index))
        with caplog.at_level(logging.WARNING, "maxjax"):
            open_checkpoint(tmp_path).close()
        assert len(caplog.messages) == count


@pytest.mark.parametrize("end", [".safetensors", ".bin"])
def test_the_usual_prefix_goes_before_others(end, tmp_path):
    usual = "model" if end == ".safetensors" else "pytorch_model"
    for stem, value in ((usual, GOOD), ("other", OTHER), ("consolidated", OTHER)):
        put(tmp_path, f"{stem}-00001-of-00002{end}", value, ("w",))
        put(tmp_path, f"{stem}-00002-of-00002{end}", value, ("v",))
    assert read(tmp_path) == GOOD
    for name in os.listdir(tmp_path):
        if name.startswith(usual):
            os.remove(tmp_path / name)
    assert read(tmp_path) == OTHER  # one set is left besides the consolidated one


@pytest.mark.parametrize(
    "names",
    [
        ["m-00001-of-00002", "m-00002-of-00002"],
        ["m-00000-of-00002", "m-00001-of-00002"],
        ["m-1-of-2", "m-2-of-2"],
    ],
)
def test_numbers_of_parts(names, tmp_path):
    for name, tensor in zip(names, "ab", strict=True):
        put(tmp_path, f"{name}.safetensors", tensors=(tensor,))
    with open_checkpoint(tmp_path) as table:
        assert list(table.entries) == ["a", "b"]
    os.remove(tmp_path / f"{names[1]}.safetensors")
    error = refused(tmp_path, CheckpointMissingError)
    assert error.path == str(tmp_path / f"{names[1]}.safetensors")
    (tmp_path / f"{names[1]}.safetensors.part").write_bytes(b"")
    assert "download is not complete" in str(refused(tmp_path, CheckpointMissingError))


def test_names_are_no_patterns(tmp_path):
    """A brace or a bracket in a name is one."""
    put(tmp_path, "{0.__class__}[a]-00001-of-00002.safetensors")
    error = refused(tmp_path, CheckpointMissingError)
    assert error.path == str(tmp_path / "{0.__class__}[a]-00002-of-00002.safetensors")


# --- GGUF -------------------------------------------------------------------------------------


def split_set(directory, stem="m", count=2):
    for number in range(count):
        values = {f"t{number}": np.full(4, number + 1.0, np.float32)}
        path = directory / f"{stem}-{number + 1:05}-of-{count:05}.gguf"
        write_gguf(path, values, no=number, count=count, tensors_count=count)


def test_a_split_gguf_set(tmp_path, caplog):
    split_set(tmp_path)
    write_gguf(tmp_path / "mmproj.gguf", {"t0": np.full(4, OTHER, np.float32)})
    with caplog.at_level(logging.INFO, "maxjax"):
        assert [read(tmp_path, name) for name in ("t0", "t1")] == [1.0, 2.0]
    os.remove(tmp_path / "m-00001-of-00002.gguf")
    error = refused(tmp_path, CheckpointMissingError)
    assert error.path == str(tmp_path / "m-00001-of-00002.gguf")


def test_several_ggufs_are_named(tmp_path):
    for name in ("m.Q4_K_M.gguf", "m.Q8_0.gguf"):
        put(tmp_path, name)
    error = refused(tmp_path, CheckpointFormatError)
    assert error.found == "m.Q4_K_M.gguf, m.Q8_0.gguf"
    assert error.hint == "Name the one you mean."
    assert read(tmp_path / "m.Q8_0.gguf") == GOOD


def test_a_gguf_and_a_set_are_ambiguous(tmp_path):
    split_set(tmp_path)
    put(tmp_path, "x.gguf")
    assert "several GGUF files" in str(refused(tmp_path, CheckpointFormatError))


# --- directories without a model --------------------------------------------------------------

BESIDE = ["adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors",
          "pytorch_lora_weights.safetensors", "mmproj-m.gguf", "imatrix.gguf", "optimizer.pt",
          "training_args.bin", "rng_state_3.pth"]  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_what_goes_with_a_model_is_none(name, tmp_path):
    path = put(tmp_path, name)
    put(tmp_path, "adapter_config.json", "x")
    error = refused(tmp_path, CheckpointMissingError)
    assert error.found == name and "by itself" in error.hint
    assert read(path) == GOOD


def test_an_unfinished_download(tmp_path):
    for name in ("model.safetensors.incomplete", "config.json"):
        (tmp_path / name).write_bytes(content("w")[:20])
    error = refused(tmp_path, CheckpointIncompleteError)
    assert error.found == "model.safetensors.incomplete" and "Download" in error.hint
    put(tmp_path, "pytorch_model.bin")
    assert read(tmp_path) == GOOD


def test_directories_with_weights_are_named(tmp_path):
    for place in ("unet/model.safetensors", "vae/model.bin", "text/config.json", "a/b/c/m.gguf"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_bytes(b"x")
    (tmp_path / "model_index.json").write_bytes(b"{}")
    (tmp_path / "flax_model.msgpack").write_bytes(b"")
    error = refused(tmp_path, CheckpointMissingError)
    assert error.hint == "Name one of its directories: unet, vae."
    assert "a/" in error.found and "model_index.json" in error.found


def test_a_directory_with_the_name_of_a_file(tmp_path):
    put(tmp_path, "model.safetensors/model.safetensors")
    (tmp_path / "loop.safetensors").symlink_to(".")
    assert "model.safetensors" in refused(tmp_path, CheckpointMissingError).hint
    put(tmp_path, "m.pt")
    assert read(tmp_path) == GOOD


def test_directories_inside_one_another(tmp_path):
    """None is entered: a reader that did could be led on until its stack is full."""
    (tmp_path / "x.bin" / "x.bin" / "x.bin").mkdir(parents=True)
    put(tmp_path / "x.bin" / "x.bin" / "x.bin", "x.bin")
    error = refused(tmp_path, CheckpointMissingError)
    assert error.path == str(tmp_path) and error.found == "x.bin/" and error.hint == error.advice


def test_many_directories_are_not_all_looked_at(tmp_path, monkeypatch):
    for number in range(300):
        (tmp_path / f"{number:04}").mkdir()
    put(tmp_path / "0299", "model.safetensors")
    listed = []
    whole = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or whole(path))
    assert refused(tmp_path, CheckpointMissingError).hint == "Check the path."
    assert len(listed) <= 103  # two of these look whether something was replaced meanwhile


def test_names_that_nobody_can_print(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"\xff\x1b[2J\n.safetensors")
    with open(path, "wb") as file:
        file.write(content("w"))
    assert read(tmp_path) == GOOD
    with open(path, "wb") as file:
        file.write(b"")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("count", ["99999", "00000"])
def test_absurd_counts(count, tmp_path):
    put(tmp_path, f"m-00001-of-{count}.safetensors")
    try:
        assert read(tmp_path) == GOOD
    except CheckpointMissingError as error:
        assert "99998 of the 99999" in str(error)
        assert count == "99999"


def test_long_names_take_no_time():
    """No pattern goes back and forth in a long name: that would take minutes here."""
    for name in (
        "a" * 100_000,
        "a_" * 50_000,
        "a-" * 50_000 + ".gguf",
        "." * 100_000,
        "1-of-" * 20_000,
    ):
        assert choose("d", [name + end for end in ("", ".x")]) in ([], [name])
