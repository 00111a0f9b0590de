"""The door to the disk: what is refused, what a change under an open file does."""

import errno
import os
import socket
from pathlib import Path

import numpy as np
import pytest

from maxjax.errors import (
    CheckpointAccessError,
    CheckpointChangedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    CheckpointTruncatedError,
)
from maxjax.storage import OpenFile, aligned_empty, open_regular
from maxjax.storage.files import os_error
from tests.storage.nobody import printed_by_nobody


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(range(100)))
    return path


def test_reads_at_positions(path):
    file = open_regular(path)
    assert (file.path, file.size) == (str(path), 100)
    assert file.pread(10, 3) == bytes([10, 11, 12])
    buffer = bytearray(4)
    file.pread_into(memoryview(buffer), 96)
    assert buffer == bytes([96, 97, 98, 99])
    assert file.pread(100, 0) == b""


def test_reads_on_after_a_short_read(path, monkeypatch):
    into, plain = os.preadv, os.pread
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: into(fd, [views[0][:7]], at))
    monkeypatch.setattr(os, "pread", lambda fd, count, at: plain(fd, min(count, 7), at))
    buffer = bytearray(100)
    file = open_regular(path)
    file.pread_into(memoryview(buffer), 0)
    assert file.pread(0, 100) == buffer == bytes(range(100))


def test_short_file_is_truncated_and_nothing_is_allocated(path):
    with pytest.raises(CheckpointTruncatedError) as caught:
        open_regular(path).pread(90, 2**60, tensor="w")
    error = caught.value
    assert (error.tensor, error.offset) == ("w", 90)
    assert (error.expected, error.found) == (f"{2**60} bytes", "10 bytes")


def test_relative_to_an_open_directory(path):
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        file = open_regular("data", dir_fd=handle, shown=str(path))
        assert (file.path, file.size) == (str(path), 100)
        with pytest.raises(CheckpointMissingError, match="elsewhere"):
            open_regular("none", dir_fd=handle, shown="elsewhere")
    finally:
        os.close(handle)


def test_link_is_followed_unless_told_not_to(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    assert open_regular(link).size == 100
    with pytest.raises(CheckpointFormatError, match="symbolic link"):
        open_regular(link, follow=False)


# --- what is refused ----------------------------------------------------------------------


def test_socket_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with pytest.raises(CheckpointFormatError, match="a socket"):
            open_regular("s")


def swap_for_fifo(path: Path) -> None:
    os.mkfifo(path)


def swap_for_directory(path: Path) -> None:
    path.mkdir()


def swap_for_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize(
    ("swap", "found"),
    [
        (swap_for_fifo, "a FIFO (named pipe)"),
        (swap_for_directory, "a directory"),
        (swap_for_device, "a character device"),
    ],
)
def test_what_takes_its_place_before_it_is_opened_is_refused(path, monkeypatch, swap, found):
    """Of a path that is looked at, then opened, the second may be another thing."""
    opened = os.open
    handles = []

    def swapped(name, *arguments, **options):
        path.unlink()
        swap(path)
        handles.append(opened(name, *arguments, **options))
        return handles[-1]

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(CheckpointFormatError, match="not a regular file") as caught:
        open_regular(path)
    assert (caught.value.found, caught.value.path) == (found, str(path))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handles[0])  # closed again


def test_part_of_the_path_is_a_file(path):
    with pytest.raises(CheckpointMissingError, match="not a directory"):
        open_regular(path / "model.safetensors")


def test_nul_in_the_path():
    with pytest.raises(CheckpointMissingError, match="NUL"):
        open_regular("a\0b")


def test_unreadable_is_not_called_missing(path, tmp_path):
    """In a child that is nobody: the owner root may read everything."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "inside").write_bytes(b"x")
    path.chmod(0)
    closed.chmod(0)
    imports = """
from maxjax.errors import CheckpointAccessError
from maxjax.storage import open_regular
"""
    code = f"""
for path in {[str(path), str(closed / "inside")]!r}:
    try:
        open_regular(path)
    except CheckpointAccessError as error:
        print(error)
"""
    try:
        first, second = printed_by_nobody(tmp_path, imports, code)
    finally:
        path.chmod(0o600)
        closed.chmod(0o700)
    assert str(path) in first and "uid" in first and "mode ----------" in first
    assert str(closed / "inside") in second and "uid" in second


@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (errno.EACCES, CheckpointAccessError, "uid"),
        (errno.EPERM, CheckpointAccessError, "uid"),
        (errno.ENOENT, CheckpointMissingError, "no such file"),
        (errno.ELOOP, CheckpointMissingError, "circles"),
        (errno.EIO, CheckpointError, "EIO Input/output error"),
        (errno.ESTALE, CheckpointError, "ESTALE"),
        (errno.EMFILE, CheckpointError, "ulimit -n"),
    ],
)
def test_errno_is_told_apart(number, error, says):
    made = os_error(OSError(number, "x"), "m.safetensors", "reading failed", tensor="w")
    assert type(made) is error
    assert says in str(made) and str(made).startswith("m.safetensors: tensor 'w'")


def test_read_error_is_wrapped(path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    file = open_regular(path)
    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pread", fail)
    for act in (lambda: file.pread(0, 4), lambda: file.pread_into(memoryview(bytearray(4)), 0)):
        with pytest.raises(CheckpointError, match="reading failed: EIO") as caught:
            act()
        assert caught.value.path == str(path)


# --- changes under an open file -----------------------------------------------------------


def test_change_in_place_is_found(path):
    file = open_regular(path)
    file.check_unchanged()
    os.utime(path, ns=(0, 0))
    with pytest.raises(CheckpointChangedError, match="mtime 0 ns") as caught:
        file.check_unchanged()
    assert caught.value.expected != caught.value.found


def test_growth_is_found(path):
    file = open_regular(path)
    stat = os.stat(path)
    with open(path, "ab") as other:
        other.write(b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(CheckpointChangedError, match="found 101 bytes"):
        file.check_unchanged()


@pytest.mark.parametrize("act", ["replace", "unlink", "rename"])
def test_old_content_stays_readable(act, path, tmp_path):
    file = open_regular(path)
    if act == "replace":
        (tmp_path / "new").write_bytes(b"new")
        os.replace(tmp_path / "new", path)
    elif act == "unlink":
        path.unlink()
    else:
        path.rename(tmp_path / "other")
    assert file.pread(0, 100) == bytes(range(100))
    file.check_unchanged()


# --- lifetime -----------------------------------------------------------------------------


def test_closed_file_says_so(path):
    file = open_regular(path)
    file.close()
    file.close()
    for act in (lambda: file.pread(0, 1), file.check_unchanged):
        with pytest.raises(CheckpointError, match="closed"):
            act()


def test_closes_with_the_last_reference(path):
    file = open_regular(path)
    fd = file.fd
    del file
    with pytest.raises(OSError):
        os.fstat(fd)


def test_is_not_inherited_and_not_copied(path):
    import copy
    import pickle

    file = open_regular(path)
    assert not os.get_inheritable(file.fd)
    for act in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="open the path again"):
            act(file)
    assert isinstance(file, OpenFile)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1 << 20, (8 << 20) + 1])
def test_aligned_empty(nbytes):
    memory = aligned_empty(nbytes)
    assert (memory.dtype, memory.shape) == (np.uint8, (nbytes,))
    assert memory.flags.writeable and memory.flags.c_contiguous
    assert nbytes == 0 or memory.ctypes.data % 64 == 0
