"""Writing a file atomically and durably, so that the previous content is never lost."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from typing import Any

from ...errors import CheckpointError, CheckpointMissingError, CheckpointSaveError
from ...paths import local_path
from ..files import os_error
from .locks import lock

# A file that is being written, and the age in seconds from which it may be the remains of one.
_PART = re.compile(r"\.maxjax-[0-9a-f]{16}\.part")
_PART_SECONDS = 60


def target_path(path: str | bytes | os.PathLike[Any]) -> str:
    """Returns the path of what is to be written as text; refuses the shell's ``~`` for a home directory.

    Raises:
        UserInputError, TypeError: as for :func:`local_path`.
        CheckpointMissingError: as for :func:`local_path`, or it begins with ``~`` and there is no such directory.
    """
    name = local_path(path)
    if os.path.expanduser(name) != name and not os.path.lexists(name.split(os.sep)[0]):
        raise CheckpointMissingError("there is no directory ~", path=name)
    return name


def absolute(path: str | bytes | os.PathLike[Any]) -> str:
    """The absolute path of what is written.

    Raises:
        UserInputError, TypeError, CheckpointMissingError: as for :func:`target_path`.

    Example:
        >>> absolute("/tmp/run")
        '/tmp/run'
    """
    return os.path.abspath(target_path(path))


def writable_path(path: str | bytes | os.PathLike[Any]) -> str:
    """Returns the path of a file to write as text; refuses one that cannot be, before anything is computed.

    Raises:
        UserInputError, TypeError: as for :func:`target_path`.
        CheckpointMissingError: as for :func:`target_path`, or the directory of the path does not exist.
        CheckpointSaveError: the path is a directory or not a regular file.
    """
    path = target_path(path)
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)
    except FileNotFoundError:
        is_folder = False
    except OSError as error:
        raise os_error(error, folder, "checking the directory failed") from error
    if not is_folder:
        hint = "Create it first, or choose another path."
        raise CheckpointMissingError(f"no such directory: {folder}", path=path, hint=hint)
    if os.path.exists(target) and not os.path.isfile(target):
        what = "a directory" if os.path.isdir(target) else "not a regular file"
        raise save_failed(f"cannot be written: it is {what}", path, errno.EISDIR, "Name a file.")
    return path


def replace_file(path: str, pieces: Iterable[Any]) -> None:
    """Replaces the file at ``path`` atomically by one that holds the concatenated ``pieces``.

    The new file is written beside the old one, flushed to the disk and renamed, so that at any time
    either the complete old file or the complete new one exists. The mode of the old file is kept. If
    ``path`` is a symbolic link, its target is replaced.

    Raises:
        CheckpointSaveError: the operating system reports an error, such as a full disk.
        CheckpointAccessError, CheckpointMissingError: the path cannot be written to.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> replace_file(str(folder / "note"), [b"one", b"two"])
        >>> [(file.name, file.read_text()) for file in folder.iterdir()]
        [('note', 'onetwo')]
    """
    target = os.path.realpath(path)  # the target of a link is replaced, not the link
    folder = os.path.dirname(target)
    sweep_parts(folder)
    temporary = os.path.join(folder, f".maxjax-{secrets.token_hex(8)}.part")
    kept = "The previous file is untouched." if os.path.exists(target) else ""
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
        problem = f"the file was written, but its directory was not flushed: {error.strerror}"
        raise save_failed(problem, path, error.errno, "A power cut may undo it.") from error


def sweep_parts(folder: str) -> list[str]:
    """Deletes the unfinished files of processes that were killed in :func:`replace_file`; returns their names."""
    try:
        names = sorted(filter(_PART.fullmatch, os.listdir(folder)))
    except OSError:
        return []
    return [name for name in names if _delete_part(os.path.join(folder, name))]


def _delete_part(path: str) -> bool:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            is_mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            is_old = time.time() - status.st_mtime > _PART_SECONDS
            if is_mine and is_old and lock(fd, wait=False, unsupported=None):
                os.unlink(path)
                return True
        finally:
            os.close(fd)
    return False


def write_new(path: str, pieces: Iterable[Any], *, like: str | None = None) -> int:
    """Creates a file, which must not exist yet, with the concatenated ``pieces``, and flushes it to the disk.

    Args:
        like: file whose mode the new file gets, if it exists and the file system has modes.

    Returns:
        The size of the file in bytes.

    Raises:
        OSError: the operating system reports an error.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        lock(fd, wait=False)  # as long as it is being written
        if like is not None:
            _set_mode(fd, like)
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _set_mode(fd: int, like: str) -> None:
    try:
        os.fchmod(fd, stat.S_IMODE(os.stat(like).st_mode))
    except OSError as error:
        # Network shares, FAT and FUSE may refuse it with EPERM to those who may write: their files
        # have the mode of the mount.
        if error.errno not in (errno.ENOENT, errno.EPERM, errno.ENOTSUP):
            raise


def flush_folder(folder: str) -> None:
    """Makes renames in a directory durable, if the file system supports it.

    Raises:
        OSError: the operating system reports an error.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flush_open(fd)
    finally:
        os.close(fd)


def flush_open(folder: int) -> None:
    """Does the same as :func:`flush_folder` for an open directory."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def save_error(
    error: OSError, path: str, doing: str, kept: str = "", needed: int | None = None
) -> CheckpointError:
    """The exception of maxjax.errors for an OSError while saving to ``path``.

    Args:
        kept: sentence about the previous files.
        needed: number of bytes to be written.
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
    if _has_no_inodes(status):
        return f"all {status.f_files:,} inodes are in use, so no file can be created"
    free = f"{status.f_bavail * status.f_frsize:,} bytes are free"
    if not status.f_blocks:
        free = "the file system does not say how many are free"
    return free if needed is None else f"{needed:,} bytes are needed, {free}"


def has_no_room(folder: str, nbytes: int) -> bool:
    """Whether a file system says that it lacks ``nbytes`` free bytes, or a free inode.

    One that does not count them, such as many of FUSE, reports 0 in total.
    """
    status = os.statvfs(folder)
    lacks_bytes = status.f_blocks > 0 and status.f_bavail * status.f_frsize < nbytes
    return lacks_bytes or _has_no_inodes(status)


def _has_no_inodes(status: os.statvfs_result) -> bool:
    return status.f_files > 0 and status.f_favail == 0


def save_failed(
    problem: str, path: str, number: int | None = None, hint: str | None = None
) -> CheckpointSaveError:
    """A CheckpointSaveError with the given errno."""
    error = CheckpointSaveError(problem, path=path, hint=hint)
    error.errno = number
    return error
