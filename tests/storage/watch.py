"""What the process does to the outside while a file is being opened, as an audit hook sees it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
