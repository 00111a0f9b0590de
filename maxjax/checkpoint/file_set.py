"""Writing checkpoint files as one transaction: safetensors, in one file or several, and GGUF.

The old checkpoint stays valid until the last rename, that of the single file or of the index. The
checksums of every file are recorded beside it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import CheckpointError, CheckpointMissingError, OutOfMemoryError
from ..storage.crc32 import crc32, crc32_of
from ..storage.digests import MAX_RECORDS, Record, matching_records, read_digests, to_bytes
from ..storage.digests import NAME as DIGESTS
from ..storage.files import OpenFile, file_range, open_regular
from ..storage.index_file import open_index
from ..storage.open import beside_of, open_checkpoint
from ..storage.safetensors.writer import SetFile, file_pieces, in_order, index
from ..storage.save.beside import Description, finish, open_sidecar, sum_of, waiting
from ..storage.save.durable import absolute, flush_folder, save_failed, target_path
from ..storage.save.outgoing import Outgoing
from ..storage.save.staging import Staging

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# A file of the first name makes one set with the files that match: they are replaced together.
_FILE_SETS = (
    ("tokenizer.json", re.compile(r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|"
                                  r"chat_template\.(jinja|json)|vocab\.\w+|merges\.txt").fullmatch),
    ("config.json", re.compile(r"modules\.json|sentence_\w+_config\.json|"
                               r"\d+_(Pooling|Normalize|Dense)/.*").fullmatch),
)  # fmt: skip
_PART = re.compile(r"model(-\d+)?-\d{5,}-of-\d{5,}\.safetensors")
_LOG = logging.getLogger("maxjax")
# Called after each piece with its size in bytes.
Progress = Callable[[int], Any]


def write_file(
    path: str | os.PathLike[str],
    tensors: Sequence[Outgoing],
    pieces: Callable[[Sequence[Outgoing]], Iterable[Any]],
    nbytes: int,
) -> None:
    """Write one file of tensors, in place of an older one.

    Args:
        path: path of the file.
        tensors: tensors that the file will hold.
        pieces: function from the tensors to the bytes of the file, in pieces.
        nbytes: size of the file in bytes.

    Raises:
        CheckpointSaveError, CheckpointAccessError: the file cannot be written; an older one is
            intact.
    """
    path = target_path(path)
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    with Staging(folder, exclusive=False) as staging:
        if os.path.exists(target):
            staging.keeps(f"The file that was there before is untouched: {path}.", target)
        staging.require_space(nbytes)
        record = _write(staging, name, tensors, pieces, nbytes)
        staging.hold()
        _commit(staging, _records(folder, [name]), {name: record}, [name])


def write_with(
    directory: str | os.PathLike[str],
    name: str,
    tensors: Iterable[Outgoing],
    others: Mapping[str, bytes],
    metadata: Mapping[str, str],
) -> None:
    """Write one safetensors file of a directory, together with files that describe it.

    Args:
        directory: path of the directory, made if it does not exist.
        name: name of the safetensors file.
        tensors: its tensors.
        others: the other files: name → content.
        metadata: metadata of the safetensors file.

    Raises:
        CheckpointBusyError: another process is writing there.
        CheckpointSaveError, CheckpointAccessError: the files cannot be written; those that were there
            before are intact.
    """
    with Staging(directory) as staging:
        folder = staging.directory
        _end_interrupted(staging)
        found = _records(folder, [name])
        if os.path.exists(kept := os.path.join(folder, name)):
            staging.keeps(f"The files that were there before are untouched: {staging.shown}.", kept)
        shard = SetFile(name, tuple(in_order(tensors)))
        staging.require_space(shard.nbytes)
        pieces = partial(file_pieces, metadata=metadata)
        record = _write(staging, name, shard.tensors, pieces, shard.nbytes)
        description = _stage_others(staging, others, found.get(name, ()))
        _commit(staging, found, {name: replace(record, beside=description)}, [name])


def write_set(
    directory: str | os.PathLike[str],
    files: Callable[[Sequence[str]], Sequence[SetFile]],
    others: Mapping[str, bytes | OpenFile],
    metadata: Mapping[str, str],
    *,
    progress: Progress | None = None,
) -> None:
    """Write tensors as safetensors files of a directory, together with other files.

    Args:
        directory: path of the directory, made if it does not exist.
        files: function from the names in use, those of the checkpoint that is replaced, to the
            safetensors files.
        others: other files of the checkpoint: name → content, or an open file that is copied.
        metadata: metadata of each safetensors file.
        progress: called after each piece with its size in bytes.

    Raises:
        CheckpointBusyError: another process is writing there.
        CheckpointSaveError, CheckpointAccessError: the files cannot be written; a checkpoint that
            was there before is intact.
    """
    with Staging(directory) as staging:
        folder = staging.directory
        _end_interrupted(staging)
        before = _current_weights(folder)
        found = _records(folder, before)
        if before:
            kept = os.path.join(folder, before[0])
            staging.keeps(
                f"The checkpoint that was there before is untouched: {staging.shown}.", kept
            )
        shards = files(before)
        staging.require_space(
            sum(shard.nbytes for shard in shards) + sum(map(_size, others.values()))
        )
        replaced = found.get(before[0], ()) if before else ()
        description = _stage_others(staging, others, replaced)
        pieces = partial(file_pieces, metadata=metadata)
        records = {
            one.name: _write(staging, one.name, one.tensors, pieces, one.nbytes, progress)
            for one in shards
        }
        names = [shard.name for shard in shards]
        text = b"" if names == [SINGLE] else index(shards)
        if text:
            staging.write(INDEX, [text])
            records[INDEX] = Record(len(text), {}, (len(text), crc32(text)))
        last = INDEX if text else SINGLE
        # In the record of each file: until the index is in place, the files are read without it.
        records = {name: replace(one, beside=description) for name, one in records.items()}
        # The index is deleted before its files, so that it never names a missing one.
        deleted = {*before, *_strays(folder, before, found)} - {last, *names}
        deleted = sorted(deleted, key=lambda name: (name != INDEX, name))
        _commit(staging, found, records, [*(n for n in names if n != last), last], deleted)


def _write(
    staging: Staging,
    name: str,
    tensors: Sequence[Outgoing],
    pieces: Callable[[Sequence[Outgoing]], Iterable[Any]],
    nbytes: int,
    progress: Progress | None = None,
) -> Record:
    """Write a file of tensors, which the commit moves into place; the result is its record."""
    sums = Sums(progress)
    staging.write(name, sums.passing(pieces(list(map(sums.of, tensors)))), nbytes=nbytes)
    return sums.record


def _commit(
    staging: Staging,
    found: Mapping[str, list[Record]],
    records: Mapping[str, Record],
    names: Sequence[str],
    deleted: Sequence[str] = (),
) -> None:
    """Rename the files into place; the last of ``names``, renamed alone, is the commit.

    The other files of the checkpoint (config, tokenizer) follow, then the final checksums. While a
    file replaces another one, the checksums of both are recorded: whenever this is interrupted,
    each file agrees with a record, and the other files that this record names are in place or
    staged.
    """
    folder, last = staging.directory, names[-1]
    description = records[last].beside
    old = {name: [*found.get(name, ()), *_minimal_record(folder, name, new, found)]
           for name, new in records.items()}  # fmt: skip
    standing = SINGLE if SINGLE in deleted else last
    if description is not None:
        known = _existing_description(folder, description)
        old[standing] = [
            replace(one, beside=one.beside or known)
            for one in old.get(standing) or found.get(standing, ())
        ]
    new = {n: [*old.get(n, ()), one][-MAX_RECORDS:] for n, one in records.items()}
    both = {**found, **old, **new}
    staging.write(DIGESTS, [to_bytes({name: of for name, of in both.items() if of})])
    waits = (
        [staging.waiting] if os.path.isdir(os.path.join(staging.folder, staging.waiting)) else []
    )
    # Readers prefer a model.safetensors to a set of files with an index.
    retire = [SINGLE] if SINGLE in deleted else []
    try:
        first = [name for name in names if name != last]
        staging.commit([DIGESTS, *waits], first, [last], retire=retire, remove=deleted)
        # A file that could not be deleted keeps its record, which says that maxjax wrote it.
        deleted = [name for name in deleted if not os.path.lexists(os.path.join(folder, name))]
        rest = {name: of for name, of in found.items() if name not in deleted}
        final = {**rest, **{name: [_final_record(one)] for name, one in records.items()}}
        _finish(staging, description, final if final != both else None)
    except BaseException:
        _end_interrupted(staging)
        raise


def _finish(
    staging: Staging, description: Description | None, final: Mapping[str, Sequence[Record]] | None
) -> None:
    """The steps after the commit; as the new weights are valid already, their errors only warn."""
    try:
        with staging.saving("putting the other files into place"):
            if description is not None:
                try:
                    finish(staging.fd, description)
                except OSError:  # which may be temporary
                    finish(staging.fd, description)
        if final is not None:
            staging.write(DIGESTS, [to_bytes(final)])
            staging.commit([DIGESTS])
    except CheckpointError as error:
        _LOG.warning(
            "%s: %s. The new checkpoint is complete for maxjax; other programs may see the config and "
            "tokenizer files of the old one until the next save or `maxjax repair %s`",
            staging.shown,
            error.problem,  # without the hint, which is about what was there before the commit
            shlex.quote(staging.shown),
        )


def _final_record(record: Record) -> Record:
    """The record without what matters only until the old files are deleted."""
    description = record.beside
    return record if description is None else replace(record, beside=Description(description.files))


def _existing_description(folder: str, description: Description) -> Description:
    """The other files of the checkpoint that is replaced, if its own record does not name them."""
    files = {}
    for name in {**description.files, **description.gone}:
        with contextlib.suppress(CheckpointError):  # there is no such file
            files[name] = sum_of(open_sidecar(os.path.join(folder, name)))
    return Description(files)


def _records(folder: str, replaced: Iterable[str]) -> dict[str, list[Record]]:
    """The directory's recorded checksums; empty if the record cannot be read: it is replaced."""
    try:
        digests = read_digests(folder)
    except CheckpointError:
        return {}
    found = {} if digests is None else {name: list(of) for name, of in digests.files.items()}
    for name in replaced:
        if len(found.get(name, ())) > 1:  # left by a save that was interrupted
            found[name] = _matching_records(os.path.join(folder, name), found[name])
    return found


def _matching_records(path: str, records: list[Record]) -> list[Record]:
    """The records that a file agrees with; all of them, if it agrees with none."""
    try:
        file = open_regular(path)
        found = [one for one in records if _matches(file, one)]
        if not path.endswith(".json"):
            with open_checkpoint(path, verify=False) as table:
                found = matching_records(table.files[0], table.entries.values(), 0, found)
    except CheckpointError:
        return records
    return found or records


def _matches(file: OpenFile, record: Record) -> bool:
    """Whether a file has the size and the header checksum of a record."""
    nbytes, crc = record.header or (0, 0)
    return record.size == file.size and crc32_of(file_range(file, 0, nbytes)) == crc


def _minimal_record(
    folder: str, name: str, new: Record, found: Mapping[str, list[Record]]
) -> list[Record]:
    """A minimal record of a file that is replaced and has none: it tells the old from the new.

    Without it the old file would be compared with the checksums of the new one as soon as these
    are written.
    """
    path = os.path.join(folder, name)
    try:
        file = open_regular(path)
        if any(_matches(file, one) for one in found.get(name, ())):
            return []
        if file.size != new.size:
            return [Record(file.size, {})]
        nbytes, crc = new.header or (0, 0)
        header = nbytes, crc32_of(file_range(file, 0, nbytes))
        if header[1] != crc:
            return [Record(file.size, {}, header)]
        with open_checkpoint(path, verify=False) as table:
            for entry in sorted(table.entries.values(), key=lambda entry: entry.nbytes):
                end = entry.offset + entry.nbytes
                crc = crc32_of(file_range(table.files[0], entry.offset, end))
                if crc != new.tensors.get(entry.name):
                    return [Record(file.size, {entry.name: crc}, header)]
    except CheckpointError:
        pass  # there is no such file, or it is not a checkpoint
    return []


def _end_interrupted(staging: Staging) -> list[str]:
    """Move the files that interrupted saves left waiting into place, if their weights are there."""
    if not waiting(staging.fd):
        return []
    folder, files, gone = staging.directory, {}, {}
    # An adapter may lie beside a model, with files of its own.
    own = (SINGLE, INDEX)
    alone = [n for n in _records(folder, ()) if n not in own and not _PART.fullmatch(n)]
    for path in (folder, *(os.path.join(folder, name) for name in alone)):
        description = beside_of(path).described
        if description is not None:
            files |= description.files
            gone |= description.gone
    gone = {name: crc for name, crc in gone.items() if name not in files}
    with contextlib.suppress(OSError):
        return finish(staging.fd, Description(files, gone))
    return []


def repair(directory: str | os.PathLike[str]) -> list[str]:
    """Finishes what an interrupted save began in a directory, and removes what it left.

    The next save into the directory does the same. A checkpoint, its steps and all files of other
    programs stay as they are; nothing outside of the directory is touched, and no link is followed.

    Args:
        directory: path of a directory that maxjax saved to, or of the directory of a checkpoint's steps.

    Returns:
        The names in the directory that were put into place or removed; empty if there was nothing to do.

    Raises:
        CheckpointMissingError: there is no such directory.
        CheckpointBusyError: another process is writing there.
        CheckpointSaveError, CheckpointAccessError: the directory cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> os.mkdir(os.path.join(folder, ".maxjax-next-0123456789abcdef"))
        >>> repair(folder)
        ['.maxjax-next-0123456789abcdef']
    """
    path = absolute(directory)
    if not os.path.isdir(path):
        raise CheckpointMissingError("there is no such directory", path=path)
    with Staging(path) as staging:
        folder = staging.directory
        done = [*staging.swept, *_end_interrupted(staging)]
        found = _records(folder, _records(folder, ()))
        strays = _strays(folder, _current_weights(folder), found)
        final = {name: list(map(_final_record, records)) for name, records in found.items()
                 if name not in strays and os.path.lexists(os.path.join(folder, name))}  # fmt: skip
        if strays or final != _records(folder, ()):
            staging.write(DIGESTS, [to_bytes(final)])
            staging.commit([DIGESTS], remove=strays)
        return [*done, *strays]


def _current_weights(folder: str) -> list[str]:
    """The names of the files that make up the safetensors checkpoint of a directory."""
    names = [name for name in (SINGLE, INDEX) if os.path.lexists(os.path.join(folder, name))]
    if INDEX in names:
        try:
            with open_index(os.path.join(folder, INDEX)) as table:
                names += [os.path.relpath(file.path, folder) for file in table.files]
        except (CheckpointError, MemoryError):
            pass  # a damaged set: its index is replaced, its files are kept
    return [name for name in names if os.path.dirname(name) == ""]


def _strays(folder: str, before: Sequence[str], recorded: Mapping[str, list[Record]]) -> list[str]:
    """Recorded shards that no index names: left by a save that was interrupted before its index."""
    if INDEX in before and SINGLE not in before and not any(map(_PART.fullmatch, before)):
        return []  # the index cannot be read, and may name them
    found = []
    for name, records in recorded.items():
        if _PART.fullmatch(name) and name not in before:
            with contextlib.suppress(OSError):
                size = os.lstat(os.path.join(folder, name)).st_size
                found += [name] if size in [record.size for record in records] else []
    return found


def _stage_others(
    staging: Staging, others: Mapping[str, bytes | OpenFile], before: Sequence[Record]
) -> Description | None:
    """Stage the other files until the weights are committed; unchanged files are not written.

    Args:
        staging: transaction of the save.
        others: other files: name → content, or an open file that is copied.
        before: records of the weights of the checkpoint that is replaced.

    Returns:
        The description of these files for the record of the weights; None if there are none.
    """
    files: dict[str, int] = {}
    for name, given in others.items():
        if os.path.islink(below := os.path.dirname(os.path.join(staging.directory, name))):
            raise save_failed("the directory is a link, and nothing is written through it", below)
        content = content_of(given)
        files[name] = crc32(content)
        if not _has(os.path.join(staging.directory, name), content):
            staging.write(f"{staging.waiting}/{name}", [content], like=name)
    with staging.saving("flushing the files"):
        for folder, _, _ in os.walk(os.path.join(staging.folder, staging.waiting), topdown=False):
            flush_folder(folder)
    # The files of a tokenizer belong together: old ones must not be read with the new ones.
    deleted = {
        name: crc
        for record in before
        if record.beside is not None
        for name, crc in record.beside.files.items()
        if name not in files and any(head in files and part(name) for head, part in _FILE_SETS)
    }
    return Description(files, deleted) if files else None


def _size(given: bytes | OpenFile) -> int:
    return given.size if isinstance(given, OpenFile) else len(given)


def content_of(given: bytes | OpenFile) -> bytes:
    """The bytes of a file that is written: given as such, or those of an open file."""
    return given.pread(0, given.size) if isinstance(given, OpenFile) else given


def _has(path: str, content: bytes) -> bool:
    try:
        file = open_regular(path)  # a FIFO of this name would never open
        return file.size == len(content) and file.pread(0, file.size) == content
    except CheckpointError:
        return False


class Sums:
    """The checksums of a file's tensors, computed in another thread while they are written.

    Attributes:
        size: number of bytes of the file so far.
    """

    def __init__(self, progress: Progress | None = None):
        self.size = 0
        self._tensors: dict[str, int] = {}
        self._header: tuple[int, int] | None = None
        self._progress = progress
        self._pool = ThreadPoolExecutor(1, "maxjax-crc")

    def of(self, one: Outgoing) -> Outgoing:
        """The tensor; its checksum is updated as its pieces are written."""

        def pieces() -> Iterator[memoryview]:
            crc, rest = 0, iter(one.pieces())
            while True:
                with in_memory(one.name, one.nbytes):
                    piece = next(rest, None)
                if piece is None:
                    break
                found = self._pool.submit(crc32, piece, crc)
                yield piece
                crc = found.result()  # before the next piece, so that only one is in memory
            self._tensors[one.name] = crc

        return replace(one, pieces=pieces)

    def passing(self, pieces: Iterable[Any]) -> Iterator[Any]:
        """The pieces of the file, counted; the first piece is the header before the tensors."""
        try:
            for piece in pieces:
                if self._header is None:
                    self._header = len(piece), crc32(piece)
                self.size += len(piece)
                yield piece
                if self._progress is not None:
                    self._progress(len(piece))
        finally:
            self._pool.shutdown(wait=False)

    @property
    def record(self) -> Record:
        """The record of the file, once it is written."""
        return Record(self.size, dict(self._tensors), self._header)


@contextlib.contextmanager
def in_memory(name: str, nbytes: int) -> Iterator[None]:
    """Context of the conversion of a tensor that is written; a MemoryError in it names the tensor."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(
            f"tensor '{name}': the host does not have enough memory to write its {nbytes:,} bytes. The "
            "destination is unchanged. Free memory, or convert on a machine with more."
        ) from error


def json_bytes(document: Any) -> bytes:
    """A document as the bytes of a JSON file, formatted as transformers does it."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
