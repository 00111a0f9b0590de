"""The files beside weights that describe them (configuration, tokenizer), matched to their weights.

These files cannot be renamed in one step with the weights. Therefore a save records their checksums
with those of the weights, writes the new files to a waiting directory, renames the weights, and only
then moves the waiting files into place. A reader takes for each name the file that matches the
record, where it lies, so files from different saves are never mixed. Reading changes nothing: an
interrupted save is finished by the next save, or by ``maxjax.checkpoint.repair``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from ...errors import CheckpointChangedError, CheckpointError, CheckpointUnsafeError
from ..crc32 import crc32_of
from ..files import OpenFile, file_range, open_regular
from ..limits import in_force
from ..sidecars import is_sidecar_folder, sidecar_kind
from .durable import flush_open
from .locks import FOLDER

# The first part of a waiting directory's name.
WAITING = ".maxjax-next-"
# In place of it for files that count as missing.
_NOWHERE = f"{WAITING}none"
# A save leaves at most one waiting directory, and the next save finishes it.
_MOST_WAITING = 8
_T = TypeVar("_T")
_LOG = logging.getLogger("maxjax")
# Seconds for which opening is repeated while the checkpoint is being replaced.
RETRY_SECONDS = 5.0
# Files that only people read, and may edit.
_UNCHECKED = ".md"


@dataclass(frozen=True, slots=True)
class Description:
    """The files that were saved with weights.

    Attributes:
        files: name → CRC-32 of the whole file.
        gone: the same for files of the previous checkpoint that this one does not have.
    """

    files: dict[str, int]
    gone: dict[str, int] = field(default_factory=dict)


class Beside:
    """The files beside weights, as they were saved with these weights.

    Args:
        directory: directory of the files.
        weights: open file whose rename commits the checkpoint; None if not known.
        described: descriptions from the records of that file; empty if another program wrote it.

    Attributes:
        described: the description that applies; None if nothing is recorded.

    Example:
        >>> import tempfile
        >>> with Beside(tempfile.mkdtemp()).files() as folder:
        ...     (folder / "config.json").exists()
        False
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        weights: OpenFile | None = None,
        described: Sequence[Description] = (),
    ):
        self.directory = os.fspath(directory)
        self._weights = weights
        self.described = self._matching(described)

    def __repr__(self) -> str:
        return f"Beside({self.directory!r})"

    @contextlib.contextmanager
    def files(self, *, copied: bool = False) -> Iterator[Files]:
        """Context that yields the files that were saved with the weights, each where it lies.

        Args:
            copied: whether their bytes will be copied, so that links out of the directory are refused.

        Raises:
            CheckpointChangedError: the checkpoint was replaced since its weights were opened, so
                the files that were read may belong to another. Raised at the end of the block.
        """
        files = Files(self, copied)
        try:
            yield files
        except Exception:
            files.check()  # a replacement may be the cause of the error
            raise
        files.check()

    def _require_in_place(self) -> None:
        # A save renames the weights before the files that describe them. So if the weights are
        # still in place, these files are too.
        if self._weights is not None and not self._weights.is_in_place():
            raise replaced(self._weights.path)

    def path(self, name: str) -> str:
        """The path of the valid copy of a file: the one that was saved with the weights.

        After an interrupted save it may lie in a waiting directory, and a file of the checkpoint before
        counts as missing. A file that was edited after the save is used as it is, with one warning.
        """
        place = os.path.join(self.directory, name)
        described = self.described or Description({})
        if name in described.gone and _has_checksum(place, described.gone[name]):
            return os.path.join(self.directory, _NOWHERE, name)
        crc = described.files.get(name)
        if crc is None or _has_checksum(place, crc):
            return place
        if found := self._find(name, crc):
            return found
        self._require_in_place()
        if os.path.exists(place) and not name.endswith(_UNCHECKED):
            _warn_changed(place)
        return place

    def _matching(self, described: Sequence[Description]) -> Description | None:
        """The first description all of whose files exist; there are several if their weights are equal."""
        for one in described:
            if len(described) == 1 or all(self._find(*pair) for pair in one.files.items()):
                return one
        return described[-1] if described else None

    def _find(self, name: str, crc: int) -> str | None:
        """The path of the file that has this checksum, in place or waiting to be moved there."""
        return next((path for path in self._candidates(name) if _has_checksum(path, crc)), None)

    def _candidates(self, name: str) -> Iterator[str]:
        """The paths where a file may be; its final one twice, as it may be moved there meanwhile."""
        yield os.path.join(self.directory, name)
        for folder in waiting(self.directory):
            yield os.path.join(self.directory, folder, name)
        yield os.path.join(self.directory, name)


class Files(os.PathLike[str]):
    """The files of a checkpoint's directory, read with ``files / name`` where their valid copies lie.

    Made by :meth:`Beside.files`. It can stand for the directory's path wherever files of it are read.
    """

    def __init__(self, beside: Beside, copied: bool = False):
        self._beside = beside
        self._copied = copied
        self._used: dict[str, str] = {}

    def __fspath__(self) -> str:
        return self._beside.directory

    __str__ = __fspath__

    def __truediv__(self, name: str) -> Path:
        """The path of a file's valid copy.

        Raises:
            CheckpointUnsafeError: the file is to be copied, and is a link out of the directory.
        """
        path = self._path(name)
        if self._copied:
            require_inside(self._beside.directory, path)
        return Path(path)

    def names(self) -> list[str]:
        """The names of all files that belong to the checkpoint, by :func:`sidecar_kind`, sorted."""
        directory, described = self._beside.directory, self._beside.described or Description({})
        found = set(described.files)
        for name in _listed(directory):
            below = os.path.join(directory, name)
            found |= {f"{name}/{n}" for n in _listed(below)} if is_sidecar_folder(name) else {name}
        return sorted(n for n in found if sidecar_kind(n) and os.path.lexists(self._path(n)))

    def _path(self, name: str) -> str:
        if name not in self._used:
            self._used[name] = self._beside.path(name)
        return self._used[name]

    def check(self) -> None:
        """Checks that the files belong together to the end.

        Raises:
            CheckpointChangedError: the checkpoint was replaced, or a waiting file was moved into place.
        """
        self._beside._require_in_place()
        for name, path in self._used.items():
            others = [os.path.join(self._beside.directory, where, name) for where in ("", _NOWHERE)]
            if path not in others and not os.path.exists(path):
                raise replaced(path)


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # an unrelated file, or one that may not be read
        return []


def files_of(directory: str | os.PathLike[str]) -> Files:
    """The files of a directory; of :class:`Files` itself, these."""
    return directory if isinstance(directory, Files) else Files(Beside(directory))


def require_inside(directory: str, path: str) -> None:
    """Refuses to copy a file that is a link out of its directory, such as one to a private file.

    Allowed are the links of a Hugging Face cache, ``snapshots/REVISION/NAME`` to ``blobs/HASH``.

    Raises:
        CheckpointUnsafeError: the path leads to another place.
    """
    folder, found = os.path.realpath(directory), os.path.realpath(path)
    inside = os.path.join(folder, os.path.relpath(path, directory))
    cache = folder.rpartition(f"{os.sep}snapshots{os.sep}")[0]
    is_cached = cache and os.path.dirname(found) == os.path.join(cache, "blobs")
    if found != inside and not is_cached:
        raise CheckpointUnsafeError(
            "the file is a link, and its content would be copied",
            path=path,
            expected="a file in the directory",
            found=f"a link to {found}",
            hint="Replace the link by the file itself.",
        )


def settled(read: Callable[[], _T]) -> _T:
    """The result of ``read``, which is called again if a checkpoint is replaced while it runs.

    Raises:
        CheckpointChangedError: the checkpoint was replaced again and again, for too long.
    """
    end = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return read()
        except CheckpointChangedError as error:
            if not error.replaced or time.monotonic() > end:
                raise


def replaced(path: str) -> CheckpointChangedError:
    """The error for a checkpoint that was replaced since it was opened."""
    error = CheckpointChangedError(
        "the checkpoint was replaced after it was opened, or it was deleted",
        path=path,
        hint="Open it again.",
    )
    error.replaced = True
    return error


def sum_of(file: OpenFile) -> int:
    """The CRC-32 of an open file."""
    return crc32_of(file_range(file, 0, file.size))


def open_sidecar(path: str | os.PathLike[str], folder: int | None = None) -> OpenFile:
    """Opens a file beside weights; in the open directory ``folder`` it may not be a link.

    Raises:
        CheckpointError: it cannot be read, or is too large.
    """
    file, limits = open_regular(path, dir_fd=folder, follow=folder is None), in_force(None)
    if file.size > limits.json_bytes:
        raise limits.error("the file is too long", "json_bytes", file.size, path=path)
    return file


def waiting(directory: str | int) -> list[str]:
    """The names of the directories whose files wait to be moved into place; links are none."""
    try:
        with os.scandir(directory) as entries:
            found = [one for one in entries if one.name.startswith(WAITING)]
            names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(names)[:_MOST_WAITING]


def finish(folder: int, described: Description) -> list[str]:
    """Moves the waiting files that belong to a description into place; deletes all others.

    Nothing is followed out of the directory: every step is taken from an open directory, by a name
    without a separator, and links are refused. An interrupted call can be repeated.

    Args:
        folder: the open directory, whose lock the caller holds.
        described: the description of the weights.

    Returns:
        The names of the files that were moved or deleted, and of the waiting directories.

    Raises:
        OSError: the operating system reports an error.
    """
    waits, done = waiting(folder), []
    for wait in waits:
        with _opened(wait, folder) as source:
            for name, crc in described.files.items():
                if _move(name, crc, source, folder):
                    done.append(name)
    for name, crc in described.gone.items():
        with contextlib.suppress(FileNotFoundError), _parent(name, folder) as (parent, leaf):
            if _has_checksum(leaf, crc, parent):
                os.unlink(leaf, dir_fd=parent)
                flush_open(parent)
                done.append(name)
    for wait in waits:
        shutil.rmtree(wait, ignore_errors=True, dir_fd=folder)
    return [*done, *waits]


def _move(name: str, crc: int, source: int, folder: int) -> bool:
    """Moves a file from one open directory to another, if it has a checksum that the other's has not."""
    try:
        with _parent(name, source) as (start, leaf):
            if not _has_checksum(leaf, crc, start):
                return False
            with _parent(name, folder, make=True) as (end, _):
                if _has_checksum(leaf, crc, end):
                    return False
                os.rename(leaf, leaf, src_dir_fd=start, dst_dir_fd=end)
                flush_open(end)
                return True
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _parent(name: str, folder: int, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Context that yields the open directory of a file, and its name there; ``make`` makes it if missing."""
    below, _, leaf = name.rpartition("/")
    if not below:
        yield folder, leaf
        return
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(below, dir_fd=folder)
            flush_open(folder)
    with _opened(below, folder) as parent:
        yield parent, leaf


@contextlib.contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    fd = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _has_checksum(name: str, crc: int, folder: int | None = None) -> bool:
    """Whether a file has a CRC-32; in an open directory it may not be a link."""
    with contextlib.suppress(CheckpointError):  # a directory, or not readable
        return sum_of(open_sidecar(name, folder)) == crc
    return False


@lru_cache(1024)  # once per file, not per read
def _warn_changed(place: str) -> None:
    _LOG.warning(
        "%s: the file differs from the one that was saved with these weights, and is used as it is. "
        "Save the model again to record the change",
        place,
    )
