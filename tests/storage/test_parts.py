"""Reading parts of tensors: right in every byte, each byte once, and in little memory."""

import errno
import os
import threading
import zlib
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointTruncatedError,
)
from maxjax.storage import OpenFile, TensorEntry, TensorTable, open_regular
from maxjax.storage import files as parallel
from maxjax.storage import parts as regions
from maxjax.storage.entry import Nibbles
from maxjax.storage.parts import Part, read_parts

MEGA = 1 << 20
BF16 = DType.bfloat16


class Checkpoint:
    """Files of tensors with random content; ``values`` holds each as uint8 ``[*shape, item]``.

    Byte 0 of a file belongs to no tensor, so that nothing is aligned by luck.
    """

    def __init__(self, folder: Path, *files: dict[str, tuple[DType, tuple[int, ...]]]):
        rng = np.random.default_rng(1)
        self.values: dict[str, np.ndarray] = {}
        self.paths = [folder / f"{number}.bin" for number in range(len(files))]
        entries: dict[str, TensorEntry] = {}
        for number, tensors in enumerate(files):
            content = bytearray(1)
            for name, (dtype, shape) in tensors.items():
                top = {DType.bool: 2, DType.float4_e2m1fn: 16}.get(dtype, 256)
                value = rng.integers(0, top, (*shape, dtype.np.itemsize), np.uint8)
                raw = value.reshape(-1)
                if dtype is DType.float4_e2m1fn:
                    raw = raw[0::2] | raw[1::2] << 4
                coding = Nibbles() if dtype is DType.float4_e2m1fn else None
                entries[name] = TensorEntry(
                    name, dtype, shape, number, len(content), len(raw), coding
                )
                content += raw.tobytes()
                self.values[name] = value
            self.paths[number].write_bytes(content)
        self.table = TensorTable("test", [open_regular(path) for path in self.paths], entries)

    def part(self, name: str, *region: tuple[int, int]) -> Part:
        """A part whose memory stands between two guards, all of it filled with 0xEE."""
        nbytes = self.values[name].shape[-1] * prod(b - a for a, b in region)
        return Part(name, region, np.full(nbytes + 16, 0xEE, np.uint8)[8:-8])

    def check(self, parts: list[Part]) -> None:
        for name, region, memory in parts:
            wanted = self.values[name][tuple(slice(*span) for span in region)]
            np.testing.assert_array_equal(memory, wanted.reshape(-1))
            assert memory.base is not None
            assert (memory.base[:8] == 0xEE).all() and (memory.base[-8:] == 0xEE).all()


class Reads(list):
    """(path, offset, bytes) of every read asked of an OpenFile."""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self)

    def repeated(self) -> bool:
        """Whether some byte was read more than once."""
        at = sorted(self)
        return any(p == q and a + n > b for (p, a, n), (q, b, _) in zip(at, at[1:], strict=False))


@pytest.fixture
def reads(monkeypatch) -> Reads:
    found, real = Reads(), OpenFile.pread_some

    def pread_some(self, views, offset, *, tensor=None):
        found.append((self.path, offset, sum(map(len, views))))
        return real(self, views, offset, tensor=tensor)

    monkeypatch.setattr(OpenFile, "pread_some", pread_some)
    return found


@pytest.fixture(params=["as it is", "small"])
def bounds(request, monkeypatch):
    """Bounds so small that little tensors have every kind of read, in threads too."""
    if request.param == "small":
        monkeypatch.setattr(parallel, "PARALLEL_BYTES", 1)
        for name, value in {
            "BLOCK_BYTES": 256, "SCRATCH_BYTES": 40, "DIRECT_BYTES": 24, "SHORT_BYTES": 5,
            "HOLE_BYTES": 30,
        }.items():  # fmt: skip
            monkeypatch.setattr(regions, name, value)


def shards(checkpoint: Checkpoint, name: str, parts: tuple[int, ...], devices=None) -> list[Part]:
    """The parts of a tensor cut evenly on each axis, of all devices or of some."""
    spans = [
        [(size * i // count, size * (i + 1) // count) for i in range(count)]
        for size, count in zip(checkpoint.values[name].shape[:-1], parts, strict=True)
    ]
    cut = list(product(*spans))
    return [
        checkpoint.part(name, *cut[i]) for i in (range(len(cut)) if devices is None else devices)
    ]


# --- every byte right -------------------------------------------------------------------------

DTYPES = [DType.float32, BF16, DType.bool, DType.float4_e2m1fn, DType.int64, DType.uint8]


def random_region(rng: np.random.Generator, shape: tuple[int, ...]):
    for size in shape:
        kind = rng.integers(6)
        start, stop = sorted(map(int, rng.integers(0, size + 1, 2)))
        half = size // 2
        yield [(0, size), (0, size), (0, half), (half, size), (start, stop), (start, stop)][kind]


def random_shape(rng: np.random.Generator, rank: int, dtype: DType) -> tuple[int, ...]:
    while True:
        top = (1, 300, 40, 14, 8)[rank]
        shape = tuple(map(int, rng.integers(1, top + 1, rank)))
        if rank and not rng.integers(8):
            shape = (*shape[:-1], 0)
        if dtype is not DType.float4_e2m1fn or prod(shape) % 2 == 0:
            return shape


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "rank"),
    # Half a byte is no tensor.
    [pair for pair in product(DTYPES, range(5)) if pair != (DType.float4_e2m1fn, 0)],
    ids=str,
)
def test_random_regions(dtype, rank, tmp_path, bounds, reads):
    rng = np.random.default_rng(zlib.crc32(f"{dtype} {rank}".encode()))
    for _ in range(14):
        names = ["a", "b", "c"]
        tensors = {name: (dtype, random_shape(rng, rank, dtype)) for name in names}
        checkpoint = Checkpoint(
            tmp_path, {"a": tensors["a"], "b": tensors["b"]}, {"c": tensors["c"]}
        )
        parts = []
        for _ in range(rng.integers(1, 12)):
            name = names[rng.integers(3)]
            parts.append(checkpoint.part(name, *random_region(rng, tensors[name][1])))
        reads.clear()
        count = read_parts(checkpoint.table, parts, threads=int(rng.integers(1, 4)))
        checkpoint.check(parts)
        assert count == reads.nbytes
        assert dtype is DType.float4_e2m1fn or not reads.repeated()


@pytest.mark.parametrize("counts", [(8, 1), (1, 8), (2, 4), (4, 2)])
@pytest.mark.parametrize("threads", [1, 4])
def test_even_shards(counts, threads, tmp_path, reads):
    checkpoint = Checkpoint(tmp_path, {"w": (BF16, (2048, 4096)), "v": (BF16, (1000, 1000))})
    parts = shards(checkpoint, "w", counts) + shards(checkpoint, "v", counts)
    assert read_parts(checkpoint.table, parts, threads=threads) == 16 * MEGA + 2_000_000
    checkpoint.check(parts)
    # Every byte once, and by blocks: none of these may take a read per row.
    assert reads.nbytes == 16 * MEGA + 2_000_000 and not reads.repeated()
    assert len(reads) <= 40


def test_large_reads_go_in_blocks_through_threads(tmp_path, reads, monkeypatch):
    checkpoint = Checkpoint(tmp_path, {"w": (DType.uint8, (20 * MEGA,))})
    names, real = set(), OpenFile.pread_some

    def pread_some(self, views, offset, *, tensor=None):
        names.add(threading.current_thread().name.rpartition("_")[0])
        return real(self, views, offset, tensor=tensor)

    monkeypatch.setattr(OpenFile, "pread_some", pread_some)
    part = checkpoint.part("w", (1, 20 * MEGA))
    read_parts(checkpoint.table, [part], threads=1)
    assert names == {""}
    read_parts(checkpoint.table, [part], threads=2)
    assert names == {"", "maxjax-read"}
    checkpoint.check([part])
    assert sorted({nbytes for _, _, nbytes in reads}) == [4 * MEGA - 1, 16 * MEGA]


def test_scalars_and_no_parts(tmp_path, reads):
    checkpoint = Checkpoint(tmp_path, {"s": (DType.float32, ()), "e": (BF16, (0, 5))})
    parts = [checkpoint.part("s"), checkpoint.part("s"), checkpoint.part("e", (0, 0), (1, 4))]
    assert read_parts(checkpoint.table, parts) == 4 and len(reads) == 1
    checkpoint.check(parts)
    assert read_parts(checkpoint.table, []) == 0 and len(reads) == 1


def test_empty_tensor_with_axes_beyond_numpy(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"s": (BF16, (1,))})
    checkpoint.table.entries["huge"] = TensorEntry("huge", BF16, (2**62, 0, 2**62), 0, 1, 0)
    part = Part("huge", ((0, 2**62), (0, 0), (5, 2**61)), np.empty(0, np.uint8))
    assert read_parts(checkpoint.table, [part]) == 0


@pytest.mark.parametrize("span", [(0, 1), (1, 2), (1, 4), (2, 7), (6, 7), (0, 7)])
def test_float4_on_odd_borders(span, tmp_path):
    checkpoint = Checkpoint(tmp_path, {"w": (DType.float4_e2m1fn, (4, 3, 7))})
    for rows in ((0, 4), (1, 2), (1, 4)):
        parts = [checkpoint.part("w", rows, (1, 3), span)]
        assert read_parts(checkpoint.table, parts) <= 42
        checkpoint.check(parts)


def test_reads_that_give_less_than_asked(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path, {"w": (BF16, (64, 640)), "f": (DType.float4_e2m1fn, (8, 64))})
    parts = shards(checkpoint, "w", (1, 4)) + shards(checkpoint, "f", (2, 2))
    parts.append(checkpoint.part("w", (3, 9), (0, 640)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:100]], at))
    read_parts(checkpoint.table, parts)
    checkpoint.check(parts)


# --- how much is read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "devices"),
    [
        ((8, 1), [0, 1, 2, 3]),
        ((1, 8), [0, 1, 2, 3]),
        ((1, 8), [4, 5, 6, 7]),
        ((1, 8), [0, 2, 4, 6]),
        ((1, 8), [0, 1, 6, 7]),
        ((2, 4), [0, 1, 2, 3]),
        ((2, 4), [0, 1, 4, 5]),
        ((4, 2), [0, 2, 4, 6]),
    ],
)
def test_one_of_two_processes_reads_half(counts, devices, tmp_path, reads):
    checkpoint = Checkpoint(tmp_path, {"w": (BF16, (512, 4096))})
    parts = shards(checkpoint, "w", counts, devices)
    assert read_parts(checkpoint.table, parts) == reads.nbytes == 2 * MEGA
    checkpoint.check(parts)
    assert not reads.repeated()


def test_the_hole_between_two_runs_of_columns_is_not_read(tmp_path, reads):
    checkpoint = Checkpoint(tmp_path, {"w": (DType.int64, (50, 4096))})
    parts = [checkpoint.part("w", (0, 50), (0, 100)), checkpoint.part("w", (0, 50), (3000, 3100))]
    assert read_parts(checkpoint.table, parts) == reads.nbytes == 50 * 200 * 8
    checkpoint.check(parts)


def test_short_runs_are_read_by_the_row_unless_rows_are_long(tmp_path, reads):
    checkpoint = Checkpoint(tmp_path, {"narrow": (BF16, (3000, 200)), "wide": (BF16, (90, 9000))})
    parts = [checkpoint.part("narrow", (0, 3000), (3, 5))]
    assert read_parts(checkpoint.table, parts) == 3000 * 400 and len(reads) == 2
    wide = [checkpoint.part("wide", (0, 90), (3, 5))]
    assert read_parts(checkpoint.table, wide) == 90 * 4
    wide.append(checkpoint.part("wide", (0, 90), (8300, 9000)))  # far off: on its own
    assert read_parts(checkpoint.table, wide) == 90 * (4 + 1400)
    near = [checkpoint.part("wide", (0, 90), (3, 5)), checkpoint.part("wide", (0, 90), (205, 300))]
    assert read_parts(checkpoint.table, near) == 90 * 2 * 297
    row = [checkpoint.part("narrow", (7, 8), (3, 5))]  # no row beside it: only what is asked
    assert read_parts(checkpoint.table, row) == 4
    checkpoint.check(parts + wide + near + row)


def test_repeated_parts_are_read_once(tmp_path, reads):
    checkpoint = Checkpoint(tmp_path, {"w": (BF16, (1024, 2048))})
    whole, middle = ((0, 1024), (0, 2048)), ((100, 900), (512, 1024))
    parts = [checkpoint.part("w", *whole), checkpoint.part("w", *middle)]
    parts += [checkpoint.part("w", *whole), checkpoint.part("w", *middle)]
    assert read_parts(checkpoint.table, parts) == reads.nbytes == 4 * MEGA
    checkpoint.check(parts)


def test_reads_follow_the_files(tmp_path, reads):
    checkpoint = Checkpoint(
        tmp_path, {"a": (BF16, (64,)), "b": (BF16, (8, 640))}, {"c": (BF16, (9,))}
    )
    parts = [checkpoint.part("c", (2, 9)), *reversed(shards(checkpoint, "b", (4, 1)))]
    parts.append(checkpoint.part("a", (0, 64)))
    read_parts(checkpoint.table, parts, threads=1)
    assert reads == sorted(reads) and len(reads) == 6


# --- how much memory it takes -------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(8,), (8, 1), (1, 8, 1), (8, 1, 1)])
def test_what_lies_together_needs_no_scratch(counts, tmp_path, monkeypatch):
    shape = {1: (64 * 1024,), 2: (64, 1024), 3: (2, 512, 512)}[len(counts)]
    if counts[0] == 8 and len(counts) == 3:
        shape = (8, 128, 128)
    checkpoint = Checkpoint(tmp_path, {"w": (BF16, shape)})
    parts = shards(checkpoint, "w", counts)
    real = regions.aligned_empty

    def none_but(nbytes):
        assert nbytes == 0
        return real(nbytes)

    monkeypatch.setattr(regions, "aligned_empty", none_but)
    read_parts(checkpoint.table, parts)
    checkpoint.check(parts)


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


@pytest.mark.parametrize("counts", [(8, 1), (1, 8)])
def test_scratch_is_small(counts, tmp_path):
    path = tmp_path / "zeros.bin"
    path.touch()
    os.truncate(path, 64 * MEGA)
    entry = TensorEntry("w", BF16, (8192, 4096), 0, 0, 64 * MEGA)
    opened = TensorTable("test", [open_regular(path)], {"w": entry})
    rows, columns = 8192 // counts[0], 4096 // counts[1]
    parts = [
        Part("w", ((i * rows, i * rows + rows), (j * columns, j * columns + columns)), memory)
        for i in range(counts[0])
        for j in range(counts[1])
        for memory in [np.full(8 * MEGA, 7, np.uint8)]
    ]
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of the resident memory cannot be reset here")
    before = status("VmRSS")
    read_parts(opened, parts, threads=4)
    assert status("VmHWM") - before < 10 * MEGA
    assert not any(part.memory.any() for part in parts)


# --- faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "nbytes", "says"),
    [
        (((0, 4),), 80, r"region \(\(0, 4\),\) is not inside the shape \[4, 10\]"),
        (((0, 4), (0, 10), (0, 1)), 80, "not inside the shape"),
        (((0, 5), (0, 10)), 100, "not inside the shape"),
        (((-1, 4), (0, 10)), 100, "not inside the shape"),
        (((3, 2), (0, 10)), 0, "not inside the shape"),
        (((0, 4), (0, 10)), 79, "takes 80 bytes of memory, not 79"),
        (((0, 4), (0, 0)), 1, "takes 0 bytes of memory, not 1"),
    ],
)
def test_bad_regions(region, nbytes, says, tmp_path, reads):
    checkpoint = Checkpoint(tmp_path, {"w": (BF16, (4, 10))})
    with pytest.raises(ValueError, match=f"tensor 'w': .*{says}"):
        read_parts(checkpoint.table, [Part("w", region, np.empty(nbytes, np.uint8))])
    assert not reads


def test_bad_memory(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"w": (BF16, (4, 10))})
    frozen = np.empty(80, np.uint8)
    frozen.flags.writeable = False
    for memory in (np.empty(80, np.int8), np.empty(160, np.uint8)[::2], frozen):
        with pytest.raises(ValueError, match="'w'.*uint8"):
            read_parts(checkpoint.table, [Part("w", ((0, 4), (0, 10)), memory)])
    with pytest.raises(KeyError, match="nothing"):
        read_parts(checkpoint.table, [Part("nothing", (), np.empty(1, np.uint8))])


@pytest.mark.parametrize("counts", [(8, 1), (1, 8)])
def test_file_cut_after_opening(counts, tmp_path):
    tensors = {"a": (BF16, (4, 8)), "w": (BF16, (64, 4096)), "f": (DType.float4_e2m1fn, (16, 64))}
    checkpoint = Checkpoint(tmp_path, tensors)
    path = checkpoint.paths[0]
    for name in ("f", "w"):
        entry = checkpoint.table.entries[name]
        os.truncate(path, entry.offset + entry.nbytes - 1)
        with pytest.raises(CheckpointTruncatedError) as caught:
            read_parts(checkpoint.table, shards(checkpoint, name, counts))
        assert (caught.value.path, caught.value.tensor) == (str(path), name)
        assert caught.value.offset == entry.offset


def test_file_written_to_after_opening(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"a": (BF16, (4, 8))}, {"b": (BF16, (4, 8))})
    os.utime(checkpoint.paths[1], ns=(1, 1))
    parts = shards(checkpoint, "a", (1, 2))
    read_parts(checkpoint.table, parts)  # of the other file
    with pytest.raises(CheckpointChangedError) as caught:
        read_parts(checkpoint.table, parts + shards(checkpoint, "b", (1, 2)))
    assert caught.value.path == str(checkpoint.paths[1])


@pytest.mark.parametrize("counts", [(4, 1), (1, 4)])
def test_boolean_that_is_neither_0_nor_1(counts, tmp_path, bounds):
    checkpoint = Checkpoint(tmp_path, {"a": (BF16, (5,)), "flag": (DType.bool, (16, 2048))})
    entry = checkpoint.table.entries["flag"]
    at = entry.offset + 13 * 2048 + 1900
    with open(checkpoint.paths[0], "r+b") as file:
        file.seek(at)
        file.write(b"\7")
    status = os.stat(checkpoint.paths[0])
    checkpoint.table.files[0].stat = status  # as if it had always been so
    with pytest.raises(CheckpointFormatError) as caught:
        read_parts(checkpoint.table, shards(checkpoint, "flag", counts))
    assert (caught.value.tensor, caught.value.offset, caught.value.found) == ("flag", at, 7)
    assert caught.value.path == str(checkpoint.paths[0])
    read_parts(checkpoint.table, shards(checkpoint, "flag", counts, [0, 1]))


def test_error_of_the_system_in_a_thread_names_the_tensor(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path, {"a": (BF16, (5,)), "w": (BF16, (4096, 4096))})
    parts = shards(checkpoint, "w", (1, 8)) + shards(checkpoint, "a", (1,))
    bad, real = checkpoint.table.entries["w"].offset + 20 * MEGA, os.preadv

    def preadv(fd, views, offset):
        if offset <= bad < offset + len(views[0]):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(CheckpointError, match="EIO") as caught:
        read_parts(checkpoint.table, parts, threads=4)
    assert (caught.value.tensor, caught.value.path) == ("w", str(checkpoint.paths[0]))
    monkeypatch.undo()
    read_parts(checkpoint.table, parts, threads=4)  # and the table is still good
    checkpoint.check(parts)


def test_closed_table(tmp_path):
    checkpoint = Checkpoint(tmp_path, {"w": (BF16, (4, 10)), "s": (BF16, ())})
    checkpoint.table.close()
    for part in (
        checkpoint.part("w", (0, 4), (2, 3)),
        checkpoint.part("s"),
        checkpoint.part("w", (0, 4), (2, 2)),
    ):
        with pytest.raises(CheckpointError, match="closed"):
            read_parts(checkpoint.table, [part])
