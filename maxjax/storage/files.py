"""File access of the package: opening, positioned reads, aligned memory.

Every file of a checkpoint is opened by ``open_regular`` and read by ``OpenFile``. Errors of the
operating system become exceptions of ``maxjax.errors`` here.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from ..paths import require_name
from ..progress import reading
from .limits import Limits, in_force

# For fewer bytes a thread pool costs more than it saves.
PARALLEL_BYTES = 8 << 20


def run_jobs(
    read: Callable[[Any], Any], jobs: Sequence[Any], nbytes: int, threads: int | None = None
) -> list[Any]:
    """The results of ``read`` for each job, in order; many bytes are read by several threads.

    ``threads`` defaults to the number of cores, at most 8.

    Example:
        >>> run_jobs(len, ["a", "bc"], 100)
        [1, 2]
    """
    threads = threads or min(8, _available_cores())
    if threads <= 1 or nbytes < PARALLEL_BYTES or len(jobs) < 2:
        return [read(job) for job in jobs]
    with ThreadPoolExecutor(min(threads, len(jobs)), "maxjax-read") as pool:
        try:
            return list(pool.map(read, jobs))
        except BaseException:  # also an interrupt: pending jobs must not start
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run(job: Any) -> Any:
    """The result of ``job.run()``."""
    return job.run()


def run_reads(jobs: Sequence[Any], nbytes: int, threads: int | None = None) -> list[Any]:
    """As :func:`run_jobs` with :func:`run`; the ``nbytes`` of each job are counted if they are shown."""
    add = reading()

    def counted(job: Any) -> Any:
        found = job.run()
        if add is not None:
            add(job.nbytes)
        return found

    return run_jobs(counted, jobs, nbytes, threads)


def share_work(work: Callable[[], None], threads: int, name: str) -> None:
    """Calls ``work`` in this thread and ``threads`` - 1 others at once; they take turns at an iterator."""
    if threads <= 1:
        work()
        return
    with ThreadPoolExecutor(threads - 1, name) as pool:
        others = [pool.submit(work) for _ in range(threads - 1)]
        work()
        for other in others:
            other.result()


def _available_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


# XLA uses host memory without a copy only if it has at least this alignment, in bytes.
ALIGNMENT = 64
# Memory of at least this size is mapped on its own, and returns to the system when freed.
LARGE_BYTES = 4 << 20
# Bytes copied at a time: large enough for the disk, small enough for the memory.
PIECE_BYTES = 16 << 20


# What to do with a file that is too short, and with one whose bytes are wrong.
DOWNLOAD_AGAIN = "Incomplete download? Delete the file and download it again."
CORRUPT = "The file is corrupt: download it again."


class OpenFile:
    """A regular file open for positioned reads, from any number of threads at once.

    A file that is replaced by a rename or deleted keeps its old content here; a change in place is
    found by ``check_unchanged``. The file closes with the last reference.

    Attributes: ``path`` (text, for messages), ``fd``, ``size`` in bytes, ``stat`` as of opening.
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
        """Reads exactly ``nbytes`` bytes from ``offset``.

        Raises:
            CheckpointTruncatedError: the file ends earlier; the message names ``tensor`` if given.
        """
        # Checked before the buffer is allocated: a count from a file is not trusted.
        if offset + nbytes > self.size:
            raise self._truncated(offset, nbytes, max(self.size - offset, 0), tensor)
        pieces, done = [], 0
        while done < nbytes:
            piece = self._system(os.pread, nbytes - done, offset + done, tensor)
            if not piece:
                raise self._truncated(offset, nbytes, done, tensor)
            pieces.append(piece)
            done += len(piece)
        return b"".join(pieces)  # no copy if there is only one piece

    def pread_into(self, view: memoryview, offset: int, *, tensor: str | None = None) -> None:
        """Fills ``view`` (bytes, writable) from ``offset``; errors as for ``pread``."""
        wanted, done = len(view), 0
        while done < wanted:
            got = self.pread_some([view[done:]], offset + done, tensor=tensor)
            if not got:
                raise self._truncated(offset, wanted, done, tensor)
            done += got

    def pread_some(self, views: list[memoryview], offset: int, *, tensor: str | None = None) -> int:
        """One scattered read into ``views``; returns the number of bytes read, 0 at the end of the file."""
        return self._system(os.preadv, views, offset, tensor)

    def _system(self, call: Callable, what: Any, offset: int, tensor: str | None) -> Any:
        if self.fd < 0:
            raise CheckpointError(_CLOSED, path=self.path, tensor=tensor, hint=_AGAIN)
        try:
            return call(self.fd, what, offset)
        except OSError as error:
            raise os_error(error, self.path, "reading failed", tensor=tensor) from error

    def _truncated(
        self, offset: int, wanted: int, left: int, tensor: str | None
    ) -> CheckpointError:
        return CheckpointTruncatedError(
            "the file ends inside the data",
            path=self.path,
            tensor=tensor,
            offset=offset,
            expected=f"{wanted} bytes",
            found=f"{left} bytes",
            hint="Incomplete download, or truncated while being read? Download it again.",
        )

    def is_in_place(self) -> bool | None:
        """Whether the path still leads to this file: False if it was replaced, None if deleted."""
        try:
            now = os.stat(self.path)
        except OSError:
            return None
        if self.fd < 0:  # closed: the inode may be reused by another file
            return content_identity(now) == content_identity(self.stat)
        return (now.st_dev, now.st_ino) == (self.stat.st_dev, self.stat.st_ino)

    def check_unchanged(self) -> None:
        """Raises CheckpointChangedError if the content may have changed since the file was opened."""
        if self.fd < 0:
            raise CheckpointError(_CLOSED, path=self.path, hint=_AGAIN)
        try:
            now = os.fstat(self.fd)
        except OSError as error:
            raise os_error(error, self.path, "fstat failed") from error
        if content_identity(now) != content_identity(self.stat):
            raise changed(self.path, content_identity(self.stat), content_identity(now))

    def close(self, *, _close=os.close) -> None:
        """Closes the file; a second call does nothing."""
        # _close: `os` may already be gone at interpreter exit.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _close(fd)

    def __del__(self):
        # fd is missing if __init__ never ran.
        if getattr(self, "fd", -1) >= 0:
            self.close()


# Size, modification time in nanoseconds, inode and device.
Identity = tuple[int, int, int, int]


def content_identity(status: os.stat_result) -> Identity:
    """What changes when a file is written to or replaced."""
    # Without the change time (ctime): a rename or unlink changes it, but not the content.
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev


def changed(
    path: str, before: Identity, now: Identity, tensor: str | None = None
) -> CheckpointChangedError:
    """The error for a file whose identity is no longer that of its opening."""
    expected, found = (
        f"{size} bytes, mtime {mtime} ns, inode {inode}" for size, mtime, inode, _ in (before, now)
    )
    return CheckpointChangedError(
        "the file changed while it was being read",
        path=path,
        tensor=tensor,
        expected=expected,
        found=found,
        hint="Wait until nothing writes to it, then load again.",
    )


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether something has this name.

    A link that leads nowhere is an error and not an absent file: a model without its tokenizer or its
    settings would give other results without a word.

    Raises:
        CheckpointMissingError: the name is that of a dangling or circular link.
        CheckpointAccessError: a directory above it may not be searched.
        CheckpointError: the operating system reports another error.

    Example:
        >>> is_there("no/such/tokenizer.json")
        False
    """
    name = os.fspath(path)
    try:
        os.stat(name)
    except OSError as error:
        if os.path.islink(name):
            raise CheckpointMissingError(
                "the link leads to a file that does not exist",
                path=name,
                expected=os.readlink(name),
                hint="Download the file again, or remove the link.",
            ) from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise os_error(error, name, "opening failed") from error
    return True


def open_regular(
    path: str | bytes | os.PathLike,
    *,
    dir_fd: int | None = None,
    follow: bool = True,
    shown: str | None = None,
) -> OpenFile:
    """Opens a regular file for reading; anything else is refused without blocking.

    With ``dir_fd``, a relative ``path`` starts at that open directory, and ``shown`` is the path
    for messages. ``follow=False`` refuses a symbolic link as the last component.

    Raises:
        CheckpointMissingError: the file does not exist, or the link is dangling or circular.
        CheckpointAccessError: the file may not be read.
        CheckpointFormatError: the path is a directory, FIFO, socket, device or a /proc file.
        CheckpointError: the operating system reports another error.

    Example:
        >>> open_regular("no/such/model.safetensors")
        Traceback (most recent call last):
        maxjax.errors.CheckpointMissingError: no/such/model.safetensors: no such file. Check the path.
    """
    name = os.fsdecode(path)
    shown = shown or name
    require_name(shown)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        # Checked before opening, because opening a device may already act on it.
        _require_regular(os.stat(name, dir_fd=dir_fd, follow_symlinks=follow), shown)
        fd = os.open(name, flags, dir_fd=dir_fd)
    except OSError as error:
        raise os_error(error, shown, "opening failed") from error
    file = OpenFile(fd, shown, os.fstat(fd))
    with closed_on_error([file]):
        # Checked again: the name may lead to another file by now.
        _require_regular(file.stat, shown)
        _require_stored(file)
    return file


@contextmanager
def closed_on_error(files: Iterable[Any]) -> Iterator[None]:
    """Context that closes files, or whatever else has ``close``, if it ends with an exception."""
    try:
        yield
    except BaseException:
        for file in files:
            file.close()
        raise


def read_whole(
    source: str | os.PathLike[str] | OpenFile,
    limits: Limits | None = None,
    option: str = "json_bytes",
) -> bytes:
    """All bytes of a file that is within the limit ``option``; it is closed only if it was opened here."""
    limits = in_force(limits)
    file = source if isinstance(source, OpenFile) else open_regular(source)
    try:
        limits.check(option, file.size, "the file is too long", path=file.path)
        data = file.pread(0, file.size)
        file.check_unchanged()
    finally:
        if file is not source:
            file.close()
    return data


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
    """Refuses files like those in /proc, whose content the kernel generates: size 0, but readable."""
    if file.size:
        return
    try:
        stored = not os.pread(file.fd, 1, 0)
    except OSError:
        stored = False  # an empty file on a disk can always be read
    if not stored:
        raise CheckpointFormatError(
            "the content of the file is generated by the kernel",
            path=file.path,
            expected="a regular file",
            found="a file of /proc or /sys",
            hint="Copy the content to a file first.",
        )


_CLOSED, _AGAIN = "the file has been closed", "Open it again."
_MISSING = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file: a part of the path is not a directory",
    errno.ELOOP: "no such file: symbolic links that lead in circles, or a refused link",
}


def os_error(
    error: OSError, path: str, doing: str, *, tensor: str | None = None
) -> CheckpointError:
    """The exception of maxjax.errors for an OSError on ``path``."""
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
    """A new uninitialised uint8 array ``[nbytes]``, aligned to 64 bytes.

    JAX on CPU can use such memory without a copy. Raises MemoryError if there is not enough.

    Example:
        >>> aligned_empty(1000).ctypes.data % 64
        0
    """
    if nbytes < LARGE_BYTES:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + nbytes]
    try:
        # Not np.empty, which requests huge pages at this size: on a virtual machine whose host
        # reclaims free memory, filling those took twice as long as filling small ones.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {nbytes} bytes") from error
    return np.frombuffer(pages, np.uint8)
