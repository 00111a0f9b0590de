"""The one door to the disk: opening, positioned reads, limits, aligned memory.

Every file of a checkpoint is opened by ``open_regular`` and read by ``OpenFile``; whatever
the operating system has to say becomes an exception of ``maxjax.errors`` here.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..errors import (
    CheckpointAccessError,
    CheckpointChangedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    CheckpointTruncatedError,
)

# Below this a pool of threads costs more than it saves.
PARALLEL_BYTES = 8 << 20


def run_jobs(
    read: Callable[[Any], Any], jobs: Sequence[Any], nbytes: int, threads: int | None = None
) -> list[Any]:
    """What ``read`` gives for each job, in order; in threads for many bytes.

    ``threads`` is by default the number of cores, at most 8.

    Example:
        >>> run_jobs(len, ["a", "bc"], 100)
        [1, 2]
    """
    threads = threads or min(8, _cores())
    if threads <= 1 or nbytes < PARALLEL_BYTES or len(jobs) < 2:
        return [read(job) for job in jobs]
    with ThreadPoolExecutor(min(threads, len(jobs)), "maxjax-read") as pool:
        try:
            return list(pool.map(read, jobs))
        except BaseException:  # an interrupt too: what has not begun shall not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run(job: Any) -> Any:
    """What a job's ``run`` gives."""
    return job.run()


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


# XLA takes host memory without a copy only from this alignment upwards.
ALIGNMENT = 64
# From here on memory comes as pages of its own, and goes back to the system when dropped.
LARGE_BYTES = 4 << 20
# What is copied in turn: large enough for the disk, small enough for the memory.
PIECE_BYTES = 16 << 20


class OpenFile:
    """A regular file open for positioned reads, from any number of threads at once.

    Attributes: ``path`` (as text, for messages), ``fd``, ``size`` in bytes, ``stat`` as it
    was at opening. A file replaced by a rename or unlinked keeps its old content here; a
    change in place is found by ``check_unchanged``. Closed when the last reference goes.
    """

    def __init__(self, fd: int, path: str, status: os.stat_result):
        self.fd = fd
        self.path = path
        self.stat = status
        self.size = status.st_size

    def __repr__(self) -> str:
        return f"OpenFile({self.path!r}, {self.size} bytes{', closed' if self.fd < 0 else ''})"

    def __reduce__(self):
        raise TypeError("an open file cannot be copied or pickled; open the path again")

    def pread(self, offset: int, nbytes: int, *, tensor: str | None = None) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``.

        Raises:
            CheckpointTruncatedError: The file ends before. ``tensor`` is named if given.
        """
        # Asked before the buffer is made: a count out of a file is not to be believed.
        if offset + nbytes > self.size:
            raise self._short(offset, nbytes, max(self.size - offset, 0), tensor)
        pieces, done = [], 0
        while done < nbytes:
            piece = self._system(os.pread, nbytes - done, offset + done, tensor)
            if not piece:
                raise self._short(offset, nbytes, done, tensor)
            pieces.append(piece)
            done += len(piece)
        return b"".join(pieces)  # without a copy when it is one

    def pread_into(self, view: memoryview, offset: int, *, tensor: str | None = None) -> None:
        """Fills ``view`` (bytes, writable) from ``offset``; errors as for ``pread``."""
        wanted, done = len(view), 0
        while done < wanted:
            got = self.pread_some([view[done:]], offset + done, tensor=tensor)
            if not got:
                raise self._short(offset, wanted, done, tensor)
            done += got

    def pread_some(self, views: list[memoryview], offset: int, *, tensor: str | None = None) -> int:
        """One read that scatters into ``views``; gives how many bytes came, 0 at the end."""
        return self._system(os.preadv, views, offset, tensor)

    def _system(self, call: Callable, what: Any, offset: int, tensor: str | None) -> Any:
        if self.fd < 0:
            raise CheckpointError("the file has been closed", path=self.path, tensor=tensor)
        try:
            return call(self.fd, what, offset)
        except OSError as error:
            raise os_error(error, self.path, "reading failed", tensor=tensor) from error

    def _short(self, offset: int, wanted: int, there: int, tensor: str | None) -> CheckpointError:
        return CheckpointTruncatedError(
            "the file ends inside the data",
            path=self.path,
            tensor=tensor,
            offset=offset,
            expected=f"{wanted} bytes",
            found=f"{there} bytes",
            hint="Incomplete download, or cut while being read? Fetch it again.",
        )

    def is_in_place(self) -> bool | None:
        """Whether its path leads to it: not if another file was put there; None if there is none."""
        try:
            now = os.stat(self.path)
        except OSError:
            return None
        if self.fd < 0:  # its inode may be that of another file by now
            return _identity(now) == _identity(self.stat)
        return (now.st_dev, now.st_ino) == (self.stat.st_dev, self.stat.st_ino)

    def check_unchanged(self) -> None:
        """Raises CheckpointChangedError if the content may have changed since opening."""
        if self.fd < 0:
            raise CheckpointError("the file has been closed", path=self.path)
        try:
            now = os.fstat(self.fd)
        except OSError as error:
            raise os_error(error, self.path, "fstat failed") from error
        if _identity(now) != _identity(self.stat):
            raise CheckpointChangedError(
                "the file changed while it was being read",
                path=self.path,
                expected=_describe(self.stat),
                found=_describe(now),
                hint="Wait until nothing writes to it, then load again.",
            )

    def close(self, *, _close=os.close) -> None:
        """Closes the file; a second call does nothing."""
        # _close: `os` may be gone when the last reference goes at the end of the process.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _close(fd)

    def __del__(self):
        # Missing when __init__ never ran.
        if getattr(self, "fd", -1) >= 0:
            self.close()


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    # Not the change time: a rename or an unlink moves it and leaves the content alone.
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def _describe(status: os.stat_result) -> str:
    return f"{status.st_size} bytes, mtime {status.st_mtime_ns} ns, inode {status.st_ino}"


def open_regular(
    path: str | bytes | os.PathLike,
    *,
    dir_fd: int | None = None,
    follow: bool = True,
    shown: str | None = None,
) -> OpenFile:
    """Opens a regular file for reading; anything else is refused without blocking.

    ``dir_fd`` makes a relative ``path`` start at that open directory, and ``shown`` is then
    the path for messages. ``follow=False`` refuses a symbolic link as the last part.

    Raises:
        CheckpointMissingError: Nothing is there (a link that leads nowhere, or in circles).
        CheckpointAccessError: It may not be read.
        CheckpointFormatError: It is a directory, FIFO, socket, device or a /proc file.
        CheckpointError: Anything else the operating system says.

    Example:
        >>> open_regular("no/such/model.safetensors")
        Traceback (most recent call last):
        maxjax.errors.CheckpointMissingError: no/such/model.safetensors: no such file
    """
    name = os.fsdecode(path)
    shown = shown or name
    if "\0" in name:
        raise CheckpointMissingError("a path cannot hold a NUL character", path=shown)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        # Looked at before it is opened: opening a device can already act on it.
        _require_regular(os.stat(name, dir_fd=dir_fd, follow_symlinks=follow), shown)
        fd = os.open(name, flags, dir_fd=dir_fd)
    except OSError as error:
        raise os_error(error, shown, "opening failed") from error
    file = OpenFile(fd, shown, os.fstat(fd))
    try:
        # Once more: the name may lead elsewhere by now.
        _require_regular(file.stat, shown)
        _require_stored(file)
    except BaseException:
        file.close()
        raise
    return file


def file_range(file: OpenFile, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of a file from ``start`` to ``stop``, in pieces of 16 MiB."""
    for at in range(start, stop, PIECE_BYTES):
        yield memoryview(file.pread(at, min(PIECE_BYTES, stop - at)))


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO (named pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISLNK, "a symbolic link"),
)


def _require_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((kind for test, kind in _KINDS if test(status.st_mode)), "a special file")
    inside = "Name a file inside it, or open the whole directory."
    raise CheckpointFormatError(
        "not a regular file",
        path=path,
        expected="a regular file",
        found=kind,
        hint=inside if kind == "a directory" else "Copy the content to a file first.",
    )


def _require_stored(file: OpenFile) -> None:
    """Refuses what the kernel makes up when it is read: it says it has no bytes, and has."""
    if file.size:
        return
    try:
        stored = not os.pread(file.fd, 1, 0)
    except OSError:
        stored = False  # an empty file on a disk can always be read
    if not stored:
        raise CheckpointFormatError(
            "not a stored file but one the kernel makes up",
            path=file.path,
            expected="a regular file",
            found="a file of /proc or /sys",
            hint="Copy the content to a file first.",
        )


_MISSING = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file: a part of the path is not a directory",
    errno.ELOOP: "no such file: symbolic links that lead in circles, or a refused link",
}


def os_error(
    error: OSError, path: str, doing: str, *, tensor: str | None = None
) -> CheckpointError:
    """The exception of maxjax.errors for what the operating system reported on ``path``."""
    number = error.errno or 0
    if number in _MISSING:
        return CheckpointMissingError(_MISSING[number], path=path, tensor=tensor)
    if number in (errno.EACCES, errno.EPERM):
        return CheckpointAccessError(
            f"permission denied ({_permissions(path)}, this process has uid {os.geteuid()})",
            path=path,
            tensor=tensor,
            hint="Change its permissions or those of the directories above it.",
        )
    name = errno.errorcode.get(number, number)
    limit = "Too many files are open: raise `ulimit -n`." if number == errno.EMFILE else None
    problem = f"{doing}: {name} {os.strerror(number) if number else error}"
    return CheckpointError(problem, path=path, tensor=tensor, hint=limit)


def _permissions(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return "a directory above it cannot be searched"
    return f"mode {stat.filemode(status.st_mode)}, owner uid {status.st_uid}"


def aligned_empty(nbytes: int) -> np.ndarray:
    """Fresh uint8 memory of its own, at a multiple of 64 bytes: ``[nbytes]``, any content.

    JAX on CPU can take such memory over without a copy. MemoryError when there is none.

    Example:
        >>> aligned_empty(1000).ctypes.data % 64
        0
    """
    if nbytes < LARGE_BYTES:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]
    try:
        # Not np.empty, which asks for huge pages at this size: on a virtual machine whose free
        # memory the host takes back, filling those took twice as long as filling small ones.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes of memory") from error
    return np.frombuffer(pages, np.uint8)
