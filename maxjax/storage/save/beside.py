"""The files beside weights that describe them (configuration, tokenizer), matched to their weights.

These files cannot be renamed in one step with the weights. Therefore a save records their checksums
with those of the weights, writes the new files to a waiting directory, renames the weights, and only
then moves the waiting files into place. A reader takes for each name the file that matches the
record, so files from different saves are never mixed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from ...errors import CheckpointChangedError, CheckpointError, CheckpointMissingError
from ..crc32 import crc32_of
from ..files import OpenFile, file_range, open_regular
from .durable import flush_folder
from .locks import FOLDER, lock

# The first part of a waiting directory's name.
WAITING = ".maxjax-next-"
_T = TypeVar("_T")
_LOG = logging.getLogger("maxjax")
# Seconds for which opening is repeated while the checkpoint is being replaced.
RETRY_SECONDS = 5.0
# Suffixes of files that may describe weights (code is not among them), and of those that only people read.
DESCRIBING = (".json", ".txt", ".model", ".jinja", ".md")
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
    def files(self, *names: str, copied: bool = False) -> Iterator[Path]:
        """Context that yields a directory in which the files can be read by their names.

        It is the files' own directory, or, during a save or after an interrupted one, a temporary
        directory with the files that belong to the weights. A file that was edited after the save
        is used as it is, with one warning.

        Args:
            names: the only files that will be read; by default any may be.
            copied: whether to copy into a temporary directory in any case, for a long block.

        Raises:
            CheckpointChangedError: the checkpoint was replaced since its weights were opened, so
                the files that were read may belong to another. Raised at the end of the block.
        """
        if copied or not self._is_consistent(names):
            with tempfile.TemporaryDirectory(prefix="maxjax-") as temporary:
                folder = Path(temporary)
                self._copy_to(folder)
                self._require_in_place()
                yield folder
            return
        try:
            yield Path(self.directory)
        except Exception:
            self._require_in_place()  # a replacement may be the cause of the error
            raise
        self._require_in_place()

    def _require_in_place(self) -> None:
        # A save renames the weights before the files that describe them. So if the weights are
        # still in place, these files are too.
        if self._weights is not None and not self._weights.is_in_place():
            raise replaced(self._weights.path)

    def _is_consistent(self, names: Sequence[str]) -> bool:
        """Whether the files in place match the record, or no better ones exist."""
        if self.described is None:
            return True
        files, gone = self.described.files, self.described.gone
        folder = self.directory
        if any(_has_checksum(os.path.join(folder, name), crc) for name, crc in gone.items()):
            return False
        for name in names or files:
            path = os.path.join(folder, name)
            if name in files and not _has_checksum(path, files[name]):
                if self._find(name, files[name]):
                    return False
                self._require_in_place()
                if os.path.exists(path) and not name.endswith(_UNCHECKED):
                    _warn_changed(path)
        return True

    def _copy_to(self, folder: Path) -> None:
        """Copies the files into ``folder``, and links everything else of the directory."""
        described = self.described or Description({})
        files, gone = described.files, described.gone
        visible = (entry.name for entry in _visible_entries(self.directory))
        sidecars = (name for name in visible if name.endswith(DESCRIBING))
        left_out = set()
        for name in dict.fromkeys([*files, *sidecars]):
            path = os.path.join(self.directory, name)
            if name in gone and _has_checksum(path, gone[name]):
                left_out.add(name)
                continue
            with contextlib.suppress(CheckpointMissingError):
                _copy(name in files and self._find(name, files[name]) or path, folder / name)
        _link(self.directory, folder, left_out)

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
            yield os.path.join(folder, name)
        yield os.path.join(self.directory, name)

    def finish(self) -> bool:
        """Completes an interrupted save: moves its waiting files into place, or deletes obsolete ones.

        It does nothing during another save, if the files belong to another user, or if the directory
        is not writable. Returns whether it did anything.
        """
        folders = waiting(self.directory) if self.described is not None else []
        if not folders or not all(map(_is_mine, folders)):
            return False
        try:
            fd = os.open(self.directory, FOLDER)
        except OSError:
            return False
        try:
            # Only under a real lock: without lock support, a save may be in progress.
            locked = lock(fd, wait=False, unsupported=None)
            if locked and self._weights is not None and self._weights.is_in_place():
                move_into_place(self.directory, self.described)
                return True
        except OSError as error:
            _LOG.info("%s: an interrupted save could not be completed: %s", self.directory, error)
        finally:
            os.close(fd)
        return False


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


def waiting(directory: str) -> list[str]:
    """The directories whose files wait to be moved into place."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [os.path.join(directory, name) for name in sorted(names) if name.startswith(WAITING)]


def move_into_place(directory: str, described: Description | None) -> None:
    """Moves the waiting files that belong to a description into place; deletes all others.

    The caller must hold the directory's lock. An interrupted call can be repeated.

    Raises:
        OSError: the operating system reports an error.
    """
    files, gone = ({}, {}) if described is None else (described.files, described.gone)
    folders, touched = waiting(directory), set()
    for folder in folders:
        for name, crc in files.items():
            path, place = os.path.join(folder, name), os.path.join(directory, name)
            if _has_checksum(path, crc) and not _has_checksum(place, crc):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.rename(path, place)
                touched.add(os.path.dirname(place))
    for name, crc in gone.items():
        place = os.path.join(directory, name)
        if _has_checksum(place, crc):
            os.unlink(place)
            touched.add(os.path.dirname(place))
    for folder in sorted(touched):
        flush_folder(folder)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _has_checksum(path: str, crc: int) -> bool:
    with contextlib.suppress(CheckpointError):  # a directory, or not readable
        return sum_of(open_regular(path)) == crc
    return False


def _copy(path: str, place: Path) -> None:
    file = open_regular(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "wb") as copy:
        copy.writelines(file_range(file, 0, file.size))


def _link(directory: str, folder: Path, left_out: Collection[str]) -> None:
    """Links everything in ``directory`` that ``folder`` lacks; copies could be large."""
    for entry in _visible_entries(directory):
        place = folder / entry.name
        if not os.path.lexists(place) and entry.name not in left_out:
            os.symlink(os.path.abspath(entry.path), place)
        elif place.is_dir() and not place.is_symlink():
            _link(entry.path, place, ())


def _visible_entries(directory: str) -> list[os.DirEntry[str]]:
    """The entries of a directory that are not hidden."""
    with os.scandir(directory) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_mine(folder: str) -> bool:
    with contextlib.suppress(OSError):
        return os.lstat(folder).st_uid == os.geteuid()
    return False


@lru_cache(1024)  # once per file, not per read
def _warn_changed(place: str) -> None:
    _LOG.warning(
        "%s: the file differs from the one that was saved with these weights, and is used as it is. "
        "Save the model again to record the change",
        place,
    )
