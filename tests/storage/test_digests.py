"""maxjax_digests.json: read strictly, and compared with what is read, however it is read."""

import itertools
import json
import logging
import os
import zlib
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointChangedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
    UserInputError,
)
from maxjax.graph.weights import load_weights
from maxjax.storage import Limits, OpenFile, aligned_empty, checksums, open_checkpoint, table
from maxjax.storage import checksums as checking
from maxjax.storage import files as parallel
from maxjax.storage import parts as regions
from maxjax.storage.boxes import count, whole
from maxjax.storage.checksums import covers, crc32_of_boxes
from maxjax.storage.digests import NAME, Digests, Record, parse, read_digests, to_bytes
from maxjax.storage.entry import Checksum, Coding, TensorEntry
from maxjax.storage.files import open_regular
from maxjax.storage.parts import Part, read_parts
from maxjax.storage.table import TensorTable
from maxjax.storage.verify import verify as verified

RNG = np.random.default_rng(3)
ARRAYS = {
    "wide": RNG.random((40, 600), "f4"),
    "rows": RNG.integers(0, 99, (700, 9), "i2"),
    "half": RNG.random((3, 50, 70)).astype(ml_dtypes.bfloat16),
    "flags": RNG.integers(0, 2, (50, 60)).astype(bool),
    "scalar": np.array(3.5, "f4"),
    "empty": np.zeros((0, 4), "f4"),
}
FILE = "model.safetensors"


def crcs(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    return {name: zlib.crc32(array.tobytes()) for name, array in arrays.items()}


def save(folder: Path, arrays: dict[str, np.ndarray] = ARRAYS, file: str = FILE) -> Path:
    """A safetensors file and its digests."""
    path = folder / file
    safetensors.numpy.save_file(arrays, path)
    record = Record(path.stat().st_size, crcs(arrays))
    (folder / NAME).write_bytes(to_bytes({file: [record]}))
    return path


def place(path: Path, name: str) -> tuple[int, int]:
    with open_checkpoint(path, verify=False) as opened:
        entry = opened.entries[name]
        return entry.offset, entry.nbytes


def flip(path: Path, at: int, bit: int = 3) -> None:
    """Changes a bit, and leaves the file as old as it was."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 1 << bit
        file.seek(at)
        file.write(bytes([byte]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """So that these tests are the same on a machine without the compiled function."""
    monkeypatch.setattr(checking, "is_fast", lambda: True)


@pytest.fixture(params=["as it is", "small"])
def bounds(request, monkeypatch):
    if request.param == "small":
        monkeypatch.setattr(parallel, "PARALLEL_BYTES", 1)
        monkeypatch.setattr(table, "SMALL_BYTES", 256)
        for name, value in {
            "BLOCK_BYTES": 3000, "SCRATCH_BYTES": 400, "DIRECT_BYTES": 240, "SHORT_BYTES": 5,
            "HOLE_BYTES": 30,
        }.items():  # fmt: skip
            monkeypatch.setattr(regions, name, value)


# --- reading whole tensors ----------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["auto", True, False])
def test_sound(verify, tmp_path, bounds):
    with open_checkpoint(save(tmp_path), verify=verify) as opened:
        for _ in range(2):
            for name, array in opened.read_many().items():
                np.testing.assert_array_equal(array, ARRAYS[name], strict=True)
        assert {one.checksum is None for one in opened.entries.values()} == {verify is False}
        left = opened.checks.unchecked(opened.entries.values())
        assert not left


@pytest.mark.parametrize("name", [name for name, array in ARRAYS.items() if array.size])
def test_every_byte_counts(name, tmp_path, bounds):
    path = save(tmp_path)
    start, nbytes = place(path, name)
    for at in {*range(start, start + nbytes, 1999), start + nbytes - 1}:
        flip(path, at)
        for names in (None, [name]):
            with open_checkpoint(path) as opened:
                with pytest.raises(CheckpointCorruptError) as caught:
                    opened.read_many(names)
                error = caught.value
                assert (error.tensor, error.path, error.offset) == (name, str(path), start)
                content = zlib.crc32(path.read_bytes()[start : start + nbytes])
                assert error.expected == f"CRC-32 {crcs(ARRAYS)[name]:08x}"
                assert error.found == f"{content:08x}"
                assert str(tmp_path / NAME) in str(error) and "verify=False" in str(error)
                others = [other for other in ARRAYS if other != name]
                assert list(opened.read_many(others)) == others
        with open_checkpoint(path, verify=False) as opened:
            if name != "flags":
                opened.read_many()
        flip(path, at)
    with open_checkpoint(path) as opened:
        opened.read_many()


def test_small_tensors_are_still_read_together(tmp_path, monkeypatch):
    arrays = {f"{k:03}": np.full(5, k, "i4") for k in range(300)}
    reads, real = [], OpenFile.pread_some
    path = save(tmp_path, arrays)
    monkeypatch.setattr(
        OpenFile, "pread_some", lambda self, *a, **k: reads.append(1) or real(self, *a, **k)
    )
    with open_checkpoint(path) as opened:
        reads.clear()
        opened.read_many()
        assert len(reads) == 1 and not opened.checks.unchecked(opened.entries.values())
    flip(path, place(path, "123")[0])
    with open_checkpoint(path) as opened, pytest.raises(CheckpointCorruptError, match="'123'"):
        opened.read_many()


def test_a_flag_that_is_none_although_its_checksum_agrees(tmp_path, bounds):
    path = save(tmp_path)
    start, nbytes = place(path, "flags")
    with open(path, "r+b") as file:
        file.seek(start + 2001)
        file.write(b"\x07")
    data = path.read_bytes()
    sums = crcs(ARRAYS) | {"flags": zlib.crc32(data[start : start + nbytes])}
    (tmp_path / NAME).write_bytes(to_bytes({FILE: [Record(len(data), sums)]}))
    for verify in ("auto", True, False):
        with open_checkpoint(path, verify=verify) as opened:
            with pytest.raises(CheckpointFormatError, match="'flags'.*boolean") as caught:
                opened.read_many()
            assert caught.value.offset == start + 2001
            with pytest.raises(CheckpointFormatError, match="'flags'.*boolean"):
                read_parts(opened, halves("flags", 1)[0])
            with pytest.raises(CheckpointFormatError, match="'flags'.*boolean"):
                verified(opened)


def test_a_file_written_to_meanwhile_is_not_called_corrupt(tmp_path):
    path = save(tmp_path)
    with open_checkpoint(path) as opened:
        flip(path, place(path, "wide")[0])
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointChangedError):
            opened.read("wide")


def test_gguf(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = RNG.integers(0, 255, (16, 144), np.uint8)
    writer.add_tensor("f", ARRAYS["wide"])
    writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    sums = {"f": zlib.crc32(ARRAYS["wide"].tobytes()), "q": zlib.crc32(blocks.tobytes())}
    (tmp_path / NAME).write_bytes(to_bytes({"m.gguf": [Record(path.stat().st_size, sums)]}))
    with open_checkpoint(path) as opened:
        assert set(opened.read_many()) == {"f", "q"}
        assert not opened.checks.unchecked(opened.entries.values())
    start, nbytes = place(path, "q")
    flip(path, start + nbytes - 1)
    with open_checkpoint(path) as opened, pytest.raises(CheckpointCorruptError, match="'q'"):
        opened.read_many()


def test_float4_two_values_a_byte(tmp_path):
    """A coding reads it; the sum is of the file's bytes."""
    packed = RNG.integers(0, 255, 30_000, np.uint8)
    header = json.dumps({"w": {"dtype": "F4", "shape": [300, 200], "data_offsets": [0, 30_000]}})
    data = len(header).to_bytes(8, "little") + header.encode() + packed.tobytes()
    path = tmp_path / FILE
    path.write_bytes(data)
    record = Record(len(data), {"w": zlib.crc32(packed.tobytes())})
    (tmp_path / NAME).write_bytes(to_bytes({FILE: [record]}))
    for damaged in (False, True):
        if damaged:
            flip(path, len(data) - 1)
        for read in (
            lambda opened: opened.read("w"),
            lambda opened: read_parts(opened, [part("w", ((0, 300), (0, 200)), 1)]),
            lambda opened: read_parts(
                opened, [part("w", ((k, k + 100), (0, 200)), 1) for k in (0, 100, 200)]
            ),
        ):
            with open_checkpoint(path) as opened:
                assert opened.entries["w"].coding is not None
                if damaged:
                    with pytest.raises(CheckpointCorruptError, match="'w'"):
                        read(opened)
                else:
                    read(opened)
                    assert not opened.checks.unchecked(opened.entries.values())
        # By columns a coding reads each row by itself: only when it must be.
        columns = [part("w", ((0, 300), (k, k + 100)), 1) for k in (0, 100)]
        with open_checkpoint(path) as opened:
            read_parts(opened, columns)
            assert opened.checks.unchecked(opened.entries.values())
        with open_checkpoint(path, verify=True) as opened:
            if damaged:
                with pytest.raises(CheckpointCorruptError, match="'w'"):
                    read_parts(opened, columns)
            else:
                read_parts(opened, columns)


# --- reading parts ------------------------------------------------------------------------------


def part(name: str, region, itemsize: int) -> Part:
    return Part(name, region, aligned_empty(count(region) * itemsize))


def cut(name: str, counts: tuple[int, ...]) -> list[Part]:
    array = ARRAYS[name]
    spans = [
        [(size * i // n, size * (i + 1) // n) for i in range(n)]
        for size, n in zip(array.shape, counts, strict=True)
    ]
    return [part(name, region, array.itemsize) for region in itertools.product(*spans)]


def halves(name: str, axis: int) -> list[list[Part]]:
    counts = tuple(2 if k == axis else 1 for k in range(ARRAYS[name].ndim))
    both = cut(name, counts)
    return [both, both[:1], both[1:]]


CUTS = {
    "wide": [(1, 1), (8, 1), (1, 8), (4, 2), (40, 1), (1, 600)],
    "rows": [(1, 1), (8, 1), (1, 9), (3, 3)],
    "half": [(1, 1, 1), (3, 1, 1), (1, 5, 1), (1, 1, 7), (3, 2, 2)],
    "flags": [(1, 1), (2, 1), (1, 2), (5, 6)],
    "scalar": [()],
}
CASES = [(name, counts) for name, several in CUTS.items() for counts in several]


@pytest.mark.sampled
@pytest.mark.parametrize("verify", ["auto", True])
@pytest.mark.parametrize(("name", "counts"), CASES, ids=str)
def test_parts_that_are_all_of_it(name, counts, verify, tmp_path, bounds, monkeypatch):
    """However it is cut the sum is compared, and nothing is read for it."""
    path = save(tmp_path)
    reads, real = [], OpenFile.pread_some

    def pread_some(self, views, offset, **where):
        reads.append(sum(map(len, views)))
        return real(self, views, offset, **where)

    start, nbytes = place(path, name)
    parts = cut(name, counts)
    with open_checkpoint(path, verify=verify) as opened:
        monkeypatch.setattr(OpenFile, "pread_some", pread_some)
        read_parts(opened, parts)
        assert sum(reads) == nbytes
        assert not opened.checks.unchecked([opened.entries[name]])
    # In any order, and some of it twice; of hundreds of parts each place in one of the orders.
    orders = (parts, parts[::-1], [*parts, *cut(name, counts)])
    for number, at in enumerate((start, start + nbytes // 2, start + nbytes - 1)):
        flip(path, at)
        for wanted in orders if len(parts) < 100 else orders[number : number + 1]:
            with open_checkpoint(path, verify=verify) as opened:
                with pytest.raises(CheckpointCorruptError, match=f"'{name}'"):
                    read_parts(opened, wanted)
        flip(path, at)


@pytest.mark.parametrize("seed", range(6))
def test_overlapping_parts(seed, tmp_path, bounds):
    """Random regions, and two halves that make it whole."""
    rng = np.random.default_rng(seed)
    path = save(tmp_path)
    name = ["wide", "rows"][seed % 2]
    shape, itemsize = ARRAYS[name].shape, ARRAYS[name].itemsize
    several = halves(name, seed // 2 % 2)[0]
    for _ in range(4):
        region = tuple(tuple(sorted(map(int, rng.integers(0, n + 1, 2)))) for n in shape)
        several.append(part(name, region, itemsize))
    order = [several[k] for k in rng.permutation(len(several))]
    flip(path, place(path, name)[0] + int(rng.integers(count(whole(shape)))) * itemsize)
    with open_checkpoint(path) as opened, pytest.raises(CheckpointCorruptError):
        read_parts(opened, order)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_half_is_compared_only_when_it_must_be(axis, tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "GAP_BYTES", 1000)
    path = save(tmp_path)
    for half in halves("wide", axis)[1:]:
        with open_checkpoint(path) as opened:
            read_parts(opened, half)
            assert len(opened.checks.unchecked([opened.entries["wide"]])) == 1
    start, nbytes = place(path, "wide")
    flip(path, start + nbytes - 1)
    for half in halves("wide", axis)[1:]:
        with open_checkpoint(path) as opened:
            read_parts(opened, half)
        with open_checkpoint(path, verify=True) as opened:
            with pytest.raises(CheckpointCorruptError, match="'wide'"):
                read_parts(opened, half)


def test_a_little_more_is_read_for_it(tmp_path):
    """The rest of a small tensor, as the header of an array in an archive."""
    path = save(tmp_path)
    few = part("wide", ((3, 4), (5, 60)), 4)
    for name, region in (("rows", ((1, 2), (3, 4))), ("half", ((0, 1), (1, 2), (0, 70)))):
        start, nbytes = place(path, name)
        flip(path, start + nbytes - 1)
        with open_checkpoint(path) as opened, pytest.raises(CheckpointCorruptError):
            read_parts(opened, [part(name, region, 2)])
    with open_checkpoint(path) as opened:
        read_parts(opened, [few])
        assert opened.checks.unchecked([opened.entries["wide"]])


def test_as_many_bytes_as_all_that_are_not_all(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "GAP_BYTES", 1000)
    path = save(tmp_path)
    flip(path, place(path, "wide")[0])
    both = [part("wide", ((20, 40), (0, 600)), 4) for _ in range(2)]
    with open_checkpoint(path) as opened:
        read_parts(opened, both)
        assert opened.checks.unchecked([opened.entries["wide"]])


def test_without_the_compiled_function_only_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "is_fast", lambda: False)
    path = save(tmp_path)
    flip(path, place(path, "wide")[0])
    with open_checkpoint(path) as opened:
        opened.read_many()
    with open_checkpoint(path, verify=True) as opened, pytest.raises(CheckpointCorruptError):
        opened.read_many()
    np.savez(tmp_path / "m.npz", a=ARRAYS["wide"])
    with open_checkpoint(tmp_path / "m.npz") as opened:  # an archive's own sums always
        opened.read_many()
        assert opened.checks.matched


# --- arrays whose values have the sum -----------------------------------------------------------


class Stored(Coding):
    """As of orbax: the values come from elsewhere, and the file's bytes mean nothing."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.reads = 0

    def read(self, file, entry, parts) -> int:
        for box, into in parts:
            self.reads += 1
            into[...] = self.array[tuple(slice(*span) for span in box)]
        return 0


def values_table(folder: Path, array: np.ndarray, crc: int) -> TensorTable:
    path = folder / "file"
    path.write_bytes(b"x")
    checksum = Checksum("model/w", 0, array.nbytes, crc, (5,), "d.json", of_values=True)
    dtype = DType.of(array.dtype)
    entry = TensorEntry(
        "w", dtype, array.shape, 0, 0, array.nbytes, Stored(array), checksum=checksum
    )
    return TensorTable("orbax", [open_regular(path)], {"w": entry})


@pytest.mark.parametrize("name", ["wide", "half"])
def test_values(name, tmp_path, monkeypatch):
    monkeypatch.setattr(checking, "VALUES_BYTES", 999)
    array = ARRAYS[name]
    good = zlib.crc32(array.tobytes())
    shape, itemsize = array.shape, array.itemsize
    edge = (10, *shape[1:])[: len(shape)]
    reads = {
        "whole": lambda opened: opened.read_many(),
        "columns": lambda opened: read_parts(
            opened, [Part("w", p.region, p.memory) for p in cut(name, CUTS[name][2])]
        ),
        "check": lambda opened: opened.check(opened.entries.values()),
        "verify": verified,
    }
    for read in reads.values():
        with values_table(tmp_path, array, good) as opened:
            read(opened)
            assert opened.checks.matched
        with values_table(tmp_path, array, good ^ 1) as opened:
            with pytest.raises(CheckpointCorruptError, match="'w'.*model/w") as caught:
                read(opened)
            assert caught.value.expected == f"CRC-32 {good ^ 1:08x} or 00000005"
            assert caught.value.found == f"{good:08x}"
            assert "d.json" in str(caught.value)
    few = part("w", tuple((0, min(2, n)) for n in edge), itemsize)
    with values_table(tmp_path, array, good ^ 1) as opened:
        read_parts(opened, [few])
        opened.verify = True
        with pytest.raises(CheckpointCorruptError):
            read_parts(opened, [few])


@pytest.mark.parametrize("shape", [(), (7,), (5, 0), (13, 9), (4, 3, 5), (2, 300, 500)], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "u1", ml_dtypes.bfloat16, ">i8"], ids=str)
def test_the_sum_of_parts_of_an_array(shape, dtype):
    rng = np.random.default_rng(len(shape))
    array = rng.integers(0, 99, shape).astype(dtype)
    wanted = zlib.crc32(array.astype(array.dtype.newbyteorder("<")).tobytes())
    assert crc32_of_boxes(shape, [(whole(shape), array)]) == wanted
    for counts in itertools.product((1, 2, 3), repeat=len(shape)):
        spans = [
            [(size * i // n, size * (i + 1) // n) for i in range(n)]
            for size, n in zip(shape, counts, strict=True)
        ]
        parts = []
        for box in itertools.product(*spans):
            piece = array[tuple(slice(*span) for span in box)]
            parts.append((box, np.asfortranarray(piece) if len(parts) % 2 else piece.copy()))
        rng.shuffle(parts)
        assert covers(shape, parts)
        assert crc32_of_boxes(shape, parts) == wanted
        if (
            len(parts) > 1
            and 0 not in shape
            and all(n <= s for n, s in zip(counts, shape, strict=True))
        ):
            assert not covers(shape, parts[1:])


def test_covering_against_a_count_of_cells():
    rng = np.random.default_rng(0)
    for _ in range(400):
        shape = tuple(map(int, rng.integers(1, 6, rng.integers(1, 4))))
        seen, parts = np.zeros(shape, bool), []
        for _ in range(rng.integers(1, 9)):
            box = tuple(
                (int(a), int(b)) for a, b in (sorted(rng.integers(0, n + 1, 2)) for n in shape)
            )
            seen[tuple(slice(*span) for span in box)] = True
            parts.append((box, seen))
        assert covers(shape, parts) == seen.all()


# --- the file -----------------------------------------------------------------------------------


def test_what_is_written_is_read():
    files = {
        "m.safetensors": (Record(10, {"a": 0, "é'\n": 2**32 - 1}), Record(12, {}, (8, 7))),
        ".": (Record(0, {"model/a.b": 7}),),
    }
    assert parse(to_bytes(files)) == Digests(files)
    assert to_bytes(dict(reversed(files.items()))) == to_bytes(files)


def test_the_format_is_as_documented(tmp_path):
    text = """{"version": 1, "algorithm": "crc32",
        "files": {"model.safetensors": [{"size": 123, "tensors": {"w": "89abcdef"}}]}}"""
    (tmp_path / NAME).write_text(text)
    digests = read_digests(tmp_path)
    assert digests is not None
    assert digests.of("model.safetensors", 123) == {"w": (0x89ABCDEF,)}
    assert digests.of("model.safetensors", 124) == digests.of("w", 123) == {}
    assert json.loads(to_bytes(digests.files)) == json.loads(text)


def test_two_records_while_a_file_is_replaced(tmp_path):
    new = {"a": np.arange(9.0), "b": np.ones(4)}
    old = {"a": np.arange(9.0) + 1, "b": np.ones(4)}
    path = save(tmp_path, new)
    size = path.stat().st_size
    records = [Record(size, crcs(old)), Record(size, crcs(new)), Record(size + 1, {"a": 1})]
    (tmp_path / NAME).write_bytes(to_bytes({FILE: records}))
    for content in (new, old):
        safetensors.numpy.save_file(content, path)
        with open_checkpoint(path) as opened:
            np.testing.assert_array_equal(opened.read("a"), content["a"])
            assert not opened.checks.unchecked([opened.entries["a"]])
    flip(path, place(path, "a")[0])
    with open_checkpoint(path) as opened, pytest.raises(CheckpointCorruptError) as caught:
        opened.read("a")
    assert caught.value.expected == f"CRC-32 {crcs(old)['a']:08x} or {crcs(new)['a']:08x}"


def with_header(path: Path) -> int:
    """Adds the header's sum to the digests; gives the header's length."""
    data = path.read_bytes()
    nbytes = 8 + int.from_bytes(data[:8], "little")
    digests = read_digests(path.parent)
    assert digests is not None
    ((record,),) = digests.files.values()
    record = Record(record.size, record.tensors, (nbytes, zlib.crc32(data[:nbytes])))
    (path.parent / NAME).write_bytes(to_bytes({path.name: [record]}))
    return nbytes


def test_every_flip_in_a_header_is_found(tmp_path):
    path = save(tmp_path, {"wide": ARRAYS["wide"], "b": np.ones(3, bool)})
    found = set()
    for at in range(with_header(path)):
        flip(path, at, at % 8)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        found.add(type(caught.value))
        if type(caught.value) is CheckpointCorruptError:
            assert caught.value.path == str(path) and NAME in str(caught.value)
        flip(path, at, at % 8)
    assert CheckpointCorruptError in found
    with open_checkpoint(path) as opened:
        opened.read_many()


def test_the_header_tells_which_of_two_records_it_is(tmp_path):
    path = save(tmp_path, {"new": np.arange(9.0)})
    with_header(path)
    digests = read_digests(tmp_path)
    assert digests is not None
    (new,) = digests.files[FILE]
    old = Record(new.size, {"new": 5, "old": 6}, (20, 77))
    (tmp_path / NAME).write_bytes(to_bytes({FILE: [old, new]}))
    with open_checkpoint(path) as opened:
        checksum = opened.entries["new"].checksum
        assert checksum is not None and checksum.also == ()
        opened.read_many()
    flip(path, 12)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_a_header_longer_than_its_file(tmp_path):
    path = save(tmp_path)
    record = Record(path.stat().st_size, {}, (path.stat().st_size + 1, 0))
    (tmp_path / NAME).write_bytes(to_bytes({FILE: [record]}))
    with pytest.raises(CheckpointFormatError, match="header"):
        open_checkpoint(path)


def test_another_program_wrote_another_size(tmp_path, caplog):
    path = save(tmp_path)
    safetensors.numpy.save_file({"wide": ARRAYS["wide"] + 1}, path)
    with caplog.at_level(logging.INFO, "maxjax"), open_checkpoint(path, verify=True) as opened:
        assert opened.entries["wide"].checksum is None
        np.testing.assert_array_equal(opened.read("wide"), ARRAYS["wide"] + 1)
    assert "records another size" in caplog.text


def test_a_file_that_is_not_listed_and_one_tensor_that_is_not(tmp_path):
    save(tmp_path)
    (tmp_path / FILE).rename(tmp_path / "other.safetensors")
    with open_checkpoint(tmp_path / "other.safetensors") as opened:
        assert all(entry.checksum is None for entry in opened.entries.values())
    path = save(tmp_path)
    record = Record(path.stat().st_size, {"wide": 1, "nowhere": 2})
    (tmp_path / NAME).write_bytes(to_bytes({FILE: [record]}))
    with open_checkpoint(path) as opened:
        names = {name for name, entry in opened.entries.items() if entry.checksum}
        assert names == {"wide"}


def test_several_files_in_several_directories(tmp_path):
    paths = []
    for k in range(3):
        (tmp_path / f"{k}").mkdir()
        paths.append(save(tmp_path / f"{k}", {f"w{k}": np.full(9, k)}, f"{k}.safetensors"))
    with open_checkpoint(paths) as opened:
        sources = {one.checksum and one.checksum.source for one in opened.entries.values()}
        assert sources == {str(tmp_path / f"{k}" / NAME) for k in range(3)}
        opened.read_many()
    flip(paths[1], paths[1].stat().st_size - 1)
    with open_checkpoint(paths) as opened, pytest.raises(CheckpointCorruptError, match="'w1'"):
        opened.read_many()


def test_archives_keep_their_own(tmp_path):
    np.savez(tmp_path / "m.npz", a=np.ones(5))
    size = (tmp_path / "m.npz").stat().st_size
    (tmp_path / NAME).write_bytes(to_bytes({"m.npz": [Record(size, {"a": 1})]}))
    with open_checkpoint(tmp_path / "m.npz") as opened:
        checksum = opened.entries["a"].checksum
        assert checksum is not None and checksum.source is None
        opened.read("a")


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"version": True}, {"algorithm": "xxh3"}, {"version": None}], ids=str
)
def test_a_later_version_is_left_alone(change, tmp_path, caplog):
    path = save(tmp_path)
    document = json.loads((tmp_path / NAME).read_bytes()) | change
    (tmp_path / NAME).write_text(json.dumps(document | {"files": "anything"}))
    with caplog.at_level(logging.INFO, "maxjax"), open_checkpoint(path) as opened:
        opened.read_many()
        assert opened.entries["wide"].checksum is None
    assert "is not supported" in caplog.text


BAD = {
    "no JSON": b"\x00\x01",
    "cut": b'{"version": 1, "algor',
    "a list": b"[]",
    "not UTF-8": b'{"version": "\xff"}',
    "key twice": b'{"version": 1, "version": 1}',
    "no files": {},
    "files a list": {"files": []},
    "records an object": {"files": {"m": {}}},
    "no records": {"files": {"m": []}},
    "many records": {"files": {"m": [{"size": 1, "tensors": {}}] * 9}},
    "record a number": {"files": {"m": [1]}},
    "no size": {"files": {"m": [{"tensors": {}}]}},
    "size true": {"files": {"m": [{"size": True, "tensors": {}}]}},
    "size negative": {"files": {"m": [{"size": -1, "tensors": {}}]}},
    "size 1.5": {"files": {"m": [{"size": 1.5, "tensors": {}}]}},
    "tensors a list": {"files": {"m": [{"size": 1, "tensors": []}]}},
    "header a number": {"files": {"m": [{"size": 1, "tensors": {}, "header": 1}]}},
    "header of one": {"files": {"m": [{"size": 1, "tensors": {}, "header": [1]}]}},
    "header true": {"files": {"m": [{"size": 1, "tensors": {}, "header": [True, "00000000"]}]}},
    "header negative": {"files": {"m": [{"size": 1, "tensors": {}, "header": [-1, "00000000"]}]}},
    "crc a number": {"files": {"m": [{"size": 1, "tensors": {"w": 5}}]}},
    "crc short": {"files": {"m": [{"size": 1, "tensors": {"w": "abc"}}]}},
    "crc upper": {"files": {"m": [{"size": 1, "tensors": {"w": "89ABCDEF"}}]}},
    "crc with a line": {"files": {"m": [{"size": 1, "tensors": {"w": "89abcdef\n"}}]}},
    "crc in other digits": {"files": {"m": [{"size": 1, "tensors": {"w": "１２３４５６７８"}}]}},
}


@pytest.mark.parametrize("case", BAD)
def test_a_broken_one_is_refused_and_can_be_passed_over(case, tmp_path):
    path = save(tmp_path)
    bad = BAD[case]
    if isinstance(bad, dict):
        bad = json.dumps({"version": 1, "algorithm": "crc32"} | bad).encode()
    (tmp_path / NAME).write_bytes(bad)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    error = caught.value
    assert error.path == str(tmp_path / NAME) and "verify=False" in str(error)
    assert "\n" not in str(error) and error.__class__.__name__ in (
        "CheckpointFormatError",
        "CheckpointTruncatedError",
    )
    with open_checkpoint(path, verify=False) as opened:
        opened.read_many()


def test_limits(tmp_path):
    path = save(tmp_path)
    with pytest.raises(CheckpointLimitError) as caught:
        open_checkpoint(path, limits=Limits(json_bytes=20))
    assert caught.value.path == str(tmp_path / NAME)
    deep = b'{"version": 1, "algorithm": "crc32", "files": ' + b"[" * 9999
    (tmp_path / NAME).write_bytes(deep)
    with pytest.raises(CheckpointLimitError):
        open_checkpoint(path)


def test_a_directory_of_that_name(tmp_path):
    path = save(tmp_path)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    with pytest.raises(CheckpointFormatError, match="a directory"):
        open_checkpoint(path)


def test_every_flip_in_the_file_itself(tmp_path):
    """It is refused, or says nothing, or says that a tensor is wrong; it never changes a value."""
    path = save(tmp_path, {"w": ARRAYS["rows"]})
    good = (tmp_path / NAME).read_bytes()
    kinds = set()
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        (tmp_path / NAME).write_bytes(bad)
        try:
            with open_checkpoint(path) as opened:
                np.testing.assert_array_equal(opened.read("w"), ARRAYS["rows"])
                kinds.add(None)
        except CheckpointError as error:
            kinds.add(type(error))
    assert kinds >= {None, CheckpointCorruptError, CheckpointFormatError}


# --- the ways in --------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["yes", None, 1, 0, "True"], ids=repr)
def test_another_word_for_verify(verify, tmp_path):
    path = save(tmp_path)
    with pytest.raises(UserInputError, match="verify must be"):
        open_checkpoint(path, verify=verify)


def test_weights(tmp_path):
    path = save(tmp_path)
    flip(path, place(path, "wide")[0])
    for given in (path, [path], tmp_path):
        with load_weights(given) as weights, pytest.raises(CheckpointCorruptError):
            np.asarray(weights["wide"].data())
        with load_weights(given, verify=False) as weights:
            np.asarray(weights["wide"].data())


def test_verify_says_of_how_many(tmp_path):
    path = save(tmp_path)
    with open_checkpoint(path) as opened:
        found = verified(opened)
    # Of an empty one there is nothing to compare.
    assert (found.tensors, found.digests) == (6, 6) and found.checksums == 6
    flip(path, place(path, "half")[0])
    with open_checkpoint(path) as opened, pytest.raises(CheckpointCorruptError, match="'half'"):
        verified(opened)
