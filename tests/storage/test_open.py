"""What a path means: directories with everything that lies in them, lists, wrong paths."""

import json
import logging
import os
import stat
import sys

import pytest

import maxjax
from maxjax.errors import (
    CheckpointAccessError,
    CheckpointFormatError,
    CheckpointMissingError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
    UserInputError,
)
from maxjax.storage import open_checkpoint, sniff
from tests.storage.corpus import GGUF, PICKLE, A, file_bytes, floats

INDEX = "model.safetensors.index.json"


def content(*names: str, start: float = 1.0) -> bytes:
    """A file of tensors, four floats each."""
    size = len(names)
    header = {n: {**A, "data_offsets": [16 * i, 16 * i + 16]} for i, n in enumerate(names)}
    return file_bytes(header, floats(4 * size, start))


def fill(directory, **files):
    """Files by name; `__` stands for a dot in keywords."""
    for name, data in files.items():
        path = directory / name.replace("__", ".")
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return directory


def first(path, name="a"):
    with open_checkpoint(path) as table:
        return table.read(name)[0]


def test_text_and_path_objects(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content("a"))
    assert first(path) == first(str(path)) == first([path]) == first((str(path),)) == 1.0


# --- directories --------------------------------------------------------------------------


def test_index_wins_over_other_files(tmp_path):
    fill(tmp_path, one__safetensors=content("a", start=5.0), two__safetensors=content("a"))
    fill(tmp_path, model__safetensors__index__json={"weight_map": {"a": "one.safetensors"}})
    fill(tmp_path, unet__safetensors__index__json={"weight_map": {"a": "two.safetensors"}})
    assert first(tmp_path) == 5.0


def test_single_file_wins_over_its_index_as_in_transformers(tmp_path):
    fill(tmp_path, one__safetensors=content("a"), model__safetensors=content("a", start=5.0))
    fill(tmp_path, model__safetensors__index__json={"weight_map": {"a": "one.safetensors"}})
    assert first(tmp_path) == 5.0
    assert first(tmp_path / INDEX) == 1.0


def test_the_only_index_of_another_name(tmp_path):
    fill(tmp_path, one__safetensors=content("a", start=5.0), two__safetensors=content("a"))
    fill(tmp_path, unet__safetensors__index__json={"weight_map": {"a": "one.safetensors"}})
    assert first(tmp_path) == 5.0
    fill(tmp_path, vae__safetensors__index__json={"weight_map": {"a": "two.safetensors"}})
    with pytest.raises(CheckpointFormatError, match="several indexes.*Name the one"):
        open_checkpoint(tmp_path)


def test_model_safetensors_wins_over_other_files(tmp_path):
    fill(tmp_path, model__safetensors=content("a", start=5.0), adapter__safetensors=content("a"))
    assert first(tmp_path) == 5.0


def test_all_files_without_an_index(tmp_path):
    fill(tmp_path, x__safetensors=content("a"), y__safetensors=content("b", start=7.0))
    with open_checkpoint(tmp_path) as table:
        assert [entry.file for entry in table.entries.values()] == [0, 1]
        assert {name: array[0] for name, array in table.read_many().items()} == {"a": 1.0, "b": 7.0}


def test_equal_names_in_two_files_are_refused(tmp_path):
    fill(tmp_path, x__safetensors=content("a", "b"), y__safetensors=content("b"))
    with pytest.raises(CheckpointFormatError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.tensor == "b"
    assert "x.safetensors" in str(caught.value) and "y.safetensors" in str(caught.value)


def test_consolidated_and_hidden_files_are_left_out(tmp_path):
    fill(
        tmp_path, consolidated__00__safetensors=content("a"), x__safetensors=content("a", start=5.0)
    )
    (tmp_path / "._x.safetensors").write_bytes(b"not a checkpoint")
    assert first(tmp_path) == 5.0
    os.remove(tmp_path / "x.safetensors")
    assert first(tmp_path) == 1.0  # when it is all there is


def test_numbered_parts_without_an_index(tmp_path):
    parts = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for number, part in enumerate(parts):
        (tmp_path / part).write_bytes(content(f"t{number}"))
    (tmp_path / "extra.safetensors").write_bytes(content("t0"))  # no part of the set
    with open_checkpoint(tmp_path) as table:
        assert [os.path.basename(file.path) for file in table.files] == parts
    os.remove(tmp_path / parts[1])
    with pytest.raises(CheckpointMissingError, match="1 of the 3 files") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.path == str(tmp_path / parts[1])


@pytest.mark.parametrize("other", ["b-00001-of-00001", "a-00001-of-00002", "a-1-of-00001"])
def test_two_sets_of_parts_are_ambiguous(other, tmp_path):
    for name in ("a-00001-of-00001", other):
        (tmp_path / f"{name}.safetensors").write_bytes(content("a"))
    with pytest.raises(CheckpointFormatError, match="several (sets|files of one number).*Name"):
        open_checkpoint(tmp_path)


def test_pytorch_files_beside_are_left_out_and_said(tmp_path, caplog):
    fill(tmp_path, model__safetensors=content("a"), pytorch_model__bin=PICKLE)
    with caplog.at_level(logging.INFO, "maxjax"):
        assert first(tmp_path) == 1.0
    assert any("pytorch_model.bin" in message for message in caplog.messages)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "pytorch_model.bin"])
def test_gguf_beside_is_ambiguous(name, tmp_path):
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "model-q4.gguf").write_bytes(GGUF)
    with pytest.raises(CheckpointFormatError, match="two formats.*Name the file") as caught:
        open_checkpoint(tmp_path)
    assert name in str(caught.value) and "model-q4.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tf_model.h5", "HDF5 is not a supported format"),
        ("flax_model.msgpack", "flax msgpack is not a supported format"),
        ("__0_0.distcp", "torch.distributed.checkpoint is not a supported format"),
        ("model.onnx", "ONNX is not a supported format"),
        ("model.pkl", "a pickle is not a supported format"),
    ],
)
def test_other_formats_are_named(name, says, tmp_path):
    (tmp_path / name).write_bytes(PICKLE)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointFormatError, match=f"{says}.*Convert it to safetensors"):
            open_checkpoint(path)


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "w.pt", "w.npz", "w.npy"])
def test_a_name_is_believed_and_the_content_must_agree(name, tmp_path):
    (tmp_path / name).write_bytes(b"cposix\nsystem\n(S'x'\ntR.")
    with pytest.raises(CheckpointUnsafeError, match=r"posix\.system"):
        open_checkpoint(tmp_path / name)


def test_directory_without_weights_says_what_is_there(tmp_path):
    with pytest.raises(CheckpointMissingError, match="no weights.*an empty directory"):
        open_checkpoint(tmp_path)
    fill(tmp_path, config__json={}, README__md=b"x")
    with pytest.raises(CheckpointMissingError) as caught:
        open_checkpoint(tmp_path)
    assert "*.safetensors" in caught.value.expected
    assert "README.md, config.json" in caught.value.found


def test_broken_file_in_a_directory_is_named(tmp_path):
    fill(tmp_path, x__safetensors=content("a"), y__safetensors=content("b")[:-1])
    with pytest.raises(CheckpointTruncatedError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.path == str(tmp_path / "y.safetensors")


def test_unreadable_directory(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CheckpointAccessError, match="permission denied"):
        open_checkpoint(tmp_path)


# --- lists --------------------------------------------------------------------------------


def test_last_of_equal_names_wins(tmp_path):
    fill(tmp_path, x__safetensors=content("a", "b"), y__safetensors=content("b", "c", start=50.0))
    x, y = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    with open_checkpoint([x, y]) as table:
        arrays = table.read_many()
    assert {name: array[0] for name, array in arrays.items()} == {"a": 1.0, "b": 50.0, "c": 54.0}
    assert first([y, x], "b") == 5.0


def test_list_of_directories_and_files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    fill(tmp_path / "one", p__safetensors=content("a"), q__safetensors=content("b"))
    fill(tmp_path / "two", model__safetensors=content("a", start=9.0))
    with open_checkpoint([tmp_path / "one", tmp_path / "two"]) as table:
        assert (len(table.files), table.read("a")[0], table.read("b")[0]) == (3, 9.0, 1.0)


def test_empty_list():
    with pytest.raises(UserInputError, match="no path"):
        open_checkpoint([])


def test_list_with_a_bad_file_closes_the_good_ones(tmp_path):
    fill(tmp_path, x__safetensors=content("a"))
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(CheckpointMissingError):
        open_checkpoint([tmp_path / "x.safetensors", tmp_path / "none.safetensors"])
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= len(before)


# --- files --------------------------------------------------------------------------------


def test_blob_without_an_ending_is_read_by_its_content(tmp_path):
    path = tmp_path / ("0" * 64)
    path.write_bytes(content("a"))
    assert first(path) == 1.0


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580])
def test_header_length_that_looks_like_a_pickle(length, tmp_path):
    """The first bytes are those of a pickle of protocol 2 to 5."""
    header = json.dumps({"a": {**A, "data_offsets": [0, 16]}}).ljust(length)
    path = tmp_path / ("0" * 64)
    path.write_bytes(file_bytes(header, floats(4)))
    assert path.read_bytes()[0] == 0x80 and sniff(path.read_bytes()) == "pickle"
    assert first(path) == 1.0


def test_ending_and_content_must_agree(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(content("a"))
    with pytest.raises(CheckpointFormatError, match="PyTorch"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["none.gguf", "none.bin", "none.safetensors", "none", "none.json"])
def test_missing_file_is_missing_whatever_its_ending(name, tmp_path):
    with pytest.raises(CheckpointMissingError, match="no such file"):
        open_checkpoint(tmp_path / name)


def test_other_json_is_no_index(tmp_path):
    fill(tmp_path, config__json={"hidden_size": 3})
    with pytest.raises(CheckpointFormatError, match="this is config.json, which holds no weights"):
        open_checkpoint(tmp_path / "config.json")


def test_device_and_fifo(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointFormatError, match="FIFO"):
            open_checkpoint(path)
    assert stat.S_ISFIFO(os.stat(tmp_path / "model.safetensors").st_mode)


@pytest.mark.parametrize("of", ["file", "directory"])
def test_the_way_to_a_checkpoint_is_short(tmp_path, of):
    """Nine files of ours are entered at most: no checksums and no files beside it are looked for."""
    fill(tmp_path, model__safetensors=content("a"), config__json={})
    path = tmp_path / "model.safetensors" if of == "file" else tmp_path
    open_checkpoint(path).close()  # imports
    package, entered = os.path.dirname(maxjax.__file__), set()

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        table = open_checkpoint(path)
    finally:
        sys.setprofile(before)
    table.close()
    assert 5 < len(entered) <= 10, entered
