"""Locks of directories: a writer holds the directory that it writes to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from glob import iglob

# How a directory is opened to be locked.
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# The errors of file systems without locks.
_NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


def lock(fd: int, *, wait: bool, unsupported: bool | None = True) -> bool | None:
    """Locks an open directory; False if another holds it, ``unsupported`` if there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        if error.errno in _NO_LOCKS:
            return unsupported
        raise
    return True


def unlock(fd: int) -> None:
    """Gives up a lock and closes its directory.

    Closing alone does not give it up while a process that was forked meanwhile has a copy.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def processes_with(path: str) -> list[int]:
    """The processes that have a file open, as far as /proc shows it to this user; none without /proc."""
    found = set()
    for entry in iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry) == path:
                found.add(int(entry.split("/")[2]))
    return sorted(found)
