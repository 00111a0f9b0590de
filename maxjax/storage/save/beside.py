"""What lies beside weights and describes them: which of it was saved with these.

``config.json``, the tokenizer's files and the like cannot be renamed together with the weights, so
a save records their checksums with those of the weights, leaves the new ones in a directory of
their own, renames the weights, and only then puts the others into their places. Whoever reads
takes of each name the file that agrees with the record: nothing is read together that was not
written together.
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
from .staging import FOLDER, WAITING, lock

_T = TypeVar("_T")
_LOG = logging.getLogger("maxjax")
# So long a checkpoint that is replaced meanwhile is opened again and again, in seconds.
SETTLING = 5.0
# What may describe weights; and what of it no program reads.
_SMALL = (".json", ".txt", ".model", ".jinja", ".md")
_READ_BY_PEOPLE = ".md"


@dataclass(frozen=True, slots=True)
class Description:
    """The files that were saved with weights: name → CRC-32 of all of its bytes.

    Attributes:
        gone: Those of the checkpoint before that it does not have, as they were.
    """

    files: dict[str, int]
    gone: dict[str, int] = field(default_factory=dict)


class Beside:
    """The files beside weights, as these were saved with them.

    Args:
        directory: Where they are.
        weights: The file whose renaming makes the checkpoint count, still open; None if not known.
        said: What the records of that file say of them; nothing of what other programs wrote.

    Attributes:
        said: That of these which counts; None if nothing is recorded.

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
        said: Sequence[Description] = (),
    ):
        self.directory = os.fspath(directory)
        self._weights = weights
        self.said = self._chosen(said)

    def __repr__(self) -> str:
        return f"Beside({self.directory!r})"

    @contextlib.contextmanager
    def files(self, *names: str, copied: bool = False) -> Iterator[Path]:
        """A directory in which the files are read by their names, inside the block.

        It is their own, or a temporary one with those that belong to the weights where a save was
        interrupted, or goes on. A file that was changed by itself since is taken as it is, with
        one warning.

        Args:
            names: Only these will be looked at; by default all may be.
            copied: Into a temporary directory in any case: the block may last long.

        Raises:
            CheckpointChangedError: At the end: the checkpoint was replaced since its weights were
                opened, so what was read may be of another.
        """
        with contextlib.ExitStack() as stack:
            folder = Path(self.directory)
            if copied or not self._is_in_order(names):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maxjax-")))
                self._copy_to(folder)
                self._require_in_place()
                yield folder
                return
            try:
                yield folder
            except Exception:
                self._require_in_place()  # or whatever it is may come of that
                raise
            self._require_in_place()

    def _require_in_place(self) -> None:
        # Weights are renamed before what describes them: as long as they are where they were, so
        # is that.
        if self._weights is not None and not self._weights.is_in_place():
            raise replaced(self._weights.path)

    def _is_in_order(self, names: Sequence[str]) -> bool:
        """Whether the files have their places, or nothing better is to be had."""
        if self.said is None:
            return True
        files, gone = self.said.files, self.said.gone
        if any(_is(os.path.join(self.directory, name), crc) for name, crc in gone.items()):
            return False
        for name in names or files:
            place = os.path.join(self.directory, name)
            if name in files and not _is(place, files[name]):
                if self._has(name, files[name]):
                    return False
                self._require_in_place()
                if os.path.exists(place) and not name.endswith(_READ_BY_PEOPLE):
                    _tell(place)
        return True

    def _copy_to(self, folder: Path) -> None:
        """Puts the files there, and what else there is as links."""
        files, gone = ({}, {}) if self.said is None else (self.said.files, self.said.gone)
        small = (entry.name for entry in _seen(self.directory) if entry.name.endswith(_SMALL))
        left_out = set()
        for name in dict.fromkeys([*files, *small]):
            place = os.path.join(self.directory, name)
            if name in gone and _is(place, gone[name]):
                left_out.add(name)
                continue
            fits = (path for path in self._places(name) if name in files and _is(path, files[name]))
            with contextlib.suppress(CheckpointMissingError):
                _copy(next(fits, place), folder / name)
        _link(self.directory, folder, left_out)

    def _chosen(self, said: Sequence[Description]) -> Description | None:
        """Of several, which are of equal weights, the first of which all files are there."""
        for one in said:
            if len(said) == 1 or all(self._has(*pair) for pair in one.files.items()):
                return one
        return said[-1] if said else None

    def _has(self, name: str, crc: int) -> bool:
        return any(_is(path, crc) for path in self._places(name))

    def _places(self, name: str) -> Iterator[str]:
        """Where a file may be; its own place once more, since it may be put there meanwhile."""
        yield os.path.join(self.directory, name)
        for folder in waiting(self.directory):
            yield os.path.join(folder, name)
        yield os.path.join(self.directory, name)

    def finish(self) -> bool:
        """Ends what an interrupted save left: its files get their places, or go if others count.

        Nothing is done while somebody saves there, by another user, or where nothing may be
        written. Gives whether something was done.
        """
        folders = waiting(self.directory) if self.said is not None else []
        if not folders or not all(map(_is_mine, folders)):
            return False
        try:
            fd = os.open(self.directory, FOLDER)
        except OSError:
            return False
        try:
            # Only under a real lock: where there are none, a save may be going on.
            if lock(fd, wait=False, unsupported=None) and self._is_still():
                put_into_place(self.directory, self.said)
                return True
        except OSError as error:
            _LOG.info("%s: an interrupted save could not be ended: %s", self.directory, error)
        finally:
            os.close(fd)
        return False

    def _is_still(self) -> bool:
        return self._weights is not None and bool(self._weights.is_in_place())


def settled(read: Callable[[], _T]) -> _T:
    """What ``read`` gives; once more, again and again, when a checkpoint is replaced meanwhile.

    Raises:
        CheckpointChangedError: That is so for too long.
    """
    end = time.monotonic() + SETTLING
    while True:
        try:
            return read()
        except CheckpointChangedError as error:
            if not error.replaced or time.monotonic() > end:
                raise


def replaced(path: str) -> CheckpointChangedError:
    """The error for a checkpoint in whose place there is another since it was opened."""
    error = CheckpointChangedError(
        "another checkpoint was put into its place since it was opened, or it was deleted",
        path=path,
        hint="Open it again.",
    )
    error.replaced = True
    return error


def sum_of(file: OpenFile) -> int:
    """The CRC-32 of an open file."""
    return crc32_of(file_range(file, 0, file.size))


def waiting(directory: str) -> list[str]:
    """The directories in which files wait to be put into their places."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [os.path.join(directory, name) for name in sorted(names) if name.startswith(WAITING)]


def put_into_place(directory: str, said: Description | None) -> None:
    """Gives the files that wait and belong to a description their places; all others go.

    For whoever keeps writers away. It may be ended at any moment, and be done again.

    Raises:
        OSError: As the system says.
    """
    files, gone = ({}, {}) if said is None else (said.files, said.gone)
    folders, touched = waiting(directory), set()
    for folder in folders:
        for name, crc in files.items():
            path, place = os.path.join(folder, name), os.path.join(directory, name)
            if _is(path, crc) and not _is(place, crc):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                os.rename(path, place)
                touched.add(os.path.dirname(place))
    for name, crc in gone.items():
        if _is(os.path.join(directory, name), crc):
            os.unlink(os.path.join(directory, name))
            touched.add(os.path.dirname(os.path.join(directory, name)))
    for folder in sorted(touched):
        flush_folder(folder)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _is(path: str, crc: int) -> bool:
    with contextlib.suppress(CheckpointError):  # a directory, or what may not be read
        return sum_of(open_regular(path)) == crc
    return False


def _copy(path: str, place: Path) -> None:
    file = open_regular(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "wb") as copy:
        copy.writelines(file_range(file, 0, file.size))


def _link(directory: str, folder: Path, left_out: Collection[str]) -> None:
    """Links what is in a directory but not yet in another: weights and directories may be large."""
    for entry in _seen(directory):
        place = folder / entry.name
        if not os.path.lexists(place) and entry.name not in left_out:
            os.symlink(os.path.abspath(entry.path), place)
        elif place.is_dir() and not place.is_symlink():
            _link(entry.path, place, ())


def _seen(directory: str) -> list[os.DirEntry[str]]:
    """What is in a directory and not hidden."""
    with os.scandir(directory) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_mine(folder: str) -> bool:
    with contextlib.suppress(OSError):
        return os.lstat(folder).st_uid == os.geteuid()
    return False


@lru_cache(1024)  # once for a file, not for each time it is read
def _tell(place: str) -> None:
    _LOG.warning(
        "%s: not the file that these weights were saved with: changed since? It is taken as it is. "
        "To save the model again makes them one checkpoint, and ends this message",
        place,
    )
