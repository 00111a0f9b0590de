"""verify reads all there is, once, and finds what opening cannot."""

import hashlib
import os

import gguf
import numpy as np
import pytest
import safetensors.numpy

from maxjax.errors import (
    CheckpointChangedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
)
from maxjax.storage import open_checkpoint, verify
from maxjax.storage.verify import Verified, second_reading
from maxjax.storage.verify import verify as verified
from tests.oracles.recorded import recorded_files, torch

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
    path = tmp_path / "torch" / "m.pt"
    path.parent.mkdir()
    recorded_files(
        path.parent, lambda: torch.save({k: torch.tensor(v) for k, v in ARRAYS.items()}, path)
    )
    found = check(path)
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


@pytest.fixture
def cached(tmp_path):
    """A file as the Hugging Face cache has it: a link to one that is called by its SHA-256."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    safetensors.numpy.save_file(ARRAYS, tmp_path / "m.safetensors")
    digest = hashlib.sha256((tmp_path / "m.safetensors").read_bytes()).hexdigest()
    os.rename(tmp_path / "m.safetensors", tmp_path / "blobs" / digest)
    link = tmp_path / "snapshots" / "model.safetensors"
    link.symlink_to(os.path.join("..", "blobs", digest))
    return link


def test_a_file_of_a_cache_is_compared_with_its_name(cached, monkeypatch):
    monkeypatch.setattr(verify, "_BYTES", 64)
    assert check(cached) == Verified(3, 163, 1, 0, blobs=1)
    good = cached.read_bytes()
    for at in (len(good) - 1, len(good) - 163):
        bad = bytearray(good)
        bad[at] ^= 1
        (cached.parent / os.readlink(cached)).write_bytes(bad)
        with pytest.raises(CheckpointCorruptError, match="SHA-256") as caught:
            check(cached)
        digest = os.path.basename(os.readlink(cached))
        assert caught.value.expected == f"SHA-256 {digest}"
        assert caught.value.found == hashlib.sha256(bad).hexdigest()


def test_other_names_in_a_cache_are_none(cached):
    """A small file is called by the SHA-1 of git there."""
    blob = cached.parent.parent / "blobs" / os.path.basename(os.readlink(cached))
    blob.rename(blob.with_name(blob.name[:40]))
    cached.unlink()
    cached.symlink_to(os.path.join("..", "blobs", blob.name[:40]))
    assert check(cached).blobs == 0
    elsewhere = cached.parent / blob.name
    blob.with_name(blob.name[:40]).rename(elsewhere)
    assert check(elsewhere).blobs == 0


def test_a_cached_file_that_was_written_to_meanwhile(cached):
    with open_checkpoint(cached) as table:
        with open(cached, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01" if ARRAYS["b"][-1] != 1 else b"\x00")
        os.utime(cached, ns=(1, 1))
        with pytest.raises(CheckpointChangedError):
            verified(table)


def test_the_formats_own_library_reads_it_too(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file(ARRAYS, path)
    with open_checkpoint(path) as table:
        assert second_reading(table) == []
        other = tmp_path / "other.safetensors"
        safetensors.numpy.save_file({"a": ARRAYS["a"].T.copy(), "b": ARRAYS["b"]}, other)
        opens = safetensors.safe_open
        monkeypatch.setattr(safetensors, "safe_open", lambda _, **options: opens(other, **options))
        (line,) = second_reading(table)
        assert line.startswith(str(path)) and "finds no tensor for 'e'" in line
        other.write_bytes(b"no such file")
        (line,) = second_reading(table)
        assert line.startswith(f"{path}: the safetensors library refuses it (")
    np.savez(tmp_path / "m.npz", **ARRAYS)
    with open_checkpoint(tmp_path / "m.npz") as table:
        assert second_reading(table) == []
