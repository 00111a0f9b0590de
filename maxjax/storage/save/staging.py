"""Staging: a transaction that replaces several files of a directory without ever losing any.

New files are written to a temporary directory inside the target directory, flushed to the disk, and
renamed into place in an order in which the last rename commits them. A failure before that rename
leaves the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import time
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Self
from weakref import WeakSet

from ...errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointMissingError,
    CheckpointSaveError,
)
from ..files import closed_on_error, open_regular
from ..strict_json import load_json
from .beside import WAITING, waiting
from .durable import (
    flush_folder,
    has_no_room,
    save_error,
    save_failed,
    sweep_parts,
    target_path,
    write_new,
)
from .locks import FOLDER, lock, processes_with, unlock

_LOG = logging.getLogger("maxjax")
TEMPORARY_PREFIX = ".maxjax-"
_END, _OWNER = ".tmp", ".owner"
# Age in seconds from which the temporary files of another host are considered abandoned.
_ABANDONED_SECONDS = 24 * 3600
# The transactions of this process that have not ended.
_ACTIVE: WeakSet[Staging] = WeakSet()
# A writer takes less than this many seconds from creating its directory to locking it.
_LOCKING_SECONDS = 60
# Seconds to wait for a lock holder that has no temporary directory.
_WAIT_SECONDS = 2.0
# Seconds to wait before a temporary directory is removed once more.
_PAUSES = (0.02, 0.1, 0.3, 0)
# An .owner file is smaller; and a directory has fewer remains of saves.
_OWNER_BYTES, _MOST_REMAINS = 4096, 1000


class Staging:
    """One writer's transaction in a directory; a context manager.

    Args:
        directory: target directory of the files; created if it does not exist.
        exclusive: whether to refuse while another writer holds the directory exclusively; otherwise
            only :meth:`commit` is exclusive, and it waits.

    Attributes:
        directory: target directory with symbolic links resolved.
        folder: temporary directory in it, in which any files may be created.
        waiting: name of a directory for files that wait until others are in place.

    Raises:
        CheckpointBusyError: another process is writing to the directory.
        CheckpointSaveError, CheckpointAccessError: the directory cannot be written to.

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
        self._locks: list[int] = []  # of the directory, of the folder
        self._is_left = False
        self.shown = target_path(directory)
        self.directory = os.path.realpath(self.shown)
        self._created: list[str] = []
        self._written: dict[str, int] = {}  # name → bytes of each file that is not committed yet
        self._kept = "", None
        if os.path.isdir(self.directory):
            self.keeps(f"Nothing in {self.shown} was changed.")
        # The name identifies process and host, before there is a file that does.
        name = f"{TEMPORARY_PREFIX}{_host()}-{os.getpid()}-{secrets.token_hex(8)}{_END}"
        self.folder = os.path.join(self.directory, name)
        self.waiting = f"{WAITING}{name.rpartition('-')[2].removesuffix(_END)}"
        _ACTIVE.add(self)
        with closed_on_error([self]), self.saving("making the directory"):
            self._create_directory()
            if not self._open_lock(self.directory, exclusive):
                self._wait_for_lock()
            self.swept = sweep(self.directory)
            os.mkdir(self.folder)
            self._open_lock(self.folder, True)
            self._write(_OWNER, [_owner(exclusive)])

    def _open_lock(self, path: str, exclusive: bool) -> bool:
        # In one call, since an interrupt may come between two: a lock that is held but not recorded
        # would block the next save of this process.
        self._locks.extend(map(os.open, (path,), (FOLDER,)))
        return not exclusive or lock(self._locks[-1], wait=False) is not False

    def _create_directory(self) -> None:
        """Creates the directory and its missing parents."""
        missing, path = [], self.directory
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
                self._created.append(path)
                flush_folder(os.path.dirname(path))

    def keeps(self, what: str, path: str | None = None) -> None:
        """Sets the sentence about the previous checkpoint that every error includes while ``path`` exists."""
        self._kept: tuple[str, str | None] = what, path

    @property
    def kept(self) -> str:
        """The sentence that :meth:`keeps` set, or one about the directory; "" if there was nothing before."""
        what, path = self._kept
        return what if path is None or os.path.lexists(path) else f"{path} is there no longer."

    @property
    def fd(self) -> int:
        """The open target directory."""
        return self._locks[0]

    @contextlib.contextmanager
    def saving(self, doing: str, *, needed: int | None = None):
        """Context in which an OSError becomes a CheckpointSaveError that says what is kept."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            if error.errno == errno.ENOENT and self._written:
                raise self.deleted(error.filename or self.folder) from error
            found = save_error(error, self.shown, doing, self.kept, needed)
            if isinstance(found, CheckpointMissingError):  # a save fails to write, not to read
                found = save_failed(found.problem, self.shown, error.errno, self.kept or None)
            raise found from error

    def deleted(self, path: str) -> CheckpointSaveError:
        """The error for a file of this save that is gone. It promises nothing about the previous checkpoint."""
        problem = f"{path} is there no longer: it was deleted while the checkpoint was being saved"
        return save_failed(problem, self.shown, errno.ENOENT)

    def check_written(self) -> None:
        """Checks that all files that were written and not committed yet are there, the owner's among them.

        The deletion of the directory takes the owner's file as well, whatever it leaves.

        Raises:
            CheckpointSaveError: a file was deleted or cut off.
        """
        with self.saving("checking the files"):
            for name, nbytes in self._written.items():
                path = os.path.join(self.folder, name)
                if os.stat(path).st_size != nbytes:
                    raise self.deleted(f"what was written to {path}")

    def require_space(self, nbytes: int) -> None:
        """Refuses a save that does not fit the disk, before anything is written.

        Raises:
            CheckpointSaveError: too few bytes or no inodes are free; ``errno`` is ENOSPC.
        """
        with self.saving("checking the free space", needed=nbytes):
            if has_no_room(self.directory, nbytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def hold(self) -> None:
        """Waits until no other writer holds the directory, and locks it until the end.

        A warning tells of a wait for a long save.
        """
        with self.saving("locking the directory"):
            if not self._try_to_lock():
                owners = self._owners() or self._others() or ["another process"]
                _LOG.warning("%s: waiting until %s has saved there", self.shown, ", ".join(owners))
                lock(self.fd, wait=True)

    def write(
        self,
        name: str,
        pieces: Iterable[Any],
        *,
        nbytes: int | None = None,
        like: str | None = None,
    ) -> None:
        """Writes a new file, flushed to the disk; :meth:`commit` moves it into place.

        Args:
            like: name of the file whose mode it gets; by default the file of its own name.

        Raises:
            CheckpointSaveError: the operating system reports an error.
        """
        with self.saving(f"writing {name}", needed=nbytes):
            self._write(name, pieces, like=os.path.join(self.directory, like or name))

    def _write(self, name: str, pieces: Iterable[Any], like: str | None = None) -> None:
        *above, file = name.split("/")
        path = self.folder
        for (
            part
        ) in above:  # not os.makedirs: the folder itself, if it was deleted, is not made again
            path = os.path.join(path, part)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        self._written[name] = write_new(os.path.join(path, file), pieces, like=like)

    def commit(
        self, *groups: Sequence[str], retire: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> None:
        """Renames the files into place, group after group, each durable before the next.

        Then it removes the files of ``retire``: old files that would be read instead of the new
        ones. If any of this fails, everything is undone. Last it deletes the files of ``remove``,
        which only the old checkpoint needed.

        Raises:
            CheckpointSaveError: the operating system reports an error, or a file that was written is
                gone; all old files are in place.
        """
        undo: list[tuple[str, str | None]] = []
        with self.saving("putting the new files into place"):
            lock(self.fd, wait=True)
            self.check_written()
            try:
                for group in groups:
                    for name in group:
                        self._replace(name, undo)
                    for folder in {os.path.dirname(self._target(name)) for name in group}:
                        flush_folder(folder)
                for name in retire:
                    self._retire(name, undo)
                if retire:
                    flush_folder(self.directory)
            except BaseException:
                self._undo(undo)
                raise
        self._created.clear()
        self._written = {_OWNER: self._written[_OWNER]}
        self._remove(remove)

    def _target(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _replace(self, name: str, undo: list[tuple[str, str | None]]) -> None:
        place, backup = self._target(name), None
        if not os.path.isdir(os.path.dirname(place)):
            os.makedirs(os.path.dirname(place))
            flush_folder(os.path.dirname(os.path.dirname(place)))
        if os.path.isdir(place) and not os.path.islink(place):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
        if os.path.lexists(place):
            backup = os.path.join(self.folder, f".old-{secrets.token_hex(4)}")
            _back_up(place, backup)
        self._move(os.path.join(self.folder, name), place, (place, backup), undo)

    def _retire(self, name: str, undo: list[tuple[str, str | None]]) -> None:
        place, gone = self._target(name), os.path.join(self.folder, f".old-{secrets.token_hex(4)}")
        if os.path.lexists(place):
            self._move(place, gone, (place, gone), undo)

    def _move(self, start: str, end: str, how: tuple[str, str | None], undo: list) -> None:
        undo.append(how)  # before the call: an interrupt may come right after it
        try:
            os.rename(start, end)
        except OSError:
            undo.pop()  # nothing was moved: the file there is not ours
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
                if backup is None and not os.path.lexists(self.folder):  # somebody deletes it all
                    shutil.rmtree(place, ignore_errors=True)
                    continue
                self.keeps(f"{place} is new and could not be removed: {error.strerror}.")
                break  # the files before it belong to it
        with contextlib.suppress(OSError):
            flush_folder(self.directory)

    def _remove(self, names: Sequence[str]) -> None:
        """Deletes files that nothing refers to any more; a failure is only logged."""
        for name in names:
            place = self._target(name)
            try:
                if os.path.isdir(place) and not os.path.islink(place):
                    # Renamed first: a half-deleted checkpoint must never be visible by its name.
                    gone = os.path.join(self.folder, f".gone-{secrets.token_hex(4)}")
                    os.rename(place, gone)
                else:
                    os.unlink(place)
            except FileNotFoundError:
                continue
            except OSError as error:
                _LOG.warning("%s could not be deleted: %s", place, error)
        if names:
            with contextlib.suppress(
                OSError
            ):  # a power failure may restore them, which is harmless
                flush_folder(self.directory)

    def close(self) -> None:
        """Removes files that were not committed, and releases the locks."""
        try:
            self._clear()
        except BaseException:  # an interrupt: the rest is removed all the same
            self._clear()
            raise
        finally:  # the next save must not find it locked
            try:
                self._unlock()
            finally:
                self._unlock()

    def _unlock(self) -> None:
        while self._locks:
            fd = self._locks[-1]
            del self._locks[-1]  # not a call, so no interrupt comes before the next line
            unlock(fd)
        _ACTIVE.discard(self)

    def _clear(self) -> None:
        if self._is_left:
            return
        for pause in _PAUSES:  # a library's threads may still write after an error
            shutil.rmtree(self.folder, ignore_errors=True)
            if not os.path.lexists(self.folder):
                break
            time.sleep(pause)
        for path in reversed(self._created):  # created for a save that failed
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def __del__(self) -> None:
        """Cleans up if an interrupt came between the constructor and the ``with``."""
        if self._locks:
            self.close()

    def _leave(self) -> None:
        """Closes the copies of the locks in a process that was forked meanwhile: the save is not its own."""
        fds, self._locks = self._locks, []
        self._created, self._is_left = [], True
        for fd in fds:
            os.close(fd)

    def _wait_for_lock(self) -> None:
        """Waits for a holder that locks the directory only briefly: to rename a file, to end a save."""
        if not self._try_to_lock():
            raise self._busy(self._owners())

    def _try_to_lock(self) -> bool:
        """Tries to lock the directory until it is clear that a longer save holds it."""
        end = time.monotonic() + _WAIT_SECONDS
        while lock(self.fd, wait=False) is False:
            if self._owners() or time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def _owners(self) -> list[str]:
        """The processes that hold the directory exclusively, as texts."""
        living = [path for path in _temporary(self.directory) if not _is_dead(path)]
        return [owner for path in living if (owner := _exclusive_owner(path))]

    def _others(self) -> list[str]:
        """The other processes that have the directory open, as texts."""
        return [_process(one) for one in processes_with(self.directory) if one != os.getpid()]

    def _busy(self, owners: Sequence[str]) -> CheckpointBusyError:
        hint = "Wait until it has finished, or save to another directory."
        problem = "another process is writing to this directory"
        found = ", ".join(owners or self._others()) or None
        if _process(os.getpid()) in owners:
            problem = "another save of this process is writing to this directory"
            found = "a save of another thread, or an unfinished save_async"
            hint = "Wait for its result() first, or save to another directory."
        return CheckpointBusyError(problem, path=self.shown, found=found, hint=hint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def sweep(directory: str) -> list[str]:
    """Deletes the remains of this user's interrupted saves in a directory; returns their names.

    A live writer holds a lock on its temporary directory. If the file system has no locks, or another
    host wrote, only remains that are a day old and of no live process are deleted.
    """
    swept = [os.path.basename(path) for path in _temporary(directory) if _is_dead(path)]
    for name in swept:
        shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
    swept += sweep_parts(directory)
    if swept:
        _LOG.warning("%s: removed the remains of %d interrupted saves", directory, len(swept))
    return swept


def leftovers(directory: str) -> list[str]:
    """The names of what interrupted saves left in a directory, to which nobody writes any more."""
    found = [os.path.basename(path) for path in _temporary(directory) if _is_dead(path)]
    if waits := waiting(directory):
        with contextlib.suppress(OSError):
            fd = os.open(directory, FOLDER)
            try:
                found += waits if lock(fd, wait=False, unsupported=None) else []
            finally:
                os.close(fd)
    return found


def tell_leftovers(directory: str) -> None:
    """Warns, once for a directory, of what interrupted saves left in it."""
    if found := leftovers(directory):
        _warn_leftovers(directory, len(found))


@lru_cache(1024)
def _warn_leftovers(directory: str, count: int) -> None:
    what = f"{count} interrupted saves" if count > 1 else "an interrupted save"
    _LOG.warning(
        "%s: the checkpoint is complete; %s left files, which the next save or `maxjax repair %s` removes",
        directory, what, shlex.quote(directory),
    )  # fmt: skip


def _temporary(directory: str) -> list[str]:
    try:
        names = sorted(filter(is_temporary, os.listdir(directory)))
    except OSError:
        return []
    return [os.path.join(directory, name) for name in names[:_MOST_REMAINS]]


def is_temporary(name: str) -> bool:
    """Whether a temporary directory of a save has such a name."""
    return name.startswith(TEMPORARY_PREFIX) and name.endswith(_END)


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
        is_local = owner["host"] == socket.gethostname() if "host" in owner else host == _host()
        if not is_local:
            return age > _ABANDONED_SECONDS
        if is_free and owner:
            return True  # its writer had locked it, and has ended
        if pid == os.getpid():
            return path not in [staging.folder for staging in list(_ACTIVE)]
        return not _is_alive(owner.get("pid", pid)) or (not owner and age > _LOCKING_SECONDS)
    finally:
        os.close(fd)


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
    with contextlib.suppress(CheckpointError):
        file = open_regular(os.path.join(path, _OWNER), follow=False)
        found = load_json(file.pread(0, min(file.size, _OWNER_BYTES)))
        return found if isinstance(found, dict) else {}
    return {}


def _owner(exclusive: bool) -> bytes:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "exclusive": exclusive}
    return json.dumps(owner).encode()


def _exclusive_owner(path: str) -> str | None:
    """The writer that holds a directory exclusively, by its temporary directory."""
    owner = _read_owner(path)
    if not owner.get("exclusive"):
        return None
    pid, host = owner.get("pid"), str(owner.get("host"))
    if host == socket.gethostname() and not _is_alive(pid):  # a copy of its lock lives on
        heirs = processes_with(os.path.realpath(path))
        return ", ".join(map(_process, heirs)) or "a process that inherited its lock"
    return _process(pid, host) if type(pid) is int and host.isprintable() else None


def _process(pid: int, host: str | None = None) -> str:
    return f"process {pid} on {host or socket.gethostname()}"


def _after_fork() -> None:
    for staging in list(_ACTIVE):
        staging._leave()
    _ACTIVE.clear()


os.register_at_fork(after_in_child=_after_fork)


def _back_up(place: str, backup: str) -> None:
    """Keeps a backup of the file at ``place``: a hard link, or a copy if links are not supported."""
    try:
        os.link(place, backup, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS):
            raise
        shutil.copyfile(place, backup, follow_symlinks=False)
        with contextlib.suppress(OSError):  # a file system without modes and times of its own
            shutil.copystat(place, backup, follow_symlinks=False)
