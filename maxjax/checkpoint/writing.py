"""Floor 6. Files of tensors put into a directory: safetensors, in one file or several, and GGUF.

What was there counts until the last rename: of the one file, or of the index. With every file
goes a record of its checksums. Below: ``storage/staging.py``, ``safetensors_writer.py``. Above:
pretrained, convert.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..errors import CheckpointError
from ..storage.crc32 import crc32, crc32_of
from ..storage.digests import NAME as DIGESTS
from ..storage.digests import Record, read_digests, to_bytes
from ..storage.index import open_checkpoint
from ..storage.outgoing import Outgoing, file_range
from ..storage.safetensors_writer import Shard, file_pieces, index
from ..storage.shards import open_index
from ..storage.staging import Staging

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PART = re.compile(r"model(-\d+)?-\d{5,}-of-\d{5,}\.safetensors")
_LOG = logging.getLogger("maxjax")
# Told after each piece: how many bytes it has.
Progress = Callable[[int], Any]


def write_file(
    path: str | os.PathLike[str],
    tensors: Sequence[Outgoing],
    pieces: Callable[[Sequence[Outgoing]], Iterable[Any]],
    nbytes: int,
) -> None:
    """Replaces one file.

    Args:
        tensors: What it holds.
        pieces: Makes the bytes of the file of them.
        nbytes: How many these are.

    Raises:
        CheckpointSaveError, CheckpointAccessError: It cannot be written; what was there is.
    """
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    with Staging(folder, exclusive=False) as staging:
        if os.path.exists(target):
            staging.keeps(f"The file that was there before is untouched: {os.fspath(path)}.")
        staging.require_space(nbytes)
        sums = Sums()
        staging.write(name, sums.passing(pieces(list(map(sums.of, tensors)))), nbytes=nbytes)
        staging.hold()
        _commit(staging, {name: sums.record}, [name])


def write_set(
    directory: str | os.PathLike[str],
    files: Callable[[Sequence[str]], Sequence[Shard]],
    others: Mapping[str, Iterable[Any]],
    metadata: Mapping[str, str],
    *,
    progress: Progress | None = None,
) -> None:
    """Makes a directory hold these tensors as safetensors files, and these other files.

    Args:
        files: The files, given the names that may not be used: those of the set that is there.
        others: What else belongs to it: name → its bytes in pieces.
        metadata: Of each safetensors file.

    Raises:
        CheckpointBusyError: Another process is writing there.
        CheckpointSaveError, CheckpointAccessError: It cannot be written; what was there is.
    """
    with Staging(directory) as staging:
        folder = staging.directory
        before = _weights_there(folder)
        if before:
            staging.keeps(f"The checkpoint that was there before is untouched: {staging.shown}.")
        shards = files(before)
        staging.require_space(sum(shard.nbytes for shard in shards))
        records = {}
        for shard in shards:
            sums = Sums(progress)
            pieces = file_pieces(list(map(sums.of, shard.tensors)), metadata)
            staging.write(shard.name, sums.passing(pieces), nbytes=shard.nbytes)
            records[shard.name] = sums.record
        changed = [name for name, pieces in others.items() if _stage_other(staging, name, pieces)]
        names = [shard.name for shard in shards]
        if names == [SINGLE]:
            commit, kept = SINGLE, {SINGLE}
        else:
            staging.write(INDEX, [index(shards)])
            commit, kept = INDEX, {INDEX, *names}
        # The index before its files, so that it never names one that is not there.
        gone = {*before, *_strays(folder, before)} - kept
        gone = sorted(gone, key=lambda name: (name != INDEX, name))
        _commit(staging, records, [*names, *changed], commit, gone)


def _commit(
    staging: Staging,
    records: Mapping[str, Record],
    names: Sequence[str],
    last: str | None = None,
    gone: Sequence[str] = (),
) -> None:
    """Puts the files in their places, ``last`` alone at the end, then the records of checksums.

    While a file takes the place of another, the records of both are there: a kill between the
    two renames leaves a file that agrees with one of them.
    """
    found = _records(staging.directory, records)
    both = {**found, **{n: [*found.get(n, ()), record] for n, record in records.items()}}
    staging.write(DIGESTS, [to_bytes(both)])
    last = names[-1] if last is None else last
    # A model.safetensors would be read in the place of a set.
    retire = [SINGLE] if SINGLE in gone else []
    first = [name for name in names if name != last]
    staging.commit([DIGESTS], first, [last], retire=retire, remove=gone)
    # Of a file that could not be deleted it stays known that it was one of ours.
    gone = [name for name in gone if not os.path.lexists(os.path.join(staging.directory, name))]
    rest = {name: old for name, old in found.items() if name not in gone}
    final = {**rest, **{name: [record] for name, record in records.items()}}
    if final != both:
        try:
            staging.write(DIGESTS, [to_bytes(final)])
            staging.commit([DIGESTS])
        except CheckpointError as error:  # the new files count; both records are right
            _LOG.warning("%s", error)


def _records(folder: str, replaced: Iterable[str]) -> dict[str, list[Record]]:
    """What the directory's own record says; one that cannot be read is replaced."""
    try:
        digests = read_digests(folder)
    except CheckpointError:
        return {}
    found = {} if digests is None else {name: list(of) for name, of in digests.files.items()}
    for name in replaced:
        if len(found.get(name, ())) > 1:  # left by a save that was interrupted
            found[name] = _agreeing(os.path.join(folder, name), found[name])
    return found


def _agreeing(path: str, records: list[Record]) -> list[Record]:
    """Those of several records that a file agrees with; all, if it agrees with none."""
    try:
        with open_checkpoint(path, verify=False) as table:
            size = table.files[0].size
            sums = {}
            for name, entry in table.entries.items():
                end, file = entry.offset + entry.nbytes, table.files[entry.file]
                sums[name] = crc32_of(file_range(file, entry.offset, end))
            start = min((entry.offset for entry in table.entries.values()), default=size)
            header = start, crc32(table.files[0].pread(0, start))
    except CheckpointError:
        return records
    found = [one for one in records if (one.size, one.tensors) == (size, sums)]
    return [one for one in found if one.header in (header, None)] or records


def _weights_there(folder: str) -> list[str]:
    """The names of the files that make up the safetensors checkpoint of a directory."""
    names = [name for name in (SINGLE, INDEX) if os.path.lexists(os.path.join(folder, name))]
    if INDEX in names:
        try:
            with open_index(os.path.join(folder, INDEX)) as table:
                names += [os.path.relpath(file.path, folder) for file in table.files]
        except (CheckpointError, MemoryError):
            pass  # a broken set: its index is replaced, its files are left
    return [name for name in names if os.path.dirname(name) == ""]


def _strays(folder: str, before: Sequence[str]) -> list[str]:
    """Parts of a set that no index names: of a save of ours that was ended before it had one."""
    if INDEX in before and SINGLE not in before and not any(map(_PART.fullmatch, before)):
        return []  # it cannot be read, and they may be its
    found = []
    for name, records in _records(folder, ()).items():
        if _PART.fullmatch(name) and name not in before:
            with contextlib.suppress(OSError):
                size = os.lstat(os.path.join(folder, name)).st_size
                found += [name] if size in [record.size for record in records] else []
    return found


def _stage_other(staging: Staging, name: str, pieces: Iterable[Any]) -> bool:
    """Writes another file beside the weights, unless the same is there already."""
    content = b"".join(pieces)
    try:
        with open(os.path.join(staging.directory, name), "rb") as file:
            if file.read(len(content) + 1) == content:
                return False
    except OSError:
        pass
    staging.write(name, [content])
    return True


class Sums:
    """The checksums of tensors that are written, computed in another thread meanwhile.

    Attributes:
        size: How many bytes of the file have passed.
    """

    def __init__(self, progress: Progress | None = None):
        self.size = 0
        self._tensors: dict[str, int] = {}
        self._header: tuple[int, int] | None = None
        self._progress = progress
        self._pool = ThreadPoolExecutor(1, "maxjax-crc")

    def of(self, one: Outgoing) -> Outgoing:
        """The tensor, whose pieces are summed when they are asked for."""

        def pieces() -> Iterator[memoryview]:
            crc = 0
            for piece in one.pieces():
                found = self._pool.submit(crc32, piece, crc)
                yield piece
                crc = found.result()  # before the next: not more pieces in memory than one
            self._tensors[one.name] = crc

        return replace(one, pieces=pieces)

    def passing(self, pieces: Iterable[Any]) -> Iterator[Any]:
        """The pieces of the file, counted; the first is all that stands before the tensors."""
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
        """Of the file, once all has passed."""
        return Record(self.size, dict(self._tensors), self._header)


def json_bytes(document: Any) -> bytes:
    """A JSON file as transformers writes it."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
