"""Checksums that are computed of blocks as they are read: against zlib, and on damaged archives."""

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from maxjax.errors import CheckpointChangedError, CheckpointCorruptError
from maxjax.storage import aligned_empty, checksums, open_checkpoint, table
from maxjax.storage import files as parallel
from maxjax.storage.files import OpenFile
from maxjax.storage.parts import Part, read_parts
from tests.oracles.recorded import recorded_files, torch


@pytest.fixture
def small_blocks(monkeypatch):
    """Bounds so small that tensors of some kilobytes have every kind of read."""
    monkeypatch.setattr(table, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(table, "SMALL_BYTES", 1 << 10)
    monkeypatch.setattr(parallel, "PARALLEL_BYTES", 1 << 10)
    monkeypatch.setattr(checksums, "STEP_BYTES", 3000)


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "small": rng.integers(0, 100, 20, "i4"),
        "large": rng.integers(0, 255, (70, 90)).astype("f4"),  # three blocks
        "even": rng.integers(0, 255, 10_000, "u1"),  # one block
        "fortran": np.asfortranarray(rng.integers(0, 255, (30, 41)).astype("f4")),
        "flags": rng.integers(0, 2, 3000).astype(bool),
        "empty": np.zeros((0, 3), "f4"),
    }


def save_torch(path: Path) -> None:
    def save() -> None:
        tensors = {name: torch.from_numpy(array) for name, array in arrays().items()}
        tensors["part"] = tensors["large"][3:5]
        torch.save(tensors, path)

    recorded_files(path.parent, save, "checksums: pytorch")


def save_npz(path: Path) -> None:
    np.savez(path, **arrays())


@pytest.fixture(params=["m.pt", "m.npz"])
def path(request, tmp_path, small_blocks) -> Path:
    found = tmp_path / request.param
    (save_torch if found.suffix == ".pt" else save_npz)(found)
    return found


def flip(path: Path, place: int) -> None:
    """Changes a bit in place, and leaves the file as old as it was."""
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0] ^ 16
        file.seek(place)
        file.write(bytes([byte]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("threads", [1, 3])
def test_sound_files(path, threads):
    with open_checkpoint(path) as opened:
        for _ in range(2):  # compared, and not compared again
            read = opened.read_many(threads=threads)
            for name, array in arrays().items():
                np.testing.assert_array_equal(read[name], array, strict=True)


@pytest.mark.parametrize("verify", ["auto", True])
def test_nothing_is_read_twice(path, verify, monkeypatch):
    places = []
    original = OpenFile.pread_some

    def counted(self, views, offset, **where):
        places.extend(range(offset, offset + sum(map(len, views))))
        return original(self, views, offset, **where)

    with open_checkpoint(path) as opened:
        opened.verify = verify
        names = [name for name in opened.entries if name != "part"]
        monkeypatch.setattr(OpenFile, "pread_some", counted)
        opened.read_many(names)
        nbytes = sum(opened.entries[name].nbytes for name in names)
        assert len(places) == nbytes == len(set(places))
        assert not opened.checks.unchecked(opened.entries.values())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", [name for name, array in arrays().items() if array.size])
def test_a_changed_bit_is_found_wherever_it_is(name, path, threads):
    with open_checkpoint(path) as opened:
        sum_of = opened.entries[name].checksum
        assert sum_of is not None
    end = sum_of.offset + sum_of.nbytes
    places = sorted({*range(sum_of.offset, end, 2999), sum_of.offset + 9_999, end - 1})
    for place in (place for place in places if place < end):
        with open_checkpoint(path) as opened:  # what opening looks at is sound
            flip(path, place)
            for names in ([name], None):
                with pytest.raises(CheckpointCorruptError) as caught:
                    opened.read_many(names, threads=threads)
                error = caught.value
                assert error.offset == sum_of.offset and sum_of.name in str(error)
                assert error.expected == f"CRC-32 {sum_of.crc:08x}"
                content = path.read_bytes()[sum_of.offset : end]
                assert error.found == f"{zlib.crc32(content):08x}"
                assert error.tensor in (name, "part")
            others = [other for other in arrays() if other != name]
            assert list(opened.read_many(others)) == others
            with pytest.raises(CheckpointCorruptError):
                opened.check([opened.entries[name]], threads=threads)
        flip(path, place)


def test_parts_of_a_damaged_tensor_are_refused(path, monkeypatch):
    monkeypatch.setattr(checksums, "GAP_BYTES", 1000)
    with open_checkpoint(path) as opened:
        sum_of = opened.entries["large"].checksum
        assert sum_of is not None
        flip(path, sum_of.offset + sum_of.nbytes - 1)
        small = Part("large", ((0, 1), (0, 1)), aligned_empty(4))
        for verify in "auto", False:
            opened.verify = verify
            read_parts(opened, [small])
        opened.verify = True
        with pytest.raises(CheckpointCorruptError):
            read_parts(opened, [small])


def test_a_view_that_is_read_alone_is_checked_by_its_storage(tmp_path, small_blocks):
    save_torch(tmp_path / "m.pt")
    with open_checkpoint(tmp_path / "m.pt") as opened:
        opened.verify = True
        sum_of = opened.entries["part"].checksum
        assert sum_of is not None and sum_of == opened.entries["large"].checksum
        flip(tmp_path / "m.pt", sum_of.offset)
        with pytest.raises(CheckpointCorruptError) as caught:
            opened.read("part")
        assert caught.value.tensor == "part"


def test_a_file_written_to_meanwhile_is_not_called_corrupt(path):
    with open_checkpoint(path) as opened:
        sum_of = opened.entries["large"].checksum
        assert sum_of is not None
        flip(path, sum_of.offset + sum_of.nbytes - 1)
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointChangedError):
            opened.read("large")
        with pytest.raises(CheckpointChangedError):
            opened.check([opened.entries["large"]])


def test_threads_that_read_one_table(path):
    with open_checkpoint(path) as opened, ThreadPoolExecutor(8) as pool:
        for read in pool.map(lambda _: opened.read_many(), range(16)):
            for name, array in arrays().items():
                np.testing.assert_array_equal(read[name], array)
