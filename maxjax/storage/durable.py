"""Floor 1. Writing a file so that what was there is never lost."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable

from ..errors import CheckpointError, CheckpointMissingError, CheckpointSaveError
from .files import os_error


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
        raise _error(f"cannot be written: it is {what}", path, errno.EISDIR, "Name a file.")


def replace_file(path: str, pieces: Iterable[bytes]) -> None:
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
    temporary = os.path.join(folder, f".maxjax-{secrets.token_hex(8)}.tmp")
    kept = "The file that was there before is untouched." if os.path.exists(target) else None
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _fill(fd, target, pieces)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        found = os_error(error, folder, "writing failed")
        if type(found) is not CheckpointError:
            raise found from error
        raise _error(found.problem, path, error.errno, kept) from error
    _flush_folder(folder, path)


def _fill(fd: int, target: str, pieces: Iterable[bytes]) -> None:
    try:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(fd, stat.S_IMODE(os.stat(target).st_mode))
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _flush_folder(folder: str, path: str) -> None:
    """Makes the new name durable, where the file system can."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            problem = f"the new file is there, but its directory was not flushed: {error.strerror}"
            raise _error(problem, path, error.errno, "A power cut may undo it.") from error


def _error(problem: str, path: str, number: int | None, hint: str | None) -> CheckpointSaveError:
    error = CheckpointSaveError(problem, path=path, hint=hint)
    error.errno = number
    return error
