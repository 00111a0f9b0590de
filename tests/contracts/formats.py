"""The formats of checkpoints as data: what ``test_formats.py`` holds of every one of them.

To add a format, add a row to ``FORMATS``: every contract then runs over it. A row needs

* ``write``: a function that writes tensors to a path with the format's own library, which knows
  nothing of maxjax; and ``load``, which reads them with that library;
* ``save``: a function that writes them with maxjax, or None if maxjax only reads the format;
* ``kinds``: the dtypes of the format, and its types of quantised blocks;
* ``damage``: a function that yields files of a good checkpoint with one size, count or offset in
  a header changed, built from :func:`binary` and :func:`texts` below;
* what the format cannot have: ``shapes``, ``is_single``; and what its reader may do in addition:
  ``cut``, ``unneeded``, ``harmless``, each with its reason beside it.

Run as a program, this file is the process that ``scripts/save_trials.py`` forks, and that is killed
in the middle of a save.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxjax.dtype import DType
from maxjax.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointTruncatedError,
)


class Tensor(NamedTuple):
    """Values with the name of their dtype, or the bytes of quantised blocks with the name of their type."""

    kind: str
    array: np.ndarray


Tensors = dict[str, Tensor]
# Of a tensor of 2 KiB: it needs no padding in any format, and orbax keeps it in a file of its own.
SHAPE = (32, 16)
# A damaged file: what is wrong with it, its path, and its content.
Damage = Iterator[tuple[str, Path, bytes]]


@dataclass(frozen=True)
class Row:
    """One format.

    Attributes:
        name: name of the row.
        path: name of the file or directory that is opened.
        kinds: names of the dtypes and of the types of quantised blocks.
        write: writes tensors to a path, with the format's library.
        load: reads the tensors at a path, with the format's library.
        damage: the damaged files of a good checkpoint of two float32 tensors at a path.
        save: writes tensors to a path, with maxjax; an earlier checkpoint there is replaced.
        shapes: shapes that are written beside a matrix of each kind.
        is_single: whether a checkpoint is one tensor, with the name "" or that of the file.
        cut: errors of a file that is cut.
        unneeded: files that may be cut without an error: pattern of their paths in the checkpoint.
        optional: files that may be missing without an error: pattern of their paths.
        harmless: damage without an error: pattern of what :attr:`damage` says.
    """

    name: str
    path: str
    kinds: tuple[str, ...]
    write: Callable[[Path, Tensors], Any]
    load: Callable[[Path], Tensors]
    damage: Callable[[Path], Damage]
    save: Callable[[Path, Tensors], Any] | None = None
    shapes: tuple[tuple[int, ...], ...] = ((), (0, 3))
    is_single: bool = False
    cut: tuple[type[CheckpointError], ...] = (CheckpointTruncatedError,)
    unneeded: str = "$^"
    optional: str = "$^"
    harmless: str = "$^"

    def __str__(self) -> str:
        return self.name


# --- tensors ------------------------------------------------------------------------------------


def values(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits that a dtype has: NaN with a payload and the smallest numbers too; or quantised blocks."""
    rng = np.random.default_rng([seed, *kind.encode()])
    if kind.isupper():
        return Tensor(kind, rng.integers(0, 256, (2, 2 * block(kind)[1]), np.uint8))
    dtype = DType.of(kind).np
    if kind == "bool":
        return Tensor(kind, rng.integers(0, 2, shape).astype(bool))
    if kind == "int4":
        return Tensor(kind, rng.integers(-8, 8, shape).astype(dtype))
    found = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return Tensor(kind, np.ascontiguousarray(found).view(dtype).reshape(shape))


def every_kind(row: Row, seed: int = 1) -> list[Tensors]:
    """Checkpoints of a row, which together have every kind and every shape."""
    found = {f"layers.{i}.w": values(kind, (3, 8), seed) for i, kind in enumerate(row.kinds)}
    found |= {f"ä b {i}": values("float32", shape, seed) for i, shape in enumerate(row.shapes)}
    if row.is_single:
        return [{one: tensor} for one, tensor in found.items()]
    return [found]


def two(row: Row, seed: int = 1, shape: tuple[int, ...] = SHAPE) -> Tensors:
    """A checkpoint of two tensors; one, where the format has no more."""
    found = {name: values("float32", shape, seed + i) for i, name in enumerate("ab")}
    return {"a": found["a"]} if row.is_single else found


def read(path: Path, **options: Any) -> Tensors:
    """What maxjax reads from a path."""
    from maxjax.storage import open_checkpoint

    with open_checkpoint(path, **options) as table:
        arrays = table.read_many()
        kinds = {name: one.encoding or one.dtype.name for name, one in table.entries.items()}
    return {name: Tensor(kinds[name], array) for name, array in arrays.items()}


def differences(found: Tensors, wanted: Tensors, is_single: bool = False) -> list[str]:
    """What two checkpoints differ in; one of a single tensor may have another name."""
    if is_single and len(found) == len(wanted) == 1:
        found = dict(zip(wanted, found.values(), strict=True))
    if found.keys() != wanted.keys():
        return [f"names {sorted(found)}, not {sorted(wanted)}"]
    return [
        f"{name}: {one.kind} {one.array.shape}, not the {other.kind} {other.array.shape} or its bytes"
        for name, other in wanted.items()
        for one in [found[name]]
        if (one.kind, one.array.shape) != (other.kind, other.array.shape)
        or np.ascontiguousarray(one.array).tobytes() != other.array.tobytes()
    ]


def named(arrays: dict[str, Any]) -> Tensors:
    """Arrays of a library as tensors."""
    found = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: Tensor(DType.of(array.dtype).name, array) for name, array in found.items()}


# --- damage -------------------------------------------------------------------------------------

# A text may have numbers of any size and sign; -1 is the largest number of a field of a file.
NUMBERS = (-1, -(2**63), 2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1, 2**64, 10**30)


def binary(path: Path, **places: tuple[int, int]) -> Damage:
    """A file with little-endian numbers replaced: name → (offset, width in bytes)."""
    content = path.read_bytes()
    for what, (at, width) in places.items():
        full = 1 << 8 * width
        for value in (full - 1, full - 8, full // 2, full // 2 - 1, full // 16):
            changed = content[:at] + value.to_bytes(width, "little") + content[at + width :]
            if changed != content:
                yield f"{what} = {value}", path, changed


def texts(document: Any, write: Callable[[Any], bytes], path: Path) -> Damage:
    """A JSON document in which each integer is replaced by each of ``NUMBERS``."""
    for keys in list(_integers(document)):
        for value in NUMBERS:
            what = f"{'.'.join(map(str, keys))} = {value}"
            yield what, path, write(_replaced(document, keys, value))


def _integers(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each integer."""
    if type(value) is int:
        yield keys
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _integers(item, (*keys, key))


def json_bytes(document: Any) -> bytes:
    return json.dumps(document).encode()


def _replaced(document: Any, keys: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(document))
    place = changed
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return changed


# --- safetensors --------------------------------------------------------------------------------


def write_safetensors(path: Path, tensors: Tensors) -> None:
    from safetensors.numpy import save

    path.write_bytes(save({name: tensor.array for name, tensor in tensors.items()}))


def load_safetensors(path: Path) -> Tensors:
    import safetensors

    kinds = {dtype.safetensors: dtype for dtype in DType.__members__.values()}
    found = {}
    for name, one in safetensors.deserialize(path.read_bytes()):
        dtype = kinds[one["dtype"]]
        array = np.frombuffer(bytes(one["data"]), dtype.np).reshape(one["shape"])
        found[name] = Tensor(dtype.name, array)
    return found


def converted(row: str, path: Path, tensors: Tensors, **options: Any) -> None:
    """Writes tensors as ``maxjax.checkpoint.convert`` does, from what the library of a row wrote."""
    from maxjax.checkpoint import convert

    source = by_name(row)
    with tempfile.TemporaryDirectory() as folder:
        source.write(Path(folder, source.path), tensors)
        convert(Path(folder, source.path), path, **options)


def damage_safetensors(path: Path) -> Damage:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]

    def write(changed: Any) -> bytes:
        text = json_bytes(changed)
        return len(text).to_bytes(8, "little") + text + data

    yield from binary(path, length=(0, 8))
    yield from texts(header, write, path)
    tensors = {name: one for name, one in header.items() if name != "__metadata__"}
    if len(tensors) > 1:
        last = max(tensors, key=lambda name: tensors[name]["data_offsets"])
        begin, end = header[last]["data_offsets"]
        for shared in (end - begin, 64):  # no byte of such a file is left over
            one = {**header[last], "data_offsets": [begin - shared, end - shared]}
            yield f"overlap of {shared} bytes", path, write({**header, last: one})[:-shared]


def write_set(path: Path, tensors: Tensors) -> None:
    """Files of one tensor each, with an index, as transformers writes them."""
    path.mkdir()
    names = [f"model-{i + 1:05}-of-{len(tensors):05}.safetensors" for i in range(len(tensors))]
    for file, (name, tensor) in zip(names, tensors.items(), strict=True):
        write_safetensors(path / file, {name: tensor})
    total = sum(tensor.array.nbytes for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(zip(tensors, names, strict=True)),
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def load_set(path: Path) -> Tensors:
    """The tensors of each file that the index names, as transformers reads them."""
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    files = {name: load_safetensors(path / name) for name in {*index["weight_map"].values()}}
    assert sum(map(len, files.values())) == len(index["weight_map"])
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def damage_set(path: Path) -> Damage:
    for file in sorted(path.glob("*.safetensors")):
        yield from damage_safetensors(file)
    index = path / "model.safetensors.index.json"
    yield from texts(json.loads(index.read_bytes()), json_bytes, index)


# --- GGUF ---------------------------------------------------------------------------------------


def block(kind: str) -> tuple[int, int]:
    """The number of values and of bytes of a block."""
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


_GGML = {
    "float32": "F32", "float16": "F16", "float64": "F64", "bfloat16": "BF16", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip


def write_gguf(path: Path, tensors: Tensors, **options: Any) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "none", **options)
    for name, (kind, array) in tensors.items():
        raw = gguf.GGMLQuantizationType[_GGML.get(kind, kind)]
        writer.add_tensor(name, array.view(np.uint8), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_gguf(path: Path) -> Tensors:
    import gguf

    kinds = {name: kind for kind, name in _GGML.items()}
    found = {}
    for one in gguf.GGUFReader(path).tensors:
        kind = kinds.get(one.tensor_type.name, one.tensor_type.name)
        array = np.array(one.data)  # a copy: the file is mapped
        if not kind.isupper():
            array = array.view(DType.of(kind).np)
        found[one.name] = Tensor(kind, array)
    return found


def save_gguf(path: Path, tensors: Tensors) -> None:
    from maxjax.checkpoint.file_set import write_file
    from maxjax.storage.gguf.writer import plan_gguf
    from maxjax.storage.save.outgoing import outgoing

    metadata = {"general.architecture": "none"}
    given = [
        outgoing(name, array, kind if kind.isupper() else None)
        for name, (kind, array) in tensors.items()
    ]
    nbytes = plan_gguf(metadata, given).nbytes
    write_file(path, given, lambda found: plan_gguf(metadata, found).pieces(), nbytes)


def damage_gguf(path: Path) -> Damage:
    content = path.read_bytes()
    yield from binary(path, tensors=(8, 8), keys=(16, 8), key_length=(24, 8))
    offsets = []
    for name in (b"a", b"b"):
        start = content.find(struct.pack("<Q", 1) + name)
        if start < 0:
            continue
        at = start + 9
        (count,) = struct.unpack_from("<I", content, at)
        offsets.append(at + 8 + 8 * count)
        places = {"name_length": (start, 8), "axes": (at, 4), "offset": (offsets[-1], 8)}
        places |= {f"size_{i}": (at + 4 + 8 * i, 8) for i in range(count)}
        yield from binary(path, **places)
    if len(offsets) == 2:
        (begin,) = struct.unpack_from("<Q", content, offsets[1])
        for shared in (begin, 64):  # no byte of such a file is left over
            number = struct.pack("<Q", begin - shared)
            changed = content[: offsets[1]] + number + content[offsets[1] + 8 : -shared]
            yield f"overlap of {shared} bytes", path, changed


def write_split_gguf(path: Path, tensors: Tensors) -> None:
    """Two files, as llama.cpp splits them; ``path`` is the first."""
    most = -(-len(tensors) // 2)
    write_gguf(path.with_name("model.gguf"), tensors, split_max_tensors=most)


def load_split_gguf(path: Path) -> Tensors:
    parts = map(load_gguf, sorted(path.parent.glob("*.gguf")))
    return {name: tensor for part in parts for name, tensor in part.items()}


def damage_split_gguf(path: Path) -> Damage:
    for file in sorted(path.parent.glob("*.gguf")):
        yield from damage_gguf(file)


# --- NumPy --------------------------------------------------------------------------------------

NUMPY = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64",
)  # fmt: skip


def write_npz(path: Path, tensors: Tensors, write: Any = np.savez) -> None:
    write(path, **{name: tensor.array for name, tensor in tensors.items()})


def load_npz(path: Path) -> Tensors:
    with np.load(path) as found:
        return named(dict(found))


def write_npy(path: Path, tensors: Tensors) -> None:
    (tensor,) = tensors.values()
    np.save(path, tensor.array)


def load_npy(path: Path) -> Tensors:
    return named({"": np.load(path)})


def shapes_of_npy(content: bytes) -> Iterator[tuple[str, bytes]]:
    """An array as numpy writes it with each size of its shape replaced; the header keeps its length."""
    found = re.search(rb"'shape': \((\d+), (\d+)\), \} *", content)
    assert found is not None
    for axis in (1, 2):
        for value in NUMBERS:
            sizes = [int(found[1]), int(found[2])]
            sizes[axis - 1] = value
            text = b"'shape': (%d, %d), }" % tuple(sizes)
            text += b" " * (len(found[0]) - len(text))
            yield f"shape {axis} = {value}", content.replace(found[0], text)


def damage_npy(path: Path) -> Damage:
    content = path.read_bytes()
    yield from binary(path, header=(8, 2))
    for what, changed in shapes_of_npy(content):
        yield what, path, changed


def zip_again(content: bytes, name: str, member: bytes) -> bytes:
    """An archive with another content of a member, and the right checksum of it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            new.writestr(info, member if info.filename == name else old.read(info))
    return out.getvalue()


def damage_zip(path: Path) -> Damage:
    """Every size, count and offset of an archive's directory, and of two of its members."""
    content = path.read_bytes()
    end = content.rindex(b"PK\5\6")
    yield from binary(
        path, members_here=(end + 8, 2), members=(end + 10, 2), directory_size=(end + 12, 4),
        directory_offset=(end + 16, 4), comment=(end + 20, 2),
    )  # fmt: skip
    start, offsets = content.index(b"PK\1\2"), []
    while content[start : start + 4] == b"PK\1\2":
        name, extra, comment = struct.unpack_from("<3H", content, start + 28)
        offsets.append(start + 42)
        places = {"packed": (start + 20, 4), "size": (start + 24, 4), "name": (start + 28, 2)}
        places |= {"extra": (start + 30, 2), "note": (start + 32, 2), "offset": (start + 42, 4)}
        at = int.from_bytes(content[start + 42 : start + 46], "little")
        local = {
            "local_packed": (at + 18, 4),
            "local_size": (at + 22, 4),
            "local_name": (at + 26, 2),
        }
        if len(offsets) < 3:
            yield from binary(path, **places, **local, local_extra=(at + 28, 2))
        start += 46 + name + extra + comment
    first, second = content[offsets[0] : offsets[0] + 4], offsets[1]
    yield "overlap", path, content[:second] + first + content[second + 4 :]


def damage_npz(path: Path) -> Damage:
    yield from damage_zip(path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        member = archive.read("a.npy")
    for what, changed in shapes_of_npy(member):
        yield what, path, zip_again(content, "a.npy", changed)


# --- PyTorch ------------------------------------------------------------------------------------

# The files are written without torch, by the text of its format; torch has read each of them.
TORCH = (
    "bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip


def write_torch(path: Path, tensors: Tensors, **options: Any) -> None:
    from tests.storage.pytorch import corpus

    # Owners of their memory: views of one array would share a storage.
    arrays = {name: tensor.array.copy() for name, tensor in tensors.items()}
    path.write_bytes(corpus.saved(arrays, **options))


def load_torch(path: Path) -> Tensors:
    from tests.storage.pytorch import oracle

    return named(oracle.keep_reading(path))


def write_torch_set(path: Path, tensors: Tensors) -> None:
    path.mkdir()
    names = [f"pytorch_model-{i + 1:05}-of-{len(tensors):05}.bin" for i in range(len(tensors))]
    for file, (name, tensor) in zip(names, tensors.items(), strict=True):
        write_torch(path / file, {name: tensor})
    index = {"metadata": {}, "weight_map": dict(zip(tensors, names, strict=True))}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def load_torch_set(path: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(path.glob("*.bin")):
        found |= load_torch(file)
    return found


def _fields_of_torch(make: Callable[..., bytes]) -> Iterator[tuple[str, bytes]]:
    """A tensor of 32 x 16 floats with each number of its description replaced."""
    good = {"size": SHAPE, "stride": (16, 1), "offset": 0, "numel": 512}
    for value in NUMBERS:
        for name in ("offset", "numel"):
            yield f"{name} = {value}", make(**{**good, name: value})
        for name in ("size", "stride"):
            for axis in (0, 1):
                changed = list(good[name])
                changed[axis] = value
                yield f"{name} {axis} = {value}", make(**{**good, name: tuple(changed)})


def damage_torch(path: Path) -> Damage:
    from tests.storage.pytorch import corpus

    yield from damage_zip(path)
    data = {"data/0": corpus.floats(512)}
    for what, tensor in _fields_of_torch(corpus.tensor):
        yield what, path, corpus.zipped(corpus.members(corpus.dict_of(a=tensor), data))


def damage_torch_set(path: Path) -> Damage:
    for file in sorted(path.glob("*.bin")):
        yield from damage_torch(file)


def damage_legacy(path: Path) -> Damage:
    from tests.storage.pytorch import corpus

    size = len(path.read_bytes())
    yield from binary(path, count_a=(size - 2 * 2056, 8), count_b=(size - 2056, 8))
    keys = b"](" + corpus.text("0") + b"e"
    data = struct.pack("<q", 512) + corpus.floats(512)
    for what, tensor in _fields_of_torch(corpus.legacy_tensor):
        yield what, path, corpus.legacy(corpus.dict_of(a=tensor), keys, data)


# --- orbax --------------------------------------------------------------------------------------

ORBAX = (
    *NUMPY, "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int4",
)  # fmt: skip


def write_orbax(path: Path, tensors: Tensors, **options: Any) -> None:
    import orbax.checkpoint as ocp

    from tests.storage.orbax.corpus import quiet

    with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, {name: tensor.array for name, tensor in tensors.items()})


def load_orbax(path: Path) -> Tensors:
    """The tree that orbax restores, of the newest step if there are steps."""
    import orbax.checkpoint as ocp

    from tests.storage.orbax.corpus import quiet

    steps = [int(name) for name in os.listdir(path) if name.isdecimal()]
    place = path / str(max(steps)) / "state" if steps else path
    with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = checkpointer.metadata(place).item_metadata.tree
        how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in metadata}
        return named(checkpointer.restore(place, args=ocp.args.PyTreeRestore(restore_args=how)))


def damage_orbax(path: Path) -> Damage:
    """Every number of the JSON files, and the size in the manifest."""
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        content = file.read_bytes()
        if file == path / "manifest.ocdbt":
            yield from binary(file, size=(4, 8))
        if content[:1] == b"{":
            for what, _, changed in texts(json.loads(content), json_bytes, file):
                yield f"{file.relative_to(path)}: {what}", file, changed


# --- the table ----------------------------------------------------------------------------------

SAFETENSORS = (
    *NUMPY, "bfloat16", "float8_e8m0fnu", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "complex64",
)  # fmt: skip
GGUF = (*_GGML, "Q4_0", "Q8_0", "Q4_K", "Q6_K")
# Each part of an orbax checkpoint is compressed or has a checksum, which is what shows that it is cut.
CUT = (CheckpointTruncatedError, CheckpointCorruptError)
# Orbax does not look at the mark of the commit, nor at what the commit has copied of a process's part.
UNNEEDED = r"commit_success\.txt|ocdbt\.process_0/"
# A tree of orbax need not be in a checkpoint.
OPTIONAL = rf"{UNNEEDED}|_CHECKPOINT_METADATA"
# The times of the save, and how hard it tried to compress.
HARMLESS = r"timestamp_nsecs|level = -1$"

FORMATS = [
    Row(
        "safetensors", "model.safetensors", SAFETENSORS, write_safetensors, load_safetensors,
        damage_safetensors, partial(converted, "safetensors", overwrite=True),
    ),
    Row(
        "safetensors set", "set", SAFETENSORS, write_set, load_set, damage_set,
        partial(converted, "safetensors set", overwrite=True, max_shard_size=200),
        optional="index",  # the files have all tensors
        harmless="total_size",  # files of Hugging Face have wrong ones: maxjax warns
    ),
    Row("gguf", "model.gguf", GGUF, write_gguf, load_gguf, damage_gguf, save_gguf, shapes=((7,),)),
    Row(
        "gguf set", "model-00001-of-00002.gguf", GGUF, write_split_gguf, load_split_gguf,
        damage_split_gguf, shapes=((7,),),
    ),
    Row("npz", "model.npz", NUMPY, write_npz, load_npz, damage_npz),
    Row(
        "npz deflated", "model.npz", NUMPY, partial(write_npz, write=np.savez_compressed), load_npz,
        damage_npz,
    ),
    Row("npy", "model.npy", NUMPY, write_npy, load_npy, damage_npy, is_single=True),
    Row("pytorch", "model.pt", TORCH, write_torch, load_torch, damage_torch),
    Row(
        "pytorch set", "set", TORCH, write_torch_set, load_torch_set, damage_torch_set,
        optional="index",
    ),
    Row(
        "pytorch legacy", "model.pt", TORCH, partial(write_torch, is_legacy=True), load_torch,
        damage_legacy,
    ),
    Row(
        "orbax", "run", ORBAX, write_orbax, load_orbax, damage_orbax, partial(converted, "orbax", to="orbax"),
        shapes=((),), cut=CUT, unneeded=UNNEEDED, optional=OPTIONAL, harmless=HARMLESS,
    ),
    Row(
        "orbax files", "run", ORBAX, partial(write_orbax, use_ocdbt=False, use_zarr3=True),
        load_orbax, damage_orbax, shapes=((),), cut=CUT, unneeded=UNNEEDED, optional=OPTIONAL, harmless=HARMLESS,
    ),
]  # fmt: skip


def by_name(name: str) -> Row:
    """The row of a name."""
    return next(row for row in FORMATS if row.name == name)


# --- the process that saves ---------------------------------------------------------------------


def save_until_killed(job: dict[str, Any]) -> None:
    """Saves two tensors, and is killed in place of the n-th call that changes a file; n = 0: not."""
    from scripts.save_trials import KILL, say, shim

    row, path, library = by_name(job["row"]), Path(job["path"]), shim()
    tensors = two(row, job["seed"])
    library.shim_arm(os.path.realpath(path.parent).encode(), job["n"], KILL, 0, 0)
    assert row.save is not None
    row.save(path, tensors)
    library.shim_disarm()
    say(saved=True, calls=library.shim_calls())


if __name__ == "__main__":
    from scripts.save_trials import serve

    serve({"save": save_until_killed}, ("checkpoint.conversion.run", "storage.gguf.writer"))
