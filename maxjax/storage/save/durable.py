"""Writing a file so that what was there is never lost."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from typing import Any

from ...errors import CheckpointError, CheckpointMissingError, CheckpointSaveError
from ..files import os_error


def require_writable(path: str) -> None:
    """Refuses, before anything is computed, a path that no file can be written to.

    Raises:
        CheckpointMissingError: Its directory is not there.
        CheckpointSaveError: It is a directory, or another thing that is no file.
    """
    if "\0" in path:
        raise CheckpointMissingError("a path cannot hold a NUL character", path=path)
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except FileNotFoundError:
        is_folder = False
    except OSError as error:
        raise os_error(error, folder, "looking for the directory failed") from error
    if not is_folder:
        hint = "Make it first, or write to another place."
        raise CheckpointMissingError(f"no such directory: {folder}", path=path, hint=hint)
    if os.path.exists(target) and not os.path.isfile(target):
        what = "a directory" if os.path.isdir(target) else "no regular file"
        raise save_failed(f"cannot be written: it is {what}", path, errno.EISDIR, "Name a file.")


def replace_file(path: str, pieces: Iterable[Any]) -> None:
    """Puts a file with these bytes, in turn, in the place of what is at ``path``.

    It is written beside it, flushed to the disk and renamed: however this ends, there is the
    old file or the new one, whole. The mode of the old one is kept; of a symbolic link, what
    it leads to is replaced.

    Raises:
        CheckpointSaveError: The system reports an error: a full disk, for example.
        CheckpointAccessError, CheckpointMissingError: It cannot be written there.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> replace_file(str(folder / "note"), [b"one", b"two"])
        >>> [(file.name, file.read_text()) for file in folder.iterdir()]
        [('note', 'onetwo')]
    """
    target = os.path.realpath(path)  # what a link leads to is replaced, not the link
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f".maxjax-{secrets.token_hex(8)}.part")
    kept = "The file that was there before is untouched." if os.path.exists(target) else ""
    try:
        try:
            write_new(temporary, pieces, like=target)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise save_error(error, path, "writing failed", kept) from error
    try:
        flush_folder(folder)
    except OSError as error:
        problem = f"the new file is there, but its directory was not flushed: {error.strerror}"
        raise save_failed(problem, path, error.errno, "A power cut may undo it.") from error


def write_new(path: str, pieces: Iterable[Any], *, like: str | None = None) -> None:
    """Makes a file that is not there yet, of these bytes, and flushes it to the disk.

    Args:
        like: A file whose mode it gets, if that is there.

    Raises:
        OSError: As the system says.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if like is not None:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(fd, stat.S_IMODE(os.stat(like).st_mode))
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def flush_folder(folder: str) -> None:
    """Makes new names in a directory durable, where the file system can.

    Raises:
        OSError: As the system says.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def save_error(
    error: OSError, path: str, doing: str, kept: str = "", needed: int | None = None
) -> CheckpointError:
    """The exception of maxjax.errors for what the system reported while saving to ``path``.

    Args:
        kept: A sentence on what was there before.
        needed: How many bytes were to be written.
    """
    found = os_error(error, path, doing)
    if type(found) is not CheckpointError:
        if kept:
            hint = f"{found.hint} {kept}" if found.hint else kept
            found = type(found)(found.problem, path=path, hint=hint)
        return found
    problem = found.problem
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem += f" ({_space(path, needed)})"
    return save_failed(problem, path, error.errno, kept or None)


def _space(path: str, needed: int | None) -> str:
    folder = os.path.realpath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    if has_no_inodes(status):
        return f"all {status.f_files:,} inodes are in use: no file more can be made, however small"
    free = f"{status.f_bavail * status.f_frsize:,} bytes are free"
    return free if needed is None else f"{needed:,} bytes are needed, {free}"


def has_no_inodes(status: os.statvfs_result) -> bool:
    """Whether a file system holds as many files as it can; some have no such bound, and say 0."""
    return status.f_files > 0 and status.f_favail == 0


def save_failed(
    problem: str, path: str, number: int | None = None, hint: str | None = None
) -> CheckpointSaveError:
    """A CheckpointSaveError with an errno."""
    error = CheckpointSaveError(problem, path=path, hint=hint)
    error.errno = number
    return error
