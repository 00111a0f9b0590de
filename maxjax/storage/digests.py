"""``maxjax_digests.json``: the checksums of the tensors in the files beside it.

safetensors, GGUF and orbax have no checksums of their own, so what maxjax writes has them in a
file more, which other programs leave alone. It says what the bytes were; it never makes a sound
file unreadable: what it says of a file of another size is of another file, and not looked at.

    {"version": 1, "algorithm": "crc32",
     "files": {"model.safetensors": [{"size": 123, "header": [72, "00c0ffee"],
                                      "tensors": {"w": "89abcdef"}}]}}

The header, if it is there, is that many bytes at the start of the file, which are looked at when
it is opened: the names and types of the tensors, the metadata. A file has a second record while
it is being replaced: there is the old one or the new one. The record of the file that makes a
checkpoint count, which is the index of a set, says in "beside" which files describe the weights,
and in "gone" which of the checkpoint before are not among them. Of a file of another program that
is being replaced a record lists only what tells it from the new one. An orbax checkpoint has one
record, of file "." and size 0, with sums of the arrays' values.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ..errors import (
    CheckpointAccessError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
)
from .checksums import stale
from .crc32 import crc32, crc32_of
from .entry import Checksum, TensorEntry
from .files import OpenFile, file_range
from .limits import Limits
from .save.beside import Description, sum_of
from .strict_json import collector_paused, load_json, require, shown, wrong
from .table import TensorTable

_LOG = logging.getLogger("maxjax")
NAME = "maxjax_digests.json"
# The key of a directory that is a checkpoint by itself.
DIRECTORY = "."
VERSION, ALGORITHM = 1, "crc32"
# What is there, and what each of several interrupted replacements would have put there.
MOST = 8
_CRC = re.compile("[0-9a-f]{8}")
# What is no plain name below the directory.
_OUTSIDE = re.compile(r"^/|^$|\\|\0|(^|/)\.")
_HINT = "The weights may be sound: delete this file, or read them with verify=False."


@dataclass(frozen=True, slots=True)
class Record:
    """What a file of ``size`` bytes has.

    Attributes:
        tensors: Name → CRC-32 of its bytes there.
        header: How many bytes stand before all tensors, and their CRC-32.
        beside: What describes the weights, if it is known.
    """

    size: int
    tensors: dict[str, int]
    header: tuple[int, int] | None = None
    beside: Description | None = None


@dataclass(frozen=True, slots=True)
class Digests:
    """The content of a ``maxjax_digests.json``: name of a file → its records.

    Example:
        >>> digests = Digests({"m.safetensors": (Record(9, {"w": 255}), Record(8, {"w": 1}))})
        >>> digests.of("m.safetensors", 9)
        {'w': (255,)}
        >>> parse(to_bytes(digests.files)) == digests
        True
    """

    files: dict[str, tuple[Record, ...]] = field(default_factory=dict)

    def of(self, file: str, size: int) -> dict[str, tuple[int, ...]]:
        """tensor → the sums it may have, of the records of a file that are of its size."""
        return _acceptable([one for one in self.files.get(file, ()) if one.size == size])


def to_bytes(files: Mapping[str, Sequence[Record]]) -> bytes:
    """The content of a ``maxjax_digests.json``: the same bytes for the same records.

    Example:
        >>> to_bytes({"m.gguf": [Record(9, {"w": 255})]})
        b'{"algorithm":"crc32","files":{"m.gguf":[{"size":9,"tensors":{"w":"000000ff"}}]},"version":1}'
    """
    listed = {name: list(map(_as_json, records)) for name, records in files.items()}
    document = {"version": VERSION, "algorithm": ALGORITHM, "files": listed}
    return json.dumps(document, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def _as_json(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {"size": record.size, "tensors": _hexadecimal(record.tensors)}
    if record.header is not None:
        found["header"] = [record.header[0], f"{record.header[1]:08x}"]
    if record.beside is not None:
        found["beside"] = _hexadecimal(record.beside.files)
        if record.beside.gone:
            found["gone"] = _hexadecimal(record.beside.gone)
    return found


def _hexadecimal(sums: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{crc:08x}" for name, crc in sums.items()}


def parse(
    source: bytes | str | os.PathLike[str],
    *,
    limits: Limits | None = None,
    name: str | None = None,
) -> Digests | None:
    """The digests of a file, or of bytes; None of a version or an algorithm that is not known.

    Raises:
        CheckpointFormatError: It is not what maxjax writes.
        CheckpointError: As for ``load_json``.
    """
    path = name or (NAME if isinstance(source, bytes) else os.fspath(source))
    try:
        document = load_json(source, limits=limits, name=name)
    except (CheckpointMissingError, CheckpointAccessError):
        raise
    except CheckpointError as error:
        where = {"offset": error.offset, "expected": error.expected, "found": error.found}
        raise type(error)(error.problem, path=path, **where, hint=_HINT) from None
    require(isinstance(document, dict), path, "the document", "an object", document, hint=_HINT)
    version, algorithm = document.get("version"), document.get("algorithm")
    if version != VERSION or algorithm != ALGORITHM or isinstance(version, bool):
        what = f"version {version!r} with {algorithm!r}"
        _LOG.info("%s: %s is not known, so nothing is compared with it", path, what[:200])
        return None
    files = document.get("files")
    require(isinstance(files, dict), path, "files", "an object", files, hint=_HINT)
    return Digests({file: tuple(_records(path, file, of)) for file, of in files.items()})


def read_digests(
    directory: str | os.PathLike[str],
    *,
    limits: Limits | None = None,
) -> Digests | None:
    """Those of the files in a directory; None where there are none that can be read.

    Raises:
        CheckpointFormatError, CheckpointLimitError: As for ``parse``.
    """
    path = os.path.join(directory, NAME)
    try:
        return parse(path, limits=limits)
    except CheckpointMissingError:
        return None
    except CheckpointAccessError as error:
        _LOG.warning("%s; nothing is compared with it", error)
        return None


def attach(
    table: TensorTable,
    *,
    limits: Limits | None = None,
    compare: bool = True,
) -> list[Record]:
    """Gives the tensors of a table the checksums that lie beside its files.

    Those that have one of their own keep it, and what is listed with another size has none. The
    records are given that say what describes the weights: of the file that makes the checkpoint
    count, ``table.root``, or what those of all files agree in. With ``compare=False`` nothing else is
    done.

    Raises:
        CheckpointCorruptError: The header of a file is not the one that was written.
        CheckpointFormatError, CheckpointLimitError: As for ``parse``.
    """
    found: dict[str, Digests | None] = {}
    said: list[Record] = []
    # Of each file: tensor → the sums it may have.
    sums: list[dict[str, tuple[int, ...]]] = []
    for number, file in enumerate(table.files):
        folder, name = os.path.split(file.path)
        if folder not in found:
            found[folder] = read_digests(folder, limits=limits)
        digests = found[folder]
        records = [] if digests is None else digests.files.get(name, ())
        fitting = [record for record in records if record.size == file.size]
        if records and not fitting:
            _LOG.info("%s: its size is not that of %s: nothing is compared", file.path, NAME)
        fitting = _with_header(file, fitting, os.path.join(folder, NAME))
        fitting = told_apart(file, table.entries.values(), number, fitting)
        sums.append(_acceptable(fitting))
        said = [one for one in said if one.beside in [other.beside for other in fitting]]
        said = said if number else fitting
    if table.indexes and table.root is not None:
        folder = os.path.dirname(table.root.path)
        said = fitting_index(table.root, found.get(folder) or read_digests(folder, limits=limits))
    if not compare or not any(sums):
        return said
    paths = [os.path.join(os.path.dirname(file.path), NAME) for file in table.files]
    with collector_paused():
        for name, one in table.entries.items():
            crcs = sums[one.file].get(name) if one.checksum is None else None
            if crcs:
                path = paths[one.file]
                checksum = Checksum(name, one.offset, one.nbytes, crcs[0], crcs[1:], path)
                # Not dataclasses.replace: there may be 100,000.
                table.entries[name] = TensorEntry(
                    name, one.dtype, one.shape, one.file, one.offset, one.nbytes,
                    one.coding, one.encoding, checksum,
                )  # fmt: skip
    return said


def tell_unsummed(table: TensorTable) -> None:
    """Warns, once for a file, of tensors that have no checksum, though all were to be compared."""
    missing: dict[str, int] = {}
    for entry in table.entries.values():
        if entry.checksum is None and entry.nbytes and not _has_own(entry):
            path = table.files[entry.file].path
            missing[path] = missing.get(path, 0) + 1
    for path, count in missing.items():
        _warn_unsummed(path, count, len(table.entries))


def _has_own(entry: TensorEntry) -> bool:
    # What an archive has compressed is compared with its sum whenever it is read.
    return entry.coding is not None and not entry.coding.is_divisible


@lru_cache(1024)
def _warn_unsummed(path: str, count: int, of: int) -> None:
    _LOG.warning(
        "%s: verify=True, but there are no checksums of %s to compare with: nobody would see if "
        "it were damaged. `maxjax convert` writes a copy that has them",
        path,
        "its tensors" if count == of else f"{count} of the {of} tensors",
    )


def _acceptable(records: Sequence[Record]) -> dict[str, tuple[int, ...]]:
    """tensor → the sums it may have; of one that a record does not list it may be any."""
    found: dict[str, tuple[int, ...]] = {}
    for name in records[0].tensors if records else ():
        if all(name in record.tensors for record in records):
            found[name] = tuple(dict.fromkeys(record.tensors[name] for record in records))
    return found


def told_apart(
    file: OpenFile, entries: Iterable[TensorEntry], number: int, records: Sequence[Record]
) -> list[Record]:
    """Those of several records of a file that its bytes agree with.

    The smallest tensor is read in which they differ, if there are several: after a save that was
    interrupted, or in the middle of one.

    Args:
        entries: Of the tensors, of which those of file ``number`` are looked at.
    """
    records = list(records)
    while len(records) > 1:
        sizes = {
            entry.name: entry
            for entry in entries
            if entry.file == number
            and len({r.tensors[entry.name] for r in records if entry.name in r.tensors}) > 1
        }
        if not sizes:
            break
        entry = min(sizes.values(), key=lambda entry: entry.nbytes)
        crc = crc32_of(file_range(file, entry.offset, entry.offset + entry.nbytes))
        kept = [record for record in records if record.tensors.get(entry.name, crc) == crc]
        if not kept:  # damaged: told when it is read
            break
        records = kept
    return records


def fitting_index(index: OpenFile, digests: Digests | None) -> list[Record]:
    """The records of the index of a set that are of its content."""
    records = () if digests is None else digests.files.get(os.path.basename(index.path), ())
    crc = sum_of(index) if records else 0
    return [one for one in records if one.header == (index.size, crc)]


def _with_header(file: OpenFile, records: Sequence[Record], path: str) -> list[Record]:
    """Those of a file's records whose header it has; those that say nothing of it are taken too."""
    found, others = [], []
    for record in records:
        nbytes, wanted = record.header or (0, 0)
        if nbytes > file.size:
            raise wrong(path, "a header", f"at most {file.size} bytes", nbytes, hint=_HINT)
        crc = crc32(file.pread(0, nbytes)) if nbytes else 0
        if crc == wanted:
            found.append(record)
        else:
            others.append((f"{wanted:08x}", f"{crc:08x}"))
    if records and not found:
        raise CheckpointCorruptError(
            "the header is not the one that was written",
            path=file.path,
            expected=f"CRC-32 {' or '.join(wanted for wanted, _ in others)}",
            found=others[0][1],
            hint=stale(path),
        )
    return found


def _records(path: str, file: str, records: Any) -> Iterable[Record]:
    where = f"files[{file!r}]"
    is_list = isinstance(records, list) and 0 < len(records) <= MOST
    require(is_list, path, where, f"a list of 1 to {MOST} records", records, hint=_HINT)
    for record in records:
        require(isinstance(record, dict), path, where, "a list of objects", record, hint=_HINT)
        size, tensors = record.get("size"), record.get("tensors")
        is_size = isinstance(size, int) and not isinstance(size, bool) and size >= 0
        require(is_size, path, f"{where}: size", "a number of bytes", size, hint=_HINT)
        require(
            isinstance(tensors, dict), path, f"{where}: tensors", "an object", tensors, hint=_HINT
        )
        header = _header(path, f"{where}: header", record.get("header"))
        yield Record(size, _sums(path, tensors), header, _beside(path, where, record))


def _sums(path: str, found: Mapping[str, Any]) -> dict[str, int]:
    return {name: _crc(path, name, crc) for name, crc in found.items()}


def _beside(path: str, where: str, record: Mapping[str, Any]) -> Description | None:
    found, gone = record.get("beside"), record.get("gone", {})
    if found is None:
        return None
    for key, value in ("beside", found), ("gone", gone):
        require(isinstance(value, dict), path, f"{where}: {key}", "an object", value, hint=_HINT)
        for name in value:
            is_below = not _OUTSIDE.search(name)
            require(is_below, path, f"{where}: {key}", "names in the directory", name, hint=_HINT)
    return Description(_sums(path, found), _sums(path, gone))


def _header(path: str, where: str, found: Any) -> tuple[int, int] | None:
    if found is None:
        return None
    is_pair = isinstance(found, list) and len(found) == 2 and isinstance(found[1], str)
    if is_pair and type(found[0]) is int and found[0] >= 0 and _CRC.fullmatch(found[1]):
        return found[0], int(found[1], 16)
    raise wrong(path, where, "a number of bytes and eight hexadecimal digits", found, hint=_HINT)


def _crc(path: str, name: str, crc: Any) -> int:
    if isinstance(crc, str) and _CRC.fullmatch(crc):
        return int(crc, 16)
    raise CheckpointFormatError(
        "not a checksum",
        path=path,
        tensor=name,
        expected="eight hexadecimal digits",
        found=shown(crc),
        hint=_HINT,
    )
