"""Files that a reader meets or may be handed: good, odd, broken and hostile ones.

Each `Case` builds itself in a directory and says what must come of it: `error` is the class
that opening and reading everything raises (None: it loads), `names` what the message must
tell, `tensor` the tensor it must name, `says` words that must be in it.
"""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxjax.errors import (
    CheckpointFormatError,
    CheckpointLimitError,
    CheckpointMissingError,
    CheckpointTruncatedError,
    CheckpointUnsafeError,
)

FORMAT, LIMIT, UNSAFE = CheckpointFormatError, CheckpointLimitError, CheckpointUnsafeError
MISSING, TRUNCATED = CheckpointMissingError, CheckpointTruncatedError

# What a message must tell besides the file, as attributes of the error that may not be None.
PLACE = ("offset", "expected", "found")  # field, byte offset, expected and found
BYTES = ("offset", "expected", "found")  # byte offset, bytes needed and bytes there
OPTION = ("expected", "found", "hint")  # value, limit and the option that raises it
KIND = ("found", "hint")  # what the file really is, what to do
NAMES = {FORMAT: PLACE, LIMIT: OPTION, TRUNCATED: BYTES, MISSING: (), UNSAFE: ("offset", "found")}


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[Path], Path]
    error: type[Exception] | None = None
    tensor: str | None = None
    says: tuple[str, ...] = ()
    names: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.name


def spec(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def text(header: Any) -> bytes:
    """A header as JSON: bytes as they are, text in UTF-8, anything else dumped."""
    if isinstance(header, bytes):
        return header
    return (header if isinstance(header, str) else json.dumps(header)).encode()


def file_bytes(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file; `length` overrides the declared length of the header."""
    raw = text(header)
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def floats(count: int, start: float = 1.0) -> bytes:
    return struct.pack(f"<{count}f", *(start + i for i in range(count)))


# --- safetensors --------------------------------------------------------------------------

A = spec("F32", [4], 0, 16)
B = spec("F32", [2, 2], 16, 32)
ONE, TWO = {"a": A}, {"a": A, "b": B}
D16, D32 = floats(4), floats(8)
GOOD = file_bytes(TWO, D32)
ALL_DTYPES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip


def _tensors(dtypes: dict[str, int], count: int = 3) -> bytes:
    header, data = {}, b""
    for dtype, size in dtypes.items():
        piece = bytes(i % 2 if dtype == "BOOL" else 17 * i % 251 for i in range(count * size))
        header[dtype.lower()] = spec(dtype, [count], len(data), len(data) + len(piece))
        data += piece
    return file_bytes(header, data)


def _many(count: int) -> bytes:
    header = {f"layers.{i}.w": spec("U8", [3], 3 * i, 3 * i + 3) for i in range(count)}
    return file_bytes(header, bytes(i % 256 for i in range(3 * count)))


def _twice(first: str, second: str) -> str:
    return f'{{"a":{first},"a":{second}}}'


def _one(**changes: Any) -> dict[str, Any]:
    """One tensor `a` with some fields changed; None leaves a field out."""
    entry = {**A, **changes}
    return {"a": {key: value for key, value in entry.items() if value is not ...}}


PICKLE = (
    b"\x80\x04\x95\x28\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94"
    b"\x8c\x08touch /x\x85R."
)
LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f"
    b"32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
HTML = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>Not found</body></html>\n"
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(64)
DEEP = b'{"a":' + b"[" * 20000 + b"]" * 20000 + b"}"


def _content(name: str, content: bytes, error: type[Exception] | None = None, *args, **kw) -> Case:
    def build(directory: Path) -> Path:
        path = directory / f"{name}.safetensors"
        path.write_bytes(content)
        return path

    return _case(name, build, error, *args, **kw)


def _case(
    name: str,
    build: Callable[[Path], Path],
    error: type[Exception] | None = None,
    tensor: str | None = None,
    says: str | tuple[str, ...] = (),
    names: tuple[str, ...] | None = None,
) -> Case:
    words = (says,) if isinstance(says, str) else says
    default = NAMES[error] if error else ()
    return Case(name, build, error, tensor, words, default if names is None else names)


def _bad(name: str, header: Any, says: str | tuple[str, ...], data: bytes = D16, **kw) -> Case:
    """A header that breaks the format at tensor `a`."""
    return _content(name, file_bytes(header, data), FORMAT, "a", says, **kw)


def _path(name: str, make: Callable[[Path], None], error: type[Exception], *args, **kw) -> Case:
    def build(directory: Path) -> Path:
        path = directory / f"{name}.safetensors"
        make(path)
        return path

    return _case(name, build, error, *args, **kw)


CONTROLS = [
    _content("ok_basic", GOOD),
    _content("ok_metadata", file_bytes({"__metadata__": {"format": "pt"}, **TWO}, D32)),
    _content("ok_metadata_null", file_bytes({"__metadata__": None, **TWO}, D32)),
    _content("ok_no_tensors", file_bytes({})),
    _content("ok_scalar", file_bytes({"a": spec("F32", [], 0, 4)}, floats(1))),
    _content("ok_zero_size", file_bytes({"z": spec("F32", [0, 7], 0, 0), "a": A}, D16)),
    _content("ok_misaligned_header", file_bytes(text(TWO) + b" " * (-len(text(TWO)) % 8 + 3), D32)),
    _content("ok_trailing_spaces", file_bytes(text(TWO) + b" " * 64, D32)),
    _content("ok_header_order", file_bytes({"b": B, "a": A}, D32)),
    _content("ok_nan_inf", file_bytes(
        ONE, struct.pack("<4I", 0x7FC01234, 0x7F800000, 0xFF800000, 0x00000001))),
    _content("ok_bf16", file_bytes({"a": spec("BF16", [2, 4], 0, 16)}, D16)),
    _content("ok_f8", file_bytes({"a": spec("F8_E4M3", [2], 0, 2)}, b"\x38\xc0")),
    _content("ok_f4", file_bytes({"a": spec("F4", [2, 4], 0, 4)}, b"\x21\x43\x65\x87")),
    _content("ok_unicode_name", file_bytes(json.dumps({"重み🙂": A}, ensure_ascii=False), D16)),
    _content("ok_escaped_name", file_bytes(json.dumps({'重み🙂\\"': A}), D16)),
    _content("ok_dtypes", _tensors(ALL_DTYPES)),
    _content("ok_2000_tensors", _many(2000)),
    _content("json_unknown_field", file_bytes(_one(extra={"x": [1]}), D16)),
]  # fmt: skip

LENGTHS = [
    _content("empty_file", b"", TRUNCATED, None, "0 bytes"),
    _content("seven_bytes", bytes(7), TRUNCATED, None, "7 bytes"),
    _content("only_length", struct.pack("<Q", 64), TRUNCATED, None, ("64 bytes", "found 0")),
    _content("only_length_like_pickle", struct.pack("<Q", 0x280), TRUNCATED, None, "640 bytes"),
    _content("len_zero", file_bytes(TWO, D32, length=0), FORMAT, None, "header length"),
    _content("len_2e64", file_bytes(TWO, D32, length=2**64 - 1), FORMAT, None, "header length"),
    _content("len_2e63", file_bytes(TWO, D32, length=2**63), FORMAT, None, "header length"),
    _content("len_wrap", file_bytes(TWO, D32, length=2**64 - 8), FORMAT, None, "header length"),
    _content("len_over_cap", file_bytes(TWO, D32, length=100_000_001), LIMIT, None,
             ("100000001", "100000000", "header_bytes", "header length")),
    _content("len_90mb_short_file", file_bytes(TWO, D32, length=90_000_000), TRUNCATED, None,
             "90000000"),
    _content("len_plus_one", file_bytes(TWO, D32, length=len(text(TWO)) + 1), FORMAT),
    _content("len_minus_one", file_bytes(TWO, D32, length=len(text(TWO)) - 1), FORMAT),
    _content("len_big_endian", struct.pack(">Q", len(text(TWO))) + GOOD[8:], FORMAT, None,
             "header length"),
]  # fmt: skip

JSON = [
    _content("not_json", file_bytes("hello, world, no JSON", D16), FORMAT, None, "header"),
    _content("json_array", file_bytes([1, 2], D16), FORMAT, None, "header"),
    _content("json_null", file_bytes("null", D16), FORMAT, None, "header"),
    _content("json_nul_bytes", file_bytes(bytes(4096), D16), FORMAT, None, "header"),
    _content("json_trailing_garbage", file_bytes(text(ONE) + b"}x", D16), FORMAT),
    _content("json_bom", file_bytes(b"\xef\xbb\xbf" + text(ONE), D16), FORMAT, None, "header"),
    _content("json_leading_space", file_bytes(b" " + text(ONE), D16), FORMAT, None, "header"),
    _content("json_leading_space_like_pickle", file_bytes(b" " + text(ONE).ljust(0x27F), D16),
             FORMAT, None, "header"),
    _content("json_utf16", file_bytes(json.dumps(ONE).encode("utf-16-le"), D16), FORMAT, None,
             "UTF-16"),
    _content("json_bad_utf8", file_bytes(text(ONE).replace(b'"a"', b'"\xff"'), D16), FORMAT, None,
             "FF"),
    _content("json_lone_surrogate", file_bytes(text(ONE).replace(b'"a"', rb'"\ud800"'), D16),
             FORMAT, None, "surrogate"),
    _content("json_deep", file_bytes(DEEP, D16), LIMIT, None, ("json_depth", "64", "20001")),
    _content("json_deep_in_name", file_bytes({"[" * 500: A}, D16)),
    _content("json_digits", file_bytes('{"a":{"x":' + "9" * 9000 + "}}", D16),
             LIMIT, None, ("json_digits", "9000")),
    _bad("json_nan", _one(shape=[float("nan")]), ("shape", "nan")),
    _bad("json_dup_key", _twice(json.dumps(A), json.dumps(spec("I32", [4], 0, 16))), "twice"),
    _bad("json_dup_key_data", _twice(json.dumps(A), json.dumps(spec("F32", [4], 16, 32))), "twice",
         D32),
    _bad("json_dup_field",
         '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8],"data_offsets":[0,16]}}',
         ("data_offsets", "twice")),
    _bad("json_minus_zero", '{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', "shape",
         b""),
    _content("meta_not_string", file_bytes({"__metadata__": {"x": 1}, **ONE}, D16), FORMAT, None,
             ("x", "metadata")),
    _content("meta_is_list", file_bytes({"__metadata__": ["x"], **ONE}, D16), FORMAT, None,
             "__metadata__"),
    _content("meta_as_tensor", file_bytes({"__metadata__": A, "b": A}, D16), FORMAT, None,
             "metadata"),
]  # fmt: skip

FIELDS = [
    _bad("missing_dtype", _one(dtype=...), "dtype"),
    _bad("missing_shape", _one(shape=...), "shape"),
    _bad("missing_offsets", _one(data_offsets=...), "data_offsets"),
    _bad("entry_is_number", {"a": 3}, "entry"),
    _bad("dtype_unknown", _one(dtype="F128"), ("dtype", "F128", "unknown")),
    _bad("dtype_f6", {"a": spec("F6_E2M3", [4], 0, 3)}, ("F6_E2M3", "not supported"), b"abc"),
    _bad("dtype_lower", _one(dtype="f32"), ("dtype", "f32")),
    _bad("dtype_null", _one(dtype=None), ("dtype", "None")),
    _bad("dtype_number", _one(dtype=3), ("dtype", "3")),
    _bad("dtype_size_mismatch", _one(dtype="F64"), ("32 bytes", "16 bytes")),
    _bad("f4_odd", {"a": spec("F4", [3], 0, 2)}, ("1.5 bytes", "2 bytes"), b"ab"),
    _content("bool_not_01", file_bytes({"a": spec("BOOL", [4], 0, 4)}, b"\0\1\2\xff"), FORMAT, "a",
             ("0 or 1", "found 2")),
    _bad("shape_negative", _one(shape=[-4]), ("shape", "-4")),
    _bad("shape_two_negative", _one(shape=[-2, -2]), ("shape", "-2")),
    _bad("shape_float", _one(shape=[4.0]), ("shape", "4.0")),
    _bad("shape_string", _one(shape="4"), ("shape", "4")),
    _bad("shape_bool", _one(shape=[True, 4]), ("shape", "True")),
    _bad("shape_overflow_wrap", {"a": spec("F32", [2**62, 4], 0, 0)}, "shape", b""),
    _bad("shape_overflow_16", _one(shape=[2**32, 2**32, 4]), ("shape", "16 bytes")),
    _bad("shape_over_u64", _one(shape=[2**70]), ("shape", "16 bytes")),
    _content("shape_zero_huge", file_bytes(
        {"a": spec("F32", [0, 2**63 - 1, 2**63 - 1], 0, 0)}), LIMIT, "a",
             ("shape", "tensor_bytes", str(2**63 - 1))),
    _bad("shape_100_dims", {"a": spec("F32", [1] * 100, 0, 4)}, ("shape", "100", "64"), floats(1)),
]  # fmt: skip

OFFSETS = [
    _content("off_hole", file_bytes({"a": A, "b": spec("F32", [3], 20, 32)}, D32), FORMAT, "b",
             ("data_offsets", "16", "20")),
    _bad("off_hole_start", {"a": spec("F32", [2], 8, 16)}, ("data_offsets", "8")),
    _content("off_overlap", file_bytes({"a": A, "b": spec("F32", [4], 12, 28)}, D32[:28]), LIMIT,
             "b", ("data_offsets", "shared_bytes", "found 4")),
    _content("off_same", file_bytes({f"t{i}": A for i in range(500)}, D16), LIMIT, None,
             ("data_offsets", "shared_bytes")),
    _content("off_zero_size_inside", file_bytes({"a": A, "b": spec("F32", [0], 8, 8)}, D16),
             FORMAT, "b", "data_offsets"),
    _bad("off_reversed", _one(data_offsets=[16, 0]), ("data_offsets", ">= 16", "found 0")),
    _bad("off_negative", _one(data_offsets=[-16, 0]), ("data_offsets", "-16")),
    _content("off_past_eof", file_bytes({"a": spec("F32", [5], 0, 20)}, D16), TRUNCATED, "a",
             ("20 bytes", "16 bytes", "4 missing")),
    _content("off_past_eof_mismatch", file_bytes(_one(data_offsets=[0, 20]), D16), TRUNCATED, "a",
             ("20 bytes", "16 bytes")),
    _content("off_1tb", file_bytes({"a": spec("F32", [2**38], 0, 2**40)}, D16), TRUNCATED, "a",
             (str(2**40), "16 bytes")),
    _bad("off_2e64", _one(data_offsets=[0, 2**64 - 1]), "data_offsets"),
    _bad("off_float", _one(data_offsets=[0.0, 16.0]), ("data_offsets", "0.0")),
    _bad("off_three", _one(data_offsets=[0, 8, 16]), ("data_offsets", "3")),
    _content("trunc_data_1", GOOD[:-1], TRUNCATED, "b", ("16 bytes", "15 bytes", "1 missing")),
    _content("trunc_half", GOOD[:-20], TRUNCATED, "a", ("16 bytes", "12 bytes")),
    _content("trunc_header", GOOD[:30], TRUNCATED, None, "22 bytes"),
    _content("trailing_byte", GOOD + b"x", FORMAT, None, (str(len(GOOD)), str(len(GOOD) + 1))),
    _content("trailing_4k", GOOD + bytes(4096), FORMAT, None, str(len(GOOD) + 4096)),
    _content("trailing_no_tensors", file_bytes({}, b"x"), FORMAT),
]  # fmt: skip

OTHER_KINDS = [
    _content("is_gguf", GGUF, FORMAT, None, "GGUF", KIND),
    _content("is_gguf_123", GGUF[:8] + b"{" + GGUF[9:], FORMAT, None, "GGUF", KIND),
    _content("is_pickle", PICKLE, UNSAFE, None, ("pickle", "posix.system")),
    _content("is_pickle_2", b"\x80\x02cposix\nsystem\nq\0X\x01\0\0\0xq\x01\x85q\x02Rq\x03.", UNSAFE,
             None, "posix.system"),
    _content("is_pickle_0", b"cposix\nsystem\n(S'touch /x'\ntR.", UNSAFE, None, "posix.system"),
    _content("is_zip", b"PK\x03\x04\x14\0\0\0\0\0" + bytes(16) + b"\x10\0\0\0archive/data.pkl" +
             bytes(9), FORMAT, None, "PyTorch", KIND),
    _content("is_npz", b"PK\x03\x04\x14\0\0\0\0\0" + bytes(16) + b"\x05\0\0\0a.npy" + bytes(9),
             FORMAT, None, "NumPy", KIND),
    _content("is_gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\3" + bytes(0x90000), FORMAT, None, "gzip", KIND),
    _content("is_lfs_pointer", LFS, FORMAT, None, ("git-lfs pointer", "git lfs pull"), KIND),
    _content("is_html", HTML, FORMAT, None, ("HTML page", "download it again"), KIND),
    _path("is_directory", Path.mkdir, FORMAT, None, "directory", KIND),
    _path("is_missing", lambda path: None, MISSING, None, "no such file"),
    _path("is_fifo", os.mkfifo, FORMAT, None, "FIFO", KIND),
    _path("is_symlink_loop", lambda path: path.symlink_to(path.name), MISSING),
    _path("is_symlink_dangling", lambda path: path.symlink_to("nowhere.safetensors"), MISSING),
    _path("is_device", lambda path: path.symlink_to("/dev/zero"), FORMAT, None, "device", KIND),
    _path("is_proc", lambda path: path.symlink_to("/proc/self/maps"), FORMAT, None, "/proc", KIND),
]  # fmt: skip

SAFETENSORS = [*CONTROLS, *LENGTHS, *JSON, *FIELDS, *OFFSETS, *OTHER_KINDS]
