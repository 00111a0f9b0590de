"""What the process does to the outside while a file is being opened, as an audit hook sees it."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxjax.storage import crc32
from maxjax.storage.formats import FORMATS

# Loading a checkpoint imports nothing, runs nothing, connects to nothing, writes nothing.
_FORBIDDEN = (
    "import", "exec", "compile", "marshal.", "pickle.", "subprocess.", "os.system", "os.exec",
    "os.spawn", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.mkdir", "os.link",
    "os.symlink", "os.chmod", "os.truncate", "socket.", "urllib.", "ctypes.", "shutil.",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_recorder: list[tuple[str, tuple]] | None = None
_installed = False


def _hook(event: str, arguments: tuple) -> None:
    if _recorder is not None:
        _recorder.append((event, arguments))


@contextmanager
def watched() -> Iterator[list[str]]:
    """Gives the list of forbidden acts, filled when the block ends; `open: PATH` for writes."""
    global _recorder, _installed
    if not _installed:  # an audit hook stays for the life of the process
        sys.addaudithook(_hook)
        _installed = True
    # The first checksum of the process opens our own library, whatever file it is of.
    crc32.level()
    # A reader is imported when the first file of its format is opened: that is no act of the file's.
    for kind in FORMATS:
        _ = kind.open
    acts: list[str] = []
    events: list[tuple[str, tuple]] = []
    _recorder = events
    try:
        yield acts
    finally:
        _recorder = None
        for event, arguments in events:
            if event.startswith(_FORBIDDEN) or (event == "open" and arguments[2] & _WRITES):
                acts.append(f"{event}: {arguments[:1]}")


def snapshot(*places: os.PathLike[str] | str) -> dict[str, tuple]:
    """Everything at and below some paths: kind, inode, times of its content and of its state, bytes."""
    found = {}
    paths = [os.fspath(place) for place in places]
    while paths:
        path = paths.pop()
        status = os.lstat(path)
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24:
            content = Path(path).read_bytes()
        elif stat.S_ISDIR(status.st_mode):
            paths += [os.path.join(path, name) for name in os.listdir(path)]
        times = status.st_mtime_ns, status.st_ctime_ns
        found[path] = (status.st_mode, status.st_ino, status.st_size, *times, content)
    return found
