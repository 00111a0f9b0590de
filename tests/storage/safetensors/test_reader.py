"""The safetensors parser against the safetensors package, and its limits."""

import json
import random
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.numpy

from maxjax.dtype import DType
from maxjax.errors import CheckpointError, CheckpointFormatError, CheckpointLimitError
from maxjax.storage import Limits, open_safetensors
from maxjax.storage.strict_json import Text
from tests.oracles.recorded import recorded_files, torch
from tests.storage.corpus import D16, D32, GOOD, TWO, A, B, file_bytes, spec
from tests.storage.test_corpus import raw_bytes

MUTATIONS = 1000


def write(directory: Path, content: bytes) -> Path:
    path = directory / "m.safetensors"
    path.write_bytes(content)
    return path


def test_entries_say_where_the_data_lies(tmp_path):
    table = open_safetensors(write(tmp_path, file_bytes({"__metadata__": {"k": "v"}, **TWO}, D32)))
    entry = table.entries["b"]
    assert (entry.name, entry.dtype, entry.shape, entry.file) == ("b", DType.float32, (2, 2), 0)
    assert table.files[0].pread(entry.offset, entry.nbytes) == D32[16:]
    assert (table.format, table.metadata) == ("safetensors", {"k": "v"})


def test_entries_come_in_header_order(tmp_path):
    table = open_safetensors(write(tmp_path, file_bytes({"b": B, "a": A}, D32)))
    assert list(table.entries) == ["b", "a"]


def test_float4_is_two_to_a_byte_low_half_first(tmp_path):
    content = file_bytes({"a": spec("F4", [2, 2], 0, 2)}, bytes([0x21, 0xF7]))
    array = open_safetensors(write(tmp_path, content)).read("a")
    assert array.tolist() == [[0.5, 1.0], [6.0, -6.0]]


def test_float4_agrees_with_torch(tmp_path):
    path = tmp_path / "m.safetensors"

    def save() -> None:
        from safetensors.torch import load_file, save_file

        packed = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
        save_file({"a": packed.view(torch.float4_e2m1fn_x2)}, path)
        assert torch.equal(load_file(path)["a"].view(torch.uint8), packed)

    recorded_files(tmp_path, save)
    array = open_safetensors(path).read("a")
    assert array.shape == (4, 16)
    assert raw_bytes(array) == bytes(range(32))


# --- limits: each can be raised, and its message says how ---------------------------------


@pytest.mark.parametrize(
    ("content", "option", "enough"),
    [
        (GOOD, "header_bytes", 200),
        (GOOD, "tensors", 2),
        (file_bytes({"long-name": A}, D16), "name_bytes", 9),
        (file_bytes({"a": A, "b": A}, D16), "shared_bytes", 16),
        (file_bytes({"a": {**A, "x": [[[[[]]]]]}}, D16), "json_depth", 7),
    ],
)
def test_limit_can_be_raised(content, option, enough, tmp_path):
    path = write(tmp_path, content)
    tight = Limits(**{option: enough - 1 if option != "header_bytes" else 50})
    with pytest.raises(CheckpointLimitError, match=rf"limits=maxjax.Limits\({option}=N\)"):
        open_safetensors(path, limits=tight)
    loose = Limits(**{option: enough})
    assert open_safetensors(path, limits=loose).entries


def test_name_limit_counts_bytes(tmp_path, monkeypatch):
    path = write(tmp_path, file_bytes(json.dumps({"é" * 20: A}, ensure_ascii=False), D16))
    with (
        monkeypatch.context() as patch
    ):  # a search of the whole header for each name would be quadratic
        patch.delattr(Text, "where")
        assert open_safetensors(path, limits=Limits(name_bytes=40)).entries
    with pytest.raises(CheckpointLimitError, match="found 40"):
        open_safetensors(path, limits=Limits(name_bytes=39))


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
def test_offset_points_at_the_field_of_the_tensor(field, tmp_path):
    # The same words stand before it, as names and as another tensor's fields.
    header = {"dtype": spec("U8", [0], 0, 0), "shape": spec("U8", [0], 0, 0), "b": dict(A)}
    header["b"][field] = "?"
    content = file_bytes(header, D16)
    with pytest.raises(CheckpointFormatError) as caught:
        open_safetensors(write(tmp_path, content)).read("b").read("b")
    assert caught.value.tensor == "b"
    assert caught.value.offset == content.index(f'"{field}": "?"'.encode())


# --- mutations ----------------------------------------------------------------------------

NUMBERS = [0, 1, 2, 3, 8, 15, 16, 17, 31, 32, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -1]


def seeds() -> list[bytes]:
    many = {f"t.{i}": spec("I16", [2, i], 2 * i * (i - 1), 2 * i * (i + 1)) for i in range(5)}
    return [
        GOOD,
        file_bytes({"__metadata__": {"format": "pt"}, **TWO}, D32),
        file_bytes(many, bytes(range(40))),
        file_bytes({"s": spec("F64", [], 0, 8), "z": spec("U8", [0, 3], 8, 8)}, D16[:8]),
        file_bytes({"f4": spec("F4", [4], 0, 2), "t": spec("BOOL", [2], 2, 4)}, b"\x21\x43\0\1"),
        file_bytes(json.dumps({"重み\U0001f642\\u00e9": spec("BF16", [8], 0, 16)}), D16),
    ]


def mutate(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    at = rng.randrange(len(data))
    kind = rng.randrange(9)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at] = rng.choice(b'{}[]",:0123456789-.eE \\/\0\xff')
    elif kind == 2:
        del data[at : at + rng.choice((1, 2, 8, 20))]
    elif kind == 3:
        data[at:at] = rng.choice((b"0", b" ", b"\0", b"]", b'"', b",", b"1e3", b"\xc3\xa9"))
    elif kind == 4:
        del data[at:]
    elif kind == 5:
        piece = data[at : at + rng.randrange(1, 60)]
        data[at:at] = piece
    else:
        return _mutate_number(content, rng)
    if kind in (2, 3, 5) and rng.random() < 0.7:  # keep the header's length right
        length = struct.unpack("<Q", content[:8])[0] + len(data) - len(content)
        data[:8] = struct.pack("<Q", max(length, 0))
    return bytes(data)


def _mutate_number(content: bytes, rng: random.Random) -> bytes:
    """Another number, or another dtype, in the header; its length stays right."""
    length = struct.unpack("<Q", content[:8])[0]
    header, data = content[8 : 8 + length], content[8 + length :]
    places = [i for i, byte in enumerate(header) if chr(byte).isdigit()]
    at = rng.choice(places)
    end = at
    while end < len(header) and chr(header[end]).isdigit():
        end += 1
    header = header[:at] + str(rng.choice(NUMBERS)).encode() + header[end:]
    if rng.random() < 0.3:
        data = data + bytes(rng.choice((1, 4, 16)))
    return struct.pack("<Q", len(header)) + header + data


def ours(path: Path) -> dict[str, tuple[str | None, list[int], bytes]] | CheckpointError:
    try:
        table = open_safetensors(path)
        arrays = table.read_many()
    except CheckpointError as error:
        return error
    return {
        name: (table.entries[name].dtype.safetensors, list(array.shape), raw_bytes(array))
        for name, array in arrays.items()
    }


def test_mutated_files_are_refused_cleanly_or_read_as_the_library_does(tmp_path):
    rng = random.Random(20)
    accepted = 0
    for number in range(MUTATIONS):
        content = mutate(rng.choice(seeds()), rng)
        path = write(tmp_path, content)
        mine = ours(path)
        if isinstance(mine, CheckpointError):
            assert str(path) in str(mine), (number, content)
            continue
        accepted += 1
        theirs = {
            name: (one["dtype"], one["shape"], bytes(one["data"]))
            for name, one in safetensors.deserialize(content)
        }
        assert mine == theirs, (number, content)
    assert 0.02 * MUTATIONS < accepted < 0.6 * MUTATIONS


@pytest.mark.parametrize("piece", ["a", '\\"', "\\u00e9", "é"])
def test_name_of_megabytes_is_refused_in_one_line(piece, tmp_path):
    name = piece * 500_000
    header = f'{{"b":{json.dumps(A)},"{name}":{{"dtype":"F32","shape":[-1]}}}}'
    with pytest.raises(CheckpointLimitError, match="name_bytes") as caught:
        open_safetensors(write(tmp_path, file_bytes(header, D16)))
    assert len(str(caught.value)) < 2000
    assert caught.value.offset == 8 + header.encode().index(f'"{piece}{piece}'.encode())
