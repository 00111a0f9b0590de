"""Files that change while they are read, and after: of every format, at every read.

What must come of it: a file that was cut or written to gives an error, one that was replaced or
removed its old content, and what was loaded stays as it is. A signal would end the test run.
"""

import io
import os
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import save

import maxjax
from maxjax.errors import (
    CheckpointChangedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    CheckpointTruncatedError,
)
from maxjax.nn import Module
from maxjax.storage import OpenFile, TensorTable, aligned_empty, open_checkpoint
from maxjax.storage.parts import Part, read_parts
from tests.storage.gguf import corpus as gguf_corpus
from tests.storage.pytorch import corpus as pytorch_corpus

SHAPE = (600, 256)  # more than what is read together with others, packed as well
NAMES = ("a", "b", "c")
# Long ago, so that a write is seen whatever the grain of the file system's clock.
LONG_AGO = 10**18
# Of the data that was written over: of a file with sums they may be what shows first.
WRITTEN = (CheckpointChangedError, CheckpointCorruptError)
CUT = (CheckpointChangedError, CheckpointTruncatedError)

Arrays = dict[str, np.ndarray]


def values(seed: int, shape: tuple[int, ...] = SHAPE) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype("f4") for name in NAMES}


def packed(kind: gguf.GGMLQuantizationType) -> Callable[[Arrays], bytes]:
    def write(arrays: Arrays) -> bytes:
        infos, data = [], b""
        for name, array in arrays.items():
            infos.append(gguf_corpus.info(name, array.shape[::-1], int(kind), len(data)))
            content = gguf.quants.quantize(array, kind).tobytes()
            data += content + bytes(-len(content) % 32)
        return gguf_corpus.gguf(gguf_corpus.PAIRS, infos, data)

    return write


def by_numpy(write: Callable[..., None]) -> Callable[[Arrays], bytes]:
    def content(arrays: Arrays) -> bytes:
        buffer = io.BytesIO()
        write(buffer, **arrays)
        return buffer.getvalue()

    return content


TYPES = gguf.GGMLQuantizationType
# The end of the file's name, and what writes it.
FORMATS: dict[str, tuple[str, Callable[[Arrays], bytes]]] = {
    "safetensors": (".safetensors", save),
    "gguf": (".gguf", packed(TYPES.F32)),
    "gguf packed": (".gguf", packed(TYPES.Q8_0)),
    "gguf decoded": (".gguf", packed(TYPES.TQ2_0)),
    "pytorch": (".pt", pytorch_corpus.saved),
    "pytorch legacy": (".pt", partial(pytorch_corpus.saved, is_legacy=True)),
    "npz": (".npz", by_numpy(np.savez)),
    "npz deflated": (".npz", by_numpy(np.savez_compressed)),
}


@cache
def contents(format: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    write = FORMATS[format][1]
    return write(values(1, shape)), write(values(2, shape))


class File:
    """A checkpoint of `FORMATS`, and another of the same form to put in its place."""

    def __init__(self, directory: Path, format: str, shape: tuple[int, ...] = SHAPE):
        self.path = directory / f"m{FORMATS[format][0]}"
        self.old, self.new = contents(format, shape)
        self.put(self.new)
        self.others = read_all(self.path)
        self.put(self.old)
        self.arrays = read_all(self.path)
        # One byte in the middle of each tensor.
        with open_checkpoint(self.path) as table:
            self.places = [e.offset + e.nbytes // 2 for e in table.entries.values()]
        assert not equal(self.arrays, self.others)

    def put(self, content: bytes) -> None:
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(content)
        os.utime(self.path, ns=(LONG_AGO, LONG_AGO))

    # --- what may happen to it ---

    def cut(self) -> None:
        os.truncate(self.path, len(self.old) * 3 // 5)

    def empty(self) -> None:
        os.truncate(self.path, 0)

    def append(self) -> None:
        with open(self.path, "ab") as file:
            file.write(b"x")

    def overwrite(self) -> None:
        with open(self.path, "r+b") as file:
            for place in self.places:
                file.seek(place)
                file.write(bytes([self.old[place] ^ 0x10]))

    def overwrite_all(self) -> None:
        with open(self.path, "r+b") as file:
            file.write(b"\xff" * len(self.old))

    def rewrite(self) -> None:
        """With the same bytes: nobody can know that they are."""
        with open(self.path, "r+b") as file:
            file.write(self.old)

    def replace(self) -> None:
        other = self.path.with_name("other")
        other.write_bytes(self.new)
        os.replace(other, self.path)

    def rename(self) -> None:
        self.path.rename(self.path.with_name("renamed"))

    def unlink(self) -> None:
        self.path.unlink()


# What happens to the file: the errors that may come of it; none: it is read as it was.
ACTS: dict[str, tuple[type[CheckpointError], ...]] = {
    "cut": CUT,
    "empty": CUT,
    "append": (CheckpointChangedError,),
    "overwrite": WRITTEN,
    "overwrite_all": (CheckpointError,),
    "rewrite": (CheckpointChangedError,),
    "replace": (),
    "rename": (),
    "unlink": (),
}


@pytest.fixture(params=FORMATS)
def file(request, tmp_path) -> File:
    return File(tmp_path, request.param)


@pytest.fixture(params=ACTS)
def act(request) -> str:
    return request.param


def read_all(path: Path) -> Arrays:
    with open_checkpoint(path) as table:
        return table.read_many()


def read_in_parts(table: TensorTable) -> Arrays:
    """All of every tensor, in two parts each, as it is read for a mesh."""
    arrays, parts = {}, []
    for name, entry in table.entries.items():
        row = entry.shape[0] // 2
        memory = aligned_empty(int(np.prod(entry.shape)) * entry.dtype.np.itemsize)
        arrays[name] = memory.view(entry.dtype.np).reshape(entry.shape)
        half = len(memory) // entry.shape[0] * row
        rest = [(0, size) for size in entry.shape[1:]]
        parts.append(Part(name, ((0, row), *rest), memory[:half]))
        parts.append(Part(name, ((row, entry.shape[0]), *rest), memory[half:]))
    read_parts(table, parts)
    return arrays


def equal(one: Arrays, other: Arrays) -> bool:
    assert one.keys() == other.keys()
    return all(one[name].tobytes() == other[name].tobytes() for name in one)


class Reads:
    """Counts the reads of all files, and calls `act` before number `at` (from 1 on)."""

    def __init__(self, monkeypatch, at: int = 0, act: Callable[[], None] = lambda: None):
        self.count, lock, plain = 0, threading.Lock(), OpenFile._system

        def system(file, *arguments):
            with lock:
                self.count += 1
                if self.count == at:
                    act()
            return plain(file, *arguments)

        monkeypatch.setattr(OpenFile, "_system", system)


def outcome(read: Callable[[], Arrays], errors: tuple[type[CheckpointError], ...]) -> Arrays | None:
    """The arrays, or None for one of `errors`; which it must be one of if there are any."""
    if not errors:
        return read()
    with pytest.raises(errors) as caught:
        read()
    assert caught.value.path
    return None


# --- F7: before, between and during reading ---------------------------------------------------


@pytest.mark.sampled
def test_every_read_may_be_the_one_before_which_it_changes(file, act, monkeypatch):
    with monkeypatch.context() as patch:
        reads = Reads(patch)
        read_all(file.path)
    assert reads.count >= len(NAMES) + 1
    for number in range(1, reads.count + 1):
        file.put(file.old)
        with monkeypatch.context() as patch:
            made = Reads(patch, number, getattr(file, act))
            arrays = outcome(lambda: read_all(file.path), ACTS[act])
        assert made.count >= number, "the file was never changed"
        # One that is replaced while it is opened is opened again.
        either = (file.arrays, file.others) if act == "replace" else (file.arrays,)
        assert arrays is None or any(equal(arrays, one) for one in either)


@pytest.mark.sampled
@pytest.mark.parametrize("read", [TensorTable.read_many, read_in_parts], ids=["whole", "parts"])
def test_between_opening_and_reading(file, act, read):
    with open_checkpoint(file.path) as table:
        getattr(file, act)()
        arrays = outcome(lambda: read(table), ACTS[act])
    assert arrays is None or equal(arrays, file.arrays)


@pytest.mark.sampled
def test_between_two_readings(file, act):
    """Also where the sums of the file have been looked at already."""
    with open_checkpoint(file.path) as table:
        assert equal(table.read_many(), file.arrays)
        getattr(file, act)()
        arrays = outcome(table.read_many, ACTS[act])
    assert arrays is None or equal(arrays, file.arrays)


@pytest.mark.sampled
def test_before_opening(file, act):
    getattr(file, act)()
    if act == "replace":
        assert equal(read_all(file.path), file.others)
    elif act in ("rename", "unlink"):
        with pytest.raises(CheckpointMissingError):
            read_all(file.path)
    elif act in ("cut", "empty", "overwrite_all"):
        with pytest.raises(CheckpointError):
            read_all(file.path)
    elif act == "rewrite":
        assert equal(read_all(file.path), file.arrays)
    else:  # the byte belongs to nothing; without sums, nobody can know that values are others
        try:
            arrays = read_all(file.path)
        except CheckpointError:
            return
        assert equal(arrays, file.arrays) == (act == "append")


@pytest.mark.sampled
@pytest.mark.parametrize("format", ["safetensors", "npz", "pytorch"])
def test_in_the_middle_of_parallel_reads(format, act, tmp_path, monkeypatch):
    file = File(tmp_path, format, (1024, 1024))
    with open_checkpoint(file.path) as table:
        Reads(monkeypatch, 2, getattr(file, act))
        arrays = outcome(lambda: table.read_many(threads=3), ACTS[act])
    assert arrays is None or equal(arrays, file.arrays)


def test_a_writer_beside_the_reader(file):
    """Cut and made whole again all the time: an error, or all of it and right."""
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for size in (0, len(file.old) // 2):
                os.truncate(file.path, size)
                with open(file.path, "r+b", buffering=0) as out:
                    out.write(file.old)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            try:
                arrays = read_all(file.path)
            except CheckpointError as error:
                assert str(file.path) in str(error)
                continue
            assert equal(arrays, file.arrays)
    finally:
        stop.set()
        writer.join()


# --- sets of files ----------------------------------------------------------------------------

SETS = ("index", "directory", "gguf")


def write_set(directory: Path, kind: str) -> tuple[Path, list[Path]]:
    """The path to open, and the files of the set."""
    if kind == "gguf":
        paths = [directory / f"m-{k + 1:05d}-of-00002.gguf" for k in range(2)]
        for k, path in enumerate(paths):
            path.write_bytes(gguf_corpus.part(k, 2, 2, "ab"[k]))
        return paths[0], paths
    paths = [directory / f"model-{k + 1:05d}-of-00002.safetensors" for k in range(2)]
    for k, path in enumerate(paths):
        path.write_bytes(save({"ab"[k]: np.full(8, float(k), "f4")}))
    index = directory / "model.safetensors.index.json"
    if kind == "index":
        names = {"ab"[k]: path.name for k, path in enumerate(paths)}
        index.write_text(f'{{"weight_map": {str(names).replace(chr(39), chr(34))}}}')
    return (index if kind == "index" else directory), paths


@pytest.mark.parametrize("act", ["cut", "replace", "unlink"])
@pytest.mark.parametrize("kind", SETS)
def test_a_part_of_a_set_changes(kind, act, tmp_path, monkeypatch):
    """Before each read: of a part that was not open yet, what is there then."""
    path, parts = write_set(tmp_path, kind)
    contents = {part: part.read_bytes() for part in parts}
    with monkeypatch.context() as patch:
        reads = Reads(patch)
        old = read_all(path)
    changed = dict(contents)
    # The last value of the last tensor, which ends the file or stands before its padding.
    changed[parts[1]] = contents[parts[1]].replace(old["b"].tobytes(), b"\x7f" * old["b"].nbytes)
    assert changed[parts[1]] != contents[parts[1]]
    seen = set()

    def happen() -> None:
        if act == "cut":
            os.truncate(parts[1], len(contents[parts[1]]) - 5)
        elif act == "unlink":
            parts[1].unlink()
        else:
            (tmp_path / "other").write_bytes(changed[parts[1]])
            os.replace(tmp_path / "other", parts[1])

    for number in range(1, reads.count + 1):
        for part, content in contents.items():
            part.unlink(missing_ok=True)
            part.write_bytes(content)
            os.utime(part, ns=(LONG_AGO, LONG_AGO))
        with monkeypatch.context() as patch:
            Reads(patch, number, happen)
            try:
                arrays = read_all(path)
            except CheckpointError as error:
                assert parts[1].name in str(error)
                seen.add(type(error))
                continue
        assert arrays["a"].tobytes() == old["a"].tobytes()
        is_old = arrays["b"].tobytes() == old["b"].tobytes()
        assert is_old or set(arrays["b"].tobytes()) == {0x7F}
        seen.add("old" if is_old else "new")
    wanted = {
        "cut": {CheckpointTruncatedError},
        "replace": {"old", "new"},
        "unlink": {"old", CheckpointMissingError},
    }
    assert seen == wanted[act]


# --- F8: after loading ------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("read", [TensorTable.read_many, read_in_parts], ids=["whole", "parts"])
def test_what_was_read_never_changes(file, act, read):
    with open_checkpoint(file.path) as table:
        arrays = read(table)
        getattr(file, act)()
        assert equal(arrays, file.arrays)
    assert equal(arrays, file.arrays)


class Net(Module):
    """One weight for each tensor of a file, as the file has it."""

    def __init__(self, weights: maxjax.Weights):
        super().__init__()
        self.a, self.b, self.c = (getattr(weights, name).allocate() for name in NAMES)

    def __call__(self) -> None:
        raise NotImplementedError


def held(model: Net) -> Arrays:
    return {
        name: np.asarray(jax.tree.leaves(value)[0]) for name, value in model.state_dict().items()
    }


@pytest.mark.sampled
def test_what_a_model_has_loaded_never_changes(file, act):
    with maxjax.load_weights(file.path) as weights:
        model = Net(weights)
        model.load_state_dict(weights)
        # Copies: they must not be views of what might change.
        before = {name: array.copy() for name, array in held(model).items()}
        getattr(file, act)()
        assert equal(held(model), before)
    assert equal(before, file.arrays)
    file.put(file.new)
    assert equal(held(model), before)
    computed = jax.jit(lambda m: [leaf | 0 if leaf.dtype == np.uint8 else leaf + 0
                                  for leaf in jax.tree.leaves(m)])(model)  # fmt: skip
    leaves = [np.asarray(leaf).tobytes() for leaf in computed]
    assert leaves == [before[name].tobytes() for name in NAMES]


@pytest.mark.sampled
@pytest.mark.parametrize("act", ["cut", "overwrite", "replace"])
def test_a_model_that_has_not_loaded_yet(file, act):
    with maxjax.load_weights(file.path) as weights:
        model = Net(weights)
        getattr(file, act)()
        if ACTS[act]:
            with pytest.raises(ACTS[act]):
                model.load_state_dict(weights)
        else:
            model.load_state_dict(weights)
            assert equal(held(model), file.arrays)
