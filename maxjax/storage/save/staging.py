"""Staging: several files of a directory replaced so that nothing is ever lost.

New files are written whole under a temporary directory inside the one they belong to, flushed
to the disk, and renamed into place in an order in which the last rename is what makes them
count. Whatever happens before it leaves what was there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Self

from ...errors import CheckpointBusyError, CheckpointError, CheckpointMissingError
from .durable import flush_folder, has_no_inodes, save_error, save_failed, write_new

_LOG = logging.getLogger("maxjax")
_START, _END, _OWNER = ".maxjax-", ".tmp", ".owner"
WAITING = ".maxjax-next-"
# What another host left is taken for dead when it is as old as this, in seconds.
_AGE = 24 * 3600
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# The temporary directories of this process that are in use.
_IN_USE: set[str] = set()
# Longer than a writer takes from making its directory to locking it.
_MOMENT = 60
# So long who has no name in the directory may keep it locked, in seconds.
_PATIENCE = 2.0
# File systems that know no locks say one of these.
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


class Staging:
    """One writer's transaction in a directory; a context manager.

    Args:
        directory: Where the files belong. Made if it is not there.
        exclusive: Refuse while another writer has this directory exclusively; otherwise only the
            moment of :meth:`commit` is exclusive, and it waits.

    Attributes:
        directory: With symbolic links resolved.
        folder: The temporary directory in it; files of any kind may be made there.
        waiting: A name for a directory of files that wait there until others are in place.

    Raises:
        CheckpointBusyError: Another process is writing there.
        CheckpointSaveError, CheckpointAccessError: It cannot be written there.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with Staging(directory) as staging:
        ...     staging.write("part", [b"one"])
        ...     staging.write("index", [b"two"])
        ...     staging.commit(["part"], ["index"])
        >>> sorted(os.listdir(directory))
        ['index', 'part']
    """

    def __init__(self, directory: str | os.PathLike[str], *, exclusive: bool = True):
        self.shown = os.fspath(directory)
        self.directory = os.path.realpath(self.shown)
        there = os.path.isdir(self.directory)
        self._kept = f"Nothing was changed: what was in {self.shown} is as it was." if there else ""
        self._made: list[str] = []
        self._locks: list[int] = []  # of the directory, of the folder
        self.folder = os.path.join(self.directory, _new_name())
        self.waiting = f"{WAITING}{self.folder.rpartition('-')[2].removesuffix(_END)}"
        try:
            with self.saving("making the directory"):
                self._make()
                if not self._open_lock(self.directory, exclusive):
                    self._wait_for_lock()
                sweep(self.directory)
                _IN_USE.add(self.folder)
                os.mkdir(self.folder)
                self._open_lock(self.folder, True)
                write_new(os.path.join(self.folder, _OWNER), [_owner(exclusive)])
        except BaseException:
            self.close()
            raise

    def _open_lock(self, path: str, exclusive: bool) -> bool:
        # In one call, since an interrupt comes between two: a lock that is held and not known
        # would keep the next save of this process out.
        self._locks.extend(map(os.open, (path,), (FOLDER,)))
        return not exclusive or lock(self._locks[-1], wait=False) is not False

    def _make(self) -> None:
        """Makes the directory and those above it that are missing."""
        missing, path = [], self.directory
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
                self._made.append(path)
                flush_folder(os.path.dirname(path))

    def keeps(self, what: str) -> None:
        """Says what every error is to say about the checkpoint that was there before."""
        self._kept = what

    @contextlib.contextmanager
    def saving(self, doing: str, *, needed: int | None = None):
        """Inside, an error of the system becomes a CheckpointSaveError that says what is kept."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            found = save_error(error, self.shown, doing, self._kept, needed)
            if isinstance(found, CheckpointMissingError):  # nothing was to be read
                kept = self._kept or None
                found = save_failed(found.problem, self.shown, error.errno, kept)
            raise found from error

    def require_space(self, nbytes: int) -> None:
        """Refuses before anything is written what cannot fit the disk.

        Raises:
            CheckpointSaveError: There are fewer bytes free, or no inode; ``errno`` is ENOSPC.
        """
        with self.saving("looking at the disk", needed=nbytes):
            status = os.statvfs(self.directory)
            if status.f_bavail * status.f_frsize < nbytes or has_no_inodes(status):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hold(self) -> None:
        """Waits until no other writer has the directory, and keeps others away until the end."""
        with self.saving("locking the directory"):
            lock(self._locks[0], wait=True)

    def write(
        self,
        name: str,
        pieces: Iterable[Any],
        *,
        nbytes: int | None = None,
        like: str | None = None,
    ) -> None:
        """Writes a new file, flushed to the disk; :meth:`commit` gives it its place.

        Args:
            like: The name of the file whose mode it gets, if not its own.

        Raises:
            CheckpointSaveError: The system reports an error.
        """
        path = os.path.join(self.folder, name)
        old = os.path.join(self.directory, like or name)
        with self.saving(f"writing {name}", needed=nbytes):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_new(path, pieces, like=old)

    def commit(
        self, *groups: Sequence[str], retire: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> None:
        """Renames the files into place, group after group, each durable before the next.

        Then those of ``retire`` go: old files that would be read in the place of the new ones.
        All is put back if anything of this fails. Then the files of ``remove`` are deleted:
        what only the old checkpoint needed.

        Raises:
            CheckpointSaveError: The system reports an error; the old files are all there.
        """
        undo: list[tuple[str, str | None]] = []
        with self.saving("putting the new files into place"):
            lock(self._locks[0], wait=True)
            try:
                for group in groups:
                    for name in group:
                        self._replace(name, undo)
                    for folder in {os.path.dirname(self._place(name)) for name in group}:
                        flush_folder(folder)
                for name in retire:
                    self._retire(name, undo)
                if retire:
                    flush_folder(self.directory)
            except BaseException:
                self._undo(undo)
                raise
        self._made.clear()
        self._remove(remove)

    def _place(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _replace(self, name: str, undo: list[tuple[str, str | None]]) -> None:
        place, backup = self._place(name), None
        if not os.path.isdir(os.path.dirname(place)):
            os.makedirs(os.path.dirname(place))
            flush_folder(os.path.dirname(os.path.dirname(place)))
        if os.path.isdir(place) and not os.path.islink(place):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
        if os.path.lexists(place):
            backup = os.path.join(self.folder, f".old-{secrets.token_hex(4)}")
            _keep(place, backup)
        self._move(os.path.join(self.folder, name), place, (place, backup), undo)

    def _retire(self, name: str, undo: list[tuple[str, str | None]]) -> None:
        place, gone = self._place(name), os.path.join(self.folder, f".old-{secrets.token_hex(4)}")
        if os.path.lexists(place):
            self._move(place, gone, (place, gone), undo)

    def _move(self, start: str, end: str, how: tuple[str, str | None], undo: list) -> None:
        undo.append(how)  # before it: an interrupt may come behind the call
        try:
            os.rename(start, end)
        except OSError:
            undo.pop()  # nothing was moved: what is there is not ours
            raise

    def _undo(self, undo: list[tuple[str, str | None]]) -> None:
        for place, backup in reversed(undo):
            try:
                if backup is not None:
                    os.rename(backup, place)
                elif os.path.isdir(place) and not os.path.islink(place):
                    os.rename(place, os.path.join(self.folder, f".new-{secrets.token_hex(4)}"))
                else:
                    os.unlink(place)
            except OSError as error:
                self._kept = f"{place} is new, and could not be taken back: {error.strerror}."
                break  # what was put there before belongs to it
        with contextlib.suppress(OSError):
            flush_folder(self.directory)

    def _remove(self, names: Sequence[str]) -> None:
        """Deletes what nothing refers to any more; what cannot be is only told."""
        for name in names:
            place = self._place(name)
            try:
                if os.path.isdir(place) and not os.path.islink(place):
                    # Away at once: half a checkpoint shall never be seen under its name.
                    gone = os.path.join(self.folder, f".gone-{secrets.token_hex(4)}")
                    os.rename(place, gone)
                else:
                    os.unlink(place)
            except FileNotFoundError:
                continue
            except OSError as error:
                _LOG.warning("%s could not be deleted: %s", place, error)
        if names:
            with contextlib.suppress(OSError):  # a power cut may bring them back: no harm
                flush_folder(self.directory)

    def close(self) -> None:
        """Removes what was not committed, and lets other writers in."""
        try:
            self._clear()
        except BaseException:  # an interrupt: what is left is removed all the same
            self._clear()
            raise
        finally:  # the next save shall not find it locked
            try:
                self._unlock()
            finally:
                self._unlock()

    def _unlock(self) -> None:
        while self._locks:
            fd = self._locks[-1]
            del self._locks[-1]  # no call: no interrupt before the next
            os.close(fd)
        _IN_USE.discard(self.folder)

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in reversed(self._made):  # made for a save that failed
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def __del__(self) -> None:
        """An interrupt can come between the making and the ``with``."""
        if self._locks:
            self.close()

    def _wait_for_lock(self) -> None:
        """Waits for who has the directory for a moment only: to rename one file, to end a save."""
        end = time.monotonic() + _PATIENCE
        while lock(self._locks[0], wait=False) is False:
            living = (path for path in _temporary(self.directory) if not _is_dead(path))
            owners = [who for path in living if (who := _who(path))]
            if owners or time.monotonic() > end:
                raise self._busy(owners)
            time.sleep(0.01)

    def _busy(self, owners: Sequence[tuple[Any, Any]]) -> CheckpointBusyError:
        hint = "Wait until it has finished, or save to another place."
        problem = "another process is writing to this directory"
        found = ", ".join(f"process {pid} on {host}" for pid, host in owners) or None
        if (os.getpid(), socket.gethostname()) in owners:
            problem = "another save of this same process is writing to this directory"
            found = "one of another thread, or a save_async that goes on"
            hint = "Wait for its result() first, or save to another place."
        return CheckpointBusyError(problem, path=self.shown, found=found, hint=hint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def sweep(directory: str) -> list[str]:
    """Deletes what interrupted saves of this user left in a directory; gives its paths.

    A writer that lives holds a lock on its temporary directory. Where the file system has no
    locks, or another host wrote, only what is a day old and of no living process is deleted.
    """
    swept = []
    for path in _temporary(directory):
        if _is_dead(path):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    if swept:
        _LOG.warning("%s: removed what %d interrupted saves left", directory, len(swept))
    return swept


def leftovers(directory: str) -> list[str]:
    """What interrupted saves left in a directory, and nobody writes to any more."""
    return [path for path in _temporary(directory) if _is_dead(path)]


def _temporary(directory: str) -> list[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [
        os.path.join(directory, name)
        for name in sorted(names)
        if name.startswith(_START) and name.endswith(_END)
    ]


def _is_dead(path: str) -> bool:
    try:
        status = os.lstat(path)
        if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
            return False
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        is_free = lock(fd, wait=False, unsupported=None)
        if is_free is False:
            return False
        age, host, pid = time.time() - status.st_mtime, *_owner_in_name(path)
        owner = _read_owner(path)
        here = owner["host"] == socket.gethostname() if "host" in owner else host == _host()
        if not here:
            return age > _AGE
        if is_free and owner:
            return True  # it had been locked
        if pid == os.getpid():
            return path not in _IN_USE
        return not _is_alive(owner.get("pid", pid)) or (not owner and age > _MOMENT)
    finally:
        os.close(fd)


def _new_name() -> str:
    """A name that nobody has, and that says whose it is from the first moment."""
    return f"{_START}{_host()}-{os.getpid()}-{secrets.token_hex(8)}{_END}"


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _owner_in_name(path: str) -> tuple[str | None, int | None]:
    found = re.fullmatch(r"\.maxjax-([0-9a-f]{8})-(\d{1,10})-\w+\.tmp", os.path.basename(path))
    return (found[1], int(found[2])) if found else (None, None)


def _is_alive(pid: Any) -> bool:
    if type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _read_owner(path: str) -> dict[str, Any]:
    try:
        with open(os.path.join(path, _OWNER), "rb") as file:
            found = json.loads(file.read(4096))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _owner(exclusive: bool) -> bytes:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "exclusive": exclusive}
    return json.dumps(owner).encode()


def _who(path: str) -> tuple[Any, Any] | None:
    """Process and host of the writer that has a directory exclusively."""
    owner = _read_owner(path)
    return (owner.get("pid"), owner.get("host")) if owner.get("exclusive") else None


def lock(fd: int, *, wait: bool, unsupported: bool | None = True) -> bool | None:
    """Locks an open directory; False if another holds it, ``unsupported`` where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        if error.errno in _NO_LOCKS:
            return unsupported
        raise
    return True


def _keep(place: str, backup: str) -> None:
    """A second name for what is at ``place``: a hard link, or a copy where there are none."""
    try:
        os.link(place, backup, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS):
            raise
        shutil.copy2(place, backup, follow_symlinks=False)
