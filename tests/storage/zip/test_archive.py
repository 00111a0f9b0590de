"""Zip archives against the zipfile module, and deflated members against zlib."""

import io
import random
import struct
import zipfile
import zlib
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointLimitError,
)
from maxjax.storage import open_regular
from maxjax.storage.boxes import extents, in_order
from maxjax.storage.entry import Checksum, TensorEntry
from maxjax.storage.zip import deflate
from maxjax.storage.zip.archive import Archive, read_directory
from maxjax.storage.zip.deflate import Deflated
from tests.oracles.recorded import torch
from tests.storage.mutate import mutations, rewrite
from tests.storage.numpy.corpus import Item, flipped, pack
from tests.storage.numpy.corpus import deflate as deflated
from tests.storage.pytorch.oracle import file_of

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
RANDOM = random.Random(0).randbytes(3000)
MEMBERS = {"a": b"", "b/c.txt": b"some text " * 500, "重み": RANDOM, "d" * 300: b"x"}


class Pipe:
    """What can only be written to: sizes and checksums come behind the data."""

    def __init__(self):
        self.data = bytearray()

    def write(self, data) -> int:
        self.data += data
        return len(data)

    def flush(self) -> None:
        pass


def zipped(method: int = STORED, *, wide: bool = False, piped: bool = False,
           comment: bytes = b"", members: dict[str, bytes] = MEMBERS) -> bytes:  # fmt: skip
    """An archive by the zipfile module; ``wide`` forces sizes of 64 bits."""
    pipe, buffer = Pipe(), io.BytesIO()
    with zipfile.ZipFile(pipe if piped else buffer, "w", method) as archive:  # type: ignore[arg-type]
        archive.comment = comment
        for name, data in members.items():
            with archive.open(name, "w", force_zip64=wide) as file:
                file.write(data)
    return bytes(pipe.data) if piped else buffer.getvalue()


def opened(directory: Path, content: bytes, **options) -> Archive:
    path = directory / "m.zip"
    rewrite(path, content)
    return read_directory(open_regular(path), **options)


def assert_equals_zipfile(archive: Archive, content: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(content)) as theirs:
        assert list(archive.members) == theirs.namelist()
        for info in theirs.infolist():
            member = archive.members[info.filename]
            assert (member.method, member.crc, member.compressed, member.size) == (
                info.compress_type, info.CRC, info.compress_size, info.file_size)  # fmt: skip
            data = theirs.read(info)
            assert archive.read(member, limit=member.size) == data
            assert archive.head(member, 7) == data[:7]
            raw = archive.file.pread(member.offset, member.compressed)
            assert (raw if member.method == STORED else zlib.decompress(raw, -15)) == data
            crc = archive.checksum(member)
            if member.method == STORED:
                assert crc == Checksum(info.filename, member.offset, len(data), zlib.crc32(data))
            else:
                assert crc is None


# --- good archives --------------------------------------------------------------------------


@pytest.mark.parametrize("method", [STORED, DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("piped", [False, True], ids=["", "piped"])
@pytest.mark.parametrize("comment", [b"", b"by hand", bytes(65535)], ids=["", "comment", "long"])
def test_archive_reads_as_zipfile_reads_it(method, wide, piped, comment, tmp_path):
    content = zipped(method, wide=wide, piped=piped, comment=comment)
    assert_equals_zipfile(opened(tmp_path, content), content)


@pytest.mark.parametrize("limit", ["ZIP_FILECOUNT_LIMIT", "ZIP64_LIMIT"])
@pytest.mark.parametrize("piped", [False, True], ids=["", "piped"])
def test_zip64_directory_reads_as_zipfile_reads_it(limit, piped, tmp_path, monkeypatch):
    """As for archives over 4 GiB and of over 65535 members."""
    monkeypatch.setattr(zipfile, limit, 2)
    content = zipped(STORED, piped=piped, wide=True)
    assert b"PK\6\6" in content and b"PK\6\7" in content
    assert_equals_zipfile(opened(tmp_path, content), content)


def test_appended_member_and_empty_archive(tmp_path):
    buffer = io.BytesIO(zipped())
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("later", b"more", zipfile.ZIP_DEFLATED)
    assert_equals_zipfile(opened(tmp_path, buffer.getvalue()), buffer.getvalue())
    assert opened(tmp_path, zipped(members={})).members == {}


def test_many_members(tmp_path):
    content = zipped(members={f"data/{i}": b"" for i in range(20_000)})
    archive = opened(tmp_path, content)
    assert len(archive.members) == 20_000
    assert archive.members["data/19999"].size == 0


@pytest.mark.parametrize("crc", [True, False])
def test_archive_of_torch(crc, tmp_path):
    content = file_of(lambda: {"w": torch.arange(999.0), "e": torch.ones(0)}, has_crcs=crc)
    (tmp_path / "m.zip").write_bytes(content)
    archive = read_directory(open_regular(tmp_path / "m.zip"))
    with zipfile.ZipFile(tmp_path / "m.zip") as theirs:
        assert list(archive.members) == theirs.namelist()
        for name, member in archive.members.items():
            start = theirs.getinfo(name).header_offset
            assert start < member.offset <= start + 30 + len(name) + 64
            assert (archive.checksum(member) is None) == (not crc and member.size > 0)
    weights = next(m for n, m in archive.members.items() if n.endswith("data/0"))
    assert archive.read(weights, 9999) == np.arange(999, dtype="f4").tobytes()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_data_descriptors_of_all_kinds(signed, wide, tmp_path):
    data = b"value" * 9
    sizes = struct.pack("<LQQ" if wide else "<LLL", zlib.crc32(data), len(data), len(data))
    one = Item("a", data, flags=8, local_crc=0, local_size=0, local_compressed=0,
               descriptor=b"PK\7\x08" * signed + sizes)  # fmt: skip
    archive = opened(tmp_path, pack(one, Item("b", data)))
    assert [archive.read(m, 99) for m in archive.members.values()] == [data, data]


@pytest.mark.parametrize("flags", [0, 0x800], ids=["cp437", "UTF-8"])
def test_names_that_are_not_ascii(flags, tmp_path):
    raw = "é".encode("utf-8" if flags else "cp437")
    assert list(opened(tmp_path, pack(Item(raw, b"x", flags=flags))).members) == ["é"]


# --- refused archives -----------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [b"#!/bin/sh\n", b"MZ" + bytes(70)])
def test_archive_behind_something_else_is_refused(prefix, tmp_path):
    """Other readers take a program with an archive behind it for that archive."""
    content = prefix + zipped()
    assert zipfile.ZipFile(io.BytesIO(content)).namelist()
    with pytest.raises(CheckpointFormatError, match="not a zip archive"):
        opened(tmp_path, content)


def zip64() -> bytes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 0)
        return zipped()


@pytest.mark.parametrize(
    ("sign", "at", "says"),
    [
        (b"PK\6\7", 8, "zip64"),  # where the end record is
        (b"PK\6\7", 4, "locator"),  # on which disk
        (b"PK\6\7", 16, "locator"),  # of how many
        (b"PK\6\6", 4, "zip64"),  # its length
        (b"PK\6\6", 16, "contradicts the zip64"),
        (b"PK\6\6", 24, "contradicts the zip64"),  # members
        (b"PK\6\6", 32, "contradicts the zip64"),
        (b"PK\6\6", 40, "contradicts the zip64"),  # bytes of the directory
        (b"PK\6\6", 48, "contradicts the zip64"),  # its beginning
    ],
)
def test_contradictions_of_zip64_are_refused(sign, at, says, tmp_path):
    content = zip64()
    assert_equals_zipfile(opened(tmp_path, content), content)
    with pytest.raises(CheckpointFormatError, match=says):
        opened(tmp_path, flipped(content, content.rindex(sign) + at, 2))


def test_names_in_messages(tmp_path):
    content = pack(Item("a.npy", b"x", method=9))
    with pytest.raises(CheckpointFormatError, match=r"member 'a\.npy'") as caught:
        opened(tmp_path, content)
    assert caught.value.tensor is None
    with pytest.raises(CheckpointFormatError, match="tensor 'A.NPY'"):
        opened(tmp_path, content, tensor_of=str.upper)
    with pytest.raises(CheckpointFormatError, match="not a box of weights"):
        opened(tmp_path, b"nothing known", what="a box of weights")


@pytest.mark.parametrize("method", [STORED, DEFLATED], ids=["stored", "deflated"])
@pytest.mark.parametrize("piped", [False, True], ids=["", "piped"])
def test_mutated_archives_are_refused_or_read_as_zipfile_does(method, piped, tmp_path):
    seed = 2 * method + piped
    content = zipped(method, piped=piped, wide=True, comment=b"text",
                     members={"a": b"", "b": b"text" * 20, "c": RANDOM[:90]})  # fmt: skip
    accepted = 0
    for number, damaged in enumerate(mutations(content, 500, seed=seed)):
        try:
            archive = opened(tmp_path, damaged, has_all_crcs=True)
            for member in archive.members.values():
                archive.read(member, 999)
        except CheckpointError as error:
            assert "m.zip" in str(error), number
            continue
        accepted += 1
        assert_equals_zipfile(archive, damaged)
    assert 5 < accepted < 250


# --- single members -------------------------------------------------------------------------


@pytest.mark.parametrize("method", [STORED, DEFLATED], ids=["stored", "deflated"])
def test_read_keeps_to_its_limit(method, tmp_path):
    archive = opened(tmp_path, zipped(method))
    member = archive.members["重み"]
    assert archive.read(member, 3000) == RANDOM
    with pytest.raises(CheckpointLimitError, match="at most 2999 bytes, found 3000 bytes"):
        archive.read(member, 2999)
    with pytest.raises(CheckpointLimitError, match=r"limits=maxjax.Limits\(pickle_bytes=N\)"):
        archive.read(member, 2999, "pickle_bytes")


@pytest.mark.parametrize("method", [STORED, DEFLATED], ids=["stored", "deflated"])
def test_read_compares_the_checksum(method, tmp_path):
    for crc, size in ((7, 9), (0, 9), (7, 0)):
        archive = opened(tmp_path, pack(Item("a", bytes(size), method=method, crc=crc)))
        member = archive.members["a"]
        if crc == 0:  # nobody computed it
            assert archive.crc(member) is None and archive.read(member, 9) == bytes(9)
            archive = opened(tmp_path, pack(Item("a", bytes(9), method, crc=0)), has_all_crcs=True)
        with pytest.raises(CheckpointCorruptError, match=f"CRC-32 {crc:08x}"):
            archive.read(member, 9)


@pytest.mark.parametrize("piece", [1, 5, 64, 1 << 20])
def test_pieces_join_to_what_was_deflated(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(deflate, "DECODED_BYTES", piece)
    monkeypatch.setattr(deflate, "COMPRESSED_BYTES", piece)
    path = tmp_path / "m"
    for data in (b"", b"a", bytes(5000), RANDOM, b"ab" * 700 + RANDOM[:100]):
        path.write_bytes(b"front" + deflated(data) + b"behind")
        coding, size = Deflated("m", len(data), zlib.crc32(data)), len(deflated(data))
        pieces = list(coding.pieces(open_regular(path), 5, size))
        assert b"".join(pieces) == data and all(0 < len(one) <= piece for one in pieces)
        for wrong in (Deflated("m", len(data) + 1, None), Deflated("m", len(data), 1 << 31),
                      Deflated("m", max(len(data) - 1, 0), data and None or 5)):  # fmt: skip
            with pytest.raises(CheckpointCorruptError):
                list(wrong.pieces(open_regular(path), 5, size))
        for length in (size - 1, size + 3):
            with pytest.raises(CheckpointCorruptError):
                list(coding.pieces(open_regular(path), 5, length))


def test_inflating_stops_behind_the_declared_size(tmp_path, monkeypatch):
    """However much more there is."""
    data = bytes(64 << 20)
    path = tmp_path / "m"
    path.write_bytes(deflated(data))
    made = []
    real = zlib.decompressobj

    class Counted:
        def __init__(self, bits):
            self.inner = real(bits)

        def decompress(self, data, most):
            made.append(self.inner.decompress(data, most))
            return made[-1]

        def __getattr__(self, name):
            return getattr(self.inner, name)

    monkeypatch.setattr(zlib, "decompressobj", Counted)
    with pytest.raises(CheckpointCorruptError, match="more"):
        list(Deflated("m", 10, None).pieces(open_regular(path), 0, path.stat().st_size))
    assert sum(map(len, made)) == 11


def test_entry_that_asks_for_more_than_its_member_has(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(deflated(bytes(100)))
    coding = Deflated("m", 100, None, skip=8)
    file, nbytes = open_regular(path), path.stat().st_size
    for count, fits in ((92, True), (93, False)):
        entry = TensorEntry("w", DType.uint8, (count,), 0, 0, nbytes, coding)
        part = [(((0, count),), np.ones(count, np.uint8))]
        if fits:
            assert coding.read(file, entry, part) == nbytes and not part[0][1].any()
            continue
        with pytest.raises(CheckpointCorruptError, match="1 bytes more"):
            coding.read(file, entry, part)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (3, 1, 4), (1, 1), (2, 2, 2, 2)])
def test_boxes_make_up_a_run_of_values(shape):
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for start, stop in product(range(values.size + 1), repeat=2):
        found = list(in_order(shape, start, stop))
        inside = [values[tuple(slice(*span) for span in box)] for box in found]
        assert [one.shape for one in inside] == [extents(box) for box in found]
        joined = [int(value) for one in inside for value in one.reshape(-1)]
        assert joined == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape))
