"""PyTorch files: good, odd, broken and hostile ones. The payloads only write a marker file.

Pickles and archives are put together byte by byte: what torch.save writes is in oracle.py.
"""

import io
import struct
import tarfile
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
    TRUNCATED,
    UNSAFE,
    Case,
    floats,
)

CORRUPT = CheckpointCorruptError
SUMS = ("expected", "found")  # checksum expected and found
MARKER = "MAXJAX_PWNED"
ROOT = "m/"

# --- pickles --------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """An integer of any size."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def numbers(values: Any) -> bytes:
    if isinstance(values, bytes):
        return values
    return tuple_of(*(item if isinstance(item, bytes) else number(item) for item in values))


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + tuple_of(*arguments) + b"R"


HOOKS = call(name("collections", "OrderedDict"))
FLOAT = name("torch", "FloatStorage")


def tensor(
    size: Any = (4, 3),
    stride: Any = (3, 1),
    offset: int = 0,
    *,
    key: str = "0",
    numel: int = 12,
    kind: bytes = FLOAT,
    location: str = "cpu",
    word: str = "storage",
    hooks: bytes = HOOKS,
) -> bytes:
    """A call of _rebuild_tensor_v2; the sizes of the default fit storage 0, which has 12 floats."""
    storage = tuple_of(text(word), kind, text(key), text(location), number(numel)) + b"Q"
    return call(
        name("torch._utils", "_rebuild_tensor_v2"),
        storage, number(offset), numbers(size), numbers(stride), b"\x89", hooks,
    )  # fmt: skip


def dict_of(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def pickle(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


A = tensor()
B = tensor((2,), (1,), key="1", numel=2)
STATE = dict_of(a=A, b=B)
DATA = {"data/0": floats(12), "data/1": floats(2, 100.0)}

# --- archives -------------------------------------------------------------------------------------


@dataclass
class Member:
    """A member of an archive; what is given beside the data is written, whether true or not."""

    name: str
    data: bytes
    method: int = 0
    crc: int | None = None
    directory_crc: int | None = None
    size: int | None = None
    directory_size: int | None = None
    flags: int = 0
    header: int | None = None


def zipped(members: list[Member]) -> bytes:
    body, directory = bytearray(), bytearray()  # bytes would be copied for each of many members
    for m in members:
        raw, crc = m.name.encode(), zlib.crc32(m.data) if m.crc is None else m.crc
        size = len(m.data) if m.size is None else m.size
        kind = (20, m.flags, m.method, 0, 0x21)
        header = len(body) if m.header is None else m.header
        local = struct.pack("<5H3L2H", *kind, crc, len(m.data), size, len(raw), 0)
        crc = crc if m.directory_crc is None else m.directory_crc
        size = size if m.directory_size is None else m.directory_size
        sizes = (crc, len(m.data), size, len(raw), 0, 0, 0, 0, 0, header)
        directory += b"PK\1\2" + struct.pack("<6H3L5H2L", 20, *kind, *sizes) + raw
        body += b"PK\3\4" + local + raw + m.data
    count = len(members)
    end = struct.pack("<4H2LH", 0, 0, count, count, len(directory), len(body), 0)
    return bytes(body + directory + b"PK\5\6" + end)


def members(value: bytes = STATE, data: dict[str, bytes] = DATA, **more: bytes) -> list[Member]:
    """What torch.save writes for a value, whose pickle may also be given whole in `more`."""
    content = {"data.pkl": pickle(value), "byteorder": b"little", **data, "version": b"3\n"}
    return [Member(ROOT + name, part) for name, part in {**content, **more}.items()]


def changed(number: int, **changes: Any) -> list[Member]:
    """The usual members, one of them with other fields."""
    found = members()
    for field, value in changes.items():
        setattr(found[number], field, value)
    return found


@cache
def deflated(unit: bytes, megabytes: int) -> tuple[bytes, int, int]:
    """(deflated, CRC-32, size) of a byte again and again."""
    packer, crc, out = zlib.compressobj(9, zlib.DEFLATED, -15), 0, b""
    for _ in range(megabytes):
        out += packer.compress(unit * (1 << 20))
        crc = zlib.crc32(unit * (1 << 20), crc)
    return out + packer.flush(), crc, megabytes << 20


def bomb(name: str, unit: bytes, megabytes: int) -> Member:
    data, crc, size = deflated(unit, megabytes)
    return Member(ROOT + name, data, 8, crc, size=size)


# --- cases ----------------------------------------------------------------------------------------


def content(
    name: str,
    made: bytes | Callable[[Path], bytes],
    error: type[Exception] | None = None,
    tensor: str | None = None,
    says: str | tuple[str, ...] = (),
    names: tuple[str, ...] | None = None,
    end: str = "pt",
) -> Case:
    """A file of these bytes; a function gets the path of the marker that a payload writes."""

    def build(directory: Path) -> Path:
        path = directory / f"{name}.{end}"
        marker = directory / MARKER
        path.write_bytes(made if isinstance(made, bytes) else made(marker))
        return path

    words = (says,) if isinstance(says, str) else says
    default = {**NAMES, CORRUPT: SUMS}[error] if error else ()
    return Case(name, build, error, tensor, words, default if names is None else names)


def value(name: str, made: bytes, *args: Any, data: dict[str, bytes] = DATA, **kw: Any) -> Case:
    """An archive whose pickle makes a value."""
    return content(name, zipped(members(made, data)), *args, **kw)


def raw(name: str, made: bytes, *args: Any, **kw: Any) -> Case:
    """An archive whose data.pkl is these bytes."""
    return content(name, zipped(members(**{"data.pkl": made})), *args, **kw)


def open_payload(marker: Path, module: str = "builtins") -> bytes:
    return call(name(module, "open"), text(str(marker)), text("w"))


def payload(case: str, made: Callable[[Path], bytes], says: str, tensor: str = "a") -> Case:
    """An archive with a tensor, and one whose value is the payload's."""
    build = lambda marker: zipped(members(dict_of(a=made(marker), b=B)))
    return content(case, build, UNSAFE, tensor, says)


def shell(marker: Path) -> bytes:
    return text(f"touch '{marker}'")


def code(marker: Path) -> bytes:
    return text(f"open({str(marker)!r}, 'w')")


def nested(marker: Path) -> bytes:
    inner = pickle(open_payload(marker))
    return b"C" + bytes([len(inner)]) + inner if len(inner) < 256 else text(inner)


def short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def legacy(value: bytes, keys: bytes = b"]", storages: bytes = b"", magic: bytes = b"") -> bytes:
    """A file from before version 1.6."""
    magic = magic or number(0x1950A86A20F9469CFC6C)
    facts = dict_of(protocol_version=number(1001), little_endian=b"\x88")
    parts = (magic, number(1001), facts, value, keys)
    return b"".join(pickle(part) for part in parts) + storages


def legacy_tensor(**changes: Any) -> bytes:
    """Of the legacy format: a persistent id has a sixth item there."""
    return tensor(**changes).replace(b"tQ", b"NtQ", 1)


LEGACY = legacy(
    dict_of(a=legacy_tensor()), b"](" + text("0") + b"e", struct.pack("<q", 12) + floats(12)
)


LEGACY_VIEWS = legacy(
    dict_of(
        a=legacy_tensor(),
        t=legacy_tensor(size=(3, 4), stride=(1, 3)),
        h=legacy_tensor(
            size=(5,), stride=(1,), numel=5, key="2", kind=name("torch", "BFloat16Storage")
        ),
        n=dict_of(w=legacy_tensor(size=(2,), stride=(1,), numel=2, key="1"), x=number(3)),
        l=b"]" + text("y") + b"a",
    ),
    b"](" + text("0") + text("1") + text("2") + b"e",
    struct.pack("<q", 12) + floats(12) + struct.pack("<q", 2) + floats(2)
    + struct.pack("<q", 5) + b"\x80\x3f" * 5,
)  # fmt: skip


STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "bfloat16": "BFloat16Storage",
    "float16": "HalfStorage", "int64": "LongStorage", "int32": "IntStorage",
    "int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip


def saved(arrays: dict[str, np.ndarray], *, is_legacy: bool = False) -> bytes:
    """What torch.save writes for a dict of arrays, or what it wrote before version 1.6.

    Views of one array have one storage in it, as views of a tensor have.
    """
    storages: dict[int, tuple[str, np.ndarray]] = {}
    tensors = {}
    for key, array in arrays.items():
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        index, _ = storages.setdefault(id(owner), (str(len(storages)), owner))
        start = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        tensors[key] = (legacy_tensor if is_legacy else tensor)(
            size=array.shape,
            stride=tuple(stride // array.itemsize for stride in array.strides),
            offset=start // array.itemsize,
            key=index,
            numel=owner.size,
            kind=name("torch", STORAGES[array.dtype.name]),
        )
    value = dict_of(**tensors)
    if not is_legacy:
        data = {f"data/{index}": owner.tobytes() for index, owner in storages.values()}
        return zipped(members(value, data))
    keys = b"](" + b"".join(text(index) for index, _ in storages.values()) + b"e"
    data = b"".join(struct.pack("<q", a.size) + a.tobytes() for _, a in storages.values())
    return legacy(value, keys, data)


ARRAYS = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "flags": np.array([True, False, True]),
    "scalar": np.array(2.5, np.float32),
}


def tar(marker: Path) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for part in ("storages", "tensors", "pickle"):
            data = pickle(open_payload(marker) if part == "storages" else number(0))
            info = tarfile.TarInfo(part)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def hidden_array(marker: Path) -> bytes:
    """The .npy form of an array of objects, which is a pickle behind its header."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header = header.ljust(117) + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + pickle(open_payload(marker))


def script(marker: Path) -> list[Member]:
    return members(**{
        "constants.pkl": pickle(open_payload(marker)), "code/__torch__.py": b"class M(Module): ..."
    })  # fmt: skip


CONTROLS = [
    value("ok_basic", STATE),
    content("ok_bin_ext", zipped(members()), end="bin"),
    value("ok_ordered_dict", call(name("collections", "OrderedDict")) + STATE[1:]),
    value("ok_parameter", dict_of(a=call(
        name("torch._utils", "_rebuild_parameter"), A, b"\x88", HOOKS))),
    value("ok_transposed", dict_of(a=tensor((3, 4), (1, 3)))),
    value("ok_offset_view", dict_of(a=A, v=tensor((3,), (1,), 3))),
    value("ok_scalar", dict_of(a=tensor((), ()))),
    value("ok_empty_tensor", dict_of(a=tensor((0,), (1,), key="1", numel=0)),
          data={"data/1": b""}),
    value("ok_bf16", dict_of(a=tensor(kind=name("torch", "BFloat16Storage"))),
          data={"data/0": floats(6)}),
    value("ok_cuda_location", dict_of(a=tensor(location="cuda:0"))),
    content("ok_big_endian", zipped(members(byteorder=b"big"))),
    content("ok_extra_member", zipped([*members(), Member(f"../{MARKER}_zipslip", b"x")])),
    value("ok_nan", STATE, data={**DATA, "data/0": struct.pack("<I", 0x7FC01234) * 12}),
    content("ok_crc_zero", zipped([Member(m.name, m.data, crc=0) for m in members()])),
    content("ok_20000_members", zipped(
        [*members(b"}", {}), *(Member(f"{ROOT}x/{i}", b"") for i in range(20000))])),
    content("ok_saved", saved(ARRAYS)),
    content("ok_saved_legacy", saved(ARRAYS, is_legacy=True)),
    content("ok_legacy", LEGACY),
    content("ok_legacy_views", LEGACY_VIEWS),
    value("key_int", b"}(" + number(7) + A + b"u"),
    value("key_bytes_like_tensor", dict_of(a=A, b=text("plain"))),
]  # fmt: skip

ARCHIVE_OF_TWO = [*members(), *(Member(m.name.replace("m/", "n/"), m.data) for m in members())]

RCE = [
    payload("rce_builtins_open", open_payload, "builtins.open"),
    payload("rce_builtins_open_py2", lambda m: open_payload(m, "__builtin__"), "__builtin__.open"),
    payload("rce_os_system", lambda m: call(name("os", "system"), shell(m)), "os.system"),
    payload("rce_posix_system", lambda m: call(name("posix", "system"), shell(m)), "posix.system"),
    payload("rce_subprocess", lambda m: call(name("subprocess", "getoutput"), shell(m)),
            "subprocess.getoutput"),
    payload("rce_exec", lambda m: call(name("builtins", "exec"), code(m)), "builtins.exec"),
    payload("rce_eval", lambda m: call(name("builtins", "eval"), code(m)), "builtins.eval"),
    payload("rce_inst", lambda m: b"(" + text(str(m)) + text("w") + b"ibuiltins\nopen\n",
            "builtins.open"),
    payload("rce_obj", lambda m: b"(" + name("builtins", "open") + text(str(m)) + text("w") + b"o",
            "builtins.open"),
    payload("rce_stack_global",
            lambda m: short("builtins") + short("open") + b"\x93" + tuple_of(
                text(str(m)), text("w")) + b"R", "builtins.open"),
    payload("rce_dotted",
            lambda m: call(short("torch.serialization") + short("os.system") + b"\x93", shell(m)),
            "torch.serialization.os.system"),
    payload("rce_dotted_allowed",
            lambda m: short("collections") + short("OrderedDict.fromkeys.__class__") + b"\x93",
            "OrderedDict.fromkeys.__class__"),
    payload("rce_nested_pickle", lambda m: call(name("_pickle", "loads"), nested(m)),
            "_pickle.loads"),
    payload("rce_load_from_bytes",
            lambda m: call(name("torch.storage", "_load_from_bytes"), nested(m)),
            "torch.storage._load_from_bytes"),
    payload("rce_getattr", lambda m: call(
        call(name("builtins", "getattr"),
             call(name("importlib", "import_module"), text("os")), text("system")), shell(m)),
            "builtins.getattr"),
    payload("rce_partial", lambda m: call(
        call(name("functools", "partial"), name("builtins", "open"), text(str(m)), text("w"))),
            "functools.partial"),
    payload("rce_newobj",
            lambda m: name("subprocess", "Popen") + tuple_of(text("touch x")) + b"\x81",
            "subprocess.Popen"),
    payload("rce_newobj_of_allowed", lambda m: name("torch", "Tensor") + b")\x81", "NEWOBJ"),
    payload("rce_build", lambda m: name("torch", "Tensor") + text(str(m)) + b"b", "BUILD"),
    payload("rce_build_tensor", lambda m: A + dict_of(__class__=number(1)) + b"b", "BUILD"),
    payload("rce_build_state", lambda m: b"}" + text("state") + b"b", "BUILD"),
    payload("rce_hidden_global_newline", lambda m: call(name("torch", "os.system"), shell(m)),
            "torch.os.system"),
    payload("rce_numpy_load", lambda m: call(name("numpy", "load"), text(str(m)), b"N", b"\x88"),
            "numpy.load"),
    payload("rce_of_a_class", lambda m: call(name("torch.nn.parameter", "Parameter"), A),
            "torch.nn.parameter.Parameter"),
    content("rce_code_then_broken",
            lambda m: zipped(members(**{"data.pkl": b"\x80\x02" + open_payload(m) + b"\xff\xff"})),
            UNSAFE, None, "builtins.open"),
    content("rce_plain_pickle", lambda m: pickle(open_payload(m)), UNSAFE, None, "builtins.open",
            end="bin"),
    content("rce_plain_pickle_0", lambda m: name("builtins", "open") + b"(X\1\0\0\0xtR.", UNSAFE,
            None, "builtins.open"),
    content("rce_polyglot", lambda m: pickle(open_payload(m)) + zipped(members()), UNSAFE, None,
            "builtins.open"),
    content("rce_legacy_magic", lambda m: legacy(STATE, magic=open_payload(m)), UNSAFE, None,
            "builtins.open"),
    content("rce_legacy_value", lambda m: legacy(dict_of(a=open_payload(m))), UNSAFE, "a",
            "builtins.open"),
    content("rce_legacy_keys", lambda m: legacy(b"}", open_payload(m)), UNSAFE, None,
            "builtins.open"),
    content("rce_bin_symlinked_npy",
            lambda m: zipped(members(**{"data.pkl": hidden_array(m)})), UNSAFE, None, "NumPy",
            end="bin"),
    raw("rce_stack_global_of_nothing", b"\x93.", UNSAFE, None, "name is not text"),
    content("rce_torchscript", lambda m: zipped(script(m)), UNSAFE, None, "TorchScript"),
    content("rce_tar", tar, UNSAFE, None, "tar archive"),
    raw("pk_ext1", b"\x80\x02\x82\x01.", UNSAFE, None, "EXT1"),
]  # fmt: skip

DEEP = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
TUPLES = b"\x80\x02}" + text("a") + number(1) + b"".join(b"2\x86" for _ in range(60)) + b"s."
DICTS = (
    b"\x80\x02" + dict_of(a=number(1)) + b"q\0"
    + b"".join(
        b"}(" + text("l") + b"h" + bytes([i]) + text("r") + b"h" + bytes([i]) + b"uq"
        + bytes([i + 1]) for i in range(40)
    ) + b"."
)  # fmt: skip

PICKLES = [
    raw("pk_long_binput", b"\x80\x02}r\xff\xff\xff\xff.", LIMIT, None,
        ("4294967295", "pickle_instructions")),
    raw("pk_binput_sparse", b"\x80\x02}r\0\0\0\x10.", LIMIT, None, (str(2**28), "pickle_instructions")),
    raw("pk_binbytes8_huge", b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.", LIMIT, None,
        (str(2**40), "pickle_bytes")),
    raw("pk_unicode8_2e63", b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"x.", LIMIT, None,
        (str(2**63), "pickle_bytes")),
    raw("pk_unicode_4g", b"\x80\x02X\xff\xff\xff\xffx.", LIMIT, None, (str(2**32 - 1),)),
    raw("pk_long4_2g", b"\x80\x02\x8b\xff\xff\xff\x7fx.", LIMIT, None, (str(2**31 - 1),)),
    raw("pk_long4_digits", b"\x80\x02\x8b\x00\x10\0\0" + b"\x55" * 4096 + b".", LIMIT, None,
        "json_digits"),
    raw("pk_long1_digits", b"\x80\x02I" + b"7" * 200_000 + b"\n.", LIMIT, None,
        ("200000", "json_digits")),
    raw("pk_frame_2e63", b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"}.", LIMIT, None,
        (str(2**63), "pickle_bytes")),
    raw("pk_frame_short", b"\x80\x04\x95" + struct.pack("<Q", 99) + b"}.", TRUNCATED, None,
        ("99 bytes", "2 bytes")),
    raw("pk_truncated", pickle(STATE)[: len(pickle(STATE)) // 2], TRUNCATED),
    raw("pk_no_stop", pickle(STATE)[:-1], TRUNCATED, None, ("1 bytes", "0 bytes")),
    raw("pk_empty", b"", TRUNCATED, None, ("1 bytes", "0 bytes")),
    raw("pk_after_stop", pickle(STATE) + b"x", FORMAT, None, "after the end"),
    raw("pk_stack_underflow", b"\x80\x02R.", FORMAT, None, "empty stack"),
    raw("pk_stop_of_nothing", b"\x80\x02.", FORMAT, None, "empty stack"),
    raw("pk_no_mark", b"\x80\x02t.", FORMAT, None, "mark"),
    raw("pk_bad_memo", b"\x80\x02h\x05.", FORMAT, None, ("memo", "5")),
    raw("pk_bad_opcode", b"\x80\x02\xff.", FORMAT, None, "FF"),
    raw("pk_proto_99", b"\x80\x63}.", FORMAT, None, ("protocol", "99")),
    raw("pk_bad_utf8", b"\x80\x02}" + text(b"\xff") + b"K\1s.", FORMAT, None, ("UTF-8", "FF")),
    raw("pk_bad_number", b"\x80\x02I1_0\n.", FORMAT, None, "1_0"),
    raw("pk_append_to_dict", b"\x80\x02}K\1a.", FORMAT, None, ("list", "dict")),
    raw("pk_odd_items", b"\x80\x02}(K\1u.", FORMAT, None, "pairs"),
    raw("pk_key_list", b"\x80\x02}]K\1s.", FORMAT, None, "key of a dict"),
    raw("pk_key_collides", b"\x80\x02}" + number(2**61 - 1) + b"K\1s.", FORMAT, None, "2^61"),
    raw("pk_call_of_dict", b"\x80\x02})R.", FORMAT, None, "not a global"),
    raw("pk_call_with_list", b"\x80\x02" + name("torch", "Size") + b"]R.", FORMAT, None, "tuple"),
    raw("pk_billion_laughs", TUPLES, LIMIT, None, "pickle_items"),
    raw("pk_dict_laughs", DICTS, LIMIT, None, "pickle_items"),
    raw("pk_self_dict", b"\x80\x02}q\0" + text("a") + b"h\0s.", LIMIT, None, "pickle_depth"),
    raw("pk_self_list", b"\x80\x02}" + text("a") + b"]q\0h\0as.", LIMIT, None, "pickle_depth"),
    raw("pk_deep_100000", DEEP, LIMIT, None, ("pickle_depth", "100")),
    value("top_list", b"]" + A + b"a", FORMAT, None, ("top level", "list")),
    value("top_int", number(7), FORMAT, None, ("top level", "7")),
    value("top_tensor", A, FORMAT, None, "top level"),
    value("key_dup", dict_of(a=A) + b"(" + text("a") + tensor((1,), (1,)) + b"u", FORMAT, "a",
          "twice"),
    value("key_dup_dotted", dict_of(**{"a.b": A, "a": dict_of(b=A)}), FORMAT, "a.b", "dots"),
]  # fmt: skip


def view(name: str, *args: Any, says: str | tuple[str, ...], error: Any = FORMAT, **kw) -> Case:
    """A file whose tensor `a` views storage 0 in a way that is wrong."""
    return value(name, dict_of(a=tensor(*args, **kw), b=B), error, "a", says)


def unsupported(function: str, *arguments: bytes) -> bytes:
    return dict_of(a=call(name("torch._utils", function), *arguments))


A_OF_INT4 = dict_of(
    a=A.replace(b"_v2", b"_v3").replace(b"FloatS", b"UntypedS")[:-2] + name("torch", "int4") + b"tR"
)

TENSORS = [
    view("t_storage_missing", key="9", says=("storage", "'9'")),
    view("t_storage_key_trav", key="../data.pkl", says="../data.pkl", error=UNSAFE),
    value("t_storage_short", STATE, TRUNCATED, "a", ("48 bytes", "44 bytes"),
          data={**DATA, "data/0": floats(11)}),
    value("t_storage_long", STATE, FORMAT, "a", ("48 bytes", "52 bytes"),
          data={**DATA, "data/0": floats(13)}),
    view("t_numel_negative", numel=-1, says=("numel", "-1")),
    view("t_numel_2e60", numel=2**60, says=("numel", str(2**62), "storage_bytes"), error=LIMIT),
    view("t_size_past", (5, 3), says=("size and stride", "12 values", "15")),
    view("t_stride_past", (4, 3), (300, 1), says=("stride", "903")),
    view("t_stride_negative", (4, 3), (-3, 1), says=("stride", "-3")),
    view("t_offset_past", offset=10, says=("12 values", "22")),
    view("t_offset_behind", offset=12, says=("storage offset", "24")),
    view("t_offset_negative", offset=-4, says=("storage offset", "-4")),
    view("t_offset_2e62", offset=2**62, says=("storage offset", str(2**62 + 12))),
    view("t_size_negative", (-4, -3), says=("size", "-4")),
    view("t_size_wrap", (2**32, 2**32), (0, 0), says=("size", str(2**64))),
    view("t_size_empty_huge", (0, 2**62, 2**62), (1, 1, 1), says=("size", "tensor_bytes"),
         error=LIMIT),
    view("t_size_65_dims", (1,) * 65, (1,) * 65, says=("dimensions", "65")),
    view("t_expand_bomb", (2**36,), (0,), says=("size and stride", str(2**38), "expansion"),
         error=LIMIT),
    view("t_stride_rank", (4, 3), (3,), says=("stride", "2 numbers", "1 numbers")),
    view("t_size_bool", (b"\x88", 3), says=("size", "True")),
    view("t_size_list", b"]", says=("size", "tuple")),
    view("t_storage_class", kind=name("torch", "NopeStorage"), says=("dtype", "NopeStorage")),
    view("t_storage_quantised", kind=name("torch", "QUInt8Storage"), says=("QUInt8Storage",)),
    view("t_storage_complex", kind=name("torch", "ComplexHalfStorage"), says="ComplexHalf"),
    view("t_storage_class_evil", kind=name("builtins", "open"), says="builtins.open",
         error=UNSAFE),
    view("t_storage_class_device", kind=name("torch", "device"), says="torch.device"),
    view("t_persid_not_storage", word="module", says="module"),
    view("t_size_str", (text("4"), 3), says=("size", "'4'")),
    view("t_meta_hooks", hooks=tuple_of(name("builtins", "open")), says="builtins.open",
         error=UNSAFE),
    view("t_hooks", hooks=dict_of(x=number(1)), says="backward_hooks"),
    value("t_storage_twice", dict_of(a=A, b=tensor(kind=name("torch", "IntStorage"))), FORMAT, "b",
          ("disagree", "int32")),
    value("t_arguments", dict_of(a=call(name("torch._utils", "_rebuild_tensor_v2"))), FORMAT, "a",
          "arguments"),
    value("t_no_storage", dict_of(a=call(name("torch._utils", "_rebuild_tensor"), *[b"N"] * 4)),
          FORMAT, "a", "storage"),
    value("t_parameter_of_none", dict_of(a=call(
        name("torch._utils", "_rebuild_parameter"), b"N", b"\x88", HOOKS)), FORMAT, "a", "None"),
    value("t_negated", dict_of(a=A[:-2] + dict_of(neg=b"\x88") + b"tR"), FORMAT, "a", "neg"),
    value("t_meta", unsupported("_rebuild_meta_tensor_no_storage"), FORMAT, "a", "meta device"),
    value("t_sparse", unsupported("_rebuild_sparse_tensor"), FORMAT, "a", "sparse"),
    value("t_quantised", unsupported("_rebuild_qtensor"), FORMAT, "a", "quantised"),
    value("t_int4", A_OF_INT4, FORMAT, "a", ("dtype", "torch.int4")),
    value("t_nested", unsupported("_rebuild_nested_tensor"), FORMAT, "a", "nested"),
    content("t_legacy_missing", legacy(dict_of(a=legacy_tensor())), FORMAT, "a", "storage"),
    content("t_legacy_unasked", legacy(b"}", b"](" + text("0") + b"e", bytes(8)), FORMAT, None,
            "keys of the storages"),
    content("t_legacy_short", LEGACY[:-4], TRUNCATED, "a", ("56 bytes", "52 bytes")),
    content("t_legacy_no_count", LEGACY[:-52], TRUNCATED, "a", ("8 bytes", "4 bytes")),
    content("t_legacy_count", LEGACY[:-56] + struct.pack("<q", 11) + floats(11), TRUNCATED, "a",
            ("48 bytes", "44 bytes")),
    content("t_legacy_count_huge", LEGACY[:-56] + struct.pack("<q", -1) + floats(12), LIMIT, "a",
            "storage_bytes"),
    content("t_legacy_rest", LEGACY + b"x", FORMAT, None, "after the last storage"),
    content("t_legacy_cut", LEGACY[:60], TRUNCATED),
    content("t_legacy_magic", legacy(STATE, magic=number(7)), FORMAT, None, ("magic", "7")),
]  # fmt: skip

WHOLE = zipped(members())
FLIPPED = bytearray(WHOLE)
FLIPPED[WHOLE.index(floats(12)) + 5] ^= 4

ZIPS = [
    content("zip_cut_end", WHOLE[:-30], TRUNCATED),
    content("zip_cut_mid", WHOLE[: len(WHOLE) // 2], TRUNCATED),
    content("zip_crc_flip", bytes(FLIPPED), CORRUPT, "a", "m/data/0"),
    content("zip_crc_flip_pickle", WHOLE.replace(b"cpu", b"cpv", 1), CORRUPT, None, "data.pkl"),
    # Only the directory has a CRC where the sizes stand behind the data; `version` is not read.
    content("zip_crc_dir_flip", zipped(
        changed(4, flags=8, crc=0, directory_crc=zlib.crc32(b"3\n") ^ 1))),
    content("zip_no_data_pkl", zipped(members()[1:]), FORMAT, None, "data.pkl"),
    content("zip_of_arrays", zipped([Member("a.npy", b"x")]), FORMAT, None, ("data.pkl", "a.npy")),
    content("zip_dup_data_pkl", lambda m: zipped(
        [*members(), Member("m/data.pkl", pickle(open_payload(m)))]), UNSAFE, None, "two pickles"),
    content("zip_dup_storage", zipped([*members(), Member("m/data/0", floats(12, 7.0))]), FORMAT,
            None, ("m/data/0", "twice")),
    content("zip_two_roots", zipped(ARCHIVE_OF_TWO), UNSAFE, None, ("two pickles", "n/data.pkl")),
    content("zip_bomb_storage", lambda m: zipped(
        [*members(data={}), bomb("data/0", b"\0", 64)]), LIMIT, None,
            ("m/data/0", str(64 << 20), "member_ratio")),
    content("zip_bomb_pickle", lambda m: zipped([bomb("data.pkl", b"N", 65)]), LIMIT, None,
            ("m/data.pkl", str(65 << 20))),
    content("zip_size_4g", zipped(changed(2, directory_size=2**32 - 2)), LIMIT, None,
            ("m/data/0", str(2**32 - 2))),
    content("zip_local_offset", zipped(changed(2, header=60)), FORMAT, None, "overlaps"),
    content("zip_method_99", zipped(changed(2, method=99)), FORMAT, None, "99"),
    content("zip_encrypted", zipped(changed(2, flags=1)), FORMAT, None, "encrypted"),
    content("zip_byteorder", zipped(members(byteorder=b"middle")), FORMAT, None, "middle"),
]  # fmt: skip

KINDS = [
    content("is_empty", b"", TRUNCATED, None, "0 bytes"),
    content("is_safetensors", GOOD, FORMAT, None, ("safetensors", "Rename"), KIND),
    content("is_html", HTML, FORMAT, None, "HTML", KIND),
    content("is_lfs_pointer", LFS, FORMAT, None, "git lfs pull", KIND),
    content("is_text", b"hello, world, no pickle", FORMAT, None, "not a PyTorch checkpoint", KIND),
    content("is_nothing", bytes(100), FORMAT, None, "not a PyTorch checkpoint", KIND),
]

PYTORCH = [*CONTROLS, *RCE, *PICKLES, *TENSORS, *ZIPS, *KINDS]
