"""Reading tensors: every layout bit-exact, in memory of our own, and files that change meanwhile."""

import errno
import os
import threading
from functools import cache
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointTruncatedError,
    OutOfMemoryError,
)
from maxjax.storage import TensorTable, open_checkpoint, table
from maxjax.storage import files as parallel
from tests.storage.corpus import file_bytes, spec


@cache
def random_bits(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 2, count, np.uint8).tobytes()


def build(path: Path, sizes: dict[str, tuple[str, list[int], int]], seed: int = 0) -> bytes:
    """A file of tensors `name: (dtype, shape, bytes)` with random content; gives the data."""
    header, at = {}, 0
    for name, (dtype, shape, nbytes) in sizes.items():
        header[name] = spec(dtype, shape, at, at + nbytes)
        at += nbytes
    data = random_bits(at, seed)
    path.write_bytes(file_bytes(header, data))
    return data


# Around the bounds between slabs, single tensors and several blocks; small ones between.
MIXED = {
    "tiny": ("U8", [3], 3),
    "empty": ("F32", [2, 0], 0),
    "small": ("F32", [1000], 4000),
    "edge": ("U8", [table.SMALL_BYTES], table.SMALL_BYTES),
    "over": ("U8", [table.SMALL_BYTES + 1], table.SMALL_BYTES + 1),
    "scalar": ("F64", [], 8),
    "large": ("BF16", [5, 1 << 20], 10 << 20),
    "f4_small": ("F4", [2, 64], 64),
    "flag": ("BOOL", [100], 100),
    "f4_large": ("F4", [3, 2 << 20], 3 << 20),
    "last": ("U8", [1], 1),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Bounds so small that a file of some megabytes has every kind of read."""
    monkeypatch.setattr(table, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(table, "SLAB_BYTES", 256 << 10)
    monkeypatch.setattr(parallel, "PARALLEL_BYTES", 1 << 20)


def expected(data: bytes) -> dict[str, np.ndarray]:
    """MIXED decoded in the plainest way."""
    arrays, at = {}, 0
    for name, (dtype, shape, nbytes) in MIXED.items():
        raw = np.frombuffer(data, np.uint8, nbytes, at)
        if dtype == "F4":
            raw = np.stack([raw & 15, raw >> 4], axis=-1).reshape(-1)
        arrays[name] = raw.view(DType.from_safetensors(dtype).np).reshape(shape)
        at += nbytes
    return arrays


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_read_many_of_every_size(threads, tmp_path, small_blocks):
    data = build(tmp_path / "m.safetensors", MIXED)
    with open_checkpoint(tmp_path / "m.safetensors") as opened:
        arrays = opened.read_many(threads=threads)
    assert list(arrays) == list(MIXED)
    for name, array in expected(data).items():
        np.testing.assert_array_equal(arrays[name], array, strict=True)
        assert arrays[name].flags.writeable and arrays[name].flags.c_contiguous
        assert not array.size or arrays[name].ctypes.data % 64 == 0


def test_read_one(tmp_path, small_blocks):
    data = build(tmp_path / "m.safetensors", MIXED)
    for name, array in expected(data).items():
        with open_checkpoint(tmp_path / "m.safetensors") as opened:
            np.testing.assert_array_equal(opened.read(name), array, name, strict=True)


def test_order_and_repetition_of_names(tmp_path):
    build(tmp_path / "m.safetensors", MIXED)
    with open_checkpoint(tmp_path / "m.safetensors") as opened:
        assert list(opened.read_many(["last", "tiny", "last"])) == ["last", "tiny"]
        assert opened.read_many([]) == {}
        with pytest.raises(KeyError, match="nothing"):
            opened.read_many(["tiny", "nothing"])


def test_two_reads_share_no_memory(tmp_path):
    build(tmp_path / "m.safetensors", MIXED)
    with open_checkpoint(tmp_path / "m.safetensors") as opened:
        arrays = [opened.read("small"), opened.read("small"), *opened.read_many().values()]
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays if a.size)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


def test_jax_takes_the_memory_over_without_a_copy(tmp_path):
    build(tmp_path / "m.safetensors", MIXED)
    with open_checkpoint(tmp_path / "m.safetensors") as opened:
        array = opened.read("large")
    taken = jax.device_put(array, jax.devices("cpu")[0])
    assert taken.unsafe_buffer_pointer() == array.ctypes.data
    assert taken.dtype == ml_dtypes.bfloat16


def test_arrays_outlive_table_and_file(tmp_path):
    path = tmp_path / "m.safetensors"
    data = build(path, MIXED)
    opened = open_checkpoint(path)
    arrays = opened.read_many()
    opened.close()
    path.write_bytes(bytes(path.stat().st_size))
    for name, array in expected(data).items():
        np.testing.assert_array_equal(arrays[name], array, strict=True)


def test_many_threads_read_one_table(tmp_path):
    data = build(tmp_path / "m.safetensors", MIXED)
    wrong: list[str] = []
    with open_checkpoint(tmp_path / "m.safetensors") as opened:

        def work() -> None:
            for name, array in expected(data).items():
                if not np.array_equal(opened.read(name), array):
                    wrong.append(name)

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong


# --- faults -------------------------------------------------------------------------------


def test_boolean_is_checked_in_every_block(tmp_path, small_blocks):
    nbytes = 3 << 20
    data = bytearray(nbytes)
    data[nbytes - 5] = 7
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes({"flag": spec("BOOL", [nbytes], 0, nbytes)}, bytes(data)))
    with open_checkpoint(path) as opened, pytest.raises(CheckpointFormatError) as caught:
        opened.read("flag")
    assert caught.value.tensor == "flag"
    assert caught.value.offset == path.stat().st_size - 5
    assert caught.value.found == 7


@pytest.mark.parametrize("name", ["tiny", "small", "large", "f4_large", "last"])
def test_file_cut_after_opening(name, tmp_path, small_blocks):
    path = tmp_path / "m.safetensors"
    build(path, MIXED)
    with open_checkpoint(path) as opened:
        entry = opened.entries[name]
        os.truncate(path, entry.offset + entry.nbytes - 1)
        with pytest.raises(CheckpointTruncatedError) as caught:
            opened.read_many()
        assert caught.value.path == str(path)
        with pytest.raises(CheckpointTruncatedError) as caught:
            opened.read(name)
        assert caught.value.tensor == name
        assert caught.value.offset is not None and caught.value.expected and caught.value.found


def test_error_in_a_thread_names_the_tensor(tmp_path, small_blocks, monkeypatch):
    path = tmp_path / "m.safetensors"
    build(path, MIXED)
    with open_checkpoint(path) as opened:
        middle = opened.entries["large"].offset + (4 << 20)
        whole = os.preadv

        def preadv(fd, views, offset):
            if offset == middle:
                raise OSError(errno.EIO, "Input/output error")
            return whole(fd, views, offset)

        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(CheckpointError, match="EIO") as caught:
            opened.read_many()
        assert caught.value.tensor == "large"
        monkeypatch.undo()
        assert opened.read("large").size  # and the table is still good


def test_host_without_memory(tmp_path, monkeypatch):
    build(tmp_path / "m.safetensors", MIXED)

    def none_left(nbytes):
        if nbytes:
            raise MemoryError
        return np.empty(0, np.uint8)

    with open_checkpoint(tmp_path / "m.safetensors") as opened:
        monkeypatch.setattr(table, "aligned_empty", none_left)
        with pytest.raises(OutOfMemoryError, match="'large'.*10485760 bytes"):
            opened.read("large")


def test_closed_table(tmp_path):
    build(tmp_path / "m.safetensors", MIXED)
    opened = open_checkpoint(tmp_path / "m.safetensors")
    opened.close()
    opened.close()
    assert "tiny" in opened.entries
    for name in ("tiny", "empty", "large"):
        with pytest.raises(CheckpointError, match="closed"):
            opened.read(name)


def test_repr_names_format_count_and_file(tmp_path):
    build(tmp_path / "m.safetensors", MIXED)
    with open_checkpoint(tmp_path / "m.safetensors") as opened:
        assert isinstance(opened, TensorTable)
        assert repr(opened) == f"TensorTable(safetensors, 11 tensors, {tmp_path}/m.safetensors)"
