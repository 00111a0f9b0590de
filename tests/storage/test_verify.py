"""verify reads all there is, once, and finds what opening cannot."""

import os

import gguf
import numpy as np
import pytest
import safetensors.numpy
import torch

from maxjax.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError
from maxjax.storage import open_checkpoint, verify
from maxjax.storage.verify import Verified
from maxjax.storage.verify import verify as verified

ARRAYS = {
    "a": np.arange(40, dtype=np.float32).reshape(5, 8),
    "b": np.ones(3, bool),
    "e": np.zeros((0, 2)),
}


def check(path):
    with open_checkpoint(path) as table:
        return verified(table)


def test_each_format(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "_BYTES", 64)  # tensors in pieces
    safetensors.numpy.save_file(ARRAYS, tmp_path / "m.safetensors")
    assert check(tmp_path / "m.safetensors") == Verified(3, 163, 1, 0)
    np.savez(tmp_path / "m.npz", **ARRAYS)
    # That of an empty array was compared when it was opened.
    assert check(tmp_path / "m.npz") == Verified(3, 163, 1, 2)
    np.savez_compressed(tmp_path / "c.npz", **ARRAYS)
    assert check(tmp_path / "c.npz").checksums == 2
    torch.save({k: torch.tensor(v) for k, v in ARRAYS.items()}, tmp_path / "m.pt")
    found = check(tmp_path / "m.pt")
    assert (found.tensors, found.nbytes, found.checksums) == (3, 163, 2)  # none of an empty one
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("a", ARRAYS["a"])
    writer.add_tensor("q", np.zeros((4, 24), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q5_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert check(tmp_path / "m.gguf") == Verified(2, 256, 1, 0)


def test_a_boolean_that_is_none(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"b": np.ones(300, bool)}, path)
    with open(path, "r+b") as file:
        file.seek(-7, os.SEEK_END)
        file.write(b"\x02")
    with pytest.raises(CheckpointFormatError, match="'b'.*boolean"):
        check(path)


def test_every_flipped_bit_of_an_archive_is_found(tmp_path):
    path = tmp_path / "m.npz"
    np.savez(path, **ARRAYS)
    good = path.read_bytes()
    start = good.index(ARRAYS["a"].tobytes())
    for at in range(start, start + ARRAYS["a"].nbytes, 13):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointCorruptError, match="'a'.*CRC-32"):
            check(path)


def test_a_file_that_became_shorter(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(ARRAYS, path)
    with open_checkpoint(path) as table:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError):
            verified(table)
