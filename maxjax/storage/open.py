"""Opening a checkpoint from a path: a file, a directory, an index, or a list of these.

``open_checkpoint`` is the entry point of the package. It decides by name which files make up the
checkpoint, and the format's parser opens them. Readers are never tried one after another; if the
name does not tell the format, the first bytes of the file do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from ..errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointIncompleteError,
    UserInputError,
    some,
)
from ..lazy import without_collector
from ..paths import local_path
from .digests import NAME as DIGESTS
from .digests import Record, attach, warn_without_checksums
from .directory import choose, is_weights, no_weights, unread
from .entry import TensorEntry
from .files import closed_on_error, open_regular, os_error
from .formats import FORMATS, ORBAX, SAFETENSORS, SUFFIXES, UNREADABLE, Format
from .index_file import open_index as open_index
from .limits import Limits, in_force
from .orbax.paths import checkpoint_of, is_orbax
from .save.beside import RETRY_SECONDS, Beside, replaced
from .save.staging import leftovers, tell_leftovers
from .signatures import SNIFF_BYTES, format_of, is_safetensors
from .signatures import sniff as sniff
from .table import TensorTable, Verify, check_verify

_LOG = logging.getLogger("maxjax")
# How many directories and files below a directory without weights are searched for a hint.
_MAX_FOLDERS, _MAX_FILES = 100, 1000

# Seconds to wait before a checkpoint that was replaced during opening is opened again.
_PAUSE = 0.005

PathLike = str | bytes | os.PathLike


def open_checkpoint(
    path: PathLike | Sequence[PathLike],
    *,
    limits: Limits | None = None,
    verify: Verify = "auto",
) -> TensorTable:
    """Opens a checkpoint: reads headers and the index, but no tensor data.

    ``path`` is a file (safetensors, GGUF, PyTorch, npz, npy), an index (``*.index.json``), a
    directory, or a list of any of these. If several items of a list hold a tensor of the same name,
    the last one wins. In a directory, the first of these that exists is read: ``model.safetensors``,
    its index, the only other index, all ``*.safetensors``; the same for ``pytorch_model.bin``; the
    only GGUF file or split set; the only ``.pt``, ``.pth`` or ``.ckpt``; the only ``.npz``. An orbax
    checkpoint is a directory, or a directory with one subdirectory per step (see
    :func:`maxjax.storage.orbax.reader.open_orbax`). ``consolidated*`` files are read only if there is
    nothing else. Training state (``optimizer.pt``), adapters, hidden files and other directories are
    never read.

    ``verify`` says when checksums are compared, both those in the files and those that maxjax writes
    beside them (``maxjax_digests.json``). "auto" compares when a whole tensor is read at once and the
    checksum takes less than a tenth of the time. True compares whenever any part of a tensor is read,
    if necessary by reading the rest, and warns about tensors without a checksum. False never compares.

    If another process replaces the checkpoint during opening, it is opened again, so the result is
    entirely the old or entirely the new checkpoint.

    Raises:
        CheckpointMissingError: the path does not exist, or the directory holds no model weights.
        CheckpointIncompleteError: the directory holds only an unfinished download or save.
        CheckpointFormatError: the format is not supported, or the directory is ambiguous.
        CheckpointChangedError: the checkpoint was replaced again and again during opening.
        UserInputError: the list of paths is empty, or ``verify`` is not "auto", True or False.
        CheckpointError: as for the readers of the formats and ``open_index``.

    Example:
        >>> open_checkpoint("no/such/directory")
        Traceback (most recent call last):
        maxjax.errors.CheckpointMissingError: no/such/directory: no such file. Check the path.
    """
    limits = in_force(limits)
    check_verify(verify)
    paths = [path] if isinstance(path, str | bytes | os.PathLike) else path
    paths = [local_path(one) for one in paths]
    if not paths:
        raise UserInputError("no path was given. Name a file or a directory of weights.")
    table = _open_unchanged(paths, lambda: _open_all(paths, limits, verify))
    if verify is True:
        warn_without_checksums(table)
    return table


def _open_unchanged(paths: list[str], open_once: Callable[[], TensorTable]) -> TensorTable:
    """Opens the checkpoint, again if necessary, until no file was replaced during the opening."""
    end = time.monotonic() + RETRY_SECONDS
    while True:
        before = list(map(_listing, paths))
        try:
            table = open_once()
        except CheckpointError:
            # A missing or mismatched file may belong to a checkpoint that was replaced meanwhile.
            if list(map(_listing, paths)) == before or time.monotonic() > end:
                raise
            time.sleep(_PAUSE)
            continue
        files = [*table.files, *table.indexes]
        # Without an index, only an unchanged listing shows that several files are one set.
        is_one_set = table.root is not None or list(map(_listing, paths)) == before
        # A file that was deleted since is still complete; a replaced one may have been compared with
        # the checksums of its replacement. Most files of orbax are opened only when they are read.
        allowed = (True,) if table.format == "orbax" else (True, None)
        is_replaced = any(file.is_in_place() not in allowed for file in files)
        if not is_replaced and (is_one_set or time.monotonic() > end):
            return table
        table.close()
        if time.monotonic() > end:
            raise replaced(paths[0])


def _listing(path: str) -> object:
    """The names and identities of the files at ``path``; they differ after a replacement."""
    try:
        with os.scandir(path) as entries:
            return os.stat(path).st_mtime_ns, sorted((one.name, one.inode()) for one in entries)
    except (OSError, ValueError):  # ValueError: an invalid file name
        files = path, os.path.join(os.path.dirname(path), DIGESTS)
        return list(map(_identity, files))


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@without_collector()
def _open_all(paths: list[str], limits: Limits, verify: Verify) -> TensorTable:
    if len(paths) == 1:
        directory = paths[0] if os.path.isdir(paths[0]) else os.path.dirname(paths[0])
        table = _open_one(paths[0], limits, verify)
    else:
        directory = os.path.dirname(paths[0])
        table = _merged(paths, limits, verify, last_wins=True)
    table.verify = verify
    records = _with_checksums(table, limits)
    if not os.path.isdir(paths[0]) and _has_digests(directory):
        tell_leftovers(directory or ".")
    if table.directory is not None:  # a step of orbax below the path
        return table
    table.directory = directory or "."
    if len(paths) > 1:
        table.beside = Beside(table.directory)
    elif found := [record.beside for record in records if record.beside is not None]:
        table.beside = Beside(table.directory, table.root or table.files[0], found)
    return table


def _with_checksums(table: TensorTable, limits: Limits) -> list[Record]:
    """Gives the tensors the checksums beside their files; returns the records of these files."""
    folders = {os.path.dirname(file.path) for file in [*table.files, *table.indexes]}
    if not any(map(_has_digests, folders)):
        return []
    with closed_on_error([table]):
        try:
            return attach(table, limits=limits, compare=table.verify is not False)
        except CheckpointError:
            if table.verify is not False:
                raise
            return []


def _has_digests(directory: str) -> bool:
    return os.path.lexists(os.path.join(directory, DIGESTS))


def beside_of(path: str | os.PathLike[str]) -> Beside:
    """The files that describe the weights in a directory or a file (configuration, tokenizer).

    Weights that cannot be read raise no error here; those of a GGUF file are not opened.
    """
    shown = os.fsdecode(path)
    directory = shown if os.path.isdir(shown) else os.path.dirname(shown) or "."
    if not _has_digests(directory):
        return Beside(directory)
    with contextlib.suppress(CheckpointError):
        weights = choose(shown, _listed(shown).files) if os.path.isdir(shown) else [shown]
        ends = (".safetensors", ".safetensors.index.json")
        if weights and all(name.endswith(ends) for name in weights):
            with open_checkpoint(shown, verify=False) as table:
                assert table.beside is not None
                return table.beside
    return Beside(directory)


def _open_one(path: str, limits: Limits, verify: Verify) -> TensorTable:
    if os.path.isdir(path):
        return _open_directory(path, limits, verify)
    return _open_file(path, limits)


def _open_file(path: str, limits: Limits) -> TensorTable:
    if path.endswith(".json"):
        return open_index(path, limits=limits)
    return _format_of(path, limits).open(path, limits=limits)


def _format_of(path: str, limits: Limits) -> Format:
    """The format of a file: by its suffix, or by its first bytes if the suffix is unknown."""
    end = os.path.splitext(path)[1].lower()
    if end in SUFFIXES:
        return SUFFIXES[end]
    if end in UNREADABLE and os.path.exists(path):
        raise CheckpointFormatError(
            f"{UNREADABLE[end]} is not a supported format",
            path=path,
            expected=f"one of {', '.join(SUFFIXES)}",
            found=f"a {end} file",
            hint="Convert it to safetensors.",
        )
    with contextlib.closing(open_regular(path)) as file:
        start = file.pread(0, min(file.size, SNIFF_BYTES))
    if is_safetensors(start, min(file.size, limits.header_bytes + 8)):
        # Checked first: the length of a 640-byte header looks like the start of a pickle.
        return SAFETENSORS
    if len(start) > 8 and start[8:9] != b"{" and sniff(start) is None:
        raise CheckpointFormatError(
            "not a checkpoint",
            path=path,
            expected=f"one of {', '.join(SUFFIXES)}",
            found=f"a file that begins with {start[:16]!r}",
            hint="Check the path.",
        )
    return format_of(start) or SAFETENSORS


def _merged(paths: list[str], limits: Limits, verify: Verify, *, last_wins: bool) -> TensorTable:
    """Merges several checkpoints into one table; duplicate names are refused unless ``last_wins``."""
    files, indexes, metadata, formats = [], [], {}, set()
    entries: dict[str, TensorEntry] = {}
    with closed_on_error(files), closed_on_error(indexes):
        for path in paths:
            table = _open_one(path, limits, verify)
            first = len(files)
            formats.add(table.format)
            files.extend(table.files)
            indexes.extend(table.indexes)
            for name, entry in table.entries.items():
                if name in entries and not last_wins:
                    raise CheckpointFormatError(
                        "two files of the directory hold a tensor of this name",
                        path=path,
                        tensor=name,
                        found=f"also in {files[entries[name].file].path}",
                        hint="Name the file you mean, or list them: the last one wins.",
                    )
                entries[name] = entry._replace(file=first + entry.file)
            metadata.update(table.metadata)
    merged = TensorTable(" and ".join(sorted(formats)), files, entries, metadata)
    merged.indexes = indexes
    return merged


# --- directories ------------------------------------------------------------------------------


def _open_directory(directory: str, limits: Limits, verify: Verify) -> TensorTable:
    names, folders, hidden = _listed(directory)
    for format in FORMATS:
        if format.claims(names):
            return format.open(directory, limits=limits, verify=verify)
    chosen = choose(directory, names)
    if not chosen and is_orbax(directory):  # a root of steps, or one without marks of its own
        return ORBAX.open(directory, limits=limits, verify=verify)
    if not chosen and hidden and (left := leftovers(directory)):
        raise CheckpointIncompleteError(
            "the directory holds only the files of an interrupted save, and no complete checkpoint",
            path=directory,
            found=some(left, 3),
            hint="Save again, or run `maxjax repair`: both remove these files.",
        )
    if hidden:
        tell_leftovers(directory)
    if not chosen:
        listed = sorted([*names, *(f"{folder}/" for folder in folders)])
        raise no_weights(directory, listed, _folders_with_weights(directory, folders))
    if rest := unread(names, chosen):
        _log_unread(directory, some(chosen, 3), some(rest, 3))
    paths = [os.path.join(directory, name) for name in chosen]
    if len(paths) == 1:
        return _open_file(paths[0], limits)
    return _merged(paths, limits, verify, last_wins=False)


@lru_cache(1024)  # once for a directory, not for each time it is opened
def _log_unread(directory: str, chosen: str, rest: str) -> None:
    # GGUF files may hold another model; PyTorch's hold the same one.
    level = logging.WARNING if ".gguf" in rest else logging.INFO
    _LOG.log(level, "%s: reading %s; not %s", directory, chosen, rest)


def orbax_checkpoint(directory: PathLike) -> str | None:
    """The directory of the orbax checkpoint that ``directory`` opens as; None for other formats.

    For a root of steps it is the newest step; for a single tree it is the step that contains it,
    because the files that describe the model lie beside the trees.

    Raises:
        CheckpointIncompleteError: the directory holds no finished checkpoint.
        CheckpointError: the directory cannot be listed, or is ambiguous.

    Example:
        >>> orbax_checkpoint(".") is None
        True
    """
    path = os.fsdecode(directory)
    if not is_orbax(path):
        return None
    names = _listed(path).files
    is_chosen = ORBAX.claims(names) or not choose(path, names)
    return checkpoint_of(path) if is_chosen else None


class _Listing(NamedTuple):
    """The names in a directory, sorted: of files, of subdirectories, and of what is hidden."""

    files: list[str]
    folders: list[str]
    hidden: list[str]


def _listed(directory: str, limit: int | None = None) -> _Listing:
    names = _Listing([], [], [])
    try:
        with os.scandir(directory) as entries:
            for entry in islice(entries, limit):
                # Hidden files are not read: macOS leaves ._model.safetensors on foreign disks.
                kind = 2 if entry.name.startswith(".") else _is_folder(entry)
                names[kind].append(entry.name)
    except OSError as error:
        raise os_error(error, directory, "listing the directory failed") from error
    return _Listing(*map(sorted, names))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # A dangling or circular link is not a directory.
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir(follow_symlinks=False)


def _folders_with_weights(directory: str, folders: list[str]) -> list[str]:
    """The subdirectories that hold weights, up to two levels below ``directory``."""
    found, queue = [], deque(folders)
    for _ in range(_MAX_FOLDERS):
        if not queue:
            break
        folder = queue.popleft()
        try:
            names, below, _ = _listed(os.path.join(directory, folder), _MAX_FILES)
        except CheckpointError:
            continue
        if any(map(is_weights, names)):
            found.append(folder)
        elif os.sep not in folder:  # snapshots/ of the Hugging Face cache has one per revision
            queue.extend(os.path.join(folder, name) for name in below)
    return found
