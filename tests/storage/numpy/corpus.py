"""NumPy archives and zip archives: good, odd, broken and hostile ones."""

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from maxjax.errors import CheckpointCorruptError
from tests.storage.corpus import (
    FORMAT,
    GOOD,
    HTML,
    KIND,
    LFS,
    LIMIT,
    NAMES,
    PICKLE,
    TRUNCATED,
    UNSAFE,
    Case,
)

CORRUPT = CheckpointCorruptError
NAMES = {**NAMES, CORRUPT: ("offset", "expected", "found")}
A = np.arange(12, dtype="<f4").reshape(4, 3)
B = np.array([5.0, 6.0], "<f4")


# --- writers that write what they are told -------------------------------------------------


def npy(
    array: Any = A, *, header: str | bytes | None = None, version: tuple[int, int] = (1, 0),
    length: int | None = None, data: bytes | None = None, **fields: str,
) -> bytes:  # fmt: skip
    """An array as numpy writes it, or with another header, or other text for some fields."""
    if header is None:
        order = array.flags.f_contiguous and not array.flags.c_contiguous
        values = {"descr": repr(array.dtype.str), "fortran_order": str(order),
                  "shape": str(array.shape), **fields}  # fmt: skip
        header = "{" + ", ".join(f"{key!r}: {value}" for key, value in values.items()) + ", }"
        header += " " * (-(len(header) + 11) % 64) + "\n"
    raw = header.encode("latin-1") if isinstance(header, str) else header
    count = struct.pack("<H" if version == (1, 0) else "<I", len(raw) if length is None else length)
    content = array.tobytes("A") if data is None else data
    return b"\x93NUMPY" + bytes(version) + count + raw + content


@dataclass
class Item:
    """A member for `pack`; what is None is what it should be. `local_*` differ in its own header."""

    name: str | bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0
    crc: int | None = None
    size: int | None = None
    compressed: int | None = None
    header: int | None = None
    extra: bytes = b""
    local_name: bytes | None = None
    local_method: int | None = None
    local_crc: int | None = None
    local_size: int | None = None
    local_compressed: int | None = None
    local_extra: bytes = b""
    body: bytes | None = None
    descriptor: bytes = b""
    version: int = 20
    disk: int = 0
    gap: bytes = b""


def pack(
    *items: Item, count: int | None = None, comment: bytes = b"", start: int | None = None,
    nbytes: int | None = None, disk: int = 0, prefix: bytes = b"", between: bytes = b"",
) -> bytes:  # fmt: skip
    """A zip archive of members, the end record with some fields changed."""
    out, directory = prefix, b""
    for item in items:
        raw = item.name.encode() if isinstance(item.name, str) else item.name
        body = item.body
        if body is None:
            body = deflate(item.data) if item.method == 8 else item.data
        crc = zlib.crc32(item.data) if item.crc is None else item.crc
        size = len(item.data) if item.size is None else item.size
        compressed = len(body) if item.compressed is None else item.compressed
        at = len(out) if item.header is None else item.header
        local = (
            item.method if item.local_method is None else item.local_method, 0, 33,
            crc if item.local_crc is None else item.local_crc,
            compressed if item.local_compressed is None else item.local_compressed,
            size if item.local_size is None else item.local_size,
        )  # fmt: skip
        name = raw if item.local_name is None else item.local_name
        out += struct.pack("<4s5H3L2H", b"PK\3\4", item.version, item.flags, *local, len(name),
                           len(item.local_extra))  # fmt: skip
        out += name + item.local_extra + body + item.descriptor + item.gap
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 20, item.version, item.flags, item.method, 0, 33, crc,
            compressed, size, len(raw), len(item.extra), 0, item.disk, 0, 0, at,
        ) + raw + item.extra  # fmt: skip
    out += between
    number = len(items) if count is None else count
    return out + directory + struct.pack(
        "<4s4H2LH", b"PK\5\6", disk, 0, number, number,
        len(directory) if nbytes is None else nbytes, len(out) if start is None else start,
        len(comment)) + comment  # fmt: skip


def deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def zeros(nbytes: int, head: bytes = b"") -> tuple[bytes, int]:
    """`head` and `nbytes` of zeros deflated, and their CRC-32."""
    packer, crc = zlib.compressobj(9, zlib.DEFLATED, -15), zlib.crc32(head)
    begin, piece = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH), bytes(1 << 24)
    # Behind a full flush the same zeros give the same bytes every time.
    middle = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    for _ in range(nbytes >> 24):
        crc = zlib.crc32(piece, crc)
    return begin + middle * (nbytes >> 24) + packer.flush(), crc


@cache
def bomb(head: bytes, nbytes: int) -> bytes:
    body, crc = zeros(nbytes, head)
    return pack(Item("a.npy", b"", 8, body=body, crc=crc, size=len(head) + nbytes))


def saved(write: Callable[..., Any] = np.savez, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    write(buffer, **arrays)
    return buffer.getvalue()


def flipped(content: bytes, at: int, bit: int = 1) -> bytes:
    return content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]


def one(content: bytes, **fields: Any) -> bytes:
    """An archive of member a.npy."""
    return pack(Item("a.npy", content, **fields))


# --- cases --------------------------------------------------------------------------------


def case(
    name: str, content: bytes | Callable[[], bytes], error: type[Exception] | None = None,
    tensor: str | None = None, says: str | tuple[str, ...] = (),
    names: tuple[str, ...] | None = None,
) -> Case:  # fmt: skip
    def build(directory: Path) -> Path:
        path = directory / f"{name}.npz"
        path.write_bytes(content() if callable(content) else content)
        return path

    default = NAMES[error] if error else ()
    words = (says,) if isinstance(says, str) else says
    return Case(name, build, error, tensor, words, default if names is None else names)


def bad(name: str, content: bytes, says: str | tuple[str, ...], error=FORMAT) -> Case:
    """An array `a` that breaks the format."""
    return case(name, one(content), error, "a", says)


def _zip_struct() -> bytes:
    return npy(descr="[('x', '<f4'), ('y', '<i4')]")


BASIC = saved(a=A, b=B)
DEFLATED = saved(np.savez_compressed, a=A, b=B)
# Where the data of the array a lies in BASIC.
_DATA = BASIC.index(A.tobytes())
_DEEP = "(" * 9000 + ")" * 9000

CONTROLS = [
    case("ok_basic", BASIC),
    case("ok_deflated", DEFLATED),
    case("ok_fortran", saved(a=np.asfortranarray(A), b=np.asfortranarray(A[:, :1]))),
    case("ok_big_endian", saved(a=A.astype(">f4"), b=np.asfortranarray(A.astype(">i8")))),
    case("ok_scalar_empty", saved(a=np.float32(7), b=np.zeros((0, 3), "f4"))),
    case("ok_scalar_empty_deflated",
         saved(np.savez_compressed, a=np.float32(7), b=np.zeros((0, 3), "f4"))),
    case("ok_version_2", one(npy(version=(2, 0)))),
    case("ok_version_3", one(npy(version=(3, 0)))),
    case("ok_empty_zip", pack()),
    case("ok_subdir_name", saved(**{"params/w": A})),
    case("ok_python_2_long", one(npy(shape="(4L, 3L)"))),
    case("ok_every_dtype", saved(**{f"a_{d}": np.arange(6).astype(d).reshape(2, 3) for d in (
        "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 >i2 >u4 >f2 >f8".split())})),
    case("ok_unicode_name", saved(重み=A)),
    case("ok_nan", saved(a=np.array([0x7FC01234, 0xFF800000, 1], "<u4").view("<f4"))),
    case("ok_comment", pack(Item("a.npy", npy()), comment=b"made by hand")),
    case("ok_header_of_kilobytes", one(npy(A, header=f"{{'descr': '<f4',{' ' * 5000}"
         "'fortran_order': False, 'shape': (4, 3)}\n"), method=8)),
    case("ok_long_spaces", one(npy(A, header="{'descr': '<f4', 'fortran_order': False, "
         "'shape': (4, 3), }" + " " * 9000 + "\n"))),
]  # fmt: skip

ARRAYS = [
    case("object_pickle", saved(a=np.array([{"x": 1}], object)), UNSAFE, "a", "O"),
    bad("object_in_struct", npy(descr="[('x', '<f4'), ('y', '|O')]"), "O", UNSAFE),
    bad("object_in_struct_deep", npy(descr="[('x', [('z', [('y', 'O')])])]"), "O", UNSAFE),
    bad("descr_code", npy(descr="__import__('os').system('touch /x')"), "__import__", UNSAFE),
    bad("shape_code", npy(shape="(eval('4'), 3)"), "eval", UNSAFE),
    bad("struct_code", npy(descr="[('x', open('/x', 'w'))]"), "open", UNSAFE),
    bad("descr_unknown", npy(descr="'<f9'"), ("descr", "<f9")),
    bad("descr_unicode", npy(descr="'<U4'"), ("descr", "text")),
    bad("descr_datetime", npy(descr="'<M8[s]'"), ("descr", "dates")),
    bad("descr_complex", npy(descr="'<c32'"), ("descr", "unknown")),
    bad("descr_longdouble", npy(descr="'<f16'"), ("descr", "<f16")),
    bad("descr_struct", _zip_struct(), ("descr", "structured")),
    bad("descr_void1", npy(descr="'|V1'"), ("descr", "float8", "view")),
    bad("descr_number", npy(descr="7"), ("descr", "7")),
    bad("descr_no_order", npy(descr="'f4'"), ("descr", "f4")),
    bad("descr_escape", npy(descr=r"'\x3cf4'"), "descr"),
    bad("fortran_order_number", npy(fortran_order="1"), ("fortran_order", "1")),
    bad("fortran_order_word", npy(fortran_order="Fblse"), ("fortran_order", "Fblse")),
    bad("shape_negative", npy(shape="(-4,)"), ("shape", "-")),
    bad("shape_neg_neg", npy(shape="(-4, -3)"), ("shape", "-")),
    bad("shape_overflow", npy(shape=str((2**40, 2**40))), ("shape", "2**63")),
    bad("shape_wrap", npy(shape=str((2**32, 2**32))), ("shape", "2**63")),
    bad("shape_16gb", npy(shape=str((2**32,))), ("shape", str(2**34), "member_ratio"), LIMIT),
    bad("shape_3gb", npy(shape="(805306368,)"), ("shape", "3221225472", "member_ratio"), LIMIT),
    bad("shape_zero_huge", npy(shape=str((0, 2**62, 2**62)), data=b""), ("shape", "tensor_bytes"),
        LIMIT),
    bad("shape_float", npy(shape="(4.0,)"), ("shape", "4.0")),
    bad("shape_bool", npy(shape="(True,)"), ("shape", "True")),
    bad("shape_number", npy(shape="(12)"), ("shape", "tuple", "(12)")),
    bad("shape_list", npy(shape="[12]"), ("shape", "tuple")),
    bad("shape_65_dims", npy(np.float32(1), shape=str((1,) * 65), descr="'<f4'"), ("shape", "65")),
    bad("shape_spaces", npy(shape="(4 3)"), ("shape", "'3'")),
    bad("shape_leading_zero", npy(shape="(04, 3)"), ("shape", "04")),
    bad("data_short", npy(data=A.tobytes()[:-4]), ("shape", "48 bytes", "44 bytes"), TRUNCATED),
    bad("data_long", npy(data=A.tobytes() + bytes(4)), ("shape", "48 bytes", "52 bytes")),
    bad("hdr_len_huge", npy(version=(2, 0), length=2**32 - 1),
        ("header length", str(2**32 - 1), "npy_header_bytes"), LIMIT),
    bad("hdr_len_past_end", npy(length=60_000), ("header", "60000 bytes"), TRUNCATED),
    bad("hdr_not_dict", npy(header="['descr', '<f4']\n"), ("header", "'['")),
    bad("hdr_extra_key", npy(extra="1"), ("header", "extra")),
    bad("hdr_missing_key", npy(header="{'descr': '<f4', 'shape': (4, 3)}\n"), "fortran_order"),
    bad("hdr_twice", npy(header="{'descr': '<f4', 'shape': (4, 3), 'fortran_order': False, "
        "'shape': (3, 4)}\n"), ("shape", "twice")),
    bad("hdr_after", npy(header="{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3)} 1\n"),
        "text after its end"),
    bad("hdr_form_feed", npy(header="{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3)}\f1"),
        "text after its end"),
    bad("hdr_open", npy(header="{'descr': '<f4', 'fortran_order': False, 'shape': (4, 3"),
        ("shape", "end of the header")),
    bad("hdr_deep", npy(header=_DEEP), ("json_depth", "9000"), LIMIT),
    bad("hdr_deep_minus", npy(header="-" * 9000 + "1"), ("json_depth", "9000"), LIMIT),
    bad("hdr_big_int", npy(shape=f"({'9' * 9000},)"), ("json_digits", "9000"), LIMIT),
    bad("hdr_100_digits", npy(shape=f"({'9' * 100},)"), "shape"),
    bad("hdr_nul", npy(header=bytes(118)), "header"),
    bad("hdr_empty", npy(header=b""), "header"),
    bad("hdr_utf8", npy(header=b"{'\xff': 1}", version=(3, 0)), "UTF-8"),
    bad("magic_bad", b"\x93NUMPX" + npy()[6:], ("NUMPX", "NumPy")),
    bad("magic_pickle", PICKLE, ("pickle", "posix.system"), UNSAFE),
    bad("version_9", npy(version=(9, 9)), ("version", "9.9")),
    bad("member_empty", b"", "0 bytes", TRUNCATED),
    bad("member_of_magic", b"\x93NUM", "4 bytes", TRUNCATED),
    bad("member_of_length", npy(version=(2, 0))[:11], "11 bytes", TRUNCATED),
    case("member_not_npy", pack(Item("a.txt", npy())), FORMAT, "a.txt", ".npy"),
    case("member_directory", pack(Item("params/"), Item("params/a.npy", npy())), FORMAT, "params/",
         ".npy"),
    case("member_dup", pack(Item("a.npy", npy()), Item("a.npy", npy(A + 1))), FORMAT, "a", "twice"),
    case("member_a_and_a_npy", pack(Item("a.npy", npy()), Item("a.npy.npy", npy(A + 1))), FORMAT,
         "a.npy", "ambiguous"),
    case("bool_deflated", one(npy(descr="'|b1'", shape="(3,)", data=b"\0\1\2"), method=8), FORMAT,
         "a", ("0 or 1", "found 2", "value 2")),
]  # fmt: skip

_FLIP = npy(data=flipped(A.tobytes(), 20))
_MANY = pack(*(Item(f"{i}.npy", npy(B)) for i in range(3)))

ZIP = [
    case("zip_cut", BASIC[: BASIC.index(b"PK\1\2")], TRUNCATED, None, "list of the archive"),
    case("zip_cut_mid", BASIC[: len(BASIC) // 2], TRUNCATED, None, "list of the archive"),
    case("zip_cut_end", BASIC[:-1], TRUNCATED, None, "list of the archive"),
    case("zip_cut_comment", pack(Item("a.npy", npy()), comment=b"comment")[:-3], TRUNCATED),
    case("zip_cut_signature", b"PK\3", TRUNCATED),
    case("zip_empty", b"", TRUNCATED),
    case("zip_crc_flip", flipped(BASIC, _DATA + 7), CORRUPT, "a", ("a.npy", "CRC-32")),
    case("zip_crc_flip_last_byte", flipped(BASIC, _DATA + A.nbytes - 1), CORRUPT, "a",
         ("a.npy", "CRC-32")),
    case("zip_crc_flip_header", flipped(BASIC, BASIC.index(b"<f4"), 2), CORRUPT, "a", "a.npy"),
    case("zip_crc_flip_deflated", one(npy(), method=8, body=deflate(_FLIP)), CORRUPT, "a",
         ("a.npy", "CRC-32")),
    case("zip_crc_zero", one(npy(), crc=0), CORRUPT, "a", "CRC-32"),
    case("zip_crc_zero_deflated", one(npy(), method=8, crc=0), CORRUPT, "a", "CRC-32"),
    case("zip_crc_empty_array", one(npy(np.zeros((0, 3), "f4")), crc=7), CORRUPT, "a", "CRC-32"),
    case("zip_crc_empty_deflated", one(npy(np.zeros((0, 3), "f4")), crc=7, method=8), CORRUPT, "a"),
    case("zip_crc_dir_flip", flipped(BASIC, BASIC.index(b"PK\1\2") + 17), CORRUPT, "a", "CRC-32"),
    case("zip_not_deflated", one(npy(), method=8, body=npy()), CORRUPT, "a", "deflated"),
    case("zip_deflated_short", one(npy(), method=8, body=deflate(npy())[:-9]), CORRUPT, "a"),
    case("zip_deflated_rest", one(npy(), method=8, body=deflate(npy()) + b"rest"), CORRUPT, "a",
         "4 bytes before"),
    case("zip_deflated_smaller", one(npy(), method=8, body=deflate(npy(data=b""))), CORRUPT, "a"),
    case("zip_deflated_larger", one(npy(), method=8, body=deflate(npy() + bytes(9))), CORRUPT, "a",
         "more"),
    case("zip_bomb", lambda: bomb(npy(), 64 << 20), LIMIT, "a",
         ("a.npy", str((64 << 20) + len(npy())), "member_ratio")),
    case("zip_bomb_declared", lambda: bomb(npy(shape=f"({1 << 24}, 2)", data=b""), 128 << 20), LIMIT,
         "a", ("a.npy", "member_ratio")),
    case("zip_bomb_lying", lambda: one(npy(), method=8, body=deflate(npy() + bytes(24 << 20))),
         CORRUPT, "a", "more"),
    case("zip_size_4g", one(npy(), size=2**32 - 2), LIMIT, "a", ("4294967294", "member_ratio")),
    case("zip_size_4g_both", one(npy(), size=2**32 - 2, compressed=2**32 - 2), LIMIT, "a",
         ("4294967294", "member_ratio")),
    case("zip_size_more", one(npy(), size=len(npy()) + 4), FORMAT, "a", "another size"),
    case("zip_past_the_end", one(npy(), size=9999, compressed=9999), FORMAT, "a", "overlaps"),
    case("zip_local_offset", pack(Item("a.npy", npy()), Item("b.npy", npy(), header=0)), FORMAT,
         None, "overlaps"),
    case("zip_local_inside", pack(Item("a.npy", one(npy())), Item("a.npy2", b"", header=35)),
         FORMAT, None, "overlaps"),
    case("zip_local_name", one(npy(), local_name=b"b.npy"), FORMAT, "a", ("differs from the directory", "b.npy")),
    case("zip_local_name_length", flipped(one(npy()), 26), FORMAT, "a", "differs from the directory"),
    case("zip_local_extra_length", flipped(one(npy()), 28), FORMAT, "a", "overlaps"),
    case("zip_local_method", one(npy(), local_method=8), FORMAT, "a", "differ"),
    case("zip_local_crc", one(npy(), local_crc=1), CORRUPT, "a", "CRC-32"),
    case("zip_local_compressed", one(npy(), local_compressed=1), FORMAT, "a", "differ"),
    case("zip_local_size", one(npy(), local_size=1), FORMAT, "a", "differ"),
    case("zip_method_99", one(npy(), method=99), FORMAT, "a", ("method", "99")),
    case("zip_encrypted", one(npy(), flags=1), FORMAT, "a", "encrypted"),
    case("zip_strongly_encrypted", one(npy(), flags=0x2040), FORMAT, "a", "encrypted"),
    case("zip_version", one(npy(), version=99), FORMAT, "a", "newer"),
    case("zip_disk", one(npy(), disk=1), FORMAT, "a", "disk"),
    case("zip_disks", pack(Item("a.npy", npy()), disk=1), FORMAT, None, "disk"),
    case("zip_count_more", pack(Item("a.npy", npy()), count=2), FORMAT, None, "more members"),
    case("zip_count_less", pack(Item("a.npy", npy()), Item("b.npy", npy()), count=1), FORMAT, None,
         "after its last member"),
    case("zip_count_65535", pack(Item("a.npy", npy()), count=0xFFFF), FORMAT, None,
         "more members"),
    case("zip_directory_elsewhere", pack(Item("a.npy", npy()), start=7), FORMAT, None,
         "does not end where"),
    case("zip_prefix", b"PK\3\4" + bytes(60) + BASIC, FORMAT, None, "does not end where"),
    case("zip_prefix_counted", pack(Item("a.npy", npy()), prefix=b"PK\3\4" + bytes(60)), FORMAT,
         None, "before the first member"),
    case("zip_two_archives", BASIC + BASIC, FORMAT, None, "does not end where"),
    case("zip_trailing", BASIC + b"x", FORMAT, None, "1 bytes"),
    case("zip_hole", pack(Item("a.npy", npy(), gap=b"hidden"), Item("b.npy", npy())), FORMAT, "a",
         "unexpected bytes"),
    case("zip_hole_at_end", pack(Item("a.npy", npy()), between=b"hidden"), FORMAT, "a",
         "unexpected bytes"),
    case("zip_two_ends", pack(Item("a.npy", npy()), comment=pack()), FORMAT, None,
         "two end records"),
    case("zip_end_in_comment", pack(Item("a.npy", npy()), comment=pack() + b"x"), FORMAT, None,
         "two end records"),
    case("zip_name_not_utf8", pack(Item(b"\xff.npy", npy(), flags=0x800)), FORMAT, None, "UTF-8"),
    case("zip_name_nul", pack(Item(b"a.npy\0.txt", npy())), FORMAT, None, "NUL"),
    case("zip_two_names", one(npy(), extra=struct.pack("<HHBL", 0x7075, 10, 1, 0) + b"b.npy"),
         FORMAT, "a", "two names"),
    case("zip_extra_past_end", one(npy(), extra=b"\1\0\xff\0"), FORMAT, "a", "extra field"),
    case("zip64_size_missing", one(npy(), size=2**32 - 1, compressed=2**32 - 1), FORMAT, "a",
         "64 bits"),
    case("zip64_twice", one(npy(), extra=2 * (b"\1\0\0\0")), FORMAT, "a", "twice"),
    case("descriptor_wrong", one(npy(), flags=8, descriptor=struct.pack("<4s3L", b"PK\7\x08", 1, 2, 3)),
         FORMAT, "a", "unexpected bytes"),
]  # fmt: skip

OTHER_KINDS = [
    case("is_npy", npy(), FORMAT, None, "NumPy array", KIND),
    case("is_pickle", PICKLE, UNSAFE, None, ("pickle", "posix.system")),
    case("is_html", HTML, FORMAT, None, "HTML page", KIND),
    case("is_lfs_pointer", LFS, FORMAT, None, "git lfs pull", KIND),
    case("is_safetensors", GOOD, FORMAT, None, "not a NumPy .npz"),
    case("is_gzip", b"\x1f\x8b" + bytes(99), FORMAT, None, "gzip", KIND),
    case("is_pytorch", pack(Item("archive/data.pkl", PICKLE)), FORMAT, "archive/data.pkl",
         ("PyTorch", ".pt"), KIND),
    case("pickle_before_zip", PICKLE + BASIC, UNSAFE, None, ("pickle", "posix.system")),
]  # fmt: skip

NPZ = [*CONTROLS, *ARRAYS, *ZIP, *OTHER_KINDS]
