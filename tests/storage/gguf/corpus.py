"""GGUF files that a reader meets or may be handed: good, odd, broken and hostile ones."""

import struct
from collections.abc import Sequence
from pathlib import Path

from tests.storage.corpus import (
    FORMAT,
    HTML,
    KIND,
    LFS,
    LIMIT,
    MISSING,
    NAMES,
    PICKLE,
    PLACE,
    TRUNCATED,
    UNSAFE,
    A,
    Case,
    file_bytes,
    floats,
)

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LITTLE, BIG = "<", ">"


def text(value: bytes | str, order: str = LITTLE, length: int | None = None) -> bytes:
    """A string; `length` overrides the declared one."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack(order + "Q", len(raw) if length is None else length) + raw


def number(kind: int, value: float, order: str = LITTLE) -> bytes:
    return struct.pack(order + "BbHhIif?..Qqd"[kind], value)


def pair(key: bytes | str, kind: int, value: bytes, order: str = LITTLE) -> bytes:
    """A key with its value, the bytes of which are given."""
    return text(key, order) + struct.pack(order + "I", kind) + value


def array(kind: int, count: int, items: bytes, order: str = LITTLE) -> bytes:
    return struct.pack(order + "IQ", kind, count) + items


def info(
    name: bytes | str,
    dims: Sequence[int] = (8,),
    kind: int = 0,
    offset: int = 0,
    *,
    order: str = LITTLE,
    count: int | None = None,
    length: int | None = None,
) -> bytes:
    """A row of the table; `count` overrides the number of dimensions, `length` that of the name."""
    dims_bytes = struct.pack(f"{order}{len(dims)}Q", *dims)
    number_of = struct.pack(order + "I", len(dims) if count is None else count)
    return (
        text(name, order, length) + number_of + dims_bytes + struct.pack(order + "IQ", kind, offset)
    )


def gguf(
    pairs: Sequence[bytes],
    infos: Sequence[bytes],
    data: bytes = b"",
    *,
    align: int = 32,
    order: str = LITTLE,
    version: int = 3,
    tensors: int | None = None,
    keys: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    """A whole file; `tensors` and `keys` override the counts."""
    counts = len(infos) if tensors is None else tensors, len(pairs) if keys is None else keys
    head = magic + struct.pack(order + "IQQ", version, *counts) + b"".join([*pairs, *infos])
    return head + bytes(-len(head) % align) + data


PAIRS = [pair("general.architecture", STRING, text("llama")), pair("x.count", U32, number(U32, 7))]
INFOS = [info("a", [8], 0, 0), info("b", [2, 4], 0, 32)]
D32, D64 = floats(8), floats(16)
GOOD = gguf(PAIRS, INFOS, D64)
TABLE = len(gguf(PAIRS, [], align=1))
END = len(gguf(PAIRS, INFOS, align=1))
START = len(GOOD) - len(D64)
MEGABYTE = bytes(1 << 20)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def case(
    name: str,
    content: bytes,
    error: type[Exception] | None = None,
    tensor: str | None = None,
    says: str | tuple[str, ...] = (),
    names: tuple[str, ...] | None = None,
) -> Case:
    words = (says,) if isinstance(says, str) else says
    told = (NAMES[error] if error else ()) if names is None else names
    return Case(
        name, lambda root: write(root / f"{name}.gguf", content), error, tensor, words, told
    )


def keyed(name: str, value: bytes, *args, **kw) -> Case:
    """A file with one more key."""
    return case(name, gguf([*PAIRS, value], INFOS, D64), *args, **kw)


def one(name: str, row: bytes, *args, data: bytes = D32, **kw) -> Case:
    """A file with one tensor."""
    return case(name, gguf(PAIRS, [row], data), *args, **kw)


# --- good files ---------------------------------------------------------------------------


def every_pair(order: str = LITTLE) -> list[bytes]:
    """Keys of every type, and an array of every type."""
    values = {
        U8: 250, I8: -3, U16: 65000, I16: -300, U32: 4_000_000_000, I32: -70000, F32: 1.5,
        U64: 2**64 - 1, I64: -(2**63), F64: 1e300,
    }  # fmt: skip
    pairs = [pair(f"k.{kind}", kind, number(kind, v, order), order) for kind, v in values.items()]
    pairs += [
        pair(f"arr.{kind}", ARRAY, array(kind, 3, 3 * number(kind, v, order), order), order)
        for kind, v in values.items()
    ]
    strings = b"".join(text(t, order) for t in ("", "one", "zwölf", "🙂"))
    return [
        *pairs,
        pair("k.bool", BOOL, b"\1", order),
        pair("arr.bool", ARRAY, array(BOOL, 3, b"\0\1\0", order), order),
        pair("k.string", STRING, text("zwölf 🙂", order), order),
        pair("k.empty", STRING, text("", order), order),
        pair("arr.string", ARRAY, array(STRING, 4, strings, order), order),
        pair("arr.none", ARRAY, array(STRING, 0, b"", order), order),
        pair("arr.no_floats", ARRAY, array(F32, 0, b"", order), order),
    ]


def nested(depth: int) -> bytes:
    """Arrays of one array each, `depth` in all, the innermost of one byte."""
    return array(ARRAY, 1, b"") * (depth - 1) + array(U8, 1, b"\5")


def swapped(floats_: bytes) -> bytes:
    return b"".join(floats_[i : i + 4][::-1] for i in range(0, len(floats_), 4))


BIG_INFOS = [info("a", [8], 0, 0, order=BIG), info("b", [2, 4], 0, 32, order=BIG)]
BIG_FILE = gguf(every_pair(BIG), BIG_INFOS, swapped(D64), order=BIG)
Q8 = struct.pack("<e", 0.5) + bytes(range(32))
Q4 = struct.pack("<e", -2.0) + bytes(range(100, 116))
HALVES = struct.pack("<8e", *range(8))
ALIGN = "general.alignment"

CONTROLS = [
    case("ok_basic", GOOD),
    case("ok_v2", gguf(PAIRS, INFOS, D64, version=2)),
    case("ok_align_64", gguf([*PAIRS, pair(ALIGN, U32, number(U32, 64))],
         [info("a"), info("b", [8], 0, 64)], D32 + bytes(32) + D32, align=64)),
    case("ok_align_8", gguf([*PAIRS, pair(ALIGN, U32, number(U32, 8))],
         [info("a", [3]), info("b", [1], 0, 16)], floats(3) + bytes(4) + floats(1), align=8)),
    case("ok_no_tail_padding", gguf(PAIRS, [info("a"), info("b", [3], 0, 32)], D64[:44])),
    case("ok_tail_padding", gguf(PAIRS, [info("a"), info("b", [3], 0, 32)], D64[:44] + bytes(20))),
    case("ok_empty", gguf([], [])),
    case("ok_empty_padded", gguf([], []) + bytes(8)),
    case("ok_no_tensors", gguf(PAIRS, [], align=1)),
    case("ok_all_kv", gguf(every_pair(), INFOS, D64)),
    case("ok_q8_0", gguf(PAIRS, [info("a", [64], 8)], Q8 + Q8[::-1])),
    case("ok_q4_0", gguf(PAIRS, [info("a", [32], 2)], Q4)),
    case("ok_q4_0_rows", gguf(PAIRS, [info("a", [64, 3, 2], 2)], 12 * Q4)),
    case("ok_f16", gguf(PAIRS, [info("a", [4, 2], 1)], HALVES)),
    case("ok_bf16", gguf(PAIRS, [info("a", [4, 2], 30)], HALVES)),
    case("ok_q8_nan_scale", gguf(PAIRS, [info("a", [32], 8)], b"\1\x7e" + Q8[2:])),
    case("ok_zero_dim", gguf(PAIRS, [info("z", [4, 0]), info("b", [8])], D32)),
    case("ok_zero_rows_q8", gguf(PAIRS, [info("z", [32, 0], 8), info("b", [8])], D32)),
    case("ok_trailing", GOOD + bytes(64)),
    case("big_endian_v3", BIG_FILE),
    case("ok_name_127", gguf(PAIRS, [info("n" * 127)], D32)),
    case("ok_names", gguf(PAIRS, [info("重み🙂"), info(" ", [8], 0, 32)], D64)),
    case("ndims_0", gguf(PAIRS, [info("a", [])], floats(1))),
    keyed("arr_nested", pair("x.n", ARRAY, array(
        ARRAY, 3, array(U8, 2, b"\1\2") + array(STRING, 1, text("s")) + array(ARRAY, 0, b"")))),
    keyed("arr_nested_4", pair("x.n", ARRAY, nested(4))),
    keyed("val_str_bad_utf8", pair("x.s", STRING, text(b"a\xff\xfeb"))),
    keyed("arr_str_bad_utf8", pair("x.s", ARRAY, array(STRING, 2, text(b"a\xff") + text("b")))),
]  # fmt: skip

# --- where the file begins, and how long it is -------------------------------------------------

STARTS = [
    case("empty_file", b"", TRUNCATED, None, "0 bytes"),
    case("magic_bad", gguf(PAIRS, INFOS, D64, magic=b"FUGG"), FORMAT, None, ("magic", "FUGG")),
    case("magic_zero", bytes(100), FORMAT, None, "magic"),
    case("magic_ggml", b"tjgg" + struct.pack("<8I", 1, 32000, 4096, 256, 32, 32, 128, 2), FORMAT,
         None, ("pre-GGUF", "ggjt"), KIND),
    case("version_0", gguf(PAIRS, INFOS, D64, version=0), FORMAT, None, ("version", "found 0")),
    case("version_1", gguf(PAIRS, INFOS, D64, version=1), FORMAT, None, ("version", "found 1")),
    case("version_1_big", gguf(PAIRS, INFOS, D64, version=1, order=BIG), FORMAT, None, "found 1"),
    case("version_4", gguf(PAIRS, INFOS, D64, version=4), FORMAT, None, ("version", "found 4")),
    case("version_4294967295", gguf(PAIRS, INFOS, D64, version=2**32 - 1), FORMAT, None,
         ("version", "4294967295")),
    *(case(f"trunc_at_{size}", GOOD[:size], TRUNCATED) for size in (3, 6, 20)),
    case("trunc_at_24", GOOD[:24], TRUNCATED, None, ("count", "0 bytes")),
    case("trunc_in_kv", GOOD[:40], TRUNCATED),
    case("trunc_in_kv_value", GOOD[: TABLE - 2], TRUNCATED),
    case("trunc_in_ti", GOOD[: TABLE + 40], TRUNCATED),
    case("trunc_in_ti_offset", GOOD[: END - 3], TRUNCATED, "b"),
    case("trunc_before_data", GOOD[:START], TRUNCATED, "a", ("32 bytes", "found 0")),
    case("trunc_before_padding", GOOD[:END], TRUNCATED, "a", ("32 bytes", "found 0")),
    case("trunc_data_1", GOOD[:-1], TRUNCATED, "b", ("32 bytes", "31 bytes", "1 missing")),
    case("trunc_data_half", GOOD[:-32], TRUNCATED, "b", ("32 bytes", "found 0")),
    case("trailing_bytes", GOOD + D32, FORMAT, None, "no tensor"),
    case("trailing_4mb", GOOD + bytes(4 << 20), FORMAT, None, "no tensor"),
    case("n_tensors_minus1", gguf(PAIRS, INFOS, D64, tensors=1), FORMAT, None, "no tensor"),
    case("is_safetensors", file_bytes({"a": A}, floats(4)), FORMAT, None, "safetensors", KIND),
    case("is_lfs_pointer", LFS, FORMAT, None, ("git-lfs pointer", "git lfs pull"), KIND),
    case("is_html", HTML, FORMAT, None, "HTML page", KIND),
    case("is_pickle", PICKLE, UNSAFE, None, "posix.system"),
    case("is_zip", b"PK\x03\x04\x14\0\0\0\0\0" + bytes(16) + b"\x10\0\0\0archive/data.pkl" +
         bytes(9), FORMAT, None, "PyTorch", KIND),
]  # fmt: skip

# --- counts ------------------------------------------------------------------------------------


def _counts(size: str, value: int) -> list[Case]:
    return [
        case(f"n_tensors_{size}", gguf(PAIRS, INFOS, D64, tensors=value), LIMIT, None,
             ("tensor count", "tensors", str(value))),
        case(f"n_kv_{size}", gguf(PAIRS, INFOS, D64, keys=value), LIMIT, None,
             ("key count", "metadata_keys", str(value))),
    ]  # fmt: skip


COUNTS = [
    *_counts("2e64", 2**64 - 1),
    *_counts("2e63", 2**63),
    *_counts("2e32", 2**32),
    case("n_tensors_plus1", gguf(PAIRS, INFOS, D64, tensors=3), LIMIT, None,
         ("tensor count", "at most 2", "found 3")),
    case("n_kv_plus1", gguf(PAIRS, INFOS, D64, keys=3), LIMIT, None,
         ("key count", "at most 2", "found 3")),
    case("n_kv_plus1_no_tensors", gguf(PAIRS, [], keys=3), TRUNCATED, None, "key 3"),
    case("n_tensors_plus1_big", gguf([], BIG_INFOS, D64, tensors=3, order=BIG), LIMIT, None,
         ("tensor count", "at most 2", "found 3")),
    case("n_kv_bomb_zeros", gguf([], [], keys=2**40) + MEGABYTE, LIMIT, None, "metadata_keys"),
    case("n_tensors_bomb_zeros", gguf([], [], tensors=2**40) + MEGABYTE, LIMIT, None, "tensors"),
    case("n_tensors_1000", gguf(PAIRS, INFOS, D64, tensors=1000), TRUNCATED, None,
         ("tensor count", "25000 bytes")),
    case("n_kv_1000", gguf(PAIRS, INFOS, D64, keys=1000), TRUNCATED, None, "14000 bytes"),
]  # fmt: skip

# --- keys and values ---------------------------------------------------------------------------


def _key_length(length: int) -> bytes:
    return text("x", length=length) + struct.pack("<IB", U8, 0)


KEYS = [
    keyed("key_len_2e63", _key_length(2**63), FORMAT, None, ("key 3", str(2**63))),
    keyed("key_len_2e64", _key_length(2**64 - 1), FORMAT, None, ("key 3", str(2**64 - 1))),
    keyed("key_len_1gb", _key_length(2**30), LIMIT, None, ("key 3", str(2**30))),
    keyed("key_len_past_eof", _key_length(5000), TRUNCATED, None, ("key 3", "5000 bytes")),
    keyed("key_empty", pair("", U8, b"\1"), TRUNCATED, None, ("key 3", "0 bytes")),
    keyed("key_70000", pair("k" * 70000, U8, b"\1"), FORMAT, None, ("key 3", "65535", "70000")),
    keyed("key_bad_utf8", pair(b"x.\xff", U8, b"\1"), FORMAT, None, ("key 3", "UTF-8", "FF")),
    keyed("key_nul", pair("x\0y", U8, b"\1"), FORMAT, None, ("key 3", "NUL")),
    keyed("key_dup", pair("general.architecture", STRING, text("gpt2")), FORMAT, None,
          ("general.architecture", "twice")),
]  # fmt: skip

VALUES = [
    keyed("val_type_13", pair("x.v", 13, b"\1"), FORMAT, None, ("x.v", "type", "found 13")),
    keyed("val_type_max", pair("x.v", 2**32 - 1, b"\1"), FORMAT, None, ("x.v", "4294967295")),
    keyed("val_bool_2", pair("x.v", BOOL, b"\2"), FORMAT, None, ("x.v", "0 or 1", "found 2")),
    keyed("arr_bool_2", pair("x.v", ARRAY, array(BOOL, 3, b"\0\1\x80")), FORMAT, None,
          ("x.v", "0 or 1", "128")),
    keyed("val_str_past_eof", pair("x.v", STRING, text("abc", length=100_000)), TRUNCATED, None,
          ("x.v", "100000 bytes")),
    keyed("val_str_2e63", pair("x.v", STRING, text("abc", length=2**63)), FORMAT, None,
          ("x.v", str(2**63))),
    keyed("arr_len_2e63_u8", pair("x.v", ARRAY, array(U8, 2**63, b"")), FORMAT, None,
          ("x.v", str(2**63))),
    keyed("arr_len_2e62_u32", pair("x.v", ARRAY, array(U32, 2**62, b"")), FORMAT, None,
          ("x.v", str(2**62))),
    keyed("arr_len_2e63_str", pair("x.v", ARRAY, array(STRING, 2**63, b"")), LIMIT, None,
          ("x.v", "array_items", str(2**63))),
    case("arr_len_2e40_str_zeros", gguf([], [], keys=1, align=1) + pair("x.v", ARRAY, array(
        STRING, 2**40, MEGABYTE)), LIMIT, None, ("x.v", "array_items", str(2**40))),
    keyed("arr_len_past_eof", pair("x.v", ARRAY, array(U64, 10**6, b"")), TRUNCATED, None,
          ("x.v", "8000000 bytes")),
    keyed("arr_str_past_eof", pair("x.v", ARRAY, array(STRING, 10**6, b"")), TRUNCATED, None,
          ("x.v", "8000000 bytes")),
    keyed("arr_str_item_2e63", pair("x.v", ARRAY, array(STRING, 2, text("") + text(
        "s", length=2**63))), FORMAT, None, ("x.v", str(2**63))),
    keyed("arr_type_13", pair("x.v", ARRAY, array(13, 1, b"\1")), FORMAT, None,
          ("x.v", "found 13")),
    keyed("arr_nested_5", pair("x.v", ARRAY, nested(5)), LIMIT, None, ("array_depth", "found 5")),
    keyed("arr_nested_50000", pair("x.v", ARRAY, nested(50_000)), LIMIT, None,
          ("x.v", "array_depth", "4")),
    keyed("align_0", pair(ALIGN, U32, number(U32, 0)), FORMAT, None, (ALIGN, "found 0")),
    keyed("align_3", pair(ALIGN, U32, number(U32, 3)), FORMAT, None, (ALIGN, "found 3")),
    keyed("align_13", pair(ALIGN, U32, number(U32, 13)), FORMAT, None, (ALIGN, "found 13")),
    keyed("align_2e31", pair(ALIGN, U32, number(U32, 2**31)), LIMIT, None, (ALIGN, str(2**31))),
    keyed("align_type_u64", pair(ALIGN, U64, number(U64, 32)), FORMAT, None, (ALIGN, "found 10")),
    keyed("align_type_str", pair(ALIGN, STRING, text("32")), FORMAT, None, (ALIGN, "found 8")),
]  # fmt: skip

# --- the table of tensors ----------------------------------------------------------------------

NAMED = [
    one("name_empty", info(""), TRUNCATED, None, ("tensor 1", "name", "0 bytes")),
    case("name_dup", gguf(PAIRS, [INFOS[0], info("a", [8], 0, 32)], D64), FORMAT, "a", "twice"),
    one("name_long", info("n" * 5000), FORMAT, None, ("tensor 1", "name", "5000")),
    one("name_128", info("n" * 128), FORMAT, None, ("tensor 1", "127", "128")),
    one("name_nul", info("a\0b"), FORMAT, None, ("tensor 1", "NUL")),
    one("name_bad_utf8", info(b"\xff\xfe"), FORMAT, None, ("tensor 1", "UTF-8", "FF")),
    one("name_len_2e63", info("a", length=2**63), FORMAT, None, ("tensor 1", str(2**63))),
]

DIMS = [
    one("ndims_5", info("a", [8, 1, 1, 1, 1]), FORMAT, "a", ("dims", "at most 4", "found 5")),
    one("ndims_2e32", info("a", count=2**32 - 1), FORMAT, "a", ("dims", "4294967295")),
    one("ndims_1e6", info("a", count=10**6), LIMIT, "a", ("dims", "at most 4", "1000000")),
    one("dim_negative", info("a", [2**64 - 1]), FORMAT, "a", ("dims", str(2**64 - 1))),
    one("dim_wrap_8", info("a", [2**63, 2, 8]), FORMAT, "a", ("dims", str(2**63))),
    one("dim_wrap_to_fit", info("a", [2**32 + 2, 2**32 + 4, 2**32]), FORMAT, "a", "dims"),
    one("dim_wrap_8_exact", info("a", [0x2000000000000001, 8]), FORMAT, "a", "dims"),
    one("dim_bytes_wrap", info("a", [2**62]), FORMAT, "a", ("dims", str(2**64))),
    one("dim_zero_huge", info("a", [0, 2**62, 2**62]), FORMAT, "a", "dims"),
    one("dim_1tb", info("a", [2**38]), TRUNCATED, "a", (str(2**40), "32 bytes")),
    one("dim_too_many", info("a", [9]), TRUNCATED, "a", ("36 bytes", "32 bytes", "4 missing")),
]

TYPES = [
    *(one(f"type_{number}", info("a", [32], number), FORMAT, "a", (name, "removed"))
      for number, name in ((4, "Q4_2"), (5, "Q4_3"), (31, "Q4_0_4_4"), (38, "IQ4_NL_8_8"))),
    *(one(f"type_{number}", info("a", [8], number), FORMAT, "a", ("type: unknown", str(number)))
      for number in (99, 2**31, 2**32 - 1)),
    one("q8_row_33", info("a", [33], 8), FORMAT, "a", ("dims", "multiple of 32", "33"), data=2 * Q8),
    one("q4_row_16x2", info("a", [16, 2], 2), FORMAT, "a", ("multiple of 32", "16"), data=Q4),
    one("q4k_row_128", info("a", [128], 12), FORMAT, "a", ("multiple of 256", "128"),
        data=bytes(144)),
    one("q8_scalar", info("a", [], 8), FORMAT, "a", "multiple of 32", data=Q8),
    case("q5_0_big_endian", gguf([], [info("a", [32], 6, order=BIG)], bytes(22), order=BIG), FORMAT,
         "a", ("type", "Q5_0", "big-endian")),
    one("q8_short", info("a", [64], 8), TRUNCATED, "a", ("68 bytes", "64 bytes"),
        data=(Q8 + Q8)[:64]),
]  # fmt: skip


def _second(name: str, offset: int, error: type[Exception], *says: str, first: int = 8) -> Case:
    rows = [info("a", [first]), info("b", [8], 0, offset)]
    return case(name, gguf(PAIRS, rows, D64 + D64), error, "b", says)


OFFSETS = [
    _second("off_past_eof", 2**20, TRUNCATED, "32 bytes", "0 bytes"),
    _second("off_2e64", 2**64 - 32, FORMAT, "offset", str(2**64 - 32)),
    _second("off_2e63", 2**63, FORMAT, "offset", str(2**63)),
    _second("off_misaligned", 4, FORMAT, "offset", "aligned", "multiple of 32", "found 4"),
    _second("off_overlap", 0, FORMAT, "offset", "another tensor", "expected 32", "found 0"),
    _second("off_partial_overlap", 32, FORMAT, "another tensor", "expected 64", "found 32",
            first=16),
    _second("off_hole", 64, FORMAT, "offset", "no tensor", "expected 32", "found 64"),
    case("off_hole_start", gguf(PAIRS, [info("a", [8], 0, 32)], D64), FORMAT, "a", "no tensor"),
    case("off_order", gguf(PAIRS, [info("a", [8], 0, 32), info("b")], D64), FORMAT, "a", "offset"),
]  # fmt: skip

# --- sets of files -----------------------------------------------------------------------------


def split_pairs(number_: int, count: int, total: int | None = None) -> list[bytes]:
    pairs = [
        pair("split.no", U16, number(U16, number_)),
        pair("split.count", U16, number(U16, count)),
    ]
    if total is not None:
        pairs.append(pair("split.tensors.count", I32, number(I32, total)))
    return pairs


def part(number_: int, count: int, total: int | None, *names: str) -> bytes:
    rows = [info(name, [8], 0, 32 * i) for i, name in enumerate(names)]
    own = PAIRS if number_ == 0 else []
    return gguf([*own, *split_pairs(number_, count, total)], rows, floats(8 * len(rows), number_))


def split(
    name: str,
    contents: dict[int, bytes | None],
    opened: int,
    *args,
    stem: str = "m",
    says: tuple[str, ...] = (),
    names: tuple[str, ...] | None = None,
) -> Case:
    """A set of three parts with some changed (None: not there); the part `opened` is named."""
    parts = {0: part(0, 3, 4, "a"), 1: part(1, 3, 4, "b", "c"), 2: part(2, 3, 4, "d"), **contents}

    def build(root: Path) -> Path:
        for k, content in parts.items():
            if content is not None:
                write(root / f"{stem}-{k + 1:05d}-of-00003.gguf", content)
        return root / f"{stem}-{opened + 1:05d}-of-00003.gguf"

    error = args[0] if args else None
    tensor = args[1] if len(args) > 1 else None
    told = (NAMES[error] if error else ()) if names is None else names
    return Case(name, build, error, tensor, says, told)


SPLITS = [
    case("split_alone", part(0, 3, 4, "a"), FORMAT, None,
         ("split.count", "3 parts", "split_alone.gguf"), PLACE),
    split("split_missing_2", {1: None}, 0, MISSING,
          says=("m-00002-of-00003.gguf: ", "m-00001-of-00003.gguf says", "3 files")),
    split("split_missing_first", {0: None}, 2, MISSING,
          says=("m-00001-of-00003.gguf: ", "m-00003-of-00003.gguf says")),
    split("split_no_wrong", {1: part(2, 3, 4, "b", "c")}, 0, FORMAT,
          says=("m-00002-of-00003.gguf", "split.no", "expected 1", "found 2")),
    split("split_no_wrong_opened", {1: part(2, 3, 4, "b", "c")}, 1, FORMAT, says=("split.no", "by the file's name")),
    split("split_no_beyond", {1: part(3, 3, 4, "b", "c")}, 1, FORMAT, says=("split.no", "found 3")),
    split("split_no_beyond_named", {3: part(3, 3, 4, "e")}, 3, FORMAT,
          says=("split.no", "less than 3", "found 3")),
    split("split_count_differs", {2: part(2, 4, 4, "d")}, 0, FORMAT,
          says=("m-00003-of-00003.gguf", "split.count", "expected 3", "found 4")),
    split("split_count_other_opened", {2: part(2, 4, 4, "d")}, 2, FORMAT, says=("split.count",)),
    split("split_tensors_wrong", {1: part(1, 3, 4, "b")}, 0, FORMAT,
          says=("split.tensors.count", "expected 3", "found 4")),
    split("split_tensor_twice", {2: part(2, 3, 4, "b")}, 0, FORMAT, "b",
          says=("m-00003-of-00003.gguf", "m-00002-of-00003.gguf")),
    split("split_part_is_whole", {1: gguf(PAIRS, INFOS, D64)}, 0, FORMAT,
          says=("m-00002-of-00003.gguf", "split.count", "no such key")),
    split("split_part_truncated", {1: part(1, 3, 4, "b", "c")[:-1]}, 0, TRUNCATED, "c",
          says=("m-00002-of-00003.gguf",)),
    split("split_part_pickle", {1: PICKLE}, 0, UNSAFE, says=("m-00002-of-00003.gguf",)),
    keyed("split_count_string", pair("split.count", STRING, text("3")), FORMAT, None,
          ("split.count", "found 3")),
    keyed("split_count_negative", pair("split.count", I32, number(I32, -1)), FORMAT, None,
          ("split.count", "found -1")),
    keyed("split_count_bool", pair("split.count", BOOL, b"\1"), FORMAT, None, "split.count"),
]  # fmt: skip

GGUF_BAD = [
    *STARTS, *COUNTS, *KEYS, *VALUES, *NAMED, *DIMS, *TYPES, *OFFSETS, *SPLITS
]  # fmt: skip
GGUF = [*CONTROLS, *GGUF_BAD]
