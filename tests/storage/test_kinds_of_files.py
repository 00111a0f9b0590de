"""What is no file of a checkpoint, by every way in; and what loading does to the outside: nothing.

Every opening runs in a thread with a deadline, so that one that blocks is a failure, not a hang.
"""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxjax.errors import (
    CheckpointAccessError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    CheckpointTruncatedError,
)
from maxjax.storage import load_json, open_checkpoint, open_index, open_safetensors
from maxjax.storage.gguf.reader import open_gguf
from maxjax.storage.numpy.npy import open_npy
from maxjax.storage.numpy.npz import open_npz
from maxjax.storage.pytorch.reader import open_pytorch
from tests.storage import index_corpus
from tests.storage.gguf import corpus as gguf_corpus
from tests.storage.nobody import printed_by_nobody
from tests.storage.pytorch.corpus import members, zipped
from tests.storage.test_changing import FORMATS, values
from tests.storage.watch import watched

SECONDS = 20
# A name's end, and the reader of such files.
READERS: dict[str, Callable[[Path], Any]] = {
    ".safetensors": open_safetensors,
    ".gguf": open_gguf,
    ".pt": open_pytorch,
    ".bin": open_pytorch,
    ".npz": open_npz,
    ".npy": open_npy,
    ".safetensors.index.json": open_index,
    ".bin.index.json": open_index,
    ".json": load_json,
    "": open_checkpoint,
}


def refusal(opening: Callable[[Any], Any], path: Any) -> CheckpointError:
    """The error of opening and reading `path`, which must come soon and touch nothing."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            table = opening(path)
            table.read_many()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    with watched() as acts:
        thread.start()
        thread.join(SECONDS)
    assert not thread.is_alive(), "it blocks"
    assert errors, "it was read"
    assert isinstance(errors[0], CheckpointError), errors
    assert not acts
    return errors[0]


# --- kinds ------------------------------------------------------------------------------------


@contextmanager
def make_socket(path: Path) -> Iterator[None]:
    # A socket's path may have 107 bytes, so it is bound under a short one, and linked to.
    with socket.socket(socket.AF_UNIX) as server:
        short = Path(f"/tmp/maxjax-{os.getpid()}-{threading.get_ident() % 10**6}")
        server.bind(str(short))
        try:
            path.symlink_to(short)
            yield
        finally:
            short.unlink()


@contextmanager
def make_terminal(path: Path) -> Iterator[None]:
    first, second = os.openpty()
    try:
        path.symlink_to(os.ttyname(second))
        yield
    finally:
        os.close(first)
        os.close(second)


@contextmanager
def make_pipe(path: Path) -> Iterator[None]:
    """What a shell's `<(...)` gives."""
    first, second = os.pipe()
    try:
        path.symlink_to(f"/dev/fd/{first}")
        yield
    finally:
        os.close(first)
        os.close(second)


def made(make: Callable[[Path], None]) -> Callable[[Path], Any]:
    @contextmanager
    def manager(path: Path) -> Iterator[None]:
        make(path)
        yield

    return manager


def link(target: str) -> Callable[[Path], Any]:
    return made(lambda path: path.symlink_to(target))


FORMAT, MISSING = CheckpointFormatError, CheckpointMissingError
KINDS: dict[str, tuple[Callable[[Path], Any], type[CheckpointError], str]] = {
    "FIFO": (made(os.mkfifo), FORMAT, "a FIFO (named pipe)"),
    "link to a FIFO": (
        made(lambda path: (os.mkfifo(f"{path}.x"), path.symlink_to(f"{path}.x"))[1]),
        FORMAT,
        "a FIFO (named pipe)",
    ),
    "socket": (make_socket, FORMAT, "a socket"),
    "terminal": (make_terminal, FORMAT, "a character device"),
    "/dev/null": (link("/dev/null"), FORMAT, "a character device"),
    "/dev/zero": (link("/dev/zero"), FORMAT, "a character device"),
    "pipe": (make_pipe, FORMAT, "a FIFO (named pipe)"),
    "/proc/self/maps": (link("/proc/self/maps"), FORMAT, "a file of /proc or /sys"),
    "/proc/cpuinfo": (link("/proc/cpuinfo"), FORMAT, "a file of /proc or /sys"),
    "/proc/self/mem": (link("/proc/self/mem"), FORMAT, "a file of /proc or /sys"),
    "loop": (made(lambda path: path.symlink_to(path.name)), MISSING, ""),
    "dangling": (link("nowhere"), MISSING, ""),
    "under a file": (link("/etc/passwd/x"), MISSING, ""),
}


@contextmanager
def special(kind: str, path: Path) -> Iterator[tuple[type[CheckpointError], str]]:
    """Puts a file of that kind at `path`; gives the class of the error and what it is found to be."""
    make, error, found = KINDS[kind]
    if kind.startswith("/") and not os.path.exists(kind):
        pytest.skip(f"there is no {kind}")
    with make(path):
        yield error, found


def assert_told(error: CheckpointError, wanted: tuple[type[CheckpointError], str], path: Path):
    message = str(error)
    assert type(error) is wanted[0], message
    assert str(path) in message and "\n" not in message
    assert wanted[0] is MISSING or (error.found == wanted[1] and error.hint), message


@pytest.mark.parametrize("end", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_special_file_is_refused(kind, end, tmp_path):
    path = tmp_path / f"m{end}"
    with special(kind, path) as wanted:
        for opening in {READERS[end], open_checkpoint}:
            assert_told(refusal(opening, path), wanted, path)
            assert_told(refusal(opening, str(path)), wanted, path)


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_directory(kind, tmp_path):
    for name in ("model.safetensors", "m.gguf", "pytorch_model.bin", "m.pt", "m.npz",
                 "model.safetensors.index.json"):  # fmt: skip
        directory = tmp_path / name.replace(".", "-")
        directory.mkdir()
        with special(kind, directory / name) as wanted:
            assert_told(refusal(open_checkpoint, directory), wanted, directory / name)


@pytest.mark.parametrize("kind", [*KINDS, "directory"])
def test_as_a_member_of_an_index(kind, tmp_path):
    """The second of two files; the first is good."""
    bins = {f"m-0000{k}-of-00002.bin": zipped(members()) for k in (1, 2)}
    safe = {index_corpus.S1: index_corpus.FIRST, index_corpus.S2: index_corpus.SECOND}
    for end, files in ((".safetensors", safe), (".bin", bins)):
        directory = tmp_path / end[1:]
        directory.mkdir()
        first, second = (directory / name for name in files)
        first.write_bytes(files[first.name])
        index = directory / f"m{end}.index.json"
        index.write_text(json.dumps({"weight_map": {"a": first.name, "b": second.name}}))
        with put(kind, second) as wanted:
            for path in (index, directory):
                assert_told(refusal(open_checkpoint, path), wanted, second)


@pytest.mark.parametrize("kind", [*KINDS, "directory"])
@pytest.mark.parametrize("opened", [0, 1])
def test_as_a_part_of_a_gguf_set(kind, opened, tmp_path):
    paths = [tmp_path / f"m-{k + 1:05d}-of-00002.gguf" for k in range(2)]
    paths[opened].write_bytes(gguf_corpus.part(opened, 2, 2, "ab"[opened]))
    with put(kind, paths[1 - opened]) as wanted:
        assert_told(refusal(open_checkpoint, paths[opened]), wanted, paths[1 - opened])


@contextmanager
def put(kind: str, path: Path) -> Iterator[tuple[type[CheckpointError], str]]:
    """As `special`, and directories: of these only the way in says what is wanted."""
    if kind == "directory":
        path.mkdir()
        yield FORMAT, "a directory"
        return
    with special(kind, path) as wanted:
        yield wanted


@pytest.mark.parametrize("end", [end for end in READERS if end])
def test_a_directory_named_like_a_file(end, tmp_path):
    path = tmp_path / f"m{end}"
    path.mkdir()
    assert_told(refusal(READERS[end], path), (FORMAT, "a directory"), path)
    # To open_checkpoint it is a directory like any other, here without weights.
    assert "holds no weights" in str(refusal(open_checkpoint, path))


@pytest.mark.parametrize("end", READERS)
def test_a_path_with_a_nul(end, tmp_path):
    for opening in {READERS[end], open_checkpoint}:
        error = refusal(opening, str(tmp_path / f"a\0b{end}"))
        assert type(error) is MISSING and "NUL" in str(error)


@pytest.mark.parametrize("end", READERS)
def test_a_missing_path_and_an_endless_one(end, tmp_path):
    assert type(refusal(open_checkpoint, f"none{end}")) is MISSING
    for name in ("x" * 300, "x/" * 3000):
        error = refusal(open_checkpoint, str(tmp_path / f"{name}m{end}"))
        assert isinstance(error, CheckpointError) and "\n" not in str(error)


@pytest.mark.skipif(not os.access("/proc/kcore", os.R_OK), reason="may not be read")
@pytest.mark.parametrize("end", READERS)
def test_a_file_of_the_kernel_with_an_absurd_size(end, tmp_path):
    """A regular file of 128 TiB, by what the system says."""
    path = tmp_path / f"m{end}"
    path.symlink_to("/proc/kcore")
    assert str(path) in str(refusal(READERS[end], path))


@pytest.mark.parametrize("end", [end for end in READERS if end])
def test_a_sparse_file_without_content(end, tmp_path):
    """8 TiB of zeros take no place on the disk, and would take all the memory."""
    path = tmp_path / f"m{end}"
    with open(path, "wb") as file:
        try:
            file.truncate(8 << 40)
        except OSError:
            pytest.skip("no such sparse files here")
    assert type(refusal(READERS[end], path)) is not CheckpointTruncatedError


def test_an_unreadable_file_is_not_called_missing(tmp_path):
    """In a child that is nobody, where the tests run as root: to root nothing is unreadable."""
    ends = [end for end in READERS if end]
    for end in ends:
        (tmp_path / f"m{end}").write_bytes(b"x")
        (tmp_path / f"m{end}").chmod(0)
    imports = """
from maxjax.errors import CheckpointError
from maxjax.storage import open_checkpoint
from maxjax.storage.formats import FORMATS
readers = [format.open for format in FORMATS]
"""
    code = f"""
for end in {ends!r}:
    try:
        open_checkpoint(os.path.join({str(tmp_path)!r}, "m" + end))
    except CheckpointError as error:
        print(type(error).__name__, error)
"""
    lines = printed_by_nobody(tmp_path, imports, code)
    assert len(lines) == len(ends)
    for end, line in zip(ends, lines, strict=True):
        assert line.startswith(f"{CheckpointAccessError.__name__} {tmp_path}/m{end}: ")
        assert "mode ----------" in line and "uid" in line


# --- what loading does to the outside ------------------------------------------------------------


def write_npy(directory: Path) -> Path:
    np.save(directory / "m.npy", values(1)["a"])
    return directory / "m.npy"


def write_index(directory: Path) -> Path:
    for name, content in (
        (index_corpus.S1, index_corpus.FIRST),
        (index_corpus.S2, index_corpus.SECOND),
    ):
        (directory / name).write_bytes(content)
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(index_corpus.mapped()))
    return path


def write_torch_index(directory: Path) -> Path:
    (directory / "m-00001-of-00001.bin").write_bytes(zipped(members()))
    path = directory / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "m-00001-of-00001.bin")}))
    return path


def write_gguf_set(directory: Path) -> Path:
    for k in range(2):
        path = directory / f"m-{k + 1:05d}-of-00002.gguf"
        path.write_bytes(gguf_corpus.part(k, 2, 2, "ab"[k]))
    return path


def writer(format: str) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        end, content = FORMATS[format]
        path = directory / f"m{end}"
        path.write_bytes(content(values(1)))
        return path

    return write


GOOD = {
    **{format: writer(format) for format in FORMATS},
    "npy": write_npy,
    "index": write_index,
    "pytorch index": write_torch_index,
    "gguf set": write_gguf_set,
    "directory": lambda directory: write_index(directory).parent,
    "without an ending": lambda directory: writer("gguf")(directory).rename(directory / "m"),
}


@pytest.mark.parametrize("format", GOOD)
def test_loading_does_nothing_to_the_outside(format, tmp_path):
    """The second time: the first one imports the reader of the format."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    open_checkpoint(GOOD[format](tmp_path / "first")).read_many()
    path = GOOD[format](tmp_path / "second")
    before = sorted(os.listdir(tmp_path / "second"))
    with watched() as acts, open_checkpoint(path) as table:
        arrays = table.read_many()
        for name in table.entries:
            table.read(name)
    assert arrays and not acts
    assert sorted(os.listdir(tmp_path / "second")) == before


ACTS: dict[str, Callable[[Path], Any]] = {
    "import": lambda path: __import__("this_module_does_not_exist"),
    "exec": lambda path: exec("1"),
    "compile": lambda path: compile("1", "x", "eval"),
    "open": lambda path: open(path / "x", "w").close(),
    "os.remove": lambda path: os.remove(path / "x"),
    "os.mkdir": lambda path: os.mkdir(path / "d"),
    "os.rename": lambda path: os.rename(path / "x", path / "y"),
    "socket.": lambda path: socket.socket().close(),
    "subprocess.": lambda path: subprocess.Popen(["true"]).wait(),
    "os.system": lambda path: os.system("true"),
    "pickle.": lambda path: __import__("pickle").loads(b"cos\nsystem\n."),
}


@pytest.mark.parametrize("act", ACTS)
def test_the_watch_sees(act, tmp_path):
    (tmp_path / "x").touch()
    with watched() as acts:
        try:
            ACTS[act](tmp_path)
        except ImportError:
            pass
    assert any(done.startswith(act) for done in acts), acts


def test_the_watch_lets_reading_pass(tmp_path):
    (tmp_path / "x").touch()
    with watched() as acts:
        open(tmp_path / "x").close()
        os.close(os.open(tmp_path / "x", os.O_RDONLY))
        os.listdir(tmp_path)
    assert not acts
